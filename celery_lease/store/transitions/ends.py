"""The ways a runner can end its attempt: what each sets in the job's and the attempt's row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select

from celery_lease.states import AttemptState, JobState
from celery_lease.store.dialects import Later, clock
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import instant, live_attempt, mine, seconds


@dataclass(frozen=True, slots=True)
class End:
    """One way for a runner to end its attempt: the SET clauses of both rows."""

    name: str
    attempt_state: AttemptState
    job_values: Callable[[Store], dict[Any, Any]]


def _cleared(job: Any) -> dict[Any, Any]:
    return {job.c.lease_owner: sa.null(), job.c.state_reason: bindparam("p_reason")}


def _accepted_late(store: Store) -> Any:
    attempt = store.tables.attempt
    return (
        select(case((attempt.c.lease_expires_at < clock(), sa.true()), else_=sa.false()))
        .where(
            attempt.c.job_id == bindparam("p_id"), attempt.c.fencing_token == bindparam("p_token")
        )
        .scalar_subquery()
    )


def _final_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _cleared(job) | {
        job.c.accepted_attempt: bindparam("p_token"),
        job.c.accepted_late: _accepted_late(store),
        job.c.result: bindparam("p_result", type_=sa.LargeBinary),
        job.c.result_type: bindparam("p_result_type"),
        job.c.finished_at: clock(),
        job.c.settled_at: case((bindparam("p_settled", type_=sa.Integer) == 1, clock())),
    }


def _complete_values(store: Store) -> dict[Any, Any]:
    return _final_values(store) | {store.tables.job.c.state: JobState.SUCCEEDED.value}


def _fail_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _final_values(store) | {
        job.c.state: JobState.FAILED.value,
        job.c.failure_count: job.c.failure_count + 1,
        job.c.error_type: bindparam("p_error_type"),
        job.c.error_message: bindparam("p_error_message"),
        job.c.active_key: sa.null(),
    }


def _again_values(store: Store) -> dict[Any, Any]:
    """Return the SET clauses of an arrow back to waiting; it clears ``dispatched_at``."""
    job = store.tables.job
    return _cleared(job) | {
        job.c.state: bindparam("p_state"),
        job.c.available_at: Later(clock(), seconds("p_delay")),
        job.c.dispatched_at: case(
            (bindparam("p_dispatched", type_=sa.Integer) == 1, clock()), else_=sa.null()
        ),
        job.c.first_dispatched_at: sa.null(),
        job.c.dispatch_count: job.c.dispatch_count + bindparam("p_dispatched", type_=sa.Integer),
    }


def _release_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    # It has started in time: ``expires`` limits the start only (design, section 3).
    return _again_values(store) | {job.c.expires_at: sa.null()}


def _retry_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _again_values(store) | {
        job.c.failure_count: job.c.failure_count + 1,
        job.c.message_version: bindparam("p_version"),
        job.c.expires_at: Later(clock(), seconds("p_expires")),
        job.c.queue: bindparam("p_queue"),
        job.c.priority: bindparam("p_priority", type_=sa.Integer),
    }


def replace_values(store: Store) -> dict[Any, Any]:
    """Return the SET clauses of a job that goes on as another task."""
    job = store.tables.job
    keeps = bindparam("p_keeps_key", type_=sa.Integer) == 1
    kept = (job.c.idempotency_key, job.c.active_key, job.c.arguments_digest)
    values = (
        _retry_values(store)
        | {job.c.task: bindparam("p_task")}
        | {column: case((keeps, column), else_=sa.null()) for column in kept}
    )
    values.pop(job.c.failure_count)
    return values


def _hold_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _cleared(job) | {
        job.c.state: JobState.HELD.value,
        job.c.failure_count: job.c.failure_count + 1,
        job.c.error_type: bindparam("p_error_type"),
        job.c.error_message: bindparam("p_error_message"),
        job.c.dispatched_at: sa.null(),
    }


COMPLETE = End("complete", AttemptState.COMPLETED, _complete_values)
REPLACED_AWAY = End("replaced_away", AttemptState.REPLACED, _complete_values)
FAIL = End("fail", AttemptState.FAILED, _fail_values)
RETRY = End("retry_later", AttemptState.RETRIED, _retry_values)
REPLACE = End("replace", AttemptState.REPLACED, replace_values)
RELEASE = End("release", AttemptState.RELEASED, _release_values)
HOLD = End("hold", AttemptState.FAILED, _hold_values)


def _attempt_end(attempt: Any, end: End) -> Any:
    return sa.update(attempt).values(
        {
            attempt.c.state: end.attempt_state.value,
            attempt.c.ended_at: clock(),
            attempt.c.stop_reason: bindparam("p_reason"),
            attempt.c.worker_ended_at: bindparam("p_worker_now", type_=instant()),
            attempt.c.error_type: bindparam("p_error_type"),
            attempt.c.error_message: bindparam("p_error_message"),
            attempt.c.traceback: bindparam("p_traceback"),
            attempt.c.failure_class: bindparam("p_failure_class"),
            attempt.c.retryable: bindparam("p_retryable", type_=sa.Boolean),
            attempt.c.progress: sa.func.coalesce(bindparam("p_progress"), attempt.c.progress),
            attempt.c.checkpoint: sa.func.coalesce(bindparam("p_checkpoint"), attempt.c.checkpoint),
        }
    )


def end_statement(end: End) -> Callable[[Store], Any]:
    """Return what builds an end as one statement: lock, job UPDATE, attempt UPDATE."""

    def build(store: Store) -> Any:
        job, attempt = store.tables.job, store.tables.attempt
        locked = (
            select(job.c.id)
            .where(job.c.id == bindparam("p_id"))
            .with_for_update(skip_locked=True)
            .cte("locked")
        )
        moved = (
            sa.update(job)
            .where(job.c.id == select(locked.c.id).scalar_subquery(), *mine(job))
            .values(end.job_values(store))
            .returning(job.c.id, job.c.finished_at)
            .cte("moved")
        )
        ended = (
            _attempt_end(attempt, end)
            .where(attempt.c.job_id == select(moved.c.id).scalar_subquery(), *live_attempt(attempt))
            .returning(attempt.c.job_id)
            .cte("ended")
        )
        return select(moved.c.finished_at).add_cte(ended)

    return build


def end_job_statement(end: End) -> Callable[[Store], Any]:
    """Return what builds the job UPDATE of an end in a transaction."""

    def build(store: Store) -> Any:
        job = store.tables.job
        return (
            sa.update(job)
            .where(job.c.id == bindparam("p_id"), *mine(job))
            .values(end.job_values(store))
        )

    return build


def end_attempt_statement(end: End) -> Callable[[Store], Any]:
    """Return what builds the attempt UPDATE of an end in a transaction."""

    def build(store: Store) -> Any:
        attempt = store.tables.attempt
        return _attempt_end(attempt, end).where(
            attempt.c.job_id == bindparam("p_id"), *live_attempt(attempt)
        )

    return build
