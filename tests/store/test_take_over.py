"""take_over: a claim of a running job whose lease has ended, if the policy says *queued now*."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.records import Accepted, Claimed, Held, Refused, Renewed, Stale
from celery_lease.states import AttemptState, JobState, LossCause, OnExpiry, Refusal
from celery_lease.store import transitions
from celery_lease.store.transitions import claiming
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    ROUNDS,
    at_once,
    changes_of,
    claimed,
    errors_of,
    expired,
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
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


def test_a_job_whose_lease_has_ended_is_taken_over(store: Store) -> None:
    expired(store)

    with changes_of(store) as changes:
        answer = transitions.claim(store, new_delivery(owner=OTHER), lost_backoff=NO_BACKOFF)

    assert answer == Claimed(
        Held("job", 2, OTHER), message_version=1, lost_count=1, checkpoint=None, took_over=1
    )
    assert changes.pop("attempt job 1.ended_at") is not None
    assert changes == {
        "job job.fencing_token": 2,
        "job job.lease_owner": OTHER,
        "job job.lost_count": 1,
        "attempt job 1.state": "expired",
        "attempt job 1.stop_reason": "taken over",
        "attempt job 2": "added",
    }


def test_a_take_over_brings_the_checkpoint_of_the_attempt_before(store: Store) -> None:
    lease = running(store)
    transitions.renew(store, [renewal(lease, checkpoint='"page 7"')])
    move_back(store, "job", seconds=31)

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert isinstance(answer, Claimed)
    assert answer.checkpoint == '"page 7"'


def test_a_live_lease_is_not_taken_over(store: Store) -> None:
    lease = running(store)

    with nothing_changes(store):
        answer = transitions.take_over(
            store,
            new_delivery(owner=OTHER),
            ended_token=lease.fencing_token,
            lost_backoff=NO_BACKOFF,
        )

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)


def test_a_lease_renewed_after_it_was_seen_as_ended_is_not_taken_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expiry stands in the attempt's own UPDATE, whose count decides."""
    lease = expired(store)
    inner = transitions.take_over

    def renewed_first(*args: object, **kwargs: object) -> object:
        transitions.renew(store, [renewal(lease)])
        return inner(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(claiming, "take_over", renewed_first)

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)
    found = rows(store)
    assert found["job"]["job"]["fencing_token"] == 1
    assert found["job"]["job"]["lost_count"] == 0
    assert found["attempt"]["job", 1]["state"] == AttemptState.ACTIVE


