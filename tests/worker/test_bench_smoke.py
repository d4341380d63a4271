"""The measurements of ``bench/`` run, and a job costs the statements that it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import must_have
from tests.support.servers import PostgreSQL, Valkey
from tests.support.workers import ROOT


def test_a_quick_bench_runs_and_a_job_is_submitted_by_one_statement_and_run_by_two(tmp_path: Path):
    must_have(PostgreSQL)
    must_have(Valkey)
    sizes = ("--quick", "--jobs", "50", "--history", "500", "--systems", "lease")

    done = subprocess.run(
        [sys.executable, "-m", "bench", *sizes, "--folder", str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "latest.json").read_text())
    (run,) = results["runs"]
    assert "celery-lease, Redis results" in (tmp_path / "latest.md").read_text()
    if "pg_stat_statements" in results["counted_by"].partition(":")[0]:
        assert (run["enqueue_statements"], run["run_statements"]) == (1, 2)
        assert results["beat"][-1]["statements_per_beat"] == 1
        assert results["beat"][-1]["hot_share"] >= 0.9
