"""Many jobs of one call: ``submit_many`` and groups."""

from __future__ import annotations

import base64
import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import Context, copy_context
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chord, group
from celery.signals import after_task_publish, before_task_publish
from kombu.exceptions import OperationalError
from sqlalchemy import event

from celery_lease import bulk, recording
from celery_lease.bulk import BATCH
from celery_lease.exceptions import (
    IdempotencyConflict,
    PayloadTooLarge,
    StoreUnavailable,
)
from celery_lease.extension import extension_of
from celery_lease.store import transitions
from tests.support.servers import Valkey
from tests.support.waiting import eventually
from tests.worker.site import WORKER_APP, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site


def sent(site: Site) -> list[str]:
    """Return the ids of the messages in the queue, the last first."""
    return [message["headers"]["id"] for message in site.queued("celery")]


@pytest.fixture
def idle(make_site: Callable[..., Site], sqlite_url: str) -> Site:
    """A site without a worker."""
    return make_site(sqlite_url)


@pytest.fixture
def inserts(idle: Site) -> Iterator[list[str]]:
    """The INSERT statements that the app's store has sent."""
    texts: list[str] = []

    def note(_c: Any, _cursor: Any, text: str, *_: Any) -> None:
        if "INSERT" in text.upper():
            texts.append(text)

    engine = extension_of(idle.app).store.base_engine
    event.listen(engine, "before_cursor_execute", note)
    yield texts
    event.remove(engine, "before_cursor_execute", note)


# --- what is recorded and sent --------------------------------------------------------------------


def test_many_jobs_are_recorded_in_a_few_statements_and_all_are_sent(
    idle: Site, inserts: list[str]
) -> None:
    count = BATCH + 10

    results = idle.task("t.add").submit_many((number, 1) for number in range(count))

    ids = [result.id for result in results]
    assert len(set(ids)) == count
    assert idle.ids() == set(ids)
    # In the order of the calls, and each dispatched once.
    assert list(reversed(sent(idle))) == ids
    assert {(job["state"], job["dispatch_count"]) for job in idle.jobs()} == {("queued", 1)}
    assert all(job["dispatched_at"] for job in idle.jobs())
    assert len(inserts) <= 8


def test_a_group_is_recorded_in_a_few_statements(idle: Site, inserts: list[str]) -> None:
    add = idle.task("t.add")

    result = group(add.s(number, 1) for number in range(100)).apply_async()

    assert idle.ids() == set(sent(idle)) == {child.id for child in result.children}
    assert {job["group_id"] for job in idle.jobs()} == {result.id}
    assert len(inserts) <= 4


def test_a_message_of_a_batch_is_as_one_sent_alone(idle: Site) -> None:
    options = {"queue": "other", "priority": 3, "expires": 60, "headers": {"tenant": "7"}}
    alone = idle.task("t.add").apply_async((1, 2), **options)
    [of_many] = idle.task("t.add").submit_many([(1, 2)], **options)

    apart = {"id", "root_id", "lease_dispatch", "expires"}
    first, second = (
        next(m for m in idle.queued("other") if m["headers"]["id"] == result.id)
        for result in (alone, of_many)
    )
    assert first["body"] == second["body"]
    assert {k: v for k, v in first["headers"].items() if k not in apart} == {
        k: v for k, v in second["headers"].items() if k not in apart
    }
    assert second["headers"]["lease_dispatch"] == f"{of_many.id}:1:1"
    assert first["properties"]["priority"] == second["properties"]["priority"] == 3
    recorded = [idle.messages(result.id)[0] for result in (alone, of_many)]
    assert recorded[0]["body"] == recorded[1]["body"]
    assert recorded[0]["routing_key"] == recorded[1]["routing_key"] == "other"


def test_a_call_may_be_a_signature_with_options_of_its_own(idle: Site) -> None:
    add = idle.task("t.add")

    results = add.submit_many([add.s(1, second=2), add.s(3, 4).set(queue="other")], queue="celery")

    assert [idle.job(result.id)["queue"] for result in results] == ["celery", "other"]


@pytest.mark.parametrize("wrong", ["text", 7, {"task": "t.mark"}])
def test_a_call_of_another_kind_is_refused_before_its_batch(idle: Site, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"submit_many\(\) of t\.add"):
        idle.task("t.add").submit_many([(1, 2), wrong])

    assert idle.jobs() == sent(idle) == []


