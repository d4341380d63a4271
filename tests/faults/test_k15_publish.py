"""K15: publishing to a broker that is away, slow, full or silent (B122, B124).

The caller waits no longer than ``lease_publish_timeout``; the store has the job, and the reaper
sends it when the broker is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
from celery import chain
from kombu.exceptions import OperationalError

from celery_lease import publishing
from tests.faults.brokers import Broker, RabbitBroker
from tests.faults.stage import INTERVAL, SLACK, Stage
from tests.faults.test_k2_delivered_again import refusals
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.servers import External
from tests.support.waiting import eventually

#: seconds; half of it is what one step may take
TIMEOUT = 2.0


class Cable(NamedTuple):
    """A stage whose own publishes go through a proxy; its workers are at the broker itself."""

    stage: Stage
    proxy: Proxy


@pytest.fixture
def make_cable(
    request: pytest.FixtureRequest,
    broker: Broker,
    make_stage: Callable[..., Stage],
    start_proxy: Callable[[int], Proxy],
) -> Callable[..., Cable]:
    """Make one: ``make_cable(lease_publish_on_error="raise")``, on each broker."""
    server = request.getfixturevalue("rabbitmq" if isinstance(broker, RabbitBroker) else "valkey")
    if isinstance(server, External):
        pytest.skip("needs a port to put a proxy in front of")

    def make(**settings: Any) -> Cable:
        direct, proxy = broker.url, start_proxy(server.port)
        broker.url = proxy.url(direct)
        stage = make_stage(
            broker=broker,
            worker_settings={"broker_url": direct},
            **{
                "lease_publish_timeout": TIMEOUT,
                "lease_reaper_in_worker": False,
                # No message is lost here: one that waits for its worker is not sent again.
                "lease_queued_timeout": 300.0,
                **settings,
            },
        )
        return Cable(stage, proxy)

    return make


def submit_in(stage: Stage, seconds: float, **options: Any) -> str:
    """Submit a job, and see that the caller has it within so many seconds."""
    began = time.monotonic()
    sent = stage.send({}, **options)
    assert time.monotonic() - began <= seconds
    return str(sent.id)


def assert_stored(stage: Stage, job_id: str) -> None:
    """Queued, and not said to be on the broker: what a pass sends."""
    job = stage.job(job_id)
    assert (job["state"], job["dispatched_at"]) == ("queued", None), job


def forget_pause(stage: Stage) -> None:
    """Let the pause after a failed publish be over."""
    stage.extension.connections.breaker.succeeded()


# --- the caller's wait ----------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["frozen", "frozen-before", "cut"])
def test_a_caller_waits_so_long_at_most_and_the_job_is_sent_when_the_broker_is_back(
    harm: str, make_cable: Callable[..., Cable]
) -> None:
    stage, proxy = make_cable()
    first = [] if harm == "frozen-before" else [submit_in(stage, TIMEOUT + SLACK)]
    (proxy.cut if harm == "cut" else proxy.stall)()

    stored = [submit_in(stage, TIMEOUT + SLACK)]
    began = time.monotonic()
    stored += [str(stage.send({}).id) for _ in range(20)]
    # The others do not wait, each for itself.
    assert time.monotonic() - began <= TIMEOUT + SLACK
    for one in stored:
        assert_stored(stage, one)
    assert stage.run_pass() == {"unpublished": 1}
    proxy.heal()
    assert stage.run_pass() == {"dispatched": len(stored)}

    stage.worker(concurrency=2)
    for one in first + stored:
        stage.assert_accepted_once(one, 1)
        assert len(stage.ledger.read("begin", job=one)) == 1
    # And the caller's own way is free again.
    assert stage.job(submit_in(stage, TIMEOUT))["dispatched_at"] is not None


def test_a_port_that_accepts_and_says_nothing_is_waited_for_so_long_at_most(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    with Proxy(free_port()) as silent:
        silent.stall()
        host = broker.url.replace(str(broker.url.rsplit(":", 1)[1].split("/")[0]), str(silent.port))
        stage = make_stage(broker=broker, broker_url=host, lease_publish_timeout=TIMEOUT)

        assert_stored(stage, submit_in(stage, TIMEOUT + SLACK))


def test_a_worker_sends_what_was_stored_within_one_interval_of_the_brokers_return(
    make_cable: Callable[..., Cable],
) -> None:
    stage, proxy = make_cable(lease_reaper_in_worker=True)
    stage.worker(concurrency=2)
    proxy.cut()

    sent = submit_in(stage, TIMEOUT + SLACK)

    # The worker's broker was never away. A worker alone: two intervals, and half of one to look.
    began = time.monotonic()
    stage.wait_begun(sent)
    assert time.monotonic() - began <= 2.5 * INTERVAL + SLACK
    stage.assert_accepted_once(sent, 1)


def test_a_caller_may_want_the_error_and_the_job_is_sent_all_the_same(
    make_cable: Callable[..., Cable],
) -> None:
    stage, proxy = make_cable(lease_publish_on_error="raise")
    proxy.stall()

    began = time.monotonic()
    for _ in range(3):
        with pytest.raises((OperationalError, OSError)):
            stage.send({})
    assert time.monotonic() - began <= TIMEOUT + SLACK

    ids = [row["id"] for row in stage.rows("job")]
    assert len(ids) == 3
    for one in ids:
        assert_stored(stage, one)
    proxy.heal()
    stage.worker(concurrency=1)
    eventually(lambda: stage.run_pass().get("dispatched") == 3)
    for one in ids:
        stage.assert_accepted_once(one, 1)


def test_after_the_pause_one_publish_finds_the_broker_back(
    make_cable: Callable[..., Cable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "PAUSE_SECONDS", 0.5)
    stage, proxy = make_cable()
    proxy.cut()
    assert_stored(stage, submit_in(stage, TIMEOUT + SLACK))
    proxy.heal()

    # Nobody makes a pass: it is the publishes themselves that find out.
    eventually(lambda: stage.job(submit_in(stage, TIMEOUT))["dispatched_at"])


def test_plain_tasks_that_hold_all_of_celerys_producers_are_not_waited_for(
    make_cable: Callable[..., Cable],
) -> None:
    stage, proxy = make_cable()
    proxy.stall()
    pool = stage.app.producer_pool

    def call_a_plain_task() -> None:
        with suppress(OperationalError, OSError):
            stage.note("plain").apply_async((0,))

    stuck = [threading.Thread(target=call_a_plain_task) for _ in range(pool.limit)]
    for thread in stuck:
        thread.start()
    eventually(lambda: len(pool._dirty) == pool.limit)
    work = stage.app.tasks["faults.work"]

    began = time.monotonic()
    stored = [submit_in(stage, TIMEOUT + SLACK)]
    stored += [sent.id for sent in work.submit_many([work.s(plan={}, name="")] * 2)]
    assert time.monotonic() - began <= TIMEOUT + SLACK
    assert all(thread.is_alive() for thread in stuck)

    for one in stored:
        assert_stored(stage, one)
    proxy.heal()
    for thread in stuck:
        thread.join()
    assert stage.run_pass() == {"dispatched": 3}
    stage.worker(concurrency=2)
    for one in stored:
        stage.assert_accepted_once(one, 1)


def test_the_event_of_a_sent_task_waits_no_longer_either(
    make_cable: Callable[..., Cable],
) -> None:
    stage, proxy = make_cable(task_send_sent_event=True)
    submit_in(stage, TIMEOUT + SLACK)
    proxy.stall()

    assert_stored(stage, submit_in(stage, TIMEOUT + SLACK))
    assert_stored(stage, submit_in(stage, TIMEOUT + SLACK))


@contextmanager
def alarm(rabbitmq: Any) -> Iterator[None]:
    """Have RabbitMQ block who publishes, as when its memory or its disk is full."""
    limit = "{resource_limit, memory, node()}"
    rabbitmq._call(f"rabbit_alarm:set_alarm({{{limit}, []}})")
    try:
        yield
    finally:
        rabbitmq._call(f"rabbit_alarm:clear_alarm({limit})")


def test_a_broker_that_blocks_publishers_is_waited_for_so_long_at_most(
    rabbitmq: Any, amqp_url: str, make_stage: Callable[..., Stage]
) -> None:
    stage = make_stage(
        broker=RabbitBroker(amqp_url, rabbitmq),
        lease_publish_timeout=TIMEOUT,
        lease_reaper_in_worker=False,
    )
    before = submit_in(stage, TIMEOUT + SLACK)

    with alarm(rabbitmq):
        stored = [submit_in(stage, TIMEOUT + SLACK) for _ in range(2)]
        for one in stored:
            assert_stored(stage, one)

    # One of them may have got there after all, when it was no longer waited for.
    assert stage.run_pass() == {"dispatched": 2}
    stage.worker(concurrency=1)
    for one in (before, *stored):
        stage.assert_accepted_once(one, 1)
        assert len(stage.ledger.read("begin", job=one)) == 1


# --- an unknown outcome ---------------------------------------------------------------------------


def test_a_publish_whose_answer_was_lost_is_sent_twice_and_runs_once(
    make_cable: Callable[..., Cable],
) -> None:
    """B122: the broker has the message, and its publisher does not know."""
    stage, proxy = make_cable()
    submitted = [submit_in(stage, TIMEOUT)]
    proxy.mute()

    submitted.append(submit_in(stage, TIMEOUT + SLACK))

    assert_stored(stage, submitted[1])
    eventually(lambda: stage.broker.waiting() == 2)
    proxy.heal()
    assert stage.run_pass() == {"dispatched": 1}
    eventually(lambda: stage.broker.waiting() == 3)
    worker = stage.worker(concurrency=1)
    for one in submitted:
        stage.assert_accepted_once(one, 1)
        assert len(stage.ledger.read("begin", job=one)) == 1
    eventually(lambda: refusals(worker.log(), submitted[1]) == 1)


def test_a_message_that_the_broker_refuses_is_in_nobodys_way(
    rabbitmq: Any, amqp_url: str, make_stage: Callable[..., Stage]
) -> None:
    """Its exchange is missing: the broker is there, and takes the others."""
    stage = make_stage(broker=RabbitBroker(amqp_url, rabbitmq), lease_reaper_in_worker=False)

    refused = submit_in(stage, TIMEOUT, exchange="missing", routing_key="nowhere")
    taken = submit_in(stage, TIMEOUT)

    assert stage.broker.waiting() == 1
    # As a message that is sent and not claimed: tried again at growing gaps.
    assert [stage.job(one)["dispatch_count"] for one in (refused, taken)] == [1, 1]
    assert stage.job(refused)["dispatched_at"] is not None
    stage.execute("UPDATE celery_lease_job SET dispatched_at = NULL")
    assert stage.run_pass() == {"unpublished": 1, "dispatched": 1}
    assert stage.run_pass() == {}
    assert stage.broker.waiting() == 2


def test_a_step_that_the_broker_refuses_makes_no_failure_of_the_job_before_it(
    rabbitmq: Any, amqp_url: str, make_stage: Callable[..., Stage]
) -> None:
    stage = make_stage(
        broker=RabbitBroker(amqp_url, rabbitmq),
        lease_reaper_in_worker=False,
        lease_publish_on_error="raise",
    )
    stage.worker(concurrency=1)
    refused = stage.signature({}).set(immutable=True, exchange="missing", routing_key="nowhere")

    last = chain(stage.signature({}), refused).apply_async(link_error=stage.on_error())

    stage.assert_accepted_once(last.parent.id, 1)
    eventually(lambda: stage.job(last.parent.id)["settled_at"])
    assert last.parent.state == "SUCCESS"
    # As one that was sent: tried again at growing gaps.
    assert stage.job(last.id)["dispatched_at"] is not None
    assert stage.ledger.read("on_error") == []


# --- the reaper -----------------------------------------------------------------------------------


def test_a_pass_that_finds_a_frozen_broker_gives_its_batch_up(
    make_cable: Callable[..., Cable],
) -> None:
    """B124: 500 expired jobs, and no transaction is open while it waits for the broker."""
    stage, proxy = make_cable()
    worker = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "never"}})
    stage.wait_begun(sent.id)
    stage.run_pass()
    worker.kill_group()
    stage.multiply(sent.id, 499)
    stage.execute(
        "UPDATE celery_lease_attempt SET lease_expires_at = clock_timestamp() - interval '1 s'"
    )
    proxy.stall()

    done: list[dict[str, int]] = []
    began = time.monotonic()
    reaping = threading.Thread(target=lambda: done.append(stage.run_pass()))
    reaping.start()
    eventually(lambda: stage.scalar("SELECT max(dispatch_count) FROM celery_lease_job") == 2)
    waited = time.monotonic()
    open_ones = "SELECT count(*) FROM pg_stat_activity WHERE xact_start < clock_timestamp() "
    open_ones += "- interval '0.2 s' AND pid <> pg_backend_pid() AND datname = current_database()"
    while reaping.is_alive():
        assert stage.scalar(open_ones) == 0
        reaping.join(0.1)

    assert time.monotonic() - waited <= TIMEOUT + SLACK
    assert done == [{"expired": 500, "unpublished": 1}], (done, time.monotonic() - began)
    undispatched = "SELECT count(*) FROM celery_lease_job WHERE dispatched_at IS NULL"
    assert stage.scalar(f"{undispatched} AND state = 'queued'") == 500

    proxy.heal()
    assert stage.run_pass() == {"dispatched": 500}
    assert stage.scalar(undispatched) == 0


def test_what_a_long_outage_has_left_is_sent_in_batches_each_once(
    make_cable: Callable[..., Cable],
) -> None:
    stage, proxy = make_cable(lease_reaper_limit=500)
    proxy.cut()
    stage.multiply(submit_in(stage, TIMEOUT + SLACK), 1999)
    assert stage.run_pass() == {"unpublished": 1}
    before = stage.scalar("SELECT sum(dispatch_count) FROM celery_lease_job")
    proxy.heal()

    sent = []
    while not sent or sent[-1]:
        sent.append(stage.run_pass().get("dispatched", 0))

    assert sent == [500, 500, 500, 500, 0]
    assert stage.broker.waiting() == 2000
    assert stage.scalar("SELECT sum(dispatch_count) FROM celery_lease_job") == before + 2000
