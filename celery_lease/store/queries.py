"""What the reaper and the dispatcher read: no row is locked and none is changed here.

What a person or a program reads of jobs and attempts is in ``models`` and ``history``.

Long, for it is a list: one read after the other, none of which needs the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.engine import RowMapping
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.records import (
    Dispatchable,
    Held,
    LiveAttempt,
    Message,
    Outcome,
    PassRecord,
)
from celery_lease.states import REPLACED_REASONS, AttemptState, JobState
from celery_lease.store import suspects
from celery_lease.store.dialects import Later, SecondsBetween, clock
from celery_lease.store.engine import Store
from celery_lease.store.transitions import outcome_of
from celery_lease.store.transitions.vanishing import is_uncounted_end


def undispatched(store: Store, *, limit: int) -> list[Dispatchable]:
    """Return queued jobs whose message is not on the broker, the longest due first."""
    job = store.tables.job
    statement = (
        _candidates(job)
        .where(job.c.state == JobState.QUEUED.value, job.c.dispatched_at.is_(None))
        .order_by(job.c.available_at, job.c.id)
        .limit(limit)
    )
    return _read_candidates(store, statement)


def unclaimed(store: Store, *, queued_timeout: float, limit: int) -> list[Dispatchable]:
    """Return queued jobs whose message is taken for lost, and a few that are to find that out.

    A message that nobody claimed for ``queued_timeout`` seconds is only suspected: in a backlog
    each one is merely late. Those that were overtaken are lost; of a queue without evidence a few
    are sent again as probes (``suspects``). The gap doubles with each dispatch of a job since it
    was queued, up to a cap: ``backoff.redispatch_gap_seconds`` is the formula.

    Returns:
        At most ``limit``, the overtaken ones first; empty also while nothing is known.
    """
    if not _is_anything_suspected(store, queued_timeout):
        return []
    job = store.tables.job
    overtaken = _read_candidates(
        store, suspects.overtaken(store, _candidates(job), queued_timeout).limit(limit)
    )
    if len(overtaken) >= limit:
        return overtaken
    found = {one.job_id: one for one in overtaken}
    for queue in _silent_queues(store, queued_timeout):
        probes = suspects.probes(queue, _candidates(job), job, queued_timeout)
        for one in _read_candidates(store, probes.limit(queue.probe_count)):
            found.setdefault(one.job_id, one)
    return list(found.values())[:limit]


def _is_anything_suspected(store: Store, queued_timeout: float) -> bool:
    statement = suspects.first(store, queued_timeout)

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).first() is not None

    return store.retrying(work)


def _silent_queues(store: Store, queued_timeout: float) -> list[suspects.SilentQueue]:
    statement = suspects.silent_queues(store, queued_timeout)

    def work() -> list[suspects.SilentQueue]:
        with store.single() as connection:
            return [suspects.SilentQueue(**row) for row in connection.execute(statement).mappings()]

    found = store.retrying(work)
    return [queue for queue in found if queue.is_due(queued_timeout)]


def dispatchable(store: Store, job_id: str) -> Dispatchable | None:
    """Return one job as a dispatch candidate if it is queued and not dispatched, else None."""
    job = store.tables.job
    statement = _candidates(job).where(
        job.c.id == job_id,
        job.c.state == JobState.QUEUED.value,
        job.c.dispatched_at.is_(None),
    )
    found = _read_candidates(store, statement)
    return found[0] if found else None


def committed(store: Store, job_ids: Sequence[str]) -> list[Dispatchable]:
    """Return those of some jobs that are there and whose first message has never left.

    Args:
        store: the store.
        job_ids: at most some hundred. One that is not there was not committed.
    """
    job = store.tables.job
    statement = (
        _candidates(job)
        .where(
            job.c.id.in_(job_ids),
            # A countdown, too, is waited for by the worker that gets the message.
            job.c.state.in_([JobState.QUEUED.value, JobState.SCHEDULED.value]),
            job.c.dispatch_count == 0,
        )
        .order_by(job.c.available_at, job.c.id)
    )
    return _read_candidates(store, statement)


def _candidates(job: Any) -> Any:
    return select(
        job.c.id,
        job.c.task,
        job.c.dispatch_count,
        job.c.message_version,
        job.c.queue,
        SecondsBetween(clock(), job.c.expires_at).label("expires_seconds"),
        SecondsBetween(clock(), job.c.available_at).label("due_seconds"),
    )


def _read_candidates(store: Store, statement: Any) -> list[Dispatchable]:
    def work() -> list[Dispatchable]:
        with store.single() as connection:
            return [_candidate(row) for row in connection.execute(statement).mappings()]

    return store.retrying(work)


def _candidate(row: RowMapping) -> Dispatchable:
    return Dispatchable(
        job_id=row["id"],
        task=row["task"],
        dispatch_count=row["dispatch_count"],
        message_version=row["message_version"],
        queue=row["queue"],
        expires_seconds=row["expires_seconds"],
        due_seconds=float(row["due_seconds"]),
    )


def message(store: Store, job_id: str, version: int) -> Message | None:
    """Return one version of a job's message; None when it is gone."""
    table = store.tables.message
    statement = select(table).where(table.c.job_id == job_id, table.c.version == version)

    def work() -> Message | None:
        with store.single() as connection:
            row = connection.execute(statement).mappings().first()
        if row is None:
            return None
        return Message(
            version=row["version"],
            headers=row["headers"],
            properties=row["properties"],
            body=bytes(row["body"]),
            content_type=row["content_type"],
            content_encoding=row["content_encoding"],
            exchange=row["exchange"],
            routing_key=row["routing_key"],
        )

    return store.retrying(work)


