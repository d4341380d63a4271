"""``celery lease doctor`` as a person runs it, against real brokers, databases and workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.cli import facts
from celery_lease.extension import extension_of
from celery_lease.store.engine import Store
from tests.store.builders import finished, move_back, move_passes_back, running, submitted
from tests.support.ports import free_port
from tests.support.servers import PostgreSQL, Valkey
from tests.support.workers import ROOT
from tests.worker.site import WORKER_APP, Site

if TYPE_CHECKING:
    from tests.support.workers import CeleryWorker

#: seconds that a doctor may take, with the start of its process on a busy machine
BOUND = 25.0


class Said:
    """What a doctor said."""

    def __init__(self, done: subprocess.CompletedProcess[str], seconds: float) -> None:
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        self.seconds = seconds
        assert done.stdout.startswith("["), self.text
        self.findings: list[dict[str, Any]] = json.loads(done.stdout)

    def severity(self, name: str) -> str:
        """Return how bad a check found it, "" where it said nothing."""
        found = [one["severity"] for one in self.findings if one["name"] == name]
        return found[0] if found else ""

    def facts(self, name: str) -> dict[str, Any]:
        """Return what a check found, for programs."""
        return next(one["facts"] for one in self.findings if one["name"] == name)

    @property
    def errors(self) -> set[str]:
        """The checks that found an error."""
        return {one["name"] for one in self.findings if one["severity"] == "error"}


def run(app: str, env: dict[str, str], *, folder: Path = ROOT) -> Said:
    """Run the doctor of an app."""
    paths = [env.get("PYTHONPATH", str(ROOT)), os.environ.get("PYTHONPATH", "")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", app, "lease", "doctor", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=os.environ | env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    return Said(done, time.monotonic() - began)


def ask(site: Site, **conf: Any) -> Said:
    """Run the doctor of a site's app."""
    env = {name: value for name, value in site.worker_env(**conf).items() if value is not None}
    return run(WORKER_APP, env)


