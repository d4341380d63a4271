"""``lost`` and ``expire``: one policy for every vanished runner, however it was noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.engine import Connection, RowMapping

from celery_lease.backoff import AfterLoss, after_loss
from celery_lease.records import Held, Vanished
from celery_lease.states import JobState, LossCause, OnExpiry
from celery_lease.store.dialects import Later, clock, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import clean, lock_job, state_or_busy


def decide(row: RowMapping, lost_backoff: Sequence[float]) -> AfterLoss:
    """Return what the policy says of one more loss of a locked job."""
    return after_loss(
        lost_count=row["lost_count"] + 1,
        max_attempts=row["max_attempts"],
        on_expiry=OnExpiry(row["on_expiry"]),
        schedule=lost_backoff,
    )


def end_lost(
    store: Store,
    connection: Connection,
    lease: Held,
    *,
    cause: LossCause,
    reason: str,
    trace: str | None = None,
) -> bool:
    """End a vanished runner's attempt. The count of this UPDATE decides: it carries the expiry."""
    attempt = store.tables.attempt
    statement = (
        sa.update(attempt)
        .where(
            attempt.c.job_id == lease.job_id,
            attempt.c.fencing_token == lease.fencing_token,
            attempt.c.owner == lease.owner,
            unindexed(attempt.c.ended_at.is_(None)),
        )
        .values(state=cause.value, ended_at=clock(), stop_reason=clean(reason, 255))
    )
    if cause is LossCause.EXPIRED:
        statement = statement.where(attempt.c.lease_expires_at < clock())
    if trace is not None:
        statement = statement.values(traceback=clean(trace))
    return connection.execute(statement).rowcount == 1


_END_TEXTS = {
    JobState.INTERRUPTED: (
        "celery_lease.exceptions.JobInterrupted",
        "{count} runners vanished while they ran it (lease_max_attempts is {limit})",
    ),
    JobState.FAILED: (
        "celery_lease.exceptions.JobRunnerLost",
        "its runner vanished, and lease_on_expiry is 'fail'",
    ),
}


def apply_loss(
    store: Store,
    connection: Connection,
    lease: Held,
    row: RowMapping,
    *,
    decision: AfterLoss,
    cause: LossCause,
) -> Vanished:
    """Write what the policy decided into the locked job row, whose attempt has been ended."""
    job, attempt = store.tables.job, store.tables.attempt
    count = row["lost_count"] + 1
    values: dict[str, Any] = {
        "state": decision.state.value,
        "state_reason": decision.reason,
        "lost_count": count,
        "lease_owner": None,
        "available_at": Later(clock(), decision.delay_seconds),
        # It has started in time: ``expires`` limits the start only (design, section 3).
        "expires_at": None,
        "dispatched_at": None,
    }
    if decision.state.is_final:
        error_type, text = _END_TEXTS[decision.state]
        values |= {
            "finished_at": clock(),
            "error_type": error_type,
            "error_message": text.format(count=count, limit=row["max_attempts"]),
            "active_key": None,
        }
    moved = connection.execute(
        sa.update(job)
        .where(
            job.c.id == lease.job_id,
            job.c.state == JobState.RUNNING.value,
            job.c.fencing_token == lease.fencing_token,
            job.c.lease_owner == lease.owner,
        )
        .values(**values)
    ).rowcount
    if moved != 1:
        raise AssertionError("a locked job row changed under its lock")
    after = (
        connection.execute(
            select(job.c.finished_at, attempt.c.worker)
            .join(attempt, attempt.c.job_id == job.c.id)
            .where(job.c.id == lease.job_id, attempt.c.fencing_token == lease.fencing_token)
        )
        .mappings()
        .one()
    )
    return Vanished(
        job_id=lease.job_id,
        fencing_token=lease.fencing_token,
        cause=cause,
        state=decision.state,
        delay_seconds=decision.delay_seconds,
        finished_at=after["finished_at"],
        worker=after["worker"],
        owner=lease.owner,
    )


def lost(
    store: Store,
    lease: Held,
    *,
    cause: LossCause,
    reason: str,
    lost_backoff: Sequence[float],
    trace: str | None = None,
) -> Vanished | None:
    """Report a vanished runner, by its token and owner; the policy says what follows.

    Returns:
        What the policy did. None: the attempt had ended, or (cause ``expired``) was renewed;
        somebody was faster and nothing was changed.
    """

    def work() -> Vanished | None:
        with store.transaction() as connection:
            row = lock_job(store, connection, lease.job_id)
            if row is None:
                state_or_busy(store, connection, lease.job_id)
                return None
            if not end_lost(store, connection, lease, cause=cause, reason=reason, trace=trace):
                return None
            decision = decide(row, lost_backoff)
            return apply_loss(store, connection, lease, row, decision=decision, cause=cause)

    return store.retrying(work)


def expire(
    store: Store, *, limit: int, lost_backoff: Sequence[float], skip: frozenset[str] = frozenset()
) -> list[Vanished]:
    """Give on the jobs of one batch of ended leases.

    Join locked with SKIP LOCKED → attempt UPDATE that carries the expiry and whose count
    decides → job UPDATE.

    Args:
        store: the store.
        limit: rows at most.
        lost_backoff: ``lease_lost_backoff``, seconds.
        skip: job ids that were tried in this pass already.

    Returns:
        What the policy did with each; empty when nothing has expired.
    """
    job, attempt = store.tables.job, store.tables.attempt
    ended = (
        select(
            job.c.id,
            job.c.fencing_token,
            job.c.lease_owner,
            job.c.lost_count,
            job.c.max_attempts,
            job.c.on_expiry,
        )
        .join(
            attempt,
            sa.and_(attempt.c.job_id == job.c.id, attempt.c.fencing_token == job.c.fencing_token),
        )
        .where(
            job.c.state == JobState.RUNNING.value,
            attempt.c.ended_at.is_(None),
            attempt.c.lease_expires_at < clock(),
        )
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    if skip:
        ended = ended.where(job.c.id.not_in(sorted(skip)))

    def work() -> list[Vanished]:
        given_on = []
        with store.transaction() as connection:
            for row in connection.execute(ended).mappings().all():
                lease = Held(row["id"], row["fencing_token"], row["lease_owner"])
                if end_lost(
                    store, connection, lease, cause=LossCause.EXPIRED, reason="lease ended"
                ):
                    given_on.append(
                        apply_loss(
                            store,
                            connection,
                            lease,
                            row,
                            decision=decide(row, lost_backoff),
                            cause=LossCause.EXPIRED,
                        )
                    )
        return given_on

    return store.retrying(work)
