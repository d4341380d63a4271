"""Messages that do not get to a broker which is there: they are in nobody's way."""

from __future__ import annotations

import signal
import socket
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Exchange, Queue

from celery_lease.extension import extension_of
from celery_lease.publishing import is_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.worker.site import Site


@pytest.fixture
def on_rabbitmq(make_site: Callable[..., Site], sqlite_url: str, amqp_url: str) -> Iterator[Site]:
    """A site without a worker and without results."""
    return make_site(sqlite_url, broker=amqp_url, backend=None)


@pytest.fixture
def idle(make_site: Callable[..., Site], sqlite_url: str) -> Site:
    """A site on Redis without a worker."""
    return make_site(sqlite_url)


def waiting(site: Site, queue: str = "celery") -> int:
    """Return how many messages a queue of RabbitMQ has."""
    with site.app.connection_for_read() as connection:
        return int(connection.default_channel.queue_declare(queue, passive=True).message_count)


def test_a_header_that_amqp_cannot_say_stops_no_other_message(on_rabbitmq: Site) -> None:
    """Amqp calls it an error of the connection."""
    add = on_rabbitmq.task("t.add")
    add.delay(1, 1)

    bad = add.apply_async((1, 2), headers={"tenant": uuid.uuid4()})
    good = [add.delay(n, n) for n in range(3)]

    assert waiting(on_rabbitmq) == 1 + 3
    assert all(on_rabbitmq.job(one.id)["dispatched_at"] for one in good)
    assert not extension_of(on_rabbitmq.app).connections.breaker.is_open()
    # It counts as sent: no pass begins with it.
    assert on_rabbitmq.job(bad.id)["dispatched_at"]
    assert "unpublished" not in on_rabbitmq.run_pass()


def test_a_queue_whose_key_redis_refuses_stops_no_other_queue(idle: Site) -> None:
    add, client = idle.task("t.add"), idle.redis()
    client.set("bad", "no list")

    refused = add.apply_async((1, 2), queue="bad")
    good = [add.delay(n, n) for n in range(3)]

    assert len(idle.queued("celery")) == 3
    assert all(idle.job(one.id)["dispatched_at"] for one in good)
    assert idle.job(refused.id)["dispatched_at"]
    client.delete("bad")
    client.close()


def test_a_redis_that_takes_nothing_at_all_is_away(idle: Site) -> None:
    """What is refused for lack of memory leaves by the next pass, not after a long wait."""
    add, client = idle.task("t.add"), idle.redis()
    before = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory", 1)
    try:
        refused = add.delay(1, 2)
    finally:
        client.config_set("maxmemory", before)
        client.close()

    assert idle.job(refused.id)["dispatched_at"] is None
    assert idle.run_pass()["dispatched"] == 1


def test_which_answers_of_redis_concern_one_message() -> None:
    redis = pytest.importorskip("redis")
    kinds: Any = redis.exceptions

    assert is_refusal(kinds.ResponseError("WRONGTYPE Operation against a key"))
    assert is_refusal(kinds.NoPermissionError("this user has no permissions"))
    assert not is_refusal(kinds.OutOfMemoryError("command not allowed"))
    assert not is_refusal(kinds.ReadOnlyError("You can't write"))
    assert not is_refusal(kinds.ResponseError("MISCONF Redis is configured to save"))
    assert not is_refusal(kinds.BusyLoadingError("Redis is loading"))
    assert not is_refusal(kinds.ConnectionError("gone"))


@pytest.mark.parametrize("how", ["redis", "rabbitmq"])
def test_a_refusal_is_an_answer_of_a_broker_that_was_away(
    how: str, request: pytest.FixtureRequest
) -> None:
    site: Site = request.getfixturevalue("idle" if how == "redis" else "on_rabbitmq")
    add, breaker = site.task("t.add"), extension_of(site.app).connections.breaker
    options: dict[str, Any] = {"exchange": uuid.uuid4().hex, "routing_key": "nowhere"}
    if how == "redis":
        client = site.redis()
        client.set("bad", "no list")
        client.close()
        options = {"queue": "bad"}
    breaker.failed()
    breaker._until = 0.0

    add.apply_async((1, 2), **options)

    assert not breaker.is_open()
    assert site.job(add.delay(1, 2).id)["dispatched_at"]