@pytest.fixture
def store_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Site], Store]]:
    """Give a store to write into behind the app's back."""
    made: list[Store] = []

    def make(site: Site) -> Store:
        made.append(Store(url=site.store_url))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_a_healthy_place_has_no_error(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(postgresql_url)
    worker = start_worker(WORKER_APP, env=site.worker_env())
    site.run_pass()

    said = ask(site)

    assert (said.errors, said.code) == (set(), 0), said.text
    assert said.facts("workers") == {"online": [worker.nodename]}
    assert said.facts("schema")["found"] == said.facts("schema")["expected"]
    assert said.facts("isolation") == {"isolation": "READ COMMITTED"}
    assert abs(said.facts("clock")["store_ahead_seconds"]) < 1
    assert said.facts("reaper")["age_seconds"] < 15
    assert said.seconds < BOUND


def test_it_asks_workers_on_rabbitmq_too(
    make_site: Callable[..., Site],
    postgresql_url: str,
    amqp_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(postgresql_url, broker=amqp_url)
    worker = start_worker(WORKER_APP, env=site.worker_env())
    site.run_pass()

    said = ask(site)

    assert (said.errors, said.code) == (set(), 0), said.text
    assert said.facts("workers") == {"online": [worker.nodename]}
    assert said.severity("consumer timeout") == "info"
    assert said.severity("visibility timeout") == ""


def test_queued_and_unclaimed_beside_an_idle_worker_is_an_error(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
    store_of: Callable[[Site], Store],
) -> None:
    """B022: the worker is shown online and takes nothing."""
    site = make_site(postgresql_url)
    job_id = site.task("t.add").delay(1, 2).id
    site.drop("celery")
    move_back(store_of(site), job_id, 90)
    start_worker(WORKER_APP, env=site.worker_env())
    site.run_pass()

    said = ask(site)

    assert (said.errors, said.code) == ({"unclaimed"}, 1), said.text
    told = said.facts("unclaimed")
    assert (told["queued"], told["unclaimed"]) == (1, 1)
    assert told["oldest_seconds"] >= 90


def test_a_queue_that_no_worker_consumes_is_named(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(postgresql_url)
    site.task("t.add").apply_async((1, 2), queue="nowhere")
    start_worker(WORKER_APP, env=site.worker_env())
    site.run_pass()

    said = ask(site)

    assert (said.errors, said.code) == ({"queue"}, 1), said.text
    assert said.facts("queue") == {"queue": "nowhere", "count": 1}


def test_a_reaper_that_is_not_seen_is_an_error_while_workers_are_online(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
    store_of: Callable[[Site], Store],
) -> None:
    site = make_site(postgresql_url)
    site.run_pass()
    move_passes_back(store_of(site), 20)

    assert ask(site).severity("reaper") == "warning"
    start_worker(WORKER_APP, env=site.worker_env())
    assert ask(site).errors == {"reaper"}


def test_servers_that_are_away_are_said_to_be_that(make_site: Callable[..., Site]) -> None:
    """Nothing listens: each check fails softly, soon, and no password is shown."""
    site = make_site(
        f"postgresql+psycopg://u:s3cret@127.0.0.1:{free_port()}/x",
        broker=f"redis://:s3cret@127.0.0.1:{free_port()}/0",
        has_tables=False,
    )

    said = ask(site)

    assert (said.errors, said.code) == ({"store", "broker"}, 1), said.text
    assert said.seconds < BOUND
    assert "s3cret" not in said.text
    assert said.severity("visibility timeout") == "ok"


def test_servers_that_are_frozen_do_not_hold_it_up(
    make_site: Callable[..., Site], own_server: Callable[..., Any]
) -> None:
    broker, database = own_server(Valkey), own_server(PostgreSQL)
    site = make_site(database.url, broker=broker.url)
    broker.freeze()
    database.freeze()

    said = ask(site)

    broker.thaw()
    database.thaw()
    assert (said.errors, said.code) == ({"store", "broker"}, 1), said.text
    assert said.seconds < BOUND


def test_looking_makes_no_store(make_site: Callable[..., Site], sqlite_url: str) -> None:
    site = make_site(sqlite_url, has_tables=False)

    said = ask(site)

    assert said.severity("schema") == "warning"
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_tables_that_nobody_may_make_are_an_error(
    make_site: Callable[..., Site], postgresql_url: str
) -> None:
    site = make_site(postgresql_url, has_tables=False, lease_store_auto_migrate=False)

    said = ask(site)

    assert said.errors == {"schema"}
    assert said.facts("schema")["found"] is None


_APP = """
from celery import Celery
from celery_lease import LeasedTask

app = Celery("proj", broker="memory://", set_as_current=False)
app.conf.update(lease_duration=10, lease_heartbeat_interval=9)


@app.task(base=LeasedTask, name="app.work")
def work():
    pass
"""


def test_settings_that_cannot_work_are_findings(tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text(_APP)

    said = run("proj", {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, folder=tmp_path)

    assert (said.errors, said.code) == ({"settings"}, 1), said.text
    assert "lease_heartbeat_interval is 9" in said.text


def test_what_waits_too_long_is_counted_on_each_database(
    make_site: Callable[..., Site], database_url: str, store_of: Callable[[Site], Store]
) -> None:
    site = make_site(database_url)
    store = store_of(site)
    for job_id, seconds in (("overdue", 95), ("fresh", 0)):
        running(store, job_id)
        move_back(store, job_id, seconds)
    for job_id, seconds in (("untold", 61), ("just ended", 0)):
        finished(store, running(store, job_id), settled=False)
        move_back(store, job_id, seconds)
    submitted(store, "waiting")

    found = facts.gather(extension_of(site.app)).store

    assert isinstance(found, facts.StoreFacts), found
    assert found.backlog.overdue_running_count == 1
    assert found.backlog.unsettled_count == 1
    assert found.waiting == {"celery": 1}
    assert found.isolation == ("SERIALIZABLE" if "sqlite" in database_url else "READ COMMITTED")


def test_a_busy_worker_is_told_from_an_idle_one(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(postgresql_url)
    worker = start_worker(WORKER_APP, env=site.worker_env(), queues="celery,other")

    idle = facts.worker_facts(site.app)

    assert idle.queues == {worker.nodename: {"celery", "other"}}
    assert idle.is_idle_on("celery")
    tag = site.tag()
    site.task("t.wait").delay(tag)
    site.book.wait(tag, "began 1")
    assert not facts.worker_facts(site.app).is_idle_on("celery")
    site.book.note(tag, "go 1")
