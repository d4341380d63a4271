"""The broker or the store is away: nothing is lost, and nothing runs unclaimed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kombu.exceptions import OperationalError

from celery_lease import recording
from celery_lease.exceptions import StoreUnavailable
from celery_lease.store import transitions
from tests.support.servers import External, Valkey
from tests.support.waiting import eventually
from tests.worker.site import celery_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.proxy import Proxy
    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

WORKER_APP = "tests.worker.apps.leased"


def test_a_job_published_while_the_broker_is_down_runs_when_it_is_back(
    make_site: Callable[..., Site],
    sqlite_url: str,
    own_server: Callable[..., Any],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    broker = own_server(Valkey)
    site = make_site(sqlite_url, broker=broker.url)
    tag = site.tag()
    broker.kill()

    result = site.task("t.mark").delay(tag)

    job = site.job(result.id)
    assert (job["state"], job["dispatched_at"]) == ("queued", None)
    # A pass while it is still away leaves the job as it is, and is a pass.
    assert site.run_pass() == {"unpublished": 1}
    assert site.job(result.id)["dispatched_at"] is None

    broker.start()
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())
    eventually(lambda: site.run_pass() == {"dispatched": 1})
    assert result.get(timeout=10) == "marked"
    assert site.facts(tag) == ["mark 1"]
    assert site.states(result.id) == ["completed"]


def test_a_publisher_may_want_the_brokers_error(
    make_site: Callable[..., Site], sqlite_url: str, own_server: Callable[..., Any]
) -> None:
    broker = own_server(Valkey)
    site = make_site(sqlite_url, broker=broker.url, lease_publish_on_error="raise")
    broker.kill()

    with pytest.raises((OperationalError, OSError)):
        site.task("t.add").delay(1, 2)

    # Whether the broker has it is never sure, so the job stays and is sent by the reaper.
    [job] = site.jobs()
    assert (job["state"], job["dispatched_at"]) == ("queued", None)


def test_a_message_that_neither_the_store_nor_the_broker_took_is_an_error(
    make_site: Callable[..., Site],
    sqlite_url: str,
    own_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would send it again: a part of a chord that says nothing here loses the chord."""
    broker = own_server(Valkey)
    site = make_site(sqlite_url, broker=broker.url, lease_claim_timeout=0.1)
    asked: list[int] = []

    def away(*_: Any) -> None:
        asked.append(1)
        raise StoreUnavailable("sqlite://", "away")

    monkeypatch.setattr(transitions, "submit", away)
    monkeypatch.setattr(recording, "_is_closing_books", lambda _job_id: True)
    sent = site.task("t.add").delay(1, 2)
    assert [message["headers"]["id"] for message in site.queued("celery")] == [sent.id]
    assert len(asked) > 1
    broker.kill()

    with pytest.raises((OperationalError, OSError)):
        site.task("t.add").delay(1, 2)

    assert site.jobs() == []


