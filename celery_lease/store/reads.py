"""What people and programs read of jobs and attempts; nothing is locked or changed here.

What the reaper and the dispatcher read is in ``queries``. Listings never load what is large
(results, tracebacks) and advance by key, so that a page costs the same in a table of a
million rows. Called by ``history``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, selectinload, undefer
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Backlog
from celery_lease.states import JobState
from celery_lease.store.dialects import Later, SecondsBetween, clock
from celery_lease.store.engine import Store
from celery_lease.store.models import Attempt, Job, models_for

T = TypeVar("T")

#: Round trips that the store's clock is compared in.
CLOCK_TRIPS = 4

#: Named here for those above, who do not know SQLAlchemy.
ReadingSession: TypeAlias = Session


@contextmanager
def session(store: Store) -> Iterator[ReadingSession]:
    """Give a session for reading: no transaction is left open where the database allows it.

    On SQLite a transaction of ours takes the one writer's lock, so a reader must not have one.
    """
    with store.single() as connection, Session(bind=connection, autoflush=False) as opened:
        yield opened


def jobs(
    store: Store,
    *,
    states: Collection[JobState] | None = None,
    task: str | None = None,
    older_than: float | None = None,
    newer_than: float | None = None,
    limit: int = 100,
    after: Job | None = None,
) -> list[Job]:
    """Return jobs, the newest first; empty when there are no more.

    Args:
        store: the store.
        states: only jobs in one of these, None for all.
        task: only jobs of this task.
        older_than: only jobs recorded at least so many seconds ago.
        newer_than: only jobs recorded at most so many seconds ago.
        limit: jobs at most.
        after: the last job of the page before.
    """
    model, attempt = models_for(store.table_prefix, store.schema)
    statement = select(model).order_by(model.created_at.desc(), model.id.desc()).limit(limit)
    if states is not None:
        statement = statement.where(model.state.in_(states))
        if set(states) == {JobState.RUNNING}:
            # The few live attempts have an index; running jobs have none, which each claim
            # would have to keep up.
            live = select(attempt.job_id).where(attempt.ended_at.is_(None))
            statement = statement.where(model.id.in_(live))
    if task is not None:
        statement = statement.where(model.task == task)
    if older_than is not None:
        statement = statement.where(model.created_at <= _ago(older_than))
    if newer_than is not None:
        statement = statement.where(model.created_at >= _ago(newer_than))
    if after is not None:
        # Not (a, b) < (x, y), which MySQL and MariaDB do not look up in an index.
        statement = statement.where(
            model.created_at <= after.created_at,
            sa.or_(model.created_at < after.created_at, model.id < after.id),
        )
    return _read(store, lambda opened: list(opened.scalars(statement)))


def job(store: Store, job_id: str) -> Job | None:
    """Return one job with its attempts, its result and their tracebacks; None: no such job."""
    model, attempt = models_for(store.table_prefix, store.schema)
    statement = (
        select(model)
        .where(model.id == job_id)
        .options(
            undefer(model.result),
            selectinload(model.attempts).options(
                undefer(attempt.traceback), undefer(attempt.late_result)
            ),
        )
    )
    return _read(store, lambda opened: opened.scalars(statement).one_or_none())


def attempts(
    store: Store,
    *,
    job_id: str | None = None,
    worker: str | None = None,
    live: bool | None = None,
    limit: int = 100,
) -> list[Attempt]:
    """Return attempts, the newest claim first.

    Args:
        store: the store.
        job_id: only those of this job.
        worker: only those on this node.
        live: True for those that hold a lease, False for those that have ended.
        limit: attempts at most.
    """
    _, model = models_for(store.table_prefix, store.schema)
    statement = (
        select(model)
        .order_by(model.claimed_at.desc(), model.job_id.desc(), model.fencing_token.desc())
        .limit(limit)
    )
    if job_id is not None:
        statement = statement.where(model.job_id == job_id)
    if worker is not None:
        statement = statement.where(model.worker == worker)
    if live is not None:
        ended = model.ended_at
        statement = statement.where(ended.is_(None) if live else ended.is_not(None))
    return _read(store, lambda opened: list(opened.scalars(statement)))


def counts(store: Store) -> dict[JobState, int]:
    """Return how many jobs are in each state; a state without one counts 0."""
    table = store.tables.job
    statement = select(table.c.state, sa.func.count()).group_by(table.c.state)
    found = dict(_read(store, lambda opened: [tuple(row) for row in opened.execute(statement)]))
    return {state: found.get(state.value, 0) for state in JobState}


def backlog(store: Store, *, seconds: float = 60.0) -> Backlog:
    """Return what waits, and what has waited for longer than it should.

    Args:
        store: the store.
        seconds: how long after its dispatch a queued job is unclaimed, after the end of its
            lease a running one overdue, after its end a final one unsettled, and after its due
            time a waiting one overdue.
    """
    job, attempt = store.tables.job, store.tables.attempt
    queued = job.c.state == JobState.QUEUED.value
    waited = SecondsBetween(sa.func.min(job.c.available_at), clock())

    def counted(table: sa.Table, *conditions: ColumnElement[bool]) -> sa.Select[Any]:
        return select(sa.func.count()).select_from(table).where(*conditions)

    unclaimed = counted(job, queued, job.c.dispatched_at <= _ago(seconds))
    overdue = counted(
        attempt, attempt.c.ended_at.is_(None), attempt.c.lease_expires_at < _ago(seconds)
    )
    unsettled = counted(
        job,
        job.c.finished_at.is_not(None),
        job.c.settled_at.is_(None),
        job.c.finished_at < _ago(seconds),
    )

    waiting = counted(
        job,
        job.c.state.in_([JobState.SCHEDULED.value, JobState.RETRY_WAIT.value]),
        job.c.dispatched_at.is_(None),
        job.c.available_at < _ago(seconds),
    )

    def ask(opened: Session) -> Backlog:
        queued_count, oldest = opened.execute(select(sa.func.count(), waited).where(queued)).one()
        return Backlog(
            queued_count=queued_count,
            # A scheduled job may be queued a moment before its time.
            oldest_queued_seconds=max(0.0, float(oldest or 0.0)),
            unclaimed_count=opened.scalars(unclaimed).one(),
            overdue_running_count=opened.scalars(overdue).one(),
            unsettled_count=opened.scalars(unsettled).one(),
            overdue_waiting_count=opened.scalars(waiting).one(),
        )

    return _read(store, ask)


def now(store: Store) -> datetime:
    """Return the time by the store's clock."""
    return _read(store, lambda opened: opened.scalars(select(clock())).one())


