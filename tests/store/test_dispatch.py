"""dispatch, undispatch, settle, and what the reaper and the dispatcher read."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from celery_lease.backoff import redispatch_gap_seconds
from celery_lease.records import Dispatchable, Refused, Replay
from celery_lease.states import JobState, LossCause, OnExpiry, Refusal
from celery_lease.store import queries, transitions
from tests.store.builders import (
    FAILURE,
    JSON,
    NO_BACKOFF,
    ROUNDS,
    about,
    again,
    at_once,
    changes_of,
    claimed,
    finished,
    job_row,
    move_back,
    new_delivery,
    nothing_changes,
    parting,
    running,
    set_job,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.records import Outcome
    from celery_lease.store.engine import Store


def candidate(store: Store, job_id: str = "job") -> Dispatchable:
    """Return an undispatched job as the dispatcher reads it."""
    found = queries.dispatchable(store, job_id)
    assert found is not None
    return found


def unsettled(store: Store, **changes: float) -> list[str]:
    bounds = {"grace_seconds": 30.0, "again_seconds": 60.0, "limit": 100} | changes
    return [outcome.job_id for outcome, _ in queries.unsettled(store, **bounds)]  # type: ignore[arg-type]


def named(outcome: Outcome) -> tuple[str, int, object]:
    return outcome.job_id, outcome.fencing_token, outcome.finished_at


# --- dispatch -----------------------------------------------------------------------------------


def test_a_dispatch_is_recorded_before_the_message_leaves(store: Store) -> None:
    submitted(store, dispatched=False)
    now = store_now(store)
    found = candidate(store)

    with changes_of(store) as changes:
        answer = transitions.dispatch(store, found)

    assert answer is True
    assert about(changes.pop("job job.dispatched_at"), now)
    assert changes == {"job job.dispatch_count": 1}
    assert queries.undispatched(store, limit=9) == []


def test_a_job_that_another_has_dispatched_is_not_dispatched_again(store: Store) -> None:
    submitted(store, dispatched=False)
    found = candidate(store)
    transitions.dispatch(store, found)

    with nothing_changes(store):
        answer = transitions.dispatch(store, found)

    assert answer is False


def test_a_job_with_a_newer_message_is_not_dispatched_with_the_older(store: Store) -> None:
    submitted(store, dispatched=False)
    found = candidate(store)
    lease = claimed(store)
    transitions.retry_later(store, lease, parting(), again(dispatched=False))

    with nothing_changes(store):
        answer = transitions.dispatch(store, found)

    assert answer is False


@pytest.mark.parametrize("state", ["running", "held", "cancelled", "scheduled"])
def test_a_job_that_is_not_queued_any_more_is_not_dispatched(store: Store, state: str) -> None:
    submitted(store, dispatched=False)
    found = candidate(store)
    if state == "running":
        claimed(store)
    elif state == "held":
        transitions.hold_waiting(store, "job", reason="x")
    elif state == "cancelled":
        transitions.cancel(store, "job")
    else:
        transitions.release(store, claimed(store), parting(), delay_seconds=60.0)

    with nothing_changes(store):
        answer = transitions.dispatch(store, found)

    assert answer is False


def test_another_job_is_not_dispatched(store: Store) -> None:
    submitted(store, "job", dispatched=False)
    submitted(store, "other", dispatched=False)

    with changes_of(store) as changes:
        transitions.dispatch(store, candidate(store))

    assert {name.partition(".")[0] for name in changes} == {"job job"}


@ROUNDS
def test_of_many_dispatchers_at_once_exactly_one_publishes(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        submitted(store, f"job{number}", dispatched=False)
        found = candidate(store, f"job{number}")

        answers = at_once(
            *[lambda s=s: transitions.dispatch(s, found) for s in (store, other_store)] * 3
        )

        assert answers.count(True) == 1
        assert job_row(store, f"job{number}")["dispatch_count"] == 1


def test_a_final_unsettled_job_is_dispatched_only_as_a_replay(store: Store) -> None:
    finished(store, running(store), settled=False)
    found = queries.outcome(store, "job")
    assert found is not None

    assert transitions.dispatch(store, found[1]) is False
    assert transitions.dispatch(store, found[1], replay=True) is True
    assert transitions.dispatch(store, found[1], replay=True) is False


def test_a_settled_or_unfinished_job_is_not_replayed(store: Store) -> None:
    finished(store, running(store, "settled"), settled=False)
    found = queries.outcome(store, "settled")
    assert found is not None
    transitions.settle(store, [named(found[0])])  # type: ignore[list-item]
    submitted(store, "queued", dispatched=False)

    with nothing_changes(store):
        answers = [
            transitions.dispatch(store, found[1], replay=True),
            transitions.dispatch(store, candidate(store, "queued"), replay=True),
        ]

    assert answers == [False, False]


# --- undispatch ---------------------------------------------------------------------------------


def test_a_message_that_did_not_leave_is_left_to_the_reaper(store: Store) -> None:
    """B124."""
    submitted(store, dispatched=True)
    submitted(store, "other", dispatched=True)

    with changes_of(store) as changes:
        answer = transitions.undispatch(store, "job", dispatch_count=1)

    assert answer is True
    assert changes == {"job job.dispatched_at": None}
    assert [one.job_id for one in queries.undispatched(store, limit=9)] == ["job"]


def test_a_message_that_another_has_sent_meanwhile_stays_sent(store: Store) -> None:
    submitted(store, dispatched=False)
    transitions.dispatch(store, candidate(store))
    transitions.undispatch(store, "job", dispatch_count=1)
    transitions.dispatch(store, candidate(store))

    with nothing_changes(store):
        answer = transitions.undispatch(store, "job", dispatch_count=1)

    assert answer is False


def test_a_job_that_has_moved_on_stays_as_it_is(store: Store) -> None:
    running(store, "running")
    finished(store, running(store, "done"))

    with nothing_changes(store):
        answers = [
            transitions.undispatch(store, name, dispatch_count=1)
            for name in ("running", "done", "gone")
        ]

    assert answers == [False, False, False]


def test_a_message_of_a_version_that_was_replaced_meanwhile_is_none_of_the_publishers(
    store: Store,
) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again())

    with nothing_changes(store):
        old = transitions.undispatch(store, "job", dispatch_count=None, message_version=1)
    new = transitions.undispatch(store, "job", dispatch_count=None, message_version=2)

    assert (old, new) == (False, True)
    assert job_row(store)["dispatched_at"] is None


# --- what is to be dispatched -------------------------------------------------------------------


def test_queued_jobs_without_a_message_are_found_the_longest_due_first(store: Store) -> None:
    for name, seconds in (("newest", 1), ("oldest", 30), ("older", 10)):
        submitted(store, name, dispatched=False)
        move_back(store, name, seconds=seconds)
    submitted(store, "sent")
    submitted(store, "later", delay_seconds=60.0, dispatched=False)
    running(store, "running", dispatched=False)

    found = [one.job_id for one in queries.undispatched(store, limit=9)]

    assert found == ["oldest", "older", "newest"]
    assert [one.job_id for one in queries.undispatched(store, limit=2)] == ["oldest", "older"]


def test_a_job_is_put_behind_the_others_that_are_to_be_sent(store: Store) -> None:
    for name, seconds in (("never", 30), ("two", 10), ("one", 5)):
        submitted(store, name, dispatched=False)
        move_back(store, name, seconds=seconds)
    submitted(store, "sent")
    move_back(store, "sent", seconds=60)
    running(store, "running", dispatched=False)
    move_back(store, "running", seconds=60)
    submitted(store, "later", delay_seconds=60.0, dispatched=False)

    assert transitions.put_last(store, "never")

    found = [one.job_id for one in queries.undispatched(store, limit=9)]
    assert found == ["two", "one", "never"]
    # It is due all the same.
    assert job_row(store, "never")["available_at"] <= store_now(store)
    for name in ("never", "sent", "running", "later", "absent"):
        with nothing_changes(store):
            assert not transitions.put_last(store, name), name


def test_a_candidate_says_what_the_publisher_needs(store: Store) -> None:
    submitted(store, dispatched=False, queue="slow", expires_seconds=60.0)

    found = candidate(store)

    assert found.due_seconds <= 0
    as_read = replace(found, expires_seconds=None, due_seconds=0.0)
    assert as_read == Dispatchable("job", "app.work", 0, 1, "slow")
    assert type(found.expires_seconds) is float
    assert 50 < found.expires_seconds <= 60


def test_a_candidate_without_expires_has_none(store: Store) -> None:
    submitted(store, dispatched=False)

    assert candidate(store).expires_seconds is None


def test_a_job_that_is_dispatched_or_not_queued_is_no_candidate(store: Store) -> None:
    submitted(store, "sent")
    running(store, "running", dispatched=False)

    assert queries.dispatchable(store, "sent") is None
    assert queries.dispatchable(store, "running") is None
    assert queries.dispatchable(store, "gone") is None


def test_a_message_that_nobody_claimed_is_sent_again_after_gaps_that_double(store: Store) -> None:
    submitted(store, dispatched=False)
    waited = 0.0

    for count in range(9):
        assert transitions.dispatch(store, Dispatchable("job", "app.work", count, 1, None))
        gap = redispatch_gap_seconds(100.0, waited)

        move_back(store, "job", seconds=gap - 60)
        assert queries.unclaimed(store, queued_timeout=100.0, limit=9) == []
        # And a little: what these steps take counts as waiting, too.
        move_back(store, "job", seconds=65)
        [found] = queries.unclaimed(store, queued_timeout=100.0, limit=9)
        assert found.dispatch_count == count + 1
        waited += gap + 5


def test_the_gaps_begin_anew_when_the_job_is_queued_anew(store: Store) -> None:
    """What it has been through before says nothing about this message."""
    submitted(store, dispatched=False)
    for count in range(7):
        assert transitions.dispatch(store, Dispatchable("job", "app.work", count, 1, None))
        move_back(store, "job", seconds=10_000)
    lease = claimed(store)
    move_back(store, "job", seconds=10_000)
    transitions.release(store, lease, parting())
    assert transitions.dispatch(store, Dispatchable("job", "app.work", 7, 1, None))

    move_back(store, "job", seconds=90)
    assert queries.unclaimed(store, queued_timeout=100.0, limit=9) == []
    move_back(store, "job", seconds=20)

    assert [one.job_id for one in queries.unclaimed(store, queued_timeout=100.0, limit=9)] == [
        "job"
    ]


def test_claimed_and_waiting_jobs_are_not_sent_again(store: Store) -> None:
    running(store, "running")
    submitted(store, "later", delay_seconds=6000.0)
    finished(store, running(store, "done"))
    for name in ("running", "later", "done"):
        move_back(store, name, seconds=1000)

    assert queries.unclaimed(store, queued_timeout=10.0, limit=9) == []


def test_unclaimed_jobs_are_found_the_longest_sent_first(store: Store) -> None:
    for name, seconds in (("newest", 100), ("oldest", 300), ("older", 200)):
        submitted(store, name)
        move_back(store, name, seconds=seconds)

    found = [one.job_id for one in queries.unclaimed(store, queued_timeout=10.0, limit=2)]

    assert found == ["oldest", "older"]


# --- unsettled ----------------------------------------------------------------------------------


def test_an_outcome_is_left_for_a_while_to_the_runner_that_made_it(store: Store) -> None:
    finished(store, running(store), settled=False)

    assert unsettled(store) == []

    move_back(store, "job", seconds=31)
    assert unsettled(store) == ["job"]


def test_an_end_that_no_body_returned_waits_for_nobody(store: Store) -> None:
    submitted(store, "cancelled")
    transitions.cancel(store, "cancelled")
    lease = running(store, "interrupted", max_attempts=1)
    transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)

    assert unsettled(store) == ["cancelled", "interrupted"]


def test_an_end_in_the_instant_of_its_dispatch_waits_for_nobody(store: Store) -> None:
    """SQLite's clock has milliseconds: the two are often the same."""
    submitted(store)
    transitions.cancel(store, "job")
    set_job(store, dispatched_at=store.tables.job.c.finished_at)

    assert unsettled(store) == ["job"]


