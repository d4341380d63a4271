"""What differs between databases: the only file that names one.

Each family is one ``Dialect`` object: how it tells the time, what its statements may contain,
how its connections are set up, and what its errors mean. Everything else in ``store`` is one
statement text for all of them.

Long because it is the only one: a second file naming a database would be a second place to look.

Floors: PostgreSQL 13, MariaDB 10.6, MySQL 8.0.16, SQLite 3.35 (design, section 4).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: How long a connection attempt may take. Below the shortest useful lease, so that a heartbeat
#: that meets a dead host still has a second try.
CONNECT_TIMEOUT_SECONDS = 3
#: How long a statement waits for another transaction's row lock before it is tried again.
LOCK_WAIT_SECONDS = 2
#: How long an open transaction of a frozen process may keep its row locks.
IDLE_TRANSACTION_SECONDS = 20
#: How long SQLite waits for the one writer.
SQLITE_BUSY_SECONDS = 10.0

Blob = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
LongText = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


class Instant(TypeDecorator[datetime]):
    """A UTC instant with microseconds, read as an aware datetime.

    SQLite has no such type: it keeps integer microseconds since 1970, so that instants are
    compared as numbers and never as texts of different length.
    """

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """Return the column type of a database."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True, precision=6))
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(sa.BigInteger())

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> Any:
        """Return the driver's form of an aware datetime."""
        if value is None:
            return None
        if dialect.name == "sqlite":
            return (value - _EPOCH) // _MICROSECOND
        utc = value.astimezone(timezone.utc)
        return utc if dialect.name == "postgresql" else utc.replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        """Return an aware UTC datetime."""
        if value is None:
            return None
        if isinstance(value, datetime):
            return (
                value.replace(tzinfo=timezone.utc)
                if value.tzinfo is None
                else value.astimezone(timezone.utc)
            )
        return _EPOCH + int(value) * _MICROSECOND


class Clock(FunctionElement[datetime]):
    """The store's own time, at the statement and not at the start of its transaction."""

    type = Instant()
    inherit_cache = True
    name = "lease_clock"


@compiles(Clock)
def _clock(element: Clock, compiler: SQLCompiler, **kw: Any) -> str:
    # SQLite: milliseconds, from the host's clock; constant within one statement.
    return "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"


@compiles(Clock, "postgresql")
def _clock_postgresql(element: Clock, compiler: SQLCompiler, **kw: Any) -> str:
    # now() would be the start of the transaction: a lease won after a lock wait would be short.
    return "clock_timestamp()"


@compiles(Clock, "mysql", "mariadb")
def _clock_mysql(element: Clock, compiler: SQLCompiler, **kw: Any) -> str:
    return "UTC_TIMESTAMP(6)"


class Later(FunctionElement[datetime]):
    """An instant moved by a number of seconds: ``Later(instant, seconds)``."""

    type = Instant()
    inherit_cache = True
    name = "lease_later"

    def __init__(self, instant: ColumnElement[Any], seconds: ColumnElement[Any] | float) -> None:
        amount = (
            sa.literal(float(seconds), sa.Double) if isinstance(seconds, int | float) else seconds
        )
        super().__init__(instant, amount)


