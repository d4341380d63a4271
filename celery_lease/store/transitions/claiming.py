"""``claim`` and ``take_over``: one delivery wins the job, under a larger fencing token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import RowMapping

from celery_lease.records import (
    Absent,
    ClaimAnswer,
    Claimed,
    Delivery,
    Held,
    Outcome,
    Refused,
    Replay,
)
from celery_lease.states import JobState, LossCause, Refusal
from celery_lease.store.engine import RowBusy, Store
from celery_lease.store.transitions.claim_statements import (
    claim_attempt_statement,
    claim_job_statement,
    claim_parameters,
    claim_statement,
    held_job_statement,
    seen_statement,
    take_over_statement,
)
from celery_lease.store.transitions.dispatching import undispatch
from celery_lease.store.transitions.keys import follow, is_following
from celery_lease.store.transitions.statements import built, lock_job
from celery_lease.store.transitions.vanishing import apply_loss, decide, end_lost


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
        parameters = claim_parameters(delivery)
        row = _try_claim(store, parameters)
        if row is not None:
            return _claimed(delivery, row)
        return _why_not(store, delivery, lost_backoff)

    return store.retrying(work)


def _try_claim(store: Store, parameters: dict[str, Any]) -> RowMapping | None:
    if store.dialect.writing_ctes:
        with store.single() as connection:
            return (
                connection.execute(built(store, "claim", claim_statement), parameters)
                .mappings()
                .first()
            )
    with store.transaction() as connection:
        if lock_job(store, connection, parameters["p_id"]) is None:
            return None
        moved = connection.execute(
            built(store, "claim_job", claim_job_statement), parameters
        ).rowcount
        if moved != 1:
            return None
        row = (
            connection.execute(built(store, "held_job", held_job_statement), parameters)
            .mappings()
            .one()
        )
        connection.execute(
            built(store, "claim_attempt", claim_attempt_statement),
            parameters | {"p_token": row["fencing_token"]},
        )
        return row


def _claimed(delivery: Delivery, row: RowMapping, took_over: int | None = None) -> Claimed:
    return Claimed(
        lease=Held(delivery.job_id, row["fencing_token"], delivery.owner),
        message_version=row["message_version"],
        lost_count=row["lost_count"],
        checkpoint=row["checkpoint"],
        took_over=took_over,
    )


def _why_not(store: Store, delivery: Delivery, lost_backoff: Sequence[float]) -> ClaimAnswer:
    with store.single() as connection:
        seen = (
            connection.execute(built(store, "seen", seen_statement), {"p_id": delivery.job_id})
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
    if state is not JobState.RUNNING:
        return _refused_waiting(store, delivery, seen, state)
    return _refused_running(store, delivery, seen, lost_backoff)


def _refused_running(
    store: Store, delivery: Delivery, seen: RowMapping, lost_backoff: Sequence[float]
) -> ClaimAnswer:
    # Past its deadline it is the reaper's to end, not to run again. ``expires`` limits the
    # start only, and it has started.
    if not seen["lease_over"] or seen["is_overdue"]:
        return Refused(Refusal.RUNNING, JobState.RUNNING, seen["lease_owner"])
    return take_over(store, delivery, ended_token=seen["fencing_token"], lost_backoff=lost_backoff)


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
    if is_following(seen):
        answer = follow(store, delivery, seen)
        return answer if isinstance(answer, Refused) else Replay(outcome_of(answer))
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
    # Nobody's delivery has anything of a cancelled job to tell, but what was sent for that alone.
    if state is JobState.CANCELLED and not delivery.replay:
        return Refused(Refusal.FINAL, state)
    if seen["message_version"] != delivery.message_version:
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
    parameters = claim_parameters(delivery)
    with store.transaction() as connection:
        row = lock_job(store, connection, delivery.job_id)
        if row is None:
            # Whoever holds it ends the attempt, gives the job on, or works in a fenced
            # transaction: in each case the job is not this delivery's, and is not lost.
            return Refused(Refusal.BUSY, JobState.RUNNING)
        if row["state"] != JobState.RUNNING.value or row["fencing_token"] != ended_token:
            raise RowBusy(f"job {delivery.job_id} has just changed")
        lease = Held(delivery.job_id, ended_token, row["lease_owner"])
        if not end_lost(store, connection, lease, cause=LossCause.EXPIRED, reason="taken over"):
            return Refused(Refusal.RUNNING, JobState.RUNNING, row["lease_owner"])
        decision = decide(
            store, connection, lease, row, cause=LossCause.EXPIRED, lost_backoff=lost_backoff
        )
        if decision.state is not JobState.QUEUED:
            vanished = apply_loss(
                store, connection, lease, row, decision=decision, cause=LossCause.EXPIRED
            )
            return Refused(Refusal.POLICY, decision.state, None, vanished)
        moved = connection.execute(
            built(store, "take_over", take_over_statement),
            parameters
            | {
                "p_token": ended_token,
                "p_held_by": row["lease_owner"],
                "p_losses": int(decision.is_counted),
            },
        ).rowcount
        if moved != 1:
            raise AssertionError("a locked job row changed under its lock")
        held = (
            connection.execute(built(store, "held_job", held_job_statement), parameters)
            .mappings()
            .one()
        )
        connection.execute(
            built(store, "claim_attempt", claim_attempt_statement),
            parameters | {"p_token": held["fencing_token"]},
        )
        return _claimed(delivery, held, took_over=ended_token)
