"""What a person says of a job: cancel, hold, resume, accept, refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import case, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.states import NEVER_SENT, JobState
from celery_lease.store.dialects import Later, clock
from celery_lease.store.engine import Store
from celery_lease.store.transitions.keys import free_key
from celery_lease.store.transitions.statements import (
    FINAL,
    WAITING,
    clean,
    lock_job,
    may_be_id,
    state_or_busy,
)
from celery_lease.store.transitions.timing import stop_running


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a request to end a job came to.

    Attributes:
        state: the state it is in, which is final; None: no such job.
        is_new: True when this very call ended it; False when it had ended before, as cancelled
            or otherwise.
    """

    state: JobState | None
    is_new: bool = False


def cancel(store: Store, job_id: str, *, reason: str = "cancelled") -> JobState | None:
    """End a job by request: anything but final → cancelled.

    Returns:
        ``cancelled`` when it was ended now, else the final state it is in; None: no such job.
    """
    return cancel_now(store, job_id, reason=reason).state


def cancel_now(store: Store, job_id: str, *, reason: str) -> Cancelled:
    """Do as ``cancel``, and tell whether it was this call that ended the job."""
    if not may_be_id(job_id):
        return Cancelled(None)
    job = store.tables.job
    values = cancelled_values(reason)

    def work() -> Cancelled:
        with store.transaction() as connection:
            row = lock_job(store, connection, job_id)
            if row is None:
                return Cancelled(state_or_busy(store, connection, job_id))
            if JobState(row["state"]).is_final:
                return Cancelled(JobState(row["state"]))
            stop_running(
                store,
                connection,
                row,
                values,
                guard=[job.c.state == row["state"], job.c.finished_at.is_(None)],
                reason=reason,
            )
            return Cancelled(JobState.CANCELLED, is_new=True)

    return store.retrying(work)


def cancelled_values(reason: str) -> dict[str, Any]:
    """Return what a job's row says when it was ended by request."""
    return {
        "state": JobState.CANCELLED.value,
        "state_reason": clean(reason, 255),
        "finished_at": clock(),
        "lease_owner": None,
        "active_key": None,
    }


def _operate(
    store: Store,
    job_id: str,
    guard: list[ColumnElement[bool]],
    values: Mapping[str, Any],
    reached: JobState,
) -> JobState | None:
    """Apply an operator's word; return the state reached, or the one the job is in."""
    job = store.tables.job

    def work() -> JobState | None:
        with store.transaction() as connection:
            change = sa.update(job).where(job.c.id == job_id, *guard).values(**values)
            if connection.execute(change).rowcount == 1:
                return reached
            return read(connection)

    def read(connection: Connection) -> JobState | None:
        state = connection.execute(select(job.c.state).where(job.c.id == job_id)).scalar()
        return None if state is None else JobState(state)

    def work_unless_taken() -> JobState | None:
        try:
            return work()
        except IntegrityError:
            # Another job took its idempotency key meanwhile.
            with store.single() as connection:
                return read(connection)

    return store.retrying(work_unless_taken)


