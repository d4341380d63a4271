"""K2: the broker hands out work that is still running, waiting, or done (B010 to B018)."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.brokers import Broker, RabbitBroker, RedisBroker
from tests.faults.stage import SLACK, Stage
from tests.support.servers import RabbitMQ
from tests.support.waiting import eventually

#: seconds after which the broker gives an unacknowledged message to somebody else
PATIENCE = 2.0


def impatient(broker: Broker) -> dict[str, Any]:
    """Return the settings under which a broker has ``PATIENCE``."""
    if isinstance(broker, RabbitBroker):
        # It is the server's setting.
        return {}
    return {
        "broker_transport_options": {
            "visibility_timeout": PATIENCE,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    }


@pytest.fixture
def impatient_rabbit(own_server: Callable[..., Any]) -> RabbitBroker:
    """A RabbitMQ whose ``consumer_timeout`` is short: it looks each second."""
    server = own_server(RabbitMQ, consumer_timeout=PATIENCE)
    return RabbitBroker(server.new_vhost(), server)


@pytest.fixture(params=["redis", "rabbitmq"])
def impatient_broker(request: pytest.FixtureRequest) -> Broker:
    """A broker that gives a message to somebody else after ``PATIENCE``."""
    if request.param == "redis":
        return RedisBroker(request.getfixturevalue("redis_url"))
    broker: RabbitBroker = request.getfixturevalue("impatient_rabbit")
    return broker


def assert_ran_once(stage: Stage, job_id: str) -> None:
    """Assert that one body ran, and that its outcome alone was told."""
    stage.assert_accepted_once(job_id, 1)
    assert len(stage.attempts(job_id)) == 1
    assert len(stage.ledger.read("begin", job=job_id)) == 1
    assert stage.published(job_id) == [("SUCCESS", 1)]


# --- acknowledged at the claim ------------------------------------------------------------------


def test_a_body_longer_than_the_brokers_patience_is_of_no_interest_to_it(
    impatient_broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B010, B015: its message is gone while it runs; nothing else on that worker is disturbed."""
    stage = make_stage(broker=impatient_broker, **impatient(impatient_broker))
    workers = stage.workers(2, concurrency=2)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    begun = stage.wait_begun(sent.id)
    eventually(lambda: impatient_broker.waiting() == impatient_broker.unacknowledged() == 0)

    others = []
    while time.monotonic() < begun["monotonic"] + 3 * PATIENCE:
        others.append(stage.send({}).id)
        stage.wait_settled(others[-1])
    assert impatient_broker.waiting() == impatient_broker.unacknowledged() == 0
    assert stage.attempts(sent.id)[0]["acknowledged_at"] is not None
    stage.ledger.open_gate("go")

    for one in (sent.id, *others):
        assert_ran_once(stage, one)
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]
    for worker in workers:
        assert worker.is_running
        assert "lease.claim.refused" not in worker.log()
        assert "onnection to broker lost" not in worker.log()


