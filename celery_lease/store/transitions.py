"""Every arrow of the protocol: no state is written anywhere else (a test looks).

One arrow, one function. Each is a guarded UPDATE that names the state left, the token *and
the owner* held (*mine*) and the state reached, with the attempt row in the same transaction;
locks are taken in one order: job, then attempt. Zero rows is a normal answer with one
documented meaning. Every condition of a guard stands in the UPDATE's own WHERE: PostgreSQL
re-checks only that one after waiting for a row (design, section 4). ``SKIP LOCKED`` avoids
waiting; it is not a guard.

Where a database can feed one writing statement into another, the hot arrows (submit, claim,
complete) are one statement in autocommit, 1.6 times as fast as a transaction of two; the
others run the same steps in a transaction. This file is the one place to check, so it is
longer than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select, tuple_
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.backoff import after_loss
from celery_lease.records import (
    Absent,
    Accepted,
    ClaimAnswer,
    Claimed,
    Delivery,
    Dispatchable,
    Failure,
    FinishAnswer,
    Held,
    Late,
    Message,
    NewJob,
    Outcome,
    Refused,
    Renewal,
    Renewed,
    Replay,
    Stale,
    Vanished,
)
from celery_lease.states import (
    FINAL_STATES,
    LIVE_STATES,
    WAITING_STATES,
    AttemptState,
    JobState,
    LossCause,
    OnExpiry,
    Refusal,
)
from celery_lease.store.dialects import (
    Later,
    SecondsBetween,
    by_primary_key,
    clock,
    clock_once,
    insert_if_absent,
    unindexed,
)
from celery_lease.store.engine import RowBusy, Store

#: A message may arrive this early: workers release an ETA by their own clock (design, section 9).
DUE_SLACK_SECONDS = 2.0

_FINAL = tuple(state.value for state in FINAL_STATES)
_WAITING = tuple(state.value for state in WAITING_STATES)
#: Ends of an attempt that its own runner wrote; a late outcome has nothing to add to them.
_OWN_ENDS = (
    AttemptState.COMPLETED,
    AttemptState.FAILED,
    AttemptState.RETRIED,
    AttemptState.REPLACED,
    AttemptState.RELEASED,
)


def _built(store: Store, name: str, build: Callable[[Store], Any]) -> Any:
    """Return a statement of this store, built at its first use."""
    statement = store.statements.get(name)
    if statement is None:
        statement = store.statements[name] = build(store)
    return statement


def _seconds(name: str) -> ColumnElement[Any]:
    return bindparam(name, type_=sa.Double)


def _clean(text: str | None, length: int | None = None) -> str | None:
    """Return text that every database takes: no NUL, no lone surrogate, cut to a length."""
    if text is None:
        return None
    safe = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if length is None else safe[:length]


# -- submit, adopt -----------------------------------------------------------------------------


def submit(store: Store, job: NewJob) -> bool:
    """Record a job and the first version of its message; also ``adopt`` at the claim.

    Returns:
        True when the row is the caller's to publish. False: a job with this id exists, in
        whatever state; nothing was written and nothing is to be published.

    Raises:
        StoreUnavailable: nothing is known to be written; nothing may be published.
    """
    tries = 0

    def work() -> bool:
        nonlocal tries
        tries += 1
        if _insert_job(store, job):
            return True
        # A repetition after a lost reply finds its own row: the same bytes, never claimed.
        return tries > 1 and _is_own_submit(store, job)

    return store.retrying(work)


def _insert_job(store: Store, job: NewJob) -> bool:
    parameters = _job_parameters(job) | _message_parameters(job.job_id, job.message)
    if store.dialect.writing_ctes:
        with store.single() as connection:
            row = connection.execute(_built(store, "submit", _submit_statement), parameters).first()
        return row is not None
    try:
        with store.transaction() as connection:
            connection.execute(_built(store, "submit_job", _insert_job_statement), parameters)
            connection.execute(
                _built(store, "submit_message", _insert_message_statement), parameters
            )
    except IntegrityError:
        if _job_exists(store, job.job_id):
            return False
        raise
    return True


def _job_parameters(job: NewJob) -> dict[str, Any]:
    return {
        "p_id": job.job_id,
        "p_task": job.task,
        "p_state": (JobState.SCHEDULED if job.delay_seconds > 0 else JobState.QUEUED).value,
        "p_delay": max(job.delay_seconds, 0.0),
        "p_expires": job.expires_seconds,
        "p_deadline": job.deadline_seconds,
        "p_max_attempts": job.max_attempts,
        "p_on_expiry": job.on_expiry.value,
        "p_version": job.message.version,
        "p_dispatched": 1 if job.dispatched else 0,
        "p_submitter": _clean(job.submitter, 255),
        "p_root": _clean(job.root_id, 255),
        "p_parent": _clean(job.parent_id, 255),
        "p_group": _clean(job.group_id, 255),
        "p_queue": job.queue,
        "p_priority": job.priority,
    }


def _message_parameters(job_id: str, message: Message) -> dict[str, Any]:
    return {
        "p_id": job_id,
        "p_version": message.version,
        "p_headers": message.headers,
        "p_properties": message.properties,
        "p_body": message.body,
        "p_content_type": message.content_type,
        "p_content_encoding": message.content_encoding,
        "p_exchange": message.exchange,
        "p_routing_key": message.routing_key,
    }


def _job_values() -> dict[str, Any]:
    dispatched = bindparam("p_dispatched", type_=sa.Integer)
    return {
        "id": bindparam("p_id"),
        "task": bindparam("p_task"),
        "state": bindparam("p_state"),
        "fencing_token": 0,
        "lost_count": 0,
        "failure_count": 0,
        "max_attempts": bindparam("p_max_attempts"),
        "on_expiry": bindparam("p_on_expiry"),
        "available_at": Later(clock(), _seconds("p_delay")),
        "expires_at": Later(clock(), _seconds("p_expires")),
        "deadline_at": Later(clock(), _seconds("p_deadline")),
        "message_version": bindparam("p_version"),
        "dispatched_at": case((dispatched == 1, clock())),
        "dispatch_count": dispatched,
        "submitter": bindparam("p_submitter"),
        "root_id": bindparam("p_root"),
        "parent_id": bindparam("p_parent"),
        "group_id": bindparam("p_group"),
        "queue": bindparam("p_queue"),
        "priority": bindparam("p_priority", type_=sa.Integer),
        "created_at": clock(),
    }


def _message_values() -> dict[str, Any]:
    return {
        "version": bindparam("p_version", type_=sa.Integer),
        "headers": bindparam("p_headers", type_=sa.Text),
        "properties": bindparam("p_properties", type_=sa.Text),
        "body": bindparam("p_body", type_=sa.LargeBinary),
        "content_type": bindparam("p_content_type", type_=sa.Text),
        "content_encoding": bindparam("p_content_encoding", type_=sa.Text),
        "exchange": bindparam("p_exchange", type_=sa.Text),
        "routing_key": bindparam("p_routing_key", type_=sa.Text),
        "created_at": clock(),
    }


def _insert_job_statement(store: Store) -> Any:
    return sa.insert(store.tables.job).values(**_job_values())


def _insert_message_statement(store: Store) -> Any:
    return sa.insert(store.tables.message).values(job_id=bindparam("p_id"), **_message_values())


def _submit_statement(store: Store) -> Any:
    job, message = store.tables.job, store.tables.message
    added = insert_if_absent(job).values(**_job_values()).returning(job.c.id).cte("added")
    values = _message_values()
    source = select(added.c.id, *values.values())
    written = sa.insert(message).from_select(["job_id", *values], source)
    return select(added.c.id).add_cte(written.returning(message.c.version).cte("written"))


def _job_exists(store: Store, job_id: str) -> bool:
    job = store.tables.job
    with store.single() as connection:
        return connection.execute(select(job.c.id).where(job.c.id == job_id)).first() is not None


def _is_own_submit(store: Store, new: NewJob) -> bool:
    job, message = store.tables.job, store.tables.message
    statement = (
        select(message.c.body)
        .join(job, job.c.id == message.c.job_id)
        .where(
            job.c.id == new.job_id,
            job.c.fencing_token == 0,
            message.c.version == new.message.version,
        )
    )
    with store.single() as connection:
        body = connection.execute(statement).scalar()
    return body is not None and bytes(body) == new.message.body


# -- claim, take over --------------------------------------------------------------------------


def claim(
    store: Store, delivery: Delivery, *, lost_backoff: Sequence[float] = (0.0,)
) -> ClaimAnswer:
    """Claim a job for a delivery: queued (or due) → running, token + 1, a new attempt.

    A running job whose lease has ended is taken over where the policy for vanished runners
    says *queued now*; otherwise the policy is applied and the delivery refused.

    Args:
        store: the store.
        delivery: who asks, for which job, with which message version.
        lost_backoff: ``lease_lost_backoff``, seconds.

    Returns:
        ``Claimed``; ``Refused`` with the reason; ``Replay`` for a final job whose bookkeeping
        in Celery is to be repeated; ``Absent`` when there is no row. Repeated with the same
        nonce it gives the same token.

    Raises:
        StoreUnavailable: nothing is known; ask again, never run unclaimed.
    """

    def work() -> ClaimAnswer:
        parameters = _claim_parameters(delivery)
        row = _try_claim(store, parameters)
        if row is not None:
            return _claimed(delivery, row)
        return _why_not(store, delivery, lost_backoff)

    return store.retrying(work)


def _claim_parameters(delivery: Delivery) -> dict[str, Any]:
    return {
        "p_id": delivery.job_id,
        "p_version": delivery.message_version,
        "p_owner": delivery.owner,
        "p_worker": _clean(delivery.worker, 255),
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
        ),
        job.c.message_version == bindparam("p_version"),
    ]


def _running_values(job: Any) -> dict[Any, Any]:
    return {
        job.c.state: JobState.RUNNING.value,
        job.c.state_reason: sa.null(),
        job.c.fencing_token: job.c.fencing_token + 1,
        job.c.lease_owner: bindparam("p_owner"),
    }


def _attempt_values() -> dict[str, Any]:
    return {
        "state": sa.literal(AttemptState.CLAIMED.value),
        "worker": bindparam("p_worker", type_=sa.Text),
        "owner": bindparam("p_owner", type_=sa.Text),
        "claim_nonce": bindparam("p_nonce", type_=sa.Text),
        "message_version": bindparam("p_version", type_=sa.Integer),
        "lease_seconds": _seconds("p_lease"),
        "lease_expires_at": Later(clock(), _seconds("p_lease")),
        "last_renewed_at": clock(),
        "renewal_count": sa.literal(0),
        "claimed_at": clock(),
        "worker_claimed_at": bindparam("p_worker_now", type_=_instant()),
    }


def _instant() -> Any:
    return clock().type


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


def _claim_statement(store: Store) -> Any:
    """Return the claim as one statement: lock, job UPDATE, attempt INSERT, what the runner needs."""
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


def _claim_job_statement(store: Store) -> Any:
    job = store.tables.job
    return (
        sa.update(job)
        .where(job.c.id == bindparam("p_id"), *_claimable(job))
        .values(_running_values(job))
    )


def _claim_attempt_statement(store: Store) -> Any:
    attempt = store.tables.attempt
    return sa.insert(attempt).values(
        job_id=bindparam("p_id"), fencing_token=bindparam("p_token"), **_attempt_values()
    )


def _held_job_statement(store: Store) -> Any:
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


def _try_claim(store: Store, parameters: dict[str, Any]) -> RowMapping | None:
    if store.dialect.writing_ctes:
        with store.single() as connection:
            return (
                connection.execute(_built(store, "claim", _claim_statement), parameters)
                .mappings()
                .first()
            )
    with store.transaction() as connection:
        if _lock_job(store, connection, parameters["p_id"]) is None:
            return None
        moved = connection.execute(
            _built(store, "claim_job", _claim_job_statement), parameters
        ).rowcount
        if moved != 1:
            return None
        row = (
            connection.execute(_built(store, "held_job", _held_job_statement), parameters)
            .mappings()
            .one()
        )
        connection.execute(
            _built(store, "claim_attempt", _claim_attempt_statement),
            parameters | {"p_token": row["fencing_token"]},
        )
        return row


def _lock_job(store: Store, connection: Connection, job_id: str) -> RowMapping | None:
    """Lock a job row without waiting; None when it is locked elsewhere or not there."""
    job = store.tables.job
    statement = _built(
        store,
        "lock_job",
        lambda _: (
            select(job).where(job.c.id == bindparam("p_id")).with_for_update(skip_locked=True)
        ),
    )
    return connection.execute(statement, {"p_id": job_id}).mappings().first()


def _claimed(delivery: Delivery, row: RowMapping, took_over: int | None = None) -> Claimed:
    return Claimed(
        lease=Held(delivery.job_id, row["fencing_token"], delivery.owner),
        message_version=row["message_version"],
        lost_count=row["lost_count"],
        checkpoint=row["checkpoint"],
        took_over=took_over,
    )


def _seen_statement(store: Store) -> Any:
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
            _last_checkpoint(attempt),
        )
        .select_from(job.outerjoin(attempt, current))
        .where(job.c.id == bindparam("p_id"))
    )


def _why_not(store: Store, delivery: Delivery, lost_backoff: Sequence[float]) -> ClaimAnswer:
    with store.single() as connection:
        seen = (
            connection.execute(_built(store, "seen", _seen_statement), {"p_id": delivery.job_id})
            .mappings()
            .first()
        )
    if seen is None:
        return Absent()
    state = JobState(seen["state"])
    if state.is_final:
        return _final_answer(delivery, seen)
    if state is JobState.RUNNING and seen["claim_nonce"] == delivery.nonce:
        return _claimed(delivery, seen)
    if seen["message_version"] != delivery.message_version:
        return Refused(Refusal.SUPERSEDED, state, seen["lease_owner"])
    if state is JobState.RUNNING:
        # Past its deadline or its ``expires`` it is the reaper's to end, not to run again.
        if not seen["lease_over"] or seen["is_overdue"] or seen["is_expired"]:
            return Refused(Refusal.RUNNING, state, seen["lease_owner"])
        return take_over(
            store, delivery, ended_token=seen["fencing_token"], lost_backoff=lost_backoff
        )
    return _refused_waiting(store, delivery, seen, state)


def _refused_waiting(
    store: Store, delivery: Delivery, seen: RowMapping, state: JobState
) -> ClaimAnswer:
    if state is JobState.HELD:
        return Refused(Refusal.HELD, state)
    if seen["is_overdue"]:
        return Refused(Refusal.DEADLINE, state)
    if seen["is_expired"]:
        return Refused(Refusal.EXPIRES, state)
    if not seen["is_due"]:
        # Its message is gone with this refusal, so the reaper must send another when it is due.
        undispatch(store, delivery.job_id, dispatch_count=seen["dispatch_count"])
        return Refused(Refusal.NOT_DUE, state)
    # Claimable, yet not claimed: the row was locked. Wait a little and ask again.
    raise RowBusy(f"the row of job {delivery.job_id} is locked by another transaction")


def _final_answer(delivery: Delivery, seen: RowMapping) -> ClaimAnswer:
    state = JobState(seen["state"])
    outcome = outcome_of(seen)
    fresh = (seen["final_seconds"] or 0.0) < delivery.settle_grace_seconds
    # A fresh outcome is still being published by the runner that made it: a duplicate
    # delivery of that moment must not send its callbacks a second time.
    if seen["settled_at"] is not None or (fresh and not delivery.replay):
        return Refused(Refusal.FINAL, state)
    if state is JobState.CANCELLED or seen["message_version"] != delivery.message_version:
        return Refused(Refusal.FINAL, state)
    return Replay(outcome)


def outcome_of(row: RowMapping) -> Outcome:
    """Return the final outcome in a job row."""
    state = JobState(row["state"])
    return Outcome(
        job_id=row["id"],
        fencing_token=row["fencing_token"],
        finished_at=row["finished_at"],
        state=state,
        state_reason=row["state_reason"],
        result=None if row["result"] is None else bytes(row["result"]),
        result_type=row["result_type"],
        error_type=row["error_type"],
        error_message=row["error_message"],
        by_attempt=row["accepted_attempt"] is not None,
    )


def take_over(
    store: Store, delivery: Delivery, *, ended_token: int, lost_backoff: Sequence[float]
) -> ClaimAnswer:
    """Claim a running job whose lease has ended, if the policy gives it on at once.

    job lock → attempt UPDATE with the expiry in its own WHERE, whose count decides → job
    UPDATE → attempt INSERT.

    Returns:
        As ``claim``. ``Refused(RUNNING)``: the lease was renewed meanwhile; ``Refused(BUSY)``:
        another transaction holds the job's row.
    """
    parameters = _claim_parameters(delivery)
    with store.transaction() as connection:
        row = _lock_job(store, connection, delivery.job_id)
        if row is None:
            # Whoever holds it ends the attempt, gives the job on, or works in a fenced
            # transaction: in each case the job is not this delivery's, and is not lost.
            return Refused(Refusal.BUSY, JobState.RUNNING)
        if row["state"] != JobState.RUNNING.value or row["fencing_token"] != ended_token:
            raise RowBusy(f"job {delivery.job_id} has just changed")
        lease = Held(delivery.job_id, ended_token, row["lease_owner"])
        if not _end_lost(store, connection, lease, LossCause.EXPIRED, "taken over"):
            return Refused(Refusal.RUNNING, JobState.RUNNING, row["lease_owner"])
        decision = _decide(row, lost_backoff)
        if decision.state is not JobState.QUEUED:
            vanished = _apply_loss(store, connection, lease, row, decision, LossCause.EXPIRED)
            return Refused(Refusal.POLICY, decision.state, None, vanished)
        moved = connection.execute(
            _built(store, "take_over", _take_over_statement),
            parameters | {"p_token": ended_token, "p_held_by": row["lease_owner"]},
        ).rowcount
        if moved != 1:
            raise AssertionError("a locked job row changed under its lock")
        held = (
            connection.execute(_built(store, "held_job", _held_job_statement), parameters)
            .mappings()
            .one()
        )
        connection.execute(
            _built(store, "claim_attempt", _claim_attempt_statement),
            parameters | {"p_token": held["fencing_token"]},
        )
        return _claimed(delivery, held, took_over=ended_token)


def _take_over_statement(store: Store) -> Any:
    job = store.tables.job
    return (
        sa.update(job)
        .where(
            job.c.id == bindparam("p_id"),
            job.c.state == JobState.RUNNING.value,
            job.c.fencing_token == bindparam("p_token"),
            job.c.lease_owner == bindparam("p_held_by"),
        )
        .values({**_running_values(job), job.c.lost_count: job.c.lost_count + 1})
    )


# -- renew -------------------------------------------------------------------------------------


def renew(store: Store, renewals: Sequence[Renewal]) -> Renewed:
    """Move the expiry of all leases of a process, in one statement on the attempt rows alone.

    A renewal that arrives after the expiry but before anything was done about it succeeds
    (seed S4, B098). Rows locked by another transaction are skipped: unanswered, not lost.

    Args:
        store: the store.
        renewals: the leases, with the progress and checkpoints that changed.

    Returns:
        Which were renewed, which are lost, and which must be asked for again.

    Raises:
        StoreUnavailable: nothing is known; the local deadline goes on running.
    """
    if not renewals:
        return Renewed(frozenset(), {}, frozenset())
    asked = {(r.lease.job_id, r.lease.fencing_token): r for r in renewals}
    renewed = store.retrying(lambda: _renew_rows(store, renewals), tries=2)
    missing = asked.keys() - renewed
    lost: dict[tuple[str, int], AttemptState | None] = {}
    unanswered: set[tuple[str, int]] = set()
    if missing:
        ends = store.retrying(lambda: _attempt_states(store, missing), tries=2)
        for pair in missing:
            state = ends.get(pair)
            if state is not None and state.is_live:
                unanswered.add(pair)
            else:
                lost[pair] = state
    return Renewed(frozenset(renewed), lost, frozenset(unanswered))


def _renew_rows(store: Store, renewals: Sequence[Renewal]) -> set[tuple[str, int]]:
    attempt = store.tables.attempt
    pairs = tuple_(attempt.c.job_id, attempt.c.fencing_token)
    leases = [r.lease for r in renewals]
    guard = _live_rows_of(attempt, leases)
    # The pair as one text: PostgreSQL makes a list of (id, token) rows an OR of as many
    # conditions, and 500 leases took it a second.
    exactly = _pair_text(attempt).in_([_pair_key(lease) for lease in leases])
    free = by_primary_key(
        select(attempt.c.job_id, attempt.c.fencing_token)
        .where(*guard, exactly)
        .with_for_update(skip_locked=True),
        attempt,
    )
    change = by_primary_key(sa.update(attempt).values(_renewal_values(attempt, renewals)), attempt)
    if store.dialect.returning:
        # The sub-select only keeps the UPDATE from waiting; the guards stand in both. Not as a
        # join, which PostgreSQL makes a loop in a loop when it expects one row.
        statement = change.where(unindexed(pairs.in_(free)), *guard).returning(
            attempt.c.job_id, attempt.c.fencing_token
        )
        with store.single() as connection:
            return {(row[0], row[1]) for row in connection.execute(statement)}
    with store.transaction() as connection:
        got = {(row[0], row[1]) for row in connection.execute(free)}
        if got:
            connection.execute(change.where(pairs.in_(sorted(got)), *guard))
        return got


def _live_rows_of(attempt: Any, leases: Sequence[Held]) -> list[ColumnElement[bool]]:
    return [
        attempt.c.job_id.in_([lease.job_id for lease in leases]),
        attempt.c.owner.in_(sorted({lease.owner for lease in leases})),
        unindexed(
            attempt.c.ended_at.is_(None),
            attempt.c.state.in_([state.value for state in LIVE_STATES]),
        ),
    ]


def _pair_text(attempt: Any) -> ColumnElement[str]:
    token = sa.cast(attempt.c.fencing_token, sa.String(20))
    return sa.cast(attempt.c.job_id, sa.String(255)).concat(":").concat(token)


def _pair_key(lease: Held) -> str:
    return f"{lease.job_id}:{lease.fencing_token}"


def _renewal_values(attempt: Any, renewals: Sequence[Renewal]) -> dict[Any, Any]:
    values: dict[Any, Any] = {
        attempt.c.lease_expires_at: Later(clock(), attempt.c.lease_seconds),
        attempt.c.last_renewed_at: clock(),
        attempt.c.renewal_count: attempt.c.renewal_count + 1,
        attempt.c.state: AttemptState.ACTIVE.value,
    }
    # By job *and token*: a process that lost a job and claimed it again asks for both once.
    for column, texts in (
        (attempt.c.progress, [(r.lease, r.progress) for r in renewals]),
        (attempt.c.checkpoint, [(r.lease, r.checkpoint) for r in renewals]),
    ):
        changed = {
            _pair_key(lease): sa.literal(_clean(text), sa.Text)
            for lease, text in texts
            if text is not None
        }
        if changed:
            values[column] = case(changed, value=_pair_text(attempt), else_=column)
    return values


def _attempt_states(
    store: Store, pairs: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], AttemptState]:
    attempt = store.tables.attempt
    statement = select(attempt.c.job_id, attempt.c.fencing_token, attempt.c.state).where(
        tuple_(attempt.c.job_id, attempt.c.fencing_token).in_(sorted(pairs))
    )
    with store.single() as connection:
        rows = connection.execute(statement).all()
    return {(row[0], row[1]): AttemptState(row[2]) for row in rows}


# -- the ends that a runner writes -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """One way for a runner to end its attempt: the SET clauses of both rows."""

    name: str
    attempt_state: AttemptState
    job_values: Callable[[Store], dict[Any, Any]]


def _cleared(job: Any) -> dict[Any, Any]:
    return {job.c.lease_owner: sa.null(), job.c.state_reason: bindparam("p_reason")}


def _accepted_late(store: Store) -> Any:
    attempt = store.tables.attempt
    return (
        select(case((attempt.c.lease_expires_at < clock(), sa.true()), else_=sa.false()))
        .where(
            attempt.c.job_id == bindparam("p_id"), attempt.c.fencing_token == bindparam("p_token")
        )
        .scalar_subquery()
    )


def _final_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _cleared(job) | {
        job.c.accepted_attempt: bindparam("p_token"),
        job.c.accepted_late: _accepted_late(store),
        job.c.result: bindparam("p_result", type_=sa.LargeBinary),
        job.c.result_type: bindparam("p_result_type"),
        job.c.finished_at: clock(),
        job.c.settled_at: case((bindparam("p_settled", type_=sa.Integer) == 1, clock())),
    }


def _complete_values(store: Store) -> dict[Any, Any]:
    return _final_values(store) | {store.tables.job.c.state: JobState.SUCCEEDED.value}


def _fail_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _final_values(store) | {
        job.c.state: JobState.FAILED.value,
        job.c.failure_count: job.c.failure_count + 1,
        job.c.error_type: bindparam("p_error_type"),
        job.c.error_message: bindparam("p_error_message"),
        job.c.active_key: sa.null(),
    }


def _again_values(store: Store) -> dict[Any, Any]:
    """Return the SET clauses of an arrow back to waiting; it clears ``dispatched_at``."""
    job = store.tables.job
    return _cleared(job) | {
        job.c.state: bindparam("p_state"),
        job.c.available_at: Later(clock(), _seconds("p_delay")),
        job.c.dispatched_at: case(
            (bindparam("p_dispatched", type_=sa.Integer) == 1, clock()), else_=sa.null()
        ),
        job.c.dispatch_count: job.c.dispatch_count + bindparam("p_dispatched", type_=sa.Integer),
    }


def _retry_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _again_values(store) | {
        job.c.failure_count: job.c.failure_count + 1,
        job.c.message_version: bindparam("p_version"),
        job.c.expires_at: Later(clock(), _seconds("p_expires")),
        job.c.queue: bindparam("p_queue"),
        job.c.priority: bindparam("p_priority", type_=sa.Integer),
    }


def _replace_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    values = _retry_values(store) | {job.c.task: bindparam("p_task")}
    values.pop(job.c.failure_count)
    return values


def _hold_values(store: Store) -> dict[Any, Any]:
    job = store.tables.job
    return _cleared(job) | {
        job.c.state: JobState.HELD.value,
        job.c.failure_count: job.c.failure_count + 1,
        job.c.error_type: bindparam("p_error_type"),
        job.c.error_message: bindparam("p_error_message"),
        job.c.dispatched_at: sa.null(),
    }


_COMPLETE = _End("complete", AttemptState.COMPLETED, _complete_values)
_REPLACED_AWAY = _End("replaced_away", AttemptState.REPLACED, _complete_values)
_FAIL = _End("fail", AttemptState.FAILED, _fail_values)
_RETRY = _End("retry_later", AttemptState.RETRIED, _retry_values)
_REPLACE = _End("replace", AttemptState.REPLACED, _replace_values)
_RELEASE = _End("release", AttemptState.RELEASED, _again_values)
_HOLD = _End("hold", AttemptState.FAILED, _hold_values)


def _mine(job: Any) -> list[ColumnElement[bool]]:
    """Return *mine*: running, under this token, held by this process."""
    return [
        job.c.state == JobState.RUNNING.value,
        job.c.fencing_token == bindparam("p_token"),
        job.c.lease_owner == bindparam("p_owner"),
    ]


def _attempt_end(attempt: Any, end: _End) -> Any:
    return sa.update(attempt).values(
        {
            attempt.c.state: end.attempt_state.value,
            attempt.c.ended_at: clock(),
            attempt.c.stop_reason: bindparam("p_reason"),
            attempt.c.worker_ended_at: bindparam("p_worker_now", type_=_instant()),
            attempt.c.error_type: bindparam("p_error_type"),
            attempt.c.error_message: bindparam("p_error_message"),
            attempt.c.traceback: bindparam("p_traceback"),
            attempt.c.failure_class: bindparam("p_failure_class"),
            attempt.c.retryable: bindparam("p_retryable", type_=sa.Boolean),
            attempt.c.progress: sa.func.coalesce(bindparam("p_progress"), attempt.c.progress),
            attempt.c.checkpoint: sa.func.coalesce(bindparam("p_checkpoint"), attempt.c.checkpoint),
        }
    )


def _live_attempt(attempt: Any) -> list[ColumnElement[bool]]:
    return [
        attempt.c.fencing_token == bindparam("p_token"),
        attempt.c.owner == bindparam("p_owner"),
        unindexed(attempt.c.ended_at.is_(None)),
    ]


def _end_statement(end: _End) -> Callable[[Store], Any]:
    def build(store: Store) -> Any:
        job, attempt = store.tables.job, store.tables.attempt
        locked = (
            select(job.c.id)
            .where(job.c.id == bindparam("p_id"))
            .with_for_update(skip_locked=True)
            .cte("locked")
        )
        moved = (
            sa.update(job)
            .where(job.c.id == select(locked.c.id).scalar_subquery(), *_mine(job))
            .values(end.job_values(store))
            .returning(job.c.id, job.c.finished_at)
            .cte("moved")
        )
        ended = (
            _attempt_end(attempt, end)
            .where(
                attempt.c.job_id == select(moved.c.id).scalar_subquery(), *_live_attempt(attempt)
            )
            .returning(attempt.c.job_id)
            .cte("ended")
        )
        return select(moved.c.finished_at).add_cte(ended)

    return build


def _end_job_statement(end: _End) -> Callable[[Store], Any]:
    def build(store: Store) -> Any:
        job = store.tables.job
        return (
            sa.update(job)
            .where(job.c.id == bindparam("p_id"), *_mine(job))
            .values(end.job_values(store))
        )

    return build


def _end_attempt_statement(end: _End) -> Callable[[Store], Any]:
    def build(store: Store) -> Any:
        attempt = store.tables.attempt
        return _attempt_end(attempt, end).where(
            attempt.c.job_id == bindparam("p_id"), *_live_attempt(attempt)
        )

    return build


@dataclass(frozen=True, slots=True)
class Parting:
    """What a runner says of its attempt as it ends it.

    Attributes:
        reason: one word on why it ends.
        worker_now: the runner's own clock.
        failure: what the body raised.
        progress: JSON text not yet written by a heartbeat.
        checkpoint: JSON text not yet written by a heartbeat.
    """

    reason: str | None
    worker_now: datetime | None = None
    failure: Failure = Failure()
    progress: str | None = None
    checkpoint: str | None = None


def _end_parameters(lease: Held, parting: Parting) -> dict[str, Any]:
    failure = parting.failure
    return {
        "p_id": lease.job_id,
        "p_token": lease.fencing_token,
        "p_owner": lease.owner,
        "p_reason": _clean(parting.reason, 255),
        "p_worker_now": parting.worker_now,
        "p_error_type": _clean(failure.error_type, 255),
        "p_error_message": _clean(failure.error_message),
        "p_traceback": _clean(failure.traceback),
        "p_failure_class": failure.failure_class,
        "p_retryable": failure.retryable,
        "p_progress": _clean(parting.progress),
        "p_checkpoint": _clean(parting.checkpoint),
    }


def _finish(
    store: Store,
    lease: Held,
    end: _End,
    parting: Parting,
    extra: Mapping[str, Any],
    message: Message | None = None,
) -> FinishAnswer:
    """End an attempt of mine. *Did my commit happen?* On zero rows its own row is asked."""
    parameters = _end_parameters(lease, parting) | dict(extra)

    def work() -> FinishAnswer:
        row = _try_finish(store, end, parameters, message)
        if row is not None:
            return Accepted(row["finished_at"], float(extra.get("p_delay", 0.0)))
        return _own_end(store, lease, end, parameters)

    return store.retrying(work)


def _try_finish(
    store: Store, end: _End, parameters: dict[str, Any], message: Message | None
) -> RowMapping | None:
    if store.dialect.writing_ctes and message is None:
        statement = _built(store, end.name, _end_statement(end))
        with store.single() as connection:
            return connection.execute(statement, parameters).mappings().first()
    with store.transaction() as connection:
        if _lock_job(store, connection, parameters["p_id"]) is None:
            return None
        job_statement = _built(store, f"{end.name}_job", _end_job_statement(end))
        if connection.execute(job_statement, parameters).rowcount != 1:
            return None
        attempt_statement = _built(store, f"{end.name}_attempt", _end_attempt_statement(end))
        if connection.execute(attempt_statement, parameters).rowcount != 1:
            raise AssertionError("a job is running without a live attempt")
        if message is not None:
            connection.execute(
                _built(store, "submit_message", _insert_message_statement),
                _message_parameters(parameters["p_id"], message),
            )
        job = store.tables.job
        return (
            connection.execute(select(job.c.finished_at).where(job.c.id == parameters["p_id"]))
            .mappings()
            .one()
        )


def _own_end(store: Store, lease: Held, end: _End, parameters: Mapping[str, Any]) -> FinishAnswer:
    job, attempt = store.tables.job, store.tables.attempt
    statement = (
        select(attempt.c.state, attempt.c.stop_reason, job.c.finished_at, job.c.fencing_token)
        .join(job, job.c.id == attempt.c.job_id)
        .where(
            attempt.c.job_id == lease.job_id,
            attempt.c.fencing_token == lease.fencing_token,
            attempt.c.owner == lease.owner,
        )
    )
    with store.single() as connection:
        row = connection.execute(statement).mappings().first()
    if row is None:
        return Stale(None)
    state = AttemptState(row["state"])
    # The reason too: fail and hold both leave the attempt failed.
    if state is end.attempt_state and row["stop_reason"] == parameters["p_reason"]:
        finished = row["finished_at"] if row["fencing_token"] == lease.fencing_token else None
        return Accepted(finished, float(parameters.get("p_delay", 0.0)))
    if state.is_live:
        raise RowBusy(f"the row of job {lease.job_id} is locked by another transaction")
    return Stale(state)


def complete(
    store: Store,
    lease: Held,
    parting: Parting,
    *,
    result: bytes | None,
    result_type: str | None,
    settled: bool = False,
) -> FinishAnswer:
    """Accept a result: running → succeeded, if the lease is mine.

    Args:
        store: the store.
        lease: the lease that produced it.
        parting: what the runner says.
        result: the serialised result, None when nobody asks for it.
        result_type: its content type.
        settled: True when Celery has nothing to be told.

    Returns:
        ``Accepted``, also when an earlier call of the same runner was (a lost reply);
        ``Stale``: nothing was changed, the caller records a late outcome with ``reject``.

    Raises:
        StoreUnavailable: nothing is known; ask again until the lease has surely ended.
    """
    extra = {"p_result": result, "p_result_type": result_type, "p_settled": int(settled)}
    return _finish(store, lease, _COMPLETE, parting, extra)


def replace_away(store: Store, lease: Held, parting: Parting) -> FinishAnswer:
    """End a job that replaced itself by a task without a lease: running → succeeded, settled.

    Zero rows means as for ``complete``.
    """
    extra = {"p_result": None, "p_result_type": None, "p_settled": 1}
    return _finish(store, lease, _REPLACED_AWAY, parting, extra)


def fail(
    store: Store,
    lease: Held,
    parting: Parting,
    *,
    error: bytes | None,
    error_content_type: str | None,
    settled: bool = False,
) -> FinishAnswer:
    """Accept a failure of the body: running → failed, if the lease is mine.

    Args:
        store: the store.
        lease: the lease.
        parting: what the runner says, with the failure.
        error: the exception as Celery's JSON backends keep it.
        error_content_type: its content type.
        settled: True when Celery has nothing to be told.

    Zero rows means as for ``complete``.
    """
    extra = {"p_result": error, "p_result_type": error_content_type, "p_settled": int(settled)}
    return _finish(store, lease, _FAIL, parting, extra)


@dataclass(frozen=True, slots=True)
class Again:
    """The next run of a job.

    Attributes:
        message: the new message version.
        delay_seconds: time to its due instant.
        expires_seconds: time to ``expires``, None without one.
        queue: the queue it goes to.
        priority: its priority.
        dispatched: True when the caller publishes it right after the commit.
        task: the task that replaces the old one (``replace``), else None.
    """

    message: Message
    delay_seconds: float = 0.0
    expires_seconds: float | None = None
    queue: str | None = None
    priority: int | None = None
    dispatched: bool = True
    task: str | None = None


def _again_parameters(again: Again, *, waiting: JobState) -> dict[str, Any]:
    delay = max(again.delay_seconds, 0.0)
    return {
        "p_state": (waiting if delay > 0 else JobState.QUEUED).value,
        "p_delay": delay,
        "p_dispatched": int(again.dispatched),
        "p_version": again.message.version,
        "p_expires": again.expires_seconds,
        "p_queue": again.queue,
        "p_priority": again.priority,
        "p_task": again.task,
    }


def retry_later(store: Store, lease: Held, parting: Parting, again: Again) -> FinishAnswer:
    """End an attempt by a retry: running → retry_wait (or queued), with a new message version.

    Commits before the retry message leaves: published first, it would be refused by the lease
    that is still held. Zero rows means as for ``complete``: publish nothing.
    """
    extra = _again_parameters(again, waiting=JobState.RETRY_WAIT)
    extra.pop("p_task")
    return _finish(store, lease, _RETRY, parting, extra, again.message)


def replace(store: Store, lease: Held, parting: Parting, again: Again) -> FinishAnswer:
    """Replace the running task by another leased one under the same id: running → queued.

    Zero rows means as for ``complete``: publish nothing.
    """
    extra = _again_parameters(again, waiting=JobState.SCHEDULED)
    return _finish(store, lease, _REPLACE, parting, extra, again.message)


def reopen(store: Store, job_id: str, again: Again) -> bool:
    """Go on with a job that replaced itself by a canvas whose last task carries its id.

    ``replace`` by a chain or a chord ends the job as succeeded (``replaced``); when the canvas
    reaches the task that inherited the id, that task is the next version of the same job. The
    only arrow beside ``resume`` that leaves a final state: nothing was published as the job's
    outcome before it.

    Returns:
        False when the job is not in that state, or its version has moved on.
    """
    job = store.tables.job
    parameters = _again_parameters(again, waiting=JobState.SCHEDULED) | {
        "p_id": job_id,
        "p_reason": None,
        "p_before": again.message.version - 1,
    }

    def build(store: Store) -> Any:
        cleared = dict.fromkeys(
            (job.c.finished_at, job.c.settled_at, job.c.accepted_attempt, job.c.accepted_late),
            sa.null(),
        )
        return (
            sa.update(job)
            .where(
                job.c.id == bindparam("p_id"),
                job.c.state == JobState.SUCCEEDED.value,
                job.c.state_reason == AttemptState.REPLACED.value,
                job.c.message_version == bindparam("p_before"),
            )
            .values(_replace_values(store) | cleared)
        )

    def work() -> bool:
        with store.transaction() as connection:
            if connection.execute(_built(store, "reopen", build), parameters).rowcount != 1:
                return False
            connection.execute(
                _built(store, "submit_message", _insert_message_statement),
                _message_parameters(job_id, again.message),
            )
            return True

    return store.retrying(work)


def release(
    store: Store, lease: Held, parting: Parting, *, delay_seconds: float = 0.0
) -> FinishAnswer:
    """Give a job back: running → queued at once, not counted as a loss.

    Zero rows means the lease was already lost.
    """
    state = JobState.RETRY_WAIT if delay_seconds > 0 else JobState.QUEUED
    extra = {"p_state": state.value, "p_delay": delay_seconds, "p_dispatched": 0}
    return _finish(store, lease, _RELEASE, parting, extra)


def hold(store: Store, lease: Held, parting: Parting) -> FinishAnswer:
    """Leave a job to a person: running → held. Zero rows means as for ``complete``."""
    return _finish(store, lease, _HOLD, parting, {})


def reject(store: Store, lease: Held, late: Late) -> bool:
    """Keep what a stale attempt produced, on its own row and nowhere else.

    Returns:
        True when it was recorded now; False when the attempt still lives, ended by its own
        runner's word, or has a late outcome already.
    """
    attempt = store.tables.attempt
    failure = late.failure
    statement = (
        sa.update(attempt)
        .where(
            attempt.c.job_id == lease.job_id,
            attempt.c.fencing_token == lease.fencing_token,
            attempt.c.owner == lease.owner,
            attempt.c.ended_at.is_not(None),
            attempt.c.rejected_at.is_(None),
            attempt.c.state.not_in([state.value for state in _OWN_ENDS]),
        )
        .values(
            rejected_at=clock(),
            late_outcome=late.outcome.value,
            late_result=late.result,
            late_result_digest=late.digest,
            error_type=sa.func.coalesce(_clean(failure.error_type, 255), attempt.c.error_type),
            error_message=sa.func.coalesce(_clean(failure.error_message), attempt.c.error_message),
            traceback=sa.func.coalesce(_clean(failure.traceback), attempt.c.traceback),
        )
    )

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


# -- vanished runners --------------------------------------------------------------------------


def _decide(row: RowMapping, lost_backoff: Sequence[float]) -> Any:
    return after_loss(
        lost_count=row["lost_count"] + 1,
        max_attempts=row["max_attempts"],
        on_expiry=OnExpiry(row["on_expiry"]),
        schedule=lost_backoff,
    )


def _end_lost(
    store: Store,
    connection: Connection,
    lease: Held,
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
        .values(state=cause.value, ended_at=clock(), stop_reason=_clean(reason, 255))
    )
    if cause is LossCause.EXPIRED:
        statement = statement.where(attempt.c.lease_expires_at < clock())
    if trace is not None:
        statement = statement.values(traceback=_clean(trace))
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


def _apply_loss(
    store: Store,
    connection: Connection,
    lease: Held,
    row: RowMapping,
    decision: Any,
    cause: LossCause,
) -> Vanished:
    job, attempt = store.tables.job, store.tables.attempt
    count = row["lost_count"] + 1
    values: dict[str, Any] = {
        "state": decision.state.value,
        "state_reason": decision.reason,
        "lost_count": count,
        "lease_owner": None,
        "available_at": Later(clock(), decision.delay_seconds),
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
            row = _lock_job(store, connection, lease.job_id)
            if row is None:
                _state_or_busy(store, connection, lease.job_id)
                return None
            if not _end_lost(store, connection, lease, cause, reason, trace):
                return None
            decision = _decide(row, lost_backoff)
            return _apply_loss(store, connection, lease, row, decision, cause)

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
                if _end_lost(store, connection, lease, LossCause.EXPIRED, "lease ended"):
                    given_on.append(
                        _apply_loss(
                            store,
                            connection,
                            lease,
                            row,
                            _decide(row, lost_backoff),
                            LossCause.EXPIRED,
                        )
                    )
        return given_on

    return store.retrying(work)


def extend(store: Store, *, ended_since: datetime | None) -> int:
    """Grant the amnesty: leases that ended while no pass was made get a full lease from now.

    Args:
        store: the store.
        ended_since: when the last completed pass ended, None when there was none.

    Returns:
        How many were extended. A lease is extended at most once between two renewals, so
        that a dead runner is not kept for ever by passes that are always late.
    """
    attempt = store.tables.attempt
    guard = [
        attempt.c.ended_at.is_(None),
        attempt.c.lease_expires_at < clock(),
        sa.or_(attempt.c.extended_at.is_(None), attempt.c.extended_at < attempt.c.last_renewed_at),
    ]
    if ended_since is not None:
        guard.append(attempt.c.lease_expires_at >= ended_since)
    pairs = tuple_(attempt.c.job_id, attempt.c.fencing_token)
    free = (
        select(attempt.c.job_id, attempt.c.fencing_token)
        .where(*guard)
        .with_for_update(skip_locked=True)
    )
    change = by_primary_key(
        sa.update(attempt).values(
            {
                attempt.c.lease_expires_at: Later(clock(), attempt.c.lease_seconds),
                attempt.c.extended_at: clock(),
            }
        ),
        attempt,
    )

    def work() -> int:
        if store.dialect.returning:
            with store.single() as connection:
                return int(connection.execute(change.where(pairs.in_(free), *guard)).rowcount)
        with store.transaction() as connection:
            got = [(row[0], row[1]) for row in connection.execute(free)]
            if not got:
                return 0
            return int(connection.execute(change.where(pairs.in_(got), *guard)).rowcount)

    return store.retrying(work)


# -- time --------------------------------------------------------------------------------------


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
        job.c.state.in_(_WAITING),
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
    job, attempt = store.tables.job, store.tables.attempt
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
    moved = _move_batch(store, [job.c.state.in_(_WAITING), over], values, limit)
    running = [job.c.state == JobState.RUNNING.value, over]
    late = (
        select(job.c.id, job.c.fencing_token, job.c.lease_owner)
        .where(*running)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )

    def work() -> list[str]:
        stopped = []
        with store.transaction() as connection:
            for row in connection.execute(late).mappings().all():
                if _stop_running(store, connection, row, values, guard=running, reason="deadline"):
                    stopped.append(row["id"])
        return stopped

    del attempt
    return moved + store.retrying(work)


def _stop_running(
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
            state=AttemptState.CANCELLED.value, ended_at=clock(), stop_reason=_clean(reason, 255)
        )
    )
    return True


# -- dispatch, settle --------------------------------------------------------------------------


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
        else [job.c.state == JobState.QUEUED.value]
    )
    statement = (
        sa.update(job)
        .where(
            job.c.id == candidate.job_id,
            job.c.dispatch_count == candidate.dispatch_count,
            job.c.message_version == candidate.message_version,
            unindexed(*expected),
        )
        .values(dispatched_at=clock(), dispatch_count=candidate.dispatch_count + 1)
    )

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

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
    guard = [job.c.id == job_id, unindexed(job.c.state.in_(_WAITING))]
    if dispatch_count is not None:
        guard.append(job.c.dispatch_count == dispatch_count)
    if message_version is not None:
        guard.append(job.c.message_version == message_version)
    statement = sa.update(job).where(*guard).values(dispatched_at=None)

    def work() -> bool:
        with store.single() as connection:
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
            job.c.state.in_(_FINAL),
            job.c.settled_at.is_(None),
        )
        .values(settled_at=clock()),
        job,
    )

    def work() -> int:
        with store.single() as connection:
            return int(connection.execute(statement).rowcount)

    return store.retrying(work)


# -- operators ---------------------------------------------------------------------------------


def cancel(store: Store, job_id: str, *, reason: str = "cancelled") -> JobState | None:
    """End a job by request: anything but final → cancelled.

    Returns:
        ``cancelled`` when it was ended now, else the final state it is in; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.CANCELLED.value,
        "state_reason": _clean(reason, 255),
        "finished_at": clock(),
        "lease_owner": None,
        "active_key": None,
    }

    def work() -> JobState | None:
        with store.transaction() as connection:
            row = _lock_job(store, connection, job_id)
            if row is None:
                return _state_or_busy(store, connection, job_id)
            if JobState(row["state"]).is_final:
                return JobState(row["state"])
            _stop_running(
                store,
                connection,
                row,
                values,
                guard=[job.c.state == row["state"], job.c.finished_at.is_(None)],
                reason=reason,
            )
            return JobState.CANCELLED

    return store.retrying(work)


