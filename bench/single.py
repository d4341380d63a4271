"""``python -m bench.single JOBS``: single jobs on an idle worker, in milliseconds.

*start*: the enqueue call → the body has run. *done*: → the result is where the user's results go
(None without results). Asked every 0.3 ms.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import redis
from sqlalchemy import make_url

from bench.app import MARK, SYSTEM, noop

POLL_SECONDS = 0.0003
#: The pause between two jobs: long enough for a worker to be idle again.
PAUSE_SECONDS = 0.03
GIVE_UP_SECONDS = 10.0


def main() -> None:
    """Measure."""
    marks = Path(os.environ["BENCH_MARKS"])
    is_done = _asker()
    rows = []
    for number in range(int(sys.argv[1])):
        size = marks.stat().st_size
        sent = time.monotonic()
        job_id = noop.delay(number).id
        _wait(lambda size=size: marks.stat().st_size > size)  # type: ignore[misc]
        started = _last_mark(marks)
        done = None
        if is_done is not None:
            _wait(lambda job_id=job_id: is_done(job_id))  # type: ignore[misc]
            done = (time.monotonic() - sent) * 1000
        rows.append({"start": (started - sent) * 1000, "done": done})
        time.sleep(PAUSE_SECONDS)
    print(json.dumps(rows), flush=True)
    os._exit(0)


def _asker() -> Callable[[str], bool] | None:
    if SYSTEM.results == "redis":
        client = redis.Redis.from_url(os.environ["BENCH_BROKER"])
        return lambda job_id: bool(client.exists(f"celery-task-meta-{job_id}"))
    if SYSTEM.results == "sql":
        url = make_url(os.environ["BENCH_DATABASE"])
        connection = psycopg.connect(
            host=url.host, port=url.port, user=url.username, dbname=url.database, autocommit=True
        )
        ask = "SELECT 1 FROM celery_taskmeta WHERE task_id = %s AND status = 'SUCCESS'"
        return lambda job_id: connection.execute(ask, (job_id,)).fetchone() is not None
    return None


def _wait(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + GIVE_UP_SECONDS
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError("a single job was not done in time")
        time.sleep(POLL_SECONDS)


def _last_mark(marks: Path) -> float:
    with marks.open("rb") as file:
        file.seek(-MARK.size, os.SEEK_END)
        return float(MARK.unpack(file.read())[0]) / 1e9


if __name__ == "__main__":
    main()