def test_what_a_generator_submits_by_itself_is_recorded_at_once(idle: Site) -> None:
    seen = []

    def calls() -> Iterator[tuple[int, int]]:
        other = idle.task("t.mark").delay("tag")
        seen.append(idle.job_or_none(other.id) is not None)
        yield 1, 2

    idle.task("t.add").submit_many(calls())

    assert seen == [True]
    assert len(idle.jobs()) == 2


def test_what_a_groups_generator_or_a_handler_submits_is_no_member(idle: Site) -> None:
    """It is recorded and sent at once, and stays when the group comes to nothing."""
    add, mark = idle.task("t.add"), idle.task("t.mark")
    seen: list[str] = []

    def other(**_: Any) -> None:
        seen.append(mark.delay("tag").id)
        assert idle.job(seen[-1])["dispatched_at"]

    def members() -> Iterator[Any]:
        yield add.s(1, 1)
        other()
        yield add.s(2, 2)
        yield add.s(3, 3)
        raise LookupError("the file ended early")

    before_task_publish.connect(other, sender="t.add")
    try:
        with pytest.raises(LookupError):
            group(members()).apply_async()
    finally:
        before_task_publish.disconnect(other, sender="t.add")

    assert len(seen) > 1
    assert idle.ids() == set(sent(idle)) == set(seen)


def test_members_that_are_chains_and_chords_are_recorded_in_a_few_statements(
    idle: Site, inserts: list[str]
) -> None:
    add, total = idle.task("t.add"), idle.task("t.total")

    group(add.s(number, 1) | add.s(1) for number in range(50)).apply_async()

    assert len(idle.jobs()) == len(sent(idle)) == 50
    assert len(inserts) <= 4
    inserts.clear()
    header = [add.s(number, 1) for number in range(20)]
    group(chord(header, total.s()), add.s(1, 1)).apply_async()
    assert len(idle.jobs()) == len(sent(idle)) == 50 + 21
    assert len(inserts) <= 8


def test_a_task_of_another_app_is_recorded_in_its_own_store(
    make_site: Callable[..., Site], idle: Site, tmp_path: Path
) -> None:
    other = make_site(f"sqlite:///{tmp_path}/other.db")

    result = group(idle.task("t.add").s(1, 1), other.task("t.add").s(2, 2)).apply_async()

    first, second = (child.id for child in result.children)
    assert (idle.ids(), other.ids()) == ({first}, {second})


def test_a_context_that_outlives_a_batch_is_in_none(idle: Site) -> None:
    """A task of asyncio's, and ``to_thread``, begin with a copy of the context."""
    add, mark = idle.task("t.add"), idle.task("t.mark")
    copies: list[Context] = []
    within: list[str] = []
    recorded: list[bool] = []

    def note(**_: Any) -> None:
        copies.append(copy_context())
        with ThreadPoolExecutor(1) as pool:
            within.append(pool.submit(copies[-1].run, mark.delay, "tag").result().id)
        # Its caller has an answer by now, and the batch goes on.
        recorded.append(idle.job_or_none(within[-1]) is not None)

    after_task_publish.connect(note, sender="t.add")
    try:
        add.submit_many([(1, 2)])
        group(add.s(1, 2), add.s(3, 4)).apply_async()
    finally:
        after_task_publish.disconnect(note, sender="t.add")
    later = [copy.run(mark.delay, "tag").id for copy in copies]

    assert recorded == [True] * 3
    assert len(later) == 3
    assert idle.ids() >= {*within, *later}
    assert set(sent(idle)) == idle.ids()


def test_an_id_that_exists_is_sent_once(idle: Site) -> None:
    add = idle.task("t.add")
    add.apply_async((1, 2), task_id="known")

    results = add.submit_many([add.s(3, 4), add.s(1, 2).set(task_id="known")])

    assert sent(idle).count("known") == 1
    assert idle.ids() == {"known", results[0].id}
    assert results[1].id == "known"


