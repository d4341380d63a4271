from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from tests.support import processes
from tests.support.waiting import eventually
from tests.support.workers import WorkerEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.workers import Beat, CeleryWorker

APP = "tests.support.plain_app"


@pytest.fixture
def env(redis_url: str) -> dict[str, str]:
    """Where the workers find broker and backend."""
    return {"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url}


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    """An app that sends to the same broker, by name."""
    with Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        yield app


def call(client: Celery, name: str, *args: object) -> object:
    return client.send_task(f"{APP}.{name}", args).get(timeout=20)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_worker_runs_a_task_and_stops(
    pool: str,
    start_worker: Callable[..., CeleryWorker],
    env: dict[str, str],
    client: Celery,
) -> None:
    worker = start_worker(APP, pool=pool, env=env)

    assert call(client, "add", 2, 3) == 5
    assert worker.stop() == 0
    assert not worker.is_running


def test_a_killed_worker_takes_its_children_with_it(
    start_worker: Callable[..., CeleryWorker], env: dict[str, str], client: Celery
) -> None:
    worker = start_worker(APP, env=env, concurrency=2)
    children = worker.children()
    assert call(client, "whoami") in children

    worker.kill_group()

    assert worker.exit_code == -signal.SIGKILL
    assert not any(processes.is_alive(one) for one in children)


def test_a_frozen_worker_goes_on_when_thawed(
    start_worker: Callable[..., CeleryWorker], env: dict[str, str], client: Celery
) -> None:
    worker = start_worker(APP, env=env)
    worker.freeze()

    result = client.send_task(f"{APP}.add", (1, 1))

    assert all(processes.is_frozen(one) for one in processes.tree(worker.pid))
    assert not result.ready()

    worker.thaw()

    assert result.get(timeout=20) == 2


def test_a_worker_that_cannot_start_is_reported_with_its_log(
    start_worker: Callable[..., CeleryWorker], env: dict[str, str]
) -> None:
    with pytest.raises(WorkerEnded, match="no_such_module"):
        start_worker("tests.no_such_module", env=env)


def test_beat_starts_and_stops(start_beat: Callable[..., Beat], env: dict[str, str]) -> None:
    beat = start_beat(APP, env=env)

    assert beat.is_running
    beat.stop()
    eventually(lambda: not beat.is_running)
