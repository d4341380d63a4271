"""The ends that a runner writes: complete, fail, retry_later, replace, replace_away, release, hold.

What they share (*mine*, a lost reply, an end of another kind) is tested once for all of them.
"""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Accepted, Claimed, Held, Refused, Stale
from celery_lease.states import AttemptState, JobState, LossCause, OnExpiry, Refusal
from celery_lease.store import queries, transitions
from tests.store.builders import (
    FAILURE,
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    ROUNDS,
    WORKER_NOW,
    about,
    again,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    errors_of,
    expired,
    holding,
    in_background,
    job_row,
    lock_job,
    move_back,
    new_delivery,
    new_message,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    store_now,
    submitted,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_lease.records import FinishAnswer
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


@dataclass(frozen=True)
class End:
    """One way to end an attempt, and what both rows say then."""

    call: Callable[..., FinishAnswer]
    job_state: JobState
    attempt_state: AttemptState


def complete(store: Store, lease: Held, *, checkpoint: str | None = None, **other: Any) -> Any:
    said = parting(checkpoint=checkpoint)
    return transitions.complete(
        store, lease, said, **{"result": b"42", "result_type": JSON} | other
    )


def fail(store: Store, lease: Held, *, checkpoint: str | None = None) -> Any:
    said = parting(failure=FAILURE, checkpoint=checkpoint)
    return transitions.fail(store, lease, said, error=b'"wrong"', error_content_type=JSON)


def _retry(store: Store, lease: Held, **said: Any) -> Any:
    return transitions.retry_later(store, lease, parting(**said), again(delay_seconds=60.0))


def _replace(store: Store, lease: Held, **said: Any) -> Any:
    return transitions.replace(store, lease, parting(**said), again(task="app.next"))


def _replace_away(store: Store, lease: Held, **said: Any) -> Any:
    return transitions.replace_away(store, lease, parting(**said))


def _release(store: Store, lease: Held, **said: Any) -> Any:
    return transitions.release(store, lease, parting(**said))


def _hold(store: Store, lease: Held, **said: Any) -> Any:
    return transitions.hold(store, lease, parting(failure=FAILURE, **said))


ENDS = {
    "complete": End(complete, JobState.SUCCEEDED, AttemptState.COMPLETED),
    "fail": End(fail, JobState.FAILED, AttemptState.FAILED),
    "retry_later": End(_retry, JobState.RETRY_WAIT, AttemptState.RETRIED),
    "replace": End(_replace, JobState.QUEUED, AttemptState.REPLACED),
    "replace_away": End(_replace_away, JobState.SUCCEEDED, AttemptState.REPLACED),
    "release": End(_release, JobState.QUEUED, AttemptState.RELEASED),
    "hold": End(_hold, JobState.HELD, AttemptState.FAILED),
}

each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())

# With a new message an end is a transaction, elsewhere it may be one statement.
both_ways = pytest.mark.parametrize(
    "end", [pytest.param(ENDS[name], id=name) for name in ("complete", "retry_later")]
)


# --- what all ends share ------------------------------------------------------------------------


@each_end
def test_an_end_of_mine_is_accepted_and_both_rows_say_so(store: Store, end: End) -> None:
    lease = running(store)
    now = store_now(store)

    answer = end.call(store, lease)

    assert isinstance(answer, Accepted)
    job, attempt = job_row(store), attempt_row(store, lease)
    assert job["state"] == end.job_state
    assert (job["state_reason"], job["lease_owner"], job["fencing_token"]) == ("said so", None, 1)
    assert answer.finished_at == job["finished_at"]
    assert (job["finished_at"] is not None) == end.job_state.is_final
    assert attempt["state"] == end.attempt_state
    assert attempt["stop_reason"] == "said so"
    assert about(attempt["ended_at"], now)
    assert attempt["worker_ended_at"] == WORKER_NOW


@each_end
def test_an_end_under_another_token_is_stale_and_changes_nothing(store: Store, end: End) -> None:
    running(store)

    with nothing_changes(store):
        answers = [end.call(store, Held("job", token, ONE)) for token in (0, 2)]

    assert answers == [Stale(None), Stale(None)]


@each_end
def test_an_end_by_another_process_is_stale_and_changes_nothing(store: Store, end: End) -> None:
    running(store)

    with nothing_changes(store):
        answer = end.call(store, Held("job", 1, OTHER))

    assert answer == Stale(None)


