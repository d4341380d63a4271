"""A message of another program that cannot be taken as it is ends its job, once."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_lease.adoption import adopted_job, unfit_jobs
from celery_lease.exceptions import JobUnfit
from celery_lease.extension import extension_of
from celery_lease.store import transitions
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.site import Site


@pytest.fixture
def foreign(site: Site) -> Iterator[Celery]:
    """An app of a program that knows the names of the tasks only."""
    with Celery("foreign", broker=site.broker, set_as_current=False) as foreign:
        yield foreign


def test_what_only_pickle_can_say_is_recorded_as_pickle(site: Site, foreign: Celery) -> None:
    sent = foreign.send_task("t.total", [{1, 2, 3}], serializer="pickle")

    assert site.app.AsyncResult(sent.id).get(timeout=10) == 6
    message = site.messages(sent.id)[0]
    assert message["content_type"] == "application/x-python-serialize"
    assert "lease_content_type" not in json.loads(message["headers"])
    assert pickle.loads(bytes(message["body"]))[0] == [{1, 2, 3}]  # noqa: S301  ours


def test_a_second_attempt_has_the_same_arguments(site: Site, foreign: Celery) -> None:
    tag = site.tag()
    sent = foreign.send_task("t.says_twice", (tag, {1: (2, 3)}), serializer="pickle")

    site.until(sent.id, "succeeded", settled=True)
    assert site.facts(tag) == ["{1: (2, 3)}"] * 2


@pytest.mark.parametrize(
    ("task", "argument", "key", "said"),
    [
        pytest.param("t.mark", "tag", 4711, "not int", id="a number"),
        pytest.param("t.mark", "tag", "", "not empty", id="empty"),
        pytest.param("k.order", "note", None, "order_id", id="not derivable"),
    ],
)
def test_a_key_that_is_none_fails_the_job(  # noqa: PLR0917
    site: Site, foreign: Celery, task: str, argument: str, key: object, said: str
) -> None:
    tag = site.tag()
    errback = foreign.signature("plain.mark", (tag,), immutable=True)
    headers = None if key is None else {"lease_idempotency_key": key}
    sent = foreign.send_task(task, kwargs={argument: tag}, headers=headers, link_error=errback)

    with pytest.raises(JobUnfit, match=said):
        site.app.AsyncResult(sent.id).get(timeout=10)
    job = site.until(sent.id, "failed", settled=True)
    assert job["error_type"] == "celery_lease.exceptions.JobUnfit"
    assert (job["idempotency_key"], site.states(sent.id)) == (None, ["failed"])
    eventually(lambda: site.facts(tag) == ["plain"])


def test_it_stays_unfit_when_it_is_resumed(site: Site, foreign: Celery) -> None:
    tag = site.tag()
    sent = foreign.send_task("t.mark", (tag,), headers={"lease_idempotency_key": 4711})
    site.until(sent.id, "failed", settled=True)

    transitions.resume(extension_of(site.app).store, sent.id, reason="try it")
    site.run_pass()

    site.until_attempts(sent.id, 2)
    site.until(sent.id, "failed", settled=True)
    assert site.facts(tag) == []


def test_a_key_that_is_too_long_is_kept_by_its_digest(site: Site, foreign: Celery) -> None:
    tag, key = site.tag(), "k" * 300
    sent = foreign.send_task("t.mark", (tag,), headers={"lease_idempotency_key": key})

    assert site.until(sent.id, "succeeded")["idempotency_key"].startswith("sha256:")
    assert site.task("t.mark").apply_async((tag,), idempotency_key=key).id == sent.id


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"headers": {"lease_message": "one"}}, id="version"),
        pytest.param({"root_id": 5, "parent_id": 6}, id="ids"),
    ],
)
def test_odd_headers_do_not_keep_it_from_running(
    site: Site, foreign: Celery, options: dict[str, Any]
) -> None:
    sent = foreign.send_task("t.add", (1, 2), **options)

    assert site.app.AsyncResult(sent.id).get(timeout=10) == 3
    assert site.until(sent.id, "succeeded", settled=True)["fencing_token"] == 1


def test_an_id_that_no_table_keeps_is_a_failure_at_once(site: Site, foreign: Celery) -> None:
    tag = site.tag()
    sent = foreign.send_task("t.mark", (tag,), task_id=f"{tag}-" + "x" * 300)

    with pytest.raises(JobUnfit, match="task_id"):
        site.app.AsyncResult(sent.id).get(timeout=10)
    assert site.facts(tag) == []


@pytest.mark.parametrize(
    ("args", "limit", "said"),
    [
        pytest.param(("x" * 2000,), 1000, "lease_max_message_bytes", id="too large"),
        pytest.param((object(),), 1000, "object", id="not serialisable"),
    ],
)
def test_arguments_that_cannot_be_recorded_are_left_out(
    site: Site, args: Any, limit: int, said: str
) -> None:
    app, task = site.app, site.task("t.total")
    settings = extension_of(app).settings_for(task)
    delivery = {"routing_key": "celery"}
    request = Context(
        id="x",
        task="t.total",
        args=args,
        kwargs={},
        delivery_info=delivery,
        lease_content_type="application/json",
    )

    with pytest.raises(Exception, match=said) as error:
        adopted_job(app, task, request, task_settings=settings, limit=limit)
    jobs = [make() for make in unfit_jobs(app, task, request, error.value)]

    assert [json.loads(job.message.body)[:2] for job in jobs] == [[[], {}]] * 2
    assert all(said in json.loads(job.message.headers)["lease_unfit"] for job in jobs)


def test_what_the_store_refuses_is_recorded_with_less(site: Site, foreign: Celery) -> None:
    sent = foreign.send_task("t.add", (1, 2), headers={"odd": "x"}, queue=None, priority=2**40)

    with pytest.raises(JobUnfit, match="priority"):
        site.app.AsyncResult(sent.id).get(timeout=10)
    site.until(sent.id, "failed", settled=True)
