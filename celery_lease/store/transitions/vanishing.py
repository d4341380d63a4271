"""``lost`` and ``expire``: one policy for every vanished runner, however it was noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.backoff import BY_ITSELF, AfterLoss, after_loss, is_loss_counted
from celery_lease.records import Held, Vanished
from celery_lease.states import AttemptState, JobState, LossCause, OnExpiry
from celery_lease.store.dialects import Later, clock, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import built, clean, lock_job, state_or_busy


def is_uncounted_end(job: Any, attempt: Any) -> ColumnElement[bool]:
    """Return whether an attempt's end was one that the cap on uncounted ends is about.

    The counts of a resumed job begin anew: what it went through before is not asked for.
    """
    resumed = (
        select(sa.func.coalesce(job.c.resumed_token, 0))
        .where(job.c.id == attempt.c.job_id)
        .correlate(attempt)
        .scalar_subquery()
    )
    vanished = attempt.c.state.in_([AttemptState.EXPIRED.value, AttemptState.LOST.value])
    return sa.and_(
        sa.or_(
            sa.and_(
                attempt.c.state == AttemptState.RELEASED.value,
                sa.func.coalesce(attempt.c.stop_reason, "").not_in(BY_ITSELF),
            ),
            sa.and_(vanished, attempt.c.stop_requested_at.is_not(None)),
        ),
        attempt.c.fencing_token > resumed,
    )


def decide(
    store: Store,
    connection: Connection,
    lease: Held,
    row: RowMapping,
    *,
    cause: LossCause,
    lost_backoff: Sequence[float],
) -> AfterLoss:
    """Return what the policy says of the runner of a locked job, whose attempt has been ended.

    Only then is it known whether it was asked to stop: a renewal, which does not ask for the
    job's row, may say so until its attempt has ended.
    """
    asked = connection.execute(
        built(store, "stops", _stops_statement),
        {"p_id": lease.job_id, "p_token": lease.fencing_token},
    ).one()
    is_counted = is_loss_counted(
        cause=cause,
        stop_requested=bool(asked.stop_requested),
        uncounted_ends=int(asked.uncounted_ends),
    )
    return after_loss(
        lost_count=row["lost_count"] + is_counted,
        max_attempts=row["max_attempts"],
        on_expiry=OnExpiry(row["on_expiry"]),
        schedule=lost_backoff,
        is_counted=is_counted,
    )


def _stops_statement(store: Store) -> Any:
    """Return the read of whether an attempt was asked to stop, and of how many were spared."""
    job, attempt = store.tables.job, store.tables.attempt
    this = attempt.c.fencing_token == bindparam("p_token")
    earlier = sa.and_(sa.not_(this), is_uncounted_end(job, attempt))
    stopping = sa.and_(this, attempt.c.stop_requested_at.is_not(None))
    return select(
        sa.func.max(case((stopping, 1), else_=0)).label("stop_requested"),
        sa.func.sum(case((earlier, 1), else_=0)).label("uncounted_ends"),
    ).where(attempt.c.job_id == bindparam("p_id"))


def end_lost(
    store: Store,
    connection: Connection,
    lease: Held,
    *,
    cause: LossCause,
    reason: str,
    trace: str | None = None,
    stopping: bool = False,
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
    if stopping:
        asked_at = sa.func.coalesce(attempt.c.stop_requested_at, clock())
        statement = statement.values(stop_requested_at=asked_at)
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
    count = row["lost_count"] + decision.is_counted
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
        is_counted=decision.is_counted,
    )


def lost(
    store: Store,
    lease: Held,
    *,
    cause: LossCause,
    reason: str,
    lost_backoff: Sequence[float],
    trace: str | None = None,
    stopping: bool = False,
) -> Vanished | None:
    """Report a vanished runner, by its token and owner; the policy says what follows.

    One that was asked to stop is not counted as a loss, up to a cap (design, section 7); a
    stall always is.

    Args:
        store: the store.
        lease: the lease it held.
        cause: how it was found to have vanished.
        reason: why the attempt ended, kept on its row.
        lost_backoff: ``lease_lost_backoff``, seconds.
        trace: the stack of the thread that stood still, kept on the attempt.
        stopping: True when the caller knows that it had been asked to stop, whether a renewal
            has told the store or not.

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
            if not end_lost(
                store,
                connection,
                lease,
                cause=cause,
                reason=reason,
                trace=trace,
                stopping=stopping,
            ):
                return None
            decision = decide(store, connection, lease, row, cause=cause, lost_backoff=lost_backoff)
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
                    decision = decide(
                        store,
                        connection,
                        lease,
                        row,
                        cause=LossCause.EXPIRED,
                        lost_backoff=lost_backoff,
                    )
                    given_on.append(
                        apply_loss(
                            store,
                            connection,
                            lease,
                            row,
                            decision=decision,
                            cause=LossCause.EXPIRED,
                        )
                    )
        return given_on

    return store.retrying(work)
