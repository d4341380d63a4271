"""Idempotency keys through Celery: one job, whoever submits it, however, and inside canvas."""

from __future__ import annotations

import json
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chain, chord, group

from celery_lease import LeasedTask
from celery_lease.exceptions import IdempotencyConflict, SettingError, StoreUnavailable
from celery_lease.extension import extension_of
from tests.support.servers import External
from tests.support.waiting import eventually
from tests.worker.apps.tasks import make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.proxy import Proxy
    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

PROCESSES, THREADS = 2, 25


def jobs_under(site: Site, key: str) -> list[dict[str, Any]]:
    """Return the jobs that were submitted under a key, the first first."""
    return [job for job in site.jobs() if job["idempotency_key"] == key]


def bodies(site: Site, tag: str) -> list[str]:
    """Return what the bodies did, without what the test told them."""
    return [fact for fact in site.facts(tag) if fact != "go"]


@pytest.fixture
def passing(site: Site) -> Iterator[None]:
    """Passes of the reaper go on while the test waits, as beat makes them."""
    done = threading.Event()

    def passes() -> None:
        while not done.wait(0.2):
            site.run_pass()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(passes)
        yield
        done.set()
        future.result(30)


# --- a second submit ----------------------------------------------------------------------------


def test_a_second_submit_is_the_existing_job(site: Site) -> None:
    tag, mark = site.tag(), site.task("t.mark")
    before = site.ids()

    first = mark.apply_async((tag,), idempotency_key=f"key-{tag}")
    at_once = mark.apply_async((tag,), idempotency_key=f"key-{tag}")
    assert first.get(timeout=10) == "marked"
    site.until(first.id, "succeeded", settled=True)
    when_done = mark.apply_async((tag,), idempotency_key=f"key-{tag}")

    assert at_once.id == when_done.id == first.id
    assert when_done.get(timeout=10) == "marked"
    assert site.ids() - before == {first.id}
    assert len(site.messages(first.id)) == 1
    assert site.facts(tag) == ["mark 1"]


def test_nothing_is_published_for_a_second_submit(make_site: Any, sqlite_url: str) -> None:
    site = make_site(sqlite_url)
    add = site.task("t.add")

    results = [add.apply_async((1, 2), idempotency_key="key") for _ in range(3)]

    assert [message["headers"]["id"] for message in site.queued("celery")] == [results[0].id]
    headers = site.queued("celery")[0]["headers"]
    assert headers["lease_idempotency_key"] == "key"


def test_a_caller_does_not_go_on_listening_for_what_was_not_published(
    make_site: Any, sqlite_url: str
) -> None:
    site = make_site(sqlite_url)
    add = site.task("t.add")
    first = add.apply_async((1, 2), idempotency_key="key")

    second = add.apply_async((1, 2), idempotency_key="key")
    with pytest.raises(IdempotencyConflict):
        add.apply_async((1, 3), idempotency_key="key")

    assert second.id == first.id
    # Nor for what was: whoever asks for the result begins to.
    assert site.app.backend.result_consumer.subscribed_to == set()


def test_the_same_key_of_another_task_is_another_job(site: Site) -> None:
    tag = site.tag()

    one = site.task("t.mark").apply_async((tag,), idempotency_key=tag)
    two = site.task("t.errback").apply_async((tag,), idempotency_key=tag)

    assert one.id != two.id
    eventually(lambda: sorted(site.facts(tag)) == ["errback", "mark 1"])


def test_a_body_may_submit_twice_as_well(site: Site) -> None:
    tag = site.tag()

    first, second = site.task("k.submits").delay(tag, f"key-{tag}").get(timeout=10)

    assert first == second
    site.until(first, "succeeded", settled=True)
    assert site.facts(tag) == ["mark 1"]