def _state_or_busy(store: Store, connection: Connection, job_id: str) -> JobState | None:
    job = store.tables.job
    state = connection.execute(select(job.c.state).where(job.c.id == job_id)).scalar()
    if state is None:
        return None
    if JobState(state).is_final:
        return JobState(state)
    raise RowBusy(f"the row of job {job_id} is locked by another transaction")


def _operate(
    store: Store,
    job_id: str,
    guard: list[ColumnElement[bool]],
    values: Mapping[str, Any],
    reached: JobState,
) -> JobState | None:
    """Apply an operator's word; return the state reached, or the one the job is in."""
    job = store.tables.job

    def work() -> JobState | None:
        with store.transaction() as connection:
            change = sa.update(job).where(job.c.id == job_id, *guard).values(**values)
            if connection.execute(change).rowcount == 1:
                return reached
            state = connection.execute(select(job.c.state).where(job.c.id == job_id)).scalar()
            return None if state is None else JobState(state)

    return store.retrying(work)


def hold_waiting(store: Store, job_id: str, *, reason: str) -> JobState | None:
    """Hold a job that waits: scheduled, queued, retry_wait → held.

    Returns:
        ``held``, or the state it is in when it does not wait; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.HELD.value,
        "state_reason": _clean(reason, 255),
        "dispatched_at": None,
    }
    return _operate(store, job_id, [job.c.state.in_(_WAITING)], values, JobState.HELD)


def resume(
    store: Store,
    job_id: str,
    *,
    reason: str,
    expires_seconds: float | None = None,
    deadline_seconds: float | None = None,
) -> JobState | None:
    """Run a job again: held, or final and settled → queued, with its token and its history.

    Args:
        store: the store.
        job_id: the job.
        reason: who says so and why.
        expires_seconds: a new ``expires``; a past one is cleared.
        deadline_seconds: a new deadline; a past one is cleared.

    Returns:
        ``queued``, or the state it is in when it cannot be resumed; None: no such job.
    """
    job = store.tables.job
    guard = [
        sa.or_(
            job.c.state == JobState.HELD.value,
            sa.and_(job.c.state.in_(_FINAL), job.c.settled_at.is_not(None)),
        )
    ]
    values: dict[str, Any] = {
        "state": JobState.QUEUED.value,
        "state_reason": _clean(reason, 255),
        "available_at": clock(),
        "expires_at": _anew(job.c.expires_at, expires_seconds),
        "deadline_at": _anew(job.c.deadline_at, deadline_seconds),
        "lost_count": 0,
        "failure_count": 0,
        "dispatched_at": None,
        "accepted_attempt": None,
        "accepted_late": None,
        "result": None,
        "result_type": None,
        "error_type": None,
        "error_message": None,
        "settled_at": None,
        "finished_at": None,
    }
    return _operate(store, job_id, guard, values, JobState.QUEUED)


def _anew(instant: Any, seconds: float | None) -> Any:
    """Return a bound of a resumed job: the new one, else the old one if it is still to come."""
    if seconds is not None:
        return Later(clock(), seconds)
    return case((instant > clock(), instant), else_=sa.null())


def accept(
    store: Store, job_id: str, *, reason: str, result: bytes | None, result_type: str | None
) -> JobState | None:
    """Accept a held job with the operator's result: held → succeeded.

    Returns:
        ``succeeded``, or the state it is in when it is not held; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.SUCCEEDED.value,
        "state_reason": _clean(reason, 255),
        "result": result,
        "result_type": result_type,
        "accepted_attempt": job.c.fencing_token,
        "error_type": None,
        "error_message": None,
        "finished_at": clock(),
    }
    return _operate(store, job_id, [job.c.state == JobState.HELD.value], values, JobState.SUCCEEDED)


