"""What the reaper sends again is the message that was lost, byte for byte (B071, B072)."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from celery import chord, group
from kombu import Exchange, Queue

from tests.support.waiting import eventually
from tests.worker.site import Site, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.workers import CeleryWorker

# Celery 5.7 stores results by what redis-py 8 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

#: No worker consumes it.
LOST = "lost"


@pytest.fixture(scope="module")
def lonely_site(shared_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site without a worker: what is published stays where it can be looked at."""
    path: Path = tmp_path_factory.mktemp("redispatch") / "lease.db"
    # A database of Redis of its own is not needed: no worker consumes these queues.
    queues = [
        Queue(LOST, Exchange(LOST), routing_key=LOST),
        Queue("routed", Exchange("elsewhere", type="topic"), routing_key="a.b"),
    ]
    with open_site(shared_site.redis_url, f"sqlite:///{path}", backend=shared_site.redis_url) as s:
        s.app.conf.task_queues = queues
        # A topic exchange of Redis drops what no queue is bound for.
        with s.app.connection_for_write() as connection:
            queues[1](connection).declare()
        yield s


def lose_and_send_again(site: Site, publish: Callable[[], Any], queue: str = LOST) -> Any:
    """Publish, lose the messages, let the reaper send them again; return both, by job id."""
    site.drop(queue)
    site.change("DELETE FROM {job}")
    publish()
    first = {m["headers"]["id"]: m for m in site.queued(queue)}
    assert first
    site.drop(queue)
    assert site.change("UPDATE {job} SET dispatched_at = NULL WHERE state = 'queued'") >= 1
    counts = site.run_pass()
    second = {m["headers"]["id"]: m for m in site.queued(queue)}
    site.drop(queue)
    assert counts["dispatched"] == len(first)
    return first, second


def without_what_may_differ(message: dict[str, Any]) -> dict[str, Any]:
    headers = {k: v for k, v in message["headers"].items() if k != "lease_dispatch"}
    properties = {
        k: v for k, v in message["properties"].items() if k not in ("delivery_tag", "expiration")
    }
    return {**message, "headers": headers, "properties": properties}


