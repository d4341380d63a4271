"""The connection to the store: one engine a process, errors translated once.

What it is not: no statement lives here. An engine is made at its first use in a process, so
that nothing connects at import and a forked child never shares a socket with its parent
(B103); the parent's pool is forgotten in the child without closing its sockets.

At each failure: a deadlock, a lost serialization race or a dropped connection is tried again
with jitter, a bounded number of times; then ``StoreUnavailable``. Repeating is safe because
every transition is guarded and can recognise its own earlier success.
"""

from __future__ import annotations

import copy
import os
import random
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from celery_lease.exceptions import SchemaMismatch, StoreUnavailable
from celery_lease.store import dialects, urls
from celery_lease.store.engine_options import EngineOptions
from celery_lease.store.schema import DEFAULT_PREFIX, build_tables

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")

#: Calls made in total before a transient error counts as an outage.
TRIES = 6
#: First wait between two tries, seconds; doubles, with full jitter.
FIRST_WAIT_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 1.0


_LOCKED = (
    "an open transaction holds a row or an idempotency key that this needs: end it first, or do "
    "this by enqueue() in that transaction"
)


class RowBusy(Exception):
    """Raised inside a transition when another transaction holds the row it needs."""


class Store:
    """One SQL database with the tables of celery-lease in it.

    Args:
        url: SQLAlchemy database URL.
        schema: PostgreSQL schema of the tables, None for the default.
        table_prefix: what the table names begin with.
        engine_options: extra arguments of ``sqlalchemy.create_engine``; they win. An isolation
            level is that of the transactions.

    Raises:
        SettingError: the URL or the options cannot be used at all.
    """

    def __init__(
        self,
        *,
        url: str,
        schema: str | None = None,
        table_prefix: str = DEFAULT_PREFIX,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url, self.dialect = urls.read(url)
        self.masked_url = urls.shown(self._url)
        self.schema = schema
        self.table_prefix = table_prefix
        self.tables = build_tables(table_prefix, schema)
        self._options = EngineOptions(engine_options or {}, self.dialect)
        self._base: Engine | None = None
        self._engine: Engine | None = None
        self._pid = -1
        #: Statements of this store, built once (see ``transitions``).
        self.statements: dict[str, Any] = {}
        #: How others have to write its tables, by who they are (see ``callers``).
        self.seen_by: dict[Hashable, Store] = {}
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<Store {self.masked_url}>"

    @property
    def engine(self) -> Engine:
        """This process's engine, made at its first use; what it begins is a transaction."""
        if self._engine is None or self._pid != os.getpid():
            self._base = self._create_engine()
            self._engine = self._base.execution_options(**self._transaction_options())
            self._pid = os.getpid()
        return self._engine

    @property
    def base_engine(self) -> Engine:
        """The engine under ``engine`` and ``single``: a listener on it hears of both."""
        _, base = self.engine, self._base
        assert base is not None
        return base

    def _transaction_options(self) -> dict[str, Any]:
        if not self.dialect.writing_ctes:
            return {"lease_transaction": True}
        # By themselves these connections are in autocommit: switching that on and off around
        # each hot statement is a third of what SQLAlchemy costs it (``bench``).
        level = self._options.transaction_level
        return {"lease_transaction": True, "isolation_level": level}

    def _create_engine(self) -> Engine:
        return self._options.create(self._url, masked_url=self.masked_url)

    def apart(self) -> Store:
        """Return the same store with connections of its own.

        For a native thread under gevent: a socket belongs to the hub of the thread that opened
        it. PyMySQL failed with ``InterfaceError`` on one that a greenlet had opened.
        """
        other = copy.copy(self)
        other.forget_engine()
        _stores.add(other)
        return other

    def qualified(self, schema: str) -> Store:
        """Return the same store with its tables' names qualified: for connections of others."""
        other = self.apart()
        other.schema = schema
        other.tables = build_tables(self.table_prefix, schema)
        other.statements = {}
        return other

    def forget_engine(self) -> None:
        """Drop the engine without touching its sockets: they belong to the parent process."""
        self._engine = self._base = None

    def leave_engine_to_parent(self) -> None:
        """Forget the engine in a forked child, and keep it from ever being closed there."""
        if self._engine is not None:
            _inherited.append(self._engine)
        self.forget_engine()

    def close(self) -> None:
        """Close this process's connections."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()
        self.forget_engine()

    @contextmanager
    def single(self) -> Iterator[Connection]:
        """Give a connection for one statement that is its own transaction."""
        if not self.dialect.autocommits:
            with self.engine.begin() as connection:
                yield connection
            return
        with self.base_engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Give a connection in a transaction with bounded lock waits; committed at the end."""
        with self.engine.begin() as connection:
            for statement in self.dialect.begin:
                connection.exec_driver_sql(statement)
            yield connection

    def retrying(self, work: Callable[[], T], *, tries: int = TRIES) -> T:
        """Return what ``work`` returns, called again after a transient error.

        Args:
            work: opens its own transaction; it may be called up to ``tries`` times.
            tries: calls in total, at least 1.

        Raises:
            StoreUnavailable: the store could not be used within the tries.
            SchemaMismatch: a table or a column is missing.
        """
        wait = FIRST_WAIT_SECONDS
        for left in range(tries - 1, -1, -1):
            try:
                with self.translated():
                    return work()
            except (_Again, RowBusy) as error:
                if left == 0:
                    raise StoreUnavailable(self.masked_url, str(error)) from error
                time.sleep(random.uniform(wait / 4, wait))  # noqa: S311  jitter, not secrecy
                wait = min(wait * 3, LONGEST_WAIT_SECONDS)
        raise AssertionError("unreachable: the last try returns or raises")

    def translated(self) -> _Translated:
        """Give a context in which database errors become this package's own."""
        return _Translated(self)


class _Again(Exception):
    """A transient error: the same call may succeed."""


class _Translated:
    """Context manager: database errors in, this package's exceptions out."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, PoolTimeoutError):
            raise _Again("no free connection in the pool: " + _one_line(error)) from error
        if not isinstance(error, DBAPIError):
            return
        trouble = self._store.dialect.trouble(error.orig or error)
        if trouble is dialects.Trouble.SCHEMA:
            raise SchemaMismatch(
                self._store.masked_url,
                None,
                "its tables",
                f"{_one_line(error.orig)}; run: celery -A yourapp lease migrate",
            ) from error
        if trouble is dialects.Trouble.LOCKED:
            raise _Again(f"{_one_line(error.orig)} ({_LOCKED})") from error
        if trouble is not dialects.Trouble.OTHER or error.connection_invalidated:
            raise _Again(_one_line(error.orig)) from error


def _one_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


#: Every store of this process: a forked child must not use its parent's sockets.
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


#: Engines of the parent process, kept so that nothing in this one ever closes their connections:
#: SQLite's manual forbids even that (sqlite.org/howtocorrupt.html, section 2.6).
_inherited: list[Engine] = []


def _forget_engines() -> None:
    for store in _stores:
        store.leave_engine_to_parent()


os.register_at_fork(after_in_child=_forget_engines)
