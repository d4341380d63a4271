"""The main process renews for children that live, and for nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_lease.claims import Answer, Claim
from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Renewal, Renewed
from celery_lease.states import AttemptState
from celery_lease.worker_heartbeat import WorkerHeartbeat
from tests.runtime.fakes import Clock
from tests.support.waiting import eventually

SLEEPS = "import time; time.sleep(60)"
COMPUTES = "while True: pass"
HOLDS_THE_GIL = """
import ctypes, threading, time

def waits_for_it():
    while True:
        time.sleep(0.01)

for _ in range(3):
    threading.Thread(target=waits_for_it, daemon=True).start()
library = ctypes.PyDLL(None)
library.prctl(15, b"asleep")  # PR_SET_NAME: from here on it does nothing
library.sleep(60)
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Main:
    """A main process whose store answers what a test says."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.asked: list[list[tuple[str, int, str]]] = []
        self.said: list[tuple[Answer, int]] = []
        self.lost: dict[tuple[str, int], AttemptState | None] = {}
        self.unanswered: set[tuple[str, int]] = set()
        self.is_away = False
        self.heartbeat = WorkerHeartbeat(
            renew=self._renew,
            answer=lambda answer, pid: self.said.append((answer, pid)),
            worker="celery@test",
            monotonic=clock,
        )
        # Its thread would beat by itself: these tests do.
        self.heartbeat._stopping = True

    def _renew(self, renewals: Sequence[Renewal]) -> Renewed:
        leases = [one.lease for one in renewals]
        self.asked.append([(one.job_id, one.fencing_token, one.owner) for one in leases])
        if self.is_away:
            raise StoreUnavailable("postgresql://…", "away")
        keys = {(one.job_id, one.fencing_token) for one in leases}
        renewed = keys - self.lost.keys() - self.unanswered
        return Renewed(frozenset(renewed), self.lost, frozenset(self.unanswered))


@pytest.fixture
def main(clock: Clock) -> Main:
    return Main(clock)


@pytest.fixture
def run() -> Iterator[Any]:
    started = []

    def start(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", code])
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def claim(pid: int, job_id: str = "job", token: int = 1) -> Claim:
    return Claim(job_id, token, f"host:{pid}:x", pid, 30.0, 10.0, from_worker=True)


def test_all_leases_of_a_worker_are_renewed_in_one_statement(main: Main) -> None:
    pid = os.getpid()
    main.heartbeat.watch(claim(pid, "one"))
    main.heartbeat.watch(claim(pid, "two", 7))

    main.heartbeat.beat_once()

    owner = f"host:{pid}:x"
    assert main.asked == [[("one", 1, owner), ("two", 7, owner)]]
    assert [(a.job_id, a.fencing_token, a.sent_at) for a, _ in main.said] == [
        ("one", 1, 1000.0),
        ("two", 7, 1000.0),
    ]
    assert {to for _, to in main.said} == {pid}


def test_a_child_that_is_told_nothing_asks_and_is_told_of_the_last_renewal(
    main: Main, clock: Clock
) -> None:
    word = claim(os.getpid())

    first = main.heartbeat.watch(word)
    main.heartbeat.beat_once()
    clock.move(3)

    assert first is None
    assert main.heartbeat.watch(word) == 1000.0


def test_a_child_that_sleeps_lives_by_its_word(main: Main, clock: Clock, run: Any) -> None:
    word = claim(run(SLEEPS))
    main.heartbeat.watch(word)
    main.heartbeat.beat_once()

    for _ in range(3):
        clock.move(10)
        main.heartbeat.watch(word)
        main.heartbeat.beat_once()

    assert len(main.asked) == 4


def test_a_child_that_says_nothing_and_computes_lives(main: Main, clock: Clock, run: Any) -> None:
    pid = run(COMPUTES)
    main.heartbeat.watch(claim(pid))
    main.heartbeat.beat_once()

    for beats in (2, 3, 4):
        before = processor_ticks(pid)
        # More than a hundredth of the ten seconds.
        eventually(lambda before=before: processor_ticks(pid) > before + 12)
        clock.move(10)
        main.heartbeat.beat_once()

        assert len(main.asked) == beats


def test_a_child_that_says_nothing_and_does_nothing_is_not_renewed(
    main: Main, clock: Clock, run: Any
) -> None:
    """Frozen by its control group it looks like that: its state does not say it."""
    pid = run(SLEEPS)
    main.heartbeat.watch(claim(pid))
    main.heartbeat.beat_once()
    eventually(lambda: state(pid) == "S")
    clock.move(10)
    main.heartbeat.beat_once()
    asked = len(main.asked)

    for _ in range(5):
        clock.move(10)
        main.heartbeat.beat_once()

    # Its last word counts for one and a half heartbeats.
    assert asked == 2
    assert len(main.asked) == asked


def test_threads_that_wait_for_pythons_lock_are_no_computation(run: Any) -> None:
    """They look again and again whether it is free, which takes processor time, too."""
    main = Main(time.monotonic)
    pid = run(HOLDS_THE_GIL)
    main.heartbeat.watch(replace(claim(pid), heartbeat_seconds=0.01))
    eventually(lambda: Path(f"/proc/{pid}/comm").read_text() == "asleep\n", timeout=20)
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 4
    main.heartbeat.beat_once()

    for _ in range(2):
        before = processor_ticks(pid)
        eventually(lambda before=before: processor_ticks(pid) > before, timeout=30)
        main.heartbeat.beat_once()

    assert main.asked == []


def test_a_stopped_child_is_not_renewed_whatever_it_said_before(
    main: Main, clock: Clock, run: Any
) -> None:
    pid = run(COMPUTES)
    word = claim(pid)
    main.heartbeat.watch(word)
    main.heartbeat.beat_once()
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state(pid) == "T")

    clock.move(1)
    main.heartbeat.beat_once()

    assert len(main.asked) == 1
    os.kill(pid, signal.SIGCONT)
    before = processor_ticks(pid)
    eventually(lambda: processor_ticks(pid) > before + 2)
    main.heartbeat.beat_once()
    assert len(main.asked) == 2


def test_a_dead_child_is_not_renewed(main: Main, run: Any) -> None:
    pid = run(SLEEPS)
    main.heartbeat.watch(claim(pid))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: state(pid) == "Z")

    main.heartbeat.beat_once()

    assert main.asked == []


def test_what_is_lost_is_said_once_and_renewed_no_more(main: Main) -> None:
    main.heartbeat.watch(claim(os.getpid()))
    main.lost = {("job", 1): AttemptState.CANCELLED}

    main.heartbeat.beat_once()
    main.heartbeat.beat_once()

    assert len(main.asked) == 1
    assert [answer.lost for answer, _ in main.said] == ["the attempt is cancelled"]


def test_what_is_not_answered_is_asked_for_again(main: Main) -> None:
    main.heartbeat.watch(claim(os.getpid()))
    main.unanswered = {("job", 1)}

    main.heartbeat.beat_once()
    main.heartbeat.beat_once()

    assert len(main.asked) == 2
    assert main.said == []


def test_an_outage_of_the_store_is_no_word_to_the_child(main: Main) -> None:
    word = claim(os.getpid())
    main.heartbeat.watch(word)
    main.is_away = True

    main.heartbeat.beat_once()

    assert main.said == []
    assert main.heartbeat.watch(word) is None


def test_what_is_forgotten_is_renewed_no_more(main: Main) -> None:
    main.heartbeat.watch(claim(os.getpid()))
    main.heartbeat.forget("job", 1)

    main.heartbeat.beat_once()

    assert main.asked == []


def test_its_thread_beats_by_itself_and_ends(main: Main) -> None:
    said: list[Answer] = []
    heartbeat = WorkerHeartbeat(
        renew=main._renew,
        answer=lambda answer, _: said.append(answer),
        worker="celery@test",
    )
    pid = os.getpid()
    quick = Claim("job", 1, "host:1:x", pid, 0.6, 0.2, from_worker=True)

    began = time.monotonic()
    heartbeat.watch(quick)

    def beats() -> bool:
        heartbeat.watch(quick)
        return len(said) >= 4

    eventually(beats)
    heartbeat.stop()
    assert heartbeat._thread is not None
    assert not heartbeat._thread.is_alive()
    # Not in a tight loop: one after half an interval, then one an interval.
    assert len(said) <= 1 + (time.monotonic() - began) / 0.2


def state(pid: int) -> str:
    return fields(pid)[0]


def processor_ticks(pid: int) -> int:
    return int(fields(pid)[11]) + int(fields(pid)[12])


def fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
