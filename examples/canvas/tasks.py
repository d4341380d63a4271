"""A chord whose parts take a while, and an errback that has nothing to do when a worker dies."""

import time
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
def count(first: int, last: int, seconds: float = 5.0) -> int:
    """Add the numbers from first to last, slowly."""
    print(f"counting from {first}", flush=True)
    time.sleep(seconds)  # the work
    return sum(range(first, last + 1))


@app.task(base=LeasedTask)
def total(parts: list[int]) -> int:
    """Add the parts: the body of the chord."""
    return sum(parts)


@app.task(base=LeasedTask)
def alarm(task_id: str) -> None:
    """Tell somebody that there will be no total."""
    print(f"no total: {task_id} failed", flush=True)


def all_of(last: int, parts: int = 3) -> chord:
    """Return the canvas that adds the numbers from 1 to last."""
    step = -(-last // parts)
    starts = range(1, last + 1, step)
    return chord(
        [count.s(n, min(n + step - 1, last)) for n in starts], total.s().on_error(alarm.s())
    )
