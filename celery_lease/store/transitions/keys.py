"""Who holds an idempotency key: one job of a task at a time.

A job holds its key (``active_key``, unique with ``task``) from its submit while it is not final,
and after success for the retention its task asks for; failed, cancelled and interrupted free it.
Nobody watches the clock for that: whoever finds a key held by a job whose time is over takes it
from that job in the transaction that records his own.

A job whose id is known to others already cannot be replaced by the existing one: a group or a
chord waits for the ids of its members. It is recorded without holding its key, and *follows*: at
its claim it takes the result of the holder if that has succeeded, waits while that is not final,
and takes the key, and runs, when nobody holds it any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from celery_lease.exceptions import IdempotencyConflict
from celery_lease.records import Delivery, Existing, NewJob, Refused
from celery_lease.states import REPLACED_REASONS, WAITING_STATES, JobState, Refusal
from celery_lease.store.dialects import Later, clock
from celery_lease.store.engine import RowBusy, Store
from celery_lease.store.transitions.statements import built, clean, lock_job, seconds
from celery_lease.store.transitions.submission import (
    insert_in,
    insert_job,
    is_own_submit,
    job_parameters,
)

#: Between two looks of a job at the one it follows, seconds: half as long as it has waited.
FIRST_LOOK_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 60.0
_GIVEN_UP = "the idempotency key was given up just now"


def submit_keyed(store: Store, job: NewJob) -> Existing | None:
    """Record a job under its idempotency key, which it holds from then on.

    Returns:
        None: the row is the caller's to publish (``follows``: it may wait for another job).
        ``Existing``: nothing was written and nothing is to be published.

    Raises:
        StoreUnavailable: nothing is known to be written; nothing may be published.
    """
    tries = 0

    def work() -> Existing | None:
        nonlocal tries
        tries += 1
        if insert_job(store, job):
            return None
        found = _in_the_way(store, job)
        if found is None:
            raise RowBusy(_GIVEN_UP)
        if found["id"] == job.job_id:
            # A repetition after a lost reply finds its own row, as in ``submit``.
            is_own = tries > 1 and is_own_submit(store, job)
            return None if is_own else Existing(job.job_id)
        if found["is_over"] and _insert_instead(store, job, found["id"]):
            return None
        if found["is_over"] or (job.follows and not insert_job(store, job, holds_key=False)):
            raise RowBusy(_GIVEN_UP)
        return None if job.follows else Existing(found["id"], is_same_call(job, found))

    return store.retrying(work)


def is_same_call(job: NewJob, found: RowMapping | Mapping[str, Any]) -> bool:
    """Tell whether the holder of a job's key may have been given the same arguments."""
    assert job.key is not None
    return is_same(job.key.arguments_digest, found["arguments_digest"])


def is_same(one: str | None, other: str | None) -> bool:
    """Tell whether two digests may be of one call; where there is none, nothing is compared."""
    return one is None or other is None or one == other


def _in_the_way(store: Store, new: NewJob) -> RowMapping | None:
    """Return the job that has the id, else the one that holds the key; None: neither is there."""
    parameters = key_parameters(new)
    for statement in (same_id_statement(store), holder_statement(store)):
        with store.single() as connection:
            row = connection.execute(statement, parameters).mappings().first()
        if row is not None:
            return row
    return None


def same_id_statement(store: Store) -> Any:
    """Return the SELECT of the job that has the id."""
    job = store.tables.job
    return built(
        store, "same_id", lambda _: select(*_seen(job)).where(job.c.id == bindparam("p_id"))
    )


def holder_statement(store: Store) -> Any:
    """Return the SELECT of the job that holds the key."""
    job = store.tables.job
    return built(store, "holder", lambda _: select(*_seen(job)).where(*_held_key(job)))


def _seen(job: Any) -> list[Any]:
    return [job.c.id, job.c.arguments_digest, case((_is_over(job), 1), else_=0).label("is_over")]


