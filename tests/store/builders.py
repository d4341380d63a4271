"""What store tests are made of: jobs, deliveries, time that has passed, and every row as it is.

Nothing here waits: time passes by moving rows into the past, with SQL.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from celery_lease.records import (
    Accepted,
    Claimed,
    Delivery,
    Failure,
    Held,
    Message,
    NewJob,
    Renewal,
)
from celery_lease.store import transitions
from celery_lease.store.dialects import Instant, Later, clock
from celery_lease.store.transitions import Again, Parting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_lease.store.engine import Store

T = TypeVar("T")
Rows = dict[str, dict[Any, dict[str, Any]]]

JSON = "application/json"
ONE = "host-1-one"
"""A process that holds a lease."""
OTHER = "host-2-other"
"""Another process."""
WORKER_NOW = datetime(2001, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
"""The runner's clock in these tests: far from the store's, so that a mix-up shows."""
FAILURE = Failure("builtins.ValueError", "wrong", "Traceback …", "error", retryable=False)
NO_BACKOFF = (0.0,)


LONG = bool(os.environ.get("CELERY_LEASE_LONG"))

#: Rounds of a race: a few in every run, many in ``make long`` or with CELERY_LEASE_LONG=1.
ROUNDS = pytest.mark.parametrize(
    "rounds",
    [
        200 if LONG else 3,
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
    ids=["few", "many"],
)


# --- what is given ------------------------------------------------------------------------------


def new_message(version: int = 1, *, body: bytes = b"[[], {}, {}]") -> Message:
    return Message(
        version=version,
        headers='{"task": "app.work"}',
        properties='{"priority": 3}',
        body=body,
        content_type=JSON,
        content_encoding="utf-8",
        exchange="",
        routing_key="celery",
    )


def new_job(job_id: str = "job", **changes: Any) -> NewJob:
    return NewJob(**{"job_id": job_id, "task": "app.work", "message": new_message()} | changes)


def new_delivery(job_id: str = "job", **changes: Any) -> Delivery:
    return Delivery(
        **{
            "job_id": job_id,
            "message_version": 1,
            "owner": ONE,
            "worker": "celery@one",
            "nonce": os.urandom(8).hex(),
            "lease_seconds": 30.0,
            "worker_now": WORKER_NOW,
            "dispatch_count": 1,
        }
        | changes
    )


def submitted(store: Store, job_id: str = "job", **changes: Any) -> str:
    """Record a job and return its id."""
    assert transitions.submit(store, new_job(job_id, **changes))
    return job_id


def claimed(store: Store, job_id: str = "job", **changes: Any) -> Held:
    """Claim a job that is there and return the lease."""
    answer = transitions.claim(store, new_delivery(job_id, **changes))
    assert isinstance(answer, Claimed), answer
    return answer.lease


def running(
    store: Store, job_id: str = "job", *, owner: str = ONE, lease_seconds: float = 30.0, **job: Any
) -> Held:
    """Record a job, claim it and return the lease."""
    submitted(store, job_id, **job)
    return claimed(store, job_id, owner=owner, lease_seconds=lease_seconds)


def expired(store: Store, job_id: str = "job", *, owner: str = ONE, **job: Any) -> Held:
    """Record a job, claim it, let its lease of 30 s end and return the lease."""
    lease = running(store, job_id, owner=owner, **job)
    move_back(store, job_id, seconds=31)
    return lease


def parting(reason: str | None = "said so", **changes: Any) -> Parting:
    return Parting(**{"reason": reason, "worker_now": WORKER_NOW} | changes)


def again(version: int = 2, **changes: Any) -> Again:
    return Again(**{"message": new_message(version, body=b"again")} | changes)


def renewal(lease: Held, **changes: Any) -> Renewal:
    return Renewal(lease, **changes)


def finished(store: Store, lease: Held, *, settled: bool = True) -> None:
    """Complete a running job."""
    answer = transitions.complete(
        store, lease, parting(), result=b"1", result_type=JSON, settled=settled
    )
    assert isinstance(answer, Accepted), answer


# --- time that passes ---------------------------------------------------------------------------


def move_back(store: Store, job_id: str, seconds: float) -> None:
    """Let so many seconds pass for one job: every instant of its rows moves into the past."""
    tables = store.tables
    owned = [
        (tables.job, tables.job.c.id),
        (tables.message, tables.message.c.job_id),
        (tables.attempt, tables.attempt.c.job_id),
    ]
    with store.engine.begin() as connection:
        for table, key in owned:
            moved = sa.update(table).where(key == job_id).values(_earlier(table, seconds))
            connection.execute(moved)


def move_passes_back(store: Store, seconds: float) -> None:
    """Let so many seconds pass since the reaper's last pass."""
    table = store.tables.completed_pass
    with store.engine.begin() as connection:
        connection.execute(sa.update(table).values(_earlier(table, seconds)))


