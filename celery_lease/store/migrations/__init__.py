"""The store's schema: which revision a database has, and the way to the one this code needs.

What it is not: the tables (``schema``), which a test compares with what the migrations make.
Alembic does the work and this folder is its script location; there is no ini file. Called by
``extension`` before the first statement of a process (``ensure_schema``) and by
``celery lease migrate``.

The database is authoritative: its version table says the revision. An empty database is
filled where the setting allows it; an existing schema is only ever changed by an operator's
``celery lease migrate``. What happens at each failure:

* two processes start at once: one lock in the database; who comes second looks again;
* a process dies half way: PostgreSQL and SQLite roll back; MySQL and MariaDB, where every
  DDL statement commits, keep the first tables, and the next migration makes the others;
* the database is away: ``StoreUnavailable``, and nothing is remembered as checked.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from celery_lease.exceptions import SchemaMismatch, StoreUnavailable
from celery_lease.store.engine import RowBusy, Store

#: Every revision this code knows, the oldest first; a test compares it with ``versions/``.
REVISIONS: Final = ("0001", "0002", "0003")
#: The revision this code works with.
HEAD: Final[str] = REVISIONS[-1]

_MIGRATE = "run: celery -A yourapp lease migrate"


def ensure_schema(store: Store, *, auto_migrate: bool) -> None:
    """See to it that the store has the tables this code needs; asks once a process and store.

    Args:
        store: the store.
        auto_migrate: True creates the tables in a database that has none of them. Tables of
            an older revision are never upgraded here: other hosts may still run older code.

    Raises:
        SchemaMismatch: the tables are missing and may not be created, older, or newer.
        StoreUnavailable: the store could not be asked; the next call asks again.

    .. versionadded:: 0.1
    """
    pid = os.getpid()
    if _checked.get(store) == pid:
        return
    found = current_revision(store)
    if found is None and auto_migrate:
        _, found = _migrate(store, only_if_empty=True)
    _refuse_other(store, found)
    _checked[store] = pid


def current_revision(store: Store) -> str | None:
    """Return the revision of the store's tables; None when a migration never finished there.

    Raises:
        StoreUnavailable: the store could not be asked.

    .. versionadded:: 0.1
    """

    def work() -> str | None:
        with store.single() as connection:
            return _read_revision(store, connection)

    try:
        return store.retrying(work)
    except SchemaMismatch:
        # There is no version table.
        return None
    except DBAPIError as error:
        raise StoreUnavailable(store.masked_url, _said(error)) from error


def migrate(store: Store) -> tuple[str | None, str]:
    """Bring the store's tables to ``HEAD``, from none or from an older revision.

    Returns:
        The revision found (None: there were no tables) and the one the store has now; the
        same twice when nothing was to be done.

    Raises:
        SchemaMismatch: the revision is not one of ours, or the database refused a change.
        StoreUnavailable: the store could not be used.

    .. versionadded:: 0.1
    """
    return _migrate(store, only_if_empty=False)


# -- the way there ---------------------------------------------------------------------------


def _migrate(store: Store, *, only_if_empty: bool) -> tuple[str | None, str]:
    def work() -> tuple[str | None, str]:
        with _alembic_lock, _only_migration(store) as connection:
            found = _revision_under_lock(store, connection)
            if found is not None and (only_if_empty or found not in REVISIONS):
                return found, found
            if found != HEAD:
                _upgrade(store, connection)
            return found, HEAD

    try:
        found, reached = store.retrying(work)
    except DBAPIError as error:
        raise SchemaMismatch(
            store.masked_url,
            None,
            HEAD,
            f"its tables could not be changed ({_said(error)}); {_MIGRATE}, "
            "with a database user who may do that",
        ) from error
    if not only_if_empty:
        _refuse_other(store, reached)
    return found, reached


@contextmanager
def _only_migration(store: Store) -> Iterator[Connection]:
    """Give a connection in a transaction, while no other process migrates this database."""
    with store.engine.connect() as connection:
        _take_lock(store, connection)
        try:
            # After the lock: the bound on lock waits is for the changes, not for the queue.
            for statement in store.dialect.begin:
                connection.exec_driver_sql(statement)
            yield connection
            connection.commit()
        finally:
            _release_lock(store, connection)


def _take_lock(store: Store, connection: Connection) -> None:
    """Wait for the lock. Without a statement for it, the transaction itself is the lock."""
    connection.begin()
    if store.dialect.lock_migrations is None:
        return
    answer = connection.exec_driver_sql(store.dialect.lock_migrations).scalar()
    # PostgreSQL's returns no number, GET_LOCK 1; or 0 after its timeout.
    if answer == 0:
        message = "another process has been migrating it for a minute"
        raise RowBusy(message)


def _release_lock(store: Store, connection: Connection) -> None:
    if store.dialect.unlock_migrations is None or connection.invalidated:
        return
    try:
        # First the end of what the lock protects: who gets it next must see the new revision.
        connection.rollback()
        connection.exec_driver_sql(store.dialect.unlock_migrations)
    except DBAPIError:
        # Not back into the pool with the lock in its hands: closed, it lets go.
        connection.invalidate()


def _upgrade(store: Store, connection: Connection) -> None:
    if store.schema is not None and not sa.inspect(connection).has_schema(store.schema):
        connection.execute(sa.schema.CreateSchema(store.schema))
    # Alembic is 7 MB, in each process of a worker, and needed once in the life of a database.
    steps = importlib.import_module("celery_lease.store.migrations.steps")
    with _quiet():
        steps.upgrade(store, connection, HEAD)


# -- what is there ---------------------------------------------------------------------------


def _read_revision(store: Store, connection: Connection) -> str | None:
    version = sa.table(
        store.tables.version_table, sa.column("version_num", sa.String), schema=store.schema
    )
    revision: str | None = connection.execute(sa.select(version.c.version_num)).scalar()
    return revision


def _revision_under_lock(store: Store, connection: Connection) -> str | None:
    # Looked up first: a failed statement would end the transaction, and with it the lock.
    if not sa.inspect(connection).has_table(store.tables.version_table, schema=store.schema):
        return None
    return _read_revision(store, connection)


def _refuse_other(store: Store, found: str | None) -> None:
    if found == HEAD:
        return
    if found is None or found in REVISIONS:
        remedy = _MIGRATE
    else:
        remedy = "its tables were made by a newer release: upgrade celery-lease on this host"
    raise SchemaMismatch(store.masked_url, found, HEAD, remedy)


def _said(error: DBAPIError) -> str:
    lines = str(error.orig or error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# -- one process -----------------------------------------------------------------------------

#: The process that has checked a store.
_checked: WeakKeyDictionary[Store, int] = WeakKeyDictionary()
#: Alembic's ``context`` and ``op`` are one per process, not one per thread.
_alembic_lock = threading.Lock()


def _new_lock() -> None:
    """Replace a lock that a thread of the parent may have held at the fork."""
    global _alembic_lock  # noqa: PLW0603 - the one in place may never be released again
    _alembic_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Alembic's account of its steps out of the application's log; warnings pass."""
    thread = threading.get_ident()

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.thread != thread

    # A filter of a parent logger is not asked about its children's records: name them.
    loggers = [logging.getLogger(f"alembic.runtime.{name}") for name in ("migration", "plugins")]
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)