def _operands(element: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> list[str]:
    return [compiler.process(clause, **kw) for clause in element.clauses]


@compiles(Later)
def _later(element: Later, compiler: SQLCompiler, **kw: Any) -> str:
    instant, seconds = _operands(element, compiler, **kw)
    return f"({instant} + CAST({seconds} * 1000000 AS INTEGER))"


@compiles(Later, "postgresql")
def _later_postgresql(element: Later, compiler: SQLCompiler, **kw: Any) -> str:
    instant, seconds = _operands(element, compiler, **kw)
    return f"({instant} + CAST({seconds} AS double precision) * interval '1 second')"


@compiles(Later, "mysql", "mariadb")
def _later_mysql(element: Later, compiler: SQLCompiler, **kw: Any) -> str:
    instant, seconds = _operands(element, compiler, **kw)
    return f"({instant} + INTERVAL CAST({seconds} * 1000000 AS SIGNED) MICROSECOND)"


class SecondsBetween(FunctionElement[float]):
    """Seconds from the first instant to the second."""

    type = sa.Double()
    inherit_cache = True
    name = "lease_seconds_between"


@compiles(SecondsBetween)
def _between(element: SecondsBetween, compiler: SQLCompiler, **kw: Any) -> str:
    start, end = _operands(element, compiler, **kw)
    return f"(({end} - {start}) / 1000000.0)"


@compiles(SecondsBetween, "postgresql")
def _between_postgresql(element: SecondsBetween, compiler: SQLCompiler, **kw: Any) -> str:
    start, end = _operands(element, compiler, **kw)
    return f"CAST(extract(epoch FROM ({end} - {start})) AS double precision)"


@compiles(SecondsBetween, "mysql", "mariadb")
def _between_mysql(element: SecondsBetween, compiler: SQLCompiler, **kw: Any) -> str:
    start, end = _operands(element, compiler, **kw)
    return f"(TIMESTAMPDIFF(MICROSECOND, {start}, {end}) / 1000000.0)"


def clock() -> Clock:
    """Return the store's time as an SQL expression."""
    return Clock()


def clock_once() -> ColumnElement[datetime]:
    """Return the store's time, read once a statement: what is compared with it can be indexed.

    PostgreSQL asks its clock again for every row, and so reads every row. For conditions that
    time only ever makes true: an instant a little too early moves nothing that is not due.
    """
    return sa.select(Clock()).scalar_subquery()


#: Ids are compared byte by byte everywhere; MySQL and MariaDB would ignore case otherwise.
TABLE_OPTIONS: Mapping[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in (
        ("engine", "InnoDB"),
        ("charset", "utf8mb4"),
        ("collate", "utf8mb4_bin"),
    )
}


def leave_room(fullname: str, dialect_name: str) -> str | None:
    """Return the statement that has a table's pages half filled; None where there is none.

    The room lets a renewal stay on its page (HOT). A statement of its own, since SQLAlchemy
    2.0 has no table option for it.
    """
    if dialect_name != "postgresql":
        return None
    return f"ALTER TABLE {fullname} SET (fillfactor = 50)"


def leave_room_after_create(table: sa.Table) -> None:
    """Have ``leave_room`` run when the table is created from its metadata."""

    @event.listens_for(table, "after_create")
    def made(target: sa.Table, connection: Connection, **_: Any) -> None:
        name = connection.dialect.identifier_preparer.format_table(target)
        statement = leave_room(name, connection.dialect.name)
        if statement is not None:
            connection.exec_driver_sql(statement)


def index_options(where: str) -> dict[str, Any]:
    """Return the options of an index on the rows that matter; MySQL and MariaDB index all."""
    clause = sa.text(where)
    return {"postgresql_where": clause, "sqlite_where": clause}


def has_partial_indexes(dialect_name: str) -> bool:
    """Tell whether ``index_options`` limits the rows of an index on this database."""
    return dialect_name in ("postgresql", "sqlite")


def by_primary_key(statement: Any, table: sa.Table) -> Any:
    """Return a statement that finds its rows by their primary key.

    MySQL and MariaDB lock, and wait for, every row that their scan looks at. Left to
    themselves they may scan an index of all live attempts, and a renewal then waits for
    another job's lease (MariaDB 10.11, few rows); the others lock only what matches.
    """
    for name in ("mysql", "mariadb"):
        if isinstance(statement, sa.Select):
            statement = statement.with_hint(table, "FORCE INDEX (PRIMARY)", name)
        else:
            statement = statement.with_hint("FORCE INDEX (PRIMARY)", table, name)
    return statement


def unindexed(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return conditions that are only looked at in a row that was found by its key.

    A condition that implies the predicate of a partial index lets the planner scan that whole
    index instead: cheap by statistics of a quiet minute, the whole backlog at each claim when
    they are old (PostgreSQL 15: queued jobs at a claim, live attempts at an end). No planner
    sees through CASE.
    """
    return sa.case((sa.and_(*conditions), 1), else_=0) == 1


class Trouble(Enum):
    """What a database error means to the caller."""

    TRANSIENT = "transient"
    """Another transaction was in the way: the same call again, at once, may succeed."""
    LOCKED = "locked"
    """The same, after a wait of as long as a statement may wait."""
    UNAVAILABLE = "unavailable"
    """The database cannot be reached, or refuses this client."""
    SCHEMA = "schema"
    """A table or a column is missing."""
    OTHER = "other"


#: Runs a statement with its parameters, and returns the rows.
Ask = Callable[[Any, Mapping[str, Any]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Whereabouts:
    """Which table a connection means: two connections that have the same one have equal ones.

    Attributes:
        database: server and database, so that no other one has it.
        table: the table's own number, where there is one.
        schema: what the table is to be qualified with, to be this one whatever a connection has
            set (``search_path``, ``USE``).
    """

    database: tuple[Any, ...]
    table: Any
    schema: str


@dataclass(frozen=True)
class Dialect:
    """One database family.

    Attributes:
        name: SQLAlchemy's name of it.
        writing_ctes: an UPDATE may feed an INSERT or another UPDATE in one statement.
        returning: UPDATE … RETURNING exists.
        refusals_lock: an INSERT that is refused leaves a lock on the row that is there already.
        one_writer: while one transaction writes, all others wait.
        autocommits: a single statement needs no transaction around it, and asking for that
            costs no round trip.
        connect_arguments: bounds on connecting.
        engine_options: arguments of ``create_engine``.
        prepare: sets up an engine's connections; it is told the connect arguments that the
            user gave, which win.
        trouble: reads a driver error.
        whereabouts: says which table a connection means by a name.
        begin: statements at the start of a transaction.
        lock_migrations: holds the one lock that keeps two migrations apart.
        unlock_migrations: lets it go.
    """

    name: str
    writing_ctes: bool
    returning: bool
    autocommits: bool
    refusals_lock: bool
    one_writer: bool
    prepare: Callable[[Engine, Mapping[str, Any]], None]
    trouble: Callable[[BaseException], Trouble]
    whereabouts: Callable[[Ask, str, str | None], Whereabouts | None]
    connect_arguments: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    begin: tuple[str, ...] = ()
    lock_migrations: str | None = None
    unlock_migrations: str | None = None


def insert_if_absent(table: sa.Table) -> Any:
    """Return an INSERT for a writing CTE that leaves a row that is there alone."""
    return postgresql.insert(table).on_conflict_do_nothing()


# -- PostgreSQL ------------------------------------------------------------------------------


def _postgresql_trouble(error: BaseException) -> Trouble:
    code = getattr(error, "sqlstate", None)
    # 40001 serialization, 40P01 deadlock, 57014 statement cancelled (by an administrator's
    # statement_timeout, say), 55P03 lock not available.
    if code in ("40001", "40P01", "57014"):
        return Trouble.TRANSIENT
    if code == "55P03":
        return Trouble.LOCKED
    if code in ("42P01", "42703", "3F000"):
        return Trouble.SCHEMA
    if code is None and type(error).__name__ not in ("OperationalError", "InterfaceError"):
        # The driver itself refused a value (a NUL in a text): no connection is broken, and the
        # same call again would be refused again.
        return Trouble.OTHER
    # No code: the connection itself broke. 08: connection; 28: login; 3D: no such database;
    # 53: resources; 57P: shut down; 25P03: idle in transaction too long; 25006: read only.
    if code is None or code[:2] in ("08", "28", "3D", "53") or code.startswith("57P"):
        return Trouble.UNAVAILABLE
    return Trouble.UNAVAILABLE if code in ("25P03", "25006") else Trouble.OTHER


def _postgresql_whereabouts(ask: Ask, table: str, schema: str | None) -> Whereabouts | None:
    # Nothing here can fail for want of a right or a table: an error would end the transaction of
    # the caller. The start of the server, to the microsecond, stands for the server; instants as
    # numbers, since a text would be by the connection's own time zone.
    parts = [table] if schema is None else [schema, table]
    name = ".".join('"{}"'.format(part.replace('"', '""')) for part in parts)
    rows = ask(
        sa.text(
            "SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) "
            "AS started, current_database() AS name, CAST(c.oid AS bigint) AS number, "
            "CAST(n.nspname AS text) AS place "
            "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass(:name)"
        ),
        {"name": name},
    )
    if not rows:
        return None
    row = rows[0]
    return Whereabouts((row["started"], row["name"]), row["number"], row["place"])


#: Uses of a statement after which psycopg has the server keep it (psycopg's own default).
PREPARE_THRESHOLD = 5


def _postgresql_prepare(engine: Engine, given: Mapping[str, Any]) -> None:
    if engine.dialect.driver != "psycopg":
        return

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: object) -> None:
        """Bound lock waits, and have statements prepared, where this is the server's own.

        A statement that is its own transaction waits for a lock no longer than one in
        ``transaction()`` does, unless a bound was set already. Planning a claim takes the server
        longer than running it. Behind PgBouncer the backend is another one than the client was
        told of, and may be another at each transaction: a prepared statement would not be there,
        and a bound would be another client's.
        """
        del record
        was, connection.autocommit = connection.autocommit, True
        # One round trip. CASE looks first, and sets only then.
        (is_own,) = connection.execute(
            f"SELECT CASE WHEN pg_backend_pid() <> {connection.info.backend_pid} THEN false "
            "WHEN current_setting('lock_timeout') <> '0' THEN true "
            f"ELSE set_config('lock_timeout', '{LOCK_WAIT_SECONDS}s', false) <> '' END"
        ).fetchone()
        connection.autocommit = was
        if is_own and "prepare_threshold" not in given:
            connection.prepare_threshold = PREPARE_THRESHOLD


_POSTGRESQL = Dialect(
    name="postgresql",
    writing_ctes=True,
    returning=True,
    autocommits=True,
    refusals_lock=False,
    one_writer=False,
    prepare=_postgresql_prepare,
    trouble=_postgresql_trouble,
    whereabouts=_postgresql_whereabouts,
    # prepare_threshold: None until the connection is known to be the server's own (``prepare``).
    connect_arguments={
        "connect_timeout": CONNECT_TIMEOUT_SECONDS,
        "keepalives_idle": 10,
        "keepalives_interval": 3,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
        "prepare_threshold": None,
        "application_name": "celery-lease",
    },
    begin=(
        (
            f"SELECT set_config('lock_timeout', '{LOCK_WAIT_SECONDS}s', true), "
            "set_config('idle_in_transaction_session_timeout', "
            f"'{IDLE_TRANSACTION_SECONDS}s', true)"
        ),
    ),
    # The transaction's own advisory lock: it also works behind PgBouncer.
    # A migration may take long: whoever comes second waits for as long as that.
    lock_migrations=(
        "SELECT set_config('lock_timeout', '0', true), pg_advisory_xact_lock(7305121949071266631)"
    ),
)


# -- MySQL and MariaDB -----------------------------------------------------------------------


#: Errors that the client library makes: refused, gone away, lost during a query.
_MYSQL_CLIENT_ERRORS = range(2000, 3000)
_MYSQL_LOCK_WAIT = 1205
#: Errors of the server about connecting, logging in, shutting down, packets, read only, killed.
_MYSQL_UNAVAILABLE = frozenset(
    {0, 1040, 1044, 1045, 1049, 1053, 1129, 1130, 1152, 1158, 1159, 1160, 1161, 1184, 1290}
    | {1927, 4031}
)


def _mysql_trouble(error: BaseException) -> Trouble:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else None
    # 1213 deadlock, 3572 NOWAIT, 1020 changed since last read (MariaDB 11);
    # 1317, 1969, 3024: the statement was killed, or took longer than an administrator allows.
    if code in (1213, 3572, 1020, 1317, 1969, 3024):
        return Trouble.TRANSIENT
    if code == _MYSQL_LOCK_WAIT:
        return Trouble.LOCKED
    if code in (1146, 1054, 1051):
        return Trouble.SCHEMA
    if code is None or code in _MYSQL_CLIENT_ERRORS or code in _MYSQL_UNAVAILABLE:
        return Trouble.UNAVAILABLE
    return Trouble.OTHER


def _mysql_prepare(engine: Engine, given: Mapping[str, Any]) -> None:
    del given
    # Many rows in one INSERT: the drivers send them one by one (1,000 jobs: 109 ms, not 367).
    engine.dialect.use_insertmanyvalues_wo_returning = True

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: object) -> None:
        del record
        cursor = connection.cursor()
        try:
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS}")
            # A text that does not fit must be an error, never cut in silence.
            cursor.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')")
            cursor.execute("SELECT VERSION()")
            if "mariadb" in str(cursor.fetchone()[0]).lower():
                # MySQL has no such bound: there a frozen transaction holds its rows until
                # the server's wait_timeout.
                cursor.execute(f"SET SESSION idle_transaction_timeout = {IDLE_TRANSACTION_SECONDS}")
            connection.commit()
        finally:
            cursor.close()


def _mysql_whereabouts(ask: Ask, table: str, schema: str | None) -> Whereabouts | None:
    # A transaction may span the databases of one server, so that the caller may have another
    # one for his own tables. MariaDB has no server_uuid: the folder and the table's own time too.
    rows = ask(
        sa.text(
            "SELECT @@hostname AS host, @@port AS port, @@server_id AS number, "
            "@@datadir AS folder, UNIX_TIMESTAMP(create_time) AS created, table_schema AS place "
            "FROM information_schema.tables "
            "WHERE table_name = :name AND table_schema = COALESCE(:place, DATABASE())"
        ),
        {"name": table, "place": schema},
    )
    if not rows:
        return None
    row = rows[0]
    server = (row["host"], row["port"], row["number"], row["folder"])
    return Whereabouts((*server, row["place"]), row["created"], row["place"])


_MYSQL = Dialect(
    name="mysql",
    writing_ctes=False,
    returning=False,
    # Switching autocommit costs a round trip each way, so every statement has a transaction.
    autocommits=False,
    # On the entry of the unique index, shared, until the transaction ends.
    refusals_lock=True,
    one_writer=False,
    prepare=_mysql_prepare,
    trouble=_mysql_trouble,
    whereabouts=_mysql_whereabouts,
    connect_arguments={"connect_timeout": CONNECT_TIMEOUT_SECONDS, "charset": "utf8mb4"},
    engine_options={"isolation_level": "READ COMMITTED"},
    lock_migrations="SELECT GET_LOCK('celery_lease_migration', 60)",
    unlock_migrations="SELECT RELEASE_LOCK('celery_lease_migration')",
)
#: PyMySQL alone has a bound on waiting for a reply, in seconds.
PYMYSQL_TIMEOUT_SECONDS = 20


# -- SQLite ----------------------------------------------------------------------------------


def _sqlite_trouble(error: BaseException) -> Trouble:
    text = str(error).lower()
    if "no such table" in text or "no such column" in text or "has no column" in text:
        return Trouble.SCHEMA
    if "locked" in text or "busy" in text:
        return Trouble.LOCKED
    if "not a database" in text or "malformed" in text:
        return Trouble.UNAVAILABLE
    return Trouble.UNAVAILABLE if isinstance(error, sqlite3.OperationalError) else Trouble.OTHER


def _sqlite_prepare(engine: Engine, given: Mapping[str, Any]) -> None:
    del given

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, record: object) -> None:
        del record
        # The driver must not begin transactions by itself: it would begin deferred ones,
        # which fail at once when another writer is there, whatever the busy timeout.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(SQLITE_BUSY_SECONDS * 1000)}")
        connection.execute("PRAGMA journal_mode = WAL")
        # NORMAL may lose the newest commits in a power cut, and with them a token that was
        # already given out; FULL does not.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A single statement is a transaction by itself here.
        if connection.get_execution_options().get("lease_transaction"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def _sqlite_whereabouts(ask: Ask, table: str, schema: str | None) -> Whereabouts | None:
    # The file itself, however it was named. Not an attached one: a transaction over two files
    # is not atomic under WAL.
    del schema
    files = [
        row["file"] for row in ask(sa.text("PRAGMA database_list"), {}) if row["name"] == "main"
    ]
    tables = ask(
        sa.text("SELECT name FROM main.sqlite_master WHERE type = 'table' AND name = :name"),
        {"name": table},
    )
    if not tables or not files or not files[0]:
        return None
    try:
        found = Path(files[0]).stat()
    except OSError:
        return None
    return Whereabouts((found.st_dev, found.st_ino), table, "main")


_SQLITE = Dialect(
    name="sqlite",
    writing_ctes=False,
    returning=True,
    autocommits=True,
    refusals_lock=False,
    one_writer=True,
    prepare=_sqlite_prepare,
    trouble=_sqlite_trouble,
    whereabouts=_sqlite_whereabouts,
    connect_arguments={"timeout": SQLITE_BUSY_SECONDS, "check_same_thread": False},
    # Its BEGIN IMMEDIATE is the lock.
    lock_migrations=None,
)


class UnknownDatabase(ValueError):
    """Raised when no dialect is written for a URL."""


def dialect_for(url: URL) -> Dialect:
    """Return the dialect of a database URL.

    Raises:
        UnknownDatabase: the database is none of PostgreSQL, MySQL, MariaDB and SQLite.
    """
    backend = url.get_backend_name()
    if backend == "postgresql":
        return _POSTGRESQL
    if backend in ("mysql", "mariadb"):
        return _MYSQL
    if backend == "sqlite":
        return _SQLITE
    message = f"{backend!r} is not one of postgresql, mysql, mariadb, sqlite"
    raise UnknownDatabase(message)


def family_of(name: str) -> str:
    """Return the dialect name under which a driver's or framework's name of a database goes."""
    return "mysql" if name == "mariadb" else name


def with_driver(url: URL) -> URL:
    """Return the URL with the driver this package is tested with where it names none."""
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("mysql", "mariadb"):
        return url.set(drivername=f"{url.drivername}+pymysql")
    return url


def connect_arguments(dialect: Dialect, url: URL) -> dict[str, Any]:
    """Return the driver arguments for a URL; some belong to one driver only."""
    arguments = dict(dialect.connect_arguments)
    driver = url.get_driver_name()
    if dialect.name == "mysql" and driver == "pymysql":
        arguments["read_timeout"] = PYMYSQL_TIMEOUT_SECONDS
        arguments["write_timeout"] = PYMYSQL_TIMEOUT_SECONDS
    if dialect.name == "postgresql" and driver != "psycopg":
        arguments.pop("prepare_threshold")
    return {key: value for key, value in arguments.items() if key not in url.query}


def is_in_memory(url: URL) -> bool:
    """Tell whether a URL names an SQLite database that no other process can see."""
    if url.get_backend_name() != "sqlite":
        return False
    if url.database in (None, "", ":memory:") or "mode=memory" in str(url.database):
        return True
    return url.query.get("mode") == "memory"
