"""What is so on one kind of database only: how many statements, HOT updates, a pooler between."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import make_url

from celery_lease.records import Accepted, Claimed
from celery_lease.states import JobState
from celery_lease.store import dialects, queries, reads, transitions
from celery_lease.store.dialects import PREPARE_THRESHOLD, Trouble, clock
from celery_lease.store.engine import Store
from tests.store.builders import (
    NO_BACKOFF,
    again,
    at_once,
    attempt_row,
    claimed,
    expired,
    finished,
    job_row,
    move_back,
    new_delivery,
    new_job,
    parting,
    renewal,
    rows,
    running,
    statements_of,
    store_now,
    submitted,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def on_postgresql(postgresql_url: str) -> Iterator[Store]:
    """A store on a PostgreSQL database of its own: its statistics are this test's alone."""
    yield from _made(postgresql_url)


@pytest.fixture
def on_mariadb(mariadb_url: str) -> Iterator[Store]:
    """A store on a MariaDB database of its own."""
    yield from _made(mariadb_url)


@pytest.fixture
def behind_pgbouncer(pgbouncer_url: str) -> Iterator[Store]:
    """A store on a PostgreSQL database through PgBouncer in transaction mode."""
    yield from _made(pgbouncer_url)


@pytest.fixture
def on_sqlite(sqlite_url: str) -> Iterator[Store]:
    """A store on an SQLite file of its own."""
    yield from _made(sqlite_url)


def _made(url: str) -> Iterator[Store]:
    store = Store(url=url)
    store.tables.metadata.create_all(store.engine)
    yield store
    store.close()


# --- PostgreSQL: round trips --------------------------------------------------------------------


def warmed(store: Store) -> None:
    """Connect, and build every statement once."""
    finished(store, running(store, "warm"))


@pytest.mark.parametrize("arrow", ["submit", "claim", "complete", "fail", "release", "hold"])
def test_a_hot_arrow_is_one_statement_on_postgresql(on_postgresql: Store, arrow: str) -> None:
    warmed(on_postgresql)
    lease: Any = None
    if arrow == "claim":
        submitted(on_postgresql)
    elif arrow != "submit":
        lease = running(on_postgresql)

    with statements_of(on_postgresql) as seen:
        _call(on_postgresql, arrow, lease)

    assert len(seen) == 1
    assert "BEGIN" not in seen[0][0]


def _call(store: Store, arrow: str, lease: Any) -> None:
    if arrow == "submit":
        assert transitions.submit(store, new_job())
    elif arrow == "claim":
        claimed(store)
    elif arrow == "complete":
        finished(store, lease)
    elif arrow == "fail":
        transitions.fail(store, lease, parting(), error=None, error_content_type=None)
    elif arrow == "release":
        transitions.release(store, lease, parting())
    else:
        transitions.hold(store, lease, parting())


def test_a_single_statement_has_no_transaction_around_it_on_postgresql(
    on_postgresql: Store,
) -> None:
    """Asked of the server: the transaction is the statement's own."""
    warmed(on_postgresql)

    with on_postgresql.single() as connection:
        before = connection.execute(sa.text("SELECT txid_current()")).scalar_one()
        after = connection.execute(sa.text("SELECT txid_current()")).scalar_one()

    assert before != after


def test_twenty_leases_are_renewed_in_one_statement_on_postgresql(on_postgresql: Store) -> None:
    leases = [running(on_postgresql, f"job{number}") for number in range(20)]

    with statements_of(on_postgresql) as seen:
        answer = transitions.renew(on_postgresql, [renewal(lease) for lease in leases])

    assert len(answer.renewed) == 20
    assert len(seen) == 1


def test_renewals_are_hot_updates_on_postgresql(on_postgresql: Store) -> None:
    """With an index on the expiry 0 of 2,500 were (design, section 3)."""
    leases = [running(on_postgresql, f"job{number}") for number in range(20)]
    said = {"progress": '{"done": 1}', "checkpoint": "7"}
    told = {"stop_requested": True, "acknowledged": True}
    renewals = [renewal(lease, **said, **told) for lease in leases]
    before = _updates(on_postgresql)[0]

    for _ in range(20):
        assert len(transitions.renew(on_postgresql, renewals).renewed) == 20

    def counted() -> tuple[int, int]:
        total, hot = _updates(on_postgresql)
        assert total - before >= 400
        return total - before, hot

    total, hot = eventually(counted, timeout=15)
    assert hot / total >= 0.9, (hot, total)