def test_a_failure_of_the_body_is_left_to_its_runner_too(store: Store) -> None:
    said = parting(failure=FAILURE)
    transitions.fail(store, running(store), said, error=b"1", error_content_type=JSON)

    assert unsettled(store) == []


def test_a_replay_that_was_sent_is_not_sent_again_for_a_while(store: Store) -> None:
    finished(store, running(store), settled=False)
    move_back(store, "job", seconds=31)
    [(_, found)] = queries.unsettled(store, grace_seconds=30, again_seconds=60, limit=9)
    transitions.dispatch(store, found, replay=True)

    assert unsettled(store) == []

    move_back(store, "job", seconds=61)
    assert unsettled(store) == ["job"]


def test_settled_and_unfinished_jobs_have_nothing_to_settle(store: Store) -> None:
    finished(store, running(store, "settled"), settled=True)
    running(store, "running")
    for name in ("settled", "running"):
        move_back(store, name, seconds=1000)

    assert unsettled(store) == []
    assert queries.outcome(store, "settled") is None
    assert queries.outcome(store, "running") is None
    assert queries.outcome(store, "gone") is None


def test_an_outcome_says_all_that_celery_is_to_be_told(store: Store) -> None:
    said = parting("error", failure=FAILURE)
    transitions.fail(store, running(store), said, error=b'"wrong"', error_content_type=JSON)

    found = queries.outcome(store, "job")

    assert found is not None
    outcome, as_candidate = found
    assert (outcome.state, outcome.state_reason) == (JobState.FAILED, "error")
    assert (outcome.result, outcome.result_type) == (b'"wrong"', JSON)
    assert (outcome.error_type, outcome.error_message) == ("builtins.ValueError", "wrong")
    assert outcome.by_attempt is True
    assert replace(as_candidate, due_seconds=0.0) == Dispatchable("job", "app.work", 1, 1, None)


