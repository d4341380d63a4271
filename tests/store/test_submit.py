"""submit, adopt: nothing → scheduled or queued, with the first version of the message."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.records import Claimed
from celery_lease.states import JobState, OnExpiry
from celery_lease.store import queries, transitions
from tests.store.builders import (
    ROUNDS,
    about,
    at_once,
    changes_of,
    job_row,
    new_delivery,
    new_job,
    new_message,
    nothing_changes,
    rows,
    running,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


def test_what_cannot_be_sent_is_a_failed_job_that_waits_to_be_told(store: Store) -> None:
    now = store_now(store)

    answer = transitions.submit_failed(
        store, new_job(delay_seconds=60.0), error_type="odd.Error", error_message="its text\x00"
    )

    assert answer is True
    job = job_row(store)
    assert (job["state"], job["state_reason"]) == (JobState.FAILED, "never sent")
    assert (job["error_type"], job["error_message"]) == ("odd.Error", "its text\\x00")
    assert about(job["finished_at"], now)
    assert job["settled_at"] is job["accepted_attempt"] is None
    ((outcome, message),) = queries.unsettled(store, grace_seconds=60, again_seconds=60, limit=9)
    assert (outcome.state, outcome.by_attempt) == (JobState.FAILED, False)
    assert message.job_id == "job"


def test_what_cannot_be_sent_is_no_other_job(store: Store) -> None:
    submitted(store)

    with nothing_changes(store):
        assert not transitions.submit_failed(
            store, new_job(), error_type="odd.Error", error_message=""
        )


def test_what_was_never_sent_is_not_resumed(store: Store) -> None:
    transitions.submit_failed(store, new_job(), error_type="odd.Error", error_message="")
    (outcome, _) = queries.unsettled(store, grace_seconds=0, again_seconds=0, limit=1)[0]
    transitions.settle(store, [("job", 0, outcome.finished_at)])

    with nothing_changes(store):
        assert transitions.resume(store, "job", reason="again") == JobState.FAILED


def test_a_job_that_is_due_is_queued_with_its_message(store: Store) -> None:
    now = store_now(store)

    answer = transitions.submit(store, new_job(max_attempts=7, on_expiry=OnExpiry.HOLD))

    assert answer is True
    found = rows(store)
    assert found["job"].keys() == {"job"}
    assert found["message"].keys() == {("job", 1)}
    assert found["attempt"] == {}
    job = found["job"]["job"]
    assert job["state"] == JobState.QUEUED
    assert job["task"] == "app.work"
    assert (job["fencing_token"], job["lost_count"], job["failure_count"]) == (0, 0, 0)
    assert (job["max_attempts"], job["on_expiry"]) == (7, "hold")
    assert about(job["created_at"], now)
    assert about(job["available_at"], now)
    assert job["finished_at"] is job["settled_at"] is job["lease_owner"] is None


def test_a_job_with_a_delay_is_scheduled_for_its_due_time(store: Store) -> None:
    now = store_now(store)

    submitted(store, delay_seconds=100.0, expires_seconds=200.0, deadline_seconds=300.5)

    job = job_row(store)
    assert job["state"] == JobState.SCHEDULED
    assert about(job["available_at"], now, seconds=100)
    assert about(job["expires_at"], now, seconds=200)
    assert about(job["deadline_at"], now, seconds=300)


def test_a_job_without_bounds_has_none(store: Store) -> None:
    submitted(store)

    job = job_row(store)
    assert job["expires_at"] is job["deadline_at"] is None


def test_a_delay_in_the_past_is_no_delay(store: Store) -> None:
    submitted(store, delay_seconds=-5.0)

    assert job_row(store)["state"] == JobState.QUEUED


def test_who_published_it_and_where_it_goes_is_kept(store: Store) -> None:
    where = {
        "queue": "slow",
        "priority": 7,
        "submitter": "gen1@host",
        "root_id": "root",
        "parent_id": "parent",
        "group_id": "group",
    }

    submitted(store, **where)

    assert job_row(store).items() >= where.items()


def test_a_job_whose_caller_publishes_it_counts_as_dispatched(store: Store) -> None:
    submitted(store, "now", dispatched=True)
    submitted(store, "later", dispatched=False)

    assert job_row(store, "now")["dispatch_count"] == 1
    assert job_row(store, "now")["dispatched_at"] is not None
    assert job_row(store, "later")["dispatch_count"] == 0
    assert job_row(store, "later")["dispatched_at"] is None


def test_a_message_is_read_back_byte_for_byte(store: Store) -> None:
    message = new_message(body=bytes(range(256)) * 100)

    submitted(store, message=message)

    assert queries.message(store, "job", 1) == message
    assert queries.message(store, "job", 2) is None


def test_a_job_that_exists_is_left_alone(store: Store) -> None:
    submitted(store)

    with nothing_changes(store):
        answer = transitions.submit(
            store, new_job(task="app.another", message=new_message(body=b"x"))
        )

    assert answer is False


def test_a_job_that_exists_is_left_alone_in_every_state(store: Store) -> None:
    lease = running(store)

    with nothing_changes(store):
        while_running = transitions.submit(store, new_job())
    transitions.cancel(store, lease.job_id)
    with nothing_changes(store):
        when_final = transitions.submit(store, new_job())

    assert (while_running, when_final) == (False, False)


def test_ids_that_differ_in_case_are_different_jobs(store: Store) -> None:
    submitted(store, "job")
    submitted(store, "JOB")
    submitted(store, "jöb")

    assert rows(store)["job"].keys() == {"job", "JOB", "jöb"}
    assert isinstance(transitions.claim(store, new_delivery("JOB")), Claimed)
    assert job_row(store, "job")["state"] == JobState.QUEUED


def test_a_submit_whose_reply_was_lost_is_still_the_callers_to_publish(
    store: Store, lose_replies: LoseReplies
) -> None:
    with lose_replies(store, 1), changes_of(store) as changes:
        answer = transitions.submit(store, new_job())

    assert answer is True
    assert changes == {"job job": "added", "message job 1": "added"}


def test_a_submit_repeated_after_a_lost_request_is_not_taken_for_another_ones(
    store: Store, lose_requests: LoseReplies
) -> None:
    submitted(store, message=new_message(body=b"of somebody else"))

    with nothing_changes(store), lose_requests(store, 1):
        answer = transitions.submit(store, new_job())

    assert answer is False


@pytest.mark.parametrize("version", [1, 3])
def test_an_adopted_message_keeps_its_version(store: Store, version: int) -> None:
    submitted(store, message=new_message(version))

    assert job_row(store)["message_version"] == version
    assert isinstance(transitions.claim(store, new_delivery(message_version=version)), Claimed)


def test_an_adoption_whose_reply_was_lost_is_recognised_whatever_its_version(
    store: Store, lose_replies: LoseReplies
) -> None:
    with lose_replies(store, 1):
        answer = transitions.submit(store, new_job(message=new_message(3)))

    assert answer is True


@ROUNDS
def test_of_many_who_submit_one_job_at_once_exactly_one_is_told_to_publish(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        job_id = f"job{number}"
        mine = [
            lambda s=s: transitions.submit(s, new_job(job_id)) for s in (store, other_store)
        ] * 5

        answers = at_once(*mine)

        assert answers.count(True) == 1
    found = rows(store)
    assert len(found["job"]) == len(found["message"]) == rounds
    assert found["attempt"] == {}