def _submit_many(urls: dict[str, str], key: str) -> list[str]:
    """Submit one key from many threads of a process of its own; return the ids."""
    with make_app(**urls) as app:
        app.finalize()
        add, gate = app.tasks["t.add"], threading.Barrier(THREADS)

        def submit(_: int) -> str:
            gate.wait(30)
            return str(add.apply_async((1, 2), idempotency_key=key).id)

        with ThreadPoolExecutor(THREADS) as pool:
            ids = list(pool.map(submit, range(THREADS)))
        extension_of(app).raw_store.close()
    return ids


def test_of_fifty_callers_in_two_processes_all_get_the_one_job(
    make_site: Any, database_url: str
) -> None:
    site = make_site(database_url)
    urls = {"broker": site.broker, "backend": site.backend, "store": database_url}
    urls["ledger"] = site.redis_url

    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(_submit_many, urls, "key") for _ in range(PROCESSES)]
        ids = [job_id for call in calls for job_id in call.result(120)]

    assert len(ids) == PROCESSES * THREADS
    [job] = site.jobs()
    assert set(ids) == {job["id"]}
    assert len(site.messages(job["id"])) == len(site.queued("celery")) == 1


# --- what the key is ----------------------------------------------------------------------------


def test_other_arguments_under_the_same_key_are_a_conflict(site: Site) -> None:
    tag, add = site.tag(), site.task("t.add")
    first = add.apply_async((1, 2), idempotency_key=tag)

    with pytest.raises(IdempotencyConflict) as caught:
        add.apply_async((1, 3), idempotency_key=tag)

    assert (caught.value.task, caught.value.key, caught.value.job_id) == ("t.add", tag, first.id)
    assert len(jobs_under(site, tag)) == 1
    assert first.get(timeout=10) == 3


def test_or_the_existing_job_where_that_is_set(site: Site) -> None:
    tag, lenient = site.tag(), site.task("k.lenient")

    results = [lenient.delay(tag, value) for value in (1, 2)]

    assert results[0].id == results[1].id
    assert results[1].get(timeout=10) == 1
    assert site.facts(tag) == ["lenient 1"]


def test_links_are_not_part_of_the_arguments(site: Site) -> None:
    tag = site.tag()
    first = site.task("t.add").apply_async((1, 2), idempotency_key=tag)

    second = site.task("t.add").apply_async(
        kwargs={"second": 2, "first": 1}, idempotency_key=tag, link=site.task("t.mark").si(tag)
    )

    assert second.id == first.id


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(lambda task, tag: task.delay(tag, 5), id="delay"),
        pytest.param(lambda task, tag: task.delay(value=5, tag=tag), id="by-name"),
        pytest.param(lambda task, tag: task.s(tag, 5).apply_async(), id="signature"),
    ],
)
def test_a_key_is_made_of_the_arguments(site: Site, again: Callable[..., Any]) -> None:
    tag, once = site.tag(), site.task("k.once")

    first, second, other = once.delay(tag, 5), again(once, tag), once.delay(tag, 6)

    assert second.id == first.id != other.id
    assert (first.get(timeout=10), other.get(timeout=10)) == (5, 6)
    assert site.job(first.id)["idempotency_key"] == site.job(first.id)["arguments_digest"]


def test_a_key_is_made_of_the_arguments_that_its_template_names(site: Site) -> None:
    tag, order = site.tag(), site.task("k.order")

    first = order.delay(tag, note="first")

    assert site.job(first.id)["idempotency_key"] == f"order-{tag}"
    assert order.delay(tag, note="first").id == first.id
    with pytest.raises(IdempotencyConflict):
        order.delay(tag, note="second")


def test_a_key_that_is_given_comes_before_the_one_that_is_made(site: Site) -> None:
    tag, once = site.tag(), site.task("k.once")

    one = once.apply_async((tag, 1))
    two = once.apply_async((tag, 1), idempotency_key=f"mine-{tag}")

    assert two.id != one.id
    assert site.job(two.id)["idempotency_key"] == f"mine-{tag}"


