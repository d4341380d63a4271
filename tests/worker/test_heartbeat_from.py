"""``lease_heartbeat_from = "worker"``: the main process renews, and its children when it does not.

What becomes of children that hang, compute or die meanwhile is in
``tests/faults/test_k12_heartbeat.py``.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from celery_lease.extension import extension_of
from celery_lease.states import JobState
from celery_lease.store import transitions
from tests.support.waiting import eventually
from tests.worker.site import WORKER_APP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

#: Of ``b.works``; a renewal comes each third of it.
LEASE_SECONDS = 3.0
#: Renewals of one statement are that close; four children of their own accord are not, ±10 %.
ONE_STATEMENT_SECONDS = 0.05


@pytest.fixture
def site(make_site: Callable[..., Site], postgresql_url: str) -> Site:
    return make_site(postgresql_url, lease_heartbeat_from="worker")


def begin(site: Site, number: int) -> list[str]:
    """Send jobs that run until they are interrupted, wait for their bodies, return their ids."""
    tags = [site.tag() for _ in range(number)]
    ids = [site.task("b.works").delay(tag, "naps").id for tag in tags]
    eventually(lambda: all("ready" in site.facts(tag) for tag in tags), timeout=20)
    return ids


def end(site: Site, ids: list[str]) -> None:
    """Cancel them; each must still be running under its first claim."""
    for one in ids:
        assert site.states(one) == ["active"]
        cancelled = transitions.cancel(extension_of(site.app).store, one, reason="test")
        assert cancelled is JobState.CANCELLED


def renewals(site: Site) -> list[tuple[Any, int]]:
    """Return when each attempt was renewed last, and how often; of one instant."""
    attempt = site.tables.attempt
    rows = site.select(sa.select(attempt.c.last_renewed_at, attempt.c.renewal_count))
    return [(row["last_renewed_at"], row["renewal_count"]) for row in rows]


def next_beat(site: Site) -> float:
    """Wait until all have been renewed once more; return how far apart those renewals were."""
    before = max(at for at, _ in renewals(site))

    def renewed() -> list[Any] | None:
        instants = [at for at, _ in renewals(site)]
        return instants if min(instants) > before else None

    instants = eventually(renewed, timeout=2 * LEASE_SECONDS)
    assert instants is not None
    return float((max(instants) - min(instants)).total_seconds())


def test_one_statement_renews_for_all_children(
    site: Site, start_worker: Callable[..., CeleryWorker]
) -> None:
    start_worker(WORKER_APP, concurrency=4, env=site.worker_env())
    ids = begin(site, 4)
    # The main process has heard of all, and each child has written that it was acknowledged.
    eventually(lambda: min(count for _, count in renewals(site)) >= 3, timeout=20)

    apart = [next_beat(site) for _ in range(3)]

    assert max(apart) < ONE_STATEMENT_SECONDS
    end(site, ids)


def test_children_whose_main_process_is_frozen_renew_by_themselves(
    site: Site, start_worker: Callable[..., CeleryWorker]
) -> None:
    worker = start_worker(WORKER_APP, concurrency=4, env=site.worker_env())
    ids = begin(site, 4)
    eventually(lambda: min(count for _, count in renewals(site)) >= 3, timeout=20)

    worker.send(signal.SIGSTOP)
    frozen = min(count for _, count in renewals(site))
    eventually(
        lambda: min(count for _, count in renewals(site)) >= frozen + 6, timeout=4 * LEASE_SECONDS
    )
    assert site.run_pass().get("expired", 0) == 0
    worker.send(signal.SIGCONT)

    # The main process takes it up again.
    eventually(lambda: next_beat(site) < ONE_STATEMENT_SECONDS, timeout=4 * LEASE_SECONDS)
    end(site, ids)


def test_a_cancelled_job_is_heard_of_through_the_main_process(
    site: Site, start_worker: Callable[..., CeleryWorker]
) -> None:
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    tag = site.tag()
    result = site.task("b.works").delay(tag, "naps")
    eventually(lambda: "ready" in site.facts(tag))
    eventually(lambda: min(count for _, count in renewals(site)) >= 3, timeout=20)

    transitions.cancel(extension_of(site.app).store, result.id, reason="test")

    # One renewal of the main process, one of the child, and what a busy machine takes.
    eventually(lambda: "interrupted" in site.facts(tag), timeout=2 * LEASE_SECONDS / 3 + 1.5)
    assert site.states(result.id) == ["cancelled"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_pool_without_children_renews_as_ever(
    pool: str, site: Site, start_worker: Callable[..., CeleryWorker]
) -> None:
    start_worker(WORKER_APP, pool=pool, concurrency=1, env=site.worker_env())
    ids = begin(site, 1)

    eventually(lambda: min(count for _, count in renewals(site)) >= 4, timeout=3 * LEASE_SECONDS)

    end(site, ids)
