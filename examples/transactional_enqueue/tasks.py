"""An order and the job that confirms it are one transaction."""

import sqlite3
from contextlib import closing
from pathlib import Path

from celery import Celery

from celery_lease import LeasedTask

DATABASE = "sqlite:///shop.sqlite3"  # a PostgreSQL or MySQL URL for several hosts

app = Celery("tasks", broker="filesystem://")
app.conf.lease_store_url = DATABASE  # the same database as the orders

# A broker that needs no server; with one of your own, leave this out.
Path("queue").mkdir(exist_ok=True)
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "queue",
    "polling_interval": 0.1,
}


@app.task(base=LeasedTask)
def confirm(order_id: int) -> None:
    """Confirm an order: its row is always there."""
    with closing(sqlite3.connect("shop.sqlite3")) as database:
        (item,) = database.execute("SELECT item FROM orders WHERE id = ?", (order_id,)).fetchone()
    with Path("confirmed.txt").open("a") as book:
        book.write(f"order {order_id}: {item}\n")
