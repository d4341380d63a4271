"""claim: queued, or waiting and due → running, token + 1, a new attempt."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Absent, Claimed, Held, Refused, Replay
from celery_lease.states import AttemptState, JobState, LossCause, Refusal
from celery_lease.store import transitions
from celery_lease.store.dialects import clock
from tests.store.builders import (
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
    finished,
    holding,
    in_background,
    job_row,
    lock_job,
    move_back,
    new_delivery,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    set_job,
    store_now,
    submitted,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


# --- won ----------------------------------------------------------------------------------------


def test_a_queued_job_is_claimed_with_token_one_and_a_new_attempt(store: Store) -> None:
    submitted(store)
    now = store_now(store)

    with changes_of(store) as changes:
        answer = transitions.claim(store, new_delivery(nonce="n1", lease_seconds=12.0))

    assert answer == Claimed(Held("job", 1, ONE), message_version=1, lost_count=0)
    assert changes == {
        "job job.state": "running",
        "job job.fencing_token": 1,
        "job job.lease_owner": ONE,
        "attempt job 1": "added",
    }
    attempt = rows(store)["attempt"]["job", 1]
    assert attempt["state"] == AttemptState.CLAIMED
    assert (attempt["owner"], attempt["worker"], attempt["claim_nonce"]) == (
        ONE,
        "celery@one",
        "n1",
    )
    assert (attempt["renewal_count"], attempt["message_version"]) == (0, 1)
    assert about(attempt["lease_expires_at"], now, seconds=12)
    assert about(attempt["claimed_at"], now)
    assert about(attempt["last_renewed_at"], now)
    assert attempt["worker_claimed_at"] == WORKER_NOW
    assert attempt["ended_at"] is attempt["extended_at"] is None


def test_a_claim_moves_no_other_job(store: Store) -> None:
    submitted(store, "job")
    submitted(store, "other")

    with changes_of(store) as changes:
        answer = transitions.claim(store, new_delivery())

    assert isinstance(answer, Claimed)
    assert changes.keys() == {
        "job job.state",
        "job job.fencing_token",
        "job job.lease_owner",
        "attempt job 1",
    }


def test_the_time_in_the_queue_is_no_part_of_the_lease(store: Store) -> None:
    """B099."""
    submitted(store)
    move_back(store, "job", seconds=150)
    now = store_now(store)

    lease = claimed(store)

    assert about(attempt_row(store, lease)["lease_expires_at"], now, seconds=30)


def test_each_claim_has_the_next_token(store: Store) -> None:
    submitted(store)

    tokens = []
    for _ in range(4):
        lease = claimed(store)
        tokens.append(lease.fencing_token)
        transitions.release(store, lease, parting())

    assert tokens == [1, 2, 3, 4]


def test_a_claim_clears_the_reason_of_the_state_before(store: Store) -> None:
    lease = running(store)
    transitions.release(store, lease, parting("hand_over"))
    assert job_row(store)["state_reason"] == "hand_over"

    claimed(store)

    assert job_row(store)["state_reason"] is None


def test_a_scheduled_job_that_is_due_is_claimed(store: Store) -> None:
    submitted(store, delay_seconds=100.0)
    move_back(store, "job", seconds=100)

    assert isinstance(transitions.claim(store, new_delivery()), Claimed)


def test_a_message_may_be_a_little_early(store: Store) -> None:
    """A worker releases an ETA by its own clock."""
    submitted(store, delay_seconds=100.0)
    move_back(store, "job", seconds=99)

    assert isinstance(transitions.claim(store, new_delivery()), Claimed)


def test_a_job_that_waits_for_its_retry_is_claimed_when_it_is_due(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again(delay_seconds=60.0))
    move_back(store, "job", seconds=60)

    answer = transitions.claim(store, new_delivery(message_version=2))

    assert isinstance(answer, Claimed)
    assert (answer.lease.fencing_token, answer.message_version) == (2, 2)


def test_a_job_before_its_deadline_and_expires_is_claimed(store: Store) -> None:
    submitted(store, expires_seconds=100.0, deadline_seconds=100.0)

    assert isinstance(transitions.claim(store, new_delivery()), Claimed)


def test_a_claim_brings_the_newest_checkpoint_and_the_number_of_losses(store: Store) -> None:
    for number in (1, 2):
        lease = running(store) if number == 1 else claimed(store)
        transitions.renew(store, [renewal(lease, checkpoint=f"{number}")])
        transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
    without_checkpoint = claimed(store)
    transitions.release(store, without_checkpoint, parting())

    answer = transitions.claim(store, new_delivery())

    assert isinstance(answer, Claimed)
    assert (answer.checkpoint, answer.lost_count) == ("2", 2)


def test_another_jobs_checkpoint_is_not_brought(store: Store) -> None:
    other = running(store, "other")
    transitions.renew(store, [renewal(other, checkpoint="9")])
    submitted(store)

    answer = transitions.claim(store, new_delivery())

    assert isinstance(answer, Claimed)
    assert answer.checkpoint is None


# --- repeated -----------------------------------------------------------------------------------


def test_a_claim_repeated_with_its_nonce_gets_the_same_token(store: Store) -> None:
    submitted(store)
    delivery = new_delivery()
    first = transitions.claim(store, delivery)

    with nothing_changes(store):
        second = transitions.claim(store, delivery)

    assert second == first


def test_a_claim_whose_reply_was_lost_gets_its_token(
    store: Store, lose_replies: LoseReplies
) -> None:
    submitted(store)

    with lose_replies(store, 1):
        answer = transitions.claim(store, new_delivery())

    assert isinstance(answer, Claimed)
    assert answer.lease.fencing_token == 1
    assert rows(store)["attempt"].keys() == {("job", 1)}


def test_another_delivery_to_the_same_process_is_not_taken_for_a_repetition(store: Store) -> None:
    submitted(store)
    transitions.claim(store, new_delivery(nonce="n1"))

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(nonce="n2"))

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)


def test_a_nonce_of_an_attempt_that_has_ended_gives_nothing_back(store: Store) -> None:
    submitted(store)
    delivery = new_delivery()
    transitions.claim(store, delivery)
    transitions.release(store, Held("job", 1, ONE), parting())
    claimed(store, owner=OTHER)

    with nothing_changes(store):
        answer = transitions.claim(store, delivery)

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, OTHER)


# --- refused ------------------------------------------------------------------------------------


def test_a_job_without_a_row_is_absent(store: Store) -> None:
    submitted(store, "another")

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery())

    assert answer == Absent()


def test_a_running_job_is_refused_and_the_holder_named(store: Store) -> None:
    running(store)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)


def test_a_held_job_is_refused(store: Store) -> None:
    submitted(store)
    transitions.hold_waiting(store, "job", reason="look")

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.HELD, JobState.HELD)


def test_a_message_of_an_older_version_is_refused(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again())

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(message_version=1))

    assert answer == Refused(Refusal.SUPERSEDED, JobState.QUEUED)


def test_a_message_of_an_older_version_is_refused_while_the_newer_runs(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again())
    claimed(store, owner=OTHER, message_version=2)
    move_back(store, "job", seconds=31)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(message_version=1))

    assert answer == Refused(Refusal.SUPERSEDED, JobState.RUNNING, OTHER)


def test_a_job_past_its_deadline_is_refused(store: Store) -> None:
    submitted(store, deadline_seconds=10.0)
    move_back(store, "job", seconds=11)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.DEADLINE, JobState.QUEUED)


def test_a_job_past_its_expires_is_refused(store: Store) -> None:
    submitted(store, expires_seconds=10.0)
    move_back(store, "job", seconds=11)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.EXPIRES, JobState.QUEUED)


def test_a_job_that_is_not_due_is_refused_and_left_to_the_reaper(store: Store) -> None:
    submitted(store, delay_seconds=100.0)

    with changes_of(store) as changes:
        answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.NOT_DUE, JobState.SCHEDULED)
    assert changes == {"job job.dispatched_at": None}


def test_a_retry_that_is_not_due_is_refused_and_left_to_the_reaper(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again(delay_seconds=60.0))

    with changes_of(store) as changes:
        answer = transitions.claim(store, new_delivery(message_version=2))

    assert answer == Refused(Refusal.NOT_DUE, JobState.RETRY_WAIT)
    assert changes == {"job job.dispatched_at": None}


@pytest.mark.parametrize("settled", [True, False])
def test_a_job_that_is_final_is_refused(store: Store, *, settled: bool) -> None:
    finished(store, running(store), settled=settled)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.FINAL, JobState.SUCCEEDED)


def test_a_cancelled_job_is_refused_even_when_it_is_long_unsettled(store: Store) -> None:
    submitted(store)
    transitions.cancel(store, "job")
    move_back(store, "job", seconds=1000)

    answer = transitions.claim(store, new_delivery())

    assert answer == Refused(Refusal.FINAL, JobState.CANCELLED)


def test_a_cancelled_job_is_told_by_what_was_sent_for_that(store: Store) -> None:
    submitted(store)
    transitions.cancel(store, "job", reason="not wanted")

    answer = transitions.claim(store, new_delivery(replay=True))

    assert isinstance(answer, Replay)
    assert (answer.outcome.state, answer.outcome.by_attempt) == (JobState.CANCELLED, False)


# --- replay -------------------------------------------------------------------------------------


def test_a_final_job_that_nobody_settled_is_replayed_after_a_while(store: Store) -> None:
    finished(store, running(store), settled=False)
    move_back(store, "job", seconds=31)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(settle_grace_seconds=30.0))

    assert isinstance(answer, Replay)
    outcome = answer.outcome
    assert (outcome.job_id, outcome.fencing_token, outcome.state) == ("job", 1, JobState.SUCCEEDED)
    assert (outcome.result, outcome.result_type, outcome.by_attempt) == (b"1", JSON, True)
    assert outcome.finished_at == job_row(store)["finished_at"]


def test_the_reapers_own_message_is_replayed_at_once(store: Store) -> None:
    finished(store, running(store), settled=False)

    assert isinstance(transitions.claim(store, new_delivery(replay=True)), Replay)


def test_a_settled_job_is_never_replayed(store: Store) -> None:
    finished(store, running(store), settled=True)
    move_back(store, "job", seconds=1000)

    answer = transitions.claim(store, new_delivery(replay=True))

    assert answer == Refused(Refusal.FINAL, JobState.SUCCEEDED)


def test_a_message_of_an_older_version_is_never_replayed(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again())
    finished(store, claimed(store, message_version=2), settled=False)

    answer = transitions.claim(store, new_delivery(message_version=1, replay=True))

    assert answer == Refused(Refusal.FINAL, JobState.SUCCEEDED)


def test_an_end_that_no_body_returned_says_so_in_its_replay(store: Store) -> None:
    lease = running(store, max_attempts=1)
    transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)

    answer = transitions.claim(store, new_delivery(replay=True))

    assert isinstance(answer, Replay)
    assert answer.outcome.by_attempt is False
    assert answer.outcome.error_type == "celery_lease.exceptions.JobInterrupted"


# --- raced --------------------------------------------------------------------------------------


@ROUNDS
def test_of_fifty_claims_at_once_exactly_one_wins(
    store: Store, other_store: Store, rounds: int
) -> None:
    """B110."""
    for number in range(rounds):
        job_id = submitted(store, f"job{number}")
        calls = [
            lambda s=s, n=n: transitions.claim(s, new_delivery(job_id, owner=f"owner{n}"))
            for n in range(25)
            for s in (store, other_store)
        ]

        answers = at_once(*calls)

        winners = [answer for answer in answers if isinstance(answer, Claimed)]
        assert len(winners) == 1, answers
        assert all(
            answer == Refused(Refusal.RUNNING, JobState.RUNNING, winners[0].lease.owner)
            for answer in answers
            if answer is not winners[0]
        )
        found = rows(store)
        assert found["job"][job_id]["fencing_token"] == 1
        assert found["job"][job_id]["lease_owner"] == winners[0].lease.owner
        assert [key for key in found["attempt"] if key[0] == job_id] == [(job_id, 1)]
        assert found["attempt"][job_id, 1]["owner"] == winners[0].lease.owner


@ROUNDS
def test_many_claims_of_many_jobs_give_each_to_one_and_never_deadlock(
    row_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        ids = [submitted(row_store, f"job{number}-{n}") for n in range(5)]

        with errors_of(row_store) as errors:
            answers = at_once(
                *[
                    lambda i=i, o=o: transitions.claim(row_store, new_delivery(i, owner=o))
                    for o in ("a", "b", "c", "d")
                    for i in (ids if o in "ac" else reversed(ids))
                ]
            )

        assert sum(isinstance(answer, Claimed) for answer in answers) == len(ids)
        assert errors == []


def test_a_locked_row_makes_a_claim_wait_and_win_when_it_is_free(store: Store) -> None:
    submitted(store)

    with holding(store, lock_job(store)) as holder:
        started = store_now(store)
        with in_background(lambda: transitions.claim(store, new_delivery())) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.1)
            holder.rollback()
            won = answer()

    assert isinstance(won, Claimed)
    assert won.lease.fencing_token == 1


def test_a_running_job_whose_row_is_locked_is_refused_at_once(row_store: Store) -> None:
    running(row_store)

    with holding(row_store, lock_job(row_store)), nothing_changes(row_store):
        started = store_now(row_store)
        answer = transitions.claim(row_store, new_delivery(owner=OTHER))
        took = (store_now(row_store) - started).total_seconds()

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)
    assert took < 1.5


@pytest.mark.parametrize("how", [{}, {"read": True}], ids=["for update", "for share"])
def test_a_queued_job_whose_row_stays_locked_is_given_to_nobody_within_some_seconds(
    row_store: Store, how: dict[str, bool]
) -> None:
    submitted(row_store)

    with holding(row_store, lock_job(row_store, **how)), nothing_changes(row_store):
        started = store_now(row_store)
        with pytest.raises(StoreUnavailable, match="locked by another transaction"):
            transitions.claim(row_store, new_delivery())
        took = (store_now(row_store) - started).total_seconds()

    assert took < 4


def test_a_claim_of_one_job_does_not_wait_for_another_jobs_row(row_store: Store) -> None:
    submitted(row_store)
    submitted(row_store, "locked")

    with holding(row_store, lock_job(row_store, "locked")):
        answer = transitions.claim(row_store, new_delivery())

    assert isinstance(answer, Claimed)


def test_a_claim_that_waited_for_a_cancel_is_refused(store: Store) -> None:
    """The guard is asked again when the row is free."""
    submitted(store)
    job = store.tables.job

    with holding(store, lock_job(store)) as holder:
        started = store_now(store)
        with in_background(lambda: transitions.claim(store, new_delivery())) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.1)
            holder.execute(
                job.update().where(job.c.id == "job").values(state="cancelled", finished_at=clock())
            )
            holder.commit()
            refused = answer()

    assert refused == Refused(Refusal.FINAL, JobState.CANCELLED)
    assert rows(store)["attempt"] == {}


def test_a_token_is_not_lowered_by_what_happened_to_the_job(store: Store) -> None:
    finished(store, running(store))
    transitions.resume(store, "job", reason="again")
    set_job(store, failure_count=0, lost_count=0)

    assert claimed(store).fencing_token == 2
