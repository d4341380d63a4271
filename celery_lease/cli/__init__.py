"""``celery -A proj lease ...``: the commands for people who run jobs (entry point ``lease``)."""

from celery_lease.cli.group import lease

__all__ = ["lease"]
