"""A job with a long delay stays in the store and is sent when it is due (``lease_defer_after``)."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from celery import chord
from kombu import Connection

from celery_lease.extension import extension_of
from celery_lease.records import Backlog
from celery_lease.store import reads, transitions
from tests.support.waiting import eventually, never
from tests.worker.site import WORKER_APP, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker

HOUR = 3600.0


def make_due(site: Site, job_id: str) -> None:
    """Let a job's time come: it was due when it was created."""
    done = site.change("UPDATE {job} SET available_at = created_at WHERE id = :id", id=job_id)
    assert done == 1


def assert_in_store_alone(site: Site, job_id: str, state: str = "scheduled") -> None:
    job = site.job(job_id)
    assert (job["state"], job["dispatched_at"]) == (state, None)
    assert job_id not in [m["headers"]["id"] for m in site.queued("celery")]


def lonely(make_site: Callable[..., Site], url: str, **conf: Any) -> Site:
    """Make a site without a worker: what is published stays where it can be looked at."""
    return make_site(url, **conf)


# --- what stays and what leaves -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "delay", "is_kept"),
    [(60, 61, True), (60, 59, False), (0, 1, True), (0, None, False), (None, HOUR, False)],
)
def test_what_is_delayed_for_longer_than_the_setting_is_kept(
    after: float | None,
    delay: float | None,
    is_kept: bool,  # noqa: FBT001  of the table above
    make_site: Callable[..., Site],
    sqlite_url: str,
) -> None:
    site = lonely(make_site, sqlite_url, lease_defer_after=after)

    sent = site.task("t.add").apply_async((1, 2), countdown=delay)

    [job] = site.jobs()
    assert len(site.queued("celery")) == (not is_kept)
    assert job["state"] == ("queued" if delay is None else "scheduled")
    assert (job["dispatched_at"] is None, job["dispatch_count"]) == (is_kept, int(not is_kept))
    assert json.loads(site.messages(sent.id)[0]["headers"])["lease_recorded"] is True