def _earlier(table: sa.Table, seconds: float) -> dict[Any, Any]:
    return {
        column: Later(column, -seconds)
        for column in table.c
        if isinstance(column.type, Instant) and not column.name.startswith("worker_")
    }


def set_job(store: Store, job_id: str = "job", **values: Any) -> None:
    """Write a job row as an accident would: no transition is asked."""
    with store.engine.begin() as connection:
        connection.execute(
            sa.update(store.tables.job).where(store.tables.job.c.id == job_id).values(**values)
        )


def store_now(store: Store) -> datetime:
    """Read the store's clock."""
    with store.single() as connection:
        return connection.execute(sa.select(clock())).scalar_one()


def about(instant: datetime | None, now: datetime, *, seconds: float = 0.0) -> bool:
    """Tell whether an instant is so many seconds after another, give or take a slow machine."""
    assert instant is not None
    return abs(instant - now - timedelta(seconds=seconds)) < timedelta(seconds=9)


# --- every row ----------------------------------------------------------------------------------


def rows(store: Store) -> Rows:
    """Read every table: name → key → column → value."""
    tables = store.tables
    # Not engine.connect(): where a transaction begins as a writer, a read would wait for others.
    with store.single() as connection:

        def read(table: sa.Table, key: Callable[[Any], Any]) -> dict[Any, dict[str, Any]]:
            found = connection.execute(sa.select(table)).mappings()
            return {key(row): dict(row) for row in found}

        return {
            "job": read(tables.job, lambda row: row["id"]),
            "message": read(tables.message, lambda row: (row["job_id"], row["version"])),
            "attempt": read(tables.attempt, lambda row: (row["job_id"], row["fencing_token"])),
            "pass": read(tables.completed_pass, lambda row: row["id"]),
        }


def job_row(store: Store, job_id: str = "job") -> dict[str, Any]:
    return rows(store)["job"][job_id]


def attempt_row(store: Store, lease: Held) -> dict[str, Any]:
    return rows(store)["attempt"][lease.job_id, lease.fencing_token]


def difference(before: Rows, after: Rows) -> dict[str, Any]:
    """Return what changed: ``"job job.state"`` → new value; a row that came or went as a whole."""
    changes: dict[str, Any] = {}
    for table in before:
        for key in before[table].keys() | after[table].keys():
            name = f"{table} {_spelled(key)}"
            old, new = before[table].get(key), after[table].get(key)
            if old is None or new is None:
                changes[name] = "added" if old is None else "removed"
                continue
            changes |= {f"{name}.{c}": new[c] for c in new if old[c] != new[c]}
    return changes


def _spelled(key: Any) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


class Changes(dict[str, Any]):
    """What a block changed, by the name of the column; filled when the block ends."""


@contextmanager
def changes_of(store: Store) -> Iterator[Changes]:
    """Collect what a block changes in all tables."""
    found = Changes()
    before = rows(store)
    yield found
    found.update(difference(before, rows(store)))


@contextmanager
def nothing_changes(store: Store) -> Iterator[None]:
    """Assert that a block changes no row of any table."""
    with changes_of(store) as changes:
        yield
    assert changes == {}


# --- several at once ----------------------------------------------------------------------------


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Make calls from as many threads, let go together; return their answers in order."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        gate.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(run, call) for call in calls]]


@contextmanager
def in_background(call: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Start a call in a thread; what is yielded waits for its answer."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield lambda: future.result(60)


@contextmanager
def holding(store: Store, statement: Any) -> Iterator[sa.Connection]:
    """Hold what a statement locks, from a connection of its own, until the block ends."""
    with store.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(statement)
        yield connection
        if transaction.is_active:
            transaction.rollback()


def lock_job(store: Store, job_id: str = "job", **how: Any) -> Any:
    """Return a read that locks a job's row."""
    job = store.tables.job
    return sa.select(job.c.id).where(job.c.id == job_id).with_for_update(**how)


def lock_attempt(store: Store, lease: Held, **how: Any) -> Any:
    """Return a read that locks an attempt's row."""
    attempt = store.tables.attempt
    return (
        sa.select(attempt.c.job_id)
        .where(attempt.c.job_id == lease.job_id, attempt.c.fencing_token == lease.fencing_token)
        .with_for_update(**how)
    )


@contextmanager
def statements_of(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements and parameters that this process sends."""
    seen: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        seen.append((statement, parameters))

    engine = store.base_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


@contextmanager
def errors_of(store: Store) -> Iterator[list[str]]:
    """Collect what the database refused: deadlocks are retried, and would not show otherwise."""
    seen: list[str] = []

    def note(context: Any) -> None:
        seen.append(str(context.original_exception))

    engine = store.base_engine
    event.listen(engine, "handle_error", note)
    try:
        yield seen
    finally:
        event.remove(engine, "handle_error", note)
