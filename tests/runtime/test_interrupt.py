"""Interrupting a body: one shot, only while it runs, whatever thread it runs in."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_lease import interrupt
from celery_lease.exceptions import LeaseLost
from celery_lease.interrupt import Interruption, here

ROUNDS = 500

#: Where a body may run: the main thread (prefork, solo), or another one (threads).
Run = Callable[[Callable[[], Any]], Any]


def in_main_thread(call: Callable[[], Any]) -> Any:
    return call()


def in_other_thread(call: Callable[[], Any]) -> Any:
    """Run a call in a thread; what it raises is raised here."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results[0]


@pytest.fixture(params=[in_main_thread, in_other_thread])
def run(request: pytest.FixtureRequest) -> Run:
    where: Run = request.param
    return where


@pytest.fixture
def after() -> Iterator[Callable[[float, Callable[[], None]], None]]:
    """Call something in another thread after some seconds."""
    timers: list[threading.Timer] = []

    def start(seconds: float, call: Callable[[], None]) -> None:
        timers.append(threading.Timer(seconds, call))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join()


def make(*, is_wanted: bool = True) -> Interruption:
    return here("job", 3, is_wanted=is_wanted)


def spin(seconds: float = 5.0) -> str:
    """Run Python code that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))
    return "done"


# --- one body -----------------------------------------------------------------------------------


def test_a_body_that_is_left_alone_returns_what_it_has(run: Run) -> None:
    assert run(lambda: make().run(lambda: 7)) == 7


def test_a_running_body_is_interrupted_and_told_why(run: Run, after: Any) -> None:
    def job() -> None:
        interruption = make()
        after(0.05, lambda: interruption.strike("the attempt is expired"))
        interruption.run(spin)

    started = time.monotonic()
    with pytest.raises(LeaseLost, match="lease 3 of job job is lost: the attempt is expired"):
        run(job)

    assert time.monotonic() - started < 2


def test_in_the_main_thread_a_wait_ends_at_once(after: Any) -> None:
    for wait in (time.sleep, lambda seconds: threading.Event().wait(seconds)):
        interruption = make()
        after(0.05, lambda: interruption.strike("lost"))  # noqa: B023 - called in this round
        started = time.monotonic()

        with pytest.raises(LeaseLost):
            interruption.run(lambda: wait(10))  # noqa: B023 - same

        assert time.monotonic() - started < 2


def test_a_body_lost_before_it_began_does_not_begin(run: Run) -> None:
    began: list[int] = []

    def job() -> None:
        interruption = make()
        interruption.strike("lost")
        interruption.run(lambda: began.append(1))

    with pytest.raises(LeaseLost):
        run(job)

    assert began == []


def test_it_strikes_once_and_a_body_that_swallows_it_goes_on(run: Run, after: Any) -> None:
    struck: list[LeaseLost] = []

    def body(interruption: Interruption) -> str:
        try:
            spin()
        except LeaseLost as error:
            struck.append(error)
        interruption.strike("again")
        # Nor after a commit of ours.
        interruption.suspend()
        interruption.resume()
        return spin(0.1)

    def job() -> str:
        interruption = make()
        after(0.05, lambda: interruption.strike("lost"))
        return interruption.run(lambda: body(interruption))

    assert run(job) == "done"
    assert [error.reason for error in struck] == ["lost"]


def test_except_exception_does_not_swallow_it(run: Run, after: Any) -> None:
    def body() -> str:
        try:
            return spin()
        except Exception:
            return "swallowed"

    def job() -> str:
        interruption = make()
        after(0.05, lambda: interruption.strike("lost"))
        return interruption.run(body)

    with pytest.raises(LeaseLost):
        run(job)


def test_what_comes_after_the_end_of_the_body_strikes_nothing(run: Run) -> None:
    def job() -> list[str]:
        interruption = make()
        said = [interruption.run(lambda: "body")]
        other = threading.Thread(target=lambda: interruption.strike("late"))
        other.start()
        other.join()
        said.append(spin(0.05))
        said.append(make().run(lambda: spin(0.05)))
        return said

    assert run(job) == ["body", "done", "done"]


def test_without_leave_to_interrupt_the_body_goes_on(run: Run, after: Any) -> None:
    def job() -> str:
        interruption = make(is_wanted=False)
        after(0.02, lambda: interruption.strike("lost"))
        return interruption.run(lambda: spin(0.2))

    assert run(job) == "done"


def test_a_body_that_raised_is_disarmed_too(run: Run) -> None:
    def job() -> str:
        interruption = make()
        with pytest.raises(ValueError, match="wrong"):
            interruption.run(lambda: int("wrong"))
        interruption.strike("late")
        return spin(0.05)

    assert run(job) == "done"


def test_a_time_limit_that_strikes_the_very_end_of_a_body_leaves_it_disarmed(run: Run) -> None:
    def job() -> str:
        interruption = make()
        suspend = interruption.suspend
        calls: list[int] = []

        def limited() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise TimeoutError
            suspend()

        interruption.suspend = limited  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            interruption.run(lambda: None)
        interruption.strike("late")
        return spin(0.05)

    assert run(job) == "done"


# --- suspended ----------------------------------------------------------------------------------


def test_a_commit_in_the_middle_of_the_body_is_not_interrupted_and_what_follows_is(
    run: Run,
) -> None:
    steps: list[str] = []

    def body(interruption: Interruption) -> None:
        interruption.suspend()
        other = threading.Thread(target=lambda: interruption.strike("lost"))
        other.start()
        other.join()
        steps.append(spin(0.05))
        interruption.resume()
        steps.append("after")

    def job() -> None:
        interruption = make()
        interruption.run(lambda: body(interruption))

    with pytest.raises(LeaseLost):
        run(job)

    assert steps == ["done"]


# --- the stack ----------------------------------------------------------------------------------


def a_name_to_be_found(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait(10)


def test_the_stack_names_what_the_body_does() -> None:
    entered, leave = threading.Event(), threading.Event()
    made: list[Interruption] = []

    def job() -> None:
        made.append(make())
        made[0].run(lambda: a_name_to_be_found(entered, leave))

    thread = threading.Thread(target=job)
    thread.start()
    entered.wait(10)
    # Entered, and not yet in the wait: the frame is there either way.
    stack = made[0].stack()
    leave.set()
    thread.join()

    assert "in a_name_to_be_found" in stack
    assert made[0].stack() == ""


# --- greenlets ----------------------------------------------------------------------------------


def in_hub(call: Callable[[Any], Any]) -> Any:
    """Run a call with gevent in a thread of its own, whose hub is gone afterwards."""
    gevent = pytest.importorskip("gevent")

    def target() -> Any:
        try:
            return call(gevent)
        finally:
            gevent.get_hub().destroy(destroy_loop=True)

    return in_other_thread(target)


def from_thread(call: Callable[[], object]) -> None:
    """Make a call in a native thread, and wait for it."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_greenlet_that_waits_is_interrupted_and_its_neighbour_is_not() -> None:
    def job(gevent: Any) -> list[Any]:
        made: list[Interruption] = []

        def body() -> str:
            made.append(make())
            try:
                return made[-1].run(lambda: gevent.sleep(0.5) or "slept")
            except LeaseLost as error:
                return str(error)

        pair = [gevent.spawn(body), gevent.spawn(body)]
        gevent.sleep(0.05)
        from_thread(lambda: made[0].strike("taken"))
        from_thread(lambda: made[0].strike("taken again"))
        gevent.joinall(pair, raise_error=True)
        return [greenlet.value for greenlet in pair]

    assert in_hub(job) == ["lease 3 of job job is lost: taken", "slept"]


