"""K3 and K15: the broker, or the way to it, is lost (B019, B025, B125)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from pytest_celery import CeleryTestSetup

from tests.faults.stage import LEASE, Stage
from tests.support.waiting import eventually


@pytest.fixture
def worker_options(worker_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two workers with room for two bodies each."""
    return [{**options, "concurrency": 2} for options in worker_options]


def test_a_broker_that_is_away_for_two_leases_costs_no_lease(
    celery_setup: CeleryTestSetup, cluster_stage: Stage
) -> None:
    """B025: renewals go to the database."""
    stage = cluster_stage
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    celery_setup.broker.kill()
    before = stage.attempts(sent.id)[0]["renewal_count"]

    # A renewal comes each third of a lease, ±10 %.
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= before + 6, timeout=4 * LEASE)
    celery_setup.broker.restart()
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    (attempt,) = stage.attempts(sent.id)
    held = attempt["ended_at"] - attempt["claimed_at"]
    assert held.total_seconds() > 1.5 * LEASE
    assert len(stage.ledger.read("begin", job=sent.id)) == 1
    eventually(lambda: stage.ledger.read("link"), timeout=30)
    assert [one["value"] for one in stage.ledger.read("link")] == [1]


def test_connections_that_are_killed_give_a_body_no_second_run(
    celery_setup: CeleryTestSetup, cluster_stage: Stage
) -> None:
    """B019: the first result is accepted, whatever became of the acknowledgement."""
    stage = cluster_stage
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)

    with redis.Redis.from_url(celery_setup.broker.config()["host_url"]) as client:
        for kind in ("normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)
    workers = [node.process for node in celery_setup.worker_cluster]
    for one in workers:
        one.wait_log("Connection to broker lost")
    # Whether the broker gives it out again at once or not: somebody does.
    stage.publish_again(sent.id)
    refused = f"lease.claim.refused job_id={sent.id}"
    eventually(lambda: any(refused in one.log() for one in workers), timeout=30)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.attempts(sent.id)) == 1
    assert len(stage.ledger.read("begin", job=sent.id)) == 1
    eventually(lambda: stage.ledger.read("link"), timeout=30)
    assert [one["value"] for one in stage.ledger.read("link")] == [1]


def test_a_broker_that_forgot_everything_gets_the_queued_jobs_again(
    celery_setup: CeleryTestSetup, cluster_stage: Stage
) -> None:
    """B125: what runs goes on; what was queued is sent again, once each."""
    stage = cluster_stage
    running = [stage.send({"wait": {"*": "go"}}).id for _ in range(4)]
    for one in running:
        stage.wait_begun(one)
    queued = [stage.send({}).id for _ in range(10)]

    with redis.Redis.from_url(celery_setup.broker.config()["host_url"]) as client:
        client.flushall()
    stage.ledger.open_gate("go")

    for one in running + queued:
        stage.assert_accepted_once(one, 1)
        assert len(stage.ledger.read("begin", job=one)) == 1
        assert stage.job(one)["lost_count"] == 0
    for one in running:
        assert stage.job(one)["dispatch_count"] == 1
    # Two messages of each worker's were reserved, not forgotten: those were sent once only.
    assert [stage.job(one)["dispatch_count"] for one in queued].count(2) >= len(queued) - 4
    assert max(stage.job(one)["dispatch_count"] for one in queued) == 2