def test_a_job_that_was_given_on_after_it_was_seen_is_looked_at_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired(store)
    inner = transitions.take_over

    def another_first(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(claiming, "take_over", inner)
        transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
        claimed(store, owner="third")
        return inner(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(claiming, "take_over", another_first)

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, "third")
    assert rows(store)["job"]["job"]["lost_count"] == 1


def test_a_job_that_was_released_after_it_was_seen_is_claimed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = expired(store)
    inner = transitions.take_over

    def released_first(*args: object, **kwargs: object) -> object:
        transitions.release(store, lease, parting())
        return inner(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(claiming, "take_over", released_first)

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert isinstance(answer, Claimed)
    assert (answer.lease.fencing_token, answer.lost_count, answer.took_over) == (2, 0, None)
    assert rows(store)["attempt"]["job", 1]["state"] == AttemptState.RELEASED


def test_a_take_over_whose_reply_was_lost_is_recognised(
    store: Store, lose_replies: LoseReplies
) -> None:
    expired(store)

    with lose_replies(store, 1):
        answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert isinstance(answer, Claimed)
    assert answer.lease.fencing_token == 2
    assert answer.lost_count == 1
    assert rows(store)["attempt"].keys() == {("job", 1), ("job", 2)}


@pytest.mark.parametrize(
    ("job", "backoff", "state"),
    [
        ({"max_attempts": 1}, (0.0,), JobState.INTERRUPTED),
        ({"on_expiry": OnExpiry.HOLD}, (0.0,), JobState.HELD),
        ({"on_expiry": OnExpiry.FAIL}, (0.0,), JobState.FAILED),
        ({}, (60.0,), JobState.RETRY_WAIT),
    ],
    ids=["last loss", "hold", "fail", "back-off"],
)
def test_where_the_policy_does_not_give_the_job_on_now_it_is_applied_and_the_delivery_refused(
    store: Store, job: dict[str, object], backoff: tuple[float, ...], state: JobState
) -> None:
    expired(store, **job)

    answer = transitions.claim(store, new_delivery(owner=OTHER), lost_backoff=backoff)

    assert isinstance(answer, Refused)
    assert (answer.refusal, answer.state) == (Refusal.POLICY, state)
    assert answer.vanished is not None
    assert (answer.vanished.fencing_token, answer.vanished.cause) == (1, LossCause.EXPIRED)
    found = rows(store)
    assert found["job"]["job"]["state"] == state
    assert found["job"]["job"]["lost_count"] == 1
    assert found["job"]["job"]["dispatched_at"] is None
    assert found["attempt"].keys() == {("job", 1)}
    assert found["attempt"]["job", 1]["state"] == AttemptState.EXPIRED


def test_a_job_past_its_deadline_is_not_taken_over(store: Store) -> None:
    expired(store, deadline_seconds=20.0)

    with nothing_changes(store):
        answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert answer == Refused(Refusal.RUNNING, JobState.RUNNING, ONE)


def test_a_job_that_started_in_time_is_taken_over_past_its_expires(store: Store) -> None:
    """``expires`` limits the start only: a vanished runner must not lose the job."""
    expired(store, expires_seconds=20.0)

    answer = transitions.claim(store, new_delivery(owner=OTHER))

    assert isinstance(answer, Claimed)


def test_whoever_was_taken_over_changes_nothing_any_more(store: Store) -> None:
    stale = expired(store)
    transitions.claim(store, new_delivery(owner=OTHER))

    with nothing_changes(store):
        completed = transitions.complete(store, stale, parting(), result=b"1", result_type=JSON)
        renewed = transitions.renew(store, [renewal(stale, progress="1", checkpoint="1")])

    assert completed == Stale(AttemptState.EXPIRED)
    assert renewed == Renewed(frozenset(), {("job", 1): AttemptState.EXPIRED}, frozenset())


def test_a_row_that_is_held_is_not_taken_over(row_store: Store) -> None:
    """By a fenced transaction of the user's own: the delivery is refused, not kept waiting."""
    expired(row_store)

    with holding(row_store, lock_job(row_store, read=True)), nothing_changes(row_store):
        started = store_now(row_store)
        answer = transitions.claim(row_store, new_delivery(owner=OTHER))
        took = (store_now(row_store) - started).total_seconds()

    assert answer == Refused(Refusal.BUSY, JobState.RUNNING)
    assert took < 1.5


@ROUNDS
def test_of_many_take_overs_at_once_exactly_one_wins(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        job_id = expired(store, f"job{number}").job_id

        answers = at_once(
            *[
                lambda s=s, n=n: transitions.claim(s, new_delivery(job_id, owner=f"owner{n}"))
                for n in range(6)
                for s in (store, other_store)
            ]
        )

        winners = [answer for answer in answers if isinstance(answer, Claimed)]
        assert len(winners) == 1, answers
        found = rows(store)
        assert found["job"][job_id]["fencing_token"] == 2
        assert found["job"][job_id]["lost_count"] == 1
        assert found["job"][job_id]["lease_owner"] == winners[0].lease.owner
        assert found["attempt"][job_id, 1]["state"] == AttemptState.EXPIRED
        assert found["attempt"][job_id, 2]["owner"] == winners[0].lease.owner
        assert (job_id, 3) not in found["attempt"]


@ROUNDS
def test_take_over_complete_expire_and_renew_at_once_leave_one_truth(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        lease = expired(store, f"job{number}")
        job_id = lease.job_id

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            took, done, given_on, _ = at_once(
                lambda: transitions.claim(store, new_delivery(job_id, owner=OTHER)),
                lambda: transitions.complete(
                    other_store, lease, parting(), result=b"1", result_type=JSON
                ),
                lambda: transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF),
                lambda: transitions.renew(other_store, [renewal(lease)]),
            )

        assert errors == other_errors == []
        found = rows(store)
        job, first = found["job"][job_id], found["attempt"][job_id, 1]
        if isinstance(done, Accepted):
            assert not isinstance(took, Claimed)
            assert given_on == []
            assert job["state"] == JobState.SUCCEEDED
            assert first["state"] == AttemptState.COMPLETED
            assert job["accepted_attempt"] == 1
        else:
            assert done == Stale(AttemptState.EXPIRED)
            assert first["state"] == AttemptState.EXPIRED
            assert job["lost_count"] == 1
            assert job_row(store, job_id)["state"] == (
                JobState.RUNNING if isinstance(took, Claimed) else JobState.QUEUED
            )