def test_what_the_broker_has_forgotten_is_recovered_all_the_same(
    impatient_broker: Broker,
    make_stage: Callable[..., Stage],
    folders: Callable[[], str],
) -> None:
    """B010, B015: the reaper alone owns it. The other worker is on another host."""
    stage = make_stage(broker=impatient_broker, **impatient(impatient_broker))
    dying = stage.worker(concurrency=1, settings={"lease_run_dir": folders()})
    sent = stage.send({"wait": {"1": "never"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    eventually(lambda: impatient_broker.waiting() == impatient_broker.unacknowledged() == 0)
    stage.worker(concurrency=1, settings={"lease_run_dir": folders()})

    dying.kill_group()

    stage.assert_accepted_once(sent.id, 2)
    assert stage.attempts(sent.id)[0]["state"] == "expired"
    assert [e["token"] for e in stage.ledger.read("begin")] == [1, 2]
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [2]


# --- acknowledged at the end, as with stock Celery ------------------------------------------------


def test_with_late_acknowledgement_a_message_given_out_again_is_refused(
    make_stage: Callable[..., Stage], redis_url: str
) -> None:
    """B010: it is acknowledged by its refusal, which names the owner."""
    stage = make_stage(lease_ack="late", **impatient(RedisBroker(redis_url)))
    workers = stage.workers(2, concurrency=2)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    begun = stage.wait_begun(sent.id)
    assert stage.broker.unacknowledged() == 1

    eventually(lambda: refusals("".join(w.log() for w in workers), sent.id), timeout=40)
    eventually(lambda: time.monotonic() > begun["monotonic"] + 3 * PATIENCE)
    owner = stage.attempts(sent.id)[0]["owner"]
    assert any(f"owner={owner}" in w.log() for w in workers)
    stage.ledger.open_gate("go")

    assert_ran_once(stage, sent.id)
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]


def test_with_late_acknowledgement_rabbitmq_ends_the_worker_and_not_the_job(
    impatient_rabbit: RabbitBroker, make_stage: Callable[..., Stage]
) -> None:
    """B015: Celery 5.7 is deaf from then on, and leaves with code 1 when its last body has ended.

    That body runs under its lease to the end; its message, given to another worker, is refused.
    """
    stage = make_stage(broker=impatient_rabbit, lease_ack="late")
    ending = stage.worker(concurrency=2)
    sent = stage.send({"wait": {"1": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    ending.wait_log("delivery acknowledgement on channel 1 timed out", timeout=30)
    other = stage.worker(concurrency=1)

    other.wait_log(f"lease.claim.refused job_id={sent.id}")
    stage.ledger.open_gate("go")

    assert ending.wait() == 1
    assert_ran_once(stage, sent.id)
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]


# --- copies ---------------------------------------------------------------------------------------


def test_a_message_that_is_there_twice_runs_its_body_once(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """Copies that come before, during and after the body are refused; B018: for ever after."""
    stage = make_stage(broker=broker)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.publish_again(sent.id)
    one = stage.worker(concurrency=2)
    stage.wait_begun(sent.id)
    other = stage.worker(concurrency=2)

    stage.publish_again(sent.id)
    eventually(lambda: refusals(one.log() + other.log(), sent.id) == 2)
    stage.ledger.open_gate("go")
    stage.assert_accepted_once(sent.id, 1)
    stage.publish_again(sent.id)
    eventually(lambda: refusals(one.log() + other.log(), sent.id) == 3)

    assert_ran_once(stage, sent.id)
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]


def test_copies_that_are_due_in_the_same_instant_are_one_attempt(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B011: twelve copies of one message with an ETA, in three workers."""
    stage = make_stage(broker=broker)
    workers = stage.workers(3, concurrency=4)
    sent = stage.signature({"wait": {"*": "go"}}).apply_async(countdown=2)
    for _ in range(11):
        stage.publish_again(sent.id)

    stage.wait_begun(sent.id)
    eventually(lambda: refusals("".join(w.log() for w in workers), sent.id) == 11, timeout=20)
    stage.ledger.open_gate("go")

    assert_ran_once(stage, sent.id)


def test_an_eta_beyond_the_visibility_timeout_is_one_attempt(
    make_stage: Callable[..., Stage], redis_url: str
) -> None:
    """B011: it waits in the worker unacknowledged, and is given out again and again."""
    stage = make_stage(**impatient(RedisBroker(redis_url)))
    stage.workers(2, concurrency=2)

    sent = stage.signature({}).apply_async(countdown=3 * PATIENCE)

    stage.assert_accepted_once(sent.id, 1)
    stage.wait_quiet()
    assert_ran_once(stage, sent.id)


def test_an_eta_beyond_the_consumer_timeout_ends_workers_and_is_one_attempt(
    impatient_rabbit: RabbitBroker, make_stage: Callable[..., Stage]
) -> None:
    """B015: nothing was claimed, so nothing was acknowledged; whoever is there in the end runs it.

    Without ``lease_defer_after``, which keeps such a message from leaving.
    """
    stage = make_stage(broker=impatient_rabbit)
    sent = stage.signature({}).apply_async(countdown=3 * PATIENCE)

    ended = []
    while stage.job(sent.id)["settled_at"] is None:
        worker = stage.worker(concurrency=1)
        eventually(
            lambda w=worker: not w.is_running or stage.job(sent.id)["settled_at"],  # type: ignore[misc]
            timeout=30,
        )
        ended.append(worker.exit_code)

    assert ended[-1] is None
    assert set(ended[:-1]) == {1}
    assert_ran_once(stage, sent.id)


def test_jobs_that_wait_in_a_worker_longer_than_the_brokers_patience_are_one_attempt_each(
    make_stage: Callable[..., Stage], redis_url: str
) -> None:
    """B012: they hold no lease while they wait; late copies find them done."""
    stage = make_stage(worker_prefetch_multiplier=4, **impatient(RedisBroker(redis_url)))
    stage.worker(concurrency=1)
    long = stage.send({"wait": {"*": "go"}})
    begun = stage.wait_begun(long.id)
    short = [stage.send({}).id for _ in range(3)]
    eventually(lambda: stage.broker.unacknowledged() == 3)
    other = stage.worker(concurrency=1, name="other", ready=False)

    eventually(lambda: time.monotonic() > begun["monotonic"] + 2 * PATIENCE)
    other.wait_ready()
    stage.ledger.open_gate("go")

    for one in (long.id, *short):
        assert_ran_once(stage, one)
    stage.wait_quiet()
    assert Counter(e["job"] for e in stage.ledger.read("begin")) == Counter([long.id, *short])


def test_a_second_runner_goes_on_from_the_checkpoint(
    make_stage: Callable[..., Stage],
) -> None:
    """B013: none beside the first, however often the message comes; then only what is left."""
    stage = make_stage()
    worker = stage.worker(concurrency=2)
    sent = stage.send({"items": 50, "pause": 25})
    begun = stage.wait_begun(sent.id)
    stage.publish_again(sent.id)
    eventually(lambda: refusals(worker.log(), sent.id) == 1)
    eventually(lambda: stage.attempts(sent.id)[0]["checkpoint"] == "25", timeout=2.0 + SLACK)

    os.kill(begun["pid"], signal.SIGKILL)

    stage.assert_accepted_once(sent.id, 2)
    assert [e["checkpoint"] for e in stage.ledger.read("begin")] == [None, 25]
    items = {token: [e["item"] for e in stage.ledger.read("item", token=token)] for token in (1, 2)}
    assert items == {1: list(range(25)), 2: list(range(25, 50))}


def test_a_retry_that_waits_longer_than_the_brokers_patience_is_one_more_attempt(
    make_stage: Callable[..., Stage], redis_url: str
) -> None:
    """B014: one row with one due time; what is delivered again meanwhile begins nothing."""
    stage = make_stage(worker_prefetch_multiplier=10, **impatient(RedisBroker(redis_url)))
    workers = stage.workers(2, concurrency=1)
    sent = stage.send({"then": {"1": "retry in 5 s"}})
    stage.wait_state(sent.id, "retry_wait")
    stage.publish_again(sent.id)

    stage.wait_settled(sent.id)
    stage.wait_quiet()
    first, second = stage.attempts(sent.id)
    assert (first["state"], second["state"]) == ("retried", "completed")
    assert (second["claimed_at"] - first["ended_at"]).total_seconds() >= 5.0 - 2.0
    assert [e["token"] for e in stage.ledger.read("begin")] == [1, 2]
    assert stage.job(sent.id)["lost_count"] == 0
    assert any("lease.claim.refused" in one.log() for one in workers)


def test_a_queue_that_vanished_with_its_worker_costs_no_job(
    amqp_url: str, rabbitmq: Any, make_stage: Callable[..., Stage]
) -> None:
    """B016: it was auto-delete; its messages went with the last consumer."""
    queue = {"exchange": "celery", "routing_key": "celery", "auto_delete": True}
    stage = make_stage(broker=RabbitBroker(amqp_url, rabbitmq), task_queues={"celery": queue})
    first = stage.worker(concurrency=1)
    ids = [stage.send({"wait": {"1": "go"}}).id for _ in range(6)]
    stage.wait_begun(ids[0])
    first.kill_group()
    eventually(lambda: stage.broker.waiting() + stage.broker.unacknowledged() == 0)

    stage.ledger.open_gate("go")
    stage.workers(2, concurrency=1)

    tokens = {one: 2 if one == ids[0] else 1 for one in ids}
    for one, token in tokens.items():
        stage.assert_accepted_once(one, token)


def refusals(log: str, job_id: str) -> int:
    return log.count(f"lease.claim.refused job_id={job_id}")
