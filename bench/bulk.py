"""What many jobs of one call cost the caller, beside a group of plain tasks.

In this process, with a broker and no worker: milliseconds a job from the call to its return. The
ways take turns within a round, so that their ratio is of the same minute.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from celery import Celery, group

from bench.place import Place
from celery_lease import LeasedTask


def run(place: Place, *, jobs: int, rounds: int) -> dict[str, Any]:
    """Publish ``jobs`` messages by each way in each round; return milliseconds a job."""
    app = Celery("bulk", broker=place.valkey.url, set_as_current=False)
    app.conf.lease_store_url = place.fresh()
    ways = _ways(app)
    app.finalize()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        # Connections, statements and classes are made by the first call.
        way(1)
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.monotonic()
            way(jobs)
            found[name].append((time.monotonic() - started) * 1000 / jobs)
            place.redis.flushdb()
    app.close()
    return {
        "jobs": jobs,
        "rounds": rounds,
        "ways": [
            {
                "title": name,
                "ms": statistics.median(times),
                "ratio": statistics.median(
                    mine / plain for mine, plain in zip(times, found["a group"], strict=True)
                ),
            }
            for name, times in found.items()
        ],
    }


def _ways(app: Any) -> dict[str, Callable[[int], object]]:
    task = functools.partial(app.task, shared=False)

    @task(name="plain")
    def plain(number: int) -> None:
        """Never run."""

    @task(name="leased", base=LeasedTask)
    def leased(number: int) -> None:
        """Never run."""

    return {
        "a group": lambda count: group(plain.s(n) for n in range(count)).apply_async(),
        "leased, one by one": lambda count: [leased.delay(n) for n in range(count)],
        "leased, a group": lambda count: group(leased.s(n) for n in range(count)).apply_async(),
        "leased, submit_many": lambda count: leased.submit_many((n,) for n in range(count)),
    }
