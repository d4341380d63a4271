"""Every way to publish is recorded before it is sent, and claimed under its record."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import kombu
import pytest
from celery import Celery, chain, chord, group

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import Beat, CeleryWorker
    from tests.worker.site import Site


def assert_done(site: Site, job_id: str, *, result: Any, version: int = 1) -> dict[str, Any]:
    """Both books say the same: the job's, and Celery's."""
    job = site.until(job_id, "succeeded", settled=True)
    attempts = site.attempts(job_id)
    assert [a["state"] for a in attempts] == ["completed"] * len(attempts)
    assert job["accepted_attempt"] == attempts[-1]["fencing_token"] == job["fencing_token"]
    assert job["lost_count"] == 0
    stored = None if job["result"] is None else json.loads(bytes(job["result"]))
    assert stored == result
    assert site.status(job_id) == "SUCCESS"
    assert site.result(job_id)["result"] == result
    headers = json.loads(site.messages(job_id)[-1]["headers"])
    assert headers["lease_message"] == version
    assert headers["lease_recorded"] is True
    return job


@pytest.mark.parametrize(
    "publish",
    [
        pytest.param(lambda add: add.delay(2, 3), id="delay"),
        pytest.param(lambda add: add.apply_async((2, 3)), id="apply_async"),
        pytest.param(lambda add: add.s(2, 3).apply_async(), id="signature"),
        pytest.param(lambda add: add.s(3).clone(args=(2,)).delay(), id="partial"),
        pytest.param(lambda add: add.app.signature("t.add", (2, 3)).delay(), id="by-name"),
        pytest.param(lambda add: add.app.send_task("t.add", (2, 3)), id="send_task"),
    ],
)
def test_a_call_is_recorded_and_its_result_accepted(
    site: Site, publish: Callable[[Any], Any]
) -> None:
    result = publish(site.task("t.add"))

    job = site.job(result.id)
    assert job["task"] == "t.add"
    assert job["submitter"]
    assert result.get(timeout=10) == 5
    assert_done(site, result.id, result=5)


KINDS = ("plain.mark", "t.mark")
#: All that ``kombu.Producer.publish`` takes (5.5 to 5.7), and what else Celery makes a message of.
OPTIONS: list[dict[str, Any]] = [
    {"routing_key": "celery"},
    {"exchange": kombu.Exchange("celery"), "routing_key": "celery"},
    {"delivery_mode": 1},
    {"delivery_mode": "transient"},
    {"mandatory": True},
    {"immediate": False},
    {"priority": 5},
    {"priority": "5"},
    {"priority": 5.0},
    {"content_encoding": "utf-8"},
    {"content_encoding": "latin-1", "serializer": "pickle"},
    {"serializer": "pickle"},
    {"headers": {"tenant": "7"}},
    {"compression": "gzip"},
    {"retry": False},
    {"retry_policy": {"max_retries": 1}},
    {"declare": []},
    {"expiration": 60},
    {"timeout": 3, "confirm_timeout": 3},
    {"user_id": "me", "message_id": "x", "app_id": "z"},
    {"root_id": 5},
    {"parent_id": 5},
    {"group_id": 7},
    {"reply_to": "x"},
    {"expires": 60},
    {"countdown": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_call_takes_what_a_plain_one_takes(site: Site, options: dict[str, Any]) -> None:
    calls = [site.task(name).apply_async((site.tag(),), **options) for name in KINDS]

    assert [call.get(timeout=10) for call in calls] == ["plain", "marked"]
    job = site.until(calls[1].id, "succeeded", settled=True)
    assert (job["fencing_token"], job["priority"]) == (1, 5 if "priority" in options else None)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{"body": "x"}, {"content_type": "application/json"}], ids=str)
def test_a_call_refuses_what_a_plain_one_refuses(
    site: Site, options: dict[str, Any], name: str
) -> None:
    before = site.ids()

    with pytest.raises(TypeError):
        site.task(name).apply_async((site.tag(),), **options)
    assert site.ids() == before


def test_the_record_is_there_before_the_message(
    make_site: Any, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(sqlite_url)
    seen: list[Any] = []
    publish = kombu.Producer.publish

    def looking(self: Any, body: Any, **options: Any) -> Any:
        seen.append((site.job_or_none(options["headers"]["id"]), site.queued("celery")))
        return publish(self, body, **options)

    monkeypatch.setattr(kombu.Producer, "publish", looking)
    result = site.task("t.add").delay(1, 2)

    [(job, queued)] = seen
    assert job is not None
    assert (job["id"], job["state"], job["fencing_token"]) == (result.id, "queued", 0)
    assert queued == []
    assert [m["headers"]["id"] for m in site.queued("celery")] == [result.id]


def test_each_step_of_a_chain_is_a_job_of_its_own(site: Site) -> None:
    add = site.task("t.add")

    result = chain(add.s(1, 2), add.s(3), add.s(4)).delay()

    assert result.get(timeout=10) == 10
    first = result.parent.parent.id
    for job_id, value in ((first, 3), (result.parent.id, 6), (result.id, 10)):
        job = assert_done(site, job_id, result=value)
        assert job["root_id"] == first
    assert site.job(result.id)["parent_id"] == result.parent.id


def test_each_member_of_a_group_is_a_job(site: Site) -> None:
    result = group(site.task("t.add").s(n, n) for n in range(5)).delay()

    assert result.get(timeout=10) == [0, 2, 4, 6, 8]
    for n, member in enumerate(result.results):
        assert assert_done(site, member.id, result=2 * n)["group_id"] == result.id


def test_a_chord_runs_its_body_once_with_all_results(site: Site) -> None:
    add, total = site.task("t.add"), site.task("t.total")

    result = chord([add.s(n, n) for n in range(4)], total.s()).delay()

    assert result.get(timeout=10) == 12
    assert_done(site, result.id, result=12)
    assert len(site.attempts(result.id)) == 1
    for n, member in enumerate(result.parent.results):
        assert_done(site, member.id, result=2 * n)


def test_nested_canvas_counts_the_same_as_without_leases(site: Site) -> None:
    # B069
    add, total = site.task("t.add"), site.task("t.total")
    before = site.ids()
    inner = chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s())

    result = chord([inner, inner.clone(), add.s(10, 10)], total.s()).delay()

    assert result.get(timeout=15) == 34
    assert len(site.attempts(result.id)) == 1
    family = [job for job in site.jobs() if job["id"] not in before]
    # 2 x (1 + 2 + 1), the third member, the body.
    assert len(family) == 10
    assert {job["state"] for job in family} == {"succeeded"}
    assert {job["fencing_token"] for job in family} == {1}


def test_links_and_errbacks_are_jobs_with_ids_known_at_publish(site: Site) -> None:
    tag = site.tag()
    mark, errback = site.task("t.mark"), site.task("t.errback")

    good = site.task("t.add").apply_async((1, 2), link=mark.si(tag), link_error=errback.si(tag))
    bad = site.task("o.act").apply_async((tag, "error"), link_error=errback.si(tag))

    good.get(timeout=10)
    with pytest.raises(ValueError, match="wrong"):
        bad.get(timeout=10)
    eventually(lambda: sorted(site.facts(tag)) == ["errback", "mark 1", "token 1 from None"])
    for parent, kind in ((good, "callbacks"), (bad, "errbacks")):
        body = json.loads(bytes(site.messages(parent.id)[0]["body"]))
        frozen = body[2][kind][0]["options"]["task_id"]
        assert site.until(frozen, "succeeded")["parent_id"] == parent.id
    assert site.until(bad.id, "failed", settled=True)["failure_count"] == 1


def test_one_signature_linked_to_two_tasks_runs_for_each(site: Site) -> None:
    tag = site.tag()
    link = site.task("t.mark").si(tag)

    for n in range(2):
        site.task("t.add").apply_async((n, n), link=link).get(timeout=10)

    eventually(lambda: site.facts(tag) == ["mark 1", "mark 1"])
    assert "task_id" not in link.options


def test_a_countdown_is_scheduled_and_starts_when_it_is_due(site: Site) -> None:
    result = site.task("t.add").apply_async((1, 2), countdown=1.5)

    assert site.job(result.id)["state"] == "scheduled"
    assert result.get(timeout=10) == 3
    assert_done(site, result.id, result=3)


def test_an_eta_is_kept_by_the_clock_of_the_store(site: Site) -> None:
    eta = datetime.now(timezone.utc) + timedelta(hours=3)

    result = site.task("t.add").apply_async((1, 2), eta=eta, queue="nobody")

    job = site.job(result.id)
    due = job["available_at"]
    due = due.replace(tzinfo=timezone.utc) if due.tzinfo is None else due
    assert (job["state"], job["queue"]) == ("scheduled", "nobody")
    assert abs((due - eta).total_seconds()) < 5


def test_a_beat_entry_is_recorded(
    make_site: Any,
    sqlite_url: str,
    start_beat: Callable[..., Beat],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url)
    schedule = {"mine": {"task": "t.add", "schedule": 1.0, "args": [4, 5]}}
    start_beat("tests.worker.apps.leased", env=site.worker_env(beat_schedule=schedule))

    job = eventually(lambda: [row for row in site.jobs() if row["task"] == "t.add"], timeout=15)[0]
    start_worker("tests.worker.apps.leased", pool="solo", env=site.worker_env())

    assert_done(site, job["id"], result=9)


def test_a_message_without_a_record_is_adopted_at_the_claim(site: Site) -> None:
    tag = site.tag()
    with Celery(
        "foreign", broker=site.broker, backend=site.backend, set_as_current=False
    ) as foreign:
        mark = foreign.signature("t.mark", (tag,), immutable=True)
        sent = foreign.send_task("t.add", (1, 2), link=mark, priority=4, headers={"tenant": "7"})

    job = site.until(sent.id, "succeeded", settled=True)
    assert site.result(sent.id)["result"] == 3
    eventually(lambda: site.facts(tag) == ["mark 1"])
    assert (job["fencing_token"], job["priority"], job["queue"]) == (1, 4, "celery")
    assert json.loads(site.messages(sent.id)[0]["headers"])["lease_recorded"] is True
    assert site.states(sent.id) == ["completed"]


def test_an_adopted_job_is_published_again_with_all_it_had(site: Site) -> None:
    with Celery(
        "foreign", broker=site.broker, backend=site.backend, set_as_current=False
    ) as foreign:
        sent = foreign.send_task(
            "t.headers", (tag := site.tag(), 1), headers={"tenant": "7"}, priority=4
        )

    site.until(sent.id, "succeeded", settled=True)
    assert site.facts(tag) == ["tenant=7 stamps=[]"] * 2
    assert site.states(sent.id) == ["retried", "completed"]


def test_a_recorded_message_whose_job_is_gone_is_refused(
    site: Site, shared_worker: CeleryWorker
) -> None:
    tag = site.tag()
    result = site.task("t.mark").apply_async((tag,), queue="other", countdown=1)
    assert site.change("DELETE FROM {job} WHERE id = :id", id=result.id) == 1

    shared_worker.wait_log(f"lease.claim.refused job_id={result.id}")

    assert "refusal=pruned" in shared_worker.log().split(f"refused job_id={result.id}")[1][:200]
    assert site.facts(tag) == []
    assert site.job_or_none(result.id) is None
    assert site.result(result.id) is None


def test_a_task_id_that_exists_is_the_existing_job(site: Site) -> None:
    tag = site.tag()
    first = site.task("t.mark").apply_async((tag,), task_id=f"mine-{tag}")
    first.get(timeout=10)
    site.until(first.id, "succeeded", settled=True)

    second = site.task("t.mark").apply_async((tag,), task_id=f"mine-{tag}")

    assert second.get(timeout=10) == "marked"
    assert len(site.messages(first.id)) == 1
    assert site.facts(tag) == ["mark 1"]
    assert site.states(first.id) == ["completed"]


def test_two_messages_of_one_job_are_one_attempt(site: Site, shared_worker: CeleryWorker) -> None:
    tag = site.tag()
    result = site.task("t.wait").delay(tag)
    eventually(lambda: "began 1" in site.facts(tag))

    site.publish_again(site.messages(result.id)[0])
    shared_worker.wait_log(f"lease.claim.refused job_id={result.id}")
    site.book.note(tag, "go 1")

    assert result.get(timeout=10) == "by 1"
    assert site.states(result.id) == ["completed"]
    assert site.facts(tag) == ["began 1", "go 1"]
