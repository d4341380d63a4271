"""Jobs that are not due yet stay in the store: what that spares broker and workers.

B011, B014, B015 (K2), B031 (K4), B037 (K5), B073, B074 (K9).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from tests.faults.brokers import Broker, RabbitBroker
from tests.faults.stage import INTERVAL, SLACK, Stage, counts
from tests.support.waiting import eventually, never
from tests.support.workers import CeleryWorker

HOUR = 3600.0
EMPTY = {"lease_defer_after": 0}


def resident_kilobytes(worker: CeleryWorker) -> int:
    """Return the memory of a worker's main process and its children."""
    total = 0
    for pid in (worker.pid, *worker.children()):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(rollup.split("Pss:")[1].split()[0])
    return total


@counts(5_000, 100_000)
def test_many_jobs_that_are_not_due_cost_a_worker_no_memory(
    count: int, make_stage: Callable[..., Stage]
) -> None:
    """B031: none is with the broker or in the worker, and those that are due are sent."""
    stage = make_stage(lease_defer_precision=0.5, lease_reaper_limit=200)
    worker = stage.worker(concurrency=1)
    sent = stage.signature({}, name="x" * 1_000).apply_async(countdown=HOUR)
    stage.assert_accepted_once(stage.send({}).id, 1)
    passes = "SELECT finished_at FROM celery_lease_pass"
    first = eventually(lambda: stage.scalar(passes), timeout=20)
    eventually(lambda: stage.scalar(passes) != first, timeout=20)
    before = resident_kilobytes(worker)

    stage.multiply(sent.id, count - 1)
    seen = stage.scalar(passes)
    for _ in range(3):
        seen = eventually(
            lambda seen=seen: (now := stage.scalar(passes)) != seen and now,  # type: ignore[misc]
            timeout=60,
        )

    assert resident_kilobytes(worker) - before <= 4_000
    assert stage.broker.waiting() + stage.broker.unacknowledged() == 0
    assert (
        stage.scalar("SELECT count(*) FROM celery_lease_job WHERE dispatched_at IS NULL") == count
    )
    due = [f"{sent.id}-{number}" for number in range(1, 6)]
    stage.execute(
        "UPDATE celery_lease_job SET available_at = clock_timestamp() WHERE id = ANY(:due)", due=due
    )
    for one in due:
        stage.wait_begun(one)