@each_end
def test_an_end_changes_no_other_job_and_no_earlier_attempt(store: Store, end: End) -> None:
    """Both by the same process; one under the same token, one of the same job."""
    other = running(store, "other")
    earlier = running(store)
    transitions.release(store, earlier, parting("earlier"))
    lease = claimed(store)
    before = job_row(store, "other"), attempt_row(store, other), attempt_row(store, earlier)
    same_token = running(store, "same token")
    transitions.release(store, same_token, parting())
    claimed(store, "same token")

    with changes_of(store) as changes:
        answer = end.call(store, lease)

    assert isinstance(answer, Accepted)
    touched = {name.partition(".")[0] for name in changes}
    assert touched <= {"job job", "attempt job 2", "message job 2"}
    assert before == (
        job_row(store, "other"),
        attempt_row(store, other),
        attempt_row(store, earlier),
    )


@each_end
def test_an_end_of_a_job_without_a_row_is_stale(store: Store, end: End) -> None:
    running(store, "another")

    with nothing_changes(store):
        answer = end.call(store, Held("job", 1, ONE))

    assert answer == Stale(None)


@each_end
@pytest.mark.parametrize("successor", [False, True], ids=["queued", "taken"])
def test_an_end_after_the_lease_was_given_on_is_stale_and_changes_nothing(
    store: Store, end: End, *, successor: bool
) -> None:
    lease = expired(store)
    transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    if successor:
        claimed(store)

    with nothing_changes(store):
        answer = end.call(store, lease)

    assert answer == Stale(AttemptState.EXPIRED)


@each_end
def test_an_end_after_a_cancel_is_stale_and_changes_nothing(store: Store, end: End) -> None:
    lease = running(store)
    transitions.cancel(store, "job")

    with nothing_changes(store):
        answer = end.call(store, lease)

    assert answer == Stale(AttemptState.CANCELLED)


@each_end
def test_an_end_after_another_end_of_mine_is_stale_and_changes_nothing(
    store: Store, end: End
) -> None:
    """Won only if the row holds the outcome that *this call* asked for."""
    lease = running(store)
    first = ENDS["release"] if end.attempt_state is not AttemptState.RELEASED else ENDS["complete"]
    first.call(store, lease)

    with nothing_changes(store):
        answer = end.call(store, lease)

    assert answer == Stale(first.attempt_state)


@each_end
def test_an_end_repeated_gets_the_same_answer_and_changes_nothing(store: Store, end: End) -> None:
    lease = running(store)
    first = end.call(store, lease)

    with nothing_changes(store):
        second = end.call(store, lease)

    assert second == first


@each_end
def test_an_end_whose_reply_was_lost_is_known_to_be_accepted(
    store: Store, end: End, lose_replies: LoseReplies
) -> None:
    lease = running(store)

    with lose_replies(store, 1):
        answer = end.call(store, lease)

    assert isinstance(answer, Accepted)
    assert answer.finished_at == job_row(store)["finished_at"]
    assert job_row(store)["state"] == end.job_state


@each_end
def test_an_end_repeated_when_the_job_runs_again_leaves_the_new_run_alone(
    store: Store, end: End
) -> None:
    """The reply was lost, and meanwhile the job has gone on."""
    lease = running(store)
    end.call(store, lease)
    transitions.settle(store, [("job", 1, job_row(store)["finished_at"] or WORKER_NOW)])
    transitions.resume(store, "job", reason="again")
    move_back(store, "job", seconds=100)
    version = job_row(store)["message_version"]
    claimed(store, owner=OTHER, message_version=version)

    with nothing_changes(store):
        answer = end.call(store, lease)

    assert isinstance(answer, Accepted)
    assert answer.finished_at is None


@each_end
def test_an_end_after_expiry_is_accepted_while_nobody_has_acted(store: Store, end: End) -> None:
    lease = expired(store)

    answer = end.call(store, lease)

    assert isinstance(answer, Accepted)
    assert job_row(store)["state"] == end.job_state


@both_ways
def test_an_end_whose_job_row_is_held_for_long_is_asked_for_again_by_the_caller(
    row_store: Store, end: End
) -> None:
    lease = running(row_store)

    with holding(row_store, lock_job(row_store, read=True)), nothing_changes(row_store):
        started = store_now(row_store)
        with pytest.raises(StoreUnavailable, match="locked by another transaction"):
            end.call(row_store, lease)
        took = (store_now(row_store) - started).total_seconds()

    assert took < 4
    assert isinstance(end.call(row_store, lease), Accepted)