@pytest.mark.parametrize(("key", "error"), [(7, TypeError), (b"k", TypeError), ("", ValueError)])
def test_what_is_no_key_is_refused_and_nothing_recorded(
    site: Site, key: Any, error: type[Exception]
) -> None:
    before = site.ids()

    with pytest.raises(error, match="idempotency key"):
        site.task("t.add").apply_async((1, 2), idempotency_key=key)

    assert site.ids() == before


def test_a_template_over_arguments_that_a_task_does_not_have_is_refused() -> None:
    with (
        Celery("wrong", broker="memory://", set_as_current=False) as app,
        pytest.raises(SettingError, match="the task has no argument 'order'"),
    ):

        @app.task(base=LeasedTask, shared=False, lazy=False, lease_idempotency_key="{order}")
        def work(order_id: int) -> None: ...


def test_a_call_that_is_not_published_takes_a_key_and_needs_none(sqlite_url: str) -> None:
    with Celery("eager", broker="memory://", set_as_current=False) as app:
        app.conf.update(lease_store_url=sqlite_url, task_always_eager=True)

        @app.task(base=LeasedTask, shared=False, lease_idempotency_key=True)
        def work(number: int) -> int:
            return number

        results = [work.apply_async((1,), idempotency_key="key") for _ in range(2)]

        assert [result.get() for result in results] == [1, 1]
        assert results[0].id != results[1].id


# --- how long it is held ------------------------------------------------------------------------


def test_a_failed_job_frees_its_key(site: Site) -> None:
    tag, act = site.tag(), site.task("o.act")
    first = act.apply_async((tag, "error"), idempotency_key=tag)
    site.until(first.id, "failed", settled=True)

    second = act.apply_async((tag, "error"), idempotency_key=tag)

    assert second.id != first.id
    site.until(second.id, "failed", settled=True)


def test_a_retention_of_nothing_frees_it_at_success(site: Site) -> None:
    tag, task = site.tag(), site.task("k.until_final")
    first = task.apply_async((tag,), idempotency_key=tag)
    site.until(first.id, "succeeded", settled=True)

    second = task.apply_async((tag,), idempotency_key=tag)

    assert second.id != first.id
    site.until(second.id, "succeeded", settled=True)
    assert site.facts(tag) == ["ran", "ran"]


def test_a_retry_is_no_duplicate_of_its_own_job(site: Site) -> None:
    tag, task = site.tag(), site.task("k.retry")

    result = task.delay(tag)

    assert result.get(timeout=15) == 2
    assert site.facts(tag) == ["try 0", "try 1", "try 2"]
    assert site.states(result.id) == ["retried", "retried", "completed"]
    assert site.job(result.id)["active_key"] == tag
    assert task.delay(tag).id == result.id


def test_a_task_that_replaces_itself_by_itself_holds_its_key(site: Site) -> None:
    tag = site.tag()

    result = site.task("k.itself").delay(tag)

    assert result.get(timeout=15) == "replaced by itself"
    assert site.job(result.id)["active_key"] == tag
    assert len(site.jobs()) == len(site.ids())


def test_a_task_that_becomes_a_canvas_ends_with_its_result(site: Site) -> None:
    tag = site.tag()

    result = site.task("k.becomes").delay(tag)

    assert result.get(timeout=15) == 2
    assert site.facts(tag) == ["once 1", "once 2"]


# --- whoever fixed an id: canvas, other languages -----------------------------------------------


def test_a_task_id_of_one_s_own_under_a_held_key_ends_as_the_existing_job(site: Site) -> None:
    tag, mark = site.tag(), site.task("t.mark")
    first = mark.apply_async((tag,), idempotency_key=tag)
    first.get(timeout=10)
    site.until(first.id, "succeeded", settled=True)

    second = mark.apply_async((tag,), idempotency_key=tag, task_id=f"mine-{tag}")

    assert second.id == f"mine-{tag}"
    assert second.get(timeout=10) == "marked"
    job = site.until(second.id, "succeeded", settled=True)
    assert (job["state_reason"], job["fencing_token"]) == (f"follows {first.id}", 0)
    assert site.facts(tag) == ["mark 1"]
    assert site.states(second.id) == []


