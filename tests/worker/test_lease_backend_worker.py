"""``result_backend = "lease://"`` with real workers: canvas, losses, and kills along the way."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_lease.exceptions import StoreUnavailable
from celery_lease.extension import store_of
from celery_lease.store import transitions
from tests.conftest import _numbers
from tests.support.databases import new_database
from tests.support.servers import External
from tests.support.waiting import eventually, never
from tests.support.workers import CeleryWorker
from tests.worker.site import WORKER_APP, Site, open_site
from tests.worker.stealing import after_the_stale_one, steal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery.result import AsyncResult


@pytest.fixture(scope="module")
def site(valkey: Any, postgresql: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose results are in its store, with a worker of three children."""
    redis_url = valkey.url if isinstance(valkey, External) else valkey.url_for(next(_numbers))
    with (
        new_database(postgresql.url) as store_url,
        open_site(redis_url, store_url, backend="lease://") as made,
        CeleryWorker(
            WORKER_APP,
            name="results",
            concurrency=3,
            env=made.worker_env(),
            folder=tmp_path_factory.mktemp("results"),
            arguments=("--prefetch-multiplier", "1"),
        ),
    ):
        yield made


def result_rows(site: Site, task_id: str) -> list[dict[str, Any]]:
    table = site.tables.result
    return site.select(table.select().where(table.c.task_id == task_id))


def chord_rows(site: Site) -> list[dict[str, Any]]:
    return site.select(site.tables.chord.select())


# --- one task -----------------------------------------------------------------------------------


def test_a_leased_result_is_there_with_its_job_and_nothing_else_is_written(site: Site) -> None:
    result = site.task("t.add").delay(1, 2)

    assert result.get(timeout=10) == 3
    job = site.job(result.id)
    # One transaction: there is no moment between the two, and nothing to settle later.
    assert job["settled_at"] == job["finished_at"]
    assert result_rows(site, result.id) == []


def test_an_unleased_result_is_there_too(site: Site) -> None:
    result = site.task("plain.mark").delay(site.tag())

    assert result.get(timeout=10) == "plain"
    assert site.job_or_none(result.id) is None
    assert [row["status"] for row in result_rows(site, result.id)] == ["SUCCESS"]


def test_a_failure_is_told_with_its_traceback_and_its_errback(site: Site) -> None:
    tag = site.tag()
    plain = site.task("o.act").apply_async((tag, "error"))
    followed = site.task("o.act").apply_async(
        (tag, "error"), link_error=site.task("t.errback").si(tag)
    )

    for result in (plain, followed):
        with pytest.raises(ValueError, match="wrong"):
            result.get(timeout=10)
        assert "ValueError: wrong" in result.traceback
    eventually(lambda: "errback" in site.facts(tag))
    assert site.job(plain.id)["settled_at"] == site.job(plain.id)["finished_at"]
    site.until(followed.id, "failed", settled=True)


def test_a_retry_is_seen_and_then_its_result(site: Site) -> None:
    result = site.task("r.retry").delay(site.tag(), 1, 0.5)

    eventually(lambda: result.state == "RETRY", interval=0.005)
    assert repr(site.app.AsyncResult(result.id).result) == "ValueError('again')"
    result.get(timeout=10)
    assert result.state == "SUCCESS"


def test_a_running_job_is_started_and_a_revoked_one_stays_revoked(site: Site) -> None:
    hold = site.tag()
    running = site.task("t.wait").delay(hold)
    eventually(lambda: "began 1" in site.facts(hold))
    assert running.state == "STARTED"
    assert running.info["hostname"].startswith("results@")

    running.revoke(terminate=True)

    with pytest.raises(TaskRevokedError):
        running.get(timeout=10)
    assert site.until(running.id, "cancelled", settled=True)["state_reason"] == "revoked"


@pytest.mark.parametrize("by", ["leased", "unleased", "chain", "group", "chord"])
def test_a_replaced_job_has_the_result_of_what_replaced_it(site: Site, by: str) -> None:
    result = site.task("p.replace").delay(site.tag(), by)

    expected = {"unleased": "plain", "group": [2, 4], "chord": 6}.get(by, "marked")
    assert result.get(timeout=15) == expected


def test_a_stale_result_is_not_the_job_s(site: Site) -> None:
    tag = site.tag()
    result = site.task("o.act").delay(tag, "late")

    steal(site, result.id, tag)

    assert result.get(timeout=15) == "done"
    stale, _ = after_the_stale_one(site, result.id)
    assert stale["late_outcome"] == "succeeded"
    assert site.app.AsyncResult(result.id).result == "done"


# --- canvas -------------------------------------------------------------------------------------


def test_a_chain_of_both_kinds_goes_to_its_end(site: Site) -> None:
    tag = site.tag()
    result = chain(
        site.task("t.add").s(1, 1), site.task("t.add").s(2), site.task("plain.mark").si(tag)
    ).delay()

    assert result.get(timeout=10) == "plain"
    assert result.parent.get(timeout=10) == 4
    first = site.app.AsyncResult(result.parent.parent.id)
    assert [child.id for child in first.children] == [result.parent.id]
    # Something followed: it was settled when Celery had published that.
    site.until(first.id, "succeeded", settled=True)


def test_a_link_runs_with_the_result(site: Site) -> None:
    result = site.task("t.add").apply_async((1, 2), link=site.task("t.add").s(10))

    assert result.get(timeout=10) == 3
    child = eventually(lambda: site.app.AsyncResult(result.id).children)[0]
    assert child.get(timeout=10) == 13


def test_a_group_is_saved_and_restored(site: Site) -> None:
    result = group(site.task("t.add").s(n, n) for n in range(5)).delay()
    result.save()

    found = site.app.GroupResult.restore(result.id)

    assert found.get(timeout=15) == [0, 2, 4, 6, 8]
    assert found.successful()