@both_ways
def test_an_end_waits_for_a_short_lock_of_the_job_row(store: Store, end: End) -> None:
    lease = running(store)

    with holding(store, lock_job(store)) as holder:
        started = store_now(store)
        with in_background(lambda: end.call(store, lease)) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.05)
            holder.rollback()
            assert isinstance(answer(), Accepted)


@each_end
def test_progress_and_checkpoint_that_no_heartbeat_wrote_are_kept(store: Store, end: End) -> None:
    lease = running(store)
    transitions.renew(store, [renewal(lease, progress="1", checkpoint="old")])

    end.call(store, lease, checkpoint="new")

    assert attempt_row(store, lease)["progress"] == "1"
    assert attempt_row(store, lease)["checkpoint"] == "new"


# --- complete -----------------------------------------------------------------------------------


def test_a_completion_makes_the_attempts_result_the_jobs(store: Store) -> None:
    lease = running(store)
    now = store_now(store)

    with changes_of(store) as changes:
        complete(store, lease)

    assert about(changes.pop("job job.finished_at"), now)
    assert about(changes.pop("attempt job 1.ended_at"), now)
    assert changes == {
        "job job.state": "succeeded",
        "job job.state_reason": "said so",
        "job job.lease_owner": None,
        "job job.accepted_attempt": 1,
        "job job.accepted_late": False,
        "job job.result": b"42",
        "job job.result_type": JSON,
        "attempt job 1.state": "completed",
        "attempt job 1.stop_reason": "said so",
        "attempt job 1.worker_ended_at": WORKER_NOW,
    }


def test_a_completion_of_a_lease_that_had_ended_is_marked_late(store: Store) -> None:
    complete(store, running(store, "in time"))
    complete(store, expired(store, "late"))

    assert job_row(store, "in time")["accepted_late"] is False
    assert job_row(store, "late")["accepted_late"] is True


def test_an_earlier_attempt_that_expired_makes_no_completion_late(store: Store) -> None:
    expired(store)
    transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)

    complete(store, claimed(store))

    assert job_row(store)["accepted_late"] is False


def test_a_completion_without_anybody_to_tell_is_settled_at_once(store: Store) -> None:
    complete(store, running(store, "told"), settled=True)
    complete(store, running(store, "untold"), settled=False)

    assert job_row(store, "told")["settled_at"] == job_row(store, "told")["finished_at"]
    assert job_row(store, "untold")["settled_at"] is None


def test_a_completion_without_a_result_has_none(store: Store) -> None:
    complete(store, running(store), result=None, result_type=None)

    assert job_row(store)["result"] is None


def test_a_large_result_is_kept_byte_for_byte(store: Store) -> None:
    result = bytes(range(256)) * 4096

    complete(store, running(store), result=result)

    assert job_row(store)["result"] == result


# --- fail ---------------------------------------------------------------------------------------


def test_a_failure_is_kept_on_the_job_and_in_full_on_the_attempt(store: Store) -> None:
    lease = running(store)

    with changes_of(store) as changes:
        fail(store, lease)

    assert changes.pop("job job.finished_at") is not None
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "failed",
        "job job.state_reason": "said so",
        "job job.lease_owner": None,
        "job job.failure_count": 1,
        "job job.accepted_attempt": 1,
        "job job.accepted_late": False,
        "job job.result": b'"wrong"',
        "job job.result_type": JSON,
        "job job.error_type": "builtins.ValueError",
        "job job.error_message": "wrong",
        "attempt job 1.state": "failed",
        "attempt job 1.stop_reason": "said so",
        "attempt job 1.worker_ended_at": WORKER_NOW,
        "attempt job 1.error_type": "builtins.ValueError",
        "attempt job 1.error_message": "wrong",
        "attempt job 1.traceback": "Traceback …",
        "attempt job 1.failure_class": "error",
        "attempt job 1.retryable": False,
    }


def test_a_failure_is_not_counted_as_a_lost_runner(store: Store) -> None:
    fail(store, running(store))

    assert job_row(store)["lost_count"] == 0


# --- retry_later --------------------------------------------------------------------------------


