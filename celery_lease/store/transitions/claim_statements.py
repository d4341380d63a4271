"""The statements of a claim: its guard, what it writes, and the read that explains a refusal."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.records import Delivery
from celery_lease.states import AttemptState, JobState
from celery_lease.store.dialects import Later, SecondsBetween, clock, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import clean, instant, seconds

#: A message may arrive this early: workers release an ETA by their own clock (design, section 9).
DUE_SLACK_SECONDS = 2.0


def claim_parameters(delivery: Delivery) -> dict[str, Any]:
    """Return the parameters of the statements below."""
    return {
        "p_id": delivery.job_id,
        "p_version": delivery.message_version,
        "p_dispatch": delivery.dispatch_count,
        "p_owner": delivery.owner,
        "p_worker": clean(delivery.worker, 255),
        "p_nonce": delivery.nonce,
        "p_lease": delivery.lease_seconds,
        "p_worker_now": delivery.worker_now,
    }


def _claimable(job: Any) -> list[ColumnElement[bool]]:
    """Return the guard of a claim: all of it stands in the UPDATE's own WHERE."""
    due = Later(clock(), DUE_SLACK_SECONDS)
    is_due = sa.or_(
        job.c.state == JobState.QUEUED.value,
        sa.and_(
            # Not in_(): SQLAlchemy expands its list anew at each execution.
            sa.or_(
                job.c.state == JobState.SCHEDULED.value,
                job.c.state == JobState.RETRY_WAIT.value,
            ),
            job.c.available_at <= due,
        ),
    )
    return [
        unindexed(
            is_due,
            sa.or_(job.c.deadline_at.is_(None), job.c.deadline_at > clock()),
            sa.or_(job.c.expires_at.is_(None), job.c.expires_at > clock()),
            # One that follows the holder of its key runs only once it holds that itself.
            sa.or_(job.c.idempotency_key.is_(None), job.c.active_key.is_not(None)),
        ),
        job.c.message_version == bindparam("p_version"),
    ]


def _running_values(job: Any) -> dict[Any, Any]:
    return {
        job.c.state: JobState.RUNNING.value,
        job.c.state_reason: sa.null(),
        job.c.fencing_token: job.c.fencing_token + 1,
        job.c.lease_owner: bindparam("p_owner"),
        # Kept only if it is when the message that is claimed here was sent, and not a later copy:
        # it is the evidence that older messages of the queue are lost (``queries.unclaimed``).
        job.c.dispatched_at: case(
            (job.c.dispatch_count == bindparam("p_dispatch", type_=sa.Integer), job.c.dispatched_at)
        ),
    }


def _attempt_values() -> dict[str, Any]:
    return {
        "state": sa.literal(AttemptState.CLAIMED.value),
        "worker": bindparam("p_worker", type_=sa.Text),
        "owner": bindparam("p_owner", type_=sa.Text),
        "claim_nonce": bindparam("p_nonce", type_=sa.Text),
        "message_version": bindparam("p_version", type_=sa.Integer),
        "lease_seconds": seconds("p_lease"),
        "lease_expires_at": Later(clock(), seconds("p_lease")),
        "last_renewed_at": clock(),
        "renewal_count": sa.literal(0),
        "claimed_at": clock(),
        "worker_claimed_at": bindparam("p_worker_now", type_=instant()),
    }


def _last_checkpoint(attempt: Any) -> Any:
    earlier = attempt.alias("earlier")
    return (
        select(earlier.c.checkpoint)
        .where(earlier.c.job_id == bindparam("p_id"), earlier.c.checkpoint.is_not(None))
        .order_by(earlier.c.fencing_token.desc())
        .limit(1)
        .scalar_subquery()
        .label("checkpoint")
    )


def claim_statement(store: Store) -> Any:
    """Return the claim as one statement: lock, job UPDATE, attempt INSERT, what a runner needs."""
    job, attempt = store.tables.job, store.tables.attempt
    locked = (
        select(job.c.id)
        .where(job.c.id == bindparam("p_id"))
        .with_for_update(skip_locked=True)
        .cte("locked")
    )
    moved = (
        sa.update(job)
        .where(job.c.id == select(locked.c.id).scalar_subquery(), *_claimable(job))
        .values(_running_values(job))
        .returning(job.c.id, job.c.fencing_token, job.c.message_version, job.c.lost_count)
        .cte("moved")
    )
    values = _attempt_values()
    added = (
        sa.insert(attempt)
        .from_select(
            ["job_id", "fencing_token", *values],
            select(moved.c.id, moved.c.fencing_token, *values.values()),
        )
        .returning(attempt.c.job_id)
        .cte("added")
    )
    return select(
        moved.c.fencing_token,
        moved.c.message_version,
        moved.c.lost_count,
        _last_checkpoint(attempt),
    ).add_cte(added)


def claim_job_statement(store: Store) -> Any:
    """Return the job UPDATE of a claim in a transaction."""
    job = store.tables.job
    return (
        sa.update(job)
        .where(job.c.id == bindparam("p_id"), *_claimable(job))
        .values(_running_values(job))
    )


def claim_attempt_statement(store: Store) -> Any:
    """Return the attempt INSERT of a claim in a transaction."""
    attempt = store.tables.attempt
    return sa.insert(attempt).values(
        job_id=bindparam("p_id"), fencing_token=bindparam("p_token"), **_attempt_values()
    )


def held_job_statement(store: Store) -> Any:
    """Return the read of a job row that this transaction has locked or just written."""
    job, attempt = store.tables.job, store.tables.attempt
    return (
        select(
            job.c.fencing_token,
            job.c.message_version,
            job.c.lost_count,
            job.c.max_attempts,
            job.c.on_expiry,
            job.c.state,
            _last_checkpoint(attempt),
        )
        .where(job.c.id == bindparam("p_id"))
        .with_for_update(of=job)
    )


def seen_statement(store: Store) -> Any:
    """Return the read, without a lock, that explains why a claim changed nothing."""
    job, attempt = store.tables.job, store.tables.attempt
    current = sa.and_(attempt.c.job_id == job.c.id, attempt.c.fencing_token == job.c.fencing_token)
    return (
        select(
            job,
            attempt.c.claim_nonce,
            attempt.c.worker,
            case((attempt.c.lease_expires_at < clock(), 1), else_=0).label("lease_over"),
            case((job.c.available_at <= Later(clock(), DUE_SLACK_SECONDS), 1), else_=0).label(
                "is_due"
            ),
            case((job.c.deadline_at <= clock(), 1), else_=0).label("is_overdue"),
            case((job.c.expires_at <= clock(), 1), else_=0).label("is_expired"),
            SecondsBetween(job.c.finished_at, clock()).label("final_seconds"),
            SecondsBetween(job.c.created_at, clock()).label("waited_seconds"),
            _last_checkpoint(attempt),
        )
        .select_from(job.outerjoin(attempt, current))
        .where(job.c.id == bindparam("p_id"))
    )


def take_over_statement(store: Store) -> Any:
    """Return the job UPDATE of a take-over: running → running, token + 1, a loss if counted."""
    job = store.tables.job
    return (
        sa.update(job)
        .where(
            job.c.id == bindparam("p_id"),
            job.c.state == JobState.RUNNING.value,
            job.c.fencing_token == bindparam("p_token"),
            job.c.lease_owner == bindparam("p_held_by"),
        )
        .values(
            {
                **_running_values(job),
                job.c.lost_count: job.c.lost_count + bindparam("p_losses", type_=sa.Integer),
            }
        )
    )