def soon() -> datetime:
    return datetime.now(timezone.utc) + timedelta(hours=1)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        pytest.param("t.add", (1, 2), {}, id="json"),
        pytest.param("t.add", (1, 2), {"compression": "zlib"}, id="zlib"),
        pytest.param("t.add", ({1, 2}, object), {"serializer": "pickle"}, id="pickle"),
        pytest.param(
            "t.add", ({1}, 2), {"serializer": "pickle", "compression": "bzip2"}, id="pickle-bzip2"
        ),
        pytest.param("t.add", ("ü", "\N{SNOWMAN}"), {"serializer": "yaml"}, id="yaml"),
        pytest.param("t.add", (1, 2), {"priority": 7}, id="priority"),
        pytest.param("t.add", (1, 2), {"expires": 600}, id="expires"),
        pytest.param("t.add", (1, 2), {"expires": soon()}, id="expires-at"),
        pytest.param(
            "t.add", (1, 2), {"headers": {"tenant": "7", "deep": {"a": [1]}}}, id="headers"
        ),
        pytest.param("t.add", (1, 2), {"time_limit": 60, "soft_time_limit": 50}, id="time-limits"),
        pytest.param("t.add", (1, 2), {"ignore_result": True, "shadow": "other name"}, id="shadow"),
        pytest.param("t.add", (1, 2), {"delivery_mode": 1}, id="transient"),
        pytest.param(
            "t.add", (1, 2), {"reply_to": "someone", "correlation_id": "c1"}, id="reply-to"
        ),
        pytest.param("t.add", (1, 2), {"argsrepr": "(secret)", "kwargsrepr": "{}"}, id="reprs"),
    ],
)
def test_a_lost_message_is_sent_again_as_it_was(
    lonely_site: Site, name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    task = lonely_site.task(name)

    first, second = lose_and_send_again(
        lonely_site, lambda: task.apply_async(args, queue=LOST, **options)
    )

    [before], [after] = first.values(), second.values()
    assert without_what_may_differ(after) == without_what_may_differ(before)
    job_id = before["headers"]["id"]
    assert before["headers"]["lease_dispatch"] == f"{job_id}:1:1"
    assert after["headers"]["lease_dispatch"] == f"{job_id}:1:2"
    if "expires" in options:
        left, given = (int(m["properties"]["expiration"]) for m in (after, before))
        assert 0 < left <= given
    else:
        assert "expiration" not in after["properties"]


def test_it_goes_to_its_exchange_and_routing_key(lonely_site: Site) -> None:
    task = lonely_site.task("t.add")

    first, second = lose_and_send_again(
        lonely_site,
        lambda: task.apply_async((1, 2), exchange="elsewhere", routing_key="a.b"),
        queue="routed",
    )

    [before], [after] = first.values(), second.values()
    assert before["properties"]["delivery_info"]["exchange"] == "elsewhere"
    assert without_what_may_differ(after) == without_what_may_differ(before)


def test_it_keeps_links_errbacks_and_the_rest_of_the_chain(lonely_site: Site) -> None:
    add, mark = lonely_site.task("t.add"), lonely_site.task("t.mark")
    work = add.s(1, 2).on_error(lonely_site.task("t.errback").si("tag"))
    work.link(mark.si("tag"))

    first, second = lose_and_send_again(
        lonely_site, lambda: (work | add.s(3) | mark.si("tag")).apply_async(queue=LOST)
    )

    [before], [after] = first.values(), second.values()
    assert without_what_may_differ(after) == without_what_may_differ(before)


def test_it_keeps_the_parts_of_a_chord_and_of_a_group(lonely_site: Site) -> None:
    add, total = lonely_site.task("t.add"), lonely_site.task("t.total")
    header = [add.s(n, n).set(queue=LOST) for n in range(3)]

    for canvas in (chord(header, total.s()), group(header)):
        first, second = lose_and_send_again(lonely_site, canvas.delay)

        assert len(first) == 3
        assert first.keys() == second.keys()
        for job_id, before in first.items():
            assert without_what_may_differ(second[job_id]) == without_what_may_differ(before)
            assert before["headers"]["group"]


def test_it_keeps_stamps(lonely_site: Site) -> None:
    work = lonely_site.task("t.add").s(1, 2)
    work.stamp(team="blue")

    first, second = lose_and_send_again(lonely_site, lambda: work.apply_async(queue=LOST))

    [before], [after] = first.values(), second.values()
    assert before["headers"]["stamps"] == {"team": "blue"}
    assert without_what_may_differ(after) == without_what_may_differ(before)


def test_what_has_expired_meanwhile_is_cancelled_and_not_sent(lonely_site: Site) -> None:
    result = lonely_site.task("t.add").apply_async((1, 2), queue=LOST, expires=60)
    lonely_site.drop(LOST)
    lonely_site.change("UPDATE {job} SET dispatched_at = NULL, expires_at = created_at")

    job = lonely_site.until(result.id, "cancelled", settled=True, passes=True)

    assert lonely_site.queued(LOST) == []
    assert (job["fencing_token"], job["lost_count"]) == (0, 0)
    assert lonely_site.status(result.id) == "REVOKED"


def test_headers_and_stamps_are_there_on_every_attempt(
    site: Site, shared_worker: CeleryWorker
) -> None:
    # B072: lost once, sent again by the reaper, then retried twice.
    tag = site.tag()
    work = site.task("t.headers").s(tag, 2)
    work.stamp(team="blue")
    result = work.apply_async(queue=LOST + tag, headers={"tenant": "7"}, priority=3)
    site.drop(LOST + tag)
    site.change("UPDATE {job} SET dispatched_at = NULL WHERE id = :id", id=result.id)
    site.run_pass()

    site.app.control.add_consumer(LOST + tag, destination=[shared_worker.nodename])
    try:
        job = site.until(result.id, "succeeded", settled=True)
    finally:
        site.app.control.cancel_consumer(LOST + tag, destination=[shared_worker.nodename])

    assert site.facts(tag) == ["tenant=7 stamps=['team']"] * 3
    assert site.states(result.id) == ["retried", "retried", "completed"]
    assert (job["queue"], job["priority"], job["message_version"]) == (LOST + tag, 3, 3)
    assert job["lost_count"] == 0
    for number, message in enumerate(site.messages(result.id), start=1):
        headers = json.loads(message["headers"])
        assert (headers["tenant"], headers["lease_message"]) == ("7", number)


def test_a_lost_retry_message_is_sent_again(site: Site) -> None:
    # B073
    tag = site.tag()
    result = site.task("r.retry").delay(tag, 1, 50)
    site.until(result.id, "retry_wait")
    eventually(lambda: site.status(result.id) == "RETRY")

    # Its message waits in the worker for 50 s; due now, the reaper sends another.
    site.change(
        "UPDATE {job} SET available_at = created_at, dispatched_at = NULL WHERE id = :id",
        id=result.id,
    )
    message = site.messages(result.id)[-1]
    assert json.loads(message["headers"])["eta"]
    site.run_pass()

    # The second message says nothing of the 50 s: it is due by the store's clock.
    job = site.until(result.id, "succeeded", settled=True)
    assert (job["dispatch_count"], job["message_version"]) == (3, 2)
    assert site.states(result.id) == ["retried", "completed"]