def test_a_strike_that_the_hub_gets_after_the_end_of_the_body_hits_nobody() -> None:
    def job(gevent: Any) -> str:
        def body() -> str:
            interruption = make()
            # The hub does not run before the next wait, which is after the body.
            interruption.run(lambda: from_thread(lambda: interruption.strike("late")))
            gevent.sleep(0.05)
            return "went on"

        greenlet = gevent.spawn(body)
        greenlet.join()
        return str(greenlet.get())

    assert in_hub(job) == "went on"


def test_a_commit_inside_a_greenlet_is_over_before_it_strikes() -> None:
    def job(gevent: Any) -> list[str]:
        steps: list[str] = []

        def body(interruption: Interruption) -> None:
            interruption.suspend()
            from_thread(lambda: interruption.strike("lost"))
            gevent.sleep(0.05)
            steps.append("committed")
            interruption.resume()
            steps.append("went on")

        def run() -> None:
            interruption = make()
            with pytest.raises(LeaseLost):
                interruption.run(lambda: body(interruption))

        gevent.spawn(run).get()
        return steps

    assert in_hub(job) == ["committed"]


def test_the_stack_of_a_greenlet_is_its_own_and_of_a_busy_hub_that_which_runs() -> None:
    stacks: list[str] = []

    def job(gevent: Any) -> None:
        made: list[Interruption] = []

        def waits_here() -> None:
            gevent.sleep(1)

        def body() -> None:
            made.append(make())
            made[0].run(waits_here)

        def computes_here(thread: threading.Thread) -> None:
            while thread.is_alive():
                sum(range(1000))

        greenlet = gevent.spawn(body)
        gevent.sleep(0.05)
        thread = threading.Thread(target=lambda: stacks.append(made[0].stack()))
        thread.start()
        while thread.is_alive():
            gevent.sleep(0.01)
        thread = threading.Thread(target=lambda: stacks.append(made[0].stack()))
        thread.start()
        computes_here(thread)
        greenlet.kill()

    in_hub(job)

    assert "in waits_here" in stacks[0]
    assert "in waits_here" not in stacks[1]
    assert "in computes_here" in stacks[1]