@pytest.fixture
def to_a_silent_broker(make_site: Callable[..., Site], sqlite_url: str) -> Iterator[Site]:
    """A site whose broker accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        yield make_site(sqlite_url, broker=url, backend=None, lease_publish_timeout=10)


@pytest.mark.parametrize("how", ["delay", "submit_many", "run_pass"])
def test_a_time_limit_that_strikes_during_a_publish_reaches_the_body(
    how: str, to_a_silent_broker: Site
) -> None:
    site = to_a_silent_broker
    add, extension = site.task("t.add"), extension_of(site.app)

    def strike(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    calls: dict[str, Callable[[], Any]] = {
        "delay": lambda: add.delay(1, 2),
        "submit_many": lambda: add.submit_many([(1, 2), (3, 4)]),
        "run_pass": extension.run_pass,
    }
    if how == "run_pass":
        extension.connections.breaker.failed()
        add.delay(1, 2)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        with pytest.raises(SoftTimeLimitExceeded):
            calls[how]()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    # Recorded, and sent by the next pass.
    assert len(site.jobs()) == (2 if how == "submit_many" else 1)
    assert {job["dispatched_at"] for job in site.jobs()} == {None}


def test_a_queue_that_only_its_submitter_knows_is_not_declared_otherwise(on_rabbitmq: Site) -> None:
    """Only its name is recorded: what is made of that would be bound elsewhere."""
    site, name = on_rabbitmq, uuid.uuid4().hex
    add, breaker = site.task("t.add"), extension_of(site.app).connections.breaker

    def queue() -> Queue:
        exchange = Exchange(f"to-{name}", type="topic")
        return Queue(name, exchange, routing_key="a.b", queue_arguments={"x-max-priority": 5})

    breaker.failed()
    add.apply_async((1, 2), queue=queue())

    site.run_pass()

    # There is no such exchange yet, and no such queue: it is refused, and tried again later.
    assert name not in site.app.amqp.queues
    add.apply_async((3, 4), queue=queue())
    assert waiting(site, name) == 1


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_a_queue_that_is_there_is_sent_to_though_its_arguments_are_not_known(
    on_rabbitmq: Site, kind: str
) -> None:
    site, name = on_rabbitmq, uuid.uuid4().hex
    add, breaker = site.task("t.add"), extension_of(site.app).connections.breaker
    exchange = Exchange(f"to-{name}", type=kind)
    queue = Queue(name, exchange, routing_key="a.b", queue_arguments={"x-max-priority": 5})
    add.apply_async((1, 2), queue=queue)
    breaker.failed()
    add.apply_async((3, 4), queue=queue)
    assert waiting(site, name) == 1
    # A connection remembers what it has declared.
    extension_of(site.app).connections.close()

    assert site.run_pass()["dispatched"] == 1

    assert waiting(site, name) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_queue_that_is_gone_is_made_again(on_rabbitmq: Site, *, is_known: bool) -> None:
    """A broker that was restarted without its data drops what is for a queue that is not there."""
    site, name = on_rabbitmq, uuid.uuid4().hex
    add, breaker = site.task("t.add"), extension_of(site.app).connections.breaker
    breaker.failed()
    if is_known:
        # The message's key is not the binding's.
        site.app.amqp.queues.add(Queue(name, Exchange(f"to-{name}", type="topic"), "a.#"))
        add.apply_async((1, 2), queue=name, routing_key="a.b")
    else:
        add.apply_async((1, 2), queue=name)
        del site.app.amqp.queues[name]

    assert site.run_pass()["dispatched"] == 1

    assert waiting(site, name) == 1
