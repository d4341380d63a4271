"""The tables, their constraints and their indexes.

What it is not: the migrations (``migrations/``), which create the same tables step by step
and are compared with this file by a test. The prefix and the schema are settings, so the
tables are built by a function.

An index on a column that a heartbeat writes (expiry, progress, state of the attempt) would
make every renewal rewrite the indexes: with one on the expiry 0 of 2,500 renewals were HOT
on PostgreSQL, without 2,448 (design, section 3). So there is none.

There are no foreign keys either. Rows of a job are only ever written in the transaction that
holds or writes its job row, and PostgreSQL checks a foreign key by a plan that it keeps from
when the table was small: 8 to 18 ms an insert at 60,000 rows, until the next ANALYZE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sqlalchemy as sa

from celery_lease.states import FINAL_STATES, LIVE_STATES, AttemptState, JobState, OnExpiry
from celery_lease.store.dialects import (
    TABLE_OPTIONS,
    Blob,
    Instant,
    LongText,
    has_partial_indexes,
    index_options,
    leave_room_after_create,
)

#: Longest task id, task name, queue, owner … in characters: Celery's own result tables use 155
#: for ids; 255 is what an index of utf8mb4 text can hold everywhere.
NAME = 255
DEFAULT_PREFIX = "celery_lease_"


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one store."""

    metadata: sa.MetaData
    job: sa.Table
    message: sa.Table
    attempt: sa.Table
    completed_pass: sa.Table
    result: sa.Table
    group: sa.Table
    chord: sa.Table
    chord_part: sa.Table
    version_table: str


def _one_of(column: str, values: Iterable[Enum]) -> str:
    listed = ", ".join(
        f"'{value.value}'" for value in sorted(values, key=lambda value: str(value.value))
    )
    return f"{column} IN ({listed})"


_ALL_JOB = frozenset(JobState)
_ALL_ATTEMPT = frozenset(AttemptState)
_WAITING = "state IN ('scheduled', 'retry_wait')"
_QUEUED = "state = 'queued'"
_UNFINISHED = "finished_at IS NULL"
_UNSETTLED = "finished_at IS NOT NULL AND settled_at IS NULL"
#: What a person looks for among a million that went well.
_NOTABLE = "state IN ('failed', 'cancelled', 'interrupted', 'held')"
_LIVE = "ended_at IS NULL"


def _partial(name: str, *columns: sa.Column[Any], where: str, unique: bool = False) -> sa.Index:
    return sa.Index(name, *columns, unique=unique, **index_options(where))


