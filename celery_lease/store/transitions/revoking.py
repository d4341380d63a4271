"""``cancel`` for many jobs at once, and for the job of one delivery: what Celery revokes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.states import REPLACED_REVOKED, AttemptState, JobState
from celery_lease.store.engine import Store
from celery_lease.store.transitions.operating import cancel_now, cancelled_values
from celery_lease.store.transitions.statements import FINAL, may_be_id
from celery_lease.store.transitions.timing import stop_running

#: Jobs ended in one transaction, which holds their rows for so long.
BATCH = 100


def cancel_all(store: Store, job_ids: Iterable[str], *, reason: str) -> list[str]:
    """End many jobs by request, in batches: anything but final → cancelled.

    A batch that was ended stays so when a later one cannot be.

    Args:
        store: the store.
        job_ids: any number of ids; unknown ones and final jobs are left alone. One that has
            replaced itself by a canvas is marked: ``reopen`` will not go on with it.
        reason: who says so and why.

    Returns:
        The ids of the jobs that were ended now, sorted.

    Raises:
        StoreUnavailable: the store could not be used, or a job's row stayed locked.
    """
    wanted = sorted({one for one in job_ids if may_be_id(one)})
    ended: list[str] = []
    for start in range(0, len(wanted), BATCH):
        ended += _cancel_batch(store, wanted[start : start + BATCH], reason)
    return ended


def _cancel_batch(store: Store, job_ids: list[str], reason: str) -> list[str]:
    job = store.tables.job
    is_replaced = sa.and_(
        job.c.state == JobState.SUCCEEDED.value,
        job.c.state_reason == AttemptState.REPLACED.value,
    )
    found = select(job.c.id, job.c.finished_at).where(
        job.c.id.in_(job_ids), sa.or_(job.c.finished_at.is_(None), is_replaced)
    )
    mark = sa.update(job).where(is_replaced).values(state_reason=REPLACED_REVOKED)
    locked = (
        select(job)
        .where(job.c.id.in_(job_ids), job.c.finished_at.is_(None))
        .order_by(job.c.id)
        .with_for_update(skip_locked=True)
    )

    def read() -> tuple[list[str], list[str]]:
        with store.single() as connection:
            rows = connection.execute(found).mappings().all()
        return (
            [row["id"] for row in rows if row["finished_at"] is None],
            [row["id"] for row in rows if row["finished_at"] is not None],
        )

    def mark_all(replaced: list[str]) -> None:
        with store.single() as connection:
            connection.execute(mark.where(job.c.id.in_(replaced)))

    def work() -> list[str]:
        with store.transaction() as connection:
            return [
                row["id"]
                for row in connection.execute(locked).mappings().all()
                if stop_running(
                    store,
                    connection,
                    row,
                    cancelled_values(reason),
                    guard=_still(job, row["state"]),
                    reason=reason,
                )
            ]

    # Most of what an app revokes may be no job of ours: that costs one read and no lock.
    left, replaced = store.retrying(read)
    if replaced:
        store.retrying(lambda: mark_all(replaced))
    if not left:
        return []
    ended = store.retrying(work)
    for job_id in sorted(set(left) - set(ended)):
        # Its row was locked: it is waited for alone.
        if cancel_now(store, job_id, reason=reason).is_new:
            ended.append(job_id)
    return sorted(ended)


def _still(job: Any, state: str) -> list[ColumnElement[bool]]:
    return [job.c.state == state, job.c.finished_at.is_(None)]


def cancel_dispatched(store: Store, job_id: str, *, dispatch_count: int, reason: str) -> bool:
    """End the job of a delivery that a worker has refused to run, if it is still that one's.

    A job that was dispatched since, or that somebody has resumed, is left alone: the worker's
    reason is older than that.

    Args:
        store: the store.
        job_id: the job.
        dispatch_count: of the delivery.
        reason: why.

    Returns:
        True when it was ended now.
    """
    job = store.tables.job
    locked = (
        select(job)
        .where(
            job.c.id == job_id,
            job.c.state.not_in(FINAL),
            job.c.dispatch_count == dispatch_count,
            job.c.dispatched_at.is_not(None),
        )
        .with_for_update()
    )

    def work() -> bool:
        with store.transaction() as connection:
            row = connection.execute(locked).mappings().first()
            return row is not None and stop_running(
                store,
                connection,
                row,
                cancelled_values(reason),
                guard=[*_still(job, row["state"]), job.c.dispatch_count == dispatch_count],
                reason=reason,
            )

    return store.retrying(work)
