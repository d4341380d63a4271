"""The app as a worker or beat process finds it: made from the environment."""

from __future__ import annotations

import json
import os

from tests.worker.apps.tasks import make_app

app = make_app(
    broker=os.environ["LEASE_TEST_BROKER"],
    backend=os.environ.get("LEASE_TEST_BACKEND"),
    store=os.environ["LEASE_TEST_STORE"],
    ledger=os.environ["LEASE_TEST_LEDGER"],
    **json.loads(os.environ.get("LEASE_TEST_CONF", "{}")),
)