def test_what_has_to_use_the_bodys_connections_is_run_by_its_hub() -> None:
    def job(gevent: Any) -> bool:
        made: list[Interruption] = []
        threads: list[int] = []
        greenlet = gevent.spawn(lambda: made.append(make()))
        greenlet.join()
        from_thread(lambda: made[0].run_beside(lambda: threads.append(threading.get_ident())))
        assert threads == []
        gevent.sleep(0.05)
        return threads == [threading.get_ident()]

    assert in_hub(job)


def test_a_green_thread_of_another_library_is_left_alone() -> None:
    # eventlet: a signal would hit whichever of them is running.
    greenlet = pytest.importorskip("greenlet")

    def body() -> str:
        interruption = make()
        from_thread(lambda: interruption.strike("lost"))
        return interruption.run(lambda: spin(0.05))

    assert greenlet.greenlet(body).switch() == "done"


# --- the signal ---------------------------------------------------------------------------------


@pytest.fixture
def no_listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of ours is installed yet; all real-time signals are as before afterwards."""
    numbers = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(interrupt, "_number", None)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("no_listener")
def test_a_handler_of_the_users_is_never_replaced(after: Any) -> None:
    calls: list[int] = []

    def theirs(number: int, frame: object) -> None:
        calls.append(number)

    first = signal.SIGRTMIN
    signal.signal(first, theirs)
    make().run(lambda: None)
    ours = interrupt._number
    assert ours == first + 1

    # Later one is put over ours: the next body takes another.
    signal.signal(ours, theirs)
    interruption = make()
    after(0.05, lambda: interruption.strike("lost"))
    with pytest.raises(LeaseLost):
        interruption.run(spin)

    assert signal.getsignal(first) is theirs
    assert signal.getsignal(ours) is theirs
    assert interrupt._number == ours + 1
    assert calls == []


@pytest.mark.usefixtures("no_listener")
def test_a_handler_that_the_body_puts_over_ours_is_not_called(after: Any) -> None:
    calls: list[int] = []
    interruption = make()

    def body() -> str:
        assert interrupt._number is not None
        signal.signal(interrupt._number, lambda number, _: calls.append(number))
        after(0.02, lambda: interruption.strike("lost"))
        return spin(0.1)

    assert interruption.run(body) == "done"
    assert calls == []


@pytest.mark.usefixtures("no_listener")
def test_a_signal_that_comes_late_ends_no_process() -> None:
    make().run(lambda: None)
    number = interrupt._number
    assert number is not None

    signal.raise_signal(number)

    assert signal.getsignal(number) is interrupt._on_signal


# --- many ---------------------------------------------------------------------------------------


class Striker:
    """A thread that strikes each body some microseconds around its end."""

    def __init__(self, pause_seconds: Callable[[], float]) -> None:
        self._pause_seconds = pause_seconds
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._target: Interruption | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def aim(self, interruption: Interruption) -> None:
        self._target = interruption
        self._go.release()

    def wait(self) -> None:
        assert self._done.acquire(timeout=10)

    def close(self) -> None:
        self._target = None
        self._go.release()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._target is None:
                return
            end = time.perf_counter() + self._pause_seconds()
            while time.perf_counter() < end:
                pass
            self._target.strike("lost")
            self._done.release()


def test_none_escapes_and_none_hits_the_next_body(run: Run) -> None:
    """500 leases are lost at a random moment around the end of their body."""
    rng = random.Random(7)
    longest = 0.0006
    interval = sys.getswitchinterval()
    striker = Striker(lambda: rng.uniform(0.0, longest))
    ends: dict[str, int] = {"interrupted": 0, "returned": 0}

    def work(loops: int) -> int:
        total = 0
        for number in range(loops):
            total += number % 7
        return total

    def finish() -> int:
        # What comes after a body: a commit of ours, which nothing may strike.
        return work(500)

    def one() -> None:
        interruption = make()
        loops = rng.randrange(1, 6000)
        striker.aim(interruption)
        try:
            interruption.run(lambda: work(loops))
        except LeaseLost:
            ends["interrupted"] += 1
        else:
            ends["returned"] += 1
        finish()
        # The next body of this thread is under way while the first one's strike arrives.
        make().run(lambda: work(300))
        striker.wait()
        finish()

    def all_of_them() -> None:
        for _ in itertools.repeat(None, ROUNDS):
            one()

    sys.setswitchinterval(1e-5)
    try:
        run(all_of_them)
    finally:
        sys.setswitchinterval(interval)
        striker.close()

    assert sum(ends.values()) == ROUNDS
    # Both ends are met often, or this tests nothing.
    assert min(ends.values()) > ROUNDS / 20, ends


def test_a_thread_that_waits_in_c_is_struck_when_it_returns_or_not_at_all() -> None:
    def job() -> str:
        interruption = make()
        timer = threading.Timer(0.05, lambda: interruption.strike("lost"))
        timer.start()
        with contextlib.suppress(LeaseLost):
            # The call returns after the strike, with no bytecode of the body after it.
            interruption.run(lambda: time.sleep(0.2))
        timer.join()
        return spin(0.05)

    assert in_other_thread(job) == "done"
