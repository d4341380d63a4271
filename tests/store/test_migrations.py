"""The migrations: what they make, when they refuse, and many processes at once."""

from __future__ import annotations

import importlib.resources
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from celery_lease.exceptions import SchemaMismatch, StoreUnavailable
from celery_lease.store import migrations
from celery_lease.store.dialects import clock
from celery_lease.store.engine import Store
from celery_lease.store.migrations import HEAD, current_revision, ensure_schema, migrate, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

#: The columns of revision 0003.
SINCE = ("first_dispatched_at", "resumed_token")

_STARTER = """
import sys
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema
store = Store(url=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
ensure_schema(store, auto_migrate=True)
store.close()
print("done", flush=True)
"""

_FORK = """
import os
from celery_lease.store import migrations
migrations._alembic_lock.acquire()
pid = os.fork()
if pid == 0:
    os._exit(0 if migrations._alembic_lock.acquire(timeout=1) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def open_store() -> Iterator[Callable[..., Store]]:
    """Open stores, closed after the test."""
    stores: list[Store] = []

    def open_one(url: str, **options: object) -> Store:
        stores.append(Store(url=url, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(database_url: str, open_store: Callable[..., Store]) -> Store:
    return open_store(database_url)


def _table_names(store: Store) -> set[str]:
    return set(sa.inspect(store.engine).get_table_names(schema=store.schema))


def _set_revision(store: Store, revision: str) -> None:
    with store.transaction() as connection:
        connection.execute(
            sa.text(f"UPDATE {store.tables.version_table} SET version_num = :r"), {"r": revision}
        )


# -- what is made ----------------------------------------------------------------------------


def test_the_known_revisions_are_those_of_the_folder():
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))

    known = [script.revision for script in scripts.walk_revisions()]

    assert tuple(reversed(known)) == migrations.REVISIONS
    assert scripts.get_current_head() == HEAD


def test_an_empty_database_is_brought_from_nothing_to_the_head(store: Store):
    assert current_revision(store) is None

    assert migrate(store) == (None, HEAD)

    assert current_revision(store) == HEAD
    assert migrate(store) == (HEAD, HEAD)


@pytest.mark.parametrize("prefix", ["celery_lease_", "other_"])
def test_the_migrations_make_the_tables_of_the_schema_module(
    database_url: str, open_store: Callable[..., Store], prefix: str
):
    store = open_store(database_url, table_prefix=prefix)

    migrate(store)

    assert _differences(store) == []
    for table in store.tables.metadata.sorted_tables:
        declared = {item.name for item in table.constraints if isinstance(item, sa.CheckConstraint)}
        made = sa.inspect(store.engine).get_check_constraints(table.name)
        assert declared <= {item["name"] for item in made}


def test_the_migrations_make_the_indexes_of_the_schema_module(
    database_url: str, fresh_database: Callable[[str], str], open_store: Callable[..., Store]
):
    """Conditions included, as the database says them after either way."""
    migrated = open_store(database_url)
    created = open_store(fresh_database(migrated.dialect.name.replace("mysql", "mariadb")))

    migrate(migrated)
    created.tables.metadata.create_all(created.engine)

    assert _indexes(migrated) == _indexes(created)


def test_the_migrations_leave_the_room_that_the_schema_module_leaves(
    postgresql_url: str, fresh_database: Callable[[str], str], open_store: Callable[..., Store]
):
    migrated = open_store(postgresql_url)
    created = open_store(fresh_database("postgresql"))
    options = sa.text("SELECT relname, reloptions FROM pg_class WHERE relname LIKE 'celery_lease%'")

    migrate(migrated)
    created.tables.metadata.create_all(created.engine)

    found = [dict(list(_rows(store, options))) for store in (migrated, created)]
    assert found[0]["celery_lease_attempt"] == ["fillfactor=50"]
    assert found[1].items() <= found[0].items()


def test_the_tables_can_live_in_a_schema_that_is_made_if_it_is_missing(
    postgresql_url: str, open_store: Callable[..., Store]
):
    store = open_store(postgresql_url, schema="leases")

    assert migrate(store) == (None, HEAD)

    assert _differences(store) == []
    assert "celery_lease_job" in _table_names(store)
    assert sa.inspect(store.engine).get_table_names(schema="public") == []
    again = open_store(postgresql_url, schema="leases")
    ensure_schema(again, auto_migrate=False)


def test_other_tables_of_the_database_are_left_alone(store: Store):
    with store.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE customers (id INTEGER PRIMARY KEY)"))
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(sa.text("INSERT INTO alembic_version VALUES ('abc')"))
        connection.execute(sa.text("INSERT INTO customers VALUES (1)"))

    migrate(store)

    assert {"customers", "alembic_version", "celery_lease_version"} <= _table_names(store)
    with store.single() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "abc"
        assert connection.scalar(sa.text("SELECT count(*) FROM customers")) == 1
    assert _differences(store) == []


def test_two_prefixes_share_a_database(database_url: str, open_store: Callable[..., Store]):
    first = open_store(database_url)
    second = open_store(database_url, table_prefix="celery_lease_b_")

    ensure_schema(first, auto_migrate=True)
    ensure_schema(second, auto_migrate=True)

    assert _differences(first) == []
    assert _differences(second) == []


def test_a_half_made_schema_is_completed(store: Store):
    """What a process killed in the middle leaves where every DDL statement commits."""
    store.tables.job.create(store.engine)
    with store.transaction() as connection:
        for name in SINCE:
            connection.execute(sa.text(f"ALTER TABLE celery_lease_job DROP COLUMN {name}"))
    with store.transaction() as connection:
        index = next(i for i in store.tables.job.indexes if i.name == "celery_lease_job_due")
        index.drop(connection)

    assert migrate(store) == (None, HEAD)

    assert _differences(store) == []
    assert len(_indexes(store)["celery_lease_job"]) == len(store.tables.job.indexes)


def test_a_store_of_the_first_revision_is_brought_to_the_head_with_its_rows(store: Store):
    """And what a process that was killed in the middle of that had made already is kept."""
    _migrate_to(store, "0001")
    with store.transaction() as connection:
        connection.execute(
            sa.insert(store.tables.completed_pass).values(id=1, finished_at=clock(), counts="{}")
        )
    store.tables.result.create(store.engine)
    with store.transaction() as connection:
        connection.execute(sa.text(f"ALTER TABLE celery_lease_job ADD COLUMN {SINCE[1]} BIGINT"))
    with store.transaction() as connection:
        next(iter(store.tables.result.indexes)).drop(connection)

    with pytest.raises(SchemaMismatch, match="celery -A yourapp lease migrate"):
        ensure_schema(store, auto_migrate=True)
    assert migrate(store) == ("0001", HEAD)

    assert _differences(store) == []
    assert len(_indexes(store)["celery_lease_result"]) == 1
    with store.single() as connection:
        assert connection.execute(sa.select(store.tables.completed_pass.c.id)).all() == [(1,)]


def test_a_result_table_that_is_not_ours_is_refused(store: Store):
    _migrate_to(store, "0001")
    with store.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE celery_lease_result (number INTEGER)"))

    with pytest.raises(SchemaMismatch, match="lease_store_table_prefix"):
        migrate(store)


def _migrate_to(store: Store, revision: str) -> None:
    with migrations._only_migration(store) as connection:
        steps.upgrade(store, connection, revision)


def test_a_table_of_the_same_name_that_is_not_ours_is_refused(store: Store):
    with store.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE celery_lease_job (number INTEGER)"))

    with pytest.raises(SchemaMismatch, match="lease_store_table_prefix"):
        migrate(store)


def test_alembic_says_nothing_in_the_application_s_log(
    store: Store, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, logger="alembic")

    migrate(store)

    assert [record for record in caplog.records if record.name.startswith("alembic")] == []
    logging.getLogger("alembic.runtime.migration").info("the user's own")
    assert "the user's own" in caplog.text


# -- when the schema is asked for ------------------------------------------------------------


def test_an_empty_database_is_filled_where_that_is_allowed(store: Store):
    ensure_schema(store, auto_migrate=True)

    assert current_revision(store) == HEAD


def test_an_empty_database_is_refused_where_an_operator_migrates(store: Store):
    with pytest.raises(SchemaMismatch, match="celery -A yourapp lease migrate") as caught:
        ensure_schema(store, auto_migrate=False)

    assert caught.value.found is None
    assert caught.value.expected == HEAD
    assert _table_names(store) == set()


@pytest.mark.parametrize("auto_migrate", [True, False])
def test_an_older_schema_is_never_upgraded_in_silence(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, auto_migrate: bool
):
    migrate(store)
    monkeypatch.setattr(migrations, "REVISIONS", (*migrations.REVISIONS, "next"))
    monkeypatch.setattr(migrations, "HEAD", "next")

    with pytest.raises(SchemaMismatch, match="celery -A yourapp lease migrate") as caught:
        ensure_schema(store, auto_migrate=auto_migrate)

    assert caught.value.found == HEAD
    assert current_revision(store) == HEAD


@pytest.mark.parametrize("auto_migrate", [True, False])
def test_a_newer_schema_is_refused_and_left_as_it_is(store: Store, *, auto_migrate: bool):
    migrate(store)
    _set_revision(store, "9999")

    with pytest.raises(SchemaMismatch, match="upgrade celery-lease on this host"):
        ensure_schema(store, auto_migrate=auto_migrate)
    with pytest.raises(SchemaMismatch, match="upgrade celery-lease on this host"):
        migrate(store)

    assert current_revision(store) == "9999"


def test_the_database_is_asked_once_a_process_and_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    ensure_schema(store, auto_migrate=True)
    monkeypatch.setattr(Store, "engine", None)

    ensure_schema(store, auto_migrate=True)

    assert store.engine is None


def test_another_process_asks_again(store: Store):
    ensure_schema(store, auto_migrate=True)
    _set_revision(store, "9999")
    ensure_schema(store, auto_migrate=True)

    migrations._checked[store] += 1  # as a forked child finds it

    with pytest.raises(SchemaMismatch):
        ensure_schema(store, auto_migrate=True)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://nobody@127.0.0.1:1/nothing",
        "mysql://nobody@127.0.0.1:1/nothing",
        "sqlite:////nonexistent/folder/lease.sqlite3",
    ],
)
def test_an_unreachable_store_is_said_to_be_that(url: str, open_store: Callable[..., Store]):
    store = open_store(url)

    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            ensure_schema(store, auto_migrate=True)
    with pytest.raises(StoreUnavailable):
        migrate(store)


def test_a_file_that_is_no_database_is_said_to_be_unusable(
    tmp_path: Path, open_store: Callable[..., Store]
):
    (tmp_path / "notes.txt").write_text("not a database\n" * 100)

    with pytest.raises(StoreUnavailable, match="not a database"):
        ensure_schema(open_store(f"sqlite:///{tmp_path / 'notes.txt'}"), auto_migrate=True)


def test_a_user_who_may_not_create_tables_is_told_who_must(
    postgresql_url: str, open_store: Callable[..., Store]
):
    owner = open_store(postgresql_url)
    user = f"reader_{os.getpid()}"
    url = sa.make_url(postgresql_url).set(username=user)
    with owner.transaction() as connection:
        connection.execute(sa.text(f"CREATE ROLE {user} LOGIN"))
        connection.execute(sa.text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
    try:
        store = open_store(url.render_as_string(hide_password=False))

        with pytest.raises(SchemaMismatch, match=r"permission denied.*a database user who may"):
            ensure_schema(store, auto_migrate=True)

        store.close()
    finally:
        with owner.transaction() as connection:
            connection.execute(sa.text(f"DROP ROLE {user}"))


# -- many at once ----------------------------------------------------------------------------


def test_eight_processes_that_start_at_once_make_the_tables_once(database_url: str, store: Store):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _STARTER, database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )
        for _ in range(8)
    ]
    try:
        assert [_line(process) for process in processes] == ["ready"] * 8

        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    assert results == [("done\n", "")] * 8
    assert _differences(store) == []
    with store.single() as connection:
        version = sa.text(f"SELECT count(*) FROM {store.tables.version_table}")
        assert connection.scalar(version) == 1


def test_a_fork_while_a_thread_migrates_leaves_a_lock_that_opens():
    said = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, check=True, env=_ENVIRONMENT
    )

    assert said.stdout == "0\n"


@pytest.mark.parametrize("revision", ["0001_initial", "0002_results", "0003_since"])
def test_a_revision_does_not_read_the_schema_module(revision: str):
    """It is history: a column added to the schema must not appear in it."""
    source = importlib.resources.files(migrations) / "versions" / f"{revision}.py"

    assert "store.schema " not in source.read_text()
    assert "build_tables" not in source.read_text()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def _rows(store: Store, statement: sa.TextClause) -> list[tuple[str, object]]:
    with store.single() as connection:
        return [(row[0], row[1]) for row in connection.execute(statement)]


def _differences(store: Store) -> list[object]:
    ours = {table.name for table in store.tables.metadata.tables.values()}

    def is_ours(name: str | None, kind: str, parents: object) -> bool:
        if kind == "schema":
            return name == store.schema
        return kind != "table" or name in ours

    def is_compared(item: object, name: str | None, kind: str, *_: object) -> bool:
        # Not indexes: it knows neither conditions nor ddl_if; _indexes() is compared instead.
        return kind != "index"

    with store.single() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": store.tables.version_table,
                "version_table_schema": store.schema,
                "include_schemas": store.schema is not None,
                "include_name": is_ours,
                "include_object": is_compared,
                "compare_server_default": True,
            },
        )
        return list(compare_metadata(context, store.tables.metadata))


def _indexes(store: Store) -> dict[str, list[object]]:
    inspector = sa.inspect(store.engine)
    return {
        table.name: sorted(
            (
                (
                    index["name"],
                    tuple(index["column_names"]),
                    index["unique"],
                    str(sorted(map(str, index.get("dialect_options", {}).values()))),
                )
                for index in inspector.get_indexes(table.name)
            ),
            key=str,
        )
        for table in store.tables.metadata.sorted_tables
    }
