"""A retry is a new attempt of the same job; a replacement goes on with it."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from celery import chain, chord, group

from celery_lease.backoff import UNCOUNTED_ENDS
from celery_lease.extension import extension_of
from celery_lease.store import transitions
from tests.store.builders import claimed, parting
from tests.support.waiting import eventually, never
from tests.worker.stealing import after_the_stale_one, steal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site


def test_a_retry_is_another_attempt_of_the_same_job(site: Site) -> None:
    tag = site.tag()

    result = site.task("r.retry").delay(tag, 2)

    assert result.get(timeout=10) == "done 2"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["try 0 token 1", "try 1 token 2", "try 2 token 3"]
    assert site.states(result.id) == ["retried", "retried", "completed"]
    assert (job["message_version"], job["accepted_attempt"], job["lost_count"]) == (3, 3, 0)
    assert [m["version"] for m in site.messages(result.id)] == [1, 2, 3]
    first = site.attempts(result.id)[0]
    assert (first["error_type"], first["error_message"]) == ("ValueError", "again")
    assert first["ended_at"] is not None


def test_the_attempt_is_closed_before_its_retry_message_leaves(site: Site) -> None:
    # Published first, the message would be refused by the lease that is still held.
    tags = [site.tag() for _ in range(12)]

    results = [site.task("r.retry").delay(tag, 3) for tag in tags]

    assert [r.get(timeout=20) for r in results] == ["done 3"] * 12
    for result in results:
        assert site.states(result.id) == ["retried"] * 3 + ["completed"]
        for before, after in pairwise(site.attempts(result.id)):
            assert before["ended_at"] <= after["claimed_at"]


def test_the_end_of_the_next_attempt_stands_over_its_retry(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    # Sent before Celery has stored the RETRY, the message would be done by another child by then.
    # A FAILURE: over a SUCCESS these result backends write nothing.
    site = make_site(sqlite_url)
    start_worker("tests.worker.apps.slow_retry", concurrency=2, env=site.worker_env())

    result = site.task("r.retry").delay(site.tag(), 99)

    site.until(result.id, "failed", settled=True)
    assert site.states(result.id) == ["retried"] * 3 + ["failed"]
    never(lambda: site.status(result.id) != "FAILURE", during=1.5)


def test_a_retry_takes_its_arguments_by_position(site: Site) -> None:
    result = site.task("r.positional").delay(site.tag())

    assert result.get(timeout=10) == "done"
    first = site.attempts(result.id)[0]
    assert (first["error_type"], first["error_message"]) == ("ValueError", "again")


def test_a_countdown_keeps_the_job_waiting(site: Site) -> None:
    tag = site.tag()

    result = site.task("r.retry").delay(tag, 1, 1.5)

    waiting = site.until(result.id, "retry_wait")
    ended = site.attempts(result.id)[0]["ended_at"]
    assert 1 < (waiting["available_at"] - ended).total_seconds() < 2
    eventually(lambda: site.status(result.id) == "RETRY")
    assert result.get(timeout=10) == "done 1"
    first, second = site.attempts(result.id)
    assert (second["claimed_at"] - first["ended_at"]).total_seconds() > 1


def test_more_retries_than_max_retries_fail_with_the_error(site: Site) -> None:
    tag = site.tag()
    link_error = site.task("t.errback").si(tag)

    result = site.task("r.retry").apply_async((tag, 99), link_error=link_error)

    with pytest.raises(ValueError, match="again"):
        result.get(timeout=10)
    job = site.until(result.id, "failed", settled=True)
    assert site.states(result.id) == ["retried"] * 3 + ["failed"]
    assert (job["failure_count"], job["error_type"]) == (4, "ValueError")
    eventually(lambda: site.facts(tag).count("errback") == 1)


def test_autoretry_for_retries_until_it_works(site: Site) -> None:
    tag = site.tag()

    result = site.task("r.auto").delay(tag, 2)

    assert result.get(timeout=10) == "done"
    site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["try 0", "try 1", "try 2"]
    assert site.states(result.id) == ["retried", "retried", "completed"]


def test_autoretry_for_gives_up_after_max_retries(site: Site) -> None:
    tag = site.tag()

    result = site.task("r.auto").delay(tag, 99)

    with pytest.raises(Exception, match="not yet"):
        result.get(timeout=10)
    job = site.until(result.id, "failed", settled=True)
    assert site.states(result.id) == ["retried", "retried", "failed"]
    assert job["error_message"] == "not yet"
    assert site.status(result.id) == "FAILURE"


def test_what_a_body_returns_after_retry_without_throw_is_not_the_result(site: Site) -> None:
    tag = site.tag()
    link = site.task("t.mark").si(tag)

    result = site.task("r.no_throw").apply_async((tag,), link=link)

    assert result.get(timeout=10) == "of the second"
    job = site.until(result.id, "succeeded", settled=True)
    assert json.loads(bytes(job["result"])) == "of the second"
    assert site.states(result.id) == ["retried", "completed"]
    eventually(lambda: site.facts(tag) == ["try 0", "try 1", "mark 1"])


def test_an_error_after_a_swallowed_retry_changes_nothing(site: Site) -> None:
    tag = site.tag()
    link_error = site.task("t.errback").si(tag)

    result = site.task("r.swallowed").apply_async((tag,), link_error=link_error)

    assert result.get(timeout=10) == "done"
    site.until(result.id, "succeeded", settled=True)
    assert site.states(result.id) == ["retried", "completed"]
    assert site.facts(tag) == ["try 0", "try 1"]


@pytest.mark.parametrize("how", ["seconds", "aware", "naive"])
def test_a_bare_retry_waits_until_its_when(site: Site, how: str) -> None:
    result = site.task("r.gives_back").delay(1, how)

    job = site.until(result.id, "retry_wait")
    wait = job["available_at"] - site.attempts(result.id)[0]["claimed_at"]
    assert timedelta(minutes=55) < wait < timedelta(minutes=65)
    assert site.ends(result.id) == [("released", "retry")]


@pytest.mark.parametrize("how", ["retry", "past", "odd"])
def test_without_a_when_that_is_to_come_it_waits_all_the_same(site: Site, how: str) -> None:
    result = site.task("r.gives_back").delay(1, how)

    site.until(result.id, "succeeded", settled=True, passes=True)
    first, second = site.attempts(result.id)
    assert second["claimed_at"] - first["ended_at"] > timedelta(seconds=0.9)
    assert (first["state"], first["stop_reason"]) == ("released", "retry")


@pytest.mark.parametrize(
    ("how", "before", "end"),
    [
        ("retry", "retry", ("released", "retry")),
        ("retry", "hand-over", ("released", "retry")),
        ("rejected", "retry", ("released", "rejected")),
        ("rejected", "rejected", ("lost", "rejected, too often")),
    ],
)
def test_a_bare_retry_is_never_a_lost_runner_and_a_rejection_is_one_in_the_end(
    site: Site, how: str, before: str, end: tuple[str, str]
) -> None:
    store = extension_of(site.app).store
    result = site.task("r.gives_back").apply_async((UNCOUNTED_ENDS + 1, how), queue="nowhere")
    for _ in range(UNCOUNTED_ENDS):
        transitions.release(store, claimed(store, result.id), parting(reason=before))
    message = site.messages(result.id)[0]

    site.publish_again({**message, "routing_key": "celery"})

    site.until_attempts(result.id, UNCOUNTED_ENDS + 1)
    eventually(lambda: site.ends(result.id)[-1] == end)
    assert site.job(result.id)["lost_count"] == int(end[0] == "lost")


def test_a_bare_retry_gives_the_job_back(site: Site) -> None:
    tag = site.tag()

    result = site.task("r.bare").delay(tag)

    job = site.until(result.id, "succeeded", settled=True, passes=True)
    assert site.ends(result.id) == [("released", "retry"), ("completed", None)]
    assert (job["lost_count"], job["failure_count"]) == (0, 0)


def test_a_chain_goes_on_after_a_retry_with_each_step_once(site: Site) -> None:
    # B068
    tag = site.tag()

    result = chain(site.task("r.retry").si(tag, 1), site.task("t.mark").si(tag)).delay()

    assert result.get(timeout=10) == "marked"
    assert site.facts(tag) == ["try 0 token 1", "try 1 token 2", "mark 1"]
    assert site.states(result.parent.id) == ["retried", "completed"]
    assert site.states(result.id) == ["completed"]


def test_a_chord_waits_for_members_that_retry(site: Site) -> None:
    # B064
    tags = [site.tag() for _ in range(3)]
    body = site.tag()

    result = chord(
        [site.task("r.retry").si(tag, 2) for tag in tags], site.task("t.mark").si(body)
    ).delay()

    assert result.get(timeout=15) == "marked"
    assert site.facts(body) == ["mark 1"]
    for member in result.parent.results:
        assert site.states(member.id) == ["retried", "retried", "completed"]


def test_a_retry_whose_lease_was_lost_publishes_nothing(
    site: Site, shared_worker: CeleryWorker
) -> None:
    tag = site.tag()
    result = site.task("o.act").delay(tag, "late retry")
    steal(site, result.id, tag)

    assert result.get(timeout=10) == "done"
    site.until(result.id, "succeeded", settled=True)
    first, second = after_the_stale_one(site, result.id)
    assert (first["state"], first["late_outcome"]) == ("lost", "retried")
    assert second["state"] == "completed"
    assert [m["version"] for m in site.messages(result.id)] == [1]


# --- replace ----------------------------------------------------------------------------------


def test_a_leased_replacement_goes_on_under_the_same_job(site: Site) -> None:
    tag = site.tag()

    result = site.task("p.replace").delay(tag, "leased")

    assert result.get(timeout=10) == "marked"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["replace by leased token 1", "mark 2"]
    assert site.states(result.id) == ["replaced", "completed"]
    assert (job["task"], job["message_version"]) == ("t.mark", 2)
    assert (job["failure_count"], job["lost_count"]) == (0, 0)


def test_a_leased_replacement_takes_the_rest_of_its_chain_with_it(site: Site) -> None:
    """Celery makes one chain of the two: its first step has the job's own id (B066)."""
    tag, after = site.tag(), site.tag()

    result = chain(site.task("p.replace").si(tag, "leased"), site.task("t.mark").si(after)).delay()

    assert result.get(timeout=15) == result.parent.get(timeout=1) == "marked"
    site.until(result.parent.id, "succeeded", settled=True)
    assert site.states(result.parent.id) == ["replaced", "completed"]
    assert site.facts(tag) == ["replace by leased token 1", "mark 2"]
    assert site.facts(after) == ["mark 1"]


