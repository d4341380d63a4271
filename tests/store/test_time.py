"""wake, expire_unstarted, pass_deadline: what becomes of jobs by the store's clock alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.records import Claimed, Held, Refused, Stale
from celery_lease.states import AttemptState, JobState, LossCause, Refusal
from celery_lease.store import queries, transitions
from celery_lease.store.transitions import timing
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    again,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    finished,
    holding,
    job_row,
    lock_job,
    move_back,
    new_delivery,
    nothing_changes,
    parting,
    rows,
    running,
    submitted,
)

if TYPE_CHECKING:
    from typing import Any

    from celery_lease.store.engine import Store


def wake(store: Store, *, limit: int = 100, grace: float = 5.0) -> list[str]:
    return transitions.wake(store, limit=limit, dispatched_grace_seconds=grace)


# --- wake ---------------------------------------------------------------------------------------


def test_a_scheduled_job_that_is_due_is_queued_for_dispatch(store: Store) -> None:
    submitted(store, delay_seconds=60.0, dispatched=False)
    move_back(store, "job", seconds=61)

    with changes_of(store) as changes:
        moved = wake(store)

    assert moved == ["job"]
    assert changes == {"job job.state": "queued"}
    assert [one.job_id for one in queries.undispatched(store, limit=9)] == ["job"]


def test_a_retry_that_is_due_is_queued_for_dispatch(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again(delay_seconds=60.0, dispatched=False))
    move_back(store, "job", seconds=61)

    assert wake(store) == ["job"]
    assert job_row(store)["state"] == JobState.QUEUED


def test_a_job_after_repeated_losses_is_queued_when_its_back_off_is_over(store: Store) -> None:
    lease = running(store)
    transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=(60.0,))
    assert wake(store) == []

    move_back(store, "job", seconds=61)

    assert wake(store) == ["job"]


def test_a_job_that_is_not_due_is_not_woken(store: Store) -> None:
    submitted(store, delay_seconds=60.0, dispatched=False)
    move_back(store, "job", seconds=50)

    with nothing_changes(store):
        moved = wake(store)

    assert moved == []


def test_a_due_job_whose_message_is_on_its_way_is_left_to_it_for_a_while(store: Store) -> None:
    submitted(store, delay_seconds=60.0, dispatched=True)
    move_back(store, "job", seconds=61)

    with nothing_changes(store):
        too_early = wake(store, grace=30.0)
    move_back(store, "job", seconds=30)
    with changes_of(store) as changes:
        moved = wake(store, grace=30.0)

    assert (too_early, moved) == ([], ["job"])
    assert changes == {"job job.state": "queued", "job job.dispatched_at": None}


def test_jobs_in_other_states_are_not_woken(store: Store) -> None:
    submitted(store, "queued")
    running(store, "running")
    finished(store, running(store, "done"))
    submitted(store, "held", delay_seconds=1.0)
    transitions.hold_waiting(store, "held", reason="x")
    for name in ("queued", "running", "done", "held"):
        move_back(store, name, seconds=20)

    with nothing_changes(store):
        moved = wake(store)

    assert moved == []


def test_a_batch_of_due_jobs_has_a_limit(store: Store) -> None:
    for number in range(5):
        submitted(store, f"job{number}", delay_seconds=1.0, dispatched=False)
        move_back(store, f"job{number}", seconds=2)

    sizes = [len(wake(store, limit=2)) for _ in range(4)]

    assert sizes == [2, 2, 1, 0]


def test_a_due_job_whose_row_is_locked_is_left_to_the_next_pass(row_store: Store) -> None:
    for name in ("locked", "free"):
        submitted(row_store, name, delay_seconds=1.0, dispatched=False)
        move_back(row_store, name, seconds=2)

    with holding(row_store, lock_job(row_store, "locked")):
        moved = wake(row_store)

    assert moved == ["free"]
    assert wake(row_store) == ["locked"]


def test_of_two_reapers_each_due_job_is_woken_by_one(store: Store, other_store: Store) -> None:
    ids = [submitted(store, f"job{n}", delay_seconds=1.0, dispatched=False) for n in range(20)]
    for job_id in ids:
        move_back(store, job_id, seconds=2)

    one, other = at_once(lambda: wake(store), lambda: wake(other_store))

    assert sorted([*one, *other, *wake(store)]) == sorted(ids)


def test_a_message_that_came_first_leaves_nothing_to_wake(store: Store) -> None:
    submitted(store, delay_seconds=60.0)
    move_back(store, "job", seconds=90)
    claimed(store)

    with nothing_changes(store):
        moved = wake(store)

    assert moved == []


# --- expire_unstarted ---------------------------------------------------------------------------


@pytest.mark.parametrize("delay_seconds", [0.0, 60.0], ids=["queued", "scheduled"])
def test_a_waiting_job_past_its_expires_is_cancelled(store: Store, delay_seconds: float) -> None:
    submitted(store, delay_seconds=delay_seconds, expires_seconds=10.0)
    move_back(store, "job", seconds=11)

    with changes_of(store) as changes:
        moved = transitions.expire_unstarted(store, limit=9)

    assert moved == ["job"]
    assert changes.pop("job job.finished_at") is not None
    assert changes == {"job job.state": "cancelled", "job job.state_reason": "expires"}


def test_a_retry_past_its_expires_is_cancelled(store: Store) -> None:
    lease = running(store)
    next_run = again(delay_seconds=60.0, expires_seconds=10.0)
    transitions.retry_later(store, lease, parting(), next_run)
    move_back(store, "job", seconds=11)

    assert transitions.expire_unstarted(store, limit=9) == ["job"]


def test_jobs_before_their_expires_or_without_one_are_left_alone(store: Store) -> None:
    submitted(store, "without")
    submitted(store, "before", expires_seconds=100.0)
    move_back(store, "before", seconds=50)

    with nothing_changes(store):
        moved = transitions.expire_unstarted(store, limit=9)

    assert moved == []


def test_a_job_that_has_started_is_not_touched_by_its_expires(store: Store) -> None:
    running(store, "running", expires_seconds=10.0)
    finished(store, running(store, "done", expires_seconds=10.0))
    submitted(store, "held", expires_seconds=10.0)
    transitions.hold_waiting(store, "held", reason="x")
    for name in ("running", "done", "held"):
        move_back(store, name, seconds=11)

    with nothing_changes(store):
        moved = transitions.expire_unstarted(store, limit=9)

    assert moved == []


@pytest.mark.parametrize("end", ["lost", "released"])
def test_a_job_that_started_in_time_runs_again_past_its_expires(store: Store, end: str) -> None:
    """``expires`` limits the start only: a vanished runner must not lose the job."""
    lease = running(store, expires_seconds=10.0)
    move_back(store, "job", seconds=60)
    if end == "released":
        transitions.release(store, lease, parting())
    else:
        transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)

    cancelled = transitions.expire_unstarted(store, limit=9)

    assert cancelled == []
    assert [one.expires_seconds for one in queries.undispatched(store, limit=9)] == [None]
    assert isinstance(transitions.claim(store, new_delivery()), Claimed)


def test_a_batch_of_expired_jobs_has_a_limit(store: Store) -> None:
    for number in range(3):
        submitted(store, f"job{number}", expires_seconds=1.0)
        move_back(store, f"job{number}", seconds=2)

    sizes = [len(transitions.expire_unstarted(store, limit=2)) for _ in range(3)]

    assert sizes == [2, 1, 0]


# --- pass_deadline ------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_seconds", [0.0, 60.0], ids=["queued", "scheduled"])
def test_a_waiting_job_past_its_deadline_is_failed(store: Store, delay_seconds: float) -> None:
    submitted(store, delay_seconds=delay_seconds, deadline_seconds=10.0)
    move_back(store, "job", seconds=11)

    with changes_of(store) as changes:
        moved = transitions.pass_deadline(store, limit=9)

    assert moved == ["job"]
    assert changes.pop("job job.finished_at") is not None
    assert changes == {
        "job job.state": "failed",
        "job job.state_reason": "deadline",
        "job job.error_type": "celery_lease.exceptions.DeadlineExceeded",
        "job job.error_message": "it was not done by its deadline",
    }


def test_a_retry_past_its_deadline_is_failed(store: Store) -> None:
    lease = running(store, deadline_seconds=10.0)
    transitions.retry_later(store, lease, parting(), again(delay_seconds=60.0))
    move_back(store, "job", seconds=11)

    assert transitions.pass_deadline(store, limit=9) == ["job"]
    assert transitions.claim(store, new_delivery(message_version=2)) == Refused(
        Refusal.FINAL, JobState.FAILED
    )


def test_a_running_job_past_its_deadline_is_failed_and_its_attempt_cancelled(store: Store) -> None:
    lease = running(store, deadline_seconds=10.0)
    move_back(store, "job", seconds=11)

    with changes_of(store) as changes:
        moved = transitions.pass_deadline(store, limit=9)

    assert moved == ["job"]
    assert changes.pop("job job.finished_at") is not None
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "failed",
        "job job.state_reason": "deadline",
        "job job.lease_owner": None,
        "job job.error_type": "celery_lease.exceptions.DeadlineExceeded",
        "job job.error_message": "it was not done by its deadline",
        "attempt job 1.state": "cancelled",
        "attempt job 1.stop_reason": "deadline",
    }
    done = transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
    assert done == Stale(AttemptState.CANCELLED)


def test_the_earlier_attempts_of_a_job_past_its_deadline_stay_as_they_were(store: Store) -> None:
    first = running(store, deadline_seconds=10.0)
    transitions.release(store, first, parting())
    claimed(store)
    move_back(store, "job", seconds=11)

    transitions.pass_deadline(store, limit=9)

    assert attempt_row(store, first)["state"] == AttemptState.RELEASED


def test_a_held_job_past_its_deadline_is_only_marked_overdue(store: Store) -> None:
    submitted(store, deadline_seconds=10.0)
    transitions.hold_waiting(store, "job", reason="look")
    move_back(store, "job", seconds=11)

    with changes_of(store) as changes:
        moved = transitions.pass_deadline(store, limit=9)
    with nothing_changes(store):
        transitions.pass_deadline(store, limit=9)

    assert moved == []
    assert changes == {"job job.state_reason": "overdue"}


def test_nothing_but_a_held_job_is_marked_overdue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a moment: the pass dies between its two batches."""
    submitted(store, "waiting", deadline_seconds=10.0)
    running(store, "running", deadline_seconds=10.0)
    for name in ("waiting", "running"):
        move_back(store, name, seconds=11)
    batches = iter([timing._move_batch])

    def die_after_the_first(*args: Any, **kwargs: Any) -> Any:
        return next(batches)(*args, **kwargs)

    monkeypatch.setattr(timing, "_move_batch", die_after_the_first)

    with nothing_changes(store), pytest.raises(StopIteration):
        transitions.pass_deadline(store, limit=9)


