"""A sum is counted in parts; the results, the chord and the leases are in one database."""

from pathlib import Path

from celery import Celery, chord

from celery_lease import LeasedTask

app = Celery("tasks", broker="filesystem://", backend="lease://")
app.conf.lease_store_url = "sqlite:///lease.sqlite3"  # a PostgreSQL or MySQL URL for several hosts

# A broker that needs no server; with one of your own, leave this out.
Path("queue").mkdir(exist_ok=True)
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "queue",
    "polling_interval": 0.1,
}


@app.task(base=LeasedTask)
def count(first: int, last: int) -> int:
    """Add the numbers from first to last."""
    return sum(range(first, last + 1))


@app.task
def total(parts: list[int]) -> int:
    """Add the parts; a task without a lease has its result there, too."""
    return sum(parts)


def all_of(last: int, parts: int = 4) -> chord:
    """Return the canvas that adds the numbers from 1 to last."""
    step = -(-last // parts)
    starts = range(1, last + 1, step)
    return chord([count.s(n, min(n + step - 1, last)) for n in starts], total.s())
