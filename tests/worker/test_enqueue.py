"""A job in the caller's own transaction, through SQLAlchemy: with the commit, or not at all."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from celery import signals
from kombu import Connection as KombuConnection
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from celery_lease import IdempotencyConflict
from celery_lease.exceptions import PayloadTooLarge, SchemaMismatch, SettingError
from celery_lease.extension import extension_of
from celery_lease.store.dialects import SQLITE_BUSY_SECONDS
from tests.support.databases import new_database
from tests.support.servers import MariaDB, Valkey
from tests.support.waiting import eventually, never
from tests.support.workers import ROOT
from tests.worker.apps.enqueued import ORDERS
from tests.worker.site import WORKER_APP, Site, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.proxy import Proxy

_orders = itertools.count()


class Place:
    """A site, and a caller's own engine on the same database.

    Args:
        kind: of the database.
        site: where jobs are looked for.
    """

    def __init__(self, kind: str, site: Site) -> None:
        self.kind = kind
        self.site = site
        self.engine = sa.create_engine(site.store_url)
        self.add = site.task("t.add")

    def made(self, **options: Any) -> sa.Engine:
        """Make another engine on the same database."""
        return sa.create_engine(self.site.store_url, **options)

    def is_there(self, result: Any) -> bool:
        """Tell whether a job is committed, as another connection sees it."""
        return self.site.job_or_none(result.id) is not None

    def is_sent(self, result: Any) -> bool:
        """Tell whether the message of a job is on the broker."""
        return self.copies(result) > 0

    def copies(self, result: Any) -> int:
        """Return how many messages of a job are on the broker."""
        return [m["headers"]["id"] for m in self.site.queued("celery")].count(result.id)


def new_order(connection: Any) -> str:
    """Write a row of the caller's own."""
    name = f"order{os.getpid()}-{next(_orders)}"
    connection.execute(sa.insert(ORDERS).values(id=name))
    return name


def orders(engine: sa.Engine, name: str) -> int:
    """Return how many rows of the caller's own have a name."""
    with engine.connect() as connection:
        return len(connection.execute(sa.select(ORDERS).where(ORDERS.c.id == name)).all())


