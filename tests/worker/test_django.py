"""A job in Django's transaction: with the commit, or not at all; and ``delay_on_commit``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import django
import pymysql
import pytest
import sqlalchemy as sa
from django.conf import settings
from django.db import connections, transaction
from django.utils.connection import ConnectionDoesNotExist

from celery_lease import IdempotencyConflict
from celery_lease.contrib.django import DjangoLeasedTask
from celery_lease.exceptions import SettingError
from celery_lease.extension import extension_of
from tests.support.waiting import eventually
from tests.support.workers import ROOT
from tests.worker.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINES = {"sqlite": "sqlite3", "postgresql": "postgresql", "mariadb": "mysql"}


class Place:
    """A site, and one of Django's databases, which is the store's.

    Args:
        using: its name in ``DATABASES``.
        site: where jobs are looked for.
    """

    def __init__(self, using: str, site: Site) -> None:
        self.using = using
        self.site = site
        self.add = site.task("t.add")

    def is_there(self, result: Any) -> bool:
        """Tell whether a job is committed, as another connection sees it."""
        return self.site.job_or_none(result.id) is not None

    def copies(self, result: Any) -> int:
        """Return how many messages of a job are on the broker."""
        return [m["headers"]["id"] for m in self.site.queued("celery")].count(result.id)

    def fates(self, *results: Any) -> list[tuple[bool, int]]:
        """Return of each job whether it is there, and how many messages it has."""
        return [(self.is_there(one), self.copies(one)) for one in results]


def add_database(using: str, url: str) -> None:
    """Give Django another database."""
    parsed = sa.make_url(url)
    kind = "mariadb" if parsed.get_backend_name() == "mysql" else parsed.get_backend_name()
    conf = {
        "ENGINE": f"django.db.backends.{ENGINES[kind]}",
        "NAME": parsed.database,
        "USER": parsed.username or "",
        "PASSWORD": parsed.password or "",
        "HOST": parsed.host or "",
        "PORT": parsed.port or "",
    }
    connections.databases[using] = connections.configure_settings({"default": conf})["default"]


def remove_database(using: str) -> None:
    """Take it away again."""
    connections[using].close()
    del connections[using]
    del connections.databases[using]


@pytest.fixture(scope="module")
def places(sites: Callable[[str], Site]) -> Iterator[Callable[[str], Place]]:
    """The places of this module, each made at its first use."""
    # Django knows MySQL by mysqlclient alone, for which PyMySQL stands in (says its own manual).
    pymysql.install_as_MySQLdb()
    if not settings.configured:
        memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        settings.configure(DATABASES={"default": memory}, USE_TZ=True)
        django.setup()
    made: dict[str, Place] = {}
    with ExitStack() as stack:
        stack.callback(connections.close_all)

        def place(kind: str) -> Place:
            if kind not in made:
                site = sites(kind)
                add_database(kind, site.store_url)
                stack.callback(remove_database, kind)
                made[kind] = Place(kind, site)
            return made[kind]

        yield place


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def place(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> Place:
    """One database after the other."""
    return places(request.param)


@pytest.fixture
def sqlite_place(places: Callable[[str], Place]) -> Place:
    """The one on SQLite."""
    return places("sqlite")


# --- with the commit, or not at all -------------------------------------------------------------


def test_the_message_leaves_by_on_commit(place: Place) -> None:
    told = []
    with transaction.atomic(using=place.using):
        result = place.add.enqueue(using=place.using, args=(1, "50 % %s %(x)s"))
        transaction.on_commit(lambda: told.append(place.copies(result)), using=place.using)
        assert place.fates(result) == [(False, 0)]

    # In the order in which it was asked for.
    assert told == [1]
    assert place.fates(result) == [(True, 1)]
    (message,) = place.site.messages(result.id)
    assert b'[1, "50 % %s %(x)s"]' in bytes(message["body"])
    place.site.run_pass()
    assert place.copies(result) == 1


def test_after_a_rollback_there_is_nothing(place: Place) -> None:
    with transaction.atomic(using=place.using):
        result = place.add.enqueue(using=place.using, args=(1, 2))
        transaction.set_rollback(True, using=place.using)
    with transaction.atomic(using=place.using):
        later = place.add.enqueue(using=place.using, args=(1, 2))

    place.site.run_pass()
    assert place.fates(result, later) == [(False, 0), (True, 1)]


def test_a_savepoint_that_is_rolled_back_takes_its_job_with_it(place: Place) -> None:
    with transaction.atomic(using=place.using):
        before = place.add.enqueue(using=place.using, args=(1, 1))
        with transaction.atomic(using=place.using):
            inside = place.add.enqueue(using=place.using, args=(2, 2))
            transaction.set_rollback(True, using=place.using)
        with transaction.atomic(using=place.using):
            kept = place.add.enqueue(using=place.using, args=(3, 3))

    assert place.fates(before, inside, kept) == [(True, 1), (False, 0), (True, 1)]


def test_without_a_transaction_it_is_sent_at_once(place: Place) -> None:
    assert transaction.get_autocommit(using=place.using)

    result = place.add.enqueue(using=place.using, args=(1, 2))

    assert place.fates(result) == [(True, 1)]


def test_a_transaction_that_is_ended_by_hand_is_followed_by_a_pass(place: Place) -> None:
    transaction.set_autocommit(False, using=place.using)
    try:
        result = place.add.enqueue(using=place.using, args=(1, 2))
        transaction.commit(using=place.using)
    finally:
        transaction.set_autocommit(True, using=place.using)

    assert place.fates(result) == [(True, 0)]
    place.site.run_pass()
    assert place.fates(result) == [(True, 1)]


def test_a_key_that_is_held_leaves_the_transaction_whole(place: Place) -> None:
    key = f"key-100%s-{place.using}"
    with transaction.atomic(using=place.using):
        first = place.add.enqueue(using=place.using, args=(1, 2), idempotency_key=key)
        again = place.add.enqueue(using=place.using, args=(1, 2), idempotency_key=key)
        with pytest.raises(IdempotencyConflict):
            place.add.enqueue(using=place.using, args=(1, 3), idempotency_key=key)
    with transaction.atomic(using=place.using):
        later = place.add.enqueue(using=place.using, args=(1, 2), idempotency_key=key)
        same = place.add.enqueue(using=place.using, args=(1, 2), task_id=first.id)
        other = place.add.enqueue(using=place.using, args=(1, 2))

    assert first.id == again.id == later.id == same.id
    assert place.fates(first, other) == [(True, 1), (True, 1)]


def test_a_holder_whose_time_is_over_gives_its_key_up(place: Place) -> None:
    key, task = f"over-{place.using}", place.site.task("k.until_final")
    first = task.apply_async((key,), idempotency_key=key)
    job = place.site.tables.job
    row = place.site.job(first.id)
    succeeded = {"state": "succeeded", "finished_at": row["created_at"]}
    place.site.execute(sa.update(job).where(job.c.id == first.id).values(**succeeded))

    with transaction.atomic(using=place.using):
        task.enqueue(using=place.using, args=(key,), idempotency_key=key)
        transaction.set_rollback(True, using=place.using)
    # On SQLite, where the caller is the one writer, with his commit; else before.
    held = place.site.job(first.id)["active_key"]
    assert held == (key if connections[place.using].vendor == "sqlite" else None)
    with transaction.atomic(using=place.using):
        second = task.enqueue(using=place.using, args=(key,), idempotency_key=key)

    assert place.site.job(first.id)["active_key"] is None
    assert place.site.job(second.id)["active_key"] == key


def test_the_statements_are_seen_by_djangos_wrappers(place: Place) -> None:
    seen = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001
        seen.append(sql)
        return execute(sql, params, many, context)

    connection = connections[place.using]
    with connection.execute_wrapper(note), transaction.atomic(using=place.using):
        place.add.enqueue(using=place.using, args=(1, 2))

    assert [sql for sql in seen if "celery_lease_job" in sql]


def test_every_job_of_a_transaction_is_asked_for_together(sqlite_place: Place) -> None:
    place = sqlite_place
    questions = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT") and "dispatch_count" in statement:
            questions.append(statement)

    store = extension_of(place.site.app).store
    sa.event.listen(store.base_engine, "before_cursor_execute", note)
    try:
        with transaction.atomic(using=place.using):
            results = [place.add.enqueue(using=place.using, args=(n, n)) for n in range(20)]
    finally:
        sa.event.remove(store.base_engine, "before_cursor_execute", note)

    assert [place.copies(one) for one in results] == [1] * 20
    assert len(questions) == 1


def test_another_database_is_refused_and_the_transaction_goes_on(
    place: Place, fresh_database: Callable[[str], str]
) -> None:
    other = "sqlite" if place.using == "mariadb" else place.using
    add_database("elsewhere", fresh_database(other))
    try:
        with transaction.atomic(using="elsewhere"):
            with pytest.raises(SettingError, match="elsewhere"):
                place.add.enqueue(using="elsewhere", args=(1, 2))
            with connections["elsewhere"].cursor() as cursor:
                cursor.execute("SELECT 1")
        with pytest.raises(ConnectionDoesNotExist):
            place.add.enqueue(using="nowhere", args=(1, 2))
    finally:
        remove_database("elsewhere")


def test_parameters_that_the_server_binds(places: Callable[[str], Place]) -> None:
    """An option of Django's for psycopg 3."""
    place = places("postgresql")
    add_database("bound", place.site.store_url)
    connections.databases["bound"]["OPTIONS"] = {"server_side_binding": True}
    try:
        with transaction.atomic(using="bound"):
            first = place.add.enqueue(
                using="bound", args=(1, "%s"), countdown=0.5, expires=60, idempotency_key="bound %s"
            )
            again = place.add.enqueue(using="bound", args=(1, "%s"), idempotency_key="bound %s")
    finally:
        remove_database("bound")

    assert again.id == first.id
    assert place.fates(first) == [(True, 1)]