def key_parameters(new: NewJob) -> dict[str, Any]:
    """Return the parameters of the statements about who has an id or holds a key."""
    kept = None if new.key is None else new.key.retention_seconds
    return {
        "p_id": new.job_id,
        "p_task": new.task,
        "p_key": None if new.key is None else new.key.text,
        "p_lets_go": int(kept is not None),
        "p_retention": -(kept or 0.0),
    }


def _held_key(job: Any) -> list[Any]:
    return [job.c.task == bindparam("p_task"), job.c.active_key == bindparam("p_key")]


def _is_over(job: Any) -> Any:
    """Return the condition of a holder that holds its key no longer than it may."""
    return sa.and_(
        bindparam("p_lets_go", type_=sa.Integer) == 1,
        job.c.state == JobState.SUCCEEDED.value,
        job.c.finished_at <= Later(clock(), seconds("p_retention")),
    )


def _insert_instead(store: Store, new: NewJob, holder_id: str) -> bool:
    """Take the key from a holder whose time is over, and record the job, in one transaction."""
    try:
        with store.transaction() as connection:
            given = connection.execute(
                giving_up_statement(store), key_parameters(new) | {"p_holder": holder_id}
            )
            if given.rowcount != 1:
                return False
            insert_in(store, connection, job_parameters(new))
    except IntegrityError:
        # Another took the key, or the id, in this very moment: the holder keeps what it had.
        return False
    return True


def give_up(store: Store, new: NewJob, holder_id: str) -> None:
    """Have a holder whose time is over give its key up, in a transaction of the store's own.

    That is true whatever becomes of the job that wants the key.

    Raises:
        StoreUnavailable: its row is locked, or the store is away.
    """

    def work() -> None:
        with store.transaction() as connection:
            connection.execute(
                giving_up_statement(store), key_parameters(new) | {"p_holder": holder_id}
            )

    store.retrying(work)


def giving_up_statement(store: Store) -> Any:
    """Return the UPDATE by which a holder whose time is over gives its key up."""
    job = store.tables.job
    return built(
        store,
        "giving_up",
        lambda _: (
            sa.update(job)
            .where(job.c.id == bindparam("p_holder"), *_held_key(job), _is_over(job))
            .values(active_key=sa.null())
        ),
    )


def free_key(store: Store, job_id: str, *, retention_seconds: float) -> bool:
    """Have a holder whose time is over give up the key that another job asks for.

    Returns:
        False when the key is nobody's, its holder's still, or the job's own.
    """
    job = store.tables.job
    wanted = select(job.c.task, job.c.idempotency_key).where(job.c.id == job_id)

    def work() -> bool:
        with store.transaction() as connection:
            row = connection.execute(wanted).mappings().first()
            if row is None or row["idempotency_key"] is None:
                return False
            parameters = {
                "p_task": row["task"],
                "p_key": row["idempotency_key"],
                "p_lets_go": 1,
                "p_retention": -retention_seconds,
            }
            holder = connection.execute(holder_statement(store), parameters).mappings().first()
            if holder is None or not holder["is_over"] or holder["id"] == job_id:
                return False
            parameters["p_holder"] = holder["id"]
            return connection.execute(giving_up_statement(store), parameters).rowcount == 1

    return store.retrying(work)


# --- a job that follows the holder of its key -------------------------------------------------


def is_following(row: RowMapping) -> bool:
    """Tell whether a waiting job has a key that it does not hold."""
    return row["idempotency_key"] is not None and row["active_key"] is None


