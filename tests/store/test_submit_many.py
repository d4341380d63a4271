"""submit_many, undispatch_many: a batch of jobs in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_lease.records import Claimed
from celery_lease.store import transitions
from tests.store.builders import (
    at_once,
    job_row,
    new_delivery,
    new_job,
    new_message,
    nothing_changes,
    rows,
    set_job,
    statements_of,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


def test_each_job_is_recorded_as_one_submitted_by_itself(store: Store) -> None:
    one = new_job("one", queue="q", priority=3, expires_seconds=50.0, max_attempts=7)
    transitions.submit(store, new_job("alone", queue="q", priority=3, max_attempts=7))

    ids = transitions.submit_many(store, [one, new_job("two", delay_seconds=100.0)])

    assert ids == {"one", "two"}
    found = rows(store)
    assert set(found["message"]) == {("alone", 1), ("one", 1), ("two", 1)}
    apart = {"id", "created_at", "available_at", "dispatched_at", "expires_at"}
    alike = [
        {name: value for name, value in found["job"][job_id].items() if name not in apart}
        for job_id in ("alone", "one")
    ]
    assert alike[0] == alike[1]
    assert found["job"]["one"]["expires_at"] is not None
    assert found["job"]["two"]["state"] == "scheduled"


def test_a_thousand_jobs_are_a_few_statements(store: Store) -> None:
    jobs = [new_job(f"job{number}") for number in range(1000)]

    with statements_of(store) as statements:
        ids = transitions.submit_many(store, jobs)

    assert len(ids) == 1000
    assert len(rows(store)["job"]) == 1000
    assert len([text for text, _ in statements if "INSERT" in text.upper()]) <= 10


def test_no_jobs_are_no_statement(store: Store) -> None:
    with statements_of(store) as statements:
        assert transitions.submit_many(store, []) == set()

    assert statements == []


def test_one_that_exists_is_left_as_it_is_and_the_others_are_recorded(store: Store) -> None:
    submitted(store, "there", queue="as it was")

    ids = transitions.submit_many(store, [new_job("new"), new_job("there"), new_job("newer")])

    assert ids == {"new", "newer"}
    assert job_row(store, "there")["queue"] == "as it was"
    assert set(rows(store)["message"]) == {("new", 1), ("newer", 1), ("there", 1)}


def test_an_id_given_twice_is_one_job(store: Store) -> None:
    ids = transitions.submit_many(store, [new_job("a"), new_job("a"), new_job("b")])

    assert ids == {"a", "b"}
    assert set(rows(store)["job"]) == {"a", "b"}


def test_a_batch_whose_reply_was_lost_is_the_callers(
    store: Store, lose_replies: LoseReplies
) -> None:
    with lose_replies(store, 1):
        ids = transitions.submit_many(store, [new_job("a"), new_job("b")])

    assert ids == {"a", "b"}
    assert set(rows(store)["message"]) == {("a", 1), ("b", 1)}


def test_what_was_there_before_is_nobodys_though_the_reply_was_lost(
    store: Store, lose_replies: LoseReplies
) -> None:
    """Another body under the same id, and one that has run: they are not this batch's own."""
    submitted(store, "other", message=new_message(body=b"[[1], {}, {}]"))
    submitted(store, "claimed")
    assert isinstance(transitions.claim(store, new_delivery("claimed")), Claimed)

    with lose_replies(store, 1):
        ids = transitions.submit_many(store, [new_job("a"), new_job("claimed"), new_job("other")])

    assert ids == {"a"}


def test_two_callers_of_the_same_ids_share_them(store: Store) -> None:
    jobs = [new_job(f"job{number}") for number in range(40)]

    answers = at_once(
        lambda: transitions.submit_many(store, jobs),
        lambda: transitions.submit_many(store, list(reversed(jobs))),
    )

    assert len(rows(store)["job"]) == 40
    assert sorted([*answers[0], *answers[1]]) == sorted(job.job_id for job in jobs)


def test_messages_that_did_not_leave_are_to_be_sent(store: Store) -> None:
    transitions.submit_many(store, [new_job("a"), new_job("b"), new_job("c")])

    assert transitions.undispatch_many(store, ["a", "c"]) == 2

    assert job_row(store, "a")["dispatched_at"] is job_row(store, "c")["dispatched_at"] is None
    assert job_row(store, "b")["dispatched_at"] is not None


def test_only_the_first_dispatch_of_a_waiting_job_is_taken_back(store: Store) -> None:
    transitions.submit_many(store, [new_job(name) for name in ("claimed", "sent", "retried")])
    transitions.claim(store, new_delivery("claimed"))
    set_job(store, "sent", dispatch_count=2)
    set_job(store, "retried", message_version=2)

    with nothing_changes(store):
        assert transitions.undispatch_many(store, ["claimed", "sent", "retried", "none"]) == 0
