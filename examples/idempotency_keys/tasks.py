"""An order is charged once, however often the button is pressed."""

import time
from pathlib import Path

from celery import Celery

from celery_lease import LeasedTask

app = Celery("tasks", broker="filesystem://")
app.conf.lease_store_url = "sqlite:///lease.sqlite3"  # a PostgreSQL or MySQL URL for several hosts

# A broker that needs no server; with one of your own, leave this out.
Path("queue").mkdir(exist_ok=True)
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "queue",
    "polling_interval": 0.1,
}


@app.task(base=LeasedTask, lease_idempotency_key="order-{order_id}")
def charge(order_id: int, cents: int) -> None:
    """Charge an order: submitted again, it is the job that there is."""
    time.sleep(1)  # the work
    with Path("charged.txt").open("a") as book:
        book.write(f"order {order_id}: {cents} cents\n")
