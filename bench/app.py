"""The Celery app under measurement; which system it is, the environment says.

Imported by the worker, by ``enqueue`` and by ``single``. Its body is a no-op that leaves a mark:
eight bytes, the monotonic clock in nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from celery import Celery, Task

from bench.systems import SYSTEMS

SYSTEM = SYSTEMS[os.environ["BENCH_SYSTEM"]]
MARK = struct.Struct("<q")

app = Celery("bench")
app.conf.update(
    broker_url=os.environ["BENCH_BROKER"],
    broker_connection_retry_on_startup=True,
    task_ignore_result=SYSTEM.results is None,
    result_backend={
        None: None,
        "redis": os.environ["BENCH_BROKER"],
        "sql": "db+" + os.environ["BENCH_DATABASE"],
    }[SYSTEM.results],
)
if SYSTEM.is_leased:
    from celery_lease import LeasedTask

    app.conf.lease_store_url = os.environ["BENCH_DATABASE"]
    if SYSTEM.prepares:
        app.conf.lease_store_engine_options = {"connect_args": {"prepare_threshold": 5}}
    base: type[Task] = LeasedTask
else:
    base = Task
if "BENCH_SQL_EVENTS" in os.environ:
    from bench.counting import count_by_events

    count_by_events(Path(os.environ["BENCH_SQL_EVENTS"]))

_marks: int | None = None


@app.task(base=base, acks_late=SYSTEM.acks_late)
def noop(number: int) -> int:
    """Leave a mark; return the argument."""
    global _marks  # noqa: PLW0603  opened once a process
    if _marks is None:
        _marks = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND)
    os.write(_marks, MARK.pack(time.monotonic_ns()))
    return number
