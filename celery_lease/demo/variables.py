"""How a run's processes are told what they belong to: names of environment variables."""

from __future__ import annotations

FOLDER = "CELERY_LEASE_DEMO_FOLDER"
BROKER = "CELERY_LEASE_DEMO_BROKER"
PARENT = "CELERY_LEASE_DEMO_PARENT"