def clock_offset(store: Store) -> float:
    """Return by how many seconds the store's clock is ahead of this host's.

    The store's answer is compared with the middle of the round trip, and the shortest of a few
    round trips counts: the first includes the time to connect. Off by half of it at most.
    """

    def ask(opened: Session) -> float:
        trips = []
        for _ in range(CLOCK_TRIPS):
            sent_at = time.time()
            there = opened.scalars(select(clock())).one().timestamp()
            back_at = time.time()
            trips.append((back_at - sent_at, there - (sent_at + back_at) / 2))
        return min(trips)[1]

    return _read(store, ask)


def isolation(store: Store) -> str:
    """Return the isolation level of the store's transactions, in the words of the SQL standard."""

    def work() -> str:
        with store.transaction() as connection:
            return str(connection.get_isolation_level())

    return _answered(store, work)


def _ago(seconds: float) -> ColumnElement[datetime]:
    # A sub-select is computed once. PostgreSQL calls its clock for every row otherwise, and so
    # cannot look the instant up in the index.
    return select(Later(clock(), -seconds)).scalar_subquery()


def _read(store: Store, ask: Callable[[Session], T]) -> T:
    def work() -> T:
        with session(store) as opened:
            answer = ask(opened)
            opened.expunge_all()
            return answer

    return _answered(store, work)


def _answered(store: Store, work: Callable[[], T]) -> T:
    try:
        return store.retrying(work)
    except DBAPIError as error:
        # What remains is a refusal: this user may not read the tables.
        raise StoreUnavailable(store.masked_url, str(error.orig).strip()) from error
