"""A body that makes no progress is found out, with its stack; a slow one is left alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

WORKER_APP = "tests.worker.apps.leased"

#: ``lease_stall_timeout`` of ``b.hangs``.
TIMEOUT_SECONDS = 1.5


@pytest.fixture(params=["prefork", "threads", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def site(
    pool: str,
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> Site:
    """A site with one worker of that pool; nobody makes passes."""
    made = make_site(postgresql_url)
    start_worker(WORKER_APP, pool=pool, concurrency=2, env=made.worker_env())
    return made


def test_a_hung_body_is_stalled_with_its_stack_and_another_attempt_succeeds(
    site: Site, pool: str
) -> None:
    tag = site.tag()
    result = site.task("b.hangs").delay(tag)
    eventually(lambda: "ready" in site.facts(tag))
    began = time.monotonic()

    eventually(lambda: site.states(result.id)[0] == "stalled")
    stalled_after = time.monotonic() - began
    assert result.get(timeout=5) == "done"
    done_after = time.monotonic() - began

    first, second = site.attempts(result.id)
    assert "in hangs_in_a_lock" in first["traceback"]
    assert first["stop_reason"].startswith("no progress for 1.")
    assert second["state"] == "completed"
    job = site.until(result.id, "succeeded", settled=True)
    assert (job["lost_count"], job["accepted_attempt"]) == (1, 2)
    eventually(lambda: "interrupted" in site.facts(tag))
    print(f"{pool}: stalled after {stalled_after:.2f} s, done after {done_after:.2f} s")
    assert stalled_after < TIMEOUT_SECONDS + 1
    # The message was sent at once, by the process of the hung body.
    assert done_after < stalled_after + 1.5
    # No renewal came after it had been given up.
    assert first["last_renewed_at"] <= first["ended_at"]


def test_a_stall_counts_as_a_loss_and_the_last_one_ends_the_job(site: Site, pool: str) -> None:
    tag = site.tag()
    result = site.task("b.hangs_always").delay(tag)

    job = site.until(result.id, "interrupted", settled=True)

    assert site.states(result.id) == ["stalled"]
    assert job["lost_count"] == 1
    with pytest.raises(Exception, match="vanished"):
        result.get(timeout=5)


@pytest.mark.parametrize("how", ["progress", "checkpoint"])
def test_a_slow_body_that_gets_on_is_left_alone(site: Site, how: str) -> None:
    tag = site.tag()

    result = site.task("b.slow").delay(tag, how)

    assert result.get(timeout=20) == "slow and done"
    assert site.states(result.id) == ["completed"]


def test_the_worker_serves_the_next_job(site: Site) -> None:
    tags: list[Any] = [site.tag() for _ in range(2)]

    hung = [site.task("b.hangs").delay(tag) for tag in tags]

    assert [result.get(timeout=15) for result in hung] == ["done", "done"]
    results = [site.task("t.add").delay(number, 1) for number in range(4)]
    assert [result.get(timeout=10) for result in results] == [1, 2, 3, 4]


@pytest.mark.parametrize("pool", ["prefork"])
def test_a_worker_that_was_frozen_has_not_stalled(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
    pool: str,
) -> None:
    site = make_site(postgresql_url)
    worker = start_worker(WORKER_APP, pool=pool, env=site.worker_env())
    result = site.task("b.slow").delay(site.tag(), "progress")
    eventually(lambda: site.attempts(result.id))
    frozen_at = time.monotonic()

    worker.freeze()
    eventually(lambda: time.monotonic() - frozen_at > 2.2)
    worker.thaw()

    assert result.get(timeout=20) == "slow and done"
    assert site.states(result.id) == ["completed"]