def test_a_retry_waits_with_the_next_version_of_its_message(store: Store) -> None:
    lease = running(store)
    now = store_now(store)
    next_run = again(
        delay_seconds=60.0, expires_seconds=90.0, queue="slow", priority=5, dispatched=True
    )

    with changes_of(store) as changes:
        answer = transitions.retry_later(store, lease, parting(failure=FAILURE), next_run)

    assert answer == Accepted(None, 60.0)
    assert about(changes.pop("job job.available_at"), now, seconds=60)
    assert about(changes.pop("job job.expires_at"), now, seconds=90)
    assert about(changes.pop("job job.dispatched_at"), now)
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "retry_wait",
        "job job.state_reason": "said so",
        "job job.lease_owner": None,
        "job job.failure_count": 1,
        "job job.message_version": 2,
        "job job.dispatch_count": 2,
        "job job.queue": "slow",
        "job job.priority": 5,
        "attempt job 1.state": "retried",
        "attempt job 1.stop_reason": "said so",
        "attempt job 1.worker_ended_at": WORKER_NOW,
        "attempt job 1.error_type": "builtins.ValueError",
        "attempt job 1.error_message": "wrong",
        "attempt job 1.traceback": "Traceback …",
        "attempt job 1.failure_class": "error",
        "attempt job 1.retryable": False,
        "message job 2": "added",
    }
    assert queries.message(store, "job", 2) == new_message(2, body=b"again")
    assert queries.message(store, "job", 1) == new_message(1)


def test_a_retry_without_a_delay_is_queued(store: Store) -> None:
    transitions.retry_later(store, running(store), parting(), again(delay_seconds=0.0))

    assert job_row(store)["state"] == JobState.QUEUED


def test_a_retry_that_is_not_published_yet_is_left_to_the_reaper(store: Store) -> None:
    transitions.retry_later(store, running(store), parting(), again(dispatched=False))

    assert job_row(store)["dispatched_at"] is None
    assert job_row(store)["dispatch_count"] == 1
    assert [found.job_id for found in queries.undispatched(store, limit=9)] == ["job"]


def test_a_retry_has_no_expires_unless_it_says_so(store: Store) -> None:
    transitions.retry_later(store, running(store, expires_seconds=90.0), parting(), again())

    assert job_row(store)["expires_at"] is None


def test_a_retry_keeps_the_deadline(store: Store) -> None:
    lease = running(store, deadline_seconds=90.0)
    deadline = job_row(store)["deadline_at"]

    transitions.retry_later(store, lease, parting(), again())

    assert job_row(store)["deadline_at"] == deadline


def test_only_the_newest_message_claims_after_a_retry(store: Store) -> None:
    transitions.retry_later(store, running(store), parting(), again())

    old = transitions.claim(store, new_delivery(message_version=1))
    new = transitions.claim(store, new_delivery(message_version=2))

    assert old == Refused(Refusal.SUPERSEDED, JobState.QUEUED)
    assert isinstance(new, Claimed)
    assert new.lease.fencing_token == 2


def test_a_stale_retry_leaves_no_message(store: Store) -> None:
    lease = running(store)
    transitions.cancel(store, "job")

    transitions.retry_later(store, lease, parting(), again())

    assert rows(store)["message"].keys() == {("job", 1)}


# --- replace, replace_away ----------------------------------------------------------------------


def test_a_replacement_runs_under_the_same_id_as_another_task(store: Store) -> None:
    lease = running(store)

    with changes_of(store) as changes:
        answer = transitions.replace(
            store, lease, parting(), again(task="app.next", queue="slow", dispatched=False)
        )

    assert answer == Accepted(None, 0.0)
    assert changes.pop("job job.available_at") is not None
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": "said so",
        "job job.task": "app.next",
        "job job.lease_owner": None,
        "job job.message_version": 2,
        "job job.dispatched_at": None,
        "job job.queue": "slow",
        "attempt job 1.state": "replaced",
        "attempt job 1.stop_reason": "said so",
        "attempt job 1.worker_ended_at": WORKER_NOW,
        "message job 2": "added",
    }


def test_a_replacement_with_a_delay_is_scheduled(store: Store) -> None:
    next_run = again(task="app.next", delay_seconds=60.0)

    transitions.replace(store, running(store), parting(), next_run)

    assert job_row(store)["state"] == JobState.SCHEDULED


