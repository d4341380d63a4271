"""The stop flag: seen by every process that was forked after it was made."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from celery_lease.stopping import StopFlag
from tests.support.waiting import eventually, never


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    """A flag of this process."""
    flag = StopFlag()
    yield flag
    flag.close()


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], int]], int]]:
    """Fork a child that runs a function and leaves with what it returns; give its pid."""
    children: list[int] = []

    def start(run: Callable[[], int]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = run()
            finally:
                os._exit(code)
        children.append(pid)
        return pid

    yield start
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def exit_code(pid: int) -> int:
    """Return the exit code of a child, which has ten seconds."""
    ended = eventually(lambda: (p := os.waitpid(pid, os.WNOHANG)) != (0, 0) and p)
    assert ended
    return os.waitstatus_to_exitcode(ended[1])


def looking(flag: StopFlag) -> int:
    """Look until it is set, as a body does; 0 when it was not set at first."""
    if flag.is_set():
        return 1
    eventually(flag.is_set)
    return 0


def test_every_child_sees_it_and_it_stays(
    flag: StopFlag, fork: Callable[[Callable[[], int]], int]
) -> None:
    """Level-triggered: nobody takes it away from another, and who comes late sees it too."""
    children = [fork(lambda: looking(flag)) for _ in range(3)]
    never(lambda: os.waitpid(-1, os.WNOHANG) != (0, 0), during=0.2)

    flag.set()

    assert [exit_code(pid) for pid in children] == [0, 0, 0]
    assert flag.is_set()
    assert exit_code(fork(lambda: 0 if flag.is_set() else 1)) == 0


def test_it_can_be_set_from_a_signal_handler_any_number_of_times(
    flag: StopFlag, fork: Callable[[Callable[[], int]], int]
) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: flag.set())
    try:
        for _ in range(100_000 // 100):
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert exit_code(fork(lambda: 0 if flag.is_set() else 1)) == 0


def test_a_thread_of_a_child_waits_for_it(
    flag: StopFlag, fork: Callable[[Callable[[], int]], int]
) -> None:
    child = fork(lambda: 0 if flag.wait() else 1)
    never(lambda: os.waitpid(child, os.WNOHANG) != (0, 0), during=0.2)

    flag.set()

    assert exit_code(child) == 0


def test_it_works_above_the_descriptors_that_select_can_name(
    flag: StopFlag, fork: Callable[[Callable[[], int]], int]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"not so many descriptors can be had here: {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        low = flag._reading
        flag._reading = fcntl.fcntl(low, fcntl.F_DUPFD, 2000)
        os.close(low)

        child = fork(lambda: looking(flag))
        flag.set()

        assert exit_code(child) in {0, 1}
    finally:
        flag.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_its_end_is_no_stop(flag: StopFlag) -> None:
    """A child that is told nothing waits for nothing."""
    ended: list[bool] = []
    flag.close()

    thread = threading.Thread(target=lambda: ended.append(flag.wait()))
    thread.start()
    thread.join(5)

    assert ended == [False]
    flag.set()
