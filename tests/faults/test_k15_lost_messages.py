"""K15: messages that are lost, and messages that are merely late (B016, B022, B049, B125).

What is lost is sent again within a bound. What waits in a backlog is not: its messages would
multiply while no worker runs. ``tests/store/test_suspects.py`` has the rules one by one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Connection

from celery_lease.store.dialects import Instant
from tests.faults.brokers import QUEUE, Broker, RabbitBroker, RedisBroker
from tests.faults.stage import APP, INTERVAL, SLACK, Stage, counts
from tests.support import processes
from tests.support.servers import RabbitMQ, Valkey
from tests.support.waiting import eventually
from tests.support.workers import ROOT

#: Long enough that no lease ends on a busy machine: nobody dies here.
LONG_LEASE = 30.0
#: ``lease_queued_timeout`` of the stage: until a message is suspected.
TIMEOUT = 3.0
#: A probe is sent by the next pass, claimed, and what it has overtaken is sent by the one after
#: that; workers alone make a pass at least each 2.5 intervals.
FOUND = TIMEOUT + 2 * 2.5 * INTERVAL + 3 * SLACK


# --- late is not lost ---------------------------------------------------------------------------


def fill(stage: Stage, number: int) -> None:
    """Have so many jobs wait, each with its row, its recorded message and its message."""
    model = stage.send({}).id
    stage.execute(
        "INSERT INTO celery_lease_message SELECT new.id, version, "
        "replace(headers, :model, new.id), replace(properties, :model, new.id), "
        "body, content_type, content_encoding, exchange, "
        f"routing_key, created_at FROM celery_lease_message, {_NEW_IDS} WHERE job_id = :model",
        model=model,
        number=number - 1,
    )
    columns = [column for column in stage.job(model) if column not in ("id", "root_id")]
    listed = ", ".join(columns)
    stage.execute(
        f"INSERT INTO celery_lease_job (id, root_id, {listed}) SELECT new.id, new.id, {listed} "
        f"FROM celery_lease_job AS job, {_NEW_IDS} WHERE job.id = :model",
        model=model,
        number=number - 1,
    )
    with redis.Redis.from_url(stage.broker.url) as client:
        (message,) = client.lrange(QUEUE, 0, -1)
        tag = json.loads(message)["properties"]["delivery_tag"]
        with client.pipeline(transaction=False) as pipe:
            for n in range(1, number):
                copied = message.replace(model.encode(), f"job-{n:05}".encode())
                pipe.lpush(QUEUE, copied.replace(tag.encode(), str(uuid.uuid4()).encode()))
            pipe.execute()


_NEW_IDS = (
    "(SELECT 'job-' || lpad(n::text, 5, '0') AS id FROM generate_series(1, :number) n) AS new"
)


def pass_time(stage: Stage, seconds: float) -> None:
    """Move every instant of the waiting jobs into the past."""
    table = stage.extension.raw_store.tables.job
    moved = ", ".join(
        f"{one.name} = {one.name} - interval '{seconds} seconds'"
        for one in table.c
        if isinstance(one.type, Instant)
    )
    stage.execute(f"UPDATE celery_lease_job SET {moved} WHERE state = 'queued'")


def an_hour(stage: Stage) -> None:
    """Let an hour pass, a minute at a time; a second pass in a minute finds nothing to do."""
    for _ in range(62):
        pass_time(stage, 60.0)
        stage.run_pass()
        assert "dispatched" not in stage.run_pass()


@counts(1000, 10_000)
def test_an_hour_without_a_worker_does_not_multiply_a_backlog(
    count: int, make_stage: Callable[..., Stage]
) -> None:
    """B125: 10,000 waiting jobs have at most 1.1 messages each."""
    stage = make_stage(lease_queued_timeout=300.0, lease_reaper_interval=5.0)
    fill(stage, count)
    assert stage.broker.waiting() == stage.scalar("SELECT count(*) FROM celery_lease_message")

    an_hour(stage)

    sent = stage.scalar("SELECT sum(dispatch_count) FROM celery_lease_job WHERE state = 'queued'")
    assert stage.broker.waiting() == sent
    assert count < sent <= 1.1 * count
    # And the messages are good: what was probed is the same job.
    assert stage.scalar("SELECT max(dispatch_count) FROM celery_lease_job") == 2


def test_a_backlog_that_was_probed_runs_once_when_a_worker_comes(
    make_stage: Callable[..., Stage],
) -> None:
    """B125: the copies are refused at the claim, and no old copy tells that anything is lost."""
    stage = make_stage(lease_queued_timeout=300.0, lease_duration=LONG_LEASE)
    ids = [stage.send({}).id for _ in range(40)]
    an_hour(stage)
    sent = {one: stage.job(one)["dispatch_count"] for one in ids}
    assert stage.broker.waiting() == sum(sent.values()) <= 1.1 * len(ids)

    stage.worker(concurrency=2)

    for one in ids:
        assert_ran_once(stage, one)
    stage.wait_quiet()
    assert {one: stage.job(one)["dispatch_count"] for one in ids} == sent
    assert len(stage.ledger.read("begin")) == len(ids)


# --- lost is sent again -------------------------------------------------------------------------


def assert_ran_once(stage: Stage, job_id: str) -> None:
    stage.assert_accepted_once(job_id, 1)
    assert len(stage.attempts(job_id)) == 1
    assert len(stage.ledger.read("begin", job=job_id)) == 1
    assert stage.job(job_id)["lost_count"] == 0


def flush(broker: Broker, server: Any) -> None:
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()


def restart(broker: Broker, server: Any) -> None:
    server.restart(kill=True)


def purge(broker: Broker, server: Any) -> None:
    _amqp(broker, lambda channel: channel.queue_purge(QUEUE))


def delete(broker: Broker, server: Any) -> None:
    _amqp(broker, lambda channel: channel.queue_delete(QUEUE))


def _amqp(broker: Broker, act: Callable[[Any], object]) -> None:
    with Connection(broker.url) as connection:
        act(connection.default_channel)


@pytest.mark.parametrize(
    ("kind", "harm", "queued_count"),
    [(Valkey, flush, 100), (Valkey, restart, 20), (RabbitMQ, purge, 20), (RabbitMQ, delete, 20)],
    ids=["redis-flushall", "redis-restart", "rabbitmq-purge", "rabbitmq-delete"],
)
def test_what_the_broker_has_lost_is_sent_again_and_all_run_once(
    kind: Any,
    harm: Callable[[Broker, Any], None],
    queued_count: int,
    own_server: Callable[..., Any],
    make_stage: Callable[..., Stage],
) -> None:
    """B125: what runs goes on; each lost message is sent within ``FOUND``, and once."""
    server = own_server(kind)
    broker = RedisBroker(server.url) if kind is Valkey else RabbitBroker(server.url, server)
    stage = make_stage(broker=broker, lease_duration=LONG_LEASE)
    # One: of two, one may take a message beyond what it can run, that the other would wait for.
    stage.worker(concurrency=10)
    running = [stage.send({"wait": {"*": "go"}}).id for _ in range(10)]
    for one in running:
        stage.wait_begun(one)
    queued = [stage.send({}).id for _ in range(queued_count)]

    harm(broker, server)
    lost_at = stage.scalar("SELECT clock_timestamp()")
    stage.ledger.open_gate("go")

    for one in (*running, *queued):
        assert_ran_once(stage, one)
    jobs = [stage.job(one) for one in queued]
    # Ten were in the hands of the workers.
    again = [one for one in jobs if one["dispatch_count"] > 1]
    assert len(again) >= queued_count - 10
    assert max(one["dispatch_count"] for one in jobs) <= 3
    late = max((one["dispatched_at"] - lost_at).total_seconds() for one in again)
    assert late < FOUND
    assert {stage.job(one)["dispatch_count"] for one in running} == {1}


def test_a_queue_that_disappears_with_its_waiting_tasks_is_filled_again(
    own_server: Callable[..., Any], make_stage: Callable[..., Stage]
) -> None:
    """B016: all consumers are cut off together, and the auto-delete queue goes."""
    server = own_server(RabbitMQ)
    queue = {"exchange": QUEUE, "routing_key": QUEUE, "queue_auto_delete": True}
    stage = make_stage(
        broker=RabbitBroker(server.url, server),
        lease_duration=LONG_LEASE,
        task_queues={QUEUE: queue},
    )
    workers = stage.workers(2, concurrency=1)
    running = [stage.send({"wait": {"*": "go"}}).id for _ in range(2)]
    for one in running:
        stage.wait_begun(one)
    queued = [stage.send({}).id for _ in range(20)]
    # Two more are reserved.
    eventually(lambda: stage.broker.waiting() == len(queued) - 2)

    stage.broker.kill_connections()
    for one in workers:
        one.wait_log("onnection to broker lost")
    stage.ledger.open_gate("go")

    for one in (*running, *queued):
        assert_ran_once(stage, one)
    assert [stage.job(one)["dispatch_count"] for one in queued].count(2) >= len(queued) - 2


# --- online, and takes nothing ------------------------------------------------------------------


def doctor(stage: Stage) -> list[dict[str, Any]]:
    """Return what ``celery lease doctor`` finds."""
    env = {**os.environ, **{k: v for k, v in stage.env().items() if v is not None}}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "lease", "doctor", "--json"],
        check=False,
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=60,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_worker_that_is_online_and_takes_nothing_is_reported_and_gets_no_pile(
    make_stage: Callable[..., Stage],
) -> None:
    """B022, B046, B049: its child hangs; its messages are sent again, and few for the others."""
    stage = make_stage(lease_queued_timeout=300.0, lease_duration=LONG_LEASE)
    hung = stage.worker(concurrency=1, settings={"lease_reaper_in_worker": False})
    (child,) = hung.children()
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: processes.is_frozen(child))
    ids = [stage.send({}).id for _ in range(40)]
    eventually(lambda: stage.broker.unacknowledged() >= 1)

    an_hour(stage)

    told = [one for one in doctor(stage) if one["name"] == "unclaimed"]
    assert [(one["facts"]["queued"], one["severity"]) for one in told] == [(40, "error")]
    assert stage.broker.waiting() + stage.broker.unacknowledged() <= 1.1 * len(ids)
    stage.worker(concurrency=2)
    for one in ids:
        assert_ran_once(stage, one)
    os.kill(child, signal.SIGCONT)
    stage.wait_quiet()
    assert len(stage.ledger.read("begin")) == len(ids)
