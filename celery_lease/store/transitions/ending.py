"""The ends that a runner writes of its own attempt, and what it says too late.

*Mine* stands in each guard: running, under this token, held by this process. *Did my commit
happen?* On zero rows the attempt asks its own row, and has won only if that holds the outcome
which this very call asked for.

One file, although it is long: the ends have to be seen beside each other, since they share that
guard, that question and the order of their locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, select
from sqlalchemy.engine import RowMapping

from celery_lease.records import Accepted, Failure, FinishAnswer, Held, Late, Message, Stale
from celery_lease.states import REPLACED_REVOKED, AttemptState, JobState
from celery_lease.store.dialects import clock
from celery_lease.store.engine import RowBusy, Store
from celery_lease.store.transitions.ends import (
    COMPLETE,
    FAIL,
    HOLD,
    RELEASE,
    REPLACE,
    REPLACED_AWAY,
    RETRY,
    End,
    end_attempt_statement,
    end_job_statement,
    end_statement,
    replace_values,
)
from celery_lease.store.transitions.statements import built, clean, lock_job
from celery_lease.store.transitions.submission import (
    insert_message_statement,
    message_parameters,
    whole_priority,
)

#: Ends of an attempt that its own runner wrote; a late outcome has nothing to add to them.
_OWN_ENDS = (
    AttemptState.COMPLETED,
    AttemptState.FAILED,
    AttemptState.RETRIED,
    AttemptState.REPLACED,
    AttemptState.RELEASED,
)


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
    failure: Failure = field(default_factory=Failure)
    progress: str | None = None
    checkpoint: str | None = None


def _end_parameters(lease: Held, parting: Parting) -> dict[str, Any]:
    failure = parting.failure
    return {
        "p_id": lease.job_id,
        "p_token": lease.fencing_token,
        "p_owner": lease.owner,
        "p_reason": clean(parting.reason, 255),
        "p_worker_now": parting.worker_now,
        "p_error_type": clean(failure.error_type, 255),
        "p_error_message": clean(failure.error_message),
        "p_traceback": clean(failure.traceback),
        "p_failure_class": failure.failure_class,
        "p_retryable": failure.retryable,
        "p_progress": clean(parting.progress),
        "p_checkpoint": clean(parting.checkpoint),
    }


def _finish(
    store: Store,
    lease: Held,
    end: End,
    parting: Parting,
    extra: Mapping[str, Any],
    *,
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
    store: Store, end: End, parameters: dict[str, Any], message: Message | None
) -> RowMapping | None:
    if store.dialect.writing_ctes and message is None:
        statement = built(store, end.name, end_statement(end))
        with store.single() as connection:
            return connection.execute(statement, parameters).mappings().first()
    with store.transaction() as connection:
        if lock_job(store, connection, parameters["p_id"]) is None:
            return None
        job_statement = built(store, f"{end.name}_job", end_job_statement(end))
        if connection.execute(job_statement, parameters).rowcount != 1:
            return None
        attempt_statement = built(store, f"{end.name}_attempt", end_attempt_statement(end))
        if connection.execute(attempt_statement, parameters).rowcount != 1:
            raise AssertionError("a job is running without a live attempt")
        if message is not None:
            connection.execute(
                built(store, "submit_message", insert_message_statement),
                message_parameters(parameters["p_id"], message),
            )
        job = store.tables.job
        return (
            connection.execute(select(job.c.finished_at).where(job.c.id == parameters["p_id"]))
            .mappings()
            .one()
        )


def _own_end(store: Store, lease: Held, end: End, parameters: Mapping[str, Any]) -> FinishAnswer:
    job, attempt = store.tables.job, store.tables.attempt
    statement = (
        select(attempt.c.state, attempt.c.stop_reason, job.c.finished_at, job.c.accepted_attempt)
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
        # Still the job's outcome? It may have been resumed, and ended otherwise, meanwhile:
        # what another end would be told of must not be published.
        mine = row["accepted_attempt"] == lease.fencing_token
        finished = row["finished_at"] if mine else None
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
    return _finish(store, lease, COMPLETE, parting, extra)


def replace_away(store: Store, lease: Held, parting: Parting) -> FinishAnswer:
    """End a job that replaced itself by a task without a lease: running → succeeded, settled.

    Zero rows means as for ``complete``.
    """
    extra = {"p_result": None, "p_result_type": None, "p_settled": 1}
    return _finish(store, lease, REPLACED_AWAY, parting, extra)


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
    return _finish(store, lease, FAIL, parting, extra)


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
        keeps_key: False when that is another task: a key is one of its own task's.
    """

    message: Message
    delay_seconds: float = 0.0
    expires_seconds: float | None = None
    queue: str | None = None
    priority: int | None = None
    dispatched: bool = True
    task: str | None = None
    keeps_key: bool = False


