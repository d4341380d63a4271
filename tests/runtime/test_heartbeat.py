"""The heartbeat: what it makes of each answer, one beat at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_lease.exceptions import LeaseLost, StoreUnavailable
from celery_lease.heartbeat import SETTLE_BATCH, Heartbeat
from celery_lease.interrupt import Interruption
from celery_lease.lease import REPORT_TRIES, Lease
from celery_lease.records import Renewal, Renewed
from celery_lease.states import AttemptState
from tests.runtime.fakes import Clock, make_lease, renewed
from tests.support.waiting import eventually

AWAY = StoreUnavailable("postgresql://x", "gone")


class FakeStore:
    """Answers as it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Renewal]] = []
        self.settled: list[list[Any]] = []
        self.answer: Callable[[Sequence[Renewal]], Renewed] = lambda renewals: renewed(
            *((r.lease.job_id, r.lease.fencing_token) for r in renewals)
        )
        self.settle_error: Exception | None = None

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        self.asked.append(list(renewals))
        return self.answer(renewals)

    def settle(self, outcomes: Sequence[Any]) -> int:
        if self.settle_error is not None:
            raise self.settle_error
        self.settled.append(list(outcomes))
        return len(outcomes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def heartbeat(
    clock: Clock, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Heartbeat]:
    """A heartbeat whose thread never starts: the test beats."""
    made = Heartbeat(
        renew=store.renew,
        settle=store.settle,
        worker="w",
        monotonic=clock,
        random=lambda: 0.5,
    )
    monkeypatch.setattr(made, "_start", lambda: None)
    yield made
    made.stop()


def test_all_leases_are_renewed_in_one_statement(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    leases = [make_lease(clock, f"job{n}") for n in range(5)]
    for lease in leases:
        heartbeat.add(lease)
    clock.move(10)

    heartbeat.beat_once()

    assert len(store.asked) == 1
    assert len(store.asked[0]) == 5
    assert {lease.surely_ended_at for lease in leases} == {clock() + 30}


def test_what_the_main_process_renews_is_left_to_it_until_its_word_is_overdue(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock, from_worker=True)
    lease.renewed_by_worker(clock())
    heartbeat.add(lease)
    clock.move(9)

    heartbeat.beat_once()

    assert store.asked == []
    # The next one is in time for its silence, after one and a half beats of ten seconds.
    assert heartbeat._next_beat == pytest.approx(clock() + 6)
    clock.move(6)
    heartbeat.beat_once()
    assert len(store.asked) == 1
    assert lease.surely_ended_at == clock() + 30
    assert heartbeat._next_beat == pytest.approx(clock() + 10)


def test_what_the_body_reports_is_written_although_the_main_process_renews(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock, from_worker=True)
    lease.renewed_by_worker(clock())
    heartbeat.add(lease)
    lease.checkpoint(7)

    heartbeat.beat_once()
    heartbeat.beat_once()

    assert [[one.checkpoint for one in asked] for asked in store.asked] == [["7"]]


def test_nothing_is_asked_without_a_lease(heartbeat: Heartbeat, store: FakeStore) -> None:
    heartbeat.beat_once()

    assert store.asked == []


def test_the_deadline_counts_from_the_send(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    sent_at = clock()

    def slow(renewals: Sequence[Renewal]) -> Renewed:
        clock.move(7)
        return renewed(("job", 1))

    store.answer = slow
    heartbeat.beat_once()

    assert lease.surely_ended_at == sent_at + 30


def test_progress_and_checkpoint_ride_along(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    lease.progress(3)
    lease.checkpoint([1])

    heartbeat.beat_once()
    heartbeat.beat_once()

    [[first], [second]] = store.asked
    assert (first.progress, first.checkpoint) == ('{"done":3,"total":null}', "[1]")
    assert (second.progress, second.checkpoint) == (None, None)


def test_a_lost_lease_is_told_to_its_body_and_not_asked_for_again(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    store.answer = lambda _: Renewed(frozenset(), {("job", 1): AttemptState.EXPIRED}, frozenset())

    heartbeat.beat_once()
    heartbeat.beat_once()

    assert lease.lost
    with pytest.raises(LeaseLost, match="the attempt is expired"):
        lease.check()
    assert len(store.asked) == 1


def test_a_loss_that_arrives_late_cannot_hit_the_next_job_of_the_process(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    first = make_lease(clock, "job", 1)
    heartbeat.add(first)
    second = make_lease(clock, "job", 2)
    other = make_lease(clock, "other", 1)

    def meanwhile(_: Sequence[Renewal]) -> Renewed:
        # The body ended, and the process runs the same job again, and another one.
        heartbeat.remove(first)
        heartbeat.add(second)
        heartbeat.add(other)
        return Renewed(frozenset(), {("job", 1): AttemptState.COMPLETED}, frozenset())

    store.answer = meanwhile
    heartbeat.beat_once()

    assert not first.lost
    assert not second.lost
    assert not other.lost


def test_a_renewal_that_arrives_after_the_end_moves_nothing(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    end = lease.surely_ended_at
    clock.move(5)

    def meanwhile(_: Sequence[Renewal]) -> Renewed:
        heartbeat.remove(lease)
        return renewed(("job", 1))

    store.answer = meanwhile
    heartbeat.beat_once()

    assert lease.surely_ended_at == end


@pytest.mark.parametrize("how", ["unanswered", "store away"])
def test_what_was_not_answered_is_no_loss_and_its_reports_are_kept(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock, how: str
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    lease.checkpoint({"page": 1})
    end = lease.surely_ended_at

    def none(_: Sequence[Renewal]) -> Renewed:
        if how == "store away":
            raise AWAY
        return Renewed(frozenset(), {}, frozenset({("job", 1)}))

    answer, store.answer = store.answer, none
    clock.move(10)
    heartbeat.beat_once()

    assert not lease.lost
    assert lease.surely_ended_at == end
    # It is asked for again long before the next regular beat.
    assert heartbeat._next_beat is not None
    assert heartbeat._next_beat - clock() < 1

    store.answer = answer
    heartbeat.beat_once()
    assert store.asked[-1][0].checkpoint == '{"page":1}'
    assert lease.surely_ended_at == clock() + 30


def test_a_report_that_the_store_refuses_is_offered_a_few_times_and_never_at_the_end(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)
    lease.checkpoint("x")
    key = ("job", 1)
    store.answer = lambda renewals: Renewed(
        frozenset([key]), {}, frozenset(), frozenset(key for r in renewals if r.has_news)
    )

    for _ in range(5):
        clock.move(5)
        heartbeat.beat_once()

    assert [asked[0].checkpoint for asked in store.asked] == ['"x"'] * REPORT_TRIES + [None] * 2
    assert not lease.lost
    assert lease.newest_reports() == (None, None)
    assert caplog.text.count("lease.report.refused job_id=job fencing_token=1") == REPORT_TRIES
    lease.checkpoint("y")
    heartbeat.beat_once()
    assert store.asked[-1][0].checkpoint == '"y"'


def test_a_lease_that_left_during_an_unanswered_beat_is_forgotten(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock)
    heartbeat.add(lease)

    def meanwhile(_: Sequence[Renewal]) -> Renewed:
        heartbeat.remove(lease)
        raise AWAY

    store.answer = meanwhile
    heartbeat.beat_once()

    assert heartbeat._next_beat is None


def test_a_silent_store_ends_the_lease_by_the_clock_alone(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    lease = make_lease(clock, seconds=30)
    heartbeat.add(lease)

    def away(_: Sequence[Renewal]) -> Renewed:
        raise AWAY

    store.answer = away
    for _ in range(3):
        clock.move(10)
        heartbeat.beat_once()

    assert lease.lost


def test_beats_are_a_third_of_a_lease_apart(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    heartbeat.add(make_lease(clock, "long", seconds=300))
    heartbeat.add(make_lease(clock, "short", seconds=30))

    assert heartbeat._next_beat == clock() + 10
    heartbeat.beat_once()
    assert heartbeat._next_beat == clock() + 10


def test_a_checkpoint_is_written_soon(heartbeat: Heartbeat, clock: Clock) -> None:
    heartbeat.add(make_lease(clock, seconds=300))

    heartbeat.beat_soon()

    assert heartbeat._wait_seconds() == 1


def test_many_checkpoints_cost_one_renewal(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    heartbeat.add(make_lease(clock, seconds=300))
    for _ in range(3):
        heartbeat.beat_soon()
        assert heartbeat._wait_seconds() <= 1
        clock.move(0.3)

    clock.move(0.1)
    assert heartbeat._wait_seconds() == pytest.approx(0)
    heartbeat.beat_once()

    assert len(store.asked) == 1
    assert heartbeat._wait_seconds() == pytest.approx(100)


def test_a_checkpoint_of_the_last_body_is_no_hurry_of_the_next(
    heartbeat: Heartbeat, clock: Clock
) -> None:
    lease = make_lease(clock, seconds=300)
    heartbeat.add(lease)
    heartbeat.beat_soon()
    heartbeat.remove(lease)

    heartbeat.add(make_lease(clock, "next", seconds=300))

    assert heartbeat._wait_seconds() == 100


def test_a_body_whose_lease_is_lost_is_interrupted_and_no_other(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    strikes: list[str] = []

    class Struck(Interruption):
        def strike(self, reason: str) -> None:
            strikes.append(f"{self._job_id}: {reason}")

    for job_id in ("lost", "kept"):
        lease = make_lease(clock, job_id)
        lease._interruption = Struck(job_id, 1, is_wanted=True)
        heartbeat.add(lease)
    store.answer = lambda _: Renewed(
        frozenset({("kept", 1)}), {("lost", 1): AttemptState.CANCELLED}, frozenset()
    )

    heartbeat.beat_once()

    assert strikes == ["lost: the attempt is cancelled"]


# --- stalls -------------------------------------------------------------------------------------


@pytest.fixture
def stalled(heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were found stalled."""
    found: list[str] = []
    monkeypatch.setattr(heartbeat, "_on_stalled", lambda lease: found.append(lease.job_id))
    return found


def test_a_stalled_lease_is_given_up_and_never_renewed_again(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock, stalled: list[str]
) -> None:
    heartbeat.add(make_lease(clock, "hung", seconds=30, stall_timeout_seconds=5))
    heartbeat.add(make_lease(clock, "slow", seconds=30))
    clock.move(5)

    heartbeat.look_for_stalls()
    heartbeat.look_for_stalls()
    heartbeat.beat_once()

    assert stalled == ["hung"]
    assert [renewal.lease.job_id for renewal in store.asked[0]] == ["slow"]


def test_the_thread_looks_at_the_stall_instant_however_far_the_next_beat_is(
    heartbeat: Heartbeat, clock: Clock
) -> None:
    lease = make_lease(clock, seconds=300, stall_timeout_seconds=5)
    heartbeat.add(lease)
    assert heartbeat._wait_seconds() == 5

    clock.move(4)
    lease.progress(1)

    assert heartbeat._wait_seconds() == 5


def test_progress_and_checkpoints_put_a_stall_off_and_the_same_progress_does_not(
    heartbeat: Heartbeat, clock: Clock, stalled: list[str]
) -> None:
    lease = make_lease(clock, seconds=3000, stall_timeout_seconds=5)
    heartbeat.add(lease)

    for step in range(5):
        clock.move(4)
        lease.progress(step)
        heartbeat.look_for_stalls()
    clock.move(4)
    lease.checkpoint(1)
    clock.move(4)
    lease.checkpoint(1)
    clock.move(4)
    heartbeat.look_for_stalls()
    assert stalled == []

    lease.progress(4)
    lease.check()
    clock.move(2)
    heartbeat.look_for_stalls()
    assert stalled == ["job"]


def test_a_frozen_process_has_not_stalled(
    heartbeat: Heartbeat, clock: Clock, stalled: list[str]
) -> None:
    heartbeat.add(make_lease(clock, seconds=300, stall_timeout_seconds=5))
    clock.move(1)
    # The thread waits for the instant of the stall; the freeze begins at some time in that wait.
    began_at = clock()
    heartbeat._looks_at = clock() + heartbeat._wait_seconds()
    clock.move(60)

    heartbeat._forgive(began_at)
    heartbeat.look_for_stalls()

    assert stalled == []
    assert heartbeat._wait_seconds() == 4
    clock.move(4)
    heartbeat.look_for_stalls()
    assert stalled == ["job"]


def test_a_thread_that_wakes_in_time_forgives_nothing(
    heartbeat: Heartbeat, clock: Clock, stalled: list[str]
) -> None:
    heartbeat.add(make_lease(clock, seconds=300, stall_timeout_seconds=5))
    began_at = clock()
    heartbeat._looks_at = clock() + heartbeat._wait_seconds()
    clock.move(5.4)

    heartbeat._forgive(began_at)
    heartbeat.look_for_stalls()

    assert stalled == ["job"]


def test_a_body_that_has_ended_does_not_stall(
    heartbeat: Heartbeat, clock: Clock, stalled: list[str]
) -> None:
    lease = make_lease(clock, stall_timeout_seconds=5)
    heartbeat.add(lease)
    heartbeat.remove(lease)
    clock.move(60)

    heartbeat.look_for_stalls()

    assert stalled == []


# --- settling -----------------------------------------------------------------------------------


def outcome(number: int) -> tuple[str, int, datetime]:
    return f"job{number}", 1, datetime(2026, 1, 1, tzinfo=timezone.utc)


def test_outcomes_are_settled_in_one_statement(heartbeat: Heartbeat, store: FakeStore) -> None:
    for number in range(10):
        heartbeat.settle_later(outcome(number))

    heartbeat.settle_once()
    heartbeat.settle_once()

    assert store.settled == [[outcome(number) for number in range(10)]]


def test_a_batch_has_a_size_and_the_rest_follows_at_once(
    heartbeat: Heartbeat, store: FakeStore, clock: Clock
) -> None:
    for number in range(SETTLE_BATCH + 3):
        heartbeat.settle_later(outcome(number))

    heartbeat.settle_once()
    assert heartbeat._next_settle == clock()
    heartbeat.settle_once()

    assert [len(batch) for batch in store.settled] == [SETTLE_BATCH, 3]


def test_what_the_store_did_not_take_is_settled_later(
    heartbeat: Heartbeat, store: FakeStore
) -> None:
    store.settle_error = AWAY
    heartbeat.settle_later(outcome(1))
    heartbeat.settle_once()
    heartbeat.settle_later(outcome(2))

    store.settle_error = None
    heartbeat.settle_once()

    assert store.settled == [[outcome(1), outcome(2)]]


# --- the thread ---------------------------------------------------------------------------------


def test_the_thread_beats_goes_on_after_an_error_and_settles_before_it_ends() -> None:
    store = FakeStore()
    clock = Clock()
    failures = iter([RuntimeError("a bug")])
    good = store.answer

    def once_wrong(renewals: Sequence[Renewal]) -> Renewed:
        for error in failures:
            raise error
        return good(renewals)

    store.answer = once_wrong
    heartbeat = Heartbeat(renew=store.renew, settle=store.settle, worker="w")
    lease = make_lease(clock, seconds=0.3)

    heartbeat.add(lease)

    eventually(lambda: len(store.asked) >= 3)
    names = [thread.name for thread in threading.enumerate()]
    assert "celery-lease-heartbeat" in names
    heartbeat.remove(lease)
    heartbeat.settle_later(outcome(1))
    heartbeat.stop()
    assert store.settled == [[outcome(1)]]
    assert heartbeat._thread is not None
    assert not heartbeat._thread.is_alive()


def test_the_thread_finds_a_stall_by_itself_between_two_beats() -> None:
    store = FakeStore()
    found: list[Lease] = []
    heartbeat = Heartbeat(
        renew=store.renew, settle=store.settle, worker="w", on_stalled=found.append
    )
    lease = make_lease(time.monotonic, seconds=300, stall_timeout_seconds=0.2)

    heartbeat.add(lease)

    eventually(lambda: found == [lease], timeout=5)
    assert store.asked == []
    assert lease.stall_watch.silence_seconds(time.monotonic()) >= 0.2
    heartbeat.stop()


def test_no_thread_runs_before_the_first_lease() -> None:
    heartbeat = Heartbeat(renew=lambda _: renewed(), settle=len, worker="w")

    assert heartbeat._thread is None
    heartbeat.stop()
