"""Results and errors: what is stored, what is too much, and what is told again."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord

from celery_lease import JobInterrupted
from celery_lease.exceptions import PayloadTooLarge
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

# Celery 5.7 stores results by what redis-py 8 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

WORKER_APP = "tests.worker.apps.leased"


# --- what cannot be stored ----------------------------------------------------------------------


def test_a_result_that_cannot_be_serialised_is_a_failure(site: Site) -> None:
    # B118: accepted, such a job could never be told to Celery again.
    tag = site.tag()
    link = site.task("t.mark").si(tag)

    result = site.task("o.object").apply_async(link=link, link_error=site.task("t.errback").si(tag))

    with pytest.raises(Exception, match=r"result of task o\.object cannot be serialised"):
        result.get(timeout=10)
    job = site.until(result.id, "failed", settled=True)
    attempt = site.attempts(result.id)[0]
    assert (attempt["state"], attempt["failure_class"]) == ("failed", "invalid")
    assert (attempt["retryable"], job["accepted_attempt"]) == (False, 1)
    assert site.status(result.id) == "FAILURE"
    eventually(lambda: site.facts(tag) == ["errback"])


@pytest.mark.parametrize("how", ["task", "call"])
def test_a_result_that_nobody_asks_for_may_be_anything(site: Site, how: str) -> None:
    if how == "task":
        result = site.task("o.object_ignored").delay()
    else:
        result = site.task("o.object").apply_async(ignore_result=True)

    job = site.until(result.id, "succeeded", settled=True)
    assert (job["result"], site.result(result.id)) == (None, None)


def test_an_error_that_cannot_be_serialised_is_told_as_celery_does(site: Site) -> None:
    result = site.task("o.odd_error").delay()

    with pytest.raises(Exception, match=r"Odd|odd"):
        result.get(timeout=10)
    job = site.until(result.id, "failed", settled=True)
    assert job["error_type"].endswith("Odd")
    assert "odd" in job["error_message"]
    assert "odd_error" in site.attempts(result.id)[0]["traceback"]


def test_sizes_have_limits(
    make_site: Callable[..., Site], sqlite_url: str, start_worker: Callable[..., CeleryWorker]
) -> None:
    site = make_site(sqlite_url, lease_max_message_bytes=2000, lease_max_result_bytes=1000)
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    with pytest.raises(PayloadTooLarge, match=r"task o\.big has .* lease_max_message_bytes"):
        site.task("o.big").delay("x" * 2000)
    assert site.jobs() == []
    assert site.queued("celery") == []

    large = site.task("o.big").delay(1001)
    small = site.task("o.big").delay(900)

    with pytest.raises(Exception, match="lease_max_result_bytes allows 1000"):
        large.get(timeout=10)
    assert small.get(timeout=10) == "x" * 900
    job = site.until(large.id, "failed", settled=True)
    assert site.attempts(large.id)[0]["failure_class"] == "invalid"
    assert job["error_type"] == "celery_lease.exceptions.PayloadTooLarge"


def test_results_may_be_pickled(
    make_site: Callable[..., Site], sqlite_url: str, start_worker: Callable[..., CeleryWorker]
) -> None:
    site = make_site(sqlite_url, result_serializer="pickle", task_serializer="pickle")
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    good = site.task("t.add").delay({1}.__len__(), 2 + 3j)
    bad = site.task("o.act").delay(site.tag(), "error")

    assert good.get(timeout=10) == 3 + 3j
    with pytest.raises(ValueError, match="wrong"):
        bad.get(timeout=10)
    job = site.until(good.id, "succeeded", settled=True)
    assert job["result_type"] == "application/x-python-serialize"
    assert pickle.loads(bytes(job["result"])) == 3 + 3j  # noqa: S301 - our own worker's
    site.until(bad.id, "failed", settled=True)

    # Both are told again, by a worker: it alone may decode pickle.
    for job_id in (good.id, bad.id):
        site.forget(job_id)
        site.unsettle(job_id)
    site.run_pass()
    for job_id, state in ((good.id, "succeeded"), (bad.id, "failed")):
        site.until(job_id, state, settled=True)
        assert len(site.attempts(job_id)) == 1
    again = site.app.AsyncResult(good.id)
    assert again.get(timeout=10) == 3 + 3j


def test_an_error_that_only_pickle_can_keep_is_a_failure_all_the_same(
    make_site: Callable[..., Site], sqlite_url: str, start_worker: Callable[..., CeleryWorker]
) -> None:
    """Celery asks its own serializer whether the arguments can be kept; ours is always JSON."""
    site = make_site(sqlite_url, result_serializer="pickle", task_serializer="pickle")
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    result = site.task("o.set_error").delay()

    with pytest.raises(ValueError, match=r"\{1\}"):
        result.get(timeout=10)
    job = site.until(result.id, "failed", settled=True)
    assert job["error_type"] == "ValueError"
    assert json.loads(bytes(job["result"]))["exc_message"] == ["{1}"]
    assert site.states(result.id) == ["failed"]


# --- told again ---------------------------------------------------------------------------------


def test_a_success_that_celery_was_not_told_is_told_without_running_the_body(site: Site) -> None:
    tag = site.tag()
    link = site.task("t.mark").si(tag)
    work = chain(site.task("t.ids").si(), site.task("t.mark").si(tag))
    work.tasks[0].link(link)
    result = work.delay()
    assert result.get(timeout=10) == "marked"
    first = result.parent.id
    value = site.result(first)["result"]
    site.until(first, "succeeded", settled=True)
    eventually(lambda: site.facts(tag) == ["mark 1", "mark 1"])

    site.forget(first)
    site.unsettle(first)
    counts = site.run_pass()

    assert counts["replayed"] >= 1
    job = site.until(first, "succeeded", settled=True)
    assert site.status(first) == "SUCCESS"
    # The stored value: run again, the body would have given another token.
    assert site.result(first)["result"] == value == [first, first, 1, first]
    assert site.states(first) == ["completed"]
    assert job["fencing_token"] == 1
    # Link and next step were sent a second time, under the same ids: neither ran again.
    assert site.facts(tag) == ["mark 1", "mark 1"]


def test_a_failure_that_celery_was_not_told_is_told_with_its_error(site: Site) -> None:
    tag = site.tag()
    result = site.task("o.act").apply_async(
        (tag, "error"), link_error=site.task("t.errback").si(tag)
    )
    site.until(result.id, "failed", settled=True)
    eventually(lambda: "errback" in site.facts(tag))
    site.forget(result.id)
    site.unsettle(result.id)

    assert site.run_pass()["replayed"] >= 1

    site.until(result.id, "failed", settled=True)
    with pytest.raises(ValueError, match="wrong"):
        site.app.AsyncResult(result.id).get(timeout=10)
    assert site.states(result.id) == ["failed"]
    assert site.facts(tag) == ["token 1 from None", "errback"]


def test_a_chord_whose_member_died_after_its_commit_is_completed_by_the_replay(
    site: Site, shared_worker: CeleryWorker
) -> None:
    tag = site.tag()
    hold = site.tag()
    result = chord(
        [site.task("t.add").s(1, 1), site.task("t.wait").s(hold)], site.task("t.mark").si(tag)
    ).delay()
    members = [member.id for member in result.parent.results]
    site.until(members[0], "succeeded", settled=True)

    # The second member: its outcome is in the store, and Celery has not been told.
    eventually(lambda: "began 1" in site.facts(hold))
    site.accept_behind(members[1], "by 1")
    site.unsettle(members[1])
    assert site.run_pass()["replayed"] >= 1

    assert result.get(timeout=10) == "marked"
    site.book.note(hold, "go 1")
    site.until(members[1], "succeeded", settled=True)
    assert site.result(members[1])["result"] == "by 1"
    eventually(lambda: site.attempts(members[1])[0]["ended_at"] is not None)
    assert site.facts(tag) == ["mark 1"]


def test_a_fresh_outcome_is_left_to_the_runner_that_made_it(
    site: Site, shared_worker: CeleryWorker
) -> None:
    tag = site.tag()
    result = site.task("t.add").apply_async((1, 2), link=site.task("t.mark").si(tag))
    site.until(result.id, "succeeded", settled=True)
    site.change("UPDATE {job} SET settled_at = NULL WHERE id = :id", id=result.id)

    site.publish_again(site.messages(result.id)[0])

    shared_worker.wait_log(f"lease.claim.refused job_id={result.id}")
    assert site.run_pass().get("replayed", 0) == 0
    site.change("UPDATE {job} SET settled_at = finished_at WHERE id = :id", id=result.id)


# --- ends that no body returned -----------------------------------------------------------------


def interrupt(site: Site, publish: Callable[[str], Any]) -> tuple[str, Any]:
    """Have a job's only permitted runner vanish."""
    tag = site.tag()
    # After 15 s without one a pass would grant the lease an amnesty.
    site.run_pass()
    result = publish(tag)
    job_id = eventually(
        lambda: [
            j["id"] for j in site.jobs() if j["task"] == "o.always" and j["state"] == "running"
        ]
    )[0]
    eventually(lambda: "token 1" in site.facts(tag))
    site.change("UPDATE {attempt} SET lease_expires_at = claimed_at WHERE job_id = :id", id=job_id)
    site.run_pass()
    site.book.note(tag, "never")
    return tag, (job_id, result)


