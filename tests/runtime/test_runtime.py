"""One process's leases: patience at both ends, and what becomes of what came too late."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import pytest

from celery_lease.exceptions import LeaseLost, PayloadTooLarge, StoreUnavailable
from celery_lease.records import Accepted, Claimed, Held, Late, Refused, Renewed, Stale
from celery_lease.runtime import PerProcess, Runtime, owner_name
from celery_lease.settings import for_task, load
from celery_lease.states import LateOutcome, Refusal
from celery_lease.store import transitions
from celery_lease.worker import ForkGate
from tests.runtime.fakes import Clock, make_lease
from tests.support.waiting import eventually

AWAY = StoreUnavailable("postgresql://x", "gone")
SETTINGS = load(lambda _, default: default)
TASK = for_task(SETTINGS, {}, task="t")
WON = Claimed(Held("job", 1, "owner"), message_version=1, lost_count=0)
LATE = Late(LateOutcome.SUCCEEDED)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runtime(clock: Clock) -> Iterator[Runtime]:
    """A runtime whose waiting moves the clock."""
    made = Runtime(
        store=None,  # type: ignore[arg-type]  # every transition is replaced
        settings=SETTINGS,
        worker="w",
        monotonic=clock,
        sleep=clock.move,
    )
    made.heartbeat._start = lambda: None  # type: ignore[method-assign]
    yield made
    made.stop()


class Script:
    """Gives prepared answers, the last one for ever; an exception is raised."""

    def __init__(self, clock: Clock, *answers: Any, takes: float = 0.0) -> None:
        self._clock = clock
        self._answers = list(answers)
        self._takes = takes
        self.calls: list[float] = []

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls.append(self._clock())
        self._clock.move(self._takes)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def script(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    """Replace a transition of the store: ``script("claim", AWAY, WON)``."""

    def replace(name: str, *answers: Any, takes: float = 0.0) -> Script:
        made = Script(clock, *answers, takes=takes)
        monkeypatch.setattr(transitions, name, made)
        return made

    return replace


def claim(runtime: Runtime) -> Any:
    return runtime.claim(job_id="job", message_version=1, task_settings=TASK)


# --- the claim ----------------------------------------------------------------------------------


def test_a_won_claim_is_under_the_heartbeat(runtime: Runtime, script: Any) -> None:
    script("claim", WON)

    answer, lease = claim(runtime)

    assert answer == WON
    assert lease is not None
    assert ("job", 1) in runtime.heartbeat._leases


def test_a_refused_claim_gives_no_lease(runtime: Runtime, script: Any) -> None:
    script("claim", Refused(Refusal.RUNNING, None))

    answer, lease = claim(runtime)

    assert lease is None
    assert answer.refusal is Refusal.RUNNING


def test_a_claim_waits_through_a_short_outage_and_asks_with_one_nonce(
    runtime: Runtime, clock: Clock, monkeypatch: pytest.MonkeyPatch, script: Any
) -> None:
    nonces: list[str] = []
    began = clock()

    def ask(_: Any, delivery: Any, **__: Any) -> Any:
        nonces.append(delivery.nonce)
        if len(nonces) < 4:
            raise AWAY
        return WON

    monkeypatch.setattr(transitions, "claim", ask)
    script("renew", Renewed(frozenset({("job", 1)}), {}, frozenset()))

    _, lease = claim(runtime)

    assert len(nonces) == 4
    assert len(set(nonces)) == 1
    # Confirmed, since the first call may have won it without a reply; counted from that.
    assert lease.surely_ended_at == clock() + 30
    assert clock() > began


def test_a_repeated_claim_that_cannot_be_confirmed_counts_from_its_first_send(
    runtime: Runtime, clock: Clock, script: Any
) -> None:
    began = clock()
    script("claim", AWAY, AWAY, WON)
    script("renew", Renewed(frozenset(), {}, frozenset({("job", 1)})))

    _, lease = claim(runtime)

    assert lease.surely_ended_at == began + 30


def test_a_claim_gives_up_after_its_timeout(runtime: Runtime, clock: Clock, script: Any) -> None:
    began = clock()
    script("claim", AWAY)

    with pytest.raises(StoreUnavailable):
        claim(runtime)

    assert 30 <= clock() - began < 33
    assert runtime.heartbeat._leases == {}


def test_a_checkpoint_has_the_bound_of_a_result(runtime: Runtime, script: Any) -> None:
    script("claim", WON)
    _, lease = claim(runtime)

    with pytest.raises(PayloadTooLarge, match="lease_max_result_bytes"):
        lease.checkpoint("x" * runtime.settings.max_result_bytes)


# --- the end ------------------------------------------------------------------------------------


def test_the_lease_leaves_the_heartbeat_before_its_end_is_written(
    runtime: Runtime, script: Any
) -> None:
    script("claim", WON)
    _, lease = claim(runtime)
    seen: list[Any] = []

    def transition(_: Any) -> Any:
        seen.append(dict(runtime.heartbeat._leases))
        return Accepted()

    runtime.finish(lease, transition, reason=None, late=LATE)

    assert seen == [{}]


def test_an_end_takes_along_what_the_body_reported(runtime: Runtime, clock: Clock) -> None:
    lease = make_lease(clock)
    lease.checkpoint({"page": 9})
    partings: list[Any] = []

    runtime.finish(lease, lambda p: partings.append(p) or Accepted(), reason="x", late=LATE)

    assert (partings[0].reason, partings[0].checkpoint) == ("x", '{"page":9}')


def test_an_outcome_is_tried_until_the_lease_has_surely_ended(
    runtime: Runtime, clock: Clock
) -> None:
    lease = make_lease(clock, seconds=30)
    ends: list[float] = []

    def transition(_: Any) -> Any:
        ends.append(clock())
        raise AWAY

    with pytest.raises(StoreUnavailable):
        runtime.finish(lease, transition, reason=None, late=LATE)

    assert lease.surely_ended_at <= ends[-1] < lease.surely_ended_at + 3
    assert max(b - a for a, b in pairwise(ends)) < 3


def test_an_outcome_is_tried_a_while_even_if_the_lease_is_nearly_over(
    runtime: Runtime, clock: Clock
) -> None:
    lease = make_lease(clock, seconds=30)
    clock.move(29.9)
    answers = Script(clock, AWAY, AWAY, Accepted())

    assert runtime.finish(lease, answers, reason=None, late=LATE) == Accepted()


def test_a_stale_outcome_is_kept_on_its_own_attempt(
    runtime: Runtime, clock: Clock, script: Any
) -> None:
    rejected = script("reject", LATE)
    lease = make_lease(clock)

    answer = runtime.finish(lease, lambda _: Stale(None), reason=None, late=LATE)

    assert answer == Stale(None)
    assert len(rejected.calls) == 1


def test_a_stale_outcome_that_cannot_be_kept_harms_nobody(
    runtime: Runtime, clock: Clock, script: Any
) -> None:
    script("reject", AWAY)

    answer = runtime.finish(make_lease(clock), lambda _: Stale(None), reason=None, late=LATE)

    assert answer == Stale(None)


def test_a_body_that_goes_on_after_lease_lost_gets_nothing_accepted(
    runtime: Runtime, clock: Clock, script: Any
) -> None:
    lease = make_lease(clock, seconds=30)
    clock.move(30)
    with pytest.raises(LeaseLost):
        lease.check()
    lost = script("lost", None)
    script("reject", LATE)
    asked: list[Any] = []

    answer = runtime.finish(lease, lambda p: asked.append(p) or Accepted(), reason=None, late=LATE)

    assert isinstance(answer, Stale)
    assert asked == []
    assert len(lost.calls) == 1


def test_each_try_of_an_end_is_shielded(runtime: Runtime, clock: Clock) -> None:
    shields: list[str] = []

    def shielded(call: Callable[[], Any]) -> Any:
        shields.append("in")
        try:
            return call()
        finally:
            shields.append("out")

    answers = Script(clock, AWAY, Accepted(datetime.now(timezone.utc)))
    runtime.finish(make_lease(clock), answers, reason=None, late=LATE, shielded=shielded)

    assert shields == ["in", "out", "in", "out"]


def test_a_surrender_while_the_store_is_away_is_left_to_the_reaper(
    runtime: Runtime, clock: Clock, script: Any
) -> None:
    script("lost", AWAY)

    assert runtime.surrender(make_lease(clock), reason="x") is None


# --- processes ----------------------------------------------------------------------------------


def test_no_two_processes_and_no_two_runtimes_have_one_owner_name() -> None:
    # B042: hosts share names, and pids come back.
    assert owner_name() != owner_name()
    assert f":{os.getpid()}:" in owner_name()


def test_a_forked_child_makes_a_runtime_of_its_own() -> None:
    made: list[int] = []
    per_process: PerProcess = PerProcess(lambda: made.append(os.getpid()) or object())  # type: ignore[arg-type,return-value,func-returns-value]
    first = per_process.get()
    assert per_process.get() is first
    per_process._lock.acquire()  # as a thread of the parent may at the fork
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:
        fresh = per_process.existing() is None and per_process.get() is not first
        os.write(writer, b"y" if fresh else b"n")
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reader, 1) == b"y"
    per_process._lock.release()
    assert per_process.existing() is first
    os.close(reader)
    os.close(writer)


def test_a_fork_waits_for_the_step_of_the_gate() -> None:
    gate = ForkGate()
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def step() -> None:
        with gate():
            inside.set()
            leave.wait(5)
            order.append("step ended")

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(5)
    threading.Timer(0.2, leave.set).start()

    child = os.fork()
    if child == 0:
        # The thread that held the gate is not here: it must be open.
        opened = gate._lock.acquire(timeout=1)
        os._exit(0 if opened else 1)
    order.append("forked")
    _, status = os.waitpid(child, 0)
    thread.join()

    assert order == ["step ended", "forked"]
    assert os.waitstatus_to_exitcode(status) == 0
    with gate():
        pass


def test_a_gate_that_stays_closed_does_not_keep_a_fork_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery_lease.worker.FORK_WAIT_SECONDS", 0.2)
    gate = ForkGate()
    leave = threading.Event()
    entered = threading.Event()

    def step() -> None:
        with gate():
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=step)
    thread.start()
    entered.wait(5)

    child = os.fork()
    if child == 0:
        os._exit(0 if gate._lock.acquire(timeout=1) else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()

    assert os.waitstatus_to_exitcode(status) == 0
    eventually(lambda: not gate._lock.locked())