# --- settle -------------------------------------------------------------------------------------


def test_a_settled_job_is_neither_replayed_nor_found_again(store: Store) -> None:
    finished(store, running(store), settled=False)
    move_back(store, "job", seconds=1000)
    found = queries.outcome(store, "job")
    assert found is not None

    with changes_of(store) as changes:
        count = transitions.settle(store, [named(found[0])])  # type: ignore[list-item]

    assert count == 1
    assert changes.keys() == {"job job.settled_at"}
    assert unsettled(store) == []
    assert transitions.claim(store, new_delivery()) == Refused(Refusal.FINAL, JobState.SUCCEEDED)


def test_a_job_is_settled_once(store: Store) -> None:
    finished(store, running(store), settled=True)
    job = job_row(store)

    with nothing_changes(store):
        count = transitions.settle(store, [("job", 1, job["finished_at"])])

    assert count == 0


def test_an_outcome_that_is_no_longer_the_jobs_settles_nothing(store: Store) -> None:
    """Resumed meanwhile: the new outcome has not been told to anybody."""
    finished(store, running(store), settled=True)
    first = job_row(store)["finished_at"]
    transitions.resume(store, "job", reason="again")
    with nothing_changes(store):
        while_queued = transitions.settle(store, [("job", 1, first)])
    finished(store, claimed(store), settled=False)
    second = job_row(store)["finished_at"]

    with nothing_changes(store):
        stale = transitions.settle(store, [("job", 1, first)])
        mixed = transitions.settle(store, [("job", 1, second), ("job", 2, first)])

    assert (while_queued, stale, mixed) == (0, 0, 0)
    assert transitions.settle(store, [("job", 2, second)]) == 1


