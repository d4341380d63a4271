"""Does the past slow the present? The same operations beside a short and beside a long history.

Two databases on one server, asked in turns. The history is copies of one finished job, made by
the server itself; its foreign keys are not checked while it is (they hold).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg
import sqlalchemy as sa

from bench.jobs import TASK, Jobs
from bench.place import Place
from celery_lease.reaper import PublishFailed, Reaper
from celery_lease.records import Dispatchable, Message, Outcome
from celery_lease.states import JobState
from celery_lease.store import reads
from celery_lease.store.engine import Store

#: What both databases have: enough for a whole page of a listing.
SHORT_HISTORY = 500
#: Leases that are held meanwhile.
HELD = 50
DAY_SECONDS = 86_400


class _Nowhere:
    """A publisher for a pass that has nothing to publish."""

    def publish(self, candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        """Refuse."""
        raise PublishFailed(f"nothing to publish: {candidate}, {len(message.body)}, {replay}")

    def close_books(self, outcome: Outcome, message: Message) -> bool:
        """Refuse."""
        raise PublishFailed(f"nothing to close: {outcome}, {len(message.body)}")


class _Database:
    """One database with a history."""

    def __init__(self, place: Place, name: str, history: int) -> None:
        place.create(name)
        self.store = Store(url=place.url(name))
        self._jobs = Jobs(self.store)
        (template,) = self._jobs.submit(1)
        self._jobs.complete(self._jobs.hold(template))
        started = time.monotonic()
        with place.connect(name) as connection:
            _copy(connection, self.store, template, history)
        self.fill_seconds = time.monotonic() - started
        for job_id in self._jobs.submit(HELD):
            self._jobs.hold(job_id)
        self._reaper = Reaper(
            store=self.store,
            settings=self._jobs.settings,
            publisher=_Nowhere(),
            worker="celery@bench",
        )
        self._waiting: list[str] = []
        self._leases: list[Any] = []
        self._last: Any = None

    def prepare(self, operations: int) -> None:
        """Record the jobs that the next operations take."""
        self._waiting = self._jobs.submit(operations)

    def operations(self) -> dict[str, Callable[[], object]]:
        """Return what is measured, in the order in which it must run."""
        return {
            "submit": lambda: self._jobs.submit(1),
            "claim": lambda: self._leases.append(self._jobs.hold(self._waiting.pop())),
            "complete": lambda: self._jobs.complete(self._leases.pop()),
            "heartbeat": self._jobs.runtime.heartbeat.beat_once,
            "pass": self._reaper.run_pass,
            "list newest": self._list_newest,
            "list next page": lambda: reads.jobs(self.store, after=self._last),
            "list failed": lambda: reads.jobs(self.store, states=[JobState.FAILED]),
            "list running": lambda: reads.jobs(self.store, states=[JobState.RUNNING]),
            "list task": lambda: reads.jobs(self.store, task=TASK),
            "list live attempts": lambda: reads.attempts(self.store, live=True),
            "show": lambda: reads.job(self.store, self._last.id),
        }

    def close(self) -> None:
        """End its process and its connections."""
        self._jobs.runtime.stop()
        self.store.close()

    def _list_newest(self) -> None:
        self._last = reads.jobs(self.store)[-1]


def run(place: Place, *, history: int, operations: int, rounds: int) -> dict[str, Any]:
    """Time every operation on both databases, in turns; return milliseconds and ratios."""
    place.fresh()
    short = _Database(place, "short_history", SHORT_HISTORY)
    long = _Database(place, "long_history", SHORT_HISTORY + history)
    times: dict[str, tuple[list[float], list[float]]] = {}
    try:
        for round_number in range(rounds):
            pair = (short, long) if round_number % 2 else (long, short)
            for database in pair:
                database.prepare(operations)
            for name in short.operations():
                for database in pair:
                    found = times.setdefault(name, ([], []))[database is long]
                    found += _time(database.operations()[name], _times_of(name, operations))
    finally:
        short.close()
        long.close()
        place.remove("short_history")
        place.remove("long_history")
    return {
        "history": history,
        "fill_seconds": long.fill_seconds,
        "operations": {name: _compared(*both) for name, both in times.items()},
    }


def _times_of(name: str, operations: int) -> int:
    return operations if name in ("submit", "claim", "complete") else max(3, operations // 10)


def _time(operation: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        started = time.monotonic()
        operation()
        found.append((time.monotonic() - started) * 1000)
    return found


def _compared(short: list[float], long: list[float]) -> dict[str, float]:
    short_ms, long_ms = statistics.median(short), statistics.median(long)
    return {"short_ms": short_ms, "long_ms": long_ms, "ratio": long_ms / short_ms}


def _copy(connection: psycopg.Connection, store: Store, template: str, copies: int) -> None:
    """Make copies of a finished job with its message and its attempt, spread over a day."""
    connection.execute("SET session_replication_role = replica")
    connection.execute("CREATE TEMP TABLE ids (g integer, new_id text)")
    connection.execute(
        "INSERT INTO ids SELECT g, gen_random_uuid()::text FROM generate_series(1, %s) g",
        (copies,),
    )
    step = f"make_interval(secs => {DAY_SECONDS / copies!r} * g)"
    for table, key in (
        (store.tables.job, "id"),
        (store.tables.message, "job_id"),
        (store.tables.attempt, "job_id"),
    ):
        columns = [column.name for column in table.columns]
        values = [_value(column, key, step) for column in table.columns]
        connection.execute(
            f"INSERT INTO {table.name} ({', '.join(columns)})"  # noqa: S608  our own names
            f" SELECT {', '.join(values)} FROM {table.name} t, ids WHERE t.{key} = %s",
            (template,),
        )
    for table in store.tables.metadata.sorted_tables:
        connection.execute(f"VACUUM ANALYZE {table.name}")


def _value(column: sa.Column[Any], key: str, step: str) -> str:
    if column.name == key:
        return "new_id"
    if column.name == "root_id":
        return "new_id"
    if column.name.endswith("_at"):
        return f"t.{column.name} - {step}"
    return f"t.{column.name}"
