"""A transaction that is not the store's: the caller's own, which a job joins.

What a caller is (``Caller``), whether its database is the store's (``place_of``), and the one
that SQLAlchemy's users have: a ``Connection``, or the one of a ``Session``. Django's is in
``contrib``, and has its statements written by ``Formatted``.

When a transaction of SQLAlchemy's is over: no public event comes after a commit. ``commit`` comes
before it, and so the jobs of a committed transaction are told at the first event that can only
come after: the connection goes back to its pool, or begins the next transaction. Nothing is
decided by what is remembered here: whoever is told asks the store whether a job is there. A
savepoint that was rolled back, a commit that failed, a transaction inside a larger one: not there.

At each failure: what is remembered is lost with the process, or with the connection. The job is
in the store, or is not; the reaper sends it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import event
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session

from celery_lease.exceptions import SettingError
from celery_lease.store.dialects import Ask, Whereabouts, family_of
from celery_lease.store.engine import Store
from celery_lease.store.urls import shown

logger = logging.getLogger(__name__)

Send = Callable[[list[str]], None]
_KEY = "celery_lease"
#: What a caller may have told his connection for his own statements: no cursor on the server, and
#: the names of our tables as they are.
_PLAIN: Mapping[str, Any] = {
    "stream_results": False,
    "yield_per": None,
    "schema_translate_map": None,
}


class Caller(Protocol):
    """A connection of somebody else's, with a transaction that he ends.

    Its statements raise what its own library raises: his is the transaction, and the trying again.
    """

    @property
    def family(self) -> str:
        """The dialect name of its database."""

    @property
    def identity(self) -> Hashable:
        """Equal for connections to the same database."""

    @property
    def description(self) -> str:
        """Its database, without a password."""

    def fetch(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a statement and return its rows."""

    def write(self, statement: Any, parameters: Mapping[str, Any]) -> int:
        """Run a statement and return how many rows it has changed."""

    def insert(self, statement: Any, parameters: Mapping[str, Any]) -> BaseException | None:
        """Run an INSERT; returns the error if there is such a row."""

    def after_commit(self, job_id: str, send: Send) -> None:
        """Have a job sent once this transaction is committed."""


# --- the same database --------------------------------------------------------------------------


def place_of(store: Store, caller: Caller, *, prepare: Callable[[], object]) -> Store:
    """Return the store as a caller has to write its tables' names.

    Asked once a database of a caller's.

    Args:
        store: the store.
        caller: whose transaction it is.
        prepare: sees to it that the store has its tables.

    Raises:
        SettingError: the caller's database is not the store's.
        StoreUnavailable: the store could not be asked.
    """
    known = store.seen_by.get(caller.identity)
    if known is not None:
        return known
    if family_of(caller.family) != store.dialect.name:
        raise _elsewhere(store, caller)
    if store.dialect.one_writer and _place(store, caller.fetch) is None:
        # Perhaps the caller writes at this moment, and ``prepare`` would wait for him for ever.
        raise _elsewhere(store, caller)
    prepare()
    for _ in range(2):
        ours = store.retrying(lambda: _ours(store))
        # Twice: the server may have been restarted between the two.
        if ours is not None and ours == _place(store, caller.fetch, ours.schema):
            return _remember(store, caller.identity, ours.schema)
    raise _elsewhere(store, caller)


def _remember(store: Store, identity: Hashable, schema: str) -> Store:
    """Keep how a caller has to write the tables' names, and no longer those of who is gone."""
    seen = list(store.seen_by.items())
    for known, _ in seen:
        if isinstance(known, weakref.ref) and known() is None:
            store.seen_by.pop(known, None)
    named = next((place for _, place in seen if place.schema == schema), None)
    # The same for all: each has statements of its own.
    place = store.seen_by[identity] = named or store.qualified(schema)
    return place


def _place(store: Store, ask: Ask, schema: str | None = None) -> Whereabouts | None:
    return store.dialect.whereabouts(ask, store.tables.job.name, schema)