def test_a_chord_of_both_kinds_fires_once_with_all_results(site: Site) -> None:
    tag = site.tag()
    add = site.task("t.add")
    header = [add.s(1, 1), site.task("plain.mark").si(tag), add.s(2, 2)]
    body = site.task("t.ids").s()

    result = chord(header, body).delay()

    assert result.get(timeout=15)[0] == result.id
    assert result.parent.get(timeout=10) == [2, "plain", 4]
    assert site.states(result.id) == ["completed"]


def test_chords_nest_and_follow_each_other(site: Site) -> None:
    add, total = site.task("t.add"), site.task("t.total")
    inner = chord([add.s(1, 1), add.s(2, 2)], total.s())

    nested = chord([inner, add.s(10, 10)], total.s()).delay()
    upgraded = chain(group(add.s(1, 1), add.s(2, 2)), total.s(), add.s(100)).delay()

    assert nested.get(timeout=20) == 26
    assert upgraded.get(timeout=20) == 106


def test_a_chord_that_grows_waits_for_what_was_added(site: Site) -> None:
    result = chord([site.task("p.grow").s(), site.task("t.add").s(1, 1)], site.task("t.total").s())

    assert result.delay().get(timeout=15) == 44


def test_a_chord_whose_member_fails_takes_its_error_path_once(site: Site) -> None:
    tag = site.tag()
    body = site.task("t.mark").si(tag).on_error(site.task("t.errback").si(tag))

    result = chord([site.task("o.act").s(tag, "error"), site.task("t.add").s(1, 1)], body).delay()

    with pytest.raises(ChordError, match=r"ValueError\('wrong'\)"):
        site.app.AsyncResult(result.id).get(timeout=15)
    eventually(lambda: "errback" in site.facts(tag))
    never(lambda: site.facts(tag).count("errback") > 1 or "mark 1" in site.facts(tag), during=0.5)


def test_a_chord_whose_member_is_cancelled_ends(site: Site) -> None:
    """Cancelled while it waits for its time: nobody but the store's reaper can say so."""
    tag = site.tag()
    waiting = site.task("t.add").s(1, 1).set(countdown=600)

    result = chord([waiting, site.task("t.add").s(2, 2)], site.task("t.mark").si(tag)).delay()
    member = result.parent.results[0].id
    cancel(site, member)

    with pytest.raises(ChordError, match="TaskRevokedError"):
        site.app.AsyncResult(result.id).get(timeout=15)
    assert "mark 1" not in site.facts(tag)


def cancel(site: Site, job_id: str) -> None:
    transitions.cancel(store_of(site.app), job_id, reason="not needed")
    site.until(job_id, "cancelled", settled=True, passes=True)


# --- losses and kills ---------------------------------------------------------------------------


def test_a_lost_member_runs_again_and_the_chord_fires_once(site: Site) -> None:
    tag, mark = site.tag(), site.tag()
    header = [site.task("o.act").s(tag, "killed"), site.task("t.add").s(1, 1)]

    result = chord(header, site.task("t.mark").si(mark)).delay()
    member = result.parent.results[0].id

    site.until(member, "succeeded", passes=True)
    assert result.get(timeout=15) == "marked"
    assert result.parent.get(timeout=10) == ["done", 2]
    assert site.states(member)[-1] == "completed"
    assert site.facts(mark) == ["mark 1"]


@pytest.mark.parametrize(
    "dies",
    [
        "after complete",
        "before count_part",
        "after count_part",
        "after claim_chord",
        "before close_chord",
        "after close_chord",
    ],
)
def test_a_kill_anywhere_between_a_result_and_its_chord_costs_nothing(
    dies: str,
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    """The child is killed at that point of its first part; a replay does the rest, once."""
    site = make_site(postgresql_url, backend="lease://", lease_settle_grace=0.2)
    env = {**site.worker_env(), "LEASE_TEST_DIES": dies}
    start_worker("tests.worker.apps.dying", concurrency=2, env=env)
    tag, add = site.tag(), site.task("t.add")
    link = site.task("t.mark").si(tag)

    result = chord([add.s(1, 1).on_error(link), add.s(2, 2)], site.task("t.total").s()).delay()

    eventually(lambda: site.facts("dying") == ["died"], timeout=20)
    with_passes(site, result)
    assert result.get(timeout=1) == 6
    assert [site.states(one) for one in (result.id, *(m.id for m in result.parent.results))] == [
        ["completed"]
    ] * 3
    for one in (result, *result.parent.results):
        site.until(one.id, "succeeded", settled=True, passes=True)
    assert [row["fired_at"] is not None for row in chord_rows(site)] == [True]
    assert site.facts(tag) == []


def with_passes(site: Site, result: AsyncResult) -> None:
    """Wait for a result while the reaper makes its passes."""

    def there() -> bool:
        with suppress(StoreUnavailable):
            site.run_pass()
        return bool(result.ready())

    eventually(there, timeout=40, interval=0.2, what=lambda: site.told(result.id))


def test_a_result_that_was_stored_when_its_process_died_is_there_at_once(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    """On any other backend a replay would have to bring it; here the job has it."""
    site = make_site(postgresql_url, backend="lease://")
    env = {**site.worker_env(), "LEASE_TEST_DIES": "after complete"}
    start_worker("tests.worker.apps.dying", concurrency=1, env=env)

    result = site.task("t.add").delay(1, 2)

    assert result.get(timeout=20) == 3
    eventually(lambda: site.facts("dying") == ["died"])
    never(lambda: result.state != "SUCCESS", during=1.0)
    assert site.states(result.id) == ["completed"]
    assert site.job(result.id)["dispatch_count"] == 1
