"""A store with empty tables, on every database.

The tables are made once a test process and kind, and emptied for each test: making a database
for each would take longer than all tests together. A test that breaks its database, or wants one
without tables, takes ``database_url``.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import NullPool

from celery_lease.store.engine import Store, _Again
from tests.support.databases import new_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    LoseReplies = Callable[[Store, int], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def kept_sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of this test process's SQLite file, with tables."""
    return _with_tables(f"sqlite:///{tmp_path_factory.mktemp('store') / 'lease.db'}")


@pytest.fixture(scope="session")
def kept_postgresql(postgresql: Any) -> Iterator[str]:
    """The URL of this test process's PostgreSQL database, with tables."""
    with new_database(postgresql.url) as url:
        yield _with_tables(url)


@pytest.fixture(scope="session")
def kept_mariadb(mariadb: Any) -> Iterator[str]:
    """The URL of this test process's MariaDB database, with tables."""
    with new_database(mariadb.url) as url:
        yield _with_tables(url)


def _with_tables(url: str) -> str:
    store = Store(url=url)
    store.tables.metadata.create_all(store.engine)
    store.close()
    return url


@pytest.fixture
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """Open stores on the kept database of a kind; closed after the test."""
    with ExitStack() as stack:

        def open_one(kind: str, **options: Any) -> Store:
            url = request.getfixturevalue(f"kept_{kind}")
            store = Store(url=url, engine_options=options)
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture(scope="session")
def kept_stores() -> Iterator[dict[tuple[str, str], Store]]:
    """The stores that all tests share, by URL and name."""
    stores: dict[tuple[str, str], Store] = {}
    yield stores
    for store in stores.values():
        store.close()


@pytest.fixture(scope="session")
def kept_store(
    kept_stores: dict[tuple[str, str], Store],
) -> Callable[[str, str], Store]:
    """Return the one store of a URL and a name: its statements are compiled once, not each time."""

    def kept(url: str, name: str) -> Store:
        if (url, name) not in kept_stores:
            options = {"pool_size": 20, "max_overflow": 40}
            kept_stores[url, name] = Store(url=url, engine_options=options)
        return kept_stores[url, name]

    return kept


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of database after the other."""
    return str(request.param)


@pytest.fixture
def store(
    kind: str, request: pytest.FixtureRequest, kept_store: Callable[[str, str], Store]
) -> Store:
    """A store with empty tables, on each database."""
    return _emptied(kept_store(request.getfixturevalue(f"kept_{kind}"), "one"))


@pytest.fixture
def other_store(
    kind: str, request: pytest.FixtureRequest, kept_store: Callable[[str, str], Store]
) -> Store:
    """The same database as ``store`` with an engine of its own, as another process has it."""
    return kept_store(request.getfixturevalue(f"kept_{kind}"), "other")


@pytest.fixture(params=["postgresql", "mariadb"])
def row_store(request: pytest.FixtureRequest, kept_store: Callable[[str, str], Store]) -> Store:
    """A store whose database locks rows; the third kind has one writer at a time instead."""
    return _emptied(kept_store(request.getfixturevalue(f"kept_{request.param}"), "one"))


@pytest.fixture
def bare_store(database_url: str) -> Iterator[Store]:
    """A store on a database without any table, for this test alone."""
    store = Store(url=database_url)
    yield store
    store.close()


def _emptied(store: Store) -> Store:
    with store.engine.begin() as connection:
        for table in reversed(store.tables.metadata.sorted_tables):
            connection.execute(sa.delete(table))
    return store


@pytest.fixture
def lose_replies() -> LoseReplies:
    """Lose the replies to the next so many writes.

    Each has committed, and its caller sees a broken connection, as when the network breaks
    between the two.
    """

    @contextmanager
    def losing(store: Store, count: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            left = [count]
            for name in ("single", "transaction"):
                patch.setattr(store, name, _reply_lost(getattr(store, name), left))
            yield
        assert left == [0], "fewer writes than replies to lose"

    return losing


@pytest.fixture
def lose_requests() -> LoseReplies:
    """Lose the next so many requests before the store has seen them."""

    @contextmanager
    def losing(store: Store, count: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            left = [count]
            for name in ("single", "transaction"):
                patch.setattr(store, name, _request_lost(getattr(store, name), left))
            yield
        assert left == [0], "fewer requests than were to be lost"

    return losing


def _reply_lost(inner: Any, left: list[int]) -> Any:
    @contextmanager
    def broken() -> Iterator[sa.Connection]:
        written: list[str] = []
        with inner() as connection:
            event.listen(connection, "before_cursor_execute", _note_writes(written))
            yield connection
        if left[0] and written:
            left[0] -= 1
            raise _Again("the reply was lost")

    return broken


def _request_lost(inner: Any, left: list[int]) -> Any:
    @contextmanager
    def broken() -> Iterator[sa.Connection]:
        if left[0]:
            left[0] -= 1
            raise _Again("the request was lost")
        with inner() as connection:
            yield connection

    return broken


def _note_writes(written: list[str]) -> Any:
    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if re.search(r"\b(UPDATE|INSERT|DELETE)\b", statement.replace("FOR UPDATE", "")):
            written.append(statement)

    return note


@pytest.fixture
def drop_connections(
    kept_stores: dict[tuple[str, str], Store],
) -> Iterator[Callable[[Store], int]]:
    """End every connection to a store's database from the server's side; returns how many."""
    with ExitStack() as stack:
        for kept in kept_stores.values():
            # What is left of their pools is no concern of the next test.
            stack.callback(kept.close)

        def drop(store: Store) -> int:
            killer = sa.create_engine(store._url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
            stack.callback(killer.dispose)
            with killer.connect() as connection:
                if connection.dialect.name == "postgresql":
                    every = sa.text(
                        "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                    return len(connection.execute(every).all())
                others = sa.text(
                    "SELECT id FROM information_schema.processlist "
                    "WHERE db = database() AND id <> connection_id()"
                )
                ids = connection.scalars(others).all()
                for one in ids:
                    connection.execute(sa.text(f"KILL {int(one)}"))
                return len(ids)

        yield drop
