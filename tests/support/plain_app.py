"""A Celery app without leases, for the tests of the harness: what stock Celery does."""

from __future__ import annotations

import os
import time

from celery import Celery

# Broker and result backend come from CELERY_BROKER_URL and CELERY_RESULT_BACKEND.
app = Celery("plain")
app.conf.broker_connection_retry_on_startup = True


@app.task  # type: ignore[untyped-decorator]
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


@app.task  # type: ignore[untyped-decorator]
def whoami() -> int:
    """Tell the process that runs this."""
    return os.getpid()


@app.task  # type: ignore[untyped-decorator]
def pause(seconds: float) -> None:
    """Take some time."""
    time.sleep(seconds)
