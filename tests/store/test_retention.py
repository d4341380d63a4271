"""record_pass, last_pass, prune: the reaper's own row, and the end of history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_lease.records import Absent
from celery_lease.states import JobState, LossCause
from celery_lease.store import queries, transitions
from tests.store.builders import (
    FAILURE,
    NO_BACKOFF,
    about,
    again,
    at_once,
    changes_of,
    claimed,
    finished,
    holding,
    job_row,
    lock_job,
    move_back,
    move_passes_back,
    new_delivery,
    nothing_changes,
    parting,
    rows,
    running,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store


def prune(
    store: Store, *, succeeded: float | None = 100.0, failed: float | None = 100.0, limit: int = 100
) -> int:
    return transitions.prune(store, succeeded_seconds=succeeded, failed_seconds=failed, limit=limit)


def ended(store: Store, state: JobState, *, settled: bool = True) -> str:
    """Record a job that ended in a state 200 s ago; it is named like the state."""
    name = state.value
    if state is JobState.CANCELLED:
        submitted(store, name)
        transitions.cancel(store, name)
    elif state is JobState.INTERRUPTED:
        lease = running(store, name, max_attempts=1)
        transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
    elif state is JobState.FAILED:
        said = parting(failure=FAILURE)
        transitions.fail(store, running(store, name), said, error=None, error_content_type=None)
    else:
        finished(store, running(store, name), settled=False)
    job = job_row(store, name)
    if settled:
        transitions.settle(store, [(name, job["fencing_token"], job["finished_at"])])
    move_back(store, name, seconds=200)
    return name


FINAL = [state for state in JobState if state.is_final]


# --- the last pass ------------------------------------------------------------------------------


def test_before_the_first_pass_there_is_none(store: Store) -> None:
    assert queries.last_pass(store) is None


def test_the_last_pass_is_kept_with_its_counts_and_its_age(store: Store) -> None:
    now = store_now(store)
    transitions.record_pass(store, counts='{"expired": 1}', worker="celery@one")
    transitions.record_pass(store, counts='{"expired": 2}', worker="celery@two")
    move_passes_back(store, seconds=20)

    last = queries.last_pass(store)

    assert last is not None
    assert (last.counts, last.worker) == ({"expired": 2}, "celery@two")
    assert about(last.finished_at, now, seconds=-20)
    assert type(last.age_seconds) is float
    assert 20 <= last.age_seconds < 25
    assert len(rows(store)["pass"]) == 1


def test_first_passes_at_once_leave_one_row(store: Store, other_store: Store) -> None:
    at_once(
        *[
            lambda s=s: transitions.record_pass(s, counts="{}", worker=None)
            for s in (store, other_store)
        ]
        * 3
    )

    assert len(rows(store)["pass"]) == 1


# --- prune --------------------------------------------------------------------------------------


def test_old_final_jobs_go_with_their_messages_and_attempts(store: Store) -> None:
    lease = running(store)
    transitions.retry_later(store, lease, parting(), again())
    finished(store, claimed(store, message_version=2))
    move_back(store, "job", seconds=200)
    running(store, "kept")

    with changes_of(store) as changes:
        count = prune(store)

    assert count == 1
    assert changes == {
        "job job": "removed",
        "message job 1": "removed",
        "message job 2": "removed",
        "attempt job 1": "removed",
        "attempt job 2": "removed",
    }
    assert transitions.claim(store, new_delivery()) == Absent()


def test_successes_and_failures_have_their_own_retention(store: Store) -> None:
    for state in FINAL:
        ended(store, state)

    assert prune(store, succeeded=100.0, failed=300.0) == 1
    assert JobState.SUCCEEDED.value not in rows(store)["job"]
    assert prune(store, succeeded=300.0, failed=100.0) == 3
    assert rows(store)["job"] == {}


def test_without_a_retention_a_kind_is_kept_for_ever(store: Store) -> None:
    for state in FINAL:
        ended(store, state)

    with nothing_changes(store):
        nothing = prune(store, succeeded=None, failed=None)
    count = prune(store, succeeded=None, failed=100.0)

    assert (nothing, count) == (0, 3)
    assert rows(store)["job"].keys() == {"succeeded"}


def test_failures_may_be_kept_for_ever(store: Store) -> None:
    for state in FINAL:
        ended(store, state)

    assert prune(store, succeeded=100.0, failed=None) == 1


def test_a_job_that_nobody_settled_is_never_removed(store: Store) -> None:
    for state in FINAL:
        ended(store, state, settled=False)

    with nothing_changes(store):
        count = prune(store)

    assert count == 0


def test_a_job_that_ended_lately_is_kept(store: Store) -> None:
    finished(store, running(store))
    move_back(store, "job", seconds=50)

    with nothing_changes(store):
        count = prune(store)

    assert count == 0


def test_a_job_that_is_not_final_is_kept_however_old(store: Store) -> None:
    submitted(store, "queued")
    running(store, "running")
    submitted(store, "held")
    transitions.hold_waiting(store, "held", reason="x")
    for name in ("queued", "running", "held"):
        move_back(store, name, seconds=100_000)

    with nothing_changes(store):
        count = prune(store)

    assert count == 0


def test_a_batch_has_a_limit(store: Store) -> None:
    for number in range(5):
        finished(store, running(store, f"job{number}"))
        move_back(store, f"job{number}", seconds=200)

    sizes = [prune(store, limit=2) for _ in range(4)]

    assert sizes == [2, 2, 1, 0]


def test_the_limit_of_a_batch_counts_all_kinds_together(store: Store) -> None:
    for number in range(2):
        finished(store, running(store, f"done{number}"))
        submitted(store, f"cancelled{number}")
        transitions.cancel(store, f"cancelled{number}")
        cancelled = job_row(store, f"cancelled{number}")
        transitions.settle(store, [(f"cancelled{number}", 0, cancelled["finished_at"])])
        for name in ("done", "cancelled"):
            move_back(store, f"{name}{number}", seconds=200)

    sizes = [prune(store, limit=3) for _ in range(3)]

    assert sizes == [3, 1, 0]


def test_a_job_whose_row_is_locked_is_left_to_the_next_pass(row_store: Store) -> None:
    for name in ("locked", "free"):
        finished(row_store, running(row_store, name))
        move_back(row_store, name, seconds=200)

    with holding(row_store, lock_job(row_store, "locked", read=True)):
        count = prune(row_store)

    assert count == 1
    assert rows(row_store)["job"].keys() == {"locked"}


def test_a_job_that_was_resumed_is_not_removed(store: Store) -> None:
    ended(store, JobState.SUCCEEDED)
    transitions.resume(store, "succeeded", reason="again")

    with nothing_changes(store):
        count = prune(store)

    assert count == 0
