"""Tasks whose options cannot work."""

from __future__ import annotations

from celery_lease import LeasedTask
from tests.worker.apps.leased import app


@app.task(name="wrong.values", base=LeasedTask, lease_max_attempts=0)
def wrong_values() -> None:
    """Do nothing."""


@app.task(name="wrong.together", base=LeasedTask, lease_duration=10, lease_heartbeat_interval=9)
def wrong_together() -> None:
    """Do nothing."""