def _updates(store: Store) -> tuple[int, int]:
    with store.single() as connection:
        row = connection.execute(
            sa.text(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = :name"
            ),
            {"name": store.tables.attempt.name},
        ).one()
    return int(row[0]), int(row[1])


def test_no_index_of_the_attempts_names_what_a_heartbeat_writes(on_postgresql: Store) -> None:
    with on_postgresql.single() as connection:
        definitions = connection.scalars(
            sa.text("SELECT indexdef FROM pg_indexes WHERE tablename = :name"),
            {"name": on_postgresql.tables.attempt.name},
        ).all()

    assert len(definitions) >= 3
    written = (
        *("lease_expires_at", "last_renewed_at", "renewal_count", "progress", "checkpoint"),
        *("stop_requested_at", "acknowledged_at", "extended_at"),
    )
    for definition in definitions:
        assert not any(column in definition for column in (*written, " state", "(state"))


# --- PostgreSQL behind PgBouncer ----------------------------------------------------------------


def test_the_whole_protocol_works_through_pgbouncer_in_transaction_mode(
    behind_pgbouncer: Store,
) -> None:
    store = behind_pgbouncer
    for number in range(10):
        submitted(store, f"job{number}")

    def run(number: int) -> None:
        job_id = f"job{number}"
        lease = claimed(store, job_id)
        for _ in range(3):
            assert transitions.renew(store, [renewal(lease)]).renewed
        said = transitions.retry_later(store, lease, parting(), again())
        assert isinstance(said, Accepted)
        finished(store, claimed(store, job_id, message_version=2))

    at_once(*[lambda n=n: run(n) for n in range(10)])  # type: ignore[misc]
    expired(store, "dead")
    given_on = transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    transitions.record_pass(store, counts="{}", worker=None)

    assert [one.job_id for one in given_on] == ["dead"]
    assert isinstance(transitions.claim(store, new_delivery("dead")), Claimed)
    assert queries.last_pass(store) is not None
    states = [job["state"] for job in rows(store)["job"].values()]
    assert states.count(JobState.SUCCEEDED) == 10


def test_a_setting_of_a_transaction_does_not_leak_through_pgbouncer(
    behind_pgbouncer: Store,
) -> None:
    with behind_pgbouncer.transaction() as connection:
        inside = connection.execute(sa.text("SHOW lock_timeout")).scalar_one()
    with behind_pgbouncer.single() as connection:
        outside = connection.execute(sa.text("SHOW lock_timeout")).scalar_one()

    assert (inside, outside) == ("2s", "0")


def test_statements_are_prepared_on_a_connection_of_the_servers_own_and_not_behind_pgbouncer(
    on_postgresql: Store, behind_pgbouncer: Store
) -> None:
    def threshold(store: Store) -> object:
        with store.single() as connection:
            return connection.connection.driver_connection.prepare_threshold  # type: ignore[union-attr]

    assert (threshold(on_postgresql), threshold(behind_pgbouncer)) == (PREPARE_THRESHOLD, None)


def test_a_single_statement_waits_no_longer_for_a_lock_than_one_in_a_transaction(
    on_postgresql: Store, behind_pgbouncer: Store, postgresql_url: str
) -> None:
    """Behind PgBouncer the bound would be another client's; and what was set before stays."""
    set_by_user = Store(
        url=postgresql_url,
        engine_options={"connect_args": {"options": "-c lock_timeout=7s"}},
    )

    def bound(store: Store) -> str:
        with store.single() as connection:
            return str(connection.execute(sa.text("SHOW lock_timeout")).scalar_one())

    stores = (on_postgresql, behind_pgbouncer, set_by_user)
    assert [bound(store) for store in stores] == ["2s", "0", "7s"]
    set_by_user.close()


def test_a_single_statement_is_still_one_round_trip(on_postgresql: Store) -> None:
    seen: list[str] = []
    with on_postgresql.single() as connection:
        sa.event.listen(
            on_postgresql.base_engine,
            "before_cursor_execute",
            lambda _c, _cursor, statement, *_: seen.append(statement),
        )
        connection.execute(sa.text("SELECT 1"))

    assert seen == ["SELECT 1"]


