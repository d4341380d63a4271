"""The reaper's own row, and the end of history."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.states import JobState
from celery_lease.store.dialects import Later, clock, clock_once
from celery_lease.store.engine import Store
from celery_lease.store.transitions.results import FORGOTTEN
from celery_lease.store.transitions.statements import FINAL, clean


def record_pass(store: Store, *, counts: str, worker: str | None) -> None:
    """Record a completed pass: its counts (JSON text), by the store's clock."""
    table = store.tables.completed_pass
    values = {"finished_at": clock(), "counts": counts, "worker": clean(worker, 255)}

    def work() -> None:
        with store.single() as connection:
            changed = connection.execute(sa.update(table).where(table.c.id == 1).values(**values))
        if changed.rowcount == 1:
            return
        try:
            with store.single() as connection:
                connection.execute(sa.insert(table).values(id=1, **values))
        except IntegrityError:
            # Another reaper recorded the first pass in this very moment.
            return

    store.retrying(work)


def prune(
    store: Store, *, succeeded_seconds: float | None, failed_seconds: float | None, limit: int
) -> int:
    """Remove final, settled jobs past their retention, with their messages and attempts.

    Args:
        store: the store.
        succeeded_seconds: ``lease_keep_succeeded``, None for ever.
        failed_seconds: ``lease_keep_failed`` (failed, cancelled, interrupted), None for ever.
        limit: jobs at most.

    Returns:
        How many jobs were removed.
    """
    job = store.tables.job
    removed = 0
    # One state at a time, which its index has in the order of ``finished_at``.
    for state in sorted(FINAL):
        seconds = succeeded_seconds if state == JobState.SUCCEEDED.value else failed_seconds
        if seconds is not None and removed < limit:
            old = [job.c.state == state, job.c.finished_at < Later(clock_once(), -seconds)]
            removed += _remove_batch(store, old, limit - removed)
    return removed


def _remove_batch(store: Store, old: list[ColumnElement[bool]], limit: int) -> int:
    job, message, attempt = store.tables.job, store.tables.message, store.tables.attempt
    result = store.tables.result
    forgotten = result.c.status == FORGOTTEN
    guard = [job.c.settled_at.is_not(None), *old]
    free = (
        select(job.c.id)
        .where(*guard)
        # In the order of the index: PostgreSQL expects the first rows it reads to be old ones,
        # and reads the whole table when none is.
        .order_by(job.c.finished_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )

    def work() -> int:
        with store.transaction() as connection:
            ids = sorted(connection.execute(free).scalars())
            if not ids:
                return 0
            connection.execute(sa.delete(message).where(message.c.job_id.in_(ids)))
            connection.execute(sa.delete(attempt).where(attempt.c.job_id.in_(ids)))
            connection.execute(sa.delete(result).where(result.c.task_id.in_(ids), forgotten))
            return int(connection.execute(sa.delete(job).where(job.c.id.in_(ids), *guard)).rowcount)

    return store.retrying(work)