def _again_parameters(again: Again, *, waiting: JobState) -> dict[str, Any]:
    delay = max(again.delay_seconds, 0.0)
    return {
        "p_state": (waiting if delay > 0 else JobState.QUEUED).value,
        "p_delay": delay,
        "p_dispatched": int(again.dispatched),
        "p_version": again.message.version,
        "p_expires": again.expires_seconds,
        "p_queue": again.queue,
        "p_priority": whole_priority(again.priority),
        "p_task": again.task,
        "p_keeps_key": int(again.keeps_key),
    }


def retry_later(store: Store, lease: Held, parting: Parting, again: Again) -> FinishAnswer:
    """End an attempt by a retry: running → retry_wait (or queued), with a new message version.

    Commits before the retry message leaves: published first, it would be refused by the lease
    that is still held. Zero rows means as for ``complete``: publish nothing.
    """
    extra = _again_parameters(again, waiting=JobState.RETRY_WAIT)
    for name in ("p_task", "p_keeps_key"):
        extra.pop(name)
    return _finish(store, lease, RETRY, parting, extra, message=again.message)


def replace(store: Store, lease: Held, parting: Parting, again: Again) -> FinishAnswer:
    """Replace the running task by another leased one under the same id: running → queued.

    Zero rows means as for ``complete``: publish nothing.
    """
    extra = _again_parameters(again, waiting=JobState.SCHEDULED)
    return _finish(store, lease, REPLACE, parting, extra, message=again.message)


def reopen(store: Store, job_id: str, again: Again) -> bool:
    """Go on with a job that replaced itself by a canvas whose last task carries its id.

    ``replace`` by a chain or a chord ends the job as succeeded (``replaced``); when the canvas
    reaches the task that inherited the id, that task is the next version of the same job. The
    only arrow beside ``resume`` that leaves a final state: nothing was published as the job's
    outcome before it.

    A job that was revoked meanwhile (``cancel_all``) ends as cancelled here, with the message that
    says who waits for it.

    Returns:
        False when the job is not in that state, or its version has moved on, or it was revoked.
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
            .values(replace_values(store) | cleared)
        )

    revoked = (
        sa.update(job)
        .where(
            job.c.id == job_id,
            job.c.state == JobState.SUCCEEDED.value,
            job.c.state_reason == REPLACED_REVOKED,
            job.c.message_version == again.message.version - 1,
        )
        .values(
            state=JobState.CANCELLED.value,
            state_reason="revoked",
            task=again.task,
            queue=again.queue,
            priority=whole_priority(again.priority),
            message_version=again.message.version,
            accepted_attempt=None,
            accepted_late=None,
            active_key=None,
            dispatched_at=None,
            settled_at=None,
            finished_at=clock(),
        )
    )

    def work() -> bool:
        with store.transaction() as connection:
            goes_on = connection.execute(built(store, "reopen", build), parameters).rowcount == 1
            if goes_on or connection.execute(revoked).rowcount == 1:
                connection.execute(
                    built(store, "submit_message", insert_message_statement),
                    message_parameters(job_id, again.message),
                )
            return goes_on

    return store.retrying(work)


def release(
    store: Store, lease: Held, parting: Parting, *, delay_seconds: float = 0.0
) -> FinishAnswer:
    """Give a job back: running → queued at once, not counted as a loss.

    Zero rows means the lease was already lost.
    """
    state = JobState.RETRY_WAIT if delay_seconds > 0 else JobState.QUEUED
    extra = {"p_state": state.value, "p_delay": delay_seconds, "p_dispatched": 0}
    return _finish(store, lease, RELEASE, parting, extra)


def hold(store: Store, lease: Held, parting: Parting) -> FinishAnswer:
    """Leave a job to a person: running → held. Zero rows means as for ``complete``."""
    return _finish(store, lease, HOLD, parting, {})


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
            error_type=sa.func.coalesce(clean(failure.error_type, 255), attempt.c.error_type),
            error_message=sa.func.coalesce(clean(failure.error_message), attempt.c.error_message),
            traceback=sa.func.coalesce(clean(failure.traceback), attempt.c.traceback),
        )
    )

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)
