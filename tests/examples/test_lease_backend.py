"""``examples/lease_backend``: a chord's results come from the store, with no other server."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = ROOT / "examples" / "lease_backend"


def test_the_results_are_those_of_its_readme(
    tmp_path: Path, start_worker: Callable[..., CeleryWorker]
) -> None:
    project = shutil.copytree(EXAMPLE, tmp_path / "lease_backend")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    start_worker("tasks", cwd=project, env=env, concurrency=2, lean=False)

    done = subprocess.run(
        [sys.executable, "ask.py"],
        cwd=project,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout in (EXAMPLE / "README.md").read_text()
    assert re.fullmatch(r"parts: \[.*\]\ntotal: 500500\n", done.stdout)
    with closing(sqlite3.connect(project / "lease.sqlite3")) as database:
        jobs = database.execute("SELECT state FROM celery_lease_job").fetchall()
        unleased = database.execute("SELECT status FROM celery_lease_result").fetchall()
        fired = database.execute("SELECT fired_at IS NOT NULL FROM celery_lease_chord").fetchall()
    assert jobs == [("succeeded",)] * 4
    assert unleased == [("SUCCESS",)]
    assert fired == [(1,)]
