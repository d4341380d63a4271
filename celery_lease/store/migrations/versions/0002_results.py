"""The tables of ``result_backend = "lease://"``: results, groups, chords and their parts.

Frozen history, once released (see ``0001``).

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_lease.exceptions import SchemaMismatch
from celery_lease.store.dialects import TABLE_OPTIONS, Blob, Instant
from celery_lease.store.engine import Store

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the tables; on MySQL and MariaDB also those that a killed migration left to make."""
    context = op.get_context()
    store: Store = context.config.attributes["store"]  # type: ignore[union-attr]
    _table(
        store,
        "result",
        "stored_at",
        sa.Column("task_id", _NAME, primary_key=True),
        sa.Column("status", _NAME, nullable=False),
        sa.Column("meta", Blob),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("stored_at", Instant, nullable=False),
    )
    _table(
        store,
        "group",
        "stored_at",
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("result", Blob, nullable=False),
        sa.Column("stored_at", Instant, nullable=False),
    )
    _table(
        store,
        "chord",
        "created_at",
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("size", sa.Integer),
        sa.Column("header", Blob),
        sa.Column("claim_nonce", sa.String(64)),
        sa.Column("claimed_at", Instant),
        sa.Column("fired_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
    )
    _table(
        store,
        "chord_part",
        "stored_at",
        sa.Column("chord_id", _NAME, primary_key=True),
        sa.Column("task_id", _NAME, primary_key=True),
        sa.Column("is_added", sa.Boolean, nullable=False),
        sa.Column("position", sa.Integer),
        sa.Column("status", _NAME),
        sa.Column("result", Blob),
        sa.Column("stored_at", Instant, nullable=False),
    )


def _table(store: Store, name: str, aged_by: str, *columns: sa.Column[object]) -> None:
    """Make a table, and the index that its old rows are found by, where they are missing."""
    inspector = sa.inspect(op.get_bind())
    full = f"{store.table_prefix}{name}"
    index = f"{full}_{aged_by.removesuffix('_at')}"
    if not inspector.has_table(full, schema=store.schema):
        op.create_table(full, *columns, schema=store.schema, **TABLE_OPTIONS)
        found: set[str | None] = set()
    else:
        if {one["name"] for one in inspector.get_columns(full, store.schema)} != {
            column.name for column in columns
        }:
            raise SchemaMismatch(
                store.masked_url,
                down_revision,
                revision,
                f"it has a table {full} that is not celery-lease's: set another "
                "lease_store_table_prefix, or rename that table",
            )
        found = {one["name"] for one in inspector.get_indexes(full, schema=store.schema)}
    if index not in found:
        op.create_index(index, full, [aged_by], schema=store.schema)
