"""lost, expire: the one policy for every vanished runner."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Held
from celery_lease.states import AttemptState, JobState, LossCause, OnExpiry
from celery_lease.store import queries, transitions
from celery_lease.store.dialects import Later, clock
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    ROUNDS,
    about,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    errors_of,
    expired,
    finished,
    holding,
    in_background,
    job_row,
    lock_attempt,
    lock_job,
    move_back,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    store_now,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from typing import Any

    from celery_lease.records import Vanished
    from celery_lease.store.engine import Store


def lost(store: Store, lease: Held, **changes: Any) -> Vanished | None:
    said = {"cause": LossCause.LOST, "reason": "exit code -9", "lost_backoff": NO_BACKOFF}
    return transitions.lost(store, lease, **(said | changes))


def expire(store: Store, **changes: Any) -> list[Vanished]:
    return transitions.expire(store, **({"limit": 100, "lost_backoff": NO_BACKOFF} | changes))


# --- lost ---------------------------------------------------------------------------------------


def test_a_job_whose_runner_is_reported_dead_is_queued_at_once(store: Store) -> None:
    lease = running(store)
    now = store_now(store)

    with changes_of(store) as changes:
        answer = lost(store, lease)

    assert answer is not None
    assert (answer.job_id, answer.fencing_token, answer.cause) == ("job", 1, LossCause.LOST)
    assert (answer.state, answer.delay_seconds, answer.finished_at) == (JobState.QUEUED, 0.0, None)
    assert (answer.worker, answer.owner) == ("celery@one", ONE)
    assert about(changes.pop("job job.available_at"), now)
    assert about(changes.pop("attempt job 1.ended_at"), now)
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": "runner_lost",
        "job job.lease_owner": None,
        "job job.lost_count": 1,
        "job job.dispatched_at": None,
        "attempt job 1.state": "lost",
        "attempt job 1.stop_reason": "exit code -9",
    }


@pytest.mark.parametrize("cause", list(LossCause))
def test_the_attempt_says_how_its_runner_was_found_to_have_vanished(
    store: Store, cause: LossCause
) -> None:
    lease = expired(store)

    lost(store, lease, cause=cause)

    assert attempt_row(store, lease)["state"] == cause.value


def test_a_stalled_attempt_keeps_the_stack_of_its_thread(store: Store) -> None:
    lease = running(store)

    lost(store, lease, cause=LossCause.STALLED, trace="File …")

    assert attempt_row(store, lease)["traceback"] == "File …"


def test_a_live_lease_does_not_expire_by_a_report(store: Store) -> None:
    lease = running(store)

    with nothing_changes(store):
        answer = lost(store, lease, cause=LossCause.EXPIRED)

    assert answer is None


@pytest.mark.parametrize("lease", [Held("job", 1, OTHER), Held("job", 2, ONE), Held("no", 1, ONE)])
def test_a_report_of_another_lease_changes_nothing(store: Store, lease: Held) -> None:
    running(store)

    with nothing_changes(store):
        answer = lost(store, lease)

    assert answer is None


def test_a_report_of_an_earlier_attempt_does_not_hit_the_next(store: Store) -> None:
    first = running(store)
    lost(store, first)
    claimed(store)

    with nothing_changes(store):
        answer = lost(store, first)

    assert answer is None


def test_a_report_after_the_job_is_done_changes_nothing(store: Store) -> None:
    lease = running(store)
    finished(store, lease)

    with nothing_changes(store):
        answer = lost(store, lease)

    assert answer is None


def test_a_report_about_a_locked_final_job_changes_nothing(row_store: Store) -> None:
    lease = running(row_store)
    finished(row_store, lease)

    with holding(row_store, lock_job(row_store)), nothing_changes(row_store):
        answer = lost(row_store, lease)

    assert answer is None


def test_a_report_about_a_job_whose_row_stays_locked_is_made_again_by_the_caller(
    row_store: Store,
) -> None:
    lease = running(row_store)

    with (
        holding(row_store, lock_job(row_store, read=True)),
        nothing_changes(row_store),
        pytest.raises(StoreUnavailable, match="locked by another transaction"),
    ):
        lost(row_store, lease)


# --- the policy ---------------------------------------------------------------------------------


def test_the_last_allowed_loss_interrupts_the_job(store: Store) -> None:
    lease = running(store, max_attempts=2)
    lost(store, lease)

    answer = lost(store, claimed(store))

    assert answer is not None
    assert answer.state is JobState.INTERRUPTED
    job = job_row(store)
    assert (job["state"], job["state_reason"]) == (JobState.INTERRUPTED, "max_attempts")
    assert (job["lost_count"], job["lease_owner"]) == (2, None)
    assert job["finished_at"] == answer.finished_at
    assert job["error_type"] == "celery_lease.exceptions.JobInterrupted"
    assert "2 runners vanished" in job["error_message"]
    assert job["accepted_attempt"] is job["settled_at"] is None


def test_one_allowed_attempt_means_never_again(store: Store) -> None:
    answer = lost(store, running(store, max_attempts=1))

    assert answer is not None
    assert answer.state is JobState.INTERRUPTED


def test_later_losses_wait_by_the_back_off(store: Store) -> None:
    lease = running(store, max_attempts=9)
    lost(store, lease, lost_backoff=(0.0, 60.0))
    now = store_now(store)

    answer = lost(store, claimed(store), lost_backoff=(0.0, 60.0))

    assert answer is not None
    assert (answer.state, answer.delay_seconds) == (JobState.RETRY_WAIT, 60.0)
    assert job_row(store)["state"] == JobState.RETRY_WAIT
    assert about(job_row(store)["available_at"], now, seconds=60)


def test_a_job_whose_policy_is_hold_waits_for_a_person(store: Store) -> None:
    answer = lost(store, running(store, on_expiry=OnExpiry.HOLD))

    assert answer is not None
    assert (answer.state, answer.finished_at) == (JobState.HELD, None)
    assert job_row(store)["state"] == JobState.HELD


def test_a_job_whose_policy_is_fail_is_failed(store: Store) -> None:
    answer = lost(store, running(store, on_expiry=OnExpiry.FAIL))

    assert answer is not None
    assert answer.state is JobState.FAILED
    job = job_row(store)
    assert (job["state"], job["failure_count"]) == (JobState.FAILED, 0)
    assert job["error_type"] == "celery_lease.exceptions.JobRunnerLost"
    assert job["finished_at"] == answer.finished_at


def test_hand_overs_and_failures_are_no_losses(store: Store) -> None:
    lease = running(store, max_attempts=2)
    for _ in range(5):
        transitions.release(store, lease, parting())
        lease = claimed(store)

    answer = lost(store, lease)

    assert answer is not None
    assert (answer.state, job_row(store)["lost_count"]) == (JobState.QUEUED, 1)


# --- expire -------------------------------------------------------------------------------------


def test_a_lease_that_has_ended_is_given_on(store: Store) -> None:
    expired(store)

    with changes_of(store) as changes:
        answers = expire(store)

    assert [(one.job_id, one.fencing_token, one.cause) for one in answers] == [
        ("job", 1, LossCause.EXPIRED)
    ]
    assert changes.pop("job job.available_at") is not None
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": "runner_lost",
        "job job.lease_owner": None,
        "job job.lost_count": 1,
        "job job.dispatched_at": None,
        "attempt job 1.state": "expired",
        "attempt job 1.stop_reason": "lease ended",
    }
    assert [one.job_id for one in queries.undispatched(store, limit=9)] == ["job"]


def test_live_leases_are_left_alone(store: Store) -> None:
    running(store, "claimed")
    transitions.renew(store, [renewal(running(store, "active"))])
    longer = running(store, "longer", lease_seconds=600.0)
    move_back(store, longer.job_id, seconds=31)

    with nothing_changes(store):
        answers = expire(store)

    assert answers == []


def test_a_lease_ends_by_its_own_length(store: Store) -> None:
    """B094: recovery depends on that job's lease, not on others."""
    for name, seconds in (("short", 5.0), ("long", 600.0)):
        running(store, name, lease_seconds=seconds)
        move_back(store, name, seconds=6)

    assert [one.job_id for one in expire(store)] == ["short"]


