"""The first tables: job, message, attempt and pass.

Frozen history, once released: it says what was made then and must not change with
``schema.py``. Only the column types and options that are the databases' own business come
from ``dialects``.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from celery_lease.exceptions import SchemaMismatch
from celery_lease.store.dialects import (
    TABLE_OPTIONS,
    Blob,
    Instant,
    LongText,
    has_partial_indexes,
    index_options,
    leave_room,
)
from celery_lease.store.engine import Store

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the tables; on MySQL and MariaDB also those that a killed migration left to make."""
    context = op.get_context()
    store: Store = context.config.attributes["store"]  # type: ignore[union-attr]
    missing = _Missing(store, sa.inspect(op.get_bind()))
    _job(missing)
    _message(missing)
    _attempt(missing)
    _pass(missing)


def _job(missing: _Missing) -> None:
    name = f"{missing.prefix}job"
    missing.table(
        name,
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("task", _NAME, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_reason", _NAME),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("lease_owner", _NAME),
        sa.Column("lost_count", sa.Integer, nullable=False),
        sa.Column("failure_count", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("on_expiry", sa.String(8), nullable=False),
        sa.Column("available_at", Instant, nullable=False),
        sa.Column("expires_at", Instant),
        sa.Column("deadline_at", Instant),
        sa.Column("message_version", sa.Integer, nullable=False),
        sa.Column("dispatched_at", Instant),
        sa.Column("dispatch_count", sa.Integer, nullable=False),
        sa.Column("idempotency_key", _NAME),
        sa.Column("active_key", _NAME),
        sa.Column("arguments_digest", sa.String(80)),
        sa.Column("submitter", _NAME),
        sa.Column("root_id", _NAME),
        sa.Column("parent_id", _NAME),
        sa.Column("group_id", _NAME),
        sa.Column("queue", _NAME),
        sa.Column("priority", sa.Integer),
        sa.Column("schedule", _NAME),
        sa.Column("slot_at", Instant),
        sa.Column("requires", LongText),
        sa.Column("unmet", LongText),
        sa.Column("accepted_attempt", sa.BigInteger),
        sa.Column("accepted_late", sa.Boolean),
        sa.Column("result", Blob),
        sa.Column("result_type", _NAME),
        sa.Column("error_type", _NAME),
        sa.Column("error_message", LongText),
        sa.Column("settled_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("finished_at", Instant),
        sa.CheckConstraint(
            "state IN ('cancelled', 'failed', 'held', 'interrupted', 'queued', 'retry_wait', "
            "'running', 'scheduled', 'succeeded')",
            name=f"{name}_state",
        ),
        sa.CheckConstraint(
            "(state IN ('cancelled', 'failed', 'interrupted', 'succeeded')) = "
            "(finished_at IS NOT NULL)",
            name=f"{name}_final",
        ),
        sa.CheckConstraint("(state = 'running') = (lease_owner IS NOT NULL)", name=f"{name}_owner"),
        sa.CheckConstraint("on_expiry IN ('retry', 'hold', 'fail')", name=f"{name}_on_expiry"),
    )
    missing.index(name, "created", ["created_at", "id"])
    missing.index(
        name, "active_key", ["task", "active_key"], where="active_key IS NOT NULL", unique=True
    )
    missing.index(name, "slot", ["schedule", "slot_at"], where="schedule IS NOT NULL", unique=True)
    missing.index(
        name, "due", ["state", "available_at"], where="state IN ('scheduled', 'retry_wait')"
    )
    missing.index(
        name, "queued", ["state", "dispatched_at", "available_at"], where="state = 'queued'"
    )
    missing.index(
        name,
        "deadline",
        ["deadline_at"],
        where="deadline_at IS NOT NULL AND finished_at IS NULL",
    )
    missing.index(
        name, "expires", ["expires_at"], where="expires_at IS NOT NULL AND finished_at IS NULL"
    )
    missing.index(
        name,
        "unsettled",
        ["settled_at", "finished_at"],
        where="finished_at IS NOT NULL AND settled_at IS NULL",
    )
    missing.index(name, "finished", ["state", "finished_at"], where="finished_at IS NOT NULL")
    missing.index(
        name,
        "notable",
        ["state", "created_at", "id"],
        where="state IN ('failed', 'cancelled', 'interrupted', 'held')",
    )


def _message(missing: _Missing) -> None:
    name = f"{missing.prefix}message"
    missing.table(
        name,
        sa.Column("job_id", _NAME, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("headers", LongText, nullable=False),
        sa.Column("properties", LongText, nullable=False),
        sa.Column("body", Blob, nullable=False),
        sa.Column("content_type", _NAME, nullable=False),
        sa.Column("content_encoding", _NAME, nullable=False),
        sa.Column("exchange", _NAME, nullable=False),
        sa.Column("routing_key", _NAME, nullable=False),
        sa.Column("created_at", Instant, nullable=False),
    )


def _attempt(missing: _Missing) -> None:
    name = f"{missing.prefix}attempt"
    missing.table(
        name,
        sa.Column("job_id", _NAME, primary_key=True),
        sa.Column("fencing_token", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("stop_reason", _NAME),
        sa.Column("worker", _NAME),
        sa.Column("owner", _NAME, nullable=False),
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
        sa.Column("error_type", _NAME),
        sa.Column("error_message", LongText),
        sa.Column("traceback", LongText),
        sa.Column("failure_class", sa.String(16)),
        sa.Column("retryable", sa.Boolean),
        sa.Column("rejected_at", Instant),
        sa.Column("late_outcome", sa.String(16)),
        sa.Column("late_result", Blob),
        sa.Column("late_result_digest", sa.String(80)),
        sa.CheckConstraint(
            "state IN ('active', 'cancelled', 'claimed', 'completed', 'expired', 'failed', "
            "'lost', 'released', 'replaced', 'retried', 'stalled')",
            name=f"{name}_state",
        ),
        sa.CheckConstraint(
            "(state IN ('active', 'claimed')) = (ended_at IS NULL)", name=f"{name}_live"
        ),
    )
    dialect = op.get_bind().dialect
    room = leave_room(missing.full_name(name), dialect.name)
    if room is not None:
        op.execute(room)
    if has_partial_indexes(dialect.name):
        missing.index(name, "one_live", ["job_id"], where="ended_at IS NULL", unique=True)
        missing.index(name, "live_owner", ["owner"], where="ended_at IS NULL")
    else:
        missing.index(name, "live_rows", ["ended_at", "owner"])


def _pass(missing: _Missing) -> None:
    missing.table(
        f"{missing.prefix}pass",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("finished_at", Instant, nullable=False),
        sa.Column("counts", LongText, nullable=False),
        sa.Column("worker", _NAME),
    )


class _Missing:
    """Makes what is not there yet, under the store's prefix and in its schema."""

    def __init__(self, store: Store, inspector: sa.Inspector) -> None:
        self.prefix = store.table_prefix
        self._store = store
        self._schema = store.schema
        self._inspector = inspector
        self._existing = frozenset(inspector.get_table_names(schema=store.schema))

    def table(self, name: str, *items: sa.schema.SchemaItem, **options: Any) -> None:
        if name not in self._existing:
            op.create_table(name, *items, schema=self._schema, **options, **TABLE_OPTIONS)
            return
        found = {column["name"] for column in self._inspector.get_columns(name, self._schema)}
        if found != {item.name for item in items if isinstance(item, sa.Column)}:
            raise SchemaMismatch(
                self._store.masked_url,
                None,
                revision,
                f"it has a table {name} that is not celery-lease's: set another "
                "lease_store_table_prefix, or rename that table",
            )

    def full_name(self, table: str) -> str:
        quote = op.get_bind().dialect.identifier_preparer.quote
        return quote(table) if self._schema is None else f"{quote(self._schema)}.{quote(table)}"

    def index(
        self,
        table: str,
        name: str,
        columns: list[str],
        *,
        where: str | None = None,
        unique: bool = False,
    ) -> None:
        if table in self._existing:
            indexes = self._inspector.get_indexes(table, self._schema)
            if f"{table}_{name}" in {index["name"] for index in indexes}:
                return
        options = {} if where is None else index_options(where)
        op.create_index(
            f"{table}_{name}", table, columns, schema=self._schema, unique=unique, **options
        )