def test_a_job_replaced_by_a_task_without_a_lease_is_done_and_settled(store: Store) -> None:
    lease = running(store)

    transitions.replace_away(store, lease, parting("replaced"))

    job = job_row(store)
    assert (job["state"], job["state_reason"]) == (JobState.SUCCEEDED, "replaced")
    assert job["settled_at"] is not None
    assert job["result"] is None
    assert attempt_row(store, lease)["state"] == AttemptState.REPLACED


# --- reopen -------------------------------------------------------------------------------------


def replaced_away(store: Store) -> Held:
    lease = running(store)
    transitions.replace_away(store, lease, parting("replaced"))
    return lease


def test_a_job_whose_canvas_reaches_the_task_with_its_id_goes_on(store: Store) -> None:
    lease = replaced_away(store)
    transitions.replace_away(store, running(store, "other"), parting("replaced"))

    with changes_of(store) as changes:
        answer = transitions.reopen(store, "job", again(task="app.last", dispatched=False))

    assert answer is True
    assert changes.pop("job job.available_at") is not None
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": None,
        "job job.task": "app.last",
        "job job.message_version": 2,
        "job job.dispatched_at": None,
        "job job.accepted_attempt": None,
        "job job.accepted_late": None,
        "job job.finished_at": None,
        "job job.settled_at": None,
        "message job 2": "added",
    }
    assert claimed(store, message_version=2).fencing_token == lease.fencing_token + 1


def test_a_job_goes_on_after_a_canvas_once(store: Store) -> None:
    replaced_away(store)
    transitions.reopen(store, "job", again(task="app.last"))

    with nothing_changes(store):
        while_queued = transitions.reopen(store, "job", again(3, task="app.last"))
    transitions.replace_away(store, claimed(store, message_version=2), parting("replaced"))
    with nothing_changes(store):
        old_version = transitions.reopen(store, "job", again(2, task="app.last"))

    assert (while_queued, old_version) == (False, False)


def test_a_job_that_ended_otherwise_does_not_go_on(store: Store) -> None:
    complete(store, running(store, "done"), settled=True)
    fail(store, running(store, "failed"))
    running(store, "running")

    with nothing_changes(store):
        answers = [
            transitions.reopen(store, job_id, again(task="app.last"))
            for job_id in ("done", "failed", "running", "gone")
        ]

    assert answers == [False] * 4


# --- release ------------------------------------------------------------------------------------


def test_a_released_job_is_queued_at_once_and_counted_as_nothing(store: Store) -> None:
    lease = running(store)
    now = store_now(store)

    with changes_of(store) as changes:
        transitions.release(store, lease, parting("hand_over", checkpoint="7"))

    assert about(changes.pop("job job.available_at"), now)
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": "hand_over",
        "job job.lease_owner": None,
        "job job.dispatched_at": None,
        "attempt job 1.state": "released",
        "attempt job 1.stop_reason": "hand_over",
        "attempt job 1.worker_ended_at": WORKER_NOW,
        "attempt job 1.checkpoint": "7",
    }


def test_a_released_job_is_claimed_by_its_own_message_and_goes_on_from_the_checkpoint(
    store: Store,
) -> None:
    transitions.release(store, running(store), parting(checkpoint="7"))

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert answer == Claimed(Held("job", 2, OTHER), 1, 0, checkpoint="7")


def test_a_release_may_say_when(store: Store) -> None:
    lease = running(store)
    now = store_now(store)

    answer = transitions.release(store, lease, parting(), delay_seconds=60.0)

    assert answer == Accepted(None, 60.0)
    assert job_row(store)["state"] == JobState.RETRY_WAIT
    assert about(job_row(store)["available_at"], now, seconds=60)


# --- hold ---------------------------------------------------------------------------------------


def test_a_held_job_waits_for_a_person_with_its_error(store: Store) -> None:
    lease = running(store)

    with changes_of(store) as changes:
        answer = transitions.hold(store, lease, parting("unsafe", failure=FAILURE))

    assert answer == Accepted(None, 0.0)
    assert changes.pop("attempt job 1.ended_at") is not None
    assert {k: v for k, v in changes.items() if k.startswith("job")} == {
        "job job.state": "held",
        "job job.state_reason": "unsafe",
        "job job.lease_owner": None,
        "job job.failure_count": 1,
        "job job.error_type": "builtins.ValueError",
        "job job.error_message": "wrong",
        "job job.dispatched_at": None,
    }
    assert attempt_row(store, lease)["state"] == AttemptState.FAILED
    assert attempt_row(store, lease)["failure_class"] == "error"


