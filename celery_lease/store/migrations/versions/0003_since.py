"""Two columns of a job: since when its message has been sent again, and where a resume began.

Frozen history, once released (see ``0001``).

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_lease.store.dialects import Instant
from celery_lease.store.engine import Store

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; on MySQL and MariaDB also the one that a killed migration left to add."""
    context = op.get_context()
    store: Store = context.config.attributes["store"]  # type: ignore[union-attr]
    job = f"{store.table_prefix}job"
    inspector = sa.inspect(op.get_bind())
    found = {one["name"] for one in inspector.get_columns(job, store.schema)}
    # Empty in the rows that are there: their gaps begin anew, and all their ends count.
    for column in (
        sa.Column("first_dispatched_at", Instant),
        sa.Column("resumed_token", sa.BigInteger),
    ):
        if column.name not in found:
            op.add_column(job, column, schema=store.schema)
