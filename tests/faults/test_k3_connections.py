"""K3 and K15: the broker, or the way to it, is lost (B019 to B025, B125)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from pytest_celery import CeleryTestSetup

from tests.faults.brokers import Broker, RabbitBroker, RedisBroker
from tests.faults.stage import LEASE, Stage
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ, Valkey
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker


@pytest.fixture
def worker_options(worker_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two workers with room for two bodies each."""
    return [{**options, "concurrency": 2} for options in worker_options]


@pytest.fixture(params=[Valkey, RabbitMQ], ids=["redis", "rabbitmq"])
def server(
    request: pytest.FixtureRequest, own_server: Callable[..., Valkey | RabbitMQ]
) -> Valkey | RabbitMQ:
    """A server that may be killed. The first kind comes back without its data."""
    return own_server(request.param)


def broker_of(server: Valkey | RabbitMQ) -> Broker:
    """Return the broker on a server of ours."""
    if isinstance(server, Valkey):
        return RedisBroker(server.url)
    return RabbitBroker(server.url, server)


def assert_ran_once(stage: Stage, job_id: str) -> None:
    """Assert that one body ran, under one lease, and that nobody lost it."""
    stage.assert_accepted_once(job_id, 1)
    assert len(stage.attempts(job_id)) == 1
    assert len(stage.ledger.read("begin", job=job_id)) == 1
    assert stage.job(job_id)["lost_count"] == 0


def assert_linked_once(stage: Stage, value: int = 1) -> None:
    """Assert that the link was called once."""
    eventually(lambda: stage.ledger.read("link"), timeout=30)
    assert [one["value"] for one in stage.ledger.read("link")] == [value]


def assert_each_serves(stage: Stage, workers: list[CeleryWorker]) -> None:
    """Assert that every worker takes new jobs: the broker gives them out in turn."""
    serving: set[str] = set()

    def all_have() -> bool:
        sent = stage.send({})
        assert_ran_once(stage, sent.id)
        serving.add(stage.attempts(sent.id)[0]["worker"])
        return serving == {one.nodename for one in workers}

    eventually(all_have, timeout=30, what=lambda: f"only {serving} took anything")


def living(workers: list[CeleryWorker]) -> list[CeleryWorker]:
    """Return the workers that go on.

    kombu 5.7 cannot put a reserved message back when Redis is gone, and that ends the worker, once
    its bodies have ended: a supervisor's business, and no job's.
    """
    ended = [one for one in workers if "Unrecoverable error" in one.log()]
    for one in ended:
        assert "'NoneType' object has no attribute 'hostname'" in one.log()
    return [one for one in workers if one not in ended]


@pytest.mark.parametrize("cancels", [False, True], ids=["goes on", "cancels"])
def test_connections_that_are_killed_give_a_body_no_second_run(
    cancels: Any, broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B019, B021: what was acknowledged is not cancelled, whatever Celery is told to do."""
    stage = make_stage(broker=broker, worker_cancel_long_running_tasks_on_connection_loss=cancels)
    workers = stage.workers(2, concurrency=2)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    eventually(lambda: broker.waiting() == broker.unacknowledged() == 0)

    broker.kill_connections()
    for one in workers:
        one.wait_log("onnection to broker lost")
    # Whether the broker gives it out again or not: somebody does.
    stage.publish_again(sent.id)
    refused = f"lease.claim.refused job_id={sent.id}"
    eventually(lambda: any(refused in one.log() for one in workers), timeout=30)
    stage.ledger.open_gate("go")

    assert_ran_once(stage, sent.id)
    assert_linked_once(stage)
    assert_each_serves(stage, workers)


def test_a_late_acknowledged_body_that_celery_cancels_is_given_back(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B021: released, which is neither failed nor counted; the main process lives."""
    stage = make_stage(
        broker=broker,
        lease_ack="late",
        lease_duration=60.0,
        worker_cancel_long_running_tasks_on_connection_loss=True,
    )
    worker = stage.worker(concurrency=2)
    sent = stage.send({"wait": {"1": "never"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)

    broker.kill_connections()

    stage.assert_accepted_once(sent.id, 2)
    first, _ = stage.attempts(sent.id)
    assert (first["state"], stage.job(sent.id)["lost_count"]) == ("released", 0), first
    assert_linked_once(stage, 2)
    assert worker.is_running


def test_a_broker_that_is_away_for_three_leases_costs_no_lease(
    server: Valkey | RabbitMQ, make_stage: Callable[..., Stage]
) -> None:
    """B025: renewals go to the database. What it forgot is sent again."""
    stage = make_stage(broker=broker_of(server))
    workers = stage.workers(2, concurrency=2)
    running = [stage.send({"wait": {"*": "go"}}, link=stage.note("link")).id]
    running += [stage.send({"wait": {"*": "go"}}).id for _ in range(3)]
    for one in running:
        stage.wait_begun(one)
    queued = [stage.send({}).id for _ in range(3)]

    server.kill()
    before = {one: stage.attempts(one)[0]["renewal_count"] for one in running}
    # A renewal comes each third of a lease, ±10 %.
    eventually(
        lambda: all(stage.attempts(one)[0]["renewal_count"] >= before[one] + 9 for one in running),
        timeout=5 * LEASE,
    )
    server.start()
    workers = living(workers) or [stage.worker(concurrency=2)]
    stage.ledger.open_gate("go")

    for one in (*running, *queued):
        assert_ran_once(stage, one)
    assert_linked_once(stage)
    assert_each_serves(stage, workers)


def test_a_broker_restarted_twice_leaves_no_worker_deaf(
    server: Valkey | RabbitMQ, make_stage: Callable[..., Stage]
) -> None:
    """B022."""
    stage = make_stage(broker=broker_of(server))
    workers = stage.workers(2, concurrency=2)
    stage.assert_accepted_once(stage.send({}).id, 1)

    server.restart(kill=True)
    server.restart(kill=True)
    ids = [stage.send({}).id for _ in range(10)]

    for one in ids:
        assert_ran_once(stage, one)
    # No pile of copies of what was late.
    assert max(stage.job(one)["dispatch_count"] for one in ids) <= 3
    assert_each_serves(stage, workers)


@pytest.mark.parametrize("ack", ["claim", "late"])
def test_a_way_to_the_broker_that_swallows_everything_costs_no_second_run(
    ack: str,
    broker: Broker,
    make_stage: Callable[..., Stage],
    start_proxy: Callable[[int], Proxy],
) -> None:
    """B023, B024: no reset is seen while the body runs and ends; later the connection breaks."""
    (port,) = re.findall(r":(\d+)/", broker.url)
    proxy = start_proxy(int(port))
    stage = make_stage(
        broker=broker, lease_ack=ack, worker_settings={"broker_url": proxy.url(broker.url)}
    )
    worker = stage.worker(concurrency=2)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    begun = stage.wait_begun(sent.id)
    eventually(lambda: broker.unacknowledged() == (ack == "late"))

    proxy.stall()
    eventually(lambda: time.monotonic() > begun["monotonic"] + 2 * LEASE)
    stage.ledger.open_gate("go")
    # The store is another way.
    stage.wait_state(sent.id, "succeeded")
    queued = stage.send({}).id
    proxy.cut()
    proxy.heal()

    for one in (sent.id, queued):
        assert_ran_once(stage, one)
    assert_linked_once(stage)
    assert worker.is_running


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