def test_jobs_before_their_deadline_without_one_or_final_are_left_alone(store: Store) -> None:
    submitted(store, "without")
    submitted(store, "waiting", deadline_seconds=100.0)
    running(store, "running", deadline_seconds=100.0)
    finished(store, running(store, "done", deadline_seconds=10.0))
    for name in ("waiting", "running", "done"):
        move_back(store, name, seconds=20)

    with nothing_changes(store):
        moved = transitions.pass_deadline(store, limit=9)

    assert moved == []


def test_a_running_job_past_its_deadline_whose_row_is_locked_is_left_to_the_next_pass(
    row_store: Store,
) -> None:
    running(row_store, "locked", deadline_seconds=10.0)
    running(row_store, "free", deadline_seconds=10.0)
    for name in ("locked", "free"):
        move_back(row_store, name, seconds=11)

    with holding(row_store, lock_job(row_store, "locked", read=True)):
        moved = transitions.pass_deadline(row_store, limit=9)

    assert moved == ["free"]
    assert attempt_row(row_store, Held("locked", 1, ONE))["ended_at"] is None


def test_a_deadline_against_a_completion_has_one_winner(store: Store, other_store: Store) -> None:
    for number in range(5):
        lease = running(store, f"job{number}", deadline_seconds=10.0)
        move_back(store, lease.job_id, seconds=11)

        done, moved = at_once(
            lambda lease=lease: transitions.complete(
                store, lease, parting(), result=b"1", result_type=JSON
            ),
            lambda: transitions.pass_deadline(other_store, limit=9),
        )

        found = rows(store)
        job, attempt = found["job"][lease.job_id], found["attempt"][lease.job_id, 1]
        if moved:
            assert done == Stale(AttemptState.CANCELLED)
            assert (job["state"], job["result"]) == (JobState.FAILED, None)
        else:
            assert (job["state"], attempt["state"]) == (JobState.SUCCEEDED, AttemptState.COMPLETED)


def test_a_job_that_was_given_on_ends_by_its_deadline_too(store: Store) -> None:
    running(store, deadline_seconds=10.0)
    move_back(store, "job", seconds=31)
    transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)

    assert transitions.claim(store, new_delivery(owner=OTHER)) == Refused(
        Refusal.DEADLINE, JobState.QUEUED
    )
    assert transitions.pass_deadline(store, limit=9) == ["job"]