def stamped(
    store: Store, needles: Sequence[str], *, after: str, limit: int
) -> list[tuple[str, str]]:
    """Return jobs that are not final and whose newest message may carry a stamp, by id.

    The headers are text here: who asks reads them, and decides.

    Args:
        store: the store.
        needles: texts, one of which stands in the headers.
        after: the last id of the page before, empty for the first.
        limit: rows at most.

    Returns:
        Each id with its headers, JSON; fewer than ``limit`` on the last page.
    """
    job, table = store.tables.job, store.tables.message
    statement = (
        select(job.c.id, table.c.headers)
        .join(
            table,
            sa.and_(table.c.job_id == job.c.id, table.c.version == job.c.message_version),
        )
        .where(
            # Each state has an index without the jobs of the past.
            job.c.state.in_([state.value for state in JobState if not state.is_final]),
            job.c.finished_at.is_(None),
            job.c.id > after,
            sa.or_(*(table.c.headers.contains(needle, autoescape=True) for needle in needles)),
        )
        .order_by(job.c.id)
        .limit(limit)
    )

    def work() -> list[tuple[str, str]]:
        with store.single() as connection:
            return [(row["id"], row["headers"]) for row in connection.execute(statement).mappings()]

    return store.retrying(work)


def cancelled(store: Store, job_ids: Sequence[str]) -> list[str]:
    """Return which of these few jobs are cancelled; without a question when there are none."""
    if not job_ids:
        return []
    job = store.tables.job
    statement = select(job.c.id).where(
        job.c.id.in_(job_ids), job.c.state == JobState.CANCELLED.value
    )

    def work() -> list[str]:
        with store.single() as connection:
            return sorted(connection.execute(statement).scalars())

    return store.retrying(work)


def dispatch_count(store: Store, job_id: str) -> int | None:
    """Return how often a message of a job was put on the broker; None: no such job."""
    job = store.tables.job
    statement = select(job.c.dispatch_count).where(job.c.id == job_id)

    def work() -> int | None:
        with store.single() as connection:
            return connection.execute(statement).scalar()

    return store.retrying(work)


def replaced_version(store: Store, job_id: str) -> int | None:
    """Return the message version of a job that replaced itself by a canvas, else None."""
    job = store.tables.job
    statement = select(job.c.message_version).where(
        job.c.id == job_id,
        job.c.state == JobState.SUCCEEDED.value,
        job.c.state_reason.in_(REPLACED_REASONS),
    )

    def work() -> int | None:
        with store.single() as connection:
            return connection.execute(statement).scalar()

    return store.retrying(work)


def uncounted_ends(store: Store, job_id: str) -> int:
    """Return how many attempts of a job gave it back, or vanished after a request to stop.

    Since it was last resumed.
    """
    job, attempt = store.tables.job, store.tables.attempt
    statement = (
        select(sa.func.count())
        .select_from(attempt)
        .where(attempt.c.job_id == job_id, is_uncounted_end(job, attempt))
    )

    def work() -> int:
        with store.single() as connection:
            return int(connection.execute(statement).scalar_one())

    return store.retrying(work)


def live_attempts(store: Store, *, owner: str) -> list[LiveAttempt]:
    """Return the attempts that a process holds a lease for, renewed in time or not.

    Empty when it holds none. For who knows that the process is dead.
    """
    attempt = store.tables.attempt
    return _read_live(store, attempt.c.owner == owner)