def test_an_outcome_of_the_same_token_at_another_time_settles_nothing(store: Store) -> None:
    """An operator resumed a job that was never claimed again, and it was cancelled again."""
    submitted(store)
    transitions.cancel(store, "job")
    first = job_row(store)["finished_at"]
    transitions.settle(store, [("job", 0, first)])
    transitions.resume(store, "job", reason="again")
    transitions.cancel(store, "job")

    with nothing_changes(store):
        count = transitions.settle(store, [("job", 0, first - timedelta(seconds=1))])

    assert count == 0


def test_many_outcomes_are_settled_together(store: Store) -> None:
    for number in range(30):
        finished(store, running(store, f"job{number}"), settled=False)
    found = queries.unsettled(store, grace_seconds=-1, again_seconds=0, limit=100)

    count = transitions.settle(store, [named(outcome) for outcome, _ in found])  # type: ignore[misc]

    assert count == 30
    assert unsettled(store, grace_seconds=-1) == []


def test_a_long_list_of_outcomes_can_be_settled(store: Store) -> None:
    finished(store, running(store), settled=False)
    finished_at = job_row(store)["finished_at"]
    gone = [(f"gone{number}", 1, finished_at) for number in range(1500)]

    assert transitions.settle(store, [*gone, ("job", 1, finished_at)]) == 1


def test_nothing_to_settle_is_nothing(store: Store) -> None:
    assert transitions.settle(store, []) == 0


def test_a_policy_that_fails_the_job_leaves_an_outcome_to_tell(store: Store) -> None:
    lease = running(store, on_expiry=OnExpiry.FAIL)
    transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)

    answer = transitions.claim(store, new_delivery(replay=True))

    assert isinstance(answer, Replay)
    assert answer.outcome.error_type == "celery_lease.exceptions.JobRunnerLost"