def test_what_the_user_says_of_prepared_statements_wins(postgresql_url: str) -> None:
    options = {"connect_args": {"prepare_threshold": None}}
    store = Store(url=postgresql_url, engine_options=options)

    with store.single() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert driver.prepare_threshold is None
    store.close()


# --- MariaDB ------------------------------------------------------------------------------------


def test_sessions_are_read_committed_strict_and_bounded_on_mariadb(on_mariadb: Store) -> None:
    with on_mariadb.single() as connection:
        isolation, mode, wait, idle = connection.execute(
            sa.text(
                "SELECT @@tx_isolation, @@sql_mode, @@innodb_lock_wait_timeout, "
                "@@idle_transaction_timeout"
            )
        ).one()

    assert isolation == "READ-COMMITTED"
    assert "STRICT_ALL_TABLES" in mode
    assert (wait, idle) == (2, 20)


def test_renewals_find_their_rows_by_the_primary_key_on_mariadb(on_mariadb: Store) -> None:
    """By another index they would lock, and wait for, other jobs' leases."""
    leases = [running(on_mariadb, f"job{number}") for number in range(3)]

    with statements_of(on_mariadb) as seen:
        transitions.renew(on_mariadb, [renewal(lease) for lease in leases])

    plans = [s for s in seen if on_mariadb.tables.attempt.name in s[0]]
    assert len(plans) == 2
    for statement, parameters in plans:
        # Said, and not left to what the planner makes of three rows.
        assert "FORCE INDEX (PRIMARY)" in statement
        with on_mariadb.single() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).mappings().one()
        assert plan["key"] == "PRIMARY"
        assert int(plan["rows"]) == 3


def test_tables_are_innodb_and_compare_byte_by_byte_on_mariadb(on_mariadb: Store) -> None:
    with on_mariadb.single() as connection:
        found = connection.execute(
            sa.text(
                "SELECT engine, table_collation FROM information_schema.tables "
                "WHERE table_schema = database()"
            )
        ).all()

    assert set(found) == {("InnoDB", "utf8mb4_bin")}


def test_an_expiry_is_in_utc_whatever_the_time_zone_of_the_session_on_mariadb(
    on_mariadb: Store,
) -> None:
    lease = running(on_mariadb)
    before = store_now(on_mariadb)
    with on_mariadb.engine.begin() as connection:
        connection.execute(sa.text("SET time_zone = '+09:00'"))
        inside = connection.execute(sa.select(clock())).scalar_one()
        connection.execute(sa.text("SET time_zone = DEFAULT"))

    assert abs((inside - before).total_seconds()) < 60
    assert attempt_row(on_mariadb, lease)["lease_expires_at"] > before


# --- PostgreSQL: sessions -----------------------------------------------------------------------


def test_an_expiry_is_in_utc_whatever_the_time_zone_of_the_session_on_postgresql(
    postgresql_url: str,
) -> None:
    tokyo = Store(
        url=postgresql_url,
        engine_options={"connect_args": {"options": "-c timezone=Asia/Tokyo"}},
    )
    tokyo.tables.metadata.create_all(tokyo.engine)
    utc = Store(url=postgresql_url)

    lease = running(tokyo)

    assert attempt_row(tokyo, lease) == attempt_row(utc, lease)
    assert abs((store_now(tokyo) - store_now(utc)).total_seconds()) < 60
    tokyo.close()
    utc.close()


def test_tables_may_live_in_a_schema_and_under_a_prefix_on_postgresql(
    postgresql_url: str,
) -> None:
    store = Store(url=postgresql_url, schema="jobs", table_prefix="x_")
    with store.engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA jobs"))
    store.tables.metadata.create_all(store.engine)

    finished(store, running(store))

    with store.single() as connection:
        name = sa.text("SELECT state FROM jobs.x_job")
        assert connection.execute(name).scalars().all() == ["succeeded"]
    store.close()


# --- SQLite -------------------------------------------------------------------------------------


def test_a_connection_waits_for_the_one_writer_and_loses_nothing_on_sqlite(
    on_sqlite: Store,
) -> None:
    """B108."""
    with on_sqlite.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }

    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 10_000,
    }


