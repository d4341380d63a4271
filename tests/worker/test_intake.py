"""A worker that is asked to stop takes nothing more from a real broker, and keeps nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kombu import Connection, Queue

from celery_lease.intake import end_intake
from tests.support.waiting import eventually, never

QUEUE = Queue("intake", routing_key="intake")


@contextmanager
def consuming(url: str, taken: list[Any]) -> Iterator[Any]:
    """Consume as a worker does, and give what a worker has: connection and consumer."""
    with Connection(url) as connection:
        consumer = connection.Consumer(
            [QUEUE], callbacks=[lambda body, _: taken.append(body)], no_ack=False
        )
        consumer.consume()
        with suppress(socket.timeout):
            connection.drain_events(timeout=0.1)
        yield SimpleNamespace(connection=connection, task_consumer=consumer)


def publish(url: str, body: str) -> None:
    with Connection(url) as connection, connection.Producer() as producer:
        producer.publish(body, routing_key="intake", declare=[QUEUE])


def test_redis_is_called_back(redis_url: str) -> None:
    """The ``BRPOP`` under way would take the next message, and nobody would read it."""
    taken: list[Any] = []
    with redis.Redis.from_url(redis_url) as client, consuming(redis_url, taken) as consumer:
        assert consumer.task_consumer.channel._in_poll

        end_intake(consumer)
        publish(redis_url, "next")

        never(lambda: client.llen("intake") != 1, during=0.2)
        assert taken == []
        end_intake(consumer)


def test_what_redis_has_given_meanwhile_goes_back(redis_url: str) -> None:
    taken: list[Any] = []
    with redis.Redis.from_url(redis_url) as client, consuming(redis_url, taken) as consumer:
        publish(redis_url, "on its way")
        eventually(lambda: client.llen("intake") == 0)

        end_intake(consumer)

        eventually(lambda: client.llen("intake") == 1)
        assert client.hlen("unacked") == 0
        assert taken == []


def test_rabbitmq_gives_nothing_more(amqp_url: str) -> None:
    taken: list[Any] = []
    with consuming(amqp_url, taken) as consumer:
        end_intake(consumer)
        publish(amqp_url, "next")

        with Connection(amqp_url) as other:
            got = eventually(lambda: QUEUE(other.default_channel).get(no_ack=True))
        assert got.payload == "next"
        assert taken == []


@pytest.mark.parametrize("harm", ["no consumer", "no tasks", "closed"])
def test_it_never_raises(harm: str, redis_url: str) -> None:
    """It is called in signal handlers, whatever the worker is just doing."""
    with consuming(redis_url, []) as consumer:
        if harm == "closed":
            consumer.connection.release()
        elif harm == "no tasks":
            consumer.task_consumer = None

        end_intake(None if harm == "no consumer" else consumer)


@pytest.mark.parametrize("module", ["amqp.transport", "redis.connection", "kombu.transport.redis"])
def test_a_transport_that_is_half_way_through_is_not_entered_again(
    module: str, amqp_url: str
) -> None:
    """What it was writing would be mixed up with what we have it write."""
    taken: list[Any] = []
    inside: dict[str, Any] = {"__name__": module}
    exec("import sys\ndef frame(): return sys._getframe()", inside)  # noqa: S102  a module's frame

    with consuming(amqp_url, taken) as consumer:
        end_intake(consumer, inside["frame"]())

        assert consumer.task_consumer._active_tags
        publish(amqp_url, "next")
        eventually(lambda: drained(consumer, taken))


def drained(consumer: Any, taken: list[Any]) -> bool:
    with suppress(socket.timeout):
        consumer.connection.drain_events(timeout=0.1)
    return taken == ["next"]
