"""What the checker judges: rows of the store and of the witness, and Celery's results, as read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Protocol, TypeVar

import sqlalchemy as sa
from celery import Celery

from celery_lease.states import FINAL_STATES
from celery_lease.store.schema import build_tables
from tests.soak.load import Follows
from tests.soak.witness import WITNESS, engine_of

_STORE = build_tables()


class _OfJob(Protocol):
    @property
    def job_id(self) -> str: ...


T = TypeVar("T")
R = TypeVar("R", bound=_OfJob)


@dataclass(frozen=True)
class JobRow:
    """A job, as far as it is judged."""

    id: str
    task: str
    state: str
    fencing_token: int
    lost_count: int
    max_attempts: int
    accepted_attempt: int | None
    settled_at: datetime | None

    @property
    def is_final(self) -> bool:
        """Whether nothing is to happen to it any more."""
        return self.state in {state.value for state in FINAL_STATES}


@dataclass(frozen=True)
class AttemptRow:
    """An attempt."""

    job_id: str
    fencing_token: int
    state: str
    stop_reason: str | None
    stop_requested_at: datetime | None
    ended_at: datetime | None
    rejected_at: datetime | None


@dataclass(frozen=True)
class WitnessRow:
    """A line of the witness."""

    seq: int
    kind: str
    job_id: str
    token: int
    step: str
    detail: str | None


@dataclass(frozen=True)
class Evidence:
    """Everything that is judged.

    Args:
        promised: ids that ``apply_async`` returned.
        follows: jobs that Celery sends after others.
        jobs: all of the store.
        attempts: likewise.
        witness: all of it, in its order.
        results: id to (Celery state, value) of the result backend, None where it has nothing.
    """

    promised: Sequence[str]
    follows: Sequence[Follows]
    jobs: Mapping[str, JobRow]
    attempts: Mapping[str, Sequence[AttemptRow]]
    witness: Mapping[str, Sequence[WitnessRow]]
    results: Mapping[str, tuple[str, object] | None] = field(default_factory=dict)


def read(
    store_url: str,
    *,
    promised: Sequence[str],
    follows: Sequence[Follows],
    app: Celery | None = None,
) -> Evidence:
    """Read the database, with statements of our own, and the results if an app is given."""
    engine = engine_of(store_url)
    with engine.connect() as connection:
        jobs = _rows(connection, _STORE.job, JobRow, "id")
        attempts = _rows(connection, _STORE.attempt, AttemptRow, "job_id", "fencing_token")
        witness = _rows(connection, WITNESS, WitnessRow, "seq")
    engine.dispose()
    return Evidence(
        promised=promised,
        follows=follows,
        jobs={job.id: job for job in jobs},
        attempts=_by_job(attempts),
        witness=_by_job(witness),
        results={job.id: _result(app, job.id) for job in jobs} if app is not None else {},
    )


def unfinished(store_url: str) -> list[str]:
    """Return the jobs that are not final and settled yet."""
    job = _STORE.job
    waiting = sa.or_(job.c.finished_at.is_(None), job.c.settled_at.is_(None))
    engine = engine_of(store_url)
    try:
        with engine.connect() as connection:
            return list(connection.scalars(sa.select(job.c.id).where(waiting)))
    finally:
        engine.dispose()


def _rows(connection: sa.Connection, table: sa.Table, kind: type[T], *order: str) -> list[T]:
    # The classes have the columns' names.
    columns = [table.c[one.name] for one in fields(kind)]  # type: ignore[arg-type]
    found = connection.execute(sa.select(*columns).order_by(*(table.c[name] for name in order)))
    return [kind(**row) for row in found.mappings()]


def _by_job(rows: Sequence[R]) -> dict[str, list[R]]:
    found: dict[str, list[R]] = {}
    for row in rows:
        found.setdefault(row.job_id, []).append(row)
    return found


def _result(app: Celery, job_id: str) -> tuple[str, object] | None:
    meta = app.backend.get_task_meta(job_id, cache=False)
    # Of an unknown task Celery says PENDING.
    return None if meta["status"] == "PENDING" else (meta["status"], meta["result"])
