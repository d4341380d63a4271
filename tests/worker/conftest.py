"""pytest-celery's clusters, made of processes on this machine: no Docker is needed.

Tests ask for ``celery_setup`` as everywhere. What the workers run is said by two fixtures that a
module or a folder overrides: ``worker_app`` and ``worker_options``.

With ``CELERY_LEASE_TEST_DOCKER=1`` and a Docker daemon in reach, broker and backend are
pytest-celery's own containers; the workers stay processes, since they test this checkout.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryWorkerCluster

from tests.conftest import _numbers, must_have
from tests.support.databases import new_database
from tests.support.nodes import LocalBackend, LocalBroker, LocalWorker
from tests.support.servers import External, Valkey
from tests.support.workers import CeleryWorker
from tests.worker.site import WORKER_APP, Site, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# --- a site with one worker, shared by all tests of this test process --------------------------


@pytest.fixture(scope="session")
def shared_store_url(postgresql: Any) -> Iterator[str]:
    """A PostgreSQL database for the shared site."""
    with new_database(postgresql.url) as url:
        yield url


@pytest.fixture(scope="session")
def shared_site(valkey: Any, shared_store_url: str) -> Iterator[Site]:
    """The site that the shared worker serves; nobody but a test makes passes there."""
    url = valkey.url if isinstance(valkey, External) else valkey.url_for(next(_numbers))
    with open_site(url, shared_store_url) as site:
        yield site


@pytest.fixture(scope="session")
def shared_worker(
    shared_site: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CeleryWorker]:
    """A prefork worker with four children."""
    with CeleryWorker(
        WORKER_APP,
        name="shared",
        concurrency=4,
        queues="celery,other",
        env=shared_site.worker_env(),
        folder=tmp_path_factory.mktemp("shared"),
        arguments=("--prefetch-multiplier", "1"),
    ) as worker:
        yield worker


@pytest.fixture
def site(shared_site: Site, shared_worker: CeleryWorker) -> Site:
    """The shared site, with the shared worker at work."""
    assert shared_worker.is_running, shared_worker.log()[-4000:]
    return shared_site


@pytest.fixture
def make_site(redis_url: str) -> Iterator[Callable[..., Site]]:
    """Make a site of the test's own: ``make_site(store_url, **conf)``."""
    with ExitStack() as stack:

        def make(store_url: str, **options: Any) -> Site:
            return stack.enter_context(open_site(redis_url, store_url, **options))

        yield make


@pytest.fixture(scope="module")
def sites(
    request: pytest.FixtureRequest, valkey: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Site]]:
    """Sites of a module, one for each kind of database, each made at its first use."""
    made: dict[str, Site] = {}
    with ExitStack() as stack:

        def site(kind: str) -> Site:
            if kind not in made:
                if kind == "sqlite":
                    store_url = f"sqlite:///{tmp_path_factory.mktemp('site') / 'lease.db'}"
                else:
                    server = request.getfixturevalue(kind)
                    store_url = stack.enter_context(new_database(server.url))
                url = valkey.url
                if not isinstance(valkey, External):
                    url = valkey.url_for(next(_numbers) % valkey.databases)
                made[kind] = stack.enter_context(open_site(url, store_url))
            return made[kind]

        yield site


# --- pytest-celery's clusters ------------------------------------------------------------------


@pytest.fixture
def worker_app() -> str:
    """The module of the app that the workers run."""
    return "tests.support.plain_app"


@pytest.fixture
def worker_options() -> list[dict[str, Any]]:
    """One entry a worker: the keyword arguments of its ``CeleryWorker``."""
    return [{"name": "worker1", "concurrency": 2}]


@pytest.fixture
def celery_broker_cluster(request: pytest.FixtureRequest) -> Iterator[CeleryBrokerCluster]:
    """A Valkey of the test's own: it may be killed and restarted."""
    node = (
        request.getfixturevalue("celery_redis_broker")
        if _docker_wanted()
        else LocalBroker(_own_valkey())
    )
    cluster = CeleryBrokerCluster(node)
    yield cluster
    cluster.teardown()
    node.teardown()


@pytest.fixture
def celery_backend_cluster(request: pytest.FixtureRequest) -> Iterator[CeleryBackendCluster]:
    """Another one for the results."""
    node = (
        request.getfixturevalue("celery_redis_backend")
        if _docker_wanted()
        else LocalBackend(_own_valkey())
    )
    cluster = CeleryBackendCluster(node)
    yield cluster
    cluster.teardown()
    node.teardown()


@pytest.fixture
def celery_worker_cluster(
    worker_app: str,
    worker_options: list[dict[str, Any]],
    celery_worker_cluster_config: dict[str, Any],
    tmp_path: Path,
) -> Iterator[CeleryWorkerCluster]:
    """The workers of ``worker_options``, started and ready."""
    env = _urls(celery_worker_cluster_config)
    nodes = []
    try:
        for options in worker_options:
            merged = {**options, "env": {**env, **options.get("env", {})}, "folder": tmp_path}
            nodes.append(LocalWorker(CeleryWorker(worker_app, **merged).start()))
        cluster = CeleryWorkerCluster(*nodes)
        cluster.ready()
        yield cluster
        cluster.teardown()
    finally:
        for node in nodes:
            node.teardown()


def _own_valkey() -> Valkey:
    must_have(Valkey)
    return Valkey(durable=True).start()


def _urls(config: dict[str, Any]) -> dict[str, str]:
    """Return Celery's own variables for the two clusters, as seen from this machine."""
    return {
        "CELERY_BROKER_URL": ";".join(config["celery_broker_cluster_config"]["host_urls"]),
        "CELERY_RESULT_BACKEND": ";".join(config["celery_backend_cluster_config"]["host_urls"]),
    }


def _docker_wanted() -> bool:
    if not os.environ.get("CELERY_LEASE_TEST_DOCKER"):
        return False
    import docker  # type: ignore[import-untyped,unused-ignore]

    try:
        client = docker.from_env(timeout=2)
        client.ping()
    except docker.errors.DockerException:
        return False
    client.close()
    return True
