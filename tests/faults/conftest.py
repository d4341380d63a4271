"""Fixtures of the faults: a stage, and pytest-celery's clusters with leased workers in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import CeleryTestSetup

from tests.conftest import _numbers
from tests.faults.brokers import BROKERS, Broker, RabbitBroker, RedisBroker
from tests.faults.stage import APP, SETTINGS, Stage
from tests.support.servers import External
from tests.support.workers import Beat, CeleryWorker
from tests.worker.conftest import *  # noqa: F403  # pytest-celery's clusters, as tests/worker has them

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Celery's result backend warn where a pass of ours, in this process, stores a failure."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Call to deprecated setex"))


@pytest.fixture
def make_stage(
    redis_url: str,
    fresh_database: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
    start_beat: Callable[..., Beat],
    tmp_path: Path,
) -> Iterator[Callable[..., Stage]]:
    """Make a stage: ``make_stage("postgresql", lease_max_attempts=2)``."""
    with ExitStack() as stack:

        def make(
            database: str = "postgresql",
            *,
            broker: Broker | None = None,
            store_url: str = "",
            worker_settings: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Stage:
            stage = Stage(
                broker=broker or RedisBroker(redis_url),
                backend_url=redis_url,
                store_url=store_url or fresh_database(database),
                settings=settings,
                worker_settings=worker_settings,
                folder=tmp_path,
                start_worker=start_worker,
                start_beat=start_beat,
            )
            stack.callback(stage.close)
            return stage

        yield make


@pytest.fixture
def enter() -> Iterator[Callable[[AbstractContextManager[Any]], Any]]:
    """Enter a context that ends with the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    """A broker that no other test uses, once for each kind."""
    if request.param == "redis":
        server = request.getfixturevalue("valkey")
        if isinstance(server, External):
            return RedisBroker(server.url)
        # Not the result backend's database.
        return RedisBroker(server.url_for(next(_numbers) % server.databases))
    url = request.getfixturevalue("amqp_url")
    return RabbitBroker(url, request.getfixturevalue("rabbitmq"))


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Make an owner folder: each worker with one of its own is on a host of its own."""

    def make() -> str:
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        return str(folder)

    return make


# --- pytest-celery --------------------------------------------------------------------------------


@pytest.fixture
def worker_app() -> str:
    """The module of the app that the workers run."""
    return APP


@pytest.fixture
def worker_options(postgresql_url: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Two workers on one store; broker and backend come from pytest-celery's clusters."""
    conf = {**SETTINGS, "lease_store_url": postgresql_url}
    env = {"FAULTS_CONF": json.dumps(conf), "FAULTS_FOLDER": str(tmp_path)}
    return [{"name": f"worker{n}", "concurrency": 4, "env": env} for n in (1, 2)]


@pytest.fixture
def cluster_stage(
    celery_setup: CeleryTestSetup,
    worker_options: list[dict[str, Any]],
    start_worker: Callable[..., CeleryWorker],
    start_beat: Callable[..., Beat],
    tmp_path: Path,
) -> Iterator[Stage]:
    """The stage of ``celery_setup``'s own servers and workers."""
    conf = json.loads(worker_options[0]["env"]["FAULTS_CONF"])
    stage = Stage(
        broker=RedisBroker(celery_setup.broker.config()["host_url"]),
        backend_url=celery_setup.backend.config()["host_url"],
        store_url=conf["lease_store_url"],
        settings=conf,
        folder=tmp_path,
        start_worker=start_worker,
        start_beat=start_beat,
    )
    yield stage
    stage.close()