def refuse(store: Store, job_id: str, *, reason: str) -> JobState | None:
    """Give a held job up: held → failed.

    Returns:
        ``failed``, or the state it is in when it is not held; None: no such job.
    """
    job = store.tables.job
    values = {
        "state": JobState.FAILED.value,
        "state_reason": _clean(reason, 255),
        "error_type": sa.func.coalesce(job.c.error_type, "celery_lease.exceptions.JobEnded"),
        "error_message": sa.func.coalesce(job.c.error_message, "refused by an operator"),
        "finished_at": clock(),
        "active_key": None,
    }
    return _operate(store, job_id, [job.c.state == JobState.HELD.value], values, JobState.FAILED)


# -- the reaper's own row, and the end of history ----------------------------------------------


def record_pass(store: Store, *, counts: str, worker: str | None) -> None:
    """Record a completed pass: its counts (JSON text), by the store's clock."""
    table = store.tables.completed_pass
    values = {"finished_at": clock(), "counts": counts, "worker": _clean(worker, 255)}

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
    for state in sorted(_FINAL):
        seconds = succeeded_seconds if state == JobState.SUCCEEDED.value else failed_seconds
        if seconds is not None and removed < limit:
            old = [job.c.state == state, job.c.finished_at < Later(clock_once(), -seconds)]
            removed += _remove_batch(store, old, limit - removed)
    return removed


def _remove_batch(store: Store, old: list[ColumnElement[bool]], limit: int) -> int:
    job, message, attempt = store.tables.job, store.tables.message, store.tables.attempt
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
            return int(connection.execute(sa.delete(job).where(job.c.id.in_(ids), *guard)).rowcount)

    return store.retrying(work)