def test_each_job_follows_its_own_policy(store: Store) -> None:
    expired(store, "again")
    expired(store, "never", max_attempts=1)
    expired(store, "held", on_expiry=OnExpiry.HOLD)
    expired(store, "failed", on_expiry=OnExpiry.FAIL)

    answers = {one.job_id: one.state for one in expire(store)}

    assert answers == {
        "again": JobState.QUEUED,
        "never": JobState.INTERRUPTED,
        "held": JobState.HELD,
        "failed": JobState.FAILED,
    }
    assert {name: job["state"] for name, job in rows(store)["job"].items()} == answers


def test_a_batch_has_a_limit_and_leaves_the_rest_to_the_next(store: Store) -> None:
    for number in range(5):
        expired(store, f"job{number}")

    sizes = [len(expire(store, limit=2)) for _ in range(4)]

    assert sizes == [2, 2, 1, 0]


def test_live_leases_do_not_fill_a_batch(store: Store) -> None:
    for number in range(6):
        running(store, f"live{number}")
    expired(store, "middle")
    for number in range(6):
        running(store, f"more{number}")

    assert [one.job_id for one in expire(store, limit=1)] == ["middle"]


def test_a_job_whose_earlier_attempt_expired_is_left_alone_while_its_present_one_lives(
    store: Store,
) -> None:
    expired(store)
    expire(store)
    claimed(store)

    with nothing_changes(store):
        answers = expire(store)

    assert answers == []


