"""K6: hung and half-dead workers (B046, B047, B049 to B052).

B050's spinning and waiting bodies, in each pool, are in ``tests/worker/test_stall.py``; recycling
(B053, B054) is in ``test_k1_runner_died.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.faults.stage import INTERVAL, LEASE, SLACK, Stage, counts
from tests.support import processes
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker

#: what ``queued_timeout`` of the stage, its passes and a new delivery take at most
RESENT = 3.0 + 2.5 * INTERVAL + 3 * SLACK


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: processes.is_frozen(pid))


def answers(stage: Stage, worker: CeleryWorker) -> bool:
    """Tell whether a worker's main process answers a ping."""
    return bool(stage.app.control.ping([worker.nodename], timeout=1.0))


def seconds(later: Any, earlier: Any) -> float:
    return float((later - earlier).total_seconds())


# --- frozen children ----------------------------------------------------------------------------


def test_a_job_in_the_hands_of_a_hung_child_goes_to_another_worker(
    make_stage: Callable[..., Stage],
) -> None:
    """B046, B049: no claim within ``lease_queued_timeout``; that its parent answers is no claim."""
    stage = make_stage()
    hung = stage.worker(concurrency=1)
    (child,) = hung.children()
    freeze(child)
    sent = stage.send({}, link=stage.note("link"))
    eventually(lambda: stage.broker.unacknowledged() == 1)
    assert stage.attempts(sent.id) == []

    other = stage.worker(concurrency=1)

    assert answers(stage, hung)
    stage.assert_accepted_once(sent.id, 1)
    job = stage.job(sent.id)
    assert job["dispatch_count"] == 2, job
    assert seconds(job["finished_at"], job["created_at"]) < RESENT
    assert stage.attempts(sent.id)[0]["worker"] == other.nodename
    # It wakes, finds the job done, and serves again.
    other.stop()
    os.kill(child, signal.SIGCONT)
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert len(stage.ledger.read("begin", job=sent.id)) == 1
    assert [one["value"] for one in stage.ledger.read("link")] == [1]


def test_a_claim_without_renewals_expires_and_what_the_child_says_later_is_rejected(
    make_stage: Callable[..., Stage],
) -> None:
    """B046, B050: the child alone is frozen; its main process and its owner file live."""
    stage = make_stage()
    hung = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "late"}}, link=stage.note("link"))
    child = stage.wait_begun(sent.id)["pid"]
    other = stage.worker(concurrency=1)
    freeze(child)
    last = stage.attempts(sent.id)[0]["last_renewed_at"]

    stage.assert_accepted_once(sent.id, 2)
    assert answers(stage, hung)
    before, second = stage.attempts(sent.id)
    assert (before["state"], second["worker"]) == ("expired", other.nodename)
    assert seconds(before["ended_at"], last) < LEASE + 2.5 * INTERVAL + SLACK
    # The hung worker may have fetched that message, too: then it is sent once more.
    assert seconds(second["claimed_at"], before["ended_at"]) < RESENT
    stage.ledger.open_gate("late")
    os.kill(child, signal.SIGCONT)

    eventually(lambda: stage.attempts(sent.id)[0]["rejected_at"])
    stage.wait_quiet()
    first = stage.attempts(sent.id)[0]
    assert (first["state"], first["late_outcome"]) == ("expired", "succeeded")
    assert first["ended_at"] == before["ended_at"]
    stage.assert_accepted_once(sent.id, 2)
    assert [one["value"] for one in stage.ledger.read("link")] == [2]
    # The one that woke up serves again.
    other.stop()
    stage.assert_accepted_once(stage.send({}).id, 1)


# --- forks ----------------------------------------------------------------------------------------


