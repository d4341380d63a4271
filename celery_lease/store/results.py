"""What the result backend reads: how a job stands, what is kept beside it, groups and chords.

No row is locked and none is changed here; what is kept is written in ``transitions.results``.
Nothing is decoded: results are bytes on this floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.engine import RowMapping

from celery_lease.records import Outcome
from celery_lease.states import JobState
from celery_lease.store.engine import Store
from celery_lease.store.transitions.claiming import outcome_of

#: Ids asked for in one statement.
BATCH = 500


@dataclass(frozen=True, slots=True)
class Kept:
    """A row of the result table.

    Attributes:
        status: Celery's state, the user's own word, or ``FORGOTTEN``.
        meta: the encoded meta; None of what was forgotten.
        fencing_token: of the attempt that said it, 0 without a lease.
        stored_at: when.
    """

    status: str
    meta: bytes | None
    fencing_token: int
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class Standing:
    """How a leased job stands, as a result backend has to tell it.

    Attributes:
        state: its state.
        state_reason: why.
        fencing_token: the newest.
        task: the task's name.
        queue: the queue of its newest message.
        group_id: Celery's group id.
        parent_id: Celery's parent id.
        outcome: the final outcome, None while it is not final.
        worker: node name of the attempt that the job's outcome is of, else of the newest.
        owner: its process.
        error_type: what that attempt's body raised.
        error_message: its text.
        traceback: its traceback.
    """

    state: JobState
    state_reason: str | None
    fencing_token: int
    task: str
    queue: str | None
    group_id: str | None
    parent_id: str | None
    outcome: Outcome | None
    worker: str | None
    owner: str | None
    error_type: str | None
    error_message: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """All that is known of one task id; both None: nothing is."""

    job: Standing | None
    kept: Kept | None


def find(store: Store, task_ids: Sequence[str]) -> dict[str, Found]:
    """Return what is known of each task id, in the order asked for."""

    def work() -> dict[str, Found]:
        jobs: dict[str, Standing] = {}
        kept: dict[str, Kept] = {}
        with store.single() as connection:
            for start in range(0, len(task_ids), BATCH):
                batch = list(task_ids[start : start + BATCH])
                for row in connection.execute(_standing(store, batch)).mappings():
                    jobs[row["id"]] = _standing_of(row)
                table = store.tables.result
                of_these = select(table).where(table.c.task_id.in_(batch))
                for row in connection.execute(of_these).mappings():
                    kept[row["task_id"]] = _kept(row)
        return {task_id: Found(jobs.get(task_id), kept.get(task_id)) for task_id in task_ids}

    return store.retrying(work)


def standing(store: Store, job_id: str) -> Standing | None:
    """Return how a job stands, None when this id is no job's."""

    def work() -> Standing | None:
        with store.single() as connection:
            row = connection.execute(_standing(store, [job_id])).mappings().first()
        return None if row is None else _standing_of(row)

    return store.retrying(work)


def _standing(store: Store, job_ids: list[str]) -> sa.Select[tuple[object, ...]]:
    job, attempt = store.tables.job, store.tables.attempt
    told = attempt.c.fencing_token == sa.func.coalesce(job.c.accepted_attempt, job.c.fencing_token)
    return (
        select(
            job.c.id,
            job.c.state,
            job.c.state_reason,
            job.c.fencing_token,
            job.c.task,
            job.c.queue,
            job.c.group_id,
            job.c.parent_id,
            job.c.finished_at,
            job.c.accepted_attempt,
            job.c.result,
            job.c.result_type,
            job.c.error_type,
            job.c.error_message,
            attempt.c.worker,
            attempt.c.owner,
            attempt.c.error_type.label("attempt_error_type"),
            attempt.c.error_message.label("attempt_error_message"),
            attempt.c.traceback,
        )
        .select_from(job.outerjoin(attempt, sa.and_(attempt.c.job_id == job.c.id, told)))
        .where(job.c.id.in_(job_ids))
    )


def _standing_of(row: RowMapping) -> Standing:
    return Standing(
        state=JobState(row["state"]),
        state_reason=row["state_reason"],
        fencing_token=row["fencing_token"],
        task=row["task"],
        queue=row["queue"],
        group_id=row["group_id"],
        parent_id=row["parent_id"],
        outcome=None if row["finished_at"] is None else outcome_of(row),
        worker=row["worker"],
        owner=row["owner"],
        error_type=row["attempt_error_type"],
        error_message=row["attempt_error_message"],
        traceback=row["traceback"],
    )


def _kept(row: RowMapping) -> Kept:
    return Kept(
        status=row["status"],
        meta=None if row["meta"] is None else bytes(row["meta"]),
        fencing_token=row["fencing_token"],
        stored_at=row["stored_at"],
    )


def group(store: Store, group_id: str) -> tuple[bytes, datetime] | None:
    """Return which results belong to a group, encoded, and since when; None: not kept."""
    table = store.tables.group
    statement = select(table).where(table.c.id == group_id)

    def work() -> tuple[bytes, datetime] | None:
        with store.single() as connection:
            row = connection.execute(statement).mappings().first()
        return None if row is None else (bytes(row["result"]), row["stored_at"])

    return store.retrying(work)


# -- chords ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chord:
    """How far a chord is.

    Attributes:
        size: how many parts its header was published with; None while that goes on.
        added_count: parts added since.
        counted: parts that have returned.
        header: how its results are nested, encoded; None when they are not.
        is_fired: True when its body or its error path has been published.
    """

    size: int | None
    added_count: int
    counted: int
    header: bytes | None
    is_fired: bool

    @property
    def is_complete(self) -> bool:
        """True when each part has returned, and nothing was published for that yet."""
        if self.size is None or self.is_fired:
            return False
        return self.counted >= self.size + self.added_count


@dataclass(frozen=True, slots=True)
class Part:
    """One returned part of a chord.

    Attributes:
        task_id: the part.
        status: how it ended.
        result: its encoded result.
    """

    task_id: str
    status: str
    result: bytes


def chord(store: Store, chord_id: str) -> Chord | None:
    """Return how far a chord is; None when nothing is known of it."""
    table, part = store.tables.chord, store.tables.chord_part
    counts = select(sa.func.count()).select_from(part).where(part.c.chord_id == chord_id)
    statement = select(
        table.c.size,
        table.c.header,
        table.c.fired_at,
        counts.where(part.c.is_added.is_(sa.true())).scalar_subquery().label("added_count"),
        counts.where(part.c.status.is_not(None)).scalar_subquery().label("counted"),
    ).where(table.c.id == chord_id)

    def work() -> Chord | None:
        with store.single() as connection:
            row = connection.execute(statement).mappings().first()
        if row is None:
            return None
        return Chord(
            size=row["size"],
            added_count=row["added_count"],
            counted=row["counted"],
            header=None if row["header"] is None else bytes(row["header"]),
            is_fired=row["fired_at"] is not None,
        )

    return store.retrying(work)


def parts(store: Store, chord_id: str) -> list[Part]:
    """Return the parts of a chord that have returned, in the order of its header."""
    table = store.tables.chord_part
    behind = sa.case((table.c.position.is_(None), 1), else_=0)
    statement = (
        select(table.c.task_id, table.c.status, table.c.result)
        .where(table.c.chord_id == chord_id, table.c.status.is_not(None))
        .order_by(behind, table.c.position, table.c.stored_at, table.c.task_id)
    )

    def work() -> list[Part]:
        with store.single() as connection:
            rows = connection.execute(statement).mappings().all()
        return [Part(row["task_id"], row["status"], bytes(row["result"])) for row in rows]

    return store.retrying(work)
