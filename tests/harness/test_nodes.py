"""pytest-celery's interface on local processes; its fixtures come from the tests of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.worker.conftest import *  # noqa: F403  # the clusters, as tests/worker has them

if TYPE_CHECKING:
    from typing import Any

    from pytest_celery import CeleryTestSetup

APP = "tests.support.plain_app"


def call(setup: CeleryTestSetup, name: str, *args: object) -> Any:
    return setup.app.send_task(f"{APP}.{name}", args).get(timeout=20)


def test_a_setup_is_ready_and_runs_a_task(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(control=True, docker=True)

    assert call(celery_setup, "add", 20, 22) == 42


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_was_ended_comes_back(celery_setup: CeleryTestSetup, signal: str) -> None:
    worker = celery_setup.worker
    before = call(celery_setup, "whoami")

    worker.kill(signal)
    assert worker.container.status == "exited"
    worker.restart()

    worker.wait_for_log("ready.")
    assert call(celery_setup, "whoami") != before


def test_work_goes_on_after_the_broker_was_killed(celery_setup: CeleryTestSetup) -> None:
    assert call(celery_setup, "add", 1, 1) == 2

    celery_setup.broker.kill()
    celery_setup.broker.restart()

    assert call(celery_setup, "add", 1, 2) == 3
