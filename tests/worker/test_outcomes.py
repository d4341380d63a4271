"""Whatever a body raises has one transition and one outcome in Celery, and the worker goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.support.waiting import eventually, never
from tests.worker.site import WORKER_APP, celery_version
from tests.worker.stealing import after_the_stale_one, steal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/guarantees.md."""

    kind: str
    job: str
    attempts: list[tuple[str, str | None]]
    celery: str | None
    link: int = 0
    errback: int = 0
    failure_class: str | None = None
    lost: int = 0
    options: dict[str, Any] | None = None
    pools: tuple[str, ...] = ("prefork", "threads", "solo")


DONE = ("completed", None)

TABLE = [
    Row("error", "failed", [("failed", "error")], "FAILURE", errback=1, failure_class="error"),
    Row("memory", "failed", [("failed", "memory")], "FAILURE", errback=1, failure_class="memory"),
    Row(
        "soft limit",
        "failed",
        [("failed", "time_limit")],
        "FAILURE",
        errback=1,
        failure_class="time_limit",
        options={"soft_time_limit": 1},
        pools=("prefork",),
    ),
    # Before 5.7 Celery itself writes nothing for it.
    Row(
        "reject",
        "failed",
        [("failed", "error")],
        "FAILURE" if celery_version >= (5, 7) else None,
        errback=int(celery_version >= (5, 7)),
        failure_class="error",
    ),
    Row("ignore", "succeeded", [("completed", "ignored")], None),
    Row("requeue", "succeeded", [("released", "rejected"), DONE], "SUCCESS", link=1),
    Row("hand-over", "succeeded", [("released", "hand-over"), DONE], "SUCCESS", link=1),
    Row("release", "succeeded", [("released", "hand-over"), DONE], "SUCCESS", link=1),
    Row(
        "exit",
        "succeeded",
        [("lost", "SystemExit: 3"), DONE],
        "SUCCESS",
        link=1,
        lost=1,
        pools=("prefork",),
    ),
    Row(
        "keyboard",
        "succeeded",
        # Nobody had asked the worker to stop.
        [("lost", "KeyboardInterrupt: "), DONE],
        "SUCCESS",
        link=1,
        lost=1,
        pools=("prefork",),
    ),
]


