"""The demo: real workers, real kills, and a verdict that is computed (``celery lease demo``)."""

from celery_lease.demo.command import main

__all__ = ["main"]
