"""The reaper as Celery knows it: the task ``celery_lease.reap`` and its beat entry.

The entry is added when the app is finalized, so the user's own ``beat_schedule`` stays
(celery-facts, section 10). Its message expires after one interval: passes do not pile up
behind long bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task

REAP = "celery_lease.reap"


def register(app: Any, run_pass: Callable[[], dict[str, int]]) -> Any:
    """Register the reaper's task with an app.

    Args:
        app: the Celery app.
        run_pass: makes one pass and returns its counts.
    """
    if REAP in app._tasks:  # noqa: SLF001  the property would finalize the app
        return app._tasks[REAP]  # noqa: SLF001

    def reap() -> dict[str, int]:
        """Give the jobs of vanished runners on; return what was done, by kind."""
        return run_pass()

    # Its own base: an app whose task class is LeasedTask must not lease its reaper. Not shared:
    # Celery would give it to every other app of the process, whose reaper it is not.
    return app.task(reap, name=REAP, base=Task, ignore_result=True, lazy=False, shared=False)


def schedule(app: Any, *, interval_seconds: float, queue: str | None) -> None:
    """Put the reaper into the beat schedule, beside the user's entries."""
    options: dict[str, Any] = {"expires": interval_seconds}
    if queue is not None:
        options["queue"] = queue
    app.add_periodic_task(interval_seconds, app.tasks[REAP].s(), name=REAP, **options)