def test_one_id_twice_in_a_batch_is_sent_once(idle: Site) -> None:
    add = idle.task("t.add")

    add.submit_many([add.s(number, 1).set(task_id=name) for number, name in enumerate("abcab")])

    assert list(reversed(sent(idle))) == ["a", "b", "c"]
    bodies = [message["body"] for message in reversed(idle.queued("celery"))]
    recorded = [bytes(idle.messages(name)[0]["body"]) for name in "abc"]
    assert [base64.b64decode(body) for body in bodies] == recorded


def test_eager_calls_run_at_once() -> None:
    app = Celery("eager", task_always_eager=True)
    from celery_lease import LeasedTask

    @app.task(base=LeasedTask, shared=False)
    def double(number: int) -> int:
        return 2 * number

    assert [result.get() for result in double.submit_many([(1,), (2,)])] == [2, 4]
    assert group(double.s(3), double.s(4)).apply_async().get() == [6, 8]


def test_a_group_of_an_app_without_leased_tasks_is_celerys_own() -> None:
    app = Celery("plain", broker="memory://", backend="cache+memory://", set_as_current=False)
    # The memory is shared by all apps of a process.
    app.conf.task_default_queue = "plain"

    @app.task(shared=False)
    def plain() -> None:
        """Do nothing."""

    result = group(plain.s(), plain.s()).apply_async()

    assert len(result.children) == 2


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "plain"])
def test_a_group_takes_its_arguments_by_position(idle: Site, *, leased: bool) -> None:
    with Celery("plain", broker="memory://", set_as_current=False) as plain:

        @plain.task(name="plain.work", shared=False)
        def work(number: int) -> None:
            """Do nothing."""

        app, name = (idle.app, "t.total") if leased else (plain, "plain.work")
        members = group([app.tasks[name].s()], app=app)

        # Arguments, keywords, add_to_parent, producer, link, link_error.
        result = members.apply_async(([1, 2],), {}, 1, None, None, None)

        assert len(result.results) == 1
        with pytest.raises(TypeError, match="Cannot add link to group"):
            members.apply_async((1,), {}, 1, None, None, app.tasks[name].s())


