"""Tasks that are enqueued in a transaction with a row of a caller's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from celery_lease import LeasedTask

if TYPE_CHECKING:
    from celery import Celery

#: The caller's own table.
ORDERS = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.String(100), primary_key=True))


def add_enqueued_tasks(app: Celery, book: Any) -> None:
    """Add them to the app of these tests."""

    @app.task(name="e.order", base=LeasedTask)
    def order(order_id: str) -> int:
        """Say how many rows there are of an order: the caller's business."""
        engine = sa.create_engine(app.conf.lease_store_url, poolclass=NullPool)
        statement = sa.select(sa.func.count()).where(ORDERS.c.id == order_id)
        with engine.connect() as connection:
            count = int(connection.scalar(statement) or 0)
        book.note(order_id, f"saw {count}")
        return count

    @app.task(name="e.follows_up", base=LeasedTask)
    def follows_up(order_id: str) -> str:
        """Enqueue the next job from inside a body, with a row of its own."""
        engine = sa.create_engine(app.conf.lease_store_url, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(sa.insert(ORDERS).values(id=order_id))
            return str(app.tasks["e.order"].enqueue(connection, (order_id,)).id)
