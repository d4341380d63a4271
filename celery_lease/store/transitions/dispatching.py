"""``dispatch``, ``undispatch``, ``settle``: what was put on the broker, what Celery was told."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy import case, tuple_

from celery_lease.records import Dispatchable
from celery_lease.states import JobState
from celery_lease.store.dialects import by_primary_key, clock, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import FINAL, WAITING


def dispatch(store: Store, candidate: Dispatchable, *, replay: bool = False) -> bool:
    """Record that a message is about to be put on the broker.

    Args:
        store: the store.
        candidate: the job as read.
        replay: True for a final, unsettled job whose message is sent to have it settled.

    Returns:
        True when the caller is to publish; False when another dispatcher has it, or the job
        has moved on. If the process dies before the publish, the job is sent again after
        ``lease_queued_timeout``.
    """
    job = store.tables.job
    expected = (
        [job.c.finished_at.is_not(None), job.c.settled_at.is_(None)]
        if replay
        # Scheduled: what was enqueued with a countdown, and is sent for the first time.
        else [job.c.state.in_([JobState.QUEUED.value, JobState.SCHEDULED.value])]
    )
    # What is not dispatched is sent for the first time since it was queued, however long ago that
    # was: the gaps between its messages count from now (``suspects``).
    is_sent_again = job.c.dispatched_at.is_not(None)
    first_at = sa.func.coalesce(job.c.first_dispatched_at, job.c.dispatched_at)
    statement = (
        sa.update(job)
        .where(
            job.c.id == candidate.job_id,
            job.c.dispatch_count == candidate.dispatch_count,
            job.c.message_version == candidate.message_version,
            unindexed(*expected),
        )
        # In this order: MySQL would see the new ``dispatched_at``.
        .ordered_values(
            (job.c.first_dispatched_at, case((is_sent_again, first_at))),
            (job.c.dispatched_at, clock()),
            (job.c.dispatch_count, candidate.dispatch_count + 1),
        )
    )

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def undispatch_many(store: Store, job_ids: Sequence[str]) -> int:
    """Say that the first messages of many jobs did not leave: the reaper sends them.

    Returns:
        How many jobs are still as they were submitted; the others have moved on.
    """
    job = store.tables.job
    statement = by_primary_key(
        sa.update(job)
        .where(
            job.c.id.in_(job_ids),
            job.c.dispatch_count == 1,
            unindexed(job.c.state.in_(WAITING), job.c.message_version == 1),
        )
        .values(dispatched_at=None),
        job,
    )

    def work() -> int:
        with store.single() as connection:
            return int(connection.execute(statement).rowcount)

    return store.retrying(work)


def undispatch(
    store: Store, job_id: str, *, dispatch_count: int | None, message_version: int | None = None
) -> bool:
    """Say that a message did not leave: the reaper sends it.

    Args:
        store: the store.
        job_id: the job.
        dispatch_count: of the dispatch that failed; None when it was the first of its version.
        message_version: of the message that did not leave; None for any.

    Returns:
        False when the job has moved on.
    """
    job = store.tables.job
    guard = [job.c.id == job_id, unindexed(job.c.state.in_(WAITING))]
    if dispatch_count is not None:
        guard.append(job.c.dispatch_count == dispatch_count)
    if message_version is not None:
        guard.append(job.c.message_version == message_version)
    statement = sa.update(job).where(*guard).values(dispatched_at=None)

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def put_last(store: Store, job_id: str) -> bool:
    """Have a queued job that is not on the broker wait behind the others that are not.

    A message that never leaves, whatever is wrong with it, must not be the first of every pass.

    Returns:
        False when it is the last one already, or has moved on.
    """
    job = store.tables.job
    waits = [job.c.state == JobState.QUEUED.value, job.c.dispatched_at.is_(None)]
    last = (
        sa.select(job.c.available_at)
        .where(*waits, job.c.id != job_id)
        .order_by(job.c.available_at.desc())
        .limit(1)
    )

    def work() -> bool:
        with store.single() as connection:
            last_at = connection.execute(last).scalar()
            if last_at is None:
                return False
            statement = (
                sa.update(job)
                .where(job.c.id == job_id, unindexed(*waits, job.c.available_at <= last_at))
                .values(available_at=last_at + timedelta(milliseconds=1))
            )
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def settle(store: Store, outcomes: Sequence[tuple[str, int, datetime]]) -> int:
    """Say that Celery has been told these outcomes: (job id, token, finished_at) each.

    Returns:
        How many were settled now. The others were settled already, or resumed meanwhile: the
        outcome that was published is no longer the job's.
    """
    if not outcomes:
        return 0
    job = store.tables.job
    published = tuple_(job.c.id, job.c.fencing_token, job.c.finished_at)
    statement = by_primary_key(
        sa.update(job)
        .where(
            # The ids too: they are what the primary key can be searched by.
            job.c.id.in_([job_id for job_id, _, _ in outcomes]),
            published.in_(sorted(outcomes)),
            job.c.state.in_(FINAL),
            job.c.settled_at.is_(None),
        )
        .values(settled_at=clock()),
        job,
    )

    def work() -> int:
        with store.single() as connection:
            return int(connection.execute(statement).rowcount)

    return store.retrying(work)
