"""pytest-celery's clusters, made of processes on this machine: no Docker is needed.

Tests ask for ``celery_setup`` as everywhere. What the workers run is said by two fixtures that a
module or a folder overrides: ``worker_app`` and ``worker_options``.

With ``CELERY_LEASE_TEST_DOCKER=1`` and a Docker daemon in reach, broker and backend are
pytest-celery's own containers; the workers stay processes, since they test this checkout.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryWorkerCluster

from tests.conftest import must_have
from tests.support.nodes import LocalBackend, LocalBroker, LocalWorker
from tests.support.servers import Valkey
from tests.support.workers import CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
