"""Fixtures of all tests: private servers, one set a test process, and fresh places on them.

A server is started by the first test that asks for it. One that cannot be had skips its tests, with
the reason; where ``CI=true`` it fails them. ``CELERY_LEASE_TEST_POSTGRESQL_URL`` (``MARIADB``,
``REDIS``, ``RABBITMQ``) names a server to use instead; databases are made and dropped there.

Tests that kill, freeze or restart a server take one of their own from ``own_server``.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import pytest
import redis

from tests.support.databases import new_database
from tests.support.folders import remove_abandoned
from tests.support.proxy import Proxy
from tests.support.servers import External, MariaDB, PgBouncer, PostgreSQL, RabbitMQ, Valkey
from tests.support.siblings import LONG, unknown
from tests.support.workers import Beat, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from tests.support.servers import Server

S = TypeVar("S", bound="Server")

_numbers = itertools.count()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove what killed test runs have left."""
    remove_abandoned()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to ``make long``; with ``CELERY_LEASE_LONG=1`` it is left to nobody."""
    if not os.environ.get("CELERY_LEASE_LONG"):
        for item in items:
            if item.name.startswith(LONG):
                item.add_marker(pytest.mark.long)
    if config.args == config.getini("testpaths"):
        # All were collected.
        gone = unknown([item.name for item in items])
        if gone:
            raise pytest.UsageError(f"tests/support/siblings.py names no test: {gone}")


def must_have(server: type[Server]) -> None:
    """Skip the test if the server cannot be had here; fail it where ``CI=true``."""
    reason = server.unavailable_reason()
    if reason is None:
        return
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"{reason} (CI=true: not a skip)", pytrace=False)
    pytest.skip(reason)


# --- servers, one a test process --------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey | External]:
    """Valkey, which is Redis to Celery."""
    yield from _shared("REDIS", Valkey)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL | External]:
    """PostgreSQL."""
    yield from _shared("POSTGRESQL", PostgreSQL)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB | External]:
    """MariaDB."""
    yield from _shared("MARIADB", MariaDB)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ | External]:
    """RabbitMQ."""
    yield from _shared("RABBITMQ", RabbitMQ)


@pytest.fixture(scope="session")
def pgbouncer(postgresql: PostgreSQL | External) -> Iterator[PgBouncer]:
    """PgBouncer in transaction pooling mode, in front of ``postgresql``."""
    must_have(PgBouncer)
    if isinstance(postgresql, External):
        pytest.skip("PgBouncer needs a PostgreSQL server of ours behind it")
    with PgBouncer(postgresql) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Callable[..., Any]]:
    """Start a server for this test alone: ``own_server(PostgreSQL, durable=True)``.

    It may be killed, frozen and restarted; it is gone after the test.
    """
    with ExitStack() as stack:

        def start(kind: type[S], *args: Any, **kwargs: Any) -> S:
            must_have(kind)
            server = kind(*args, **kwargs)
            stack.callback(server.close)
            return server.start()

        yield start


@pytest.fixture
def start_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Put a cable in front of a port: ``start_proxy(postgresql.port)``, then ``cut``, ``stall``."""
    with ExitStack() as stack:

        def start(target: int) -> Proxy:
            return stack.enter_context(Proxy(target))

        yield start


# --- fresh places on them, one a test ---------------------------------------------------------


@pytest.fixture
def redis_url(valkey: Valkey | External) -> Iterator[str]:
    """The URL of an empty Redis database that no other test uses."""
    if isinstance(valkey, External):
        # We do not know how many it has, or what is in them: the one that was named.
        url = valkey.url
    else:
        url = valkey.url_for(next(_numbers) % valkey.databases)
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture
def amqp_url(rabbitmq: RabbitMQ | External) -> Iterator[str]:
    """The URL of an empty virtual host on RabbitMQ that no other test uses."""
    if isinstance(rabbitmq, External):
        yield rabbitmq.url
        return
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.remove_vhost(url)


@pytest.fixture
def fresh_database(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """Make empty databases: ``fresh_database("postgresql")`` returns the URL of a new one.

    Kinds: ``sqlite``, ``postgresql``, ``mariadb``, and ``pgbouncer`` (a PostgreSQL database through
    the pooler).
    """
    with ExitStack() as stack:

        def make(kind: str) -> str:
            if kind == "sqlite":
                return f"sqlite:///{tmp_path / f'lease{next(_numbers)}.db'}"
            behind = "postgresql" if kind == "pgbouncer" else kind
            url = stack.enter_context(new_database(request.getfixturevalue(behind).url))
            if kind != "pgbouncer":
                return url
            pooler: PgBouncer = request.getfixturevalue("pgbouncer")
            return pooler.url_for(url.rpartition("/")[2])

        yield make


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest, fresh_database: Callable[[str], str]) -> str:
    """The URL of an empty database, once for each kind."""
    return fresh_database(request.param)


@pytest.fixture
def sqlite_url(fresh_database: Callable[[str], str]) -> str:
    """The URL of an SQLite file that does not exist yet."""
    return fresh_database("sqlite")


@pytest.fixture
def postgresql_url(fresh_database: Callable[[str], str]) -> str:
    """The URL of an empty PostgreSQL database."""
    return fresh_database("postgresql")


@pytest.fixture
def mariadb_url(fresh_database: Callable[[str], str]) -> str:
    """The URL of an empty MariaDB database."""
    return fresh_database("mariadb")


@pytest.fixture
def pgbouncer_url(fresh_database: Callable[[str], str]) -> str:
    """The URL of an empty PostgreSQL database through PgBouncer."""
    return fresh_database("pgbouncer")


# --- processes, gone after the test -----------------------------------------------------------


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., CeleryWorker]]:
    """Start a worker process and wait until it is ready; the arguments are ``CeleryWorker``'s.

    ``ready=False`` does not wait.
    """
    with ExitStack() as stack:

        def start(app: str, *, ready: bool = True, **kwargs: Any) -> CeleryWorker:
            worker = CeleryWorker(app, folder=tmp_path, **kwargs)
            stack.callback(worker.close)
            worker.start()
            return worker.wait_ready() if ready else worker

        yield start


@pytest.fixture
def start_beat(tmp_path: Path) -> Iterator[Callable[..., Beat]]:
    """Start a beat process and wait until it is ready; the arguments are ``Beat``'s."""
    with ExitStack() as stack:

        def start(app: str, **kwargs: Any) -> Beat:
            beat = Beat(app, folder=tmp_path, **kwargs)
            stack.callback(beat.close)
            return beat.start().wait_ready()

        yield start


def _shared(variable: str, kind: type[S]) -> Iterator[S | External]:
    named = os.environ.get(f"CELERY_LEASE_TEST_{variable}_URL")
    if named:
        yield External(named)
        return
    must_have(kind)
    with kind() as server:
        yield server