def test_jobs_that_were_tried_already_are_skipped(store: Store) -> None:
    expired(store, "tried")
    expired(store, "new")

    answers = expire(store, skip=frozenset({"tried"}))

    assert [one.job_id for one in answers] == ["new"]
    assert job_row(store, "tried")["state"] == JobState.RUNNING


def test_jobs_that_do_not_run_are_left_alone(store: Store) -> None:
    expired(store, "done")
    transitions.complete(store, Held("done", 1, ONE), parting(), result=None, result_type=None)
    expired(store, "cancelled")
    transitions.cancel(store, "cancelled")

    with nothing_changes(store):
        answers = expire(store)

    assert answers == []


def test_a_job_whose_row_is_locked_is_skipped_and_the_others_are_given_on(
    row_store: Store,
) -> None:
    expired(row_store, "locked")
    expired(row_store, "free")

    with holding(row_store, lock_job(row_store, "locked", read=True)):
        started = store_now(row_store)
        answers = expire(row_store)
        took = (store_now(row_store) - started).total_seconds()

    assert [one.job_id for one in answers] == ["free"]
    assert job_row(row_store, "locked")["state"] == JobState.RUNNING
    assert took < 1.5


# --- raced --------------------------------------------------------------------------------------


def test_a_lease_renewed_while_expire_looks_at_it_is_not_given_on(store: Store) -> None:
    """With the expiry only in the sub-select three live leases were expired (design, section 4)."""
    lease = expired(store)
    attempt = store.tables.attempt

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(lambda: expire(store)) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.3)
            holder.execute(
                attempt.update().values(
                    lease_expires_at=Later(clock(), 30),
                    last_renewed_at=clock(),
                )
            )
            holder.commit()
            given_on = answer()

    assert given_on == []
    assert attempt_row(store, lease)["ended_at"] is None
    assert job_row(store)["state"] == JobState.RUNNING
    assert job_row(store)["lost_count"] == 0


def test_a_lease_renewed_while_a_report_of_its_expiry_waits_is_not_given_on(store: Store) -> None:
    lease = expired(store)
    attempt = store.tables.attempt

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(lambda: lost(store, lease, cause=LossCause.EXPIRED)) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.3)
            holder.execute(attempt.update().values(lease_expires_at=Later(clock(), 30)))
            holder.commit()
            vanished = answer()

    assert vanished is None
    assert job_row(store)["state"] == JobState.RUNNING


@ROUNDS
def test_of_two_reapers_at_once_each_lease_is_given_on_by_one(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        ids = {expired(store, f"job{number}-{n}").job_id for n in range(10)}

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            one, other = at_once(lambda: expire(store), lambda: expire(other_store))

        assert errors == other_errors == []
        # What one had locked the other skipped; what both have skipped is the next pass's.
        given_on = [vanished.job_id for vanished in (*one, *other, *expire(store))]
        assert sorted(given_on) == sorted(ids)
        found = rows(store)
        for job_id in ids:
            job, attempt = found["job"][job_id], found["attempt"][job_id, 1]
            assert (job["state"], job["lost_count"]) == (JobState.QUEUED, 1)
            assert attempt["state"] == AttemptState.EXPIRED


@ROUNDS
def test_a_death_reported_by_several_at_once_is_counted_once(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        lease = running(store, f"job{number}")

        answers = at_once(*[lambda s=s: lost(s, lease) for s in (store, other_store)] * 2)

        assert sum(answer is not None for answer in answers) == 1
        assert job_row(store, lease.job_id)["lost_count"] == 1


@ROUNDS
def test_a_storm_of_everything_on_a_few_jobs_never_deadlocks(row_store: Store, rounds: int) -> None:
    """Locks are taken in one order: job, then attempt (B107)."""
    for number in range(rounds):
        leases = [expired(row_store, f"job{number}-{n}") for n in range(4)]

        with errors_of(row_store) as errors:
            at_once(
                *[lambda: expire(row_store)] * 2,
                lambda: transitions.extend(row_store, ended_since=None),
                lambda: transitions.renew(row_store, list(map(renewal, leases))),
                *[
                    lambda lease=lease: transitions.complete(
                        row_store, lease, parting(), result=b"1", result_type=JSON
                    )
                    for lease in leases
                ],
                *[lambda lease=lease: lost(row_store, lease) for lease in leases],
                *[
                    lambda lease=lease: transitions.cancel(row_store, lease.job_id)
                    for lease in leases
                ],
            )

        assert [error for error in errors if "eadlock" in error] == []
        found = rows(row_store)
        for lease in leases:
            job, attempt = found["job"][lease.job_id], found["attempt"][lease.job_id, 1]
            assert attempt["ended_at"] is not None
            assert (job["state"] == "succeeded") == (attempt["state"] == "completed")
            assert job["lost_count"] == (attempt["state"] in ("expired", "lost"))