def live_attempt(store: Store, job_id: str) -> LiveAttempt | None:
    """Return the attempt that holds a job's lease, in time or not; None: it is not running."""
    attempt = store.tables.attempt
    found = _read_live(store, attempt.c.job_id == job_id)
    return found[0] if found else None


def _read_live(store: Store, which: ColumnElement[bool]) -> list[LiveAttempt]:
    job, attempt = store.tables.job, store.tables.attempt
    statement = (
        select(
            attempt.c.job_id,
            attempt.c.fencing_token,
            attempt.c.owner,
            attempt.c.worker,
            job.c.task,
        )
        .join(job, job.c.id == attempt.c.job_id)
        .where(which, attempt.c.ended_at.is_(None))
        .order_by(attempt.c.job_id)
    )

    def work() -> list[LiveAttempt]:
        with store.single() as connection:
            return [LiveAttempt(**row) for row in connection.execute(statement).mappings()]

    return store.retrying(work)


def attempt_state(store: Store, lease: Held) -> AttemptState | None:
    """Return the state of an attempt, named by its job, token and owner; None: no such attempt."""
    attempt = store.tables.attempt
    statement = select(attempt.c.state).where(
        attempt.c.job_id == lease.job_id,
        attempt.c.fencing_token == lease.fencing_token,
        attempt.c.owner == lease.owner,
    )

    def work() -> AttemptState | None:
        with store.single() as connection:
            state = connection.execute(statement).scalar()
        return None if state is None else AttemptState(state)

    return store.retrying(work)


def is_running(store: Store, job_id: str) -> bool:
    """Tell whether a job is running."""
    job = store.tables.job
    statement = select(job.c.id).where(job.c.id == job_id, job.c.state == JobState.RUNNING.value)

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).first() is not None

    return store.retrying(work)


def unsettled(
    store: Store, *, grace_seconds: float, again_seconds: float, limit: int
) -> list[tuple[Outcome, Dispatchable]]:
    """Return final jobs that Celery may not have been told about.

    Args:
        store: the store.
        grace_seconds: how long a fresh outcome is left to the runner that made it. An end
            that no body returned has no such runner, and waits for nobody.
        again_seconds: time between two replays of one job; an end that no body returned is
            told again after ``grace_seconds``, since nothing of it waits in a queue.
        limit: rows at most.
    """
    job = store.tables.job
    unattended = sa.and_(job.c.accepted_attempt.is_(None), job.c.state != JobState.SUCCEEDED.value)
    statement = (
        _candidates(job)
        .add_columns(job)
        .where(
            job.c.finished_at.is_not(None),
            job.c.settled_at.is_(None),
            sa.or_(unattended, job.c.finished_at < Later(clock(), -grace_seconds)),
            sa.or_(
                job.c.dispatched_at.is_(None),
                # Or in the same instant: SQLite's clock has milliseconds.
                job.c.dispatched_at <= job.c.finished_at,
                job.c.dispatched_at < Later(clock(), -again_seconds),
                sa.and_(unattended, job.c.dispatched_at < Later(clock(), -grace_seconds)),
            ),
        )
        .order_by(job.c.finished_at, job.c.id)
        .limit(limit)
    )

    def work() -> list[tuple[Outcome, Dispatchable]]:
        with store.single() as connection:
            rows = connection.execute(statement).mappings().all()
        return [(outcome_of(row), _candidate(row)) for row in rows]

    return store.retrying(work)


def outcome(store: Store, job_id: str) -> tuple[Outcome, Dispatchable] | None:
    """Return the outcome of one final, unsettled job; None when it is not one."""
    job = store.tables.job
    statement = (
        _candidates(job)
        .add_columns(job)
        .where(job.c.id == job_id, job.c.finished_at.is_not(None), job.c.settled_at.is_(None))
    )

    def work() -> tuple[Outcome, Dispatchable] | None:
        with store.single() as connection:
            row = connection.execute(statement).mappings().first()
        return None if row is None else (outcome_of(row), _candidate(row))

    return store.retrying(work)


def last_pass(store: Store) -> PassRecord | None:
    """Return the reaper's last completed pass, with its age by the store's clock."""
    table = store.tables.completed_pass
    statement = select(
        table, SecondsBetween(table.c.finished_at, clock()).label("age_seconds")
    ).where(table.c.id == 1)

    def work() -> PassRecord | None:
        with store.single() as connection:
            row = connection.execute(statement).mappings().first()
        if row is None:
            return None
        return PassRecord(
            finished_at=row["finished_at"],
            age_seconds=float(row["age_seconds"]),
            counts=json.loads(row["counts"]),
            worker=row["worker"],
        )

    return store.retrying(work)