def test_a_delay_beyond_the_brokers_patience_is_not_the_brokers(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B011, B014, B015: it has no message that it could give out again, nor a channel to close."""
    stage = make_stage(broker=broker, lease_defer_after=1.0, lease_defer_precision=0.2)
    workers = stage.workers(2, concurrency=2)
    delayed = stage.signature({}).apply_async(countdown=3)
    retried = stage.send({"then": {"1": "retry in 5 s"}})
    stage.wait_state(retried.id, "retry_wait")
    eventually(lambda: stage.broker.waiting() + stage.broker.unacknowledged() == 0)

    never(
        lambda: (
            stage.job(delayed.id)["state"] == "scheduled"
            and stage.broker.waiting() + stage.broker.unacknowledged()
        ),
        during=1.5,
    )

    stage.assert_accepted_once(delayed.id, 1)
    stage.wait_settled(retried.id)
    assert [a["state"] for a in stage.attempts(retried.id)] == ["retried", "completed"]
    for one, number in ((delayed.id, 1), (retried.id, 2)):
        job = stage.job(one)
        assert job["dispatch_count"] == number
        waited = stage.attempts(one)[-1]["claimed_at"] - job["available_at"]
        assert 0 <= waited.total_seconds() <= 0.2 + SLACK
    assert not any("lease.claim.refused" in one.log() for one in workers)


def test_a_job_that_is_due_while_all_workers_are_stopped_runs_when_one_is_back(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B037: its due time is in the store, whichever worker was stopped meanwhile."""
    stage = make_stage(broker=broker, **EMPTY)
    stopped = stage.worker(concurrency=1)
    waiting = [stage.signature({}).apply_async(countdown=1).id for _ in range(5)]
    assert stopped.stop() == 0
    late = "SELECT bool_and(available_at < clock_timestamp()) FROM celery_lease_job"
    eventually(lambda: stage.scalar(late))

    stage.worker(concurrency=1)

    for one in waiting:
        stage.assert_accepted_once(one, 1)


def test_a_retry_under_late_acknowledgement_frees_its_worker(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B074: one process, one message at a time; the one that retries is not in the way."""
    stage = make_stage(broker=broker, lease_ack="late", **EMPTY)
    stage.worker(concurrency=1)
    retried = stage.send({"then": {"1": "retry in 5 s"}})
    stage.wait_state(retried.id, "retry_wait")

    other = stage.send({})

    stage.assert_accepted_once(other.id, 1)
    assert stage.job(retried.id)["state"] == "retry_wait"
    stage.wait_settled(retried.id)
    assert [a["state"] for a in stage.attempts(retried.id)] == ["retried", "completed"]
    stage.wait_quiet()


# --- RabbitMQ's own delays ------------------------------------------------------------------------


@pytest.fixture
def quorum(rabbitmq: Any, amqp_url: str, make_stage: Callable[..., Stage]) -> Callable[..., Stage]:
    """Make a stage with a quorum queue, where Celery has RabbitMQ delay what has an ETA."""
    arguments = {"x-queue-type": "quorum"}

    def make(**settings: Any) -> Stage:
        stage = make_stage(
            broker=RabbitBroker(amqp_url, rabbitmq),
            task_default_queue="celery",
            task_default_exchange="work",
            task_default_exchange_type="topic",
            task_default_routing_key="work.key",
            task_default_queue_type="quorum",
            worker_detect_quorum_queues=True,
            **settings,
        )
        queue = Queue(
            "celery", Exchange("work", "topic"), routing_key="work.key", queue_arguments=arguments
        )
        # As a worker does when it starts.
        with stage.app.connection_for_write() as connection:
            declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
            queue(connection).declare()
            bind_queue_to_native_delayed_delivery_exchange(connection, queue)
        return stage

    return make


def test_a_job_that_waited_in_the_store_is_not_delayed_by_the_broker_again(
    quorum: Callable[..., Stage],
) -> None:
    stage = quorum(lease_defer_after=1.0)
    sent = stage.signature({"then": {"1": "retry in 5 s"}}).apply_async(countdown=HOUR)
    [message] = stage.rows("message")
    assert (message["exchange"], message["routing_key"]) == ("work", "work.key")
    assert stage.job(sent.id)["queue"] == "celery"
    stage.execute("UPDATE celery_lease_job SET available_at = clock_timestamp()")

    stage.worker(concurrency=1)

    stage.wait_settled(sent.id)
    assert [a["state"] for a in stage.attempts(sent.id)] == ["retried", "completed"]
    assert stage.job(sent.id)["dispatch_count"] == 2


def test_a_delayed_retry_that_the_broker_drops_is_sent_again_and_is_due(
    quorum: Callable[..., Stage],
) -> None:
    """B073: its row has its due time, and its message nothing of the way it came."""
    stage = quorum(lease_defer_after=HOUR)
    worker = stage.worker(concurrency=1)
    # The second delay of one message: what Celery takes from the first must not come along.
    sent = stage.signature({"then": {"*": "retry in 5 s"}}).apply_async(countdown=2)
    stage.wait_begun(sent.id)
    stage.wait_state(sent.id, "retry_wait")
    worker.kill_group()
    # It is in RabbitMQ's delaying queues, whence it is dropped by hand.
    drop_delayed(stage)
    newest = stage.rows("message")[-1]
    assert (newest["exchange"], newest["routing_key"]) == ("work", "work.key")
    assert "x-death" not in json.loads(newest["headers"])
    stage.execute(
        "UPDATE celery_lease_job SET available_at = clock_timestamp() - interval '10 s', "
        "dispatched_at = clock_timestamp() - interval '10 s'"
    )
    stage.worker(concurrency=1)

    # Unclaimed for longer than lease_queued_timeout; then at once, not after another delay.
    stage.wait_begun(sent.id, 2, timeout=2.5 * INTERVAL + 3 + 4.0)


def drop_delayed(stage: Stage) -> None:
    """Take every message out of the queues in which RabbitMQ delays them."""
    with stage.app.connection_for_write() as connection:
        channel = connection.default_channel
        dropped = sum(channel.queue_purge(f"celery_delayed_{level}") for level in range(28))
    assert dropped >= 1