@pytest.fixture(scope="module")
def workers_of_pools(shared_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a worker of a pool on a queue named like the pool, started at the first use."""
    from contextlib import ExitStack

    from tests.support.workers import CeleryWorker

    started: dict[str, CeleryWorker] = {}
    with ExitStack() as stack:

        def get(pool: str) -> CeleryWorker:
            if pool not in started:
                worker = CeleryWorker(
                    "tests.worker.apps.leased",
                    name=f"of-{pool}",
                    pool=pool,
                    concurrency=2,
                    queues=pool,
                    env=shared_site.worker_env(),
                    folder=tmp_path_factory.mktemp(pool),
                )
                started[pool] = stack.enter_context(worker)
            return started[pool]

        yield get


@pytest.mark.parametrize(
    ("row", "pool"),
    [
        pytest.param(row, pool, id=f"{row.kind}-{pool}".replace(" ", "-"))
        for row in TABLE
        for pool in row.pools
    ],
)
def test_what_a_body_raises_has_one_transition(
    shared_site: Site,
    workers_of_pools: Callable[[str], CeleryWorker],
    row: Row,
    pool: str,
) -> None:
    site, worker, tag = shared_site, workers_of_pools(pool), shared_site.tag()
    work = site.task("o.act").s(tag, row.kind)
    work.link(site.task("t.mark").si(tag).set(queue=pool))
    work.link_error(site.task("t.errback").si(tag).set(queue=pool))

    result = work.apply_async(queue=pool, **(row.options or {}))

    job = site.until(result.id, row.job, settled=True, passes=row.kind == "requeue")
    assert site.ends(result.id) == row.attempts
    assert site.attempts(result.id)[0]["failure_class"] == row.failure_class
    assert job["lost_count"] == row.lost
    assert job["failure_count"] == (1 if row.job == "failed" else 0)
    eventually(lambda: site.status(result.id) == row.celery)
    eventually(lambda: site.facts(tag).count("mark 1") == row.link)
    eventually(lambda: site.facts(tag).count("errback") == row.errback)
    bodies = [fact for fact in site.facts(tag) if fact.startswith("token")]
    if row.kind != "soft limit":
        # That one may strike as the body begins.
        assert len(bodies) == len(row.attempts)
    assert worker.is_running
    assert site.task("t.add").apply_async((1, 2), queue=pool).get(timeout=15) == 3
    eventually(lambda: unacknowledged(site, result.id) == 0)
    assert site.facts(tag).count("errback") == row.errback


def unacknowledged(site: Site, job_id: str) -> int:
    """Return how many deliveries of a job a worker has not acknowledged."""
    with site.redis() as client:
        return sum(json.loads(raw)[0]["headers"]["id"] == job_id for raw in client.hvals("unacked"))


def test_a_handed_over_job_goes_on_from_its_checkpoint(site: Site) -> None:
    tag = site.tag()

    result = site.task("o.act").delay(tag, "hand-over")

    assert result.get(timeout=10) == "done"
    assert site.facts(tag) == ["token 1 from None", "token 2 from {'page': 7}"]
    assert site.attempts(result.id)[0]["checkpoint"] == '{"page":7}'


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        ("lost", None),
        ("swallows", "succeeded"),
        ("late", "succeeded"),
        ("late error", "failed"),
    ],
)
def test_a_stale_attempt_changes_nothing(site: Site, kind: str, late: str | None) -> None:
    tag = site.tag()
    link, link_error = site.task("t.mark").si(tag), site.task("t.errback").si(tag)
    result = site.task("o.act").apply_async((tag, kind), link=link, link_error=link_error)

    steal(site, result.id, tag)

    assert result.get(timeout=15) == "done"
    job = site.until(result.id, "succeeded", settled=True)
    if late is not None:
        after_the_stale_one(site, result.id)
    first, second = site.attempts(result.id)
    assert (first["state"], first["stop_reason"]) == ("lost", "stolen")
    assert first["late_outcome"] == late
    if late == "succeeded":
        assert json.loads(bytes(first["late_result"])) == "of the stale attempt"
    assert second["state"] == "completed"
    assert (job["accepted_attempt"], job["lost_count"], job["failure_count"]) == (2, 1, 0)
    assert site.result(result.id)["result"] == "done"
    eventually(lambda: "mark 1" in site.facts(tag))
    eventually(lambda: unacknowledged(site, result.id) == 0)
    assert site.facts(tag).count("mark 1") == 1
    assert "errback" not in site.facts(tag)


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_lost_lease_harms_no_other_pool(
    shared_site: Site,
    shared_worker: CeleryWorker,
    workers_of_pools: Callable[[str], CeleryWorker],
    pool: str,
) -> None:
    site, worker, tag = shared_site, workers_of_pools(pool), shared_site.tag()
    result = site.task("o.act").apply_async((tag, "lost"), queue=pool)
    eventually(lambda: "ready" in site.facts(tag))

    # The second attempt on the shared worker: a solo pool has one slot, and the first holds it.
    site.change("UPDATE {job} SET queue = 'celery' WHERE id = :id", id=result.id)
    tables = site.tables
    site.execute(
        tables.message.update()
        .where(tables.message.c.job_id == result.id)
        .values(routing_key="celery")
    )
    steal(site, result.id, tag)

    assert result.get(timeout=15) == "done"
    assert site.task("t.add").apply_async((1, 2), queue=pool).get(timeout=15) == 3
    assert site.states(result.id) == ["lost", "completed"]
    assert worker.is_running


def test_a_killed_child_costs_one_loss_and_no_failure(site: Site) -> None:
    tag = site.tag()
    link, link_error = site.task("t.mark").si(tag), site.task("t.errback").si(tag)

    result = site.task("o.act").apply_async((tag, "killed"), link=link, link_error=link_error)

    # Nobody reports it in this release: the lease runs out, and a pass gives the job on.
    site.until_attempts(result.id, 1)
    site.change(
        "UPDATE {attempt} SET lease_expires_at = claimed_at WHERE job_id = :id", id=result.id
    )
    job = site.until(result.id, "succeeded", settled=True, passes=True)
    assert site.states(result.id) in (["expired", "completed"], ["lost", "completed"])
    assert (job["lost_count"], job["failure_count"]) == (1, 0)
    assert site.status(result.id) == "SUCCESS"
    eventually(lambda: site.facts(tag).count("mark 1") == 1)
    never(lambda: "errback" in site.facts(tag), during=0.5)


def test_a_soft_limit_during_the_claim_strikes_the_body(
    site: Site, shared_worker: CeleryWorker
) -> None:
    # It would end as a FAILURE in Celery, with errbacks, of a job that is still queued.
    tag = site.tag()
    warm = site.task("t.add")
    for _ in range(8):
        warm.delay(1, 2).get(timeout=10)
    link_error = site.task("t.errback").si(tag)
    work = site.task("o.act").s(tag, "soft limit")
    table = site.tables.job

    with site.connection() as other:
        result = work.apply_async(soft_time_limit=0.2, link_error=link_error, countdown=0.5)
        other.execute(sa.select(table).where(table.c.id == result.id).with_for_update())
        shared_worker.wait_log(f"Soft time limit (0.2s) exceeded for o.act[{result.id}]")
        other.rollback()

    job = site.until(result.id, "failed", settled=True)
    assert site.ends(result.id) == [("failed", "time_limit")]
    assert site.status(result.id) == "FAILURE"
    eventually(lambda: site.facts(tag) == ["errback"])
    assert job["failure_count"] == 1


def test_a_soft_limit_strikes_the_body_after_a_replay(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    # Its claim and its bookkeeping both hold signals back: the child must have its own again.
    site = make_site(sqlite_url)
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    told = site.task("t.add").delay(1, 2)
    site.until(told.id, "succeeded", settled=True)
    site.unsettle(told.id)
    assert site.run_pass()["replayed"] == 1
    site.until(told.id, "succeeded", settled=True)

    result = site.task("o.act").apply_async((site.tag(), "soft limit"), soft_time_limit=0.5)

    site.until(result.id, "failed", settled=True)
    assert site.ends(result.id) == [("failed", "time_limit")]


def test_a_mistake_of_ours_gives_the_job_on(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    """Left in the heartbeat its lease would be renewed for ever; it is no outcome of the job."""
    site = make_site(sqlite_url, lease_lost_backoff=[0.0])
    tag = site.tag()
    worker = start_worker("tests.worker.apps.mistaken", pool="solo", env=site.worker_env())
    link_error = site.task("t.errback").si(tag)

    result = site.task("o.act").apply_async((tag, "error"), link_error=link_error)

    # At its second attempt its body succeeds.
    job = site.until(result.id, "succeeded", settled=True)
    assert site.ends(result.id) == [
        ("lost", "celery-lease failed: a mistake of ours"),
        ("completed", None),
    ]
    assert (job["lost_count"], job["failure_count"]) == (1, 0)
    assert site.status(result.id) == "SUCCESS"
    assert "errback" not in site.facts(tag)
    assert "lease.attempt.failed" in worker.log()
