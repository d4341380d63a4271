"""cancel_all, cancel_dispatched, and the search for stamps: what Celery revokes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Message
from celery_lease.states import JobState
from celery_lease.store import queries, transitions
from celery_lease.store.transitions import revoking
from tests.store.builders import (
    again,
    at_once,
    changes_of,
    finished,
    holding,
    job_row,
    lock_job,
    new_message,
    nothing_changes,
    parting,
    running,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store


def stamped_message(headers: str) -> Message:
    """Return a message with these headers."""
    return replace(new_message(), headers=headers)


def test_many_are_ended_in_one_call_and_others_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revoking, "BATCH", 2)
    for name in ("a", "b", "c", "kept"):
        submitted(store, name)
    running(store, "runs")
    finished(store, running(store, "over"))

    ended = transitions.cancel_all(
        store, ["runs", "c", "b", "a", "a", "over", "unknown"], reason="revoked"
    )

    assert ended == ["a", "b", "c", "runs"]
    for name in ended:
        job = job_row(store, name)
        assert (job["state"], job["state_reason"]) == ("cancelled", "revoked")
        assert (job["lease_owner"], job["active_key"]) == (None, None)
    assert job_row(store, "kept")["state"] == "queued"
    assert job_row(store, "over")["state"] == "succeeded"
    with nothing_changes(store):
        assert transitions.cancel_all(store, [*ended, "over", "unknown"], reason="x") == []
        assert transitions.cancel_all(store, [], reason="x") == []


@pytest.mark.parametrize("odd", ["a\ud800", "a\x00", "a" * 256])
def test_an_id_that_no_job_can_have_keeps_no_other_from_its_end(store: Store, odd: str) -> None:
    submitted(store)

    assert transitions.cancel(store, odd) is None
    assert transitions.cancel_all(store, [odd, "job"], reason="revoked") == ["job"]


def test_one_that_stays_locked_keeps_no_other_from_its_end(row_store: Store) -> None:
    for name in ("a", "b", "c"):
        submitted(row_store, name)

    with (
        holding(row_store, lock_job(row_store, "b", read=True)),
        pytest.raises(StoreUnavailable, match="locked by another transaction"),
    ):
        transitions.cancel_all(row_store, ["a", "b", "c"], reason="revoked")

    states = {name: job_row(row_store, name)["state"] for name in ("a", "b", "c")}
    assert states == {"a": "cancelled", "b": "queued", "c": "cancelled"}


def test_two_who_revoke_at_once_do_not_both_say_that_they_ended_a_job(
    store: Store, other_store: Store
) -> None:
    for number in range(5):
        names = [submitted(store, f"{number}{letter}") for letter in "abcdefgh"]

        first, second = at_once(
            *[
                lambda s=s, names=names: transitions.cancel_all(s, names, reason="revoked")
                for s in (store, other_store)
            ]
        )

        assert sorted(first + second) == names


def test_a_cancel_tells_whether_it_was_this_one_that_ended_the_job(store: Store) -> None:
    submitted(store)

    answers = [transitions.cancel_now(store, "job", reason="x") for _ in range(2)]

    assert [(one.state, one.is_new) for one in answers] == [
        (JobState.CANCELLED, True),
        (JobState.CANCELLED, False),
    ]


def test_one_that_another_ends_meanwhile_is_not_this_ones(
    row_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row was locked when the batch was ended; it is waited for, and found cancelled."""
    submitted(row_store)

    def after_the_other(store: Store, job_id: str, *, reason: str) -> Any:
        held.rollback()
        transitions.cancel(store, job_id, reason="by another")
        return transitions.cancel_now(store, job_id, reason=reason)

    monkeypatch.setattr(revoking, "cancel_now", after_the_other)
    with holding(row_store, lock_job(row_store, "job", read=True)) as held:
        assert transitions.cancel_all(row_store, ["job"], reason="revoked") == []

    assert job_row(row_store)["state_reason"] == "by another"


def test_a_running_one_is_ended_with_its_attempt(store: Store) -> None:
    running(store)

    with changes_of(store) as changes:
        assert transitions.cancel_all(store, ["job"], reason="revoked") == ["job"]

    assert changes["attempt job 1.state"] == "cancelled"
    assert changes["attempt job 1.stop_reason"] == "revoked"


def test_one_that_went_on_as_a_canvas_ends_where_the_canvas_comes_to_its_id(store: Store) -> None:
    transitions.replace_away(store, running(store), parting("replaced"))

    assert transitions.cancel_all(store, ["job"], reason="revoked") == []
    job = job_row(store)
    assert (job["state"], job["state_reason"]) == ("succeeded", "replaced, revoked")
    assert queries.replaced_version(store, "job") == 1

    assert not transitions.reopen(store, "job", again(3, task="app.last"))
    assert job_row(store) == job
    assert not transitions.reopen(store, "job", again(2, task="app.last"))
    job = job_row(store)
    assert (job["state"], job["state_reason"]) == ("cancelled", "revoked")
    assert (job["task"], job["message_version"], job["settled_at"]) == ("app.last", 2, None)
    assert queries.message(store, "job", 2) is not None
    with nothing_changes(store):
        assert not transitions.reopen(store, "job", again(2, task="app.last"))


def test_the_refused_delivery_of_a_job_ends_it(store: Store) -> None:
    submitted(store)

    assert transitions.cancel_dispatched(store, "job", dispatch_count=1, reason="revoked")

    assert job_row(store)["state"] == "cancelled"
    with nothing_changes(store):
        assert not transitions.cancel_dispatched(store, "job", dispatch_count=1, reason="x")
        assert not transitions.cancel_dispatched(store, "unknown", dispatch_count=1, reason="x")


@pytest.mark.parametrize("since", ["resumed", "sent again"])
def test_but_not_a_job_that_has_moved_on(store: Store, since: str) -> None:
    submitted(store)
    transitions.cancel(store, "job")
    job = job_row(store)
    transitions.settle(store, [("job", job["fencing_token"], job["finished_at"])])
    transitions.resume(store, "job", reason="wanted after all")
    if since == "sent again":
        candidate = queries.dispatchable(store, "job")
        assert candidate is not None
        assert transitions.dispatch(store, candidate)

    with nothing_changes(store):
        assert not transitions.cancel_dispatched(store, "job", dispatch_count=1, reason="x")


@pytest.mark.parametrize("value", ["plain", "100%", "a_b", 'qu"ote', "back\\slash", "é", "/", "!"])
def test_jobs_are_found_by_what_stands_in_their_headers(store: Store, value: str) -> None:
    stamped = json.dumps({"stamps": {"order": [value]}})
    other = json.dumps({"stamps": {"order": ["another one"]}})
    for name in ("a", "b", "ended"):
        submitted(store, name, message=stamped_message(stamped))
    submitted(store, "other", message=stamped_message(other))
    running(store, "runs", message=stamped_message(stamped))
    transitions.cancel(store, "ended")
    needles = ["nothing like it", json.dumps(value)]

    first = queries.stamped(store, needles, after="", limit=2)
    second = queries.stamped(store, needles, after=first[-1][0], limit=2)

    assert first == [("a", stamped), ("b", stamped)]
    assert second == [("runs", stamped)]
    assert queries.stamped(store, needles, after="runs", limit=2) == []


def test_which_are_cancelled(store: Store) -> None:
    for name in ("a", "b", "c"):
        submitted(store, name)
    transitions.cancel(store, "b")

    assert queries.cancelled(store, ["c", "b", "unknown"]) == ["b"]
    assert queries.cancelled(store, []) == []
    assert job_row(store, "b")["state"] == JobState.CANCELLED.value
