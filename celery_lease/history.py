"""Reading the history of an app's jobs: typed queries, and the classes for one's own.

Nothing here changes a job. Instants are by the store's clock. Called by users and by the
CLI; the statements are in ``store/reads``. For other questions there are ``session`` and
``Job``, ``Attempt``::

    with history.session(app) as session:
        session.scalars(select(history.Job).where(history.Job.queue == "mail"))

With another ``lease_store_table_prefix`` or ``lease_store_schema`` the classes are those of
``models(app)``.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from celery_lease.exceptions import JobNotFound
from celery_lease.extension import store_of
from celery_lease.states import JobState
from celery_lease.store import reads
from celery_lease.store.models import Attempt, Job, models_for

__all__ = ["Attempt", "Job", "attempts", "counts", "job", "jobs", "models", "now", "session"]


def jobs(
    app: Any,
    *,
    state: JobState | str | Collection[JobState | str] | None = None,
    task: str | None = None,
    older_than: float | None = None,
    newer_than: float | None = None,
    limit: int = 100,
    after: Job | None = None,
) -> list[Job]:
    """Return jobs, the newest first. Their ``attempts`` and ``result`` are not loaded.

    Args:
        app: the Celery app.
        state: only jobs in this state, or in one of these.
        task: only jobs of the task of this name.
        older_than: only jobs recorded at least so many seconds ago.
        newer_than: only jobs recorded at most so many seconds ago.
        limit: jobs at most, at least 1.
        after: the last job of the page before.

    Returns:
        At most ``limit`` jobs; empty when there are no more.

    Raises:
        ValueError: a state is none, or the limit is below 1.
        StoreUnavailable: the store cannot be reached.
        SchemaMismatch: its tables are missing, older or newer than this code.

    .. versionadded:: 0.1
    """
    return reads.jobs(
        store_of(app),
        states=_states(state),
        task=task,
        older_than=older_than,
        newer_than=newer_than,
        limit=_at_least_one(limit),
        after=after,
    )


def job(app: Any, job_id: str) -> Job:
    """Return one job with everything that is known of it: its attempts, result, tracebacks.

    Raises:
        JobNotFound: there is no such job; it may have been removed after its retention.
        StoreUnavailable: the store cannot be reached.
        SchemaMismatch: its tables are missing, older or newer than this code.

    .. versionadded:: 0.1
    """
    found = reads.job(store_of(app), job_id)
    if found is None:
        raise JobNotFound(job_id)
    return found


def attempts(
    app: Any,
    *,
    job_id: str | None = None,
    worker: str | None = None,
    live: bool | None = None,
    limit: int = 100,
) -> list[Attempt]:
    """Return attempts, the newest claim first. Tracebacks and late results are not loaded.

    Args:
        app: the Celery app.
        job_id: only those of this job.
        worker: only those on this node (``celery@host``).
        live: True for those that hold a lease now, False for those that have ended.
        limit: attempts at most, at least 1.

    Raises:
        ValueError: the limit is below 1.
        StoreUnavailable: the store cannot be reached.
        SchemaMismatch: its tables are missing, older or newer than this code.

    .. versionadded:: 0.1
    """
    return reads.attempts(
        store_of(app), job_id=job_id, worker=worker, live=live, limit=_at_least_one(limit)
    )


def counts(app: Any) -> dict[JobState, int]:
    """Return how many jobs are in each state; every state is there, most with 0.

    It reads the whole table: a matter of a second with a million jobs.

    Raises:
        StoreUnavailable: the store cannot be reached.
        SchemaMismatch: its tables are missing, older or newer than this code.

    .. versionadded:: 0.1
    """
    return reads.counts(store_of(app))


def now(app: Any) -> datetime:
    """Return the time by the store's clock: what its instants are to be compared with.

    .. versionadded:: 0.1
    """
    return reads.now(store_of(app))


def session(app: Any) -> AbstractContextManager[reads.ReadingSession]:
    """Give a SQLAlchemy session on the store, to read with; close it soon.

    .. versionadded:: 0.1
    """
    return reads.session(store_of(app))


def models(app: Any) -> tuple[type[Job], type[Attempt]]:
    """Return the classes for the app's own table prefix and schema.

    .. versionadded:: 0.1
    """
    store = store_of(app)
    return models_for(store.table_prefix, store.schema)


def _states(
    state: JobState | str | Collection[JobState | str] | None,
) -> frozenset[JobState] | None:
    if state is None:
        return None
    # A JobState is a str too: one word, and not a collection of letters.
    words = [state] if isinstance(state, str) else state
    return frozenset(JobState(word) for word in words)


def _at_least_one(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit is {limit}: it must be 1 or more")
    return limit
