"""cancel, hold_waiting, resume, accept, refuse: what a person decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Claimed, Renewed, Stale
from celery_lease.states import AttemptState, JobState, LossCause
from celery_lease.store import queries, transitions
from tests.store.builders import (
    FAILURE,
    JSON,
    NO_BACKOFF,
    OTHER,
    about,
    again,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    expired,
    finished,
    holding,
    job_row,
    lock_job,
    move_back,
    new_delivery,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_lease.store.engine import Store


def held(store: Store, job_id: str = "job", **job: Any) -> str:
    """Record a job whose body left it to a person."""
    lease = running(store, job_id, **job)
    transitions.hold(store, lease, parting("unsafe", failure=FAILURE))
    return job_id


def brought_to(store: Store, state: JobState) -> None:
    """Record a job and bring it to a state; final ones are settled."""
    if state is JobState.SCHEDULED:
        submitted(store, delay_seconds=60.0)
    elif state is JobState.QUEUED:
        submitted(store)
    elif state is JobState.HELD:
        held(store)
    elif state is JobState.CANCELLED:
        submitted(store)
        transitions.cancel(store, "job")
    else:
        _brought_on(store, state)
    job = job_row(store)
    if state.is_final:
        transitions.settle(store, [("job", job["fencing_token"], job["finished_at"])])
    assert job["state"] == state


def _brought_on(store: Store, state: JobState) -> None:
    if state is JobState.INTERRUPTED:
        lease = running(store, max_attempts=1)
        transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
        return
    lease = running(store)
    if state is JobState.RETRY_WAIT:
        transitions.retry_later(store, lease, parting(), again(delay_seconds=60.0))
    elif state is JobState.SUCCEEDED:
        transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
    elif state is JobState.FAILED:
        said = parting(failure=FAILURE)
        transitions.fail(store, lease, said, error=b"1", error_content_type=JSON)


FINAL = [state for state in JobState if state.is_final]
WAITING = [JobState.SCHEDULED, JobState.QUEUED, JobState.RETRY_WAIT]


# --- cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [*WAITING, JobState.HELD])
def test_a_job_that_does_not_run_is_cancelled(store: Store, state: JobState) -> None:
    brought_to(store, state)

    with changes_of(store) as changes:
        answer = transitions.cancel(store, "job", reason="not wanted")

    assert answer is JobState.CANCELLED
    assert changes.pop("job job.finished_at") is not None
    assert changes == {"job job.state": "cancelled", "job job.state_reason": "not wanted"}


def test_a_running_job_is_cancelled_together_with_its_attempt(store: Store) -> None:
    lease = running(store)
    running(store, "other")
    now = store_now(store)

    with changes_of(store) as changes:
        answer = transitions.cancel(store, "job", reason="not wanted")

    assert answer is JobState.CANCELLED
    assert about(changes.pop("job job.finished_at"), now)
    assert about(changes.pop("attempt job 1.ended_at"), now)
    assert changes == {
        "job job.state": "cancelled",
        "job job.state_reason": "not wanted",
        "job job.lease_owner": None,
        "attempt job 1.state": "cancelled",
        "attempt job 1.stop_reason": "not wanted",
    }
    assert transitions.renew(store, [renewal(lease)]) == Renewed(
        frozenset(), {("job", 1): AttemptState.CANCELLED}, frozenset()
    )


def test_the_earlier_attempts_of_a_cancelled_job_stay_as_they_were(store: Store) -> None:
    first = running(store)
    transitions.release(store, first, parting())
    claimed(store)

    transitions.cancel(store, "job")

    assert attempt_row(store, first)["state"] == AttemptState.RELEASED


@pytest.mark.parametrize("state", FINAL)
def test_a_final_job_is_not_cancelled(store: Store, state: JobState) -> None:
    brought_to(store, state)

    with nothing_changes(store):
        answer = transitions.cancel(store, "job")

    assert answer is state


def test_a_job_without_a_row_is_not_cancelled(store: Store) -> None:
    assert transitions.cancel(store, "job") is None


def test_a_cancel_whose_job_row_stays_locked_is_asked_for_again(row_store: Store) -> None:
    running(row_store)

    with (
        holding(row_store, lock_job(row_store, read=True)),
        nothing_changes(row_store),
        pytest.raises(StoreUnavailable, match="locked by another transaction"),
    ):
        transitions.cancel(row_store, "job")


def test_a_cancel_of_a_locked_final_job_says_so(row_store: Store) -> None:
    finished(row_store, running(row_store))

    with holding(row_store, lock_job(row_store, read=True)):
        answer = transitions.cancel(row_store, "job")

    assert answer is JobState.SUCCEEDED


def test_a_cancel_against_a_claim_leaves_no_attempt_alive(store: Store, other_store: Store) -> None:
    for number in range(5):
        job_id = submitted(store, f"job{number}")

        answer, _ = at_once(
            lambda job_id=job_id: transitions.claim(store, new_delivery(job_id)),
            lambda job_id=job_id: transitions.cancel(other_store, job_id),
        )

        found = rows(store)
        assert found["job"][job_id]["state"] == JobState.CANCELLED
        attempts = [row for key, row in found["attempt"].items() if key[0] == job_id]
        assert len(attempts) == isinstance(answer, Claimed)
        assert all(row["state"] == AttemptState.CANCELLED for row in attempts)


# --- hold_waiting -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", WAITING)
def test_a_waiting_job_is_held(store: Store, state: JobState) -> None:
    brought_to(store, state)

    with changes_of(store) as changes:
        answer = transitions.hold_waiting(store, "job", reason="look")

    assert answer is JobState.HELD
    assert changes == {
        "job job.state": "held",
        "job job.state_reason": "look",
        "job job.dispatched_at": None,
    }


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.HELD, *FINAL])
def test_a_job_that_does_not_wait_is_not_held(store: Store, state: JobState) -> None:
    brought_to(store, state)

    with nothing_changes(store):
        answer = transitions.hold_waiting(store, "job", reason="look")

    assert answer is state


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.HELD, *FINAL])
def test_a_held_or_settled_job_is_resumed(store: Store, state: JobState) -> None:
    brought_to(store, state)
    before = job_row(store)
    history = rows(store)["attempt"]
    move_back(store, "job", seconds=60)
    now = store_now(store)

    answer = transitions.resume(store, "job", reason="fixed")

    assert answer is JobState.QUEUED
    job = job_row(store)
    assert (job["state"], job["state_reason"]) == (JobState.QUEUED, "fixed")
    assert about(job["available_at"], now)
    cleared = (
        "dispatched_at",
        "accepted_attempt",
        "accepted_late",
        "result",
        "result_type",
        "error_type",
        "error_message",
        "settled_at",
        "finished_at",
        "expires_at",
        "deadline_at",
    )
    assert {name: job[name] for name in cleared} == dict.fromkeys(cleared)
    assert (job["lost_count"], job["failure_count"]) == (0, 0)
    kept = ("fencing_token", "message_version", "dispatch_count", "max_attempts", "task")
    assert [job[name] for name in kept] == [before[name] for name in kept]
    assert rows(store)["attempt"].keys() == history.keys()
    assert [one.job_id for one in queries.undispatched(store, limit=9)] == ["job"]


def test_the_next_message_of_a_resumed_job_is_never_its_first(store: Store) -> None:
    """The first one is refused where its id is remembered as revoked."""
    submitted(store, dispatched=False)
    transitions.cancel(store, "job")
    ended = job_row(store)
    transitions.settle(store, [("job", ended["fencing_token"], ended["finished_at"])])
    transitions.resume(store, "job", reason="again")

    candidate = queries.dispatchable(store, "job")

    assert candidate is not None
    assert transitions.dispatch(store, candidate)
    assert job_row(store)["dispatch_count"] == 2
    with nothing_changes(store):
        assert not transitions.cancel_dispatched(store, "job", dispatch_count=1, reason="x")


def test_a_resumed_job_runs_under_the_next_token(store: Store) -> None:
    finished(store, running(store))
    transitions.resume(store, "job", reason="again")

    lease = claimed(store, owner=OTHER)

    assert lease.fencing_token == 2
    assert attempt_row(store, lease)["state"] == AttemptState.CLAIMED


@pytest.mark.parametrize("state", [*WAITING, JobState.RUNNING])
def test_a_job_that_goes_on_by_itself_is_not_resumed(store: Store, state: JobState) -> None:
    brought_to(store, state)

    with nothing_changes(store):
        answer = transitions.resume(store, "job", reason="again")

    assert answer is state


def test_a_final_job_that_is_not_settled_is_not_resumed(store: Store) -> None:
    """Its outcome would be told to nobody, or be told in the middle of the next run."""
    finished(store, running(store), settled=False)

    with nothing_changes(store):
        answer = transitions.resume(store, "job", reason="again")

    assert answer is JobState.SUCCEEDED


def test_deadlines_that_have_passed_are_cleared(store: Store) -> None:
    held(store, expires_seconds=10.0, deadline_seconds=10.0)
    move_back(store, "job", seconds=11)

    transitions.resume(store, "job", reason="again")

    job = job_row(store)
    assert job["expires_at"] is job["deadline_at"] is None
    claimed(store)


def test_deadlines_that_are_still_to_come_stay(store: Store) -> None:
    held(store, expires_seconds=1000.0, deadline_seconds=2000.0)
    before = job_row(store)

    transitions.resume(store, "job", reason="again")

    job = job_row(store)
    assert job["expires_at"] == before["expires_at"]
    assert job["deadline_at"] == before["deadline_at"]


def test_new_deadlines_are_taken(store: Store) -> None:
    held(store, expires_seconds=10.0, deadline_seconds=10.0)
    now = store_now(store)

    transitions.resume(store, "job", reason="again", expires_seconds=100.0, deadline_seconds=200.0)

    assert about(job_row(store)["expires_at"], now, seconds=100)
    assert about(job_row(store)["deadline_at"], now, seconds=200)


def test_a_resume_of_the_same_job_by_two_is_one_resume(store: Store, other_store: Store) -> None:
    finished(store, running(store))

    answers = at_once(
        *[lambda s=s: transitions.resume(s, "job", reason="again") for s in (store, other_store)]
    )

    assert answers == [JobState.QUEUED, JobState.QUEUED]
    assert job_row(store)["state"] == JobState.QUEUED


def test_whoever_ran_it_before_the_resume_is_stale(store: Store) -> None:
    frozen = expired(store)
    transitions.cancel(store, "job")
    job = job_row(store)
    transitions.settle(store, [("job", 1, job["finished_at"])])
    transitions.resume(store, "job", reason="again")

    with nothing_changes(store):
        answer = transitions.complete(store, frozen, parting(), result=b"1", result_type=JSON)

    assert answer == Stale(AttemptState.CANCELLED)


# --- accept, refuse -----------------------------------------------------------------------------


def test_a_held_job_is_accepted_with_the_operators_result(store: Store) -> None:
    held(store)

    with changes_of(store) as changes:
        answer = transitions.accept(store, "job", reason="done", result=b"9", result_type=JSON)

    assert answer is JobState.SUCCEEDED
    assert changes.pop("job job.finished_at") is not None
    assert changes == {
        "job job.state": "succeeded",
        "job job.state_reason": "done",
        "job job.result": b"9",
        "job job.result_type": JSON,
        "job job.accepted_attempt": 1,
        "job job.error_type": None,
        "job job.error_message": None,
    }
    found = queries.outcome(store, "job")
    assert found is not None
    assert found[0].result == b"9"


def test_a_held_job_is_given_up_with_its_error(store: Store) -> None:
    held(store)

    with changes_of(store) as changes:
        answer = transitions.refuse(store, "job", reason="no use")

    assert answer is JobState.FAILED
    assert changes.pop("job job.finished_at") is not None
    assert changes == {"job job.state": "failed", "job job.state_reason": "no use"}
    assert job_row(store)["error_type"] == "builtins.ValueError"


def test_a_job_that_was_held_without_an_error_gets_one_when_it_is_given_up(store: Store) -> None:
    submitted(store)
    transitions.hold_waiting(store, "job", reason="look")

    transitions.refuse(store, "job", reason="no use")

    job = job_row(store)
    assert job["error_type"] == "celery_lease.exceptions.JobEnded"
    assert job["error_message"] == "refused by an operator"


def _accept(store: Store) -> JobState | None:
    return transitions.accept(store, "job", reason="x", result=None, result_type=None)


def _refuse(store: Store) -> JobState | None:
    return transitions.refuse(store, "job", reason="x")


@pytest.mark.parametrize("decide", [_accept, _refuse], ids=["accept", "refuse"])
@pytest.mark.parametrize("state", [*WAITING, JobState.RUNNING, *FINAL])
def test_only_a_held_job_is_decided(
    store: Store, state: JobState, decide: Callable[[Store], JobState | None]
) -> None:
    brought_to(store, state)

    with nothing_changes(store):
        answer = decide(store)

    assert answer is state


@pytest.mark.parametrize(
    "decide",
    [
        _accept,
        _refuse,
        lambda store: transitions.resume(store, "job", reason="x"),
        lambda store: transitions.hold_waiting(store, "job", reason="x"),
    ],
    ids=["accept", "refuse", "resume", "hold"],
)
def test_a_job_without_a_row_is_not_decided(
    store: Store, decide: Callable[[Store], JobState | None]
) -> None:
    submitted(store, "another")

    with nothing_changes(store):
        answer = decide(store)

    assert answer is None


@pytest.mark.parametrize("decision", ["accept", "refuse", "resume", "hold"])
def test_a_decision_whose_reply_was_lost_is_in_force(
    store: Store, decision: str, lose_replies: Callable[..., Any]
) -> None:
    if decision == "hold":
        submitted(store)
    else:
        held(store)
    calls = {
        "accept": _accept,
        "refuse": _refuse,
        "resume": lambda store: transitions.resume(store, "job", reason="x"),
        "hold": lambda store: transitions.hold_waiting(store, "job", reason="x"),
    }

    with lose_replies(store, 1):
        answer = calls[decision](store)

    reached = {"accept": "succeeded", "refuse": "failed", "resume": "queued", "hold": "held"}
    assert answer == reached[decision] == job_row(store)["state"]
