"""What follows a job and cannot be a message: its canvas is told so, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord, group

from celery_lease.exceptions import JobUnsendable
from celery_lease.extension import extension_of
from celery_lease.store import transitions
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

WORKER_APP = "tests.worker.apps.leased"


@pytest.fixture
def unsendable(site: Site, shared_worker: CeleryWorker) -> Any:
    """A call that cannot be recorded: no key can be made of its argument."""
    return site.task("k.report").si(5)


def refused(result: Any) -> str:
    """Return the text of the error that a caller gets."""
    with pytest.raises(JobUnsendable) as error:
        result.get(timeout=10)
    return str(error.value)


def test_a_step_that_cannot_be_recorded_fails_its_chain_once(site: Site, unsendable: Any) -> None:
    tag = site.tag()
    steps = chain(site.task("t.mark").si(tag), unsendable, site.task("t.mark").si(tag))

    last = steps.apply_async(link_error=site.task("t.errback").si(tag))

    step, first = last.parent, last.parent.parent
    assert first.get(timeout=10) == "marked"
    site.until(first.id, "succeeded", settled=True)
    job = site.until(step.id, "failed", settled=False)
    assert (job["fencing_token"], job["state_reason"]) == (0, "never sent")
    assert site.run_pass()
    assert "report-{report[id]}" in refused(step)
    site.until(step.id, "failed", settled=True)
    eventually(lambda: "errback" in site.facts(tag))
    # It is told: nobody sends or settles anything more.
    assert site.run_pass() == {}
    assert site.facts(tag) == ["mark 1", "errback"]
    assert site.job(first.id)["dispatch_count"] == 1


def test_it_is_not_resumed_since_it_has_no_arguments(site: Site, unsendable: Any) -> None:
    last = chain(site.task("t.mark").si(site.tag()), unsendable).delay()
    site.until(last.id, "failed")
    site.run_pass()
    site.until(last.id, "failed", settled=True)

    assert transitions.resume(extension_of(site.app).store, last.id, reason="test") == "failed"

    assert site.job(last.id)["state"] == "failed"


def test_a_member_that_cannot_be_recorded_fails_its_chord_once(site: Site, unsendable: Any) -> None:
    tag = site.tag()
    body = site.task("t.mark").si(tag)
    body.link_error(site.task("t.errback").si(tag))
    before = site.ids()

    result = chain(
        site.task("t.mark").si(tag), chord([unsendable, site.task("t.mark").si(tag)], body)
    ).apply_async()

    eventually(lambda: site.facts(tag).count("mark 1") == 2)
    jobs = [site.job(one) for one in site.ids() - before]
    (failed,) = (job["id"] for job in jobs if job["state_reason"] == "never sent")
    site.run_pass()
    site.until(failed, "failed", settled=True)
    eventually(lambda: site.status(result.id) == "FAILURE")
    eventually(lambda: "errback" in site.facts(tag))
    for one in site.ids() - before:
        site.until(one, site.job(one)["state"], settled=True)
    assert site.run_pass() == {}
    assert sorted(site.facts(tag)) == ["errback", "mark 1", "mark 1"]


def test_the_other_members_of_a_group_run(site: Site, unsendable: Any) -> None:
    tag = site.tag()
    canvas = chain(site.task("t.mark").si(tag), group(unsendable, site.task("t.mark").si(tag)))

    members = canvas.delay()

    assert members.results[1].get(timeout=10) == "marked"
    site.until(members.results[0].id, "failed")
    site.run_pass()
    assert "report-{report[id]}" in refused(members.results[0])
    assert site.facts(tag) == ["mark 1", "mark 1"]


def test_a_message_that_is_too_large_fails_its_chain_with_what_to_do(
    make_site: Any, sqlite_url: str, start_worker: Callable[..., CeleryWorker]
) -> None:
    site = make_site(sqlite_url, lease_max_message_bytes=2000)
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())

    last = chain(site.task("o.big").s(3000), site.task("t.add").s("y")).delay()

    assert len(last.parent.get(timeout=10)) >= 3000
    site.until(last.id, "failed")
    site.run_pass()
    assert "lease_max_message_bytes" in refused(last)
    site.until(last.parent.id, "succeeded", settled=True)


def test_a_body_that_submits_what_cannot_be_recorded_gets_the_error(
    site: Site, shared_worker: CeleryWorker
) -> None:
    """It is his own call, and not what follows him."""
    before = site.ids()

    result = site.task("k.submits_report").delay(site.tag())

    assert result.get(timeout=10) == "SettingError"
    assert site.ids() - before == {result.id}


def test_a_hook_that_submits_what_cannot_be_recorded_gets_the_error(
    site: Site, shared_worker: CeleryWorker
) -> None:
    """It comes after the end of the job, as what follows it does, and is a call all the same."""
    tag, before = site.tag(), site.ids()

    result = site.task("k.calls_when_done").delay(tag)

    site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["SettingError"]
    assert site.ids() - before == {result.id}
