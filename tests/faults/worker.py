"""What ``celery -A tests.faults.worker`` runs: the app that the test described in a variable."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.faults.tasks import make_app

app = make_app(json.loads(os.environ["FAULTS_CONF"]), Path(os.environ["FAULTS_FOLDER"]))