def test_a_task_says_for_itself_how_long_its_messages_may_wait(
    make_site: Callable[..., Site], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = lonely(make_site, sqlite_url)
    monkeypatch.setattr(type(site.task("t.mark")), "lease_defer_after", HOUR, raising=False)

    kept, sent = (
        site.task(name).apply_async(("x", 1)[:n], countdown=600)
        for name, n in (("t.add", 2), ("t.mark", 1))
    )

    assert_in_store_alone(site, kept.id)
    assert [m["headers"]["id"] for m in site.queued("celery")] == [sent.id]


def test_an_eta_and_a_task_sent_by_name_are_kept_too(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    site = lonely(make_site, sqlite_url)
    eta = datetime.now(timezone.utc) + timedelta(hours=1)

    one = site.task("t.add").apply_async((1, 2), eta=eta)
    other = site.app.send_task("t.add", (1, 2), countdown=HOUR)

    for sent in (one, other):
        assert_in_store_alone(site, sent.id)


def test_what_goes_to_a_broker_of_the_callers_is_not_kept(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    """Later it would leave by the app's own."""
    site = lonely(make_site, sqlite_url)

    with Connection("memory://") as other:
        # The memory is shared by all apps of a process.
        other.SimpleQueue("celery").clear()
        sent = site.task("t.add").apply_async((1, 2), countdown=HOUR, connection=other)
        message = other.SimpleQueue("celery").get(block=False)

    assert message.headers["id"] == sent.id
    assert site.job(sent.id)["dispatch_count"] == 1
    site.run_pass()
    assert site.queued("celery") == []


# --- due ------------------------------------------------------------------------------------------


def test_a_job_that_is_due_is_sent_by_a_pass_and_runs_at_once(site: Site) -> None:
    tag = site.tag()
    sent = site.task("t.mark").apply_async((tag,), countdown=HOUR, headers={"tenant": "7"})
    site.run_pass()
    assert_in_store_alone(site, sent.id)
    make_due(site, sent.id)

    counts = site.run_pass()

    assert (counts["woken"], counts["dispatched"]) == (1, 1)
    job = site.until(sent.id, "succeeded", settled=True)
    assert (job["dispatch_count"], job["lost_count"]) == (1, 0)
    assert site.facts(tag) == ["mark 1"]
    assert site.run_pass().get("dispatched") is None


def test_a_retry_with_a_long_delay_waits_in_the_store(site: Site) -> None:
    tag = site.tag()
    sent = site.task("r.retry").delay(tag, 2, HOUR)

    for number in (1, 2):
        site.until(sent.id, "retry_wait")
        eventually(lambda: site.status(sent.id) == "RETRY")
        assert_in_store_alone(site, sent.id, "retry_wait")
        assert len(site.attempts(sent.id)) == number
        make_due(site, sent.id)
        assert site.run_pass()["dispatched"] == 1
        site.until_attempts(sent.id, number + 1)

    job = site.until(sent.id, "succeeded", settled=True)
    assert site.states(sent.id) == ["retried", "retried", "completed"]
    assert (job["dispatch_count"], job["message_version"]) == (3, 3)


def test_a_part_of_a_chord_that_retries_much_later_completes_it(site: Site) -> None:
    tag = site.tag()
    parts = [site.task("r.retry").s(tag, 1, HOUR), site.task("t.mark").si(tag)]

    result = chord(parts, site.task("t.ids").s()).delay()

    late = result.parent.results[0].id
    site.until(late, "retry_wait")
    eventually(lambda: site.status(late) == "RETRY")
    assert site.status(result.id) is None
    make_due(site, late)
    site.run_pass()
    assert result.get(timeout=10)[2] == 1
    assert site.states(late) == ["retried", "completed"]
    assert site.states(result.id) == ["completed"]


def test_a_worker_looks_more_often_than_the_reaper_if_it_is_told_to(
    make_site: Callable[..., Site],
    postgresql_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    """Two of them look at the same thirty jobs: each is sent once, soon after its time."""
    site = make_site(postgresql_url, lease_defer_after=0, lease_defer_precision=0.2)
    for number in range(2):
        start_worker(WORKER_APP, name=f"w{number}", concurrency=2, env=site.worker_env())

    sent = [site.task("t.add").apply_async((n, n), countdown=2) for n in range(30)]
    for one in sent:
        assert_in_store_alone(site, one.id)

    for one in sent:
        job = site.until(one.id, "succeeded", settled=True)
        [attempt] = site.attempts(one.id)
        assert job["dispatch_count"] == 1
        waited = (job["dispatched_at"] - job["available_at"]).total_seconds()
        assert 0 <= waited <= 0.2 + 1.0
        # By the store's clock, and not by a worker's: it may be claimed 2 s before its time.
        assert attempt["claimed_at"] >= job["available_at"]


def test_without_that_a_worker_leaves_due_jobs_to_the_passes(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url, lease_defer_after=0)
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())

    sent = site.task("t.add").apply_async((1, 2), countdown=0.2)

    never(lambda: site.job(sent.id)["state"] != "scheduled", during=1.5)
    site.until(sent.id, "succeeded", passes=True)


# --- it is an ordinary waiting job ----------------------------------------------------------------


def test_a_kept_job_is_cancelled_held_and_expires_like_any_other(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    site = lonely(make_site, sqlite_url)
    store = extension_of(site.app).store
    add = site.task("t.add")
    cancelled, held, expired, resumed = (
        add.apply_async((1, n), countdown=HOUR, expires=2 * HOUR).id for n in range(4)
    )
    transitions.cancel(store, cancelled, reason="not needed")
    for one in (held, resumed):
        transitions.hold_waiting(store, one, reason="wait")
    site.change("UPDATE {job} SET expires_at = created_at WHERE id = :id", id=expired)
    for one in (cancelled, held, expired):
        make_due(site, one)
    transitions.resume(store, resumed, reason="now")

    site.run_pass()

    # Resumed before its time it is due now: no worker holds it until its ETA.
    [message] = site.queued("celery")
    assert (message["headers"]["id"], message["headers"]["eta"]) == (resumed, None)
    assert json.loads(site.messages(resumed)[0]["headers"])["eta"]
    states = [site.job(one)["state"] for one in (cancelled, held, expired, resumed)]
    assert states == ["cancelled", "held", "cancelled", "queued"]


def test_a_kept_job_holds_its_key(make_site: Callable[..., Site], sqlite_url: str) -> None:
    site = lonely(make_site, sqlite_url)
    call = {"args": (1, 2), "idempotency_key": "one", "countdown": HOUR}

    first, second = (site.task("t.add").apply_async(**call) for _ in range(2))

    assert first.id == second.id
    assert len(site.jobs()) == 1


def test_what_is_kept_while_the_broker_is_away_asks_nobody(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    site = make_site(sqlite_url, broker="redis://127.0.0.1:1/0", lease_publish_on_error="raise")

    sent = site.task("t.add").apply_async((1, 2), countdown=HOUR)

    job = site.job(sent.id)
    assert (job["state"], job["dispatched_at"]) == ("scheduled", None)


def test_jobs_that_nobody_sends_are_counted_for_the_doctor(
    make_site: Callable[..., Site], sqlite_url: str
) -> None:
    site = lonely(make_site, sqlite_url)
    late, early = (site.task("t.add").apply_async((1, 2), countdown=HOUR).id for _ in range(2))
    store = extension_of(site.app).store
    assert reads.backlog(store).overdue_waiting_count == 0

    table = site.tables.job
    before = site.job(late)["created_at"] - timedelta(minutes=2)
    site.execute(table.update().where(table.c.id == late).values(available_at=before))

    found: Backlog = reads.backlog(store, seconds=60)
    assert (found.overdue_waiting_count, found.queued_count) == (1, 0)
    assert site.job(early)["state"] == "scheduled"


# --- the caller's own connection ------------------------------------------------------------------


def test_a_connection_that_the_caller_gives_is_the_one_that_is_used(
    make_site: Callable[..., Site], sqlite_url: str, redis_url: str
) -> None:
    site = lonely(make_site, sqlite_url)
    head, _, number = redis_url.rpartition("/")
    elsewhere = f"{head}/{(int(number) + 1) % 16}"

    with Connection(elsewhere) as connection:
        sent = site.task("t.add").apply_async((1, 2), connection=connection, queue="given")

    assert site.job(sent.id)["dispatched_at"] is not None
    assert site.queued("given") == []
    site.broker = elsewhere
    assert [m["headers"]["id"] for m in site.queued("given")] == [sent.id]
    site.drop("given")
