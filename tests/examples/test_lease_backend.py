"""``examples/lease_backend``: a chord's results come from the store, with no other server."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "lease_backend"


def test_the_results_are_those_of_its_readme(
    project: Path,
    env: dict[str, str],
    run: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    start_worker("tasks", cwd=project, env=env, concurrency=2, lean=False)

    said = run("ask.py")

    assert said in (EXAMPLE / "README.md").read_text()
    assert re.fullmatch(r"parts: \[.*\]\ntotal: 500500\n", said)
    with closing(sqlite3.connect(project / "lease.sqlite3")) as database:
        jobs = database.execute("SELECT state FROM celery_lease_job").fetchall()
        unleased = database.execute("SELECT status FROM celery_lease_result").fetchall()
        fired = database.execute("SELECT fired_at IS NOT NULL FROM celery_lease_chord").fetchall()
    assert jobs == [("succeeded",)] * 4
    assert unleased == [("SUCCESS",)]
    assert fired == [(1,)]
