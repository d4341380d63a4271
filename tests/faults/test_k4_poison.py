"""K4: poison work, crash loops (B026, B027, B033)."""

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
    stage = make_stage(lease_max_attempts=3, lease_duration=2.0)
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


def test_a_job_that_always_kills_its_child_is_given_up(stage: Stage) -> None:
    """B026: three attempts on record, one errback, and a pool that is free for others."""
    worker = stage.worker(concurrency=2)

    sent = stage.send({"then": {"*": "kill child"}}, link_error=stage.on_error())

    assert_given_up(stage, sent.id)
    assert_refused_and_harmless(stage, sent.id, worker)


def test_each_way_to_die_counts_alike(stage: Stage) -> None:
    """B027, B033: the whole worker, its child, the whole worker again: three losses."""
    deaths = {"1": "kill group", "2": "kill child", "3": "kill group"}
    first = stage.worker(concurrency=1)
    sent = stage.send({"then": deaths}, link_error=stage.on_error())
    first.wait()
    second = stage.worker(concurrency=1)
    second.wait(60)
    third = stage.worker(concurrency=1)

    assert_given_up(stage, sent.id)
    assert_refused_and_harmless(stage, sent.id, third)