def test_a_replacement_may_replace_itself(site: Site) -> None:
    tag = site.tag()

    result = site.task("p.replace").delay(tag, "again")

    assert result.get(timeout=10) == "marked"
    site.until(result.id, "succeeded", settled=True)
    assert site.states(result.id) == ["replaced", "replaced", "completed"]


def test_a_replacement_without_a_lease_ends_the_job(site: Site) -> None:
    tag = site.tag()

    result = site.task("p.replace").delay(tag, "unleased")

    assert result.get(timeout=10) == "plain"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["replace by unleased token 1", "plain"]
    assert site.states(result.id) == ["replaced"]
    assert job["state_reason"] == "replaced"


def test_an_unleased_task_may_be_replaced_by_a_leased_one(site: Site) -> None:
    tag = site.tag()

    result = site.task("plain.replaced").delay(tag)

    assert result.get(timeout=10) == "marked"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["plain", "mark 1"]
    assert (site.states(result.id), job["task"]) == (["completed"], "t.mark")


def test_the_tail_of_a_replacing_chain_reopens_the_job(site: Site) -> None:
    # B066
    tag = site.tag()
    after = site.tag()

    result = chain(site.task("p.replace").si(tag, "chain"), site.task("t.mark").si(after)).delay()

    assert result.get(timeout=10) == "marked"
    job = site.until(result.parent.id, "succeeded", settled=True)
    assert site.facts(tag) == ["replace by chain token 1", "mark 2"]
    assert site.facts(after) == ["mark 1"]
    assert site.states(result.parent.id) == ["replaced", "completed"]
    assert (job["task"], job["state_reason"]) == ("t.mark", None)