def test_a_held_job_is_not_dispatched(store: Store) -> None:
    transitions.hold(store, running(store), parting())

    assert queries.undispatched(store, limit=9) == []
    assert queries.unsettled(store, grace_seconds=0, again_seconds=0, limit=9) == []


def test_a_failure_after_a_hold_of_the_same_attempt_is_not_taken_for_accepted(
    store: Store,
) -> None:
    """Both leave the attempt ``failed``; only one of them ended the job."""
    lease = running(store)
    transitions.hold(store, lease, parting("unsafe"))

    with nothing_changes(store):
        answer = fail(store, lease)

    assert answer == Stale(AttemptState.FAILED)


def test_a_hold_after_a_failure_of_the_same_attempt_is_not_taken_for_accepted(
    store: Store,
) -> None:
    lease = running(store)
    fail(store, lease)

    with nothing_changes(store):
        answer = transitions.hold(store, lease, parting("unsafe"))

    assert answer == Stale(AttemptState.FAILED)


# --- raced --------------------------------------------------------------------------------------


@ROUNDS
def test_complete_against_expire_has_one_winner(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        lease = expired(store, f"job{number}")

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            done, given_on = at_once(
                lambda: complete(store, lease),
                lambda: transitions.expire(other_store, limit=9, lost_backoff=NO_BACKOFF),
            )

        assert errors == other_errors == []
        found = rows(store)
        job, attempt = found["job"][lease.job_id], found["attempt"][lease.job_id, 1]
        if given_on:
            assert done == Stale(AttemptState.EXPIRED)
            assert (job["state"], job["lost_count"], job["result"]) == (JobState.QUEUED, 1, None)
            assert attempt["state"] == AttemptState.EXPIRED
        else:
            assert isinstance(done, Accepted)
            assert (job["state"], job["lost_count"]) == (JobState.SUCCEEDED, 0)
            assert attempt["state"] == AttemptState.COMPLETED
        assert (job["finished_at"] is None) == bool(given_on)
        transitions.cancel(store, lease.job_id)


@ROUNDS
def test_complete_against_cancel_has_one_winner(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        lease = running(store, f"job{number}")

        done, cancelled = at_once(
            lambda: complete(store, lease), lambda: transitions.cancel(other_store, lease.job_id)
        )

        job, attempt = job_row(store, lease.job_id), attempt_row(store, lease)
        assert job["state"] == cancelled
        if cancelled is JobState.CANCELLED:
            assert done == Stale(AttemptState.CANCELLED)
            assert (attempt["state"], job["result"]) == (AttemptState.CANCELLED, None)
        else:
            assert isinstance(done, Accepted)
            assert attempt["state"] == AttemptState.COMPLETED


@ROUNDS
def test_a_reported_death_against_complete_has_one_winner(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        lease = running(store, f"job{number}", on_expiry=OnExpiry.RETRY)

        done, vanished = at_once(
            lambda: complete(store, lease),
            lambda: transitions.lost(
                other_store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF
            ),
        )

        job = job_row(store, lease.job_id)
        if vanished is None:
            assert isinstance(done, Accepted)
            assert job["state"] == JobState.SUCCEEDED
        else:
            assert done == Stale(AttemptState.LOST)
            assert (job["state"], job["lost_count"]) == (JobState.QUEUED, 1)


@ROUNDS
def test_one_completion_made_by_many_at_once_is_one_completion(
    store: Store, other_store: Store, rounds: int
) -> None:
    """Repetitions after lost replies may overtake each other."""
    for number in range(rounds):
        lease = running(store, f"job{number}")

        answers = at_once(*[lambda s=s: complete(s, lease) for s in (store, other_store)] * 3)

        finished_at = job_row(store, lease.job_id)["finished_at"]
        assert answers == [Accepted(finished_at, 0.0)] * 6


def test_a_job_that_was_never_claimed_has_no_end_of_a_runner(store: Store) -> None:
    submitted(store)

    with nothing_changes(store):
        answers = [end.call(store, Held("job", 0, ONE)) for end in ENDS.values()]

    assert answers == [Stale(None)] * len(ENDS)