# --- delay_on_commit ----------------------------------------------------------------------------


def on_commit_task(site: Site, name: str) -> Any:
    """Return a task with Django's two methods."""

    def double(number: int) -> int:
        return 2 * number

    return site.app.task(name=name, base=DjangoLeasedTask)(double)


def test_delay_on_commit_returns_the_id(place: Place) -> None:
    """B120."""
    task = on_commit_task(place.site, "d.double")
    with transaction.atomic(using=place.using):
        result = task.apply_async_on_commit((1,), using=place.using)
        given_up = transaction.savepoint(using=place.using)
        other = task.apply_async_on_commit((2,), using=place.using)
        transaction.savepoint_rollback(given_up, using=place.using)
        assert result.id != other.id
        assert place.fates(result, other) == [(False, 0), (False, 0)]

    # It has joined the transaction: no moment between the commit and the record.
    assert place.fates(result, other) == [(True, 1), (False, 0)]
    row = place.site.job(result.id)
    assert row["created_at"] <= row["dispatched_at"]


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "elsewhere"])
def test_it_takes_its_arguments_by_position_as_apply_async_does(
    sqlite_place: Place, *, joins: bool
) -> None:
    task = on_commit_task(sqlite_place.site, f"d.position_{joins}")
    using = sqlite_place.using if joins else "default"
    with transaction.atomic(using=using):
        result = task.apply_async_on_commit(
            (1,), {}, f"my-{joins}", None, None, None, "shadow", using=using
        )
        with pytest.raises(TypeError, match="positional"):
            task.apply_async_on_commit((1,), {}, "x", None, None, None, "shadow", 8)

    assert result.id == f"my-{joins}"
    [message] = sqlite_place.site.messages(result.id)
    assert json.loads(message["headers"])["shadow"] == "shadow"