def test_a_tail_that_is_faster_than_the_end_of_the_replaced_attempt_waits_for_it(
    site: Site,
) -> None:
    # The canvas is published first, so that it is not lost; its last task came to a job that
    # was still running, and was dropped as a duplicate.
    tag = site.tag()
    table = site.tables.job
    result = site.task("p.replace_when").delay(tag, "chain")
    eventually(lambda: "began" in site.facts(tag))
    before = site.ids()

    with site.connection() as other:
        other.execute(sa.select(table).where(table.c.id == result.id).with_for_update())
        site.book.note(tag, "replace")
        [step] = eventually(lambda: site.ids() - before)
        site.until(step, "succeeded")
        # The step's child publishes the tail now, or waits to.
        never(lambda: site.job(result.id)["state"] != "running", during=0.3)
        other.rollback()

    assert result.get(timeout=10) == "marked"
    site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["began", "replace", "mark 2"]
    assert site.states(result.id) == ["replaced", "completed"]


@pytest.mark.parametrize(("by", "value"), [("group", [2, 4]), ("chord", 6)])
def test_a_replacing_canvas_gives_its_result_to_the_job(site: Site, by: str, value: Any) -> None:
    tag = site.tag()
    after = site.tag()

    result = chain(site.task("p.replace").si(tag, by), site.task("t.mark").si(after)).delay()

    assert result.get(timeout=15) == "marked"
    assert site.facts(after) == ["mark 1"]
    assert result.parent.get(timeout=10) == value
    site.until(result.parent.id, "succeeded", settled=True)
    assert site.states(result.parent.id)[0] == "replaced"
    assert site.facts(tag) == [f"replace by {by} token 1"]


