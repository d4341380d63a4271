"""K13: the lease's database (B109, B070), and the amnesty after its outage."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.faults.stage import INTERVAL, LEASE, Stage
from tests.support.proxy import Proxy
from tests.support.servers import MariaDB, PostgreSQL
from tests.support.waiting import eventually


@pytest.mark.parametrize("kind", [PostgreSQL, MariaDB])
def test_a_database_restarted_in_mid_run_loses_nothing(
    kind: type[PostgreSQL | MariaDB],
    own_server: Callable[..., Any],
    make_stage: Callable[..., Stage],
) -> None:
    """B109: killed while passes and jobs are under way; workers and beat go on by themselves."""
    server = own_server(kind)
    stage = make_stage(store_url=server.url)
    worker, beat = stage.worker(concurrency=2), stage.beat()
    held = stage.send({"wait": {"*": "go"}, "check": True}, link=stage.note("link"))
    stage.wait_begun(held.id)
    sent = [stage.send({}).id for _ in range(20)]

    server.restart(kill=True)
    restarted = last_pass(stage)
    sent += [stage.send({}).id for _ in range(5)]
    eventually(lambda: (last_pass(stage) - restarted).total_seconds() > INTERVAL, timeout=20)
    stage.ledger.open_gate("go")

    for one in (held.id, *sent):
        stage.assert_accepted_once(one, 1)
        assert stage.job(one)["lost_count"] == 0
        assert len(stage.ledger.read("begin", job=one)) == 1
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert worker.is_running
    assert beat.is_running


def test_the_first_pass_after_an_outage_takes_no_live_job_away(
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    make_stage: Callable[..., Stage],
) -> None:
    """The amnesty: it comes before any renewal; live runners get time to renew, dead ones once."""
    proxy = start_proxy(postgresql.port)
    worker_settings = {
        "lease_store_url": proxy.url(postgresql_url),
        "lease_reaper_in_worker": False,
    }
    stage = make_stage(store_url=postgresql_url, worker_settings=worker_settings)
    workers = stage.workers(2, concurrency=2)
    ids = [stage.send({"wait": {"1": "go"}}).id for _ in range(4)]
    began = {one: stage.wait_begun(one) for one in ids}
    dying, alive = workers
    doomed = [one for one in ids if began[one]["pid"] in dying.children()]
    assert len(doomed) == 2
    stage.run_pass()

    proxy.cut()
    dying.kill_group()
    eventually(lambda: expired_count(stage) == 4, timeout=3 * LEASE)
    late = timedelta(seconds=3 * INTERVAL)
    eventually(lambda: stage.scalar("SELECT clock_timestamp()") > last_pass(stage) + late)
    assert stage.run_pass()["extended"] == 4
    proxy.heal()
    eventually(lambda: expired_count(stage) == 2, timeout=3 * LEASE)
    # The two that are over for the second time are given on, however late this pass is.
    eventually(lambda: stage.scalar("SELECT clock_timestamp()") > last_pass(stage) + late)
    assert stage.run_pass()["expired"] == 2
    stage.ledger.open_gate("go")

    for one in ids:
        token = 2 if one in doomed else 1
        stage.assert_accepted_once(one, token)
        assert stage.job(one)["lost_count"] == token - 1
        assert len(stage.ledger.read("begin", job=one)) == token
    assert alive.is_running


def expired_count(stage: Stage) -> int:
    query = "ended_at IS NULL AND lease_expires_at < clock_timestamp()"
    return len(stage.rows("attempt", query))


def last_pass(stage: Stage) -> Any:
    (row,) = stage.rows("pass")
    return row["finished_at"]