def follow(store: Store, delivery: Delivery, seen: RowMapping) -> Refused | RowMapping:
    """Decide what becomes of a job whose key another one holds, or held.

    Nobody holds the key → it takes it. The holder has succeeded → succeeded, with that result.
    The holder is not final → retry_wait, to look again. Other arguments → failed.

    Returns:
        ``Refused(KEY_HELD)``: it waits. Its row, when it is final: to be replayed.

    Raises:
        RowBusy: ask again; it holds its key now, or its row is locked or has just changed.
    """
    job = store.tables.job
    try:
        with store.transaction() as connection:
            row = lock_job(store, connection, delivery.job_id)
            if row is None or not _may_follow(row, seen):
                raise RowBusy(f"job {delivery.job_id} has just changed")
            holder = _holder(store, connection, row)
            change = (
                sa.update(job)
                .where(
                    job.c.id == delivery.job_id,
                    job.c.state == row["state"],
                    job.c.active_key.is_(None),
                )
                .values(**_change(row, holder, float(seen["waited_seconds"])))
            )
            connection.execute(change)
            now = (
                connection.execute(select(job).where(job.c.id == delivery.job_id)).mappings().one()
            )
    except IntegrityError as error:
        raise RowBusy("another job took the idempotency key just now") from error
    if now["active_key"] is not None:
        raise RowBusy(f"job {delivery.job_id} has taken its idempotency key: claim it")
    if JobState(now["state"]).is_final:
        return now
    return Refused(Refusal.KEY_HELD, JobState(now["state"]))


def _may_follow(row: RowMapping, seen: RowMapping) -> bool:
    is_as_seen = row["message_version"] == seen["message_version"]
    return JobState(row["state"]) in WAITING_STATES and is_following(row) and is_as_seen


def _holder(store: Store, connection: Connection, row: RowMapping) -> RowMapping | None:
    job = store.tables.job
    statement = built(
        store,
        "key_holder",
        lambda _: select(
            job.c.id,
            job.c.state,
            job.c.state_reason,
            job.c.result,
            job.c.result_type,
            job.c.arguments_digest,
        ).where(*_held_key(job)),
    )
    parameters = {"p_task": row["task"], "p_key": row["idempotency_key"]}
    return connection.execute(statement, parameters).mappings().first()


def _change(row: RowMapping, holder: RowMapping | None, waited_seconds: float) -> Mapping[str, Any]:
    """Return the SET clauses of a job that follows."""
    if holder is None:
        return {"active_key": row["idempotency_key"]}
    is_replaced = holder["state_reason"] in REPLACED_REASONS
    has_succeeded = holder["state"] == JobState.SUCCEEDED.value
    if not is_same(row["arguments_digest"], holder["arguments_digest"]) or (
        # It went on as a canvas: what comes of it is Celery's alone to know.
        has_succeeded and is_replaced
    ):
        return _failed(row, holder["id"])
    if has_succeeded:
        result = {"result": holder["result"], "result_type": holder["result_type"]}
        return _ended(JobState.SUCCEEDED, holder["id"]) | result
    delay = min(max(waited_seconds / 2, FIRST_LOOK_SECONDS), LONGEST_LOOK_SECONDS)
    return {
        "state": JobState.RETRY_WAIT.value,
        "state_reason": clean(f"follows {holder['id']}", 255),
        "available_at": Later(clock(), sa.literal(delay, sa.Double)),
        "dispatched_at": None,
    }


def _ended(state: JobState, holder_id: str) -> dict[str, Any]:
    # Accepted from no attempt of its own: token 0, as of a job that an operator accepts unrun.
    return {
        "state": state.value,
        "state_reason": clean(f"follows {holder_id}", 255),
        "finished_at": clock(),
        "accepted_attempt": 0,
    }


def _failed(row: RowMapping, holder_id: str) -> dict[str, Any]:
    error = IdempotencyConflict(row["task"], row["idempotency_key"], holder_id)
    kind = type(error)
    # As Celery's JSON backends keep an exception.
    meta = {"exc_type": kind.__name__, "exc_message": error.args, "exc_module": kind.__module__}
    return _ended(JobState.FAILED, holder_id) | {
        "result": json.dumps(meta).encode(),
        "result_type": "application/json",
        "error_type": f"{kind.__module__}.{kind.__name__}",
        "error_message": str(error),
    }
