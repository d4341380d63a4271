"""Brand-new empty databases on a server, by its SQLAlchemy URL; ours or somebody else's server."""

from __future__ import annotations

import itertools
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

_numbers = itertools.count(1)


@contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """Make an empty database with a name of its own, yield its URL, drop it at the end.

    Connections that a test left open do not keep it alive.
    """
    # The process id: the test workers may share a server that was named by a variable.
    name = f"lease_{os.getpid()}_{next(_numbers)}"
    url = make_url(server_url)
    with _administrator(server_url) as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with _administrator(server_url) as connection:
            _drop(connection, name)


@contextmanager
def _administrator(server_url: str) -> Iterator[Connection]:
    engine = create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _drop(connection: Connection, name: str) -> None:
    assert re.fullmatch(r"lease_\d+_\d+", name), name
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        return
    # DROP waits for the transactions that are open in the database: end their connections first.
    users = text("SELECT id FROM information_schema.processlist WHERE db = :name")
    for user in connection.scalars(users, {"name": name}).all():
        connection.execute(text(f"KILL {int(user)}"))
    connection.execute(text("SET SESSION lock_wait_timeout = 10"))
    connection.execute(text(f"DROP DATABASE IF EXISTS {name}"))