@pytest.mark.usefixtures("passing")
def test_equal_members_of_a_group_run_once_and_all_have_the_result(site: Site) -> None:
    tag, once = site.tag(), site.task("k.once")

    result = group(once.s(tag, 1), once.s(tag, 1), once.s(tag, 2)).delay()

    assert result.get(timeout=20) == [1, 1, 2]
    assert sorted(site.facts(tag)) == ["once 1", "once 2"]


@pytest.mark.usefixtures("passing")
def test_a_chord_waits_for_the_job_that_holds_a_member_s_key(site: Site) -> None:
    tag, wait = site.tag(), site.task("k.wait")
    first = wait.apply_async((tag,), idempotency_key=tag)
    eventually(lambda: site.facts(tag) == ["began"])
    member = wait.s(tag).set(idempotency_key=tag)

    result = chord([member, site.task("t.mark").s(f"{tag}-m")], site.task("t.ids").s()).delay()

    [followed] = [job for job in jobs_under(site, tag) if job["id"] != first.id]
    site.until(followed["id"], "retry_wait")
    assert site.status(result.id) is None
    site.book.note(tag, "go")
    assert result.get(timeout=20)[1:3] == [result.id, 1]
    assert result.parent.get(timeout=5) == ["return", "marked"]
    assert bodies(site, tag) == ["began"]
    assert len(site.attempts(result.id)) == 1


@pytest.mark.usefixtures("passing")
def test_a_member_runs_itself_when_the_job_that_held_its_key_fails(site: Site) -> None:
    tag, wait = site.tag(), site.task("k.wait")
    first = wait.apply_async((tag, "fail"), idempotency_key=tag)
    eventually(lambda: site.facts(tag) == ["began"])
    member = wait.s(tag, "fail").set(idempotency_key=tag)
    result = group(member).delay()
    site.until(result.results[0].id, "retry_wait")

    site.book.note(tag, "go")

    site.until(first.id, "failed", settled=True)
    site.until(result.results[0].id, "failed", settled=True)
    assert bodies(site, tag) == ["began", "began"]


def test_a_step_of_a_chain_takes_the_result_of_the_job_that_holds_its_key(site: Site) -> None:
    tag, value = site.tag(), site.task("k.value")
    value.apply_async((1, tag, 7), idempotency_key=tag).get(timeout=10)
    step = value.s(tag, 7).set(idempotency_key=tag)

    result = chain(site.task("t.add").s(0, 1), step, site.task("t.add").s(1)).delay()

    assert result.get(timeout=10) == 8
    assert site.facts(tag) == ["value 7"]


def test_a_member_with_other_arguments_fails_its_chord_once(site: Site) -> None:
    tag, add = site.tag(), site.task("t.add")
    first = add.apply_async((1, 2), idempotency_key=tag)
    first.get(timeout=10)
    body = site.task("t.total").s().on_error(site.task("t.errback").si(tag))

    result = chord([add.s(1, 3).set(idempotency_key=tag), add.s(1, 1)], body).delay()

    eventually(lambda: site.status(result.id) == "FAILURE", timeout=15)
    assert f"is held by job {first.id}" in str(site.result(result.id))
    [member] = [job for job in jobs_under(site, tag) if job["id"] != first.id]
    site.until(member["id"], "failed", settled=True)
    assert site.states(member["id"]) == []
    told = site.result(member["id"])
    assert told is not None
    assert told["result"]["exc_type"] == "IdempotencyConflict"
    assert told["result"]["exc_message"] == ["t.add", tag, first.id]
    eventually(lambda: site.facts(tag) == ["errback"])


def test_a_link_with_other_arguments_fails_and_not_the_task_that_it_is_linked_to(
    site: Site,
) -> None:
    tag, errback = site.tag(), site.task("t.errback")
    first = errback.apply_async((tag,), idempotency_key=tag)
    site.until(first.id, "succeeded", settled=True)
    link = errback.si(f"{tag}-other").set(idempotency_key=tag)

    parent = site.task("plain.mark").apply_async((tag,), link=link)

    assert parent.get(timeout=10) == "plain"
    [linked] = eventually(lambda: [j for j in jobs_under(site, tag) if j["id"] != first.id])
    site.until(linked["id"], "failed", settled=True)
    assert site.facts(f"{tag}-other") == []