def test_an_interrupted_job_tells_its_caller_and_its_errback_once(site: Site) -> None:
    link_error = site.task("t.errback")

    tag, (job_id, result) = interrupt(
        site,
        lambda tag: site.task("o.always").apply_async((tag,), link_error=link_error.si(tag)),
    )

    with pytest.raises(JobInterrupted, match=rf"job {job_id} \(o\.always\)"):
        result.get(timeout=10)
    job = site.until(job_id, "interrupted", settled=True)
    assert site.states(job_id) == ["expired"]
    assert (job["lost_count"], job["accepted_attempt"]) == (1, None)
    eventually(lambda: "errback" in site.facts(tag))
    # The body ends only now, too late.
    eventually(lambda: site.attempts(job_id)[0]["late_outcome"] == "succeeded")
    site.run_pass()
    assert sorted(site.facts(tag)) == ["errback", "never", "token 1"]
    assert site.status(job_id) == "FAILURE"


def test_an_interrupted_member_fails_its_chord_once(site: Site) -> None:
    link_error = site.task("t.errback")

    def publish(tag: str) -> Any:
        body = site.task("t.mark").si(tag).on_error(link_error.si(tag))
        return chord([site.task("t.add").s(1, 1), site.task("o.always").s(tag)], body).delay()

    tag, (job_id, result) = interrupt(site, publish)

    with pytest.raises(Exception, match=r"JobInterrupted|interrupted|max_attempts"):
        result.get(timeout=10)
    site.until(job_id, "interrupted", settled=True)
    eventually(lambda: "errback" in site.facts(tag))
    site.run_pass()
    assert "mark 1" not in site.facts(tag)
    assert site.facts(tag).count("errback") == 1


def test_a_pickled_message_is_replayed_to_a_worker_for_its_end(site: Site) -> None:
    link_error = site.task("t.errback")

    tag, (job_id, result) = interrupt(
        site,
        lambda tag: site.task("o.always").apply_async(
            (tag,), serializer="pickle", link_error=link_error.si(tag)
        ),
    )

    with pytest.raises(JobInterrupted):
        result.get(timeout=10)
    job = site.until(job_id, "interrupted", settled=True)
    assert (job["fencing_token"], site.states(job_id)) == (1, ["expired"])
    assert site.status(job_id) == "FAILURE"
    eventually(lambda: "errback" in site.facts(tag))
    assert site.facts(tag).count("token 1") == 1


def test_a_cancelled_job_is_revoked_in_celery(site: Site) -> None:
    from celery_lease.extension import extension_of
    from celery_lease.store import transitions

    tag = site.tag()
    result = site.task("t.mark").apply_async((tag,), queue="nobody")

    transitions.cancel(extension_of(site.app).store, result.id)
    site.run_pass()

    assert site.job(result.id)["settled_at"] is not None
    assert site.status(result.id) == "REVOKED"
    assert json.loads(site.messages(result.id)[0]["headers"])["id"] == result.id
    site.drop("nobody")