def test_many_writers_at_once_see_no_locked_database_on_sqlite(on_sqlite: Store) -> None:
    """B108."""

    def run(number: int) -> None:
        lease = running(on_sqlite, f"job{number}")
        transitions.renew(on_sqlite, [renewal(lease)])
        finished(on_sqlite, lease)

    at_once(*[lambda n=n: run(n) for n in range(12)])  # type: ignore[misc]

    states = {job["state"] for job in rows(on_sqlite)["job"].values()}
    assert states == {JobState.SUCCEEDED}


def test_readers_do_not_wait_for_a_writer_on_sqlite(on_sqlite: Store) -> None:
    submitted(on_sqlite)

    with on_sqlite.transaction() as connection:
        connection.execute(sa.update(on_sqlite.tables.job).values(priority=9))
        seen = job_row(on_sqlite)["priority"]

    assert seen is None


def test_the_clock_is_in_milliseconds_and_near_the_hosts_on_sqlite(on_sqlite: Store) -> None:
    with on_sqlite.single() as connection:
        raw = connection.exec_driver_sql(
            "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
        ).scalar_one()

    assert raw % 1000 == 0
    assert abs(store_now(on_sqlite).timestamp() - raw / 1e6) < 5


# --- what an error means ------------------------------------------------------------------------


class _Coded(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate
        super().__init__(sqlstate)


class OperationalError(_Coded):
    """Named like the driver's, for a broken connection has no code."""


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (_Coded("40001"), Trouble.TRANSIENT),
        (_Coded("40P01"), Trouble.TRANSIENT),
        (_Coded("55P03"), Trouble.LOCKED),
        (_Coded("57014"), Trouble.TRANSIENT),
        (_Coded("42P01"), Trouble.SCHEMA),
        (_Coded("42703"), Trouble.SCHEMA),
        (_Coded("08006"), Trouble.UNAVAILABLE),
        (_Coded("57P01"), Trouble.UNAVAILABLE),
        (_Coded("53300"), Trouble.UNAVAILABLE),
        (_Coded("25006"), Trouble.UNAVAILABLE),
        (OperationalError(None), Trouble.UNAVAILABLE),
        (_Coded(None), Trouble.OTHER),
        (_Coded("23505"), Trouble.OTHER),
        (_Coded("22001"), Trouble.OTHER),
    ],
)
def test_a_code_of_postgresql_says_what_to_do(error: Exception, trouble: Trouble) -> None:
    assert dialects.dialect_for(make_url("postgresql://h/d")).trouble(error) is trouble


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (1205, Trouble.LOCKED),
        (1213, Trouble.TRANSIENT),
        (1020, Trouble.TRANSIENT),
        (1317, Trouble.TRANSIENT),
        (1969, Trouble.TRANSIENT),
        (3024, Trouble.TRANSIENT),
        (1146, Trouble.SCHEMA),
        (1054, Trouble.SCHEMA),
        (2006, Trouble.UNAVAILABLE),
        (2013, Trouble.UNAVAILABLE),
        (1927, Trouble.UNAVAILABLE),
        (1040, Trouble.UNAVAILABLE),
        (0, Trouble.UNAVAILABLE),
        (1062, Trouble.OTHER),
        (1406, Trouble.OTHER),
        (4025, Trouble.OTHER),
    ],
)
def test_a_code_of_mysql_says_what_to_do(code: int, trouble: Trouble) -> None:
    dialect = dialects.dialect_for(make_url("mysql://h/d"))

    assert dialect.trouble(Exception(code, "text")) is trouble


@pytest.mark.parametrize("scheme", ["postgres", "mssql+pyodbc", "oracle"])
def test_a_database_without_a_dialect_is_unknown(scheme: str) -> None:
    with pytest.raises(dialects.UnknownDatabase):
        dialects.dialect_for(make_url(f"{scheme}://h/d"))


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://h/d", "postgresql+psycopg"),
        ("mysql://h/d", "mysql+pymysql"),
        ("mariadb://h/d", "mariadb+pymysql"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2"),
        ("sqlite:////x", "sqlite"),
    ],
)
def test_a_url_without_a_driver_gets_the_one_that_is_tested(url: str, driver: str) -> None:
    assert dialects.with_driver(make_url(url)).drivername == driver


def test_an_argument_that_the_url_gives_is_not_given_twice() -> None:
    url = make_url("postgresql+psycopg://h/d?connect_timeout=60")

    arguments = dialects.connect_arguments(dialects.dialect_for(url), url)

    assert "connect_timeout" not in arguments
    assert arguments["application_name"] == "celery-lease"