@pytest.fixture(scope="module")
def places(sites: Callable[[str], Site]) -> Iterator[Callable[[str], Place]]:
    """The places of this module, each made at its first use."""
    made: dict[str, Place] = {}
    with ExitStack() as stack:

        def place(kind: str) -> Place:
            if kind not in made:
                made[kind] = Place(kind, sites(kind))
                stack.callback(made[kind].engine.dispose)
                ORDERS.create(made[kind].engine)
            return made[kind]

        yield place


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def place(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Place:
    """One database after the other."""
    return places(request.param)


@pytest.fixture(params=["postgresql", "mariadb"])
def row_place(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Place:
    """A database that lets two transactions write at once."""
    return places(request.param)


@pytest.fixture
def postgresql_place(places: Callable[[str], Place]) -> Place:
    """The one on PostgreSQL."""
    return places("postgresql")


@pytest.fixture
def mariadb_place(places: Callable[[str], Place]) -> Place:
    """The one on MariaDB."""
    return places("mariadb")


@pytest.fixture
def sqlite_place(places: Callable[[str], Place]) -> Place:
    """The one on SQLite."""
    return places("sqlite")


# --- with the commit, or not at all -------------------------------------------------------------


def test_a_job_is_there_and_its_message_leaves_with_the_commit(place: Place) -> None:
    with place.engine.begin() as connection:
        order = new_order(connection)
        result = place.add.enqueue(connection, (1, 2))
        assert not place.is_there(result)
        assert not place.is_sent(result)

    assert orders(place.engine, order) == 1
    assert place.site.job(result.id)["state"] == "queued"
    assert len(place.site.messages(result.id)) == 1
    assert place.copies(result) == 1
    # It is sent: no pass sends it once more.
    place.site.run_pass()
    assert place.copies(result) == 1


def test_after_a_rollback_there_is_nothing(place: Place) -> None:
    results = []

    def fails() -> None:
        with place.engine.begin() as connection:
            results.append(new_order(connection))
            results.append(place.add.enqueue(connection, (1, 2)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    order, result = results
    with place.engine.connect() as connection:
        forgotten = place.add.enqueue(connection, (1, 2))

    place.site.run_pass()
    assert orders(place.engine, order) == 0
    for one in (result, forgotten):
        assert not place.is_there(one)
        assert place.site.messages(one.id) == []
        assert not place.is_sent(one)


def test_a_savepoint_that_is_rolled_back_takes_its_job_with_it(place: Place) -> None:
    with place.engine.begin() as connection:
        new_order(connection)
        before = place.add.enqueue(connection, (1, 1))
        with connection.begin_nested() as savepoint:
            inside = place.add.enqueue(connection, (2, 2))
            savepoint.rollback()
        with connection.begin_nested():
            kept = place.add.enqueue(connection, (3, 3))

    assert [place.is_there(one) for one in (before, inside, kept)] == [True, False, True]
    assert [place.copies(one) for one in (before, inside, kept)] == [1, 0, 1]


def test_a_session_commits_the_job_with_its_objects(place: Place) -> None:
    with Session(place.engine) as session:
        order = new_order(session)
        first = place.add.enqueue(session, (1, 1))
        with session.begin_nested() as savepoint:
            inside = place.add.enqueue(session, (2, 2))
            savepoint.rollback()
        session.commit()
        # At once, though the session goes on.
        assert place.copies(first) == 1
        session.execute(sa.select(ORDERS))
        second = place.add.enqueue(session, (1, 1))
        session.rollback()

    assert orders(place.engine, order) == 1
    assert [place.is_there(one) for one in (first, inside, second)] == [True, False, False]
    assert [place.copies(one) for one in (first, inside, second)] == [1, 0, 0]


def test_a_scoped_session_is_a_session(sqlite_place: Place) -> None:
    session = scoped_session(sessionmaker(sqlite_place.engine))

    result = sqlite_place.add.enqueue(session, (1, 1))
    session.commit()
    session.remove()

    assert sqlite_place.copies(result) == 1


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
def test_what_a_session_commits_inside_an_outer_transaction_is_not_committed(
    postgresql_place: Place, mode: Any
) -> None:
    """SQLAlchemy's recipe for test suites: everything is rolled back in the end."""
    place = postgresql_place
    with place.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            result = place.add.enqueue(session, (1, 1))
            session.commit()
        assert not place.is_there(result)
        outer.rollback()

    place.site.run_pass()
    assert not place.is_there(result)
    assert not place.is_sent(result)


def test_a_session_inside_an_outer_transaction_that_is_committed(postgresql_place: Place) -> None:
    place = postgresql_place
    with place.engine.begin() as connection, Session(connection) as session:
        result = place.add.enqueue(session, (1, 1))
        session.commit()
        assert not place.is_sent(result)

    assert place.copies(result) == 1


def test_a_connection_that_is_kept_sends_at_its_next_begin(place: Place) -> None:
    with place.engine.connect() as connection:
        first = place.add.enqueue(connection, (1, 1))
        connection.commit()
        assert place.is_there(first)
        connection.execute(sa.text("SELECT 1"))
        assert place.copies(first) == 1
        second = place.add.enqueue(connection, (1, 1))
        connection.rollback()
        third = place.add.enqueue(connection, (1, 1))
        connection.commit()

    assert [place.copies(one) for one in (first, second, third)] == [1, 0, 1]


@pytest.mark.parametrize("pool", [NullPool, QueuePool, StaticPool])
def test_every_pool_gives_the_word(sqlite_place: Place, pool: Any) -> None:
    engine = sqlite_place.made(poolclass=pool)
    for _ in range(2):
        with engine.begin() as connection:
            committed = sqlite_place.add.enqueue(connection, (1, 1))
        with engine.connect() as connection:
            given_up = sqlite_place.add.enqueue(connection, (1, 1))
        assert [sqlite_place.copies(one) for one in (committed, given_up)] == [1, 0]
    engine.dispose()
    with engine.begin() as connection:
        later = sqlite_place.add.enqueue(connection, (1, 1))
    engine.dispose()

    assert sqlite_place.copies(later) == 1


def test_an_engine_made_from_another_is_as_good(place: Place) -> None:
    derived = place.engine.execution_options(isolation_level="SERIALIZABLE")

    with derived.begin() as connection:
        result = place.add.enqueue(connection, (1, 1))

    assert place.copies(result) == 1


def test_without_a_transaction_it_is_recorded_at_once(place: Place) -> None:
    """By an option of a connection, and of the engine itself."""
    made = place.made(isolation_level="AUTOCOMMIT")
    engines = [place.engine.execution_options(isolation_level="AUTOCOMMIT")]
    if hasattr(made.dialect, "detect_autocommit_setting"):
        # Older SQLAlchemys do not know it of their own engine.
        engines.append(made)
    for engine in engines:
        with engine.connect() as connection:
            result = place.add.enqueue(connection, (1, 1))
            assert place.is_there(result)

        assert place.copies(result) == 1
    made.dispose()


def test_a_commit_in_two_phases(mariadb_place: Place) -> None:
    place = mariadb_place
    with place.engine.connect() as connection:
        transaction = connection.begin_twophase()
        committed = place.add.enqueue(connection, (1, 1))
        transaction.prepare()
        assert not place.is_there(committed)
        transaction.commit()
    with place.engine.connect() as connection:
        transaction = connection.begin_twophase()
        rolled_back = place.add.enqueue(connection, (1, 1))
        transaction.prepare()
        transaction.rollback()

    assert [place.copies(one) for one in (committed, rolled_back)] == [1, 0]


async def _enqueued_in_async(place: Place, engine: Any) -> list[Any]:
    async with AsyncSession(engine) as session:
        with pytest.raises(TypeError, match="run_sync"):
            place.add.enqueue(session, (1, 1))
        async with engine.connect() as connection:
            with pytest.raises(TypeError, match="run_sync"):
                place.add.enqueue(connection, (1, 1))
        committed = await session.run_sync(lambda sync: place.add.enqueue(sync, (1, 1)))
        await session.commit()
        rolled_back = await session.run_sync(lambda sync: place.add.enqueue(sync, (1, 1)))
        await session.rollback()

        class Mine(AsyncSession):
            """A user's own kind."""

        with pytest.raises(TypeError, match="run_sync"):
            place.add.enqueue(Mine(engine), (1, 1))
    await engine.dispose()
    return [committed, rolled_back]


def test_an_async_session_is_told_how(sqlite_place: Place) -> None:
    url = sqlite_place.site.store_url.replace("sqlite:", "sqlite+aiosqlite:")

    results = asyncio.run(_enqueued_in_async(sqlite_place, create_async_engine(url)))

    assert [sqlite_place.copies(one) for one in results] == [1, 0]


@pytest.mark.parametrize("target", [None, object(), "default"])
def test_what_is_no_session_is_refused(sqlite_place: Place, target: object) -> None:
    with pytest.raises(TypeError, match="Session or Connection"):
        sqlite_place.add.enqueue(target, (1, 1))
    with pytest.raises(TypeError, match="one of the two"), Session(sqlite_place.engine) as session:
        sqlite_place.add.enqueue(session, (1, 1), using="default")


# --- the same options as apply_async ------------------------------------------------------------


def message_of(site: Site, job_id: str) -> dict[str, Any]:
    """Return a recorded message without what differs between any two calls."""
    (row,) = site.messages(job_id)
    headers = json.loads(row["headers"])
    assert headers.pop("id") == headers.pop("root_id") == job_id
    for name in ("eta", "expires"):
        if headers[name] is not None:
            until = datetime.fromisoformat(headers[name]) - datetime.now(timezone.utc)
            headers[name] = round(until / timedelta(minutes=1))
    properties = json.loads(row["properties"])
    assert properties.pop("correlation_id") == job_id
    left_out = ("job_id", "headers", "properties", "created_at")
    kept = {name: value for name, value in row.items() if name not in left_out}
    return {**kept, "body": bytes(row["body"]), "headers": headers, "properties": properties}


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "queue and priority": {"queue": "other", "priority": 3},
    "countdown": {"countdown": 1800},
    "eta": {"eta": datetime.now(timezone.utc) + timedelta(minutes=40)},
    "expires": {"expires": 3600},
    "serializer": {"serializer": "pickle", "compression": "zlib"},
    "headers": {"headers": {"tenant": "100 % of %s"}, "shadow": "other name"},
    "limits": {"time_limit": 20, "soft_time_limit": 10},
    "no result": {"ignore_result": True},
    "stamps": {"stamped_headers": ["colour"], "colour": "red"},
    "key": {"idempotency_key": "a 50 % %s key %(x)s"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_message_is_that_of_apply_async(place: Place, name: str) -> None:
    options = dict(OPTIONS[name])
    link = place.site.task("t.errback").si("x").set(task_id="linked")
    plain = place.add.apply_async((1, "50 % %s"), link=link, link_error=link, **options)
    if "idempotency_key" in options:
        options["idempotency_key"] += " other"

    with place.engine.begin() as connection:
        result = place.add.enqueue(
            connection, (1, "50 % %s"), link=link, link_error=link, **options
        )

    ours, theirs = (message_of(place.site, one.id) for one in (result, plain))
    for one in (ours, theirs):
        one["headers"].pop("lease_idempotency_key", None)
    assert ours == theirs
    job, model = (place.site.job(one.id) for one in (result, plain))
    for column in ("task", "state", "max_attempts", "on_expiry", "queue", "priority", "submitter"):
        assert job[column] == model[column], column
    for column in ("expires_at", "available_at"):
        assert (job[column] is None) == (model[column] is None), column
    # What is due in half an hour stays in the store until then.
    is_sent = name not in ("countdown", "eta")
    assert job["dispatch_count"] == model["dispatch_count"] == int(is_sent)
    assert result.ignored == plain.ignored


def test_arguments_are_checked_and_a_message_that_is_too_large_is_refused(place: Place) -> None:
    with place.engine.begin() as connection:
        with pytest.raises(TypeError):
            place.add.enqueue(connection, (1, 2, 3))
        with pytest.raises(PayloadTooLarge):
            place.add.enqueue(connection, ("x" * 20_000_000, ""))
        with pytest.raises(SettingError, match="lease_duration"):
            place.add.enqueue(connection, (1, 2), lease_duration=3)
        result = place.add.enqueue(connection, kwargs={"first": 1, "second": 2})

    assert place.copies(result) == 1


def test_an_eager_app_runs_the_body_at_once(make_site: Any, sqlite_url: str) -> None:
    site = make_site(sqlite_url, task_always_eager=True)
    engine = sa.create_engine(sqlite_url)

    with engine.begin() as connection:
        assert site.task("t.add").enqueue(connection, (1, 2)).get() == 3
    engine.dispose()

    assert site.jobs() == []


# --- what would not pass through the store ------------------------------------------------------


def refused(site: Site, name: str, said: str, **options: Any) -> None:
    """Enqueue in a transaction that is committed; nothing is recorded, and nothing leaves."""
    task = site.task(name)
    if options.pop("unregistered", False):
        task = task._get_current_object() if hasattr(task, "_get_current_object") else task
        site.app.tasks.unregister(name)
    engine = sa.create_engine(site.store_url)
    with engine.begin() as connection, pytest.raises(SettingError, match=said):
        task.enqueue(connection, (1, 2), **options)
    engine.dispose()
    assert site.jobs() == []
    assert site.queued("celery") == []


def test_the_old_protocol_is_refused_and_nothing_leaves(make_site: Any, sqlite_url: str) -> None:
    refused(make_site(sqlite_url, task_protocol=1), "t.add", "task_protocol 2")


def test_a_task_that_its_app_does_not_know_is_refused_and_nothing_leaves(
    make_site: Any, sqlite_url: str
) -> None:
    refused(make_site(sqlite_url), "t.add", "among the tasks of its app", unregistered=True)


def test_a_broker_of_the_callers_is_refused(make_site: Any, sqlite_url: str) -> None:
    site = make_site(sqlite_url)
    with KombuConnection("memory://") as other:
        refused(site, "t.add", "no connection", connection=other)
        refused(site, "t.add", "no producer", producer=site.app.amqp.Producer(other))


def test_a_call_of_which_something_makes_another_is_an_error(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sqlite_place.site.app.send_task

    def sends(name: str, *args: Any, **options: Any) -> Any:
        return plain(name, *args, **{**options, "task_id": f"another-{options['task_id']}"})

    monkeypatch.setattr(sqlite_place.site.app, "send_task", sends)
    with sqlite_place.engine.begin() as connection, pytest.raises(SettingError, match="another id"):
        sqlite_place.add.enqueue(connection, (1, 2))


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("signal_name", ["before_task_publish", "after_task_publish"])
def test_what_is_called_by_those_who_are_told_of_a_publish_is_not_the_callers(
    place: Place,
    is_held: bool,  # noqa: FBT001  of the table above
    signal_name: str,
) -> None:
    """Each is recorded and sent by itself, and finds the one that holds its key."""
    told, names = getattr(signals, signal_name), f"{place.kind}-{is_held}-{signal_name}"
    key, by_value = f"told-{names}", place.site.task("k.until_final")
    holder = by_value.apply_async((names,), idempotency_key=f"value-{names}")
    if is_held:
        place.add.apply_async((1, 2), idempotency_key=key)
    called: list[Any] = []

    def on_publish(sender: str, **_: Any) -> None:
        if sender == "t.add":
            called.append(place.site.task("t.mark").delay(names))
            called.append(by_value.apply_async((names,), idempotency_key=f"value-{names}"))

    told.connect(on_publish)
    try:
        with place.engine.connect() as connection:
            place.add.enqueue(connection, (1, 2), idempotency_key=key)
    finally:
        told.disconnect(on_publish)

    assert called[1].id == holder.id
    assert [place.copies(one) for one in called] == [1, 1]


# --- keys and ids that are taken ----------------------------------------------------------------


def test_a_key_is_held_from_the_statement_on(place: Place) -> None:
    key = f"key-{place.kind}"
    with place.engine.begin() as connection:
        first = place.add.enqueue(connection, (1, 2), idempotency_key=key)
        again = place.add.enqueue(connection, (1, 2), idempotency_key=key)
        with pytest.raises(IdempotencyConflict) as caught:
            place.add.enqueue(connection, (1, 3), idempotency_key=key)
        order = new_order(connection)
    with place.engine.begin() as connection:
        later = place.add.enqueue(connection, (1, 2), idempotency_key=key)

    assert again.id == later.id == caught.value.job_id == first.id
    assert orders(place.engine, order) == 1
    assert place.copies(first) == 1
    assert place.add.apply_async((1, 2), idempotency_key=key).id == first.id
    assert len(place.site.messages(first.id)) == 1


def test_no_message_of_a_refused_job_stays_behind(place: Place) -> None:
    key = f"orphan-{place.kind}"
    first = place.add.apply_async((1, 2), idempotency_key=key)
    table = place.site.tables.message
    every = sa.select(table.c.job_id)
    before = len(place.site.select(every))

    with place.engine.begin() as connection:
        assert place.add.enqueue(connection, (1, 2), idempotency_key=key).id == first.id
        assert place.add.enqueue(connection, (1, 2), task_id=first.id).id == first.id

    assert len(place.site.select(every)) == before


def test_a_key_goes_back_with_a_rollback(place: Place) -> None:
    key = f"back-{place.kind}"
    with place.engine.connect() as connection:
        given_up = place.add.enqueue(connection, (1, 2), idempotency_key=key)

    with place.engine.begin() as connection:
        result = place.add.enqueue(connection, (1, 3), idempotency_key=key)

    assert result.id != given_up.id
    assert place.copies(result) == 1


def test_a_holder_whose_time_is_over_gives_its_key_up(place: Place) -> None:
    key, task = f"over-{place.kind}", place.site.task("k.until_final")
    first = task.apply_async((key,), idempotency_key=key)
    job = place.site.tables.job
    row = place.site.job(first.id)
    succeeded = {"state": "succeeded", "finished_at": row["created_at"], "settled_at": None}
    place.site.execute(sa.update(job).where(job.c.id == first.id).values(**succeeded))

    with place.engine.connect() as connection:
        given_up = task.enqueue(connection, (key,), idempotency_key=key)
    # On SQLite, where the caller is the one writer, with his commit; else before.
    held = place.site.job(first.id)["active_key"]
    assert held == (key if place.kind == "sqlite" else None)
    with place.engine.begin() as connection:
        second = task.enqueue(connection, (key,), idempotency_key=key)

    assert len({first.id, given_up.id, second.id}) == 3
    assert place.site.job(first.id)["active_key"] is None
    assert place.site.job(second.id)["active_key"] == key
    assert place.copies(second) == 1


def test_an_id_that_exists_is_the_existing_job(place: Place) -> None:
    name = f"my-id-{place.kind}"
    with place.engine.begin() as connection:
        first = place.add.enqueue(connection, (1, 2), task_id=name)
        second = place.add.enqueue(connection, (3, 4), task_id=name)
    with place.engine.begin() as connection:
        third = place.add.enqueue(connection, (5, 6), task_id=name)

    assert first.id == second.id == third.id == name
    (message,) = place.site.messages(name)
    assert b"[1, 2]" in bytes(message["body"])
    assert place.copies(first) == 1


def test_with_an_id_of_its_own_it_follows_the_holder_of_its_key(place: Place) -> None:
    key = f"follow-{place.kind}"
    with place.engine.begin() as connection:
        first = place.add.enqueue(connection, (1, 2), idempotency_key=key)
        second = place.add.enqueue(connection, (1, 2), idempotency_key=key, task_id=f"f-{key}")

    assert [place.copies(one) for one in (first, second)] == [1, 1]
    assert place.site.job(first.id)["active_key"] == key
    assert place.site.job(second.id)["active_key"] is None


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_callers_at_once_the_second_waits_for_the_first(row_place: Place, end: str) -> None:
    place, key = row_place, f"two-{row_place.kind}-{end}"

    def second() -> Any:
        with place.engine.begin() as connection:
            return place.add.enqueue(connection, (1, 2), idempotency_key=key)

    with ThreadPoolExecutor(1) as pool, place.engine.connect() as connection:
        first = place.add.enqueue(connection, (1, 2), idempotency_key=key)
        future = pool.submit(second)
        never(future.done, during=0.3)
        getattr(connection, end)()
        other = future.result(30)

    assert (other.id == first.id) == (end == "commit")
    assert place.is_there(other)
    assert place.copies(other) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_caller_with_an_old_snapshot(row_place: Place, level: str) -> None:
    """PostgreSQL tells such a caller to begin again; MariaDB finds the job that holds the key."""
    place, key = row_place, f"old-{row_place.kind}-{level}"
    engine = place.engine.execution_options(isolation_level=level)
    with engine.connect() as connection:
        connection.execute(sa.select(ORDERS)).all()
        first = place.add.apply_async((1, 2), idempotency_key=key)
        free = place.add.enqueue(connection, (1, 2))
        if place.kind == "postgresql":
            with pytest.raises(sa.exc.OperationalError, match="could not serialize"):
                place.add.enqueue(connection, (1, 2), idempotency_key=key)
            connection.rollback()
            assert not place.is_there(free)
        else:
            found = place.add.enqueue(connection, (1, 2), idempotency_key=key)
            connection.commit()
            assert found.id == first.id
            assert place.is_there(free)
        connection.execute(sa.select(ORDERS)).all()
        again = place.add.enqueue(connection, (1, 2), idempotency_key=key)
        connection.commit()

    assert again.id == first.id


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_an_open_transaction_is_in_nobodys_way(row_place: Place, level: str) -> None:
    """Neither of other submits, nor of the job that holds its key, nor of the reaper."""
    place, key = row_place, f"open-{row_place.kind}-{level}"
    held = place.add.apply_async((1, 2), idempotency_key=key)
    engine = place.engine.execution_options(isolation_level=level)
    with engine.connect() as connection:
        new_order(connection)
        mine = place.add.enqueue(connection, (1, 2))
        assert place.add.enqueue(connection, (1, 2), idempotency_key=key).id == held.id

        others = [place.add.delay(1, 2) for _ in range(3)]
        others.append(place.add.apply_async((1, 2), idempotency_key=f"{key} other"))
        assert extension_of(place.site.app).store
        job = place.site.tables.job
        frees = {"state": "cancelled", "finished_at": job.c.created_at, "active_key": None}
        place.site.execute(sa.update(job).where(job.c.id == held.id).values(**frees))
        place.site.run_pass()
        # Whoever had waited would have waited in vain, and failed: it is open still.
        connection.commit()

    assert all(place.is_there(one) for one in (*others, mine))
    assert place.copies(mine) == 1


# --- the caller's database is the store's -------------------------------------------------------


@pytest.fixture
def elsewhere(
    place: Place, fresh_database: Callable[[str], str], own_server: Callable[..., Any]
) -> Iterator[sa.Engine]:
    """An engine on another database of the same kind; a transaction cannot be in both."""
    # The databases of one MariaDB server share transactions.
    url = own_server(MariaDB).url if place.kind == "mariadb" else fresh_database(place.kind)
    if place.kind == "mariadb":
        with new_database(url) as other:
            engine = sa.create_engine(other)
            yield engine
            engine.dispose()
        return
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


def test_another_database_is_refused_by_both_names(place: Place, elsewhere: sa.Engine) -> None:
    """Without the store's tables, and with tables of the same names."""
    engine = elsewhere
    ORDERS.create(engine)

    with engine.begin() as connection:
        order = new_order(connection)
        with pytest.raises(SettingError) as caught:
            place.add.enqueue(connection, (1, 2))

    # The transaction goes on.
    assert orders(engine, order) == 1
    for url in (engine.url, sa.make_url(place.site.store_url)):
        assert url.render_as_string(hide_password=True) in str(caught.value)

    place.site.tables.metadata.create_all(engine)
    with engine.begin() as connection, pytest.raises(SettingError):
        place.add.enqueue(connection, (1, 2))
    with engine.connect() as connection:
        assert connection.execute(sa.select(place.site.tables.job)).all() == []


def test_missing_tables_are_said_at_once(make_site: Any, database_url: str) -> None:
    """Where there is one writer, who is the caller, making them would wait for him for ever."""
    site = make_site(database_url, has_tables=False, lease_store_auto_migrate=False)
    engine = sa.create_engine(database_url)
    ORDERS.create(engine)

    began = time.monotonic()
    with engine.begin() as connection:
        order = new_order(connection)
        with pytest.raises((SettingError, SchemaMismatch), match="lease migrate"):
            site.task("t.add").enqueue(connection, (1, 2))

    # Otherwise it waits for SQLite's writer, six times.
    assert time.monotonic() - began < SQLITE_BUSY_SECONDS
    assert orders(engine, order) == 1
    engine.dispose()


def test_another_kind_of_database_is_refused(row_place: Place) -> None:
    engine = sa.create_engine("sqlite://")

    with engine.begin() as connection, pytest.raises(SettingError, match="sqlite"):
        row_place.add.enqueue(connection, (1, 2))
    engine.dispose()


def test_the_file_is_the_same_whatever_it_is_called(sqlite_place: Place, tmp_path: Path) -> None:
    path = sa.make_url(sqlite_place.site.store_url).database
    assert path is not None
    (tmp_path / "link.db").symlink_to(path)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'link.db'}")

    with engine.begin() as connection:
        result = sqlite_place.add.enqueue(connection, (1, 2))
    engine.dispose()

    assert sqlite_place.copies(result) == 1


def test_a_search_path_of_the_callers_changes_nothing(postgresql_place: Place) -> None:
    place = postgresql_place
    with place.engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA tenant"))
        connection.execute(sa.text("CREATE TABLE tenant.celery_lease_job (id text)"))
    engine = place.made()
    with engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL search_path = tenant"))
        result = place.add.enqueue(connection, (1, 2))
    engine.dispose()

    assert place.copies(result) == 1


def test_a_caller_at_home_in_another_database_of_the_server(
    mariadb_place: Place, fresh_database: Callable[[str], str]
) -> None:
    place = mariadb_place
    engine = sa.create_engine(fresh_database("mariadb"))
    ORDERS.create(engine)

    with engine.begin() as connection:
        order = new_order(connection)
        result = place.add.enqueue(connection, (1, 2))
    with engine.connect() as connection:
        given_up = place.add.enqueue(connection, (1, 2))

    assert orders(engine, order) == 1
    assert [place.copies(one) for one in (result, given_up)] == [1, 0]
    engine.dispose()


# --- who is away --------------------------------------------------------------------------------


def test_neither_broker_nor_result_backend_is_needed(
    database_url: str, own_server: Callable[..., Any]
) -> None:
    """Fifty jobs in one transaction cost the caller one try: the others are the reaper's."""
    valkey = own_server(Valkey)
    with open_site(
        valkey.url_for(0), database_url, task_send_sent_event=True, broker_connection_timeout=1
    ) as site:
        engine = sa.create_engine(database_url)
        ORDERS.create(engine)
        port = valkey.port
        valkey.kill()

        with engine.begin() as connection:
            order = new_order(connection)
            results = [site.task("t.add").enqueue(connection, (n, n)) for n in range(50)]

        assert orders(engine, order) == 1
        rows = [site.job(one.id) for one in results]
        assert {(row["state"], row["dispatched_at"]) for row in rows} == {("queued", None)}
        assert sum(row["dispatch_count"] for row in rows) == 1
        valkey.restart()
        assert valkey.port == port
        eventually(lambda: site.run_pass() and len(site.queued("celery")) == 50)
        engine.dispose()


def test_nothing_says_that_it_was_sent(make_site: Any, sqlite_url: str) -> None:
    """Celery's ``task-sent``, of a job that may be rolled back; of what a handler sends it is."""
    site = make_site(sqlite_url, task_send_sent_event=True)
    engine = sa.create_engine(sqlite_url)
    within: list[str] = []

    def note(**_: Any) -> None:
        within.append(site.task("t.mark").delay("tag").id)

    with site.redis() as client, client.pubsub(ignore_subscribe_messages=True) as events:
        events.psubscribe("*celeryev*")
        signals.before_task_publish.connect(note, sender="t.add")
        try:
            with engine.connect() as connection:
                site.task("t.add").enqueue(connection, (1, 2))
        finally:
            signals.before_task_publish.disconnect(note, sender="t.add")
        plain = site.task("t.add").delay(1, 2)
        said = [eventually(lambda: (events.get_message() or {}).get("data")) for _ in range(2)]

    # In this order: had the event of the enqueued one been sent, it would be the second.
    for event, job_id in zip(said, [*within, plain.id], strict=True):
        assert job_id.encode() in base64.b64decode(json.loads(event)["body"])
    engine.dispose()


def test_whatever_is_wrong_after_the_commit_is_not_the_callers(
    make_site: Any, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The database refuses what is no outage: an operator's trigger, a right that is missing."""
    site = make_site(sqlite_url)
    engine = sa.create_engine(sqlite_url)
    ORDERS.create(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE UPDATE ON celery_lease_job "
            "BEGIN SELECT RAISE(ABORT, 'not now'); END"
        )

    with engine.begin() as connection:
        order = new_order(connection)
        result = site.task("t.add").enqueue(connection, (1, 2))

    assert orders(engine, order) == 1
    assert "lease.enqueue.unsent count=1" in caplog.text
    assert site.job(result.id)["dispatched_at"] is None
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER refuse")
    site.run_pass()
    assert [m["headers"]["id"] for m in site.queued("celery")] == [result.id]
    engine.dispose()


def test_a_message_that_cannot_be_sent_is_not_in_the_way_of_the_others(place: Place) -> None:
    message = place.site.tables.message
    with place.engine.begin() as connection:
        damaged, *others = [place.add.enqueue(connection, (number, 2)) for number in range(4)]
        connection.execute(
            sa.update(message).where(message.c.job_id == damaged.id).values(headers="{")
        )

    assert [place.copies(one) for one in (damaged, *others)] == [0, 1, 1, 1]


class _Interrupted(BaseException):
    """As a lease that is lost, a timeout of gevent's, Ctrl-C."""


@pytest.mark.parametrize("pool", [QueuePool, NullPool])
def test_what_interrupts_the_sending_costs_the_caller_no_connection(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch, pool: Any
) -> None:
    bounds = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1} if pool is QueuePool else {}
    engine = sqlite_place.made(poolclass=pool, **bounds)

    def interrupts(*_: Any, **__: Any) -> None:
        raise _Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("celery_lease.store.queries.committed", interrupts)
        for _ in range(3):
            with pytest.raises(_Interrupted), engine.begin() as connection:
                result = sqlite_place.add.enqueue(connection, (1, 2))
        assert sqlite_place.is_there(result)

    with engine.begin() as one:
        again = sqlite_place.add.enqueue(one, (1, 2))
    assert sqlite_place.copies(again) == 1
    engine.dispose()


def test_a_store_that_goes_away_takes_nothing_from_the_caller(
    make_site: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller's own way to the same database is another one."""
    url = sa.make_url(postgresql_url)
    assert url.port is not None
    proxy = start_proxy(url.port)
    behind = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    site = make_site(behind)
    engine = sa.create_engine(postgresql_url)
    ORDERS.create(engine)

    with engine.begin() as connection:
        order = new_order(connection)
        result = site.task("t.add").enqueue(connection, (1, 2))
        proxy.cut()
    proxy.heal()

    assert "lease.store.unavailable" in caplog.text
    assert "lease.enqueue.unsent" not in caplog.text
    assert orders(engine, order) == 1
    assert site.job(result.id)["dispatched_at"] is None
    site.run_pass()
    assert [m["headers"]["id"] for m in site.queued("celery")] == [result.id]
    engine.dispose()


@pytest.mark.long
def test_an_answer_by_rpc_finds_its_queue(
    amqp_url: str, make_site: Any, sqlite_url: str, start_worker: Callable[..., Any]
) -> None:
    """RabbitMQ drops an answer to a queue that nobody has declared before the call was sent."""
    site = make_site(sqlite_url, broker=amqp_url, backend="rpc://")
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    engine = sa.create_engine(sqlite_url)

    with engine.begin() as connection:
        result = site.task("t.add").enqueue(connection, (1, 2))
    site.until(result.id, "succeeded", settled=True)

    assert result.get(timeout=15) == 3
    engine.dispose()


# --- with a worker ------------------------------------------------------------------------------


@pytest.fixture
def engine(site: Site) -> Iterator[sa.Engine]:
    """A caller's engine on the database of the shared site."""
    made = sa.create_engine(site.store_url)
    ORDERS.create(made, checkfirst=True)
    yield made
    made.dispose()


def test_the_body_runs_after_the_commit_and_sees_the_row(site: Site, engine: sa.Engine) -> None:
    """B121: the worker is idle, and the transaction stays open."""
    order_task = site.task("e.order")
    with engine.begin() as connection:
        order = new_order(connection)
        result = order_task.enqueue(connection, (order,))
        never(lambda: site.facts(order), during=0.5)
        site.run_pass()

    assert result.get(timeout=15) == 1
    site.until(result.id, "succeeded", settled=True)
    assert site.facts(order) == ["saw 1"]
    assert len(site.attempts(result.id)) == 1


def test_nothing_runs_after_a_rollback(site: Site, engine: sa.Engine) -> None:
    """B121."""
    with engine.connect() as connection:
        order = new_order(connection)
        result = site.task("e.order").enqueue(connection, (order,))
        connection.rollback()
    site.run_pass()

    # Whatever was sent before it would have run before it.
    assert site.task("t.add").delay(1, 2).get(timeout=15) == 3
    assert site.facts(order) == []
    assert site.job_or_none(result.id) is None


def test_a_countdown_is_kept(site: Site, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        order = new_order(connection)
        result = site.task("e.order").enqueue(connection, (order,), countdown=1)

    # By the worker that has the message, to the instant, and not by a pass.
    row = site.until(result.id, "succeeded")
    # The worker counts on its own clock.
    assert (row["finished_at"] - row["created_at"]).total_seconds() >= 0.9
    assert site.facts(order) == ["saw 1"]


def test_links_and_keys_work_to_the_end(site: Site, engine: sa.Engine) -> None:
    tag = site.tag()
    with engine.begin() as connection:
        link = site.task("t.errback").si(tag)
        result = site.task("t.mark").enqueue(
            connection, (tag,), link=link, idempotency_key=f"linked-{tag}"
        )

    assert result.get(timeout=15) == "marked"
    eventually(lambda: site.facts(tag) == ["mark 1", "errback"])
    assert site.task("t.mark").apply_async((tag,), idempotency_key=f"linked-{tag}").id == result.id


def test_a_body_enqueues_the_next_job(site: Site, engine: sa.Engine) -> None:
    order = f"next-{site.tag()}"

    first = site.task("e.follows_up").delay(order)
    following = first.get(timeout=15)

    assert [child.id for child in first.children] == [following]
    row = site.until(following, "succeeded", settled=True)
    assert row["parent_id"] is not None
    assert site.facts(order) == ["saw 1"]


CALLER = """
import os, signal, sys
import sqlalchemy as sa
from celery_lease import events
from tests.worker.apps.enqueued import ORDERS
from tests.worker.apps.leased import app

# Said between the commit and the publish.
events.subscribe(
    lambda event: event.name == events.JOB_SUBMITTED and os.kill(os.getpid(), signal.SIGKILL)
)
engine = sa.create_engine(app.conf.lease_store_url)
with engine.begin() as connection:
    connection.execute(sa.insert(ORDERS).values(id=sys.argv[1]))
    print(app.tasks["e.order"].enqueue(connection, (sys.argv[1],)).id, flush=True)
"""


def test_a_caller_that_is_killed_between_commit_and_publish(site: Site, engine: sa.Engine) -> None:
    """B121: the reaper sends it in its next pass."""
    order = f"killed-{site.tag()}"
    env = {k: v for k, v in site.worker_env().items() if v is not None}

    caller = subprocess.run(
        [sys.executable, "-c", CALLER, order],
        env={**os.environ, **env, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert caller.returncode == -signal.SIGKILL, caller.stderr
    job_id = caller.stdout.strip()
    assert orders(engine, order) == 1
    assert site.job(job_id)["dispatched_at"] is None
    assert site.facts(order) == []
    assert site.run_pass()["dispatched"] >= 1
    site.until(job_id, "succeeded", settled=True)
    assert site.facts(order) == ["saw 1"]


def test_many_threads_share_one_engine(site: Site, engine: sa.Engine) -> None:
    """The listeners are added while others use the pool."""
    gate = threading.Barrier(8)

    def call(number: int) -> list[Any]:
        gate.wait(30)
        made = []
        for step in range(5):
            with engine.connect() as connection:
                result = site.task("t.add").enqueue(connection, (number, step))
                if step % 2:
                    connection.rollback()
                else:
                    connection.commit()
                    made.append(result)
        return made

    with ThreadPoolExecutor(8) as pool:
        results = [one for made in pool.map(call, range(8)) for one in made]

    for one in results:
        site.until(one.id, "succeeded")
    assert len(results) == 8 * 3
    assert {site.job(one.id)["dispatch_count"] for one in results} == {1}