def _ours(store: Store) -> Whereabouts | None:
    with store.single() as connection:

        def ask(statement: Any, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
            return [dict(row) for row in connection.execute(statement, parameters).mappings()]

        return _place(store, ask, store.schema)


def _elsewhere(store: Store, caller: Caller) -> SettingError:
    problem = (
        "enqueue() writes the job in the caller's own transaction, but that is in "
        f"{caller.description}, and lease_store_url is {store.masked_url}: have both in one "
        "database, or call apply_async() after the commit (if they are one, its tables are "
        "missing: run: celery -A yourapp lease migrate)"
    )
    return SettingError([problem])


# --- SQLAlchemy ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Remembered:
    """The jobs of one connection of the driver's: (who sends it, job id).

    Attributes:
        open: of the transaction that is open.
        ended: of those that are committed.
        autocommits: True when each statement is a transaction, which no rollback undoes.
    """

    autocommits: bool = False
    open: list[tuple[Send, str]] = field(default_factory=list)
    ended: list[tuple[Send, str]] = field(default_factory=list)


class ConnectionCaller:
    """A connection of SQLAlchemy's.

    Args:
        connection: the connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def family(self) -> str:
        """The dialect name of its database."""
        return self._connection.dialect.name

    @property
    def identity(self) -> Hashable:
        """Its engine's dialect, which an engine shares with those made from it."""
        return weakref.ref(self._connection.dialect)

    @property
    def description(self) -> str:
        """Its URL, without its passwords."""
        return shown(self._connection.engine.url)

    def fetch(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a statement and return its rows."""
        return [dict(row) for row in self._execute(statement, parameters).mappings()]

    def write(self, statement: Any, parameters: Mapping[str, Any]) -> int:
        """Run a statement and return how many rows it has changed."""
        return int(self._execute(statement, parameters).rowcount)

    def insert(self, statement: Any, parameters: Mapping[str, Any]) -> BaseException | None:
        """Run an INSERT; returns the error if there is such a row."""
        try:
            self._execute(statement, parameters)
        except IntegrityError as error:
            return error
        return None

    def _execute(self, statement: Any, parameters: Mapping[str, Any]) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters, execution_options=_PLAIN)

    def after_commit(self, job_id: str, send: Send) -> None:
        """Have a job sent once this transaction is committed."""
        remembered = self._connection.info.setdefault(_KEY, _Remembered())
        remembered.open.append((send, job_id))
        remembered.autocommits = _autocommits(self._connection)
        _watch(self._connection, remembered)


def caller_of(target: object) -> ConnectionCaller:
    """Return the caller that a user's session or connection is.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(target, Session | scoped_session):
        return ConnectionCaller(target.connection())
    if isinstance(target, Connection):
        return ConnectionCaller(target)
    kind = type(target)
    if any(base.__module__.startswith("sqlalchemy.ext.asyncio") for base in kind.__mro__):
        message = (
            f"enqueue() got a {kind.__name__}: write "
            "await session.run_sync(lambda session: task.enqueue(session, …))"
        )
        raise TypeError(message)
    message = (
        "enqueue() takes an SQLAlchemy Session or Connection, or using= with the name of a "
        f"database of Django's, not {kind.__module__}.{kind.__qualname__}"
    )
    raise TypeError(message)


class _Watching:
    """The lock that is held while listeners are added; a forked child has one of its own."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget who held it: a thread that is not in this process."""
        self.lock = threading.Lock()


_watching = _Watching()
os.register_at_fork(after_in_child=_watching.renew)
_connections: weakref.WeakKeyDictionary[Connection, _Remembered] = weakref.WeakKeyDictionary()
_pools: weakref.WeakSet[Any] = weakref.WeakSet()


def _watch(connection: Connection, remembered: _Remembered) -> None:
    """Listen for the end of a connection's transaction.

    On the connection, and not its engine: what enqueues nothing pays nothing.
    """
    with _watching.lock:
        pool = connection.engine.pool
        if pool not in _pools:
            event.listen(pool, "checkin", _returned)
            _pools.add(pool)
        if connection not in _connections:
            for name in ("commit", "commit_twophase"):
                event.listen(connection, name, _committed)
            for name in ("rollback", "rollback_twophase"):
                event.listen(connection, name, _rolled_back)
            for name in ("begin", "begin_twophase"):
                event.listen(connection, name, _begins)
        _connections[connection] = remembered


def _committed(connection: Connection, *_: object) -> None:
    remembered = _connections.get(connection)
    if remembered is not None:
        remembered.ended += remembered.open
        remembered.open.clear()


def _rolled_back(connection: Connection, *_: object) -> None:
    remembered = _connections.get(connection)
    if remembered is not None:
        if remembered.autocommits:
            remembered.ended += remembered.open
        remembered.open.clear()


def _autocommits(connection: Connection) -> bool:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    # Where the engine itself was made so. Older SQLAlchemys cannot say: then the reaper sends it.
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)
    try:
        return detect is not None and bool(detect(connection.connection.dbapi_connection))
    except (AttributeError, NotImplementedError):
        return False


def _begins(connection: Connection, *_: object) -> None:
    remembered = _connections.get(connection)
    if remembered is not None:
        _send(remembered)


def _returned(connection: object, record: Any) -> None:
    del connection
    remembered = record.info.get(_KEY)
    if remembered is None:
        return
    try:
        _send(remembered)
    except BaseException:
        # What interrupts a thread is not ours to swallow. But the pool puts the connection back
        # after this event, and would lose it: so that is done here.
        pool = getattr(record, "_ConnectionRecord__pool", None)
        if pool is None:
            logger.exception("lease.enqueue.interrupted")
            return
        pool._return_conn(record)  # noqa: SLF001  there is no other way to it
        raise


def _send(remembered: _Remembered) -> None:
    ended = list(remembered.ended)
    remembered.ended.clear()
    send_all(ended)


def send_all(jobs: Sequence[tuple[Send, str]]) -> None:
    """Have jobs sent whose transaction is over, those of one sender together.

    No error comes out of it, only what interrupts the thread: the reaper sends what is left.
    """
    by_sender: dict[Send, list[str]] = {}
    for send, job_id in jobs:
        by_sender.setdefault(send, []).append(job_id)
    for send, job_ids in by_sender.items():
        try:
            send(job_ids)
        except Exception:
            # The caller has committed: whatever is wrong here, the reaper sends them.
            logger.exception("lease.enqueue.unsent count=%d", len(job_ids))


# --- others -------------------------------------------------------------------------------------


class Formatted:
    """Writes statements for a cursor of the DB-API whose parameters are ``%s``.

    Parameters are texts, bytes and numbers only, which every driver takes as they are.

    Args:
        store: the store, whose dialect it is.
    """

    def __init__(self, store: Store) -> None:
        kind: Any = type(store.base_engine.dialect)
        self._dialect = kind(paramstyle="format")
        self._compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __call__(self, statement: Any, parameters: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Return the text of a statement and its parameters in their order."""
        compiled = self._compiled.get(statement)
        if compiled is None:
            compiled = self._compiled[statement] = statement.compile(dialect=self._dialect)
        values = compiled.construct_params(parameters)
        return str(compiled), [values[name] for name in compiled.positiontup]