def build_tables(prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> Tables:
    """Return the tables under a prefix and, on PostgreSQL, in a schema."""
    metadata = sa.MetaData(schema=schema)
    job = _job_table(metadata, prefix)
    message = _message_table(metadata, prefix)
    attempt = _attempt_table(metadata, prefix)
    completed_pass = sa.Table(
        f"{prefix}pass",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("finished_at", Instant, nullable=False),
        sa.Column("counts", LongText, nullable=False),
        sa.Column("worker", sa.String(NAME)),
        **TABLE_OPTIONS,
    )
    return Tables(
        metadata,
        job,
        message,
        attempt,
        completed_pass,
        _result_table(metadata, prefix),
        _group_table(metadata, prefix),
        _chord_table(metadata, prefix),
        _chord_part_table(metadata, prefix),
        f"{prefix}version",
    )


def _job_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}job"
    table = sa.Table(
        name,
        metadata,
        sa.Column("id", sa.String(NAME), primary_key=True),
        sa.Column("task", sa.String(NAME), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_reason", sa.String(NAME)),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("resumed_token", sa.BigInteger),
        sa.Column("lease_owner", sa.String(NAME)),
        sa.Column("lost_count", sa.Integer, nullable=False),
        sa.Column("failure_count", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("on_expiry", sa.String(8), nullable=False),
        sa.Column("available_at", Instant, nullable=False),
        sa.Column("expires_at", Instant),
        sa.Column("deadline_at", Instant),
        sa.Column("message_version", sa.Integer, nullable=False),
        sa.Column("dispatched_at", Instant),
        sa.Column("first_dispatched_at", Instant),
        sa.Column("dispatch_count", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String(NAME)),
        sa.Column("active_key", sa.String(NAME)),
        sa.Column("arguments_digest", sa.String(80)),
        sa.Column("submitter", sa.String(NAME)),
        sa.Column("root_id", sa.String(NAME)),
        sa.Column("parent_id", sa.String(NAME)),
        sa.Column("group_id", sa.String(NAME)),
        sa.Column("queue", sa.String(NAME)),
        sa.Column("priority", sa.Integer),
        sa.Column("schedule", sa.String(NAME)),
        sa.Column("slot_at", Instant),
        sa.Column("requires", LongText),
        sa.Column("unmet", LongText),
        sa.Column("accepted_attempt", sa.BigInteger),
        sa.Column("accepted_late", sa.Boolean),
        sa.Column("result", Blob),
        sa.Column("result_type", sa.String(NAME)),
        sa.Column("error_type", sa.String(NAME)),
        sa.Column("error_message", LongText),
        sa.Column("settled_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("finished_at", Instant),
        sa.CheckConstraint(_one_of("state", _ALL_JOB), name=f"{name}_state"),
        sa.CheckConstraint(
            f"({_one_of('state', FINAL_STATES)}) = (finished_at IS NOT NULL)",
            name=f"{name}_final",
        ),
        sa.CheckConstraint("(state = 'running') = (lease_owner IS NOT NULL)", name=f"{name}_owner"),
        sa.CheckConstraint(
            "on_expiry IN ({})".format(", ".join(f"'{v.value}'" for v in OnExpiry)),
            name=f"{name}_on_expiry",
        ),
        **TABLE_OPTIONS,
    )
    c = table.c
    sa.Index(f"{name}_created", c.created_at, c.id)
    _partial(
        f"{name}_active_key", c.task, c.active_key, where="active_key IS NOT NULL", unique=True
    )
    _partial(f"{name}_slot", c.schedule, c.slot_at, where="schedule IS NOT NULL", unique=True)
    # The state first: where an index cannot be partial, every waiting row has no dispatch.
    _partial(f"{name}_due", c.state, c.available_at, where=_WAITING)
    _partial(f"{name}_queued", c.state, c.dispatched_at, c.available_at, where=_QUEUED)
    _partial(f"{name}_deadline", c.deadline_at, where=f"deadline_at IS NOT NULL AND {_UNFINISHED}")
    _partial(f"{name}_expires", c.expires_at, where=f"expires_at IS NOT NULL AND {_UNFINISHED}")
    _partial(f"{name}_unsettled", c.settled_at, c.finished_at, where=_UNSETTLED)
    _partial(f"{name}_finished", c.state, c.finished_at, where="finished_at IS NOT NULL")
    _partial(f"{name}_notable", c.state, c.created_at, c.id, where=_NOTABLE)
    return table


def _message_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    return sa.Table(
        f"{prefix}message",
        metadata,
        sa.Column("job_id", sa.String(NAME), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("headers", LongText, nullable=False),
        sa.Column("properties", LongText, nullable=False),
        sa.Column("body", Blob, nullable=False),
        sa.Column("content_type", sa.String(NAME), nullable=False),
        sa.Column("content_encoding", sa.String(NAME), nullable=False),
        sa.Column("exchange", sa.String(NAME), nullable=False),
        sa.Column("routing_key", sa.String(NAME), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        **TABLE_OPTIONS,
    )


def _attempt_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}attempt"
    table = sa.Table(
        name,
        metadata,
        sa.Column("job_id", sa.String(NAME), primary_key=True),
        sa.Column("fencing_token", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("stop_reason", sa.String(NAME)),
        sa.Column("worker", sa.String(NAME)),
        sa.Column("owner", sa.String(NAME), nullable=False),
        sa.Column("claim_nonce", sa.String(64), nullable=False),
        sa.Column("message_version", sa.Integer, nullable=False),
        sa.Column("lease_seconds", sa.Double, nullable=False),
        sa.Column("lease_expires_at", Instant, nullable=False),
        sa.Column("last_renewed_at", Instant, nullable=False),
        sa.Column("renewal_count", sa.Integer, nullable=False),
        sa.Column("extended_at", Instant),
        sa.Column("stop_requested_at", Instant),
        sa.Column("progress", LongText),
        sa.Column("checkpoint", LongText),
        sa.Column("claimed_at", Instant, nullable=False),
        sa.Column("acknowledged_at", Instant),
        sa.Column("ended_at", Instant),
        sa.Column("worker_claimed_at", Instant),
        sa.Column("worker_ended_at", Instant),
        sa.Column("error_type", sa.String(NAME)),
        sa.Column("error_message", LongText),
        sa.Column("traceback", LongText),
        sa.Column("failure_class", sa.String(16)),
        sa.Column("retryable", sa.Boolean),
        sa.Column("rejected_at", Instant),
        sa.Column("late_outcome", sa.String(16)),
        sa.Column("late_result", Blob),
        sa.Column("late_result_digest", sa.String(80)),
        sa.CheckConstraint(_one_of("state", _ALL_ATTEMPT), name=f"{name}_state"),
        sa.CheckConstraint(
            f"({_one_of('state', LIVE_STATES)}) = (ended_at IS NULL)", name=f"{name}_live"
        ),
        **TABLE_OPTIONS,
    )
    c = table.c
    _partial(f"{name}_one_live", c.job_id, where=_LIVE, unique=True).ddl_if(callable_=_partially)
    _partial(f"{name}_live_owner", c.owner, where=_LIVE).ddl_if(callable_=_partially)
    sa.Index(f"{name}_live_rows", c.ended_at, c.owner).ddl_if(callable_=_fully)
    leave_room_after_create(table)
    return table


def _result_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}result"
    table = sa.Table(
        name,
        metadata,
        sa.Column("task_id", sa.String(NAME), primary_key=True),
        sa.Column("status", sa.String(NAME), nullable=False),
        sa.Column("meta", Blob),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("stored_at", Instant, nullable=False),
        **TABLE_OPTIONS,
    )
    sa.Index(f"{name}_stored", table.c.stored_at)
    return table


def _group_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}group"
    table = sa.Table(
        name,
        metadata,
        sa.Column("id", sa.String(NAME), primary_key=True),
        sa.Column("result", Blob, nullable=False),
        sa.Column("stored_at", Instant, nullable=False),
        **TABLE_OPTIONS,
    )
    sa.Index(f"{name}_stored", table.c.stored_at)
    return table


def _chord_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}chord"
    table = sa.Table(
        name,
        metadata,
        sa.Column("id", sa.String(NAME), primary_key=True),
        sa.Column("size", sa.Integer),
        sa.Column("header", Blob),
        sa.Column("claim_nonce", sa.String(64)),
        sa.Column("claimed_at", Instant),
        sa.Column("fired_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        **TABLE_OPTIONS,
    )
    sa.Index(f"{name}_created", table.c.created_at)
    return table


def _chord_part_table(metadata: sa.MetaData, prefix: str) -> sa.Table:
    name = f"{prefix}chord_part"
    table = sa.Table(
        name,
        metadata,
        sa.Column("chord_id", sa.String(NAME), primary_key=True),
        sa.Column("task_id", sa.String(NAME), primary_key=True),
        sa.Column("is_added", sa.Boolean, nullable=False),
        sa.Column("position", sa.Integer),
        sa.Column("status", sa.String(NAME)),
        sa.Column("result", Blob),
        sa.Column("stored_at", Instant, nullable=False),
        **TABLE_OPTIONS,
    )
    sa.Index(f"{name}_stored", table.c.stored_at)
    return table


def _partially(*_: object, dialect: sa.Dialect, **__: object) -> bool:
    return has_partial_indexes(dialect.name)


def _fully(*_: object, dialect: sa.Dialect, **__: object) -> bool:
    return not has_partial_indexes(dialect.name)
