"""An app whose schedule is assigned after it was finalized."""

from __future__ import annotations

from tests.worker.apps.leased import app

app.finalize()
app.conf.beat_schedule = {"mine": {"task": "t.add", "schedule": 1.0, "args": [1, 2]}}
