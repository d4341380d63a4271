"""A process that is forked at any time, beside threads that use the store (B047, B054)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site


# Celery notices about every second child's end only after 5 s (celery-facts, section 4): two
# generations are enough for every run of the tests.
@pytest.mark.parametrize(
    "number", [20, pytest.param(100, marks=(pytest.mark.long, pytest.mark.timeout(300)))]
)
def test_children_that_run_one_job_each_lose_none(
    number: int,
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(postgresql_url, lease_reaper_in_worker=True, lease_reaper_interval=0.2)
    worker = start_worker(
        "tests.worker.apps.leased",
        concurrency=10,
        arguments=("--max-tasks-per-child", "1", "--prefetch-multiplier", "1"),
        env=site.worker_env(),
    )

    results = [site.task("t.pid").delay() for _ in range(number)]

    pids = [result.get(timeout=200) for result in results]
    assert len(set(pids)) == number
    eventually(lambda: all(job["settled_at"] for job in site.jobs()), timeout=20)
    jobs = site.jobs()
    assert [job["state"] for job in jobs] == ["succeeded"] * number
    assert [job["lost_count"] for job in jobs] == [0] * number
    assert [job["fencing_token"] for job in jobs] == [1] * number
    assert {job["dispatch_count"] for job in jobs} == {1}
    assert worker.stop() == 0
