"""reject: what a stale attempt produced is kept on its own row, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.records import Held, Late
from celery_lease.states import AttemptState, LateOutcome, LossCause
from celery_lease.store import transitions
from tests.store.builders import (
    FAILURE,
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    about,
    again,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    expired,
    nothing_changes,
    parting,
    running,
    store_now,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store

LATE = Late(LateOutcome.SUCCEEDED, result=b"too late", digest="sha256:00")


def given_on(store: Store) -> Held:
    """Return a lease that has ended and was given on to another process."""
    stale = expired(store)
    transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    claimed(store, owner=OTHER)
    return stale


def test_a_late_result_is_kept_on_its_own_attempt(store: Store) -> None:
    stale = given_on(store)
    now = store_now(store)

    with changes_of(store) as changes:
        answer = transitions.reject(store, stale, LATE)

    assert answer is True
    assert about(changes.pop("attempt job 1.rejected_at"), now)
    assert changes == {
        "attempt job 1.late_outcome": "succeeded",
        "attempt job 1.late_result": b"too late",
        "attempt job 1.late_result_digest": "sha256:00",
    }


def test_a_late_failure_is_kept_on_its_own_attempt(store: Store) -> None:
    stale = given_on(store)

    with changes_of(store) as changes:
        transitions.reject(store, stale, Late(LateOutcome.FAILED, failure=FAILURE))

    assert changes.pop("attempt job 1.rejected_at") is not None
    assert changes == {
        "attempt job 1.late_outcome": "failed",
        "attempt job 1.error_type": "builtins.ValueError",
        "attempt job 1.error_message": "wrong",
        "attempt job 1.traceback": "Traceback …",
    }


def test_how_the_attempt_ended_stays_as_it_was_written(store: Store) -> None:
    stale = given_on(store)
    before = attempt_row(store, stale)

    transitions.reject(store, stale, LATE)

    after = attempt_row(store, stale)
    kept = ("state", "ended_at", "stop_reason", "claimed_at", "lease_expires_at")
    assert [after[name] for name in kept] == [before[name] for name in kept]


def test_a_stalled_attempts_stack_is_not_overwritten_by_a_late_success(store: Store) -> None:
    stale = running(store)
    transitions.lost(
        store,
        stale,
        cause=LossCause.STALLED,
        reason="stalled",
        lost_backoff=NO_BACKOFF,
        trace="where it hung",
    )

    transitions.reject(store, stale, LATE)

    assert attempt_row(store, stale)["traceback"] == "where it hung"


def test_the_first_late_outcome_stays(store: Store) -> None:
    stale = given_on(store)
    transitions.reject(store, stale, LATE)

    with nothing_changes(store):
        answer = transitions.reject(store, stale, Late(LateOutcome.FAILED, failure=FAILURE))

    assert answer is False


@pytest.mark.parametrize("lease", [Held("job", 1, OTHER), Held("job", 3, ONE), Held("no", 1, ONE)])
def test_a_late_outcome_of_somebody_else_is_not_kept(store: Store, lease: Held) -> None:
    given_on(store)

    with nothing_changes(store):
        answer = transitions.reject(store, lease, LATE)

    assert answer is False


def test_a_live_attempt_has_no_late_outcome(store: Store) -> None:
    lease = running(store)

    with nothing_changes(store):
        answer = transitions.reject(store, lease, LATE)

    assert answer is False


@pytest.mark.parametrize("end", ["complete", "fail", "retry", "replace", "release"])
def test_an_attempt_that_ended_by_its_own_word_has_nothing_to_add(store: Store, end: str) -> None:
    lease = running(store)
    if end == "complete":
        transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
    elif end == "fail":
        transitions.fail(store, lease, parting(), error=None, error_content_type=None)
    elif end == "retry":
        transitions.retry_later(store, lease, parting(), again())
    elif end == "replace":
        transitions.replace(store, lease, parting(), again(task="app.next"))
    else:
        transitions.release(store, lease, parting())

    with nothing_changes(store):
        answer = transitions.reject(store, lease, LATE)

    assert answer is False


@pytest.mark.parametrize("cause", list(LossCause))
def test_an_attempt_that_others_ended_may_add_its_late_outcome(
    store: Store, cause: LossCause
) -> None:
    stale = expired(store)
    transitions.lost(store, stale, cause=cause, reason="x", lost_backoff=NO_BACKOFF)

    assert transitions.reject(store, stale, LATE) is True
    assert attempt_row(store, stale)["state"] == AttemptState(cause.value)


def test_a_cancelled_attempt_may_add_its_late_outcome(store: Store) -> None:
    stale = running(store)
    transitions.cancel(store, "job")

    assert transitions.reject(store, stale, LATE) is True


def test_of_two_late_outcomes_at_once_one_is_kept(store: Store, other_store: Store) -> None:
    stale = given_on(store)
    other = Late(LateOutcome.FAILED, failure=FAILURE)

    answers = at_once(
        lambda: transitions.reject(store, stale, LATE),
        lambda: transitions.reject(other_store, stale, other),
    )

    assert sorted(answers) == [False, True]
    kept = "succeeded" if answers[0] else "failed"
    assert attempt_row(store, stale)["late_outcome"] == kept