@counts(24, 500)
@pytest.mark.parametrize("heartbeat_from", ["child", "worker"])
def test_a_lock_that_a_thread_of_the_main_process_holds_at_the_fork_hangs_no_child(
    heartbeat_from: str, count: int, make_stage: Callable[..., Stage]
) -> None:
    """B047: beside our own threads there, which make passes and renew."""
    stage = make_stage(lease_reaper_interval=0.2, lease_duration=20.0)
    worker = stage.worker(
        concurrency=4,
        settings={
            "faults_busy_parent": True,
            "worker_max_tasks_per_child": 1,
            "lease_heartbeat_from": heartbeat_from,
        },
    )

    ids = [stage.send({}).id for _ in range(count)]

    eventually(
        lambda: stage.scalar("SELECT count(settled_at) FROM celery_lease_job") == count,
        timeout=3 * count,
        interval=0.2,
        what=worker.log,
    )
    jobs = stage.rows("job")
    assert {one["id"] for one in jobs} == set(ids)
    assert {(one["state"], one["fencing_token"], one["lost_count"]) for one in jobs} == {
        ("succeeded", 1, 0)
    }
    assert len({one["pid"] for one in stage.ledger.read("begin")}) == count
    assert worker.is_running


# --- limits ---------------------------------------------------------------------------------------


def test_after_a_hard_time_limit_a_worker_goes_on_executing(
    make_stage: Callable[..., Stage],
) -> None:
    """B049: and its other child is not disturbed."""
    stage = make_stage()
    worker = stage.worker(concurrency=2)
    held = stage.send({"wait": {"*": "go"}})
    stage.wait_begun(held.id)

    for _ in range(2):
        limited = stage.send({"then": {"*": "overrun"}}, time_limit=1)
        assert stage.wait_settled(limited.id)["state_reason"] == "time_limit"
        served = stage.send({}).id
        stage.assert_accepted_once(served, 1)
        # Its first message was taken: it was not left in the hands of the dead child.
        assert stage.job(served)["dispatch_count"] == 1
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(held.id, 1)
    assert worker.is_running


def test_a_thread_that_hangs_in_a_driver_is_stalled_and_its_late_return_is_rejected(
    make_stage: Callable[..., Stage],
) -> None:
    """B051, B052: nothing ends a thread; its job goes on elsewhere."""
    stage = make_stage(lease_stall_timeout=1.5)
    workers = stage.workers(2, pool="threads", concurrency=1)
    # Until it is sent again, should the hung one have fetched the message, too.
    plan = {"then": {"1": f"ask {1.5 + RESENT + 2.0}"}}
    sent = stage.send(plan, time_limit=2, soft_time_limit=1, link=stage.note("link"))
    stage.wait_begun(sent.id)
    first_at = stage.attempts(sent.id)[0]["worker"]
    hung, other = sorted(workers, key=lambda one: one.nodename != first_at)

    stage.assert_accepted_once(sent.id, 2)
    before, second = stage.attempts(sent.id)
    assert (before["state"], second["worker"]) == ("stalled", other.nodename)
    assert "in _ask" in before["traceback"]
    assert 1.5 <= seconds(before["ended_at"], before["claimed_at"]) < 1.5 + 1.0 + SLACK
    assert before["last_renewed_at"] <= before["ended_at"]

    eventually(lambda: stage.attempts(sent.id)[0]["rejected_at"], timeout=30)
    stage.wait_quiet()
    first = stage.attempts(sent.id)[0]
    assert (first["state"], first["late_outcome"]) == ("stalled", "succeeded")
    stage.assert_accepted_once(sent.id, 2)
    assert [one["value"] for one in stage.ledger.read("link")] == [2]
    # Its thread is free again.
    other.stop()
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert hung.is_running


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_waits_in_a_driver_is_renewed(
    pool: str,
    make_stage: Callable[..., Stage],
    enter: Callable[[AbstractContextManager[Any]], Any],
) -> None:
    """B052: a driver lets go of Python's lock."""
    stage = make_stage()
    enter(stage.passes(every=0.2))
    stage.workers(2, pool=pool, concurrency=1)

    sent = stage.send({"then": {"*": f"ask {2.5 * LEASE}"}})

    stage.assert_accepted_once(sent.id, 1)
    (attempt,) = stage.attempts(sent.id)
    assert seconds(attempt["ended_at"], attempt["claimed_at"]) > 2.5 * LEASE
    assert attempt["renewal_count"] >= 6
    assert stage.job(sent.id)["lost_count"] == 0
