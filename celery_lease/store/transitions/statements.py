"""How the statements of the arrows are made: built once a store, their texts made safe.

What every arrow shares; called by the other modules of this package only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, select
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.states import FINAL_STATES, WAITING_STATES, JobState
from celery_lease.store.dialects import clock, unindexed
from celery_lease.store.engine import RowBusy, Store

FINAL = tuple(state.value for state in FINAL_STATES)
WAITING = tuple(state.value for state in WAITING_STATES)


def built(store: Store, name: str, build: Callable[[Store], Any]) -> Any:
    """Return a statement of this store, built at its first use."""
    statement = store.statements.get(name)
    if statement is None:
        statement = store.statements[name] = build(store)
    return statement


def seconds(name: str) -> ColumnElement[Any]:
    """Return a bound number of seconds."""
    return bindparam(name, type_=sa.Double)


def clean(text: str | None, length: int | None = None) -> str | None:
    """Return text that every database takes: no NUL, no lone surrogate, cut to a length."""
    if text is None:
        return None
    safe = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if length is None else safe[:length]


def may_be_id(text: str) -> bool:
    """Tell whether a job can have this id or name: none takes NUL, lone surrogates, or 256."""
    return clean(text, 255) == text


def instant() -> Any:
    """Return the type of an instant."""
    return clock().type


def lock_job(store: Store, connection: Connection, job_id: str) -> RowMapping | None:
    """Lock a job row without waiting; None when it is locked elsewhere or not there."""
    job = store.tables.job
    statement = built(
        store,
        "lock_job",
        lambda _: (
            select(job).where(job.c.id == bindparam("p_id")).with_for_update(skip_locked=True)
        ),
    )
    return connection.execute(statement, {"p_id": job_id}).mappings().first()


def mine(job: Any) -> list[ColumnElement[bool]]:
    """Return *mine*: running, under this token, held by this process."""
    return [
        job.c.state == JobState.RUNNING.value,
        job.c.fencing_token == bindparam("p_token"),
        job.c.lease_owner == bindparam("p_owner"),
    ]


def live_attempt(attempt: Any) -> list[ColumnElement[bool]]:
    """Return the guard of my live attempt, beside its job's id."""
    return [
        attempt.c.fencing_token == bindparam("p_token"),
        attempt.c.owner == bindparam("p_owner"),
        unindexed(attempt.c.ended_at.is_(None)),
    ]


def state_or_busy(store: Store, connection: Connection, job_id: str) -> JobState | None:
    """Return the final state of a job that could not be locked; None: no such job.

    Raises:
        RowBusy: it is locked by another transaction.
    """
    job = store.tables.job
    state = connection.execute(select(job.c.state).where(job.c.id == job_id)).scalar()
    if state is None:
        return None
    if JobState(state).is_final:
        return JobState(state)
    raise RowBusy(f"the row of job {job_id} is locked by another transaction")
