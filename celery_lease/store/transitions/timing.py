"""What the clock alone does: ``wake``, ``pass_deadline``, ``expire_unstarted``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.states import AttemptState, JobState
from celery_lease.store.dialects import Later, clock, clock_once, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import WAITING, clean


def _move_batch(
    store: Store, guard: list[ColumnElement[bool]], values: Mapping[str, Any], limit: int
) -> list[str]:
    """Move up to ``limit`` jobs that are not running; return the ids of those that moved."""
    job = store.tables.job
    free = select(job.c.id).where(*guard).limit(limit).with_for_update(skip_locked=True)

    def work() -> list[str]:
        with store.transaction() as connection:
            ids = sorted(connection.execute(free).scalars())
            moved = []
            for job_id in ids:
                change = (
                    sa.update(job).where(job.c.id == job_id, unindexed(*guard)).values(**values)
                )
                if connection.execute(change).rowcount == 1:
                    moved.append(job_id)
            return moved

    return store.retrying(work)


def wake(store: Store, *, limit: int, dispatched_grace_seconds: float) -> list[str]:
    """Move due jobs on: scheduled, retry_wait → queued, undispatched.

    Args:
        store: the store.
        limit: rows at most.
        dispatched_grace_seconds: a job whose message is with the broker or in a worker that
            holds it until its ETA is left to that message for so long after its due time.

    Returns:
        The ids that moved; empty when nothing is due.
    """
    job = store.tables.job
    guard = [
        job.c.state.in_([JobState.SCHEDULED.value, JobState.RETRY_WAIT.value]),
        job.c.available_at <= clock_once(),
        sa.or_(
            job.c.dispatched_at.is_(None),
            job.c.available_at <= Later(clock_once(), -dispatched_grace_seconds),
        ),
    ]
    values = {"state": JobState.QUEUED.value, "dispatched_at": None}
    return _move_batch(store, guard, values, limit)


def expire_unstarted(store: Store, *, limit: int) -> list[str]:
    """End waiting jobs past Celery's ``expires``: → cancelled. Returns the ids that moved."""
    job = store.tables.job
    # finished_at too: the predicate of the index on expires_at.
    guard = [
        job.c.state.in_(WAITING),
        job.c.finished_at.is_(None),
        job.c.expires_at <= clock_once(),
    ]
    values = {
        "state": JobState.CANCELLED.value,
        "state_reason": "expires",
        "finished_at": clock(),
        "active_key": None,
    }
    return _move_batch(store, guard, values, limit)


def pass_deadline(store: Store, *, limit: int) -> list[str]:
    """End jobs past their deadline: → failed, and a running one's attempt → cancelled.

    A held job is only marked overdue. Returns the ids that were failed.
    """
    job = store.tables.job
    # finished_at too: the predicate of the index on deadline_at.
    over = sa.and_(job.c.finished_at.is_(None), job.c.deadline_at <= clock_once())
    values: dict[str, Any] = {
        "state": JobState.FAILED.value,
        "state_reason": "deadline",
        "error_type": "celery_lease.exceptions.DeadlineExceeded",
        "error_message": "it was not done by its deadline",
        "finished_at": clock(),
        "lease_owner": None,
        "active_key": None,
    }
    held = [
        job.c.state == JobState.HELD.value,
        over,
        job.c.state_reason.is_distinct_from("overdue"),
    ]
    _move_batch(store, held, {"state_reason": "overdue"}, limit)
    moved = _move_batch(store, [job.c.state.in_(WAITING), over], values, limit)
    running = [job.c.state == JobState.RUNNING.value, over]
    late = (
        select(job.c.id, job.c.fencing_token, job.c.lease_owner)
        .where(*running)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )

    def work() -> list[str]:
        with store.transaction() as connection:
            return [
                row["id"]
                for row in connection.execute(late).mappings().all()
                if stop_running(store, connection, row, values, guard=running, reason="deadline")
            ]

    return moved + store.retrying(work)


def stop_running(
    store: Store,
    connection: Connection,
    row: RowMapping,
    values: Mapping[str, Any],
    *,
    guard: list[ColumnElement[bool]],
    reason: str,
) -> bool:
    """End a running job from outside: job UPDATE → attempt → cancelled."""
    job, attempt = store.tables.job, store.tables.attempt
    moved = connection.execute(
        sa.update(job)
        .where(job.c.id == row["id"], job.c.fencing_token == row["fencing_token"], *guard)
        .values(**values)
    ).rowcount
    if moved != 1:
        return False
    connection.execute(
        sa.update(attempt)
        .where(
            attempt.c.job_id == row["id"],
            attempt.c.fencing_token == row["fencing_token"],
            unindexed(attempt.c.ended_at.is_(None)),
        )
        .values(
            state=AttemptState.CANCELLED.value, ended_at=clock(), stop_reason=clean(reason, 255)
        )
    )
    return True
