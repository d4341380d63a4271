"""K4: poison work, crash loops (B026 to B033)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from celery_lease.exceptions import JobInterrupted
from tests.faults.stage import Stage
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker


@pytest.fixture
def stage(
    make_stage: Callable[..., Stage], enter: Callable[[AbstractContextManager[Any]], Any]
) -> Stage:
    """A stage whose jobs are given up at the third loss, with a reaper beside the workers."""
    # A child may die before it has settled what it did a moment ago.
    stage = make_stage(lease_max_attempts=3, lease_duration=2.0, lease_settle_grace=5.0)
    enter(stage.passes(every=0.5))
    return stage


def assert_given_up(stage: Stage, job_id: str) -> None:
    """Assert that a job ended as interrupted, was told so once, and never runs again."""
    job = stage.wait_settled(job_id, timeout=60)
    attempts = stage.attempts(job_id)
    assert (job["state"], job["state_reason"]) == ("interrupted", "max_attempts")
    assert (job["lost_count"], job["failure_count"]) == (3, 0)
    assert [a["fencing_token"] for a in attempts] == [1, 2, 3]
    assert {a["state"] for a in attempts} <= {"expired", "lost"}
    assert [e["token"] for e in stage.ledger.read("begin", job=job_id)] == [1, 2, 3]
    with pytest.raises(JobInterrupted, match="3 runners vanished"):
        stage.result(job_id).get(timeout=10)
    eventually(lambda: stage.ledger.read("errback"))
    assert [status for status, _ in stage.published(job_id)] == ["FAILURE"]


def assert_refused_and_harmless(stage: Stage, job_id: str, worker: CeleryWorker) -> None:
    """Assert that one more delivery runs nothing, and that the worker works."""
    said = f"lease.claim.refused job_id={job_id}"
    before = worker.log().count(said)
    stage.publish_again(job_id)
    eventually(lambda: worker.log().count(said) > before)
    other = stage.send({})
    stage.assert_accepted_once(other.id, 1)

    assert len(stage.ledger.read("begin", job=job_id)) == 3
    assert stage.job(job_id)["fencing_token"] == 3
    assert [e["job"] for e in stage.ledger.read("errback")] == [job_id]
    assert [status for status, _ in stage.published(job_id)] == ["FAILURE"]


@pytest.mark.parametrize("setting", [{}, {"task_reject_on_worker_lost": True}], ids=["", "reject"])
def test_a_job_that_always_kills_its_child_is_given_up(
    setting: dict[str, bool],
    make_stage: Callable[..., Stage],
    enter: Callable[[AbstractContextManager[Any]], Any],
) -> None:
    """B026: three attempts on record, one errback, and a pool that is free for others."""
    stage = make_stage(lease_max_attempts=3, lease_duration=60.0, **setting)
    enter(stage.passes(every=0.5))
    worker = stage.worker(concurrency=2)

    sent = stage.send({"then": {"*": "kill child"}}, link_error=stage.on_error())

    assert_given_up(stage, sent.id)
    assert_refused_and_harmless(stage, sent.id, worker)


def test_whatever_way_a_job_kills_its_child_others_run_meanwhile(stage: Stage) -> None:
    """B026, B033: several such jobs at once, between others; each is given up at its third."""
    worker = stage.worker(concurrency=2)
    deaths = ("kill child", "segfault", "exit", "exit 1", "terminate")

    poison, healthy = [], []
    for death in deaths:
        poison.append(stage.send({"then": {"*": death}}).id)
        healthy += [stage.send({}).id for _ in range(5)]

    for one in healthy:
        stage.assert_accepted_once(one, 1)
        assert stage.job(one)["lost_count"] == 0
    for one in poison:
        job = stage.wait_settled(one, timeout=60)
        assert (job["state"], job["lost_count"], job["failure_count"]) == ("interrupted", 3, 0)
        assert [a["state"] for a in stage.attempts(one)] == ["lost"] * 3
        assert [e["token"] for e in stage.ledger.read("begin", job=one)] == [1, 2, 3]
        assert [status for status, _ in stage.published(one)] == ["FAILURE"]
    stage.wait_quiet()
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert len(stage.ledger.read("begin")) == 3 * len(poison) + len(healthy) + 1
    assert worker.is_running


@pytest.mark.parametrize("second", ["kill child", "kill group"])
def test_each_way_to_die_counts_alike(second: str, stage: Stage) -> None:
    """B027, B033: the whole worker, its child or not, the whole worker again: three losses."""
    deaths = {"1": "kill group", "2": second, "3": "kill group"}
    worker = stage.worker(concurrency=1)
    sent = stage.send({"then": deaths}, link_error=stage.on_error())
    worker.wait()
    for _ in range(2 if second == "kill group" else 1):
        worker = stage.worker(concurrency=1)
        worker.wait(60)
    last = stage.worker(concurrency=1)

    assert_given_up(stage, sent.id)
    assert_refused_and_harmless(stage, sent.id, last)


def test_a_retry_that_cannot_be_published_is_no_delivery_loop(
    make_stage: Callable[..., Stage],
) -> None:
    """B032: it cannot be routed, now or ever: one failure, told once."""
    stage = make_stage(task_create_missing_queues=False)
    stage.worker(concurrency=1)

    sent = stage.send({"then": {"1": "retry to nowhere"}}, link_error=stage.on_error())

    job = stage.wait_settled(sent.id)
    assert job["state"] == "failed", job
    stage.wait_quiet()
    assert (job["dispatch_count"], len(stage.attempts(sent.id))) == (1, 1)
    assert len(stage.ledger.read("begin")) == 1
    assert [e["job"] for e in eventually(lambda: stage.ledger.read("errback"))] == [sent.id]


def test_many_leases_that_end_at_once_are_given_on_in_batches(
    make_stage: Callable[..., Stage],
) -> None:
    """B031: a pass takes so many at most, the next one goes on; none is left."""
    stage = make_stage(
        lease_reaper_in_worker=False, lease_reaper_batch=2, lease_reaper_limit=4, lease_duration=2.0
    )
    dying = stage.worker(concurrency=10)
    ids = [stage.send({"wait": {"1": "never"}}).id for _ in range(10)]
    for one in ids:
        stage.wait_begun(one)
    stage.run_pass()
    dying.kill_group()
    ended = "SELECT count(*) FROM celery_lease_attempt WHERE lease_expires_at < clock_timestamp()"
    eventually(lambda: stage.scalar(ended) == len(ids), timeout=10)

    expired: list[int] = []
    while sum(expired) < len(ids):
        expired.append(stage.run_pass().get("expired", 0))

    assert [n for n in expired if n] == [4, 4, 2]
    stage.worker(concurrency=2)
    for one in ids:
        stage.assert_accepted_once(one, 2)
