"""The soak itself, for half a minute: it harms, it recovers, and it finds nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import must_have
from tests.soak import report
from tests.soak.run import Plan, soak
from tests.support.servers import PostgreSQL, Valkey


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_short_soak_finds_no_violation(tmp_path: Path) -> None:
    for server in (Valkey, PostgreSQL):
        must_have(server)
    plan = Plan(minutes=0.2, seed=5, rate=6.0, pause=1.0, drain=180.0)

    done, seen, found = soak(plan)
    written = report.write(done, tmp_path)

    assert found == [], found
    assert sum(done["faults"].values()) >= 5, done["faults"]
    assert len(seen.promised) >= 20
    assert json.loads(written.read_text())["violations"] == 0
    assert "| redis | postgresql | 0.2 | 5 |" in (tmp_path / "index.md").read_text()
