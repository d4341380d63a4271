"""What the process of a stalled body does: end the attempt, interrupt it, give the job on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_lease import events
from celery_lease.events import Event
from celery_lease.exceptions import StoreUnavailable
from celery_lease.interrupt import Interruption
from celery_lease.records import Vanished
from celery_lease.runtime import Runtime
from celery_lease.settings import load
from celery_lease.states import JobState, LossCause
from celery_lease.store import transitions
from tests.runtime.fakes import Clock, make_lease
from tests.support.waiting import eventually

AWAY = StoreUnavailable("postgresql://x", "gone")
SETTINGS = load(lambda _, default: default)
GIVEN_ON = Vanished("job", 1, LossCause.STALLED, JobState.QUEUED, 0.0, None, "w", "owner")


class Seen(Interruption):
    """A body whose stack is known, and which says when it is struck."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__("job", 1, is_wanted=True)
        self._steps = steps

    def stack(self) -> str:
        return "in a_hung_function"

    def strike(self, reason: str) -> None:
        self._steps.append(f"struck: {reason}")


class Stage:
    """A runtime whose store is a script; ``steps`` has what happened, in its order."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[], Vanished | None] = lambda: GIVEN_ON
        self.runtime = Runtime(
            store=None,  # type: ignore[arg-type]  # every transition is replaced
            settings=SETTINGS,
            worker="w",
            on_vanished=lambda vanished: self.steps.append(f"sent: {vanished.job_id}"),
            monotonic=clock,
            sleep=clock.move,
        )
        self.lease = make_lease(clock, seconds=30, stall_timeout_seconds=5)
        self.lease._interruption = Seen(self.steps)
        monkeypatch.setattr(transitions, "lost", self._lost)

    def _lost(self, store: object, held: object, **facts: Any) -> Vanished | None:
        self.asked.append(facts)
        answer = self.answer()
        self.steps.append("written" if answer else "too late")
        return answer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stage(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(clock, monkeypatch)


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    found: list[Event] = []
    events.subscribe(found.append)
    yield found
    events.unsubscribe(found.append)


def test_the_attempt_ends_with_its_stack_before_the_body_hears_of_it(
    stage: Stage, clock: Clock, heard: list[Event]
) -> None:
    clock.move(6)

    stage.runtime._end_stalled(stage.lease)

    assert stage.steps == [
        "written",
        "struck: the attempt is stalled: no progress for 6.0 s",
        "sent: job",
    ]
    [facts] = stage.asked
    assert facts["cause"] is LossCause.STALLED
    assert (facts["reason"], facts["trace"]) == ("no progress for 6.0 s", "in a_hung_function")
    assert stage.lease.lost
    [event] = [one for one in heard if one.name == events.ATTEMPT_STALLED]
    assert (event.fields["job_id"], event.fields["silence_seconds"]) == ("job", 6.0)


def test_a_store_that_comes_back_in_time_gets_it(stage: Stage, clock: Clock) -> None:
    outages = iter(range(3))

    def answer() -> Vanished:
        for _ in outages:
            raise AWAY
        return GIVEN_ON

    stage.answer = answer
    stage.runtime._end_stalled(stage.lease)

    assert len(stage.asked) == 4
    assert stage.steps[0] == "written"
    assert stage.steps[-1] == "sent: job"


def test_a_store_that_stays_away_lets_the_lease_run_out_and_the_body_is_interrupted(
    stage: Stage, clock: Clock
) -> None:
    def answer() -> Vanished:
        raise AWAY

    stage.answer = answer
    stage.runtime._end_stalled(stage.lease)

    assert clock() >= stage.lease.surely_ended_at
    [step] = stage.steps
    assert step.startswith("struck")


def test_an_attempt_that_had_ended_is_interrupted_and_nothing_is_sent(stage: Stage) -> None:
    stage.answer = lambda: None

    stage.runtime._end_stalled(stage.lease)

    assert stage.steps[0] == "too late"
    assert stage.steps[1].startswith("struck")
    assert len(stage.steps) == 2


def test_an_error_of_ours_ends_no_thread_with_the_body_still_running(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> Vanished:
        raise RuntimeError("a bug")

    stage.answer = answer
    stage.runtime._end_stalled(stage.lease)

    assert "a bug" in caplog.text
    assert [step.partition(":")[0] for step in stage.steps] == ["struck"]


def test_the_heartbeat_does_not_wait_for_the_store(stage: Stage, clock: Clock) -> None:
    answered = threading.Event()
    in_threads: list[str] = []

    def answer() -> Vanished:
        in_threads.append(threading.current_thread().name)
        answered.wait(10)
        return GIVEN_ON

    stage.answer = answer
    stage.runtime.heartbeat._start = lambda: None  # type: ignore[method-assign]
    stage.runtime.heartbeat.add(stage.lease)
    clock.move(5)

    stage.runtime.heartbeat.look_for_stalls()

    eventually(lambda: in_threads == ["celery-lease-stall"])
    assert stage.steps == []
    answered.set()
    eventually(lambda: "sent: job" in stage.steps)
