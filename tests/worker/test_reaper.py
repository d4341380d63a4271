"""The reaper as Celery runs it: from beat, from cron, and by a worker itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_lease import LeasedTask
from celery_lease.extension import extension_of, run_pass
from celery_lease.store import queries
from tests.support.waiting import eventually, never

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.workers import Beat, CeleryWorker
    from tests.worker.site import Site

WORKER_APP = "tests.worker.apps.leased"
REAP = "celery_lease.reap"


def nothing() -> None:
    """Do nothing."""


def lost(site: Site, tag: str) -> Any:
    """Publish a job whose message never reached the broker."""
    result = site.task("t.mark").delay(tag)
    site.drop("celery")
    site.change("UPDATE {job} SET dispatched_at = NULL WHERE id = :id", id=result.id)
    return result


def last_pass(site: Site) -> Any:
    return queries.last_pass(extension_of(site.app).store)


# --- its place in the schedule ------------------------------------------------------------------


def leased_app(name: str, tmp_path: Path) -> Celery:
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.lease_store_url = f"sqlite:///{tmp_path / name}.db"
    app.task(nothing, name=f"{name}.task", base=LeasedTask, shared=False)
    return app


def test_it_is_beside_the_users_own_entries(tmp_path: Path) -> None:
    app = leased_app("one", tmp_path)
    app.conf.beat_schedule = {"mine": {"task": "one.task", "schedule": 10.0}}
    app.conf.lease_reaper_interval = 3

    app.finalize()

    schedule = app.conf.beat_schedule
    assert set(schedule) == {"mine", REAP}
    assert schedule["mine"] == {"task": "one.task", "schedule": 10.0}
    assert schedule[REAP]["task"] == REAP
    assert schedule[REAP]["schedule"] == 3
    assert schedule[REAP]["options"] == {"expires": 3}


def test_it_has_a_queue_if_one_is_set(tmp_path: Path) -> None:
    app = leased_app("one", tmp_path)
    app.conf.lease_reaper_queue = "maintenance"

    app.finalize()

    assert app.conf.beat_schedule[REAP]["options"] == {"expires": 5.0, "queue": "maintenance"}


def test_each_app_of_a_process_has_a_reaper_of_its_own(tmp_path: Path) -> None:
    apps = [leased_app(name, tmp_path) for name in ("one", "two")]
    for app in apps:
        app.finalize()
    plain = Celery("plain", set_as_current=False)
    plain.finalize()

    for app in apps:
        app.tasks[REAP]()
        last = queries.last_pass(extension_of(app).store)
        extension_of(app).raw_store.close()
        assert last is not None, app.main

    assert REAP not in plain.tasks


def test_beat_has_it_even_if_the_schedule_was_assigned_late(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_beat: Callable[..., Beat],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url, lease_reaper_interval=1)
    tag = site.tag()
    result = lost(site, tag)

    start_beat("tests.worker.apps.late_schedule", env=site.worker_env())
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    assert result.get(timeout=20) == "marked"
    site.until(result.id, "succeeded", settled=True)
    assert site.job(result.id)["dispatch_count"] == 2
    # The user's entry runs, too.
    eventually(lambda: [job for job in site.jobs() if job["task"] == "t.add"])


# --- who runs it --------------------------------------------------------------------------------


def test_it_may_be_run_from_cron(make_site: Callable[..., Site], sqlite_url: str) -> None:
    site = make_site(sqlite_url)
    result = lost(site, site.tag())

    done = run_pass(site.app)

    assert done.counts == {"dispatched": 1}
    assert [message["headers"]["id"] for message in site.queued("celery")] == [result.id]
    assert last_pass(site).counts == {"dispatched": 1}
    assert run_pass(site.app).counts == {}


def test_many_at_once_send_each_message_once(
    make_site: Callable[..., Site], postgresql_url: str
) -> None:
    site = make_site(postgresql_url)
    ids = [site.task("t.add").delay(n, n).id for n in range(40)]
    site.drop("celery")
    site.change("UPDATE {job} SET dispatched_at = NULL")
    start = threading.Barrier(4)
    counts: list[int] = []

    def one() -> None:
        start.wait()
        counts.append(run_pass(site.app).counts.get("dispatched", 0))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(counts) == 4
    assert sum(counts) == 40
    assert sorted(m["headers"]["id"] for m in site.queued("celery")) == sorted(ids)


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_worker_runs_it_itself_when_there_is_no_beat(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
    pool: str,
) -> None:
    site = make_site(sqlite_url, lease_reaper_in_worker=True, lease_reaper_interval=0.5)
    tag = site.tag()
    result = lost(site, tag)

    start_worker(WORKER_APP, name="alone", pool=pool, env=site.worker_env())

    assert result.get(timeout=15) == "marked"
    assert site.facts(tag) == ["mark 1"]
    # The pass is recorded at its end, the job may be done before.
    assert eventually(lambda: last_pass(site)).worker == "alone@test"


def test_a_busy_pool_does_not_keep_a_worker_from_it(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url, lease_reaper_in_worker=True, lease_reaper_interval=0.5)
    tag = site.tag()
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    busy = site.task("t.wait").delay(tag)
    eventually(lambda: "began 1" in site.facts(tag))

    result = site.task("t.add").apply_async((1, 2), queue="nobody")
    site.drop("nobody")
    site.change("UPDATE {job} SET dispatched_at = NULL WHERE id = :id", id=result.id)

    eventually(lambda: site.queued("nobody"))
    site.book.note(tag, "go 1")
    assert busy.get(timeout=10) == "by 1"


def test_a_worker_leaves_it_to_others_if_told_so(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url, lease_reaper_in_worker=False, lease_reaper_interval=0.2)
    result = lost(site, site.tag())

    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    never(lambda: last_pass(site), during=1.0)
    assert site.job(result.id)["state"] == "queued"


def test_a_worker_leaves_it_to_beat_while_beat_runs(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
    start_beat: Callable[..., Beat],
) -> None:
    site = make_site(sqlite_url, lease_reaper_in_worker=True, lease_reaper_interval=1)
    start_beat(WORKER_APP, env=site.worker_env())
    worker = start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    worker.wait_log(f"Task {REAP}[", timeout=15)

    first = eventually(lambda: last_pass(site))
    eventually(lambda: last_pass(site).finished_at != first.finished_at, timeout=15)
    assert [job["task"] for job in site.jobs()] == []