def test_members_of_a_group_may_replace_themselves(site: Site) -> None:
    # B066
    tags = [site.tag() for _ in range(2)]
    after = site.tag()

    result = chord(
        [site.task("p.replace").si(tag, "chain") for tag in tags], site.task("t.mark").si(after)
    ).delay()

    assert result.get(timeout=15) == "marked"
    assert site.facts(after) == ["mark 1"]
    for tag in tags:
        assert site.facts(tag) == ["replace by chain token 1", "mark 2"]


def test_a_member_may_add_to_its_chord(site: Site) -> None:
    result = chord([site.task("p.grow").si()], site.task("t.total").s()).delay()

    assert result.get(timeout=10) == 42
    assert site.states(result.id) == ["completed"]


def test_a_group_of_retrying_members_gives_all_results(site: Site) -> None:
    tags = [site.tag() for _ in range(3)]

    result = group(site.task("r.retry").s(tag, 1) for tag in tags).delay()

    assert result.get(timeout=10) == ["done 1"] * 3


def test_the_message_of_a_later_retry_says_which_dispatch_of_its_job_it_is(site: Site) -> None:
    """By it a claim is evidence of its queue, and what a dead child had is sent at once."""
    sent = site.task("r.retry").delay(site.tag(), 1, 5.0, queue="unserved")

    [message] = eventually(lambda: site.queued("unserved"))

    assert site.job(sent.id)["dispatch_count"] == 2
    assert message["headers"]["lease_dispatch"] == f"{sent.id}:2:2"
    site.drop("unserved")
