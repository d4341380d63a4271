from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pymysql
import pytest
import redis
from kombu import Connection
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tests.support import processes
from tests.support.databases import new_database
from tests.support.servers import MariaDB, PgBouncer, PostgreSQL, RabbitMQ, Valkey

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tests.support.servers import Server


@pytest.mark.parametrize("kind", [Valkey, PostgreSQL, MariaDB, RabbitMQ])
def test_a_killed_server_comes_back_on_its_port_and_leaves_nothing_behind(
    kind: type[Server], own_server: Callable[..., Any]
) -> None:
    server: Server = own_server(kind)
    url, folder, first = server.url, server.folder, server.pid

    server.kill()
    assert not processes.is_alive(first)
    assert not server.is_running
    server.start()

    assert server.url == url
    server.ask()
    family = processes.tree(server.pid)
    server.close()
    assert not any(processes.is_alive(one) for one in family)
    assert not folder.exists()


@pytest.mark.parametrize("kind", [Valkey, PostgreSQL, MariaDB])
def test_a_frozen_server_is_alive_and_does_not_answer(
    kind: type[Server], own_server: Callable[..., Any]
) -> None:
    server: Server = own_server(kind)

    server.freeze()
    assert server.is_running
    with pytest.raises((redis.TimeoutError, psycopg.OperationalError, pymysql.OperationalError)):
        server.ask()
    server.thaw()

    server.ask()


def test_valkey_keeps_its_data_over_a_kill_if_asked_to(own_server: Callable[..., Any]) -> None:
    server: Valkey = own_server(Valkey, durable=True)
    with redis.Redis.from_url(server.url) as client:
        client.set("key", "value")

        # What was answered is in the kernel's hands; only the machine's death would lose it.
        server.restart(kill=True)

        assert client.get("key") == b"value"


@pytest.mark.parametrize("kind", [PostgreSQL, MariaDB])
def test_committed_rows_survive_a_kill(
    kind: type[PostgreSQL | MariaDB], own_server: Callable[..., Any]
) -> None:
    server = own_server(kind)
    engine = create_engine(server.url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE kept (id INTEGER PRIMARY KEY)"))
        connection.execute(text("INSERT INTO kept VALUES (1)"))

    server.restart(kill=True)

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM kept")) == 1


def test_nothing_of_erlang_stays_when_rabbitmq_has_stopped(own_server: Callable[..., Any]) -> None:
    server: RabbitMQ = own_server(RabbitMQ)
    assert server._name_server is not None
    name_server = server._name_server.pid
    assert processes.is_alive(name_server)

    server.stop()

    assert not processes.is_alive(server.pid)
    assert not processes.is_alive(name_server)


def test_each_database_is_new_and_empty(database_url: str) -> None:
    engine = create_engine(database_url, poolclass=NullPool)

    assert inspect(engine).get_table_names() == []

    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE something (id INTEGER)"))


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_database_is_dropped_although_a_transaction_is_open_in_it(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(kind)
    with new_database(server.url) as url:
        engine = create_engine(url, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE held (id INTEGER)"))
        left_open = engine.connect()
        left_open.execute(text("SELECT * FROM held"))

    left_open.invalidate()
    left_open.close()
    gone = create_engine(url, poolclass=NullPool)
    with pytest.raises(Exception, match=r"does not exist|Unknown database"):
        gone.connect()


def test_pgbouncer_pools_by_transaction(
    own_server: Callable[..., Any], pgbouncer_url: str, postgresql: PostgreSQL
) -> None:
    bouncer: PgBouncer = own_server(PgBouncer, postgresql, pool_size=1)
    url = bouncer.url_for(pgbouncer_url.rpartition("/")[2])
    engine = create_engine(url, poolclass=NullPool, connect_args={"prepare_threshold": None})
    with engine.connect() as one, engine.connect() as other:
        ids = []
        for connection in (one, other, one):
            with connection.begin():
                ids.append(connection.scalar(text("SELECT pg_backend_pid()")))

    assert len(set(ids)) == 1


def test_redis_url_is_an_empty_database(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "over")


def test_amqp_url_is_a_virtual_host_of_its_own(amqp_url: str) -> None:
    with Connection(amqp_url) as connection, connection.SimpleQueue("letters") as queue:
        queue.put("hello")
        message = queue.get(timeout=5)
        message.ack()

    assert message.payload == "hello"
