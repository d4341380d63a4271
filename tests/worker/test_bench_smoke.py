"""The measurements of ``bench/`` run, and a job costs the statements that it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import must_have
from tests.support.servers import PostgreSQL, Valkey
from tests.support.workers import ROOT


def bench(folder: Path, *options: str) -> Any:
    """Run a bench and return its results."""
    must_have(PostgreSQL)
    must_have(Valkey)
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", *options, "--folder", str(folder)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "latest.json").read_text())


def test_a_quick_bench_runs_and_a_job_is_submitted_by_one_statement_and_run_by_two(tmp_path: Path):
    sizes = ("--jobs", "50", "--history", "500", "--systems", "lease")
    results = bench(tmp_path, *sizes, "--parts", "throughput,bulk,beat,past")

    (run,) = results["runs"]
    assert "celery-lease, Redis results" in (tmp_path / "latest.md").read_text()
    if "pg_stat_statements" in results["counted_by"].partition(":")[0]:
        assert (run["enqueue_statements"], run["run_statements"]) == (1, 2)
        assert results["beat"][-1]["statements_per_beat"] == 1
        assert results["beat"][-1]["hot_share"] >= 0.9


@pytest.mark.long
@pytest.mark.timeout(170)
def test_the_recovery_from_each_end_of_a_runner_is_measured(tmp_path: Path):
    results = bench(tmp_path, "--parts", "recovery", "--kills", "1")

    assert [len(way["seconds"]) for way in results["recovery"]] == [1, 1, 1, 1]
    assert "SIGKILL to the child" in (tmp_path / "latest.md").read_text()