@pytest.mark.parametrize(
    ("dialect", "hint"),
    [(mysql.dialect(), True), (postgresql.dialect(), False), (sqlite.dialect(), False)],
    ids=["mysql", "postgresql", "sqlite"],
)
def test_an_index_is_forced_where_a_scan_would_lock_what_it_looks_at(
    dialect: sa.Dialect, *, hint: bool
) -> None:
    table = sa.Table("t", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    statements = [sa.select(table.c.id), sa.update(table).values(id=1)]

    texts = [
        str(dialects.by_primary_key(statement, table).compile(dialect=dialect))
        for statement in statements
    ]

    assert [("FORCE INDEX (PRIMARY)" in text) for text in texts] == [hint, hint]


def test_a_job_that_waits_is_found_by_an_index_on_postgresql(
    on_postgresql: Store, open_store: Callable[..., Store]
) -> None:
    """The reaper's searches must not read the whole history."""
    for number in range(30):
        finished(on_postgresql, running(on_postgresql, f"job{number}"))
        move_back(on_postgresql, f"job{number}", seconds=60)
    job = on_postgresql.tables.job.name
    searches = {
        f"{job}_due": "state IN ('scheduled', 'retry_wait') AND available_at <= clock_timestamp()",
        f"{job}_queued": "state = 'queued' AND dispatched_at IS NULL",
        f"{job}_unsettled": "finished_at IS NOT NULL AND settled_at IS NULL",
    }

    for index, where in searches.items():
        with on_postgresql.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
            plan = "\n".join(
                connection.scalars(sa.text(f"EXPLAIN SELECT id FROM {job} WHERE {where}"))
            )
        assert index in plan, plan


# --- live attempts, isolation -------------------------------------------------------------------


@pytest.fixture
def filled(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store with so many attempts that reading them all would cost more than an index."""
    store = Store(url=request.getfixturevalue(f"{request.param}_url"))
    store.tables.metadata.create_all(store.engine)
    running(store, "one", owner="owner-1")
    running(store, "two", owner="owner-2")
    attempt = store.tables.attempt
    some = {
        "state": "completed",
        "worker": "w",
        "claim_nonce": "n",
        "message_version": 1,
        "lease_seconds": 30.0,
        "renewal_count": 0,
    }
    now = datetime.now(timezone.utc)
    some |= dict.fromkeys(("lease_expires_at", "last_renewed_at", "claimed_at", "ended_at"), now)
    with store.engine.begin() as connection:
        connection.execute(
            sa.insert(attempt),
            [
                {**some, "job_id": f"j{n}", "fencing_token": 1, "owner": f"owner-{n % 9}"}
                for n in range(5000)
            ],
        )
    with store.engine.begin() as connection:
        word = "ANALYZE" if request.param == "postgresql" else "ANALYZE TABLE"
        connection.exec_driver_sql(f"{word} {attempt.name}")
    yield store
    store.close()


@pytest.mark.parametrize(
    ("filled", "index"),
    [("postgresql", "live_owner"), ("mariadb", "live_rows")],
    indirect=["filled"],
)
def test_the_live_attempts_of_an_owner_are_found_by_an_index(filled: Store, index: str) -> None:
    with statements_of(filled) as seen:
        assert [one.job_id for one in queries.live_attempts(filled, owner="owner-1")] == ["one"]

    statement, parameters = next(s for s in seen if "SELECT" in s[0])
    with filled.single() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
        plan = "\n".join(" ".join(map(str, row)) for row in rows)
    assert f"{filled.tables.attempt.name}_{index}" in plan, plan


@pytest.mark.parametrize(
    ("database", "level"),
    [
        ("postgresql", "READ COMMITTED"),
        ("mariadb", "READ COMMITTED"),
        ("sqlite", "SERIALIZABLE"),
    ],
)
def test_the_isolation_of_a_transaction_is_told(
    open_store: Callable[..., Store], database: str, level: str
) -> None:
    assert reads.isolation(open_store(database)) == level


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_the_isolation_told_is_the_one_in_force(
    open_store: Callable[..., Store], database: str
) -> None:
    store = open_store(database, isolation_level="REPEATABLE READ")

    assert reads.isolation(store) == "REPEATABLE READ"