def hold_waiting(store: Store, job_id: str, *, reason: str) -> JobState | None:
    """Hold a job that waits: scheduled, queued, retry_wait → held.

    Returns:
        ``held``, or the state it is in when it does not wait; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.HELD.value,
        "state_reason": clean(reason, 255),
        "dispatched_at": None,
    }
    return _operate(store, job_id, [job.c.state.in_(WAITING)], values, JobState.HELD)


def resume(
    store: Store,
    job_id: str,
    *,
    reason: str,
    expires_seconds: float | None = None,
    deadline_seconds: float | None = None,
    retention_seconds: float | None = None,
) -> JobState | None:
    """Run a job again: held, or final and settled → queued, with its token and its history.

    Args:
        store: the store.
        job_id: the job.
        reason: who says so and why.
        expires_seconds: a new ``expires``; a past one is cleared.
        deadline_seconds: a new deadline; a past one is cleared.
        retention_seconds: how long another job that has succeeded holds the key of this one
            (``lease_idempotency_retention``), None for as long as it is kept.

    Returns:
        ``queued``, or the state it is in when it cannot be resumed (in a state that can: another
        job has taken its idempotency key, and it has run itself; or it was never sent, and has no
        arguments); None: no such job. One that has never run follows the holder of its key.
    """
    job = store.tables.job
    guard = [
        sa.or_(
            job.c.state == JobState.HELD.value,
            sa.and_(job.c.state.in_(FINAL), job.c.settled_at.is_not(None)),
        ),
        # Its message has no arguments.
        job.c.state_reason.is_distinct_from(NEVER_SENT),
    ]
    values: dict[str, Any] = {
        "state": JobState.QUEUED.value,
        "state_reason": clean(reason, 255),
        "available_at": clock(),
        "expires_at": _anew(job.c.expires_at, expires_seconds),
        "deadline_at": _anew(job.c.deadline_at, deadline_seconds),
        "resumed_token": job.c.fencing_token,
        "lost_count": 0,
        "failure_count": 0,
        "dispatched_at": None,
        # Its next message is not its first: that one is refused where the id is remembered as
        # revoked, also if it was cancelled before any message of it had left.
        "dispatch_count": case((job.c.dispatch_count == 0, 1), else_=job.c.dispatch_count),
        "active_key": job.c.idempotency_key,
        "accepted_attempt": None,
        "accepted_late": None,
        "result": None,
        "result_type": None,
        "error_type": None,
        "error_message": None,
        "settled_at": None,
        "finished_at": None,
    }
    reached = _operate(store, job_id, guard, values, JobState.QUEUED)
    if reached is None or reached is JobState.QUEUED:
        return reached
    if retention_seconds is not None and free_key(
        store, job_id, retention_seconds=retention_seconds
    ):
        # As a new submit would have taken it.
        reached = _operate(store, job_id, guard, values, JobState.QUEUED)
        if reached is JobState.QUEUED:
            return reached
    # Its key is held. One that never held it has waited for the holder, and does so again.
    has_followed = sa.and_(
        job.c.idempotency_key.is_not(None),
        job.c.active_key.is_(None),
        sa.or_(job.c.state == JobState.HELD.value, job.c.fencing_token == 0),
    )
    follows = values | {"active_key": None}
    return _operate(store, job_id, [*guard, has_followed], follows, JobState.QUEUED)


def _anew(instant: Any, seconds: float | None) -> Any:
    """Return a bound of a resumed job: the new one, else the old one if it is still to come."""
    if seconds is not None:
        return Later(clock(), seconds)
    return case((instant > clock(), instant), else_=sa.null())


def accept(
    store: Store, job_id: str, *, reason: str, result: bytes | None, result_type: str | None
) -> JobState | None:
    """Accept a held job with the operator's result: held → succeeded.

    Returns:
        ``succeeded``, or the state it is in when it is not held; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.SUCCEEDED.value,
        "state_reason": clean(reason, 255),
        "result": result,
        "result_type": result_type,
        "accepted_attempt": job.c.fencing_token,
        "error_type": None,
        "error_message": None,
        "finished_at": clock(),
    }
    return _operate(store, job_id, [job.c.state == JobState.HELD.value], values, JobState.SUCCEEDED)


def refuse(store: Store, job_id: str, *, reason: str) -> JobState | None:
    """Give a held job up: held → failed.

    Returns:
        ``failed``, or the state it is in when it is not held; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.FAILED.value,
        "state_reason": clean(reason, 255),
        "error_type": sa.func.coalesce(job.c.error_type, "celery_lease.exceptions.JobEnded"),
        "error_message": sa.func.coalesce(job.c.error_message, "refused by an operator"),
        "finished_at": clock(),
        "active_key": None,
    }
    return _operate(store, job_id, [job.c.state == JobState.HELD.value], values, JobState.FAILED)
