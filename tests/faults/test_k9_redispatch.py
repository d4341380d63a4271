"""K9: what a re-send must keep (B071, B072: ``tests/worker/test_redispatch.py``), and B076."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.stage import INTERVAL, LEASE, SLACK, Stage
from tests.support.servers import PostgreSQL
from tests.support.waiting import eventually

JOBS = 6
#: A pass that comes late extends what it finds ended, once; the next ones expire it.
RECOVERED = 2 * LEASE + 2 * 2.5 * INTERVAL + 3 * SLACK


@pytest.mark.parametrize("first", ["database", "workers"])
def test_after_a_restart_of_the_whole_platform_every_running_job_is_recovered(
    first: str,
    own_server: Callable[..., Any],
    make_stage: Callable[..., Stage],
    folders: Callable[[], str],
) -> None:
    """B076: in batches, whatever the result backend says: STARTED of these, SUCCESS of another."""
    server = own_server(PostgreSQL)
    stage = make_stage(store_url=server.url, lease_reaper_batch=2, task_track_started=True)
    # On another host: no owner file tells.
    workers = stage.workers(2, concurrency=3, settings={"lease_run_dir": folders()})
    beat = stage.beat()
    done = stage.send({}).id
    stage.assert_accepted_once(done, 1)
    ids = [stage.send({"wait": {"1": "never"}}, link=stage.note("link")).id for _ in range(JOBS)]
    for one in ids:
        stage.wait_begun(one)
        eventually(lambda one=one: stage.result(one).status == "STARTED")

    # The database first: a main process that outlives its children by a moment would tell.
    server.kill()
    for process in (beat, *workers):
        process.kill_group()
    down_since = time.monotonic()
    eventually(lambda: time.monotonic() > down_since + 3 * LEASE, timeout=5 * LEASE)
    settings = {"lease_run_dir": folders()}
    if first == "database":
        server.start()
        stage.worker(concurrency=3, settings=settings)
    else:
        stage.worker(concurrency=3, settings=settings)
        server.start()
    up_at = stage.scalar("SELECT clock_timestamp()")

    for one in ids:
        stage.assert_accepted_once(one, 2)
        assert stage.attempts(one)[0]["state"] == "expired"
        assert stage.job(one)["lost_count"] == 1
        assert len(stage.ledger.read("begin", job=one)) == 2
        ended_at = stage.attempts(one)[0]["ended_at"]
        assert (ended_at - up_at).total_seconds() < RECOVERED
    assert sorted(one["value"] for one in stage.ledger.read("link")) == [2] * JOBS
    # What was done before is left alone.
    assert len(stage.attempts(done)) == 1
    assert stage.job(done)["dispatch_count"] == 1
