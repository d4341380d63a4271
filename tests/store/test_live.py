"""What is read of live attempts and of what waits, and what is written for a dead runner."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from celery_lease.records import (
    Accepted,
    Backlog,
    Failure,
    Held,
    LiveAttempt,
    Stale,
)
from celery_lease.states import AttemptState, JobState
from celery_lease.store import queries, reads, transitions
from celery_lease.store.dialects import Later, clock
from tests.store.builders import (
    JSON,
    ONE,
    OTHER,
    attempt_row,
    claimed,
    expired,
    finished,
    holding,
    in_background,
    job_row,
    lock_job,
    move_back,
    new_message,
    nothing_changes,
    parting,
    running,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store

TIME_LIMIT = Failure("billiard.exceptions.TimeLimitExceeded", "(30,)", None, "time_limit")


# --- live attempts ------------------------------------------------------------------------------


def test_the_live_attempts_of_an_owner_are_those_it_holds_now(store: Store) -> None:
    transitions.release(store, running(store, "b"), parting())
    claimed(store, "b", owner=ONE, worker="celery@again")
    expired(store, "a", owner=ONE, task="app.other")
    finished(store, running(store, "done", owner=ONE))
    running(store, "not mine", owner=OTHER)
    submitted(store, "waits")

    found = queries.live_attempts(store, owner=ONE)

    assert found == [
        LiveAttempt("a", 1, ONE, "celery@one", "app.other"),
        LiveAttempt("b", 2, ONE, "celery@again", "app.work"),
    ]
    assert queries.live_attempts(store, owner="nobody") == []


def test_an_owner_is_compared_to_the_letter(store: Store) -> None:
    running(store, owner=ONE)

    assert queries.live_attempts(store, owner=ONE.upper()) == []


def test_the_live_attempt_of_a_job_is_the_one_that_holds_its_lease(store: Store) -> None:
    transitions.release(store, running(store), parting())
    assert queries.live_attempt(store, "job") is None

    claimed(store, owner=OTHER)

    assert queries.live_attempt(store, "job") == LiveAttempt(
        "job", 2, OTHER, "celery@one", "app.work"
    )
    assert queries.live_attempt(store, "no such job") is None


def test_live_attempts_are_read_past_whoever_holds_the_job_row(row_store: Store) -> None:
    running(row_store)

    with (
        holding(row_store, lock_job(row_store)),
        in_background(lambda: queries.live_attempts(row_store, owner=ONE)) as answer,
    ):
        found = answer()

    assert [one.job_id for one in found] == ["job"]


def test_the_state_of_an_attempt_is_asked_by_job_token_and_owner(store: Store) -> None:
    lease = running(store)
    assert queries.attempt_state(store, lease) is AttemptState.CLAIMED

    transitions.release(store, lease, parting())
    claimed(store)

    assert queries.attempt_state(store, lease) is AttemptState.RELEASED
    for other in (Held("job", 1, OTHER), Held("job", 3, ONE), Held("no", 1, ONE)):
        assert queries.attempt_state(store, other) is None


# --- for a runner that is dead ------------------------------------------------------------------


def test_a_time_limit_is_told_by_another_process_in_the_name_of_the_dead_one(store: Store) -> None:
    """The worker's main process has killed the child; it knows the child's owner."""
    lease = running(store, owner=ONE)

    answer = transitions.fail(
        store,
        Held(lease.job_id, lease.fencing_token, ONE),
        parting("time_limit", worker_now=None, failure=TIME_LIMIT),
        error=b"{}",
        error_content_type=JSON,
        settled=True,
    )

    assert isinstance(answer, Accepted)
    job, attempt = job_row(store), attempt_row(store, lease)
    assert (job["state"], job["accepted_attempt"]) == (JobState.FAILED, 1)
    assert job["settled_at"] == job["finished_at"] == answer.finished_at
    assert (attempt["state"], attempt["failure_class"]) == (AttemptState.FAILED, "time_limit")
    assert (attempt["owner"], attempt["worker_ended_at"]) == (ONE, None)


def test_a_time_limit_of_a_child_that_had_finished_changes_nothing(store: Store) -> None:
    lease = running(store)
    finished(store, lease, settled=False)

    with nothing_changes(store):
        answer = transitions.fail(
            store, lease, parting("time_limit"), error=None, error_content_type=None
        )

    assert answer == Stale(AttemptState.COMPLETED)
    assert queries.attempt_state(store, lease) is AttemptState.COMPLETED


def test_a_message_whose_reader_died_before_a_claim_is_sent_again(store: Store) -> None:
    submitted(store)
    assert queries.dispatchable(store, "job") is None

    done = transitions.undispatch(store, "job", dispatch_count=None, message_version=1)

    assert done
    candidate = queries.dispatchable(store, "job")
    assert candidate is not None
    assert transitions.dispatch(store, candidate)


def test_a_job_that_has_moved_on_is_not_sent_again_for_a_reader_that_died(store: Store) -> None:
    lease = running(store, "claimed by another")
    finished(store, running(store, "final"))
    again = transitions.Again(message=new_message(2))
    transitions.retry_later(store, running(store, "retried"), parting(), again)

    with nothing_changes(store):
        answers = [
            transitions.undispatch(store, job_id, dispatch_count=None, message_version=1)
            for job_id in (lease.job_id, "final", "retried", "no such job")
        ]

    assert answers == [False] * 4


# --- what waits ---------------------------------------------------------------------------------


def test_an_empty_store_has_no_backlog(store: Store) -> None:
    assert reads.backlog(store) == Backlog(0, 0.0, 0, 0, 0)


def test_the_backlog_counts_what_waits_and_what_waits_too_long(store: Store) -> None:
    for name, seconds in (("new", 0), ("old", 100), ("older", 200)):
        submitted(store, name)
        move_back(store, name, seconds=seconds)
    submitted(store, "undispatched", dispatched=False)
    move_back(store, "undispatched", seconds=500)
    submitted(store, "later", delay_seconds=600.0)
    for name, seconds in (("live", 0), ("over", 40), ("long over", 100), ("longer over", 900)):
        running(store, name)
        move_back(store, name, seconds=seconds)
    for name, seconds in (("just done", 0), ("done", 70)):
        finished(store, running(store, name), settled=False)
        move_back(store, name, seconds=seconds)
    finished(store, running(store, "settled"))
    move_back(store, "settled", seconds=900)

    found = reads.backlog(store, seconds=60.0)

    assert 500 <= found.oldest_queued_seconds < 560
    assert found == Backlog(
        queued_count=4,
        oldest_queued_seconds=found.oldest_queued_seconds,
        unclaimed_count=2,
        overdue_running_count=2,
        unsettled_count=1,
    )
    assert reads.backlog(store, seconds=150.0).unclaimed_count == 1


def test_a_job_that_is_queued_before_its_time_has_not_waited(store: Store) -> None:
    submitted(store)
    job = store.tables.job
    with store.engine.begin() as connection:
        connection.execute(sa.update(job).values(available_at=Later(clock(), 5.0)))

    assert reads.backlog(store).oldest_queued_seconds == 0.0


# --- the clock ----------------------------------------------------------------------------------


def test_the_clock_of_a_store_on_this_host_is_this_hosts(store: Store) -> None:
    assert abs(reads.clock_offset(store)) < 2.0


@pytest.mark.parametrize("seconds", [-90.0, 90.0])
def test_a_host_whose_clock_is_off_is_seen(
    store: Store, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(reads, "time", SimpleNamespace(time=lambda: real() - seconds))

    assert abs(reads.clock_offset(store) - seconds) < 2.0


def test_a_slow_first_answer_is_not_taken_for_an_offset(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting takes a round trip or more."""
    real, asked = time.time, []

    def slow_at_first() -> float:
        asked.append(0)
        return real() - (30.0 if len(asked) == 1 else 0.0)

    monkeypatch.setattr(reads, "time", SimpleNamespace(time=slow_at_first))

    assert abs(reads.clock_offset(store)) < 2.0
