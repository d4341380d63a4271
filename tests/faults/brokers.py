"""What a broker has in its hands, asked behind Celery's back."""

from __future__ import annotations

import re
from typing import Any, Protocol

import redis

BROKERS = ("redis", "rabbitmq")
QUEUE = "celery"


class Broker(Protocol):
    """A broker, or one part of it that no other test uses.

    Attributes:
        url: as Celery has it.
    """

    url: str

    def waiting(self) -> int:
        """Return how many messages no worker has."""

    def unacknowledged(self) -> int:
        """Return how many messages a worker has, and has not acknowledged."""

    def kill_connections(self) -> None:
        """End every client's connection."""

    def close(self) -> None:
        """End our own connection."""


class RedisBroker:
    """A numbered database of a server that speaks Redis' protocol."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = redis.Redis.from_url(url)

    def waiting(self) -> int:
        """Return how many messages no worker has."""
        return int(self._client.llen(QUEUE))

    def unacknowledged(self) -> int:
        """Return how many messages a worker has, and has not acknowledged."""
        return int(self._client.hlen("unacked"))

    def kill_connections(self) -> None:
        """End every client's connection to this database; the result backend's too."""
        number = self._client.connection_pool.connection_kwargs["db"]
        own = self._client.client_id()
        for client in self._client.client_list():
            if int(client["db"]) == number and int(client["id"]) != own:
                self._client.client_kill_filter(_id=client["id"])

    def close(self) -> None:
        """End our own connection."""
        self._client.close()


class RabbitBroker:
    """A virtual host of a RabbitMQ node of ours: nobody else's can be asked without a plugin."""

    def __init__(self, url: str, server: Any) -> None:
        self.url = url
        self._server = server
        self._vhost = url.rpartition(f":{server.port}/")[2]

    def waiting(self) -> int:
        """Return how many messages no worker has."""
        return self._ask("messages_ready")

    def unacknowledged(self) -> int:
        """Return how many messages a worker has, and has not acknowledged."""
        return self._ask("messages_unacknowledged")

    def kill_connections(self) -> None:
        """End every client's connection to this virtual host."""
        self._server._call(
            f'[rabbit_networking:close_connection(Pid, "cut") || Pid <- '
            f"rabbit_networking:connections(), [{{vhost, V}}] <- "
            f'[rabbit_networking:connection_info(Pid, [vhost])], V =:= <<"{self._vhost}">>], ok'
        )

    def close(self) -> None:
        """Nothing is open."""

    def _ask(self, what: str) -> int:
        answer = self._server._call(
            f"case rabbit_amqqueue:lookup(rabbit_misc:r("
            f'<<"{self._vhost}">>, queue, <<"{QUEUE}">>)) of '
            f"{{ok, Q}} -> element(2, hd(rabbit_amqqueue:info(Q, [{what}]))); _ -> 0 end"
        )
        found = re.search(r"\{ok, (\d+)\}", answer)
        assert found, answer
        return int(found[1])