def test_large_messages_are_recorded_a_few_at_a_time(idle: Site, inserts: list[str]) -> None:
    size = 300_000
    assert 100 * size > 16_777_216, "what one statement of MariaDB may have"

    group(idle.task("t.mark").s("x" * size) for _ in range(100)).apply_async()

    assert len(idle.jobs()) == len(sent(idle)) == 100
    # A job and a message each time.
    assert len(inserts) == 2 * -(-100 // (1 + bulk.BATCH_BYTES // size))


# --- keys ----------------------------------------------------------------------------------------


def test_a_held_key_gives_its_job_once(idle: Site) -> None:
    add = idle.task("t.add")
    keyed = [add.s(1, 2).set(idempotency_key=key) for key in ("a", "b", "a")]

    first, second, third = add.submit_many(keyed)

    assert first.id == third.id != second.id
    assert idle.ids() == set(sent(idle)) == {first.id, second.id}
    assert len(sent(idle)) == 2


def test_a_conflict_leaves_its_batch_unsent(idle: Site) -> None:
    add = idle.task("t.add")
    before = add.apply_async((1, 2), idempotency_key="taken")

    with pytest.raises(IdempotencyConflict):
        add.submit_many([add.s(5, 6), add.s(3, 4).set(idempotency_key="taken")])

    assert idle.ids() == set(sent(idle)) == {before.id}


# --- errors --------------------------------------------------------------------------------------


def test_a_message_that_is_too_large_leaves_its_batch_unrecorded(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    site = make_site(sqlite_url, lease_max_message_bytes=1000)
    add = site.task("t.add")

    with pytest.raises(PayloadTooLarge):
        group(add.s(1, 2), add.s("x" * 2000, "")).apply_async()

    assert site.jobs() == sent(site) == []


def test_without_the_store_nothing_is_sent(idle: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailable("sqlite://", "away")

    monkeypatch.setattr(transitions, "submit_many", away)

    with pytest.raises(StoreUnavailable):
        idle.task("t.add").submit_many([(1, 2), (3, 4)])

    assert idle.jobs() == sent(idle) == []


@pytest.mark.parametrize("key", [None, "key"])
def test_a_group_that_follows_an_ended_job_leaves_unrecorded_in_the_end(
    make_site: Callable[..., Site],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
) -> None:
    """No replay would send it again; its members are recorded at their claims."""
    site = make_site(sqlite_url, lease_claim_timeout=0.1)

    def away(*_: Any) -> None:
        raise StoreUnavailable("sqlite://", "away")

    monkeypatch.setattr(transitions, "submit_many", away)
    monkeypatch.setattr(transitions, "submit_keyed", away)
    monkeypatch.setattr(recording, "_is_closing_books", lambda _job_id: True)

    members = [site.task("t.add").s(n, 1).set(idempotency_key=key and f"{n}") for n in range(2)]
    result = group(members).apply_async()

    assert list(reversed(sent(site))) == [child.id for child in result.children]
    assert all("lease_recorded" not in m["headers"] for m in site.queued("celery"))


@pytest.mark.parametrize("on_error", ["store", "raise"])
def test_a_broker_that_is_away_costs_one_wait_and_the_reaper_sends_the_jobs(
    make_site: Callable[..., Site],
    sqlite_url: str,
    own_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    on_error: str,
) -> None:
    broker = own_server(Valkey)
    site = make_site(sqlite_url, broker=broker.url, backend=None, lease_publish_on_error=on_error)
    monkeypatch.setattr(bulk, "BATCH", 5)
    tries: list[int] = []
    plain = bulk.Batch._send

    def counted(self: Any, taken: Any, **options: Any) -> None:
        tries.append(sum(job.dispatched for job, _ in taken))
        plain(self, taken, **options)

    monkeypatch.setattr(bulk.Batch, "_send", counted)
    broker.kill()

    signatures = [site.task("t.add").si(number, 1) for number in range(12)]
    if on_error == "raise":
        with pytest.raises((OperationalError, OSError)):
            group(signatures).apply_async()
        # The batch in which it happened is recorded; what came after was not begun.
        assert len(site.jobs()) == 5
    else:
        group(signatures).apply_async()
        assert len(site.jobs()) == 12
        # The first batch has waited for the broker; the others are only recorded.
        assert tries == [5, 0, 0]

    assert {job["dispatched_at"] for job in site.jobs()} == {None}
    broker.start()
    eventually(lambda: site.run_pass().get("dispatched") == len(site.jobs()))
    assert set(sent(site)) == site.ids()


def _submits_and_dies(redis_url: str, store_url: str, tag: str) -> None:
    with open_site(redis_url, store_url) as site:
        plain = bulk.Batch._send

        def dying(self: Any, taken: Any, **options: Any) -> None:
            plain(self, taken[:3], **options)
            os.kill(os.getpid(), signal.SIGKILL)

        bulk.Batch._send = dying  # type: ignore[method-assign]
        site.task("t.mark").submit_many([(tag,)] * 10)


def test_a_caller_that_dies_between_record_and_publish_loses_nothing(
    make_site: Callable[..., Site], sqlite_url: str, start_worker: Callable[..., CeleryWorker]
) -> None:
    site = make_site(sqlite_url, lease_reaper_interval=0.5, lease_queued_timeout=1)
    tag = site.tag()
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(BrokenProcessPool),
    ):
        pool.submit(_submits_and_dies, site.redis_url, sqlite_url, tag).result(60)
    assert len(sent(site)) == 3
    assert len(site.jobs()) == 10

    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    for job_id in site.ids():
        site.until(job_id, "succeeded", passes=True)
    assert site.facts(tag) == ["mark 1"] * 10


# --- with a worker -------------------------------------------------------------------------------


def test_many_jobs_run_once_each_and_a_chord_of_them_fires_once(site: Site) -> None:
    tag = site.tag()
    add, total = site.task("t.add"), site.task("t.total")

    results = site.task("t.mark").submit_many([(tag,)] * 50)
    answer = chord((add.s(number, 1) for number in range(50)), total.s()).apply_async()

    assert [result.get(timeout=20) for result in results] == ["marked"] * 50
    assert site.facts(tag) == ["mark 1"] * 50
    assert answer.get(timeout=20) == sum(range(50)) + 50


def test_a_body_may_submit_many(site: Site, start_worker: Callable[..., CeleryWorker]) -> None:
    tag = site.tag()

    ids = site.task("t.submits_many").delay(tag, 20).get(timeout=20)

    eventually(lambda: site.facts(tag) == ["mark 1"] * 20)
    assert {site.job(job_id)["parent_id"] for job_id in ids} != {None}