@pytest.mark.usefixtures("passing")
def test_a_worker_that_died_before_celery_was_told_is_made_good(site: Site) -> None:
    tag, once = site.tag(), site.task("k.once")
    once.delay(tag, 4).get(timeout=10)
    second = once.apply_async((tag, 4), task_id=f"mine-{tag}")
    site.until(second.id, "succeeded", settled=True)
    site.forget(second.id)

    site.unsettle(second.id)

    site.until(second.id, "succeeded", settled=True)
    assert site.result(second.id)["result"] == 4
    assert site.facts(tag) == ["once 4"]


@pytest.mark.parametrize("by", ["header", "option"])
@pytest.mark.usefixtures("passing")
def test_a_message_of_another_language_waits_for_the_job_that_holds_its_key(
    site: Site, shared_worker: CeleryWorker, by: str
) -> None:
    tag = site.tag()
    first = site.task("k.wait").apply_async((tag,), idempotency_key=tag)
    eventually(lambda: site.facts(tag) == ["began"])
    with Celery(
        "foreign", broker=site.broker, backend=site.backend, set_as_current=False
    ) as foreign:
        headers = {"lease_idempotency_key": tag}
        if by == "header":
            sent = foreign.send_task("k.wait", (tag,), headers=headers)
        else:
            sent = site.app.send_task("k.wait", (tag,), idempotency_key=tag)

        shared_worker.wait_log(f"lease.claim.refused job_id={sent.id}")
        said = shared_worker.log().split(f"refused job_id={sent.id}")[1][:300]
        site.book.note(tag, "go")

        assert sent.get(timeout=15) == "return"
    assert "refusal=key_held" in said
    assert site.until(sent.id, "succeeded", settled=True)["state_reason"] == f"follows {first.id}"
    assert bodies(site, tag) == ["began"]


def test_the_first_message_of_another_language_holds_its_key(site: Site) -> None:
    tag = site.tag()
    with Celery(
        "foreign", broker=site.broker, backend=site.backend, set_as_current=False
    ) as foreign:
        headers = {"lease_idempotency_key": tag}
        sent = foreign.send_task("t.mark", (tag,), headers=headers)

    job = site.until(sent.id, "succeeded", settled=True)
    assert job["active_key"] == tag
    assert json.loads(site.messages(sent.id)[0]["headers"])["lease_idempotency_key"] == tag
    assert site.task("t.mark").apply_async((tag,), idempotency_key=tag).id == sent.id


def test_a_message_of_another_language_has_the_key_that_its_task_makes(site: Site) -> None:
    tag = site.tag()
    first = site.task("k.once").delay(tag, 3)
    first.get(timeout=10)
    with Celery(
        "foreign", broker=site.broker, backend=site.backend, set_as_current=False
    ) as foreign:
        sent = foreign.send_task("k.once", (tag,), {"value": 3})
        assert sent.get(timeout=10) == 3

    assert site.facts(tag) == ["once 3"]


# --- the store is away --------------------------------------------------------------------------


def test_without_the_store_nothing_is_sent_and_nothing_is_taken_for_existing(
    make_site: Any, postgresql: Any, postgresql_url: str, start_proxy: Callable[[int], Proxy]
) -> None:
    if isinstance(postgresql, External):
        pytest.skip("needs a port to put a proxy in front of")
    cable = start_proxy(postgresql.port)
    site = make_site(cable.url(postgresql_url))
    site.task("t.add").apply_async((1, 2), idempotency_key="key")
    cable.cut()

    with pytest.raises(StoreUnavailable):
        site.task("t.add").apply_async((1, 2), idempotency_key="key")

    cable.heal()
    assert len(site.queued("celery")) == len(site.jobs()) == 1