def test_where_the_store_is_elsewhere_the_call_follows_the_commit(sqlite_place: Place) -> None:
    """B120."""
    place = sqlite_place
    task = on_commit_task(place.site, "d.elsewhere")
    with transaction.atomic():
        result = task.delay_on_commit(1)
        assert place.fates(result) == [(False, 0)]
    with transaction.atomic():
        given_up = task.delay_on_commit(1)
        transaction.set_rollback(True)

    assert place.fates(result, given_up) == [(True, 1), (False, 0)]


# --- processes that have other packages ---------------------------------------------------------

PSYCOPG2 = """
import sys
sys.modules["psycopg"] = None
from django.conf import settings
settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": sys.argv[1], "USER": sys.argv[2],
    "PASSWORD": sys.argv[3], "HOST": sys.argv[4], "PORT": sys.argv[5],
}})
from django.db import connection, transaction
from tests.worker.apps.leased import app
add = app.tasks["t.add"]
with transaction.atomic():
    first = add.enqueue(using="default", args=(1, "50 % %s"), idempotency_key="%s %")
    assert add.enqueue(using="default", args=(1, "50 % %s"), idempotency_key="%s %").id == first.id
assert type(connection.connection).__module__.startswith("psycopg2"), connection.connection
print(first.id)
"""


def run(site: Site, source: str, *arguments: str) -> str:
    """Run a program that has the app of a site; returns what it printed."""
    env = {k: v for k, v in site.worker_env().items() if v is not None}
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env={**os.environ, **env, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_DJANGO = """
import sys
sys.modules["django"] = None
from celery_lease.exceptions import SettingError
from tests.worker.apps.leased import app
try:
    app.tasks["t.add"].enqueue(using="default", args=(1, 2))
except SettingError as error:
    print(error)
"""


def test_without_django_it_says_what_to_install(sqlite_place: Place) -> None:
    assert "celery-lease[django]" in run(sqlite_place.site, NO_DJANGO)


def test_psycopg2(places: Callable[[str], Place]) -> None:
    """The store has psycopg 3, and Django the older one."""
    pytest.importorskip("psycopg2")
    place = places("postgresql")
    url = sa.make_url(place.site.store_url)
    # SQLAlchemy imports psycopg for the store, which this process hides from Django alone.
    source = PSYCOPG2.replace(
        'sys.modules["psycopg"] = None',
        "import psycopg as kept\nimport psycopg2\n"
        'sys.modules["psycopg"] = None\n'
        "import django.db.backends.postgresql.base\n"
        'sys.modules["psycopg"] = kept',
    )
    said = run(
        place.site,
        source,
        *(str(url.database), str(url.username), url.password or "", str(url.host), str(url.port)),
    )

    job_id = said.strip()
    assert [m["headers"]["id"] for m in eventually(lambda: place.site.queued("celery"))].count(
        job_id
    ) == 1
