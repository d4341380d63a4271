from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.proxy import Proxy
    from tests.support.servers import Valkey


@pytest.fixture
def proxy(valkey: Valkey, start_proxy: Callable[[int], Proxy]) -> Proxy:
    """A cable to Valkey."""
    return start_proxy(valkey.port)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client at the other end that neither waits nor tries again."""
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=proxy.port, socket_timeout=0.5, retry=once) as client:
        yield client


def test_a_cut_cable_is_an_error_until_it_is_healed(proxy: Proxy, client: redis.Redis) -> None:
    assert client.ping()

    proxy.cut()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    eventually(lambda: proxy.connection_count == 0)

    proxy.heal()
    assert client.ping()


def test_a_stalled_cable_is_silence_until_it_is_healed(proxy: Proxy, client: redis.Redis) -> None:
    assert client.ping()

    proxy.stall()
    with pytest.raises(redis.TimeoutError):
        client.ping()

    proxy.heal()
    assert client.ping()
