"""What ``celery -A tests.soak.worker`` runs: the app that the soak described in a variable."""

from __future__ import annotations

import json
import os

from tests.soak.tasks import make_app

app = make_app(json.loads(os.environ["SOAK_CONF"]))
