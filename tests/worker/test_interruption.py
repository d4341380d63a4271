"""A body whose lease is lost, or whose job is cancelled, is broken off within a heartbeat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.extension import extension_of
from celery_lease.records import Held
from celery_lease.states import JobState, LossCause
from celery_lease.store import transitions
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

WORKER_APP = "tests.worker.apps.leased"

#: One heartbeat of a lease of 3 s with its jitter, and what a busy machine takes.
BOUND_SECONDS = 1.1 + 1.5
#: What can be broken off at once, by pool; in a thread only what comes back from C.
WAYS = {
    "prefork": ("loop", "sleep", "lock", "socket"),
    "solo": ("loop", "sleep"),
    "threads": ("loop", "naps"),
    "gevent": ("loop", "sleep", "lock", "socket"),
}


@pytest.fixture(params=["prefork", "threads", "solo", "gevent", "gevent-sqlite"])
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def place(
    request: pytest.FixtureRequest,
    pool: str,
    make_site: Callable[..., Site],
    start_worker: Callable[..., CeleryWorker],
) -> Iterator[Place]:
    """A site with one worker of that pool."""
    pool, _, store = pool.partition("-")
    url = request.getfixturevalue(f"{store or 'postgresql'}_url")
    site = make_site(url)
    worker = start_worker(WORKER_APP, pool=pool, concurrency=2, env=site.worker_env())
    yield Place(site, worker, pool)
    assert worker.is_running, worker.log()[-4000:]
    assert "Traceback" not in worker.log(), worker.log()


class Place:
    def __init__(self, site: Site, worker: CeleryWorker, pool: str) -> None:
        self.site = site
        self.worker = worker
        self.pool = pool

    def start(self, name: str, *args: Any) -> tuple[str, str]:
        """Send a job with a link, wait until its body runs; return its tag and its id."""
        tag = self.site.tag()
        link = self.site.task("t.mark").si(tag)
        job_id = self.site.task(name).apply_async((tag, *args), link=link).id
        eventually(lambda: "ready" in self.site.facts(tag), what=self.worker.log)
        return tag, job_id

    def take_away(self, job_id: str) -> None:
        """End the attempt behind its back, as a reaper does."""
        attempt = self.site.attempts(job_id)[0]
        extension = extension_of(self.site.app)
        vanished = transitions.lost(
            extension.store,
            Held(job_id, attempt["fencing_token"], attempt["owner"]),
            cause=LossCause.LOST,
            reason="stolen",
            lost_backoff=(0.0,),
        )
        assert vanished is not None
        extension.reaper().follow_up(vanished)

    def until_interrupted(self, tag: str) -> float:
        """Wait for it; return how long that took."""
        began = time.monotonic()
        eventually(lambda: "interrupted" in self.site.facts(tag), timeout=15, what=self.worker.log)
        return time.monotonic() - began

    def serves(self) -> None:
        """Assert that the worker takes the next jobs, in all its slots."""
        results = [self.site.task("t.add").delay(number, 1) for number in range(4)]
        assert [result.get(timeout=10) for result in results] == [1, 2, 3, 4]


def test_a_body_whose_lease_was_taken_away_stops_within_a_heartbeat(place: Place) -> None:
    took = []
    for way in WAYS[place.pool]:
        tag, job_id = place.start("b.works", way)

        place.take_away(job_id)

        took.append(place.until_interrupted(tag))
        job = place.site.until(job_id, "succeeded", settled=True)
        assert job["accepted_attempt"] == 2
        assert place.site.states(job_id) == ["lost", "completed"]
        # Nothing of the first attempt was told: one link, of the second.
        eventually(lambda: "mark 1" in place.site.facts(tag))  # noqa: B023 - called in this round
        assert sorted(place.site.facts(tag)) == ["interrupted", "mark 1", "ready"]
        assert place.site.app.AsyncResult(job_id).get(timeout=10) == "done"
    print(place.pool, [f"{seconds:.2f}" for seconds in took])
    assert max(took) < BOUND_SECONDS
    place.serves()


def test_a_body_whose_job_was_cancelled_stops_within_a_heartbeat(place: Place) -> None:
    tag, job_id = place.start("b.works", "naps")

    state = transitions.cancel(extension_of(place.site.app).store, job_id, reason="operator")

    assert state is JobState.CANCELLED
    assert place.until_interrupted(tag) < BOUND_SECONDS
    place.serves()
    assert place.site.states(job_id) == ["cancelled"]
    assert place.site.job(job_id)["state"] == "cancelled"
    assert place.site.facts(tag) == ["ready", "interrupted"]
    assert place.site.status(job_id) != "SUCCESS"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_without_leave_to_interrupt_a_body_runs_on_and_is_rejected(place: Place) -> None:
    tag, job_id = place.start("b.kept")

    place.take_away(job_id)

    eventually(lambda: place.site.attempts(job_id)[0]["rejected_at"] is not None)
    place.site.until(job_id, "succeeded", settled=True)
    first, second = place.site.attempts(job_id)
    assert (first["state"], first["late_outcome"]) == ("lost", "succeeded")
    assert second["state"] == "completed"
    eventually(lambda: "mark 1" in place.site.facts(tag))
    assert place.site.facts(tag).count("mark 1") == 1
    assert "went on" in place.site.facts(tag)
    assert place.site.app.AsyncResult(job_id).get(timeout=10) == "done"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_body_that_swallows_it_goes_on_and_is_rejected(place: Place) -> None:
    tag, job_id = place.start("b.swallows")

    place.take_away(job_id)

    eventually(lambda: place.site.attempts(job_id)[0]["rejected_at"] is not None)
    place.site.until(job_id, "succeeded", settled=True)
    assert place.site.attempts(job_id)[0]["late_outcome"] == "succeeded"
    own = [fact for fact in place.site.facts(tag) if not fact.startswith("mark")]
    assert own == ["ready", "swallowed", "went on"]
    assert place.site.app.AsyncResult(job_id).get(timeout=10) == "done"
    place.serves()


@pytest.mark.parametrize("pool", ["gevent", "gevent-sqlite", "gevent-mariadb"])
def test_a_greenlet_that_never_yields_does_not_starve_the_heartbeat(place: Place) -> None:
    # B096: a heartbeat that is a greenlet itself made no beat in all that time.
    site = place.site
    tag, job_id = place.start("b.computes")

    def renewed() -> bool:
        # Nobody gives the job on, although it has run for longer than a lease.
        assert site.run_pass().get("expired", 0) == 0
        attempt = site.attempts(job_id)[0]
        lived = (attempt["last_renewed_at"] - attempt["claimed_at"]).total_seconds()
        assert "computed" not in site.facts(tag)
        return bool(lived > 3)

    eventually(renewed, timeout=8, what=lambda: site.told(job_id))
    site.until(job_id, "succeeded", settled=True)
    assert site.states(job_id) == ["completed"]