def test_the_last_task_of_a_replacing_canvas_waits_for_the_store_as_any_other_follower(
    make_site: Callable[..., Site], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that failed is no record: the message would be refused as one that is not there yet."""
    site = make_site(sqlite_url, lease_claim_timeout=1.0)
    asked: list[int] = []

    def away(*_: Any) -> None:
        asked.append(1)
        raise StoreUnavailable("sqlite://", "away")

    monkeypatch.setattr(transitions, "reopen", away)
    monkeypatch.setattr(recording, "_is_closing_books", lambda _job_id: True)
    monkeypatch.setattr(recording.RecordingProducer, "_version_after_replaced", lambda *_: 2)

    site.task("t.add").apply_async((1, 2), replaced_task_nesting=1)

    assert len(asked) > 1
    [message] = site.queued("celery")
    assert "lease_recorded" not in message["headers"]


@pytest.mark.skipif(
    celery_version < (5, 7),
    reason="Celery 5.5 stops the body when its Redis is killed: it is released, not retried",
)
def test_a_retry_while_the_broker_is_down_is_still_a_retry(
    make_site: Callable[..., Site],
    sqlite_url: str,
    own_server: Callable[..., Any],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    broker = own_server(Valkey)
    site = make_site(sqlite_url, broker=broker.url)
    tag = site.tag()
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    result = site.task("r.retry_when").delay(tag)
    eventually(lambda: "began" in site.facts(tag))

    broker.kill()
    site.book.note(tag, "retry")

    job = site.until(result.id, "queued")
    assert site.states(result.id) == ["retried"]
    eventually(lambda: site.job(result.id)["dispatched_at"] is None)
    assert job["message_version"] == 2
    eventually(lambda: site.status(result.id) == "RETRY")
    broker.start()
    # Another one: a prefork worker may not survive the death of its Redis (kombu 5.7).
    start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    eventually(lambda: site.run_pass().get("dispatched"), interval=0.2)
    assert result.get(timeout=20) == "done"
    assert site.states(result.id) == ["retried", "completed"]


def test_nothing_is_sent_while_the_store_is_down(
    make_site: Callable[..., Site],
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
) -> None:
    if isinstance(postgresql, External):
        pytest.skip("needs a port to put a proxy in front of")
    cable = start_proxy(postgresql.port)
    site = make_site(cable.url(postgresql_url))
    cable.cut()

    with pytest.raises(StoreUnavailable) as raised:
        site.task("t.add").delay(1, 2)

    assert "password" not in str(raised.value)
    assert site.queued("celery") == []
    cable.heal()
    site.task("t.add").delay(1, 2)
    assert len(site.queued("celery")) == 1


def test_a_delivery_waits_for_the_store_and_runs_when_it_is_back(
    make_site: Callable[..., Site],
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    if isinstance(postgresql, External):
        pytest.skip("needs a port to put a proxy in front of")
    cable = start_proxy(postgresql.port)
    site = make_site(postgresql_url)
    env = site.worker_env(lease_claim_timeout=1)
    env["LEASE_TEST_STORE"] = cable.url(postgresql_url)
    worker = start_worker(WORKER_APP, concurrency=1, env=env)
    assert site.task("t.add").delay(1, 2).get(timeout=10) == 3
    tag = site.tag()

    cable.cut()
    result = site.task("t.mark").delay(tag)
    # Longer than lease_claim_timeout: the message goes back to the broker, and comes again.
    received = f"Task t.mark[{result.id}] received"
    eventually(lambda: worker.log().count(received) > 1, timeout=20)
    assert site.facts(tag) == []
    assert site.job(result.id)["state"] == "queued"
    assert site.result(result.id) is None
    cable.heal()

    assert result.get(timeout=20) == "marked"
    assert site.facts(tag) == ["mark 1"]
    assert site.states(result.id) == ["completed"]
    assert site.job(result.id)["lost_count"] == 0


def test_an_outcome_waits_for_the_store(
    make_site: Callable[..., Site],
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    if isinstance(postgresql, External):
        pytest.skip("needs a port to put a proxy in front of")
    cable = start_proxy(postgresql.port)
    site = make_site(postgresql_url)
    env = site.worker_env()
    env["LEASE_TEST_STORE"] = cable.url(postgresql_url)
    worker = start_worker(WORKER_APP, concurrency=1, env=env)
    tag = site.tag()
    result = site.task("t.wait").delay(tag)
    eventually(lambda: "began 1" in site.facts(tag))

    cable.cut()
    site.book.note(tag, "go 1")
    worker.wait_log("lease.store.unavailable")
    assert site.job(result.id)["state"] == "running"
    cable.heal()

    assert result.get(timeout=10) == "by 1"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.states(result.id) == ["completed"]
    assert (job["accepted_attempt"], job["lost_count"]) == (1, 0)


def test_an_outcome_that_the_store_never_heard_is_not_told_to_celery(
    make_site: Callable[..., Site],
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    if isinstance(postgresql, External):
        pytest.skip("needs a port to put a proxy in front of")
    cable = start_proxy(postgresql.port)
    site = make_site(postgresql_url)
    env = site.worker_env()
    env["LEASE_TEST_STORE"] = cable.url(postgresql_url)
    cut_off = start_worker(WORKER_APP, concurrency=1, env=env)
    tag = site.tag()
    # No outage of the passes: a first pass, or a late one, would grant the lease an amnesty.
    site.run_pass()
    result = site.task("t.wait").apply_async((tag,), link=site.task("t.mark").si(tag))
    eventually(lambda: "began 1" in site.facts(tag))

    cable.cut()
    site.book.note(tag, "go 1")
    # Its lease of 3 s ends, and with it the runner's patience; another worker takes the job.
    site.app.control.cancel_consumer("celery", destination=[cut_off.nodename])
    site.book.note(tag, "go 2")
    other = start_worker(WORKER_APP, concurrency=1, env=site.worker_env())
    job = site.until(result.id, "succeeded", settled=True, passes=True)

    assert site.result(result.id)["result"] == "by 2"
    assert site.states(result.id) == ["expired", "completed"]
    assert (job["accepted_attempt"], job["lost_count"]) == (2, 1)
    eventually(lambda: site.facts(tag).count("mark 1") == 1)
    assert other.is_running
