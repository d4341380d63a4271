"""K16: locks left behind, and runs that overlap (B126 to B130): a key is held by its job alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.brokers import Broker
from tests.faults.stage import INTERVAL, LEASE, SLACK, Stage
from tests.support.waiting import eventually


def test_the_key_of_a_killed_holder_is_no_lock_that_stays(
    make_stage: Callable[..., Stage], folders: Callable[[], str]
) -> None:
    """B126: a submit at once is the existing job, which runs again when its lease has ended."""
    stage = make_stage()
    killed = stage.worker(concurrency=1, settings={"lease_run_dir": folders()})
    plan = {"wait": {"1": "never"}}
    sent = stage.send(plan, idempotency_key="report-7")
    stage.wait_begun(sent.id)
    stage.worker(concurrency=1, settings={"lease_run_dir": folders()})

    killed.kill_group()
    died = time.monotonic()
    again = stage.send(plan, idempotency_key="report-7")

    assert again.id == sent.id
    (_, begun) = eventually(
        lambda: len(lines := stage.ledger.read("begin")) == 2 and lines, timeout=4 * LEASE
    )
    assert begun["monotonic"] - died <= LEASE + 2.5 * INTERVAL + SLACK
    stage.assert_accepted_once(sent.id, 2)
    assert len(stage.rows("job")) == 1


def test_a_hard_limit_frees_the_key(make_stage: Callable[..., Stage]) -> None:
    """B126: a job that was limited has failed; the next submit is a new job, which runs."""
    stage = make_stage()
    stage.worker(concurrency=1)
    limited = stage.send({"then": {"*": "overrun"}}, time_limit=1, idempotency_key="report-7")
    assert stage.wait_settled(limited.id)["state"] == "failed"

    again = stage.send({}, idempotency_key="report-7")

    assert again.id != limited.id
    stage.assert_accepted_once(again.id, 1)


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_revoked_job_frees_its_key(when: str, make_stage: Callable[..., Stage]) -> None:
    """B127: the new submit is a new job, and never the id of the dead one."""
    stage = make_stage()
    if when == "running":
        stage.worker(concurrency=2)
    sent = stage.send({"wait": {"*": "never"}}, idempotency_key="report-7")
    if when == "running":
        stage.wait_begun(sent.id)

    sent.revoke(terminate=when == "running")
    again = stage.send({}, idempotency_key="report-7")
    if when == "waiting":
        stage.worker(concurrency=2)

    assert again.id != sent.id
    stage.assert_accepted_once(again.id, 1)
    assert stage.wait_settled(sent.id)["state"] == "cancelled"
    assert stage.wait_result(sent.id)[0] == "REVOKED"
    # The dead one gives up a key that is not its own any more: the new holder keeps it.
    assert stage.send({}, idempotency_key="report-7").id == again.id


def test_a_refused_delivery_is_no_success_of_its_job(
    broker: Broker, make_stage: Callable[..., Stage], folders: Callable[[], str]
) -> None:
    """B128: the holder is killed, and its message comes again before the lease has ended."""
    stage = make_stage(broker=broker)
    killed = stage.worker(concurrency=1, settings={"lease_run_dir": folders()})
    sent = stage.send({"wait": {"1": "never"}}, idempotency_key="k", link=stage.note("link"))
    stage.wait_begun(sent.id)
    other = stage.worker(concurrency=1, settings={"lease_run_dir": folders()})

    killed.kill_group()
    stage.publish_again(sent.id)
    other.wait_log(f"lease.claim.refused job_id={sent.id}")

    assert stage.job(sent.id)["state"] != "succeeded"
    assert stage.published(sent.id) == []
    assert stage.ledger.read("link") == []
    stage.assert_accepted_once(sent.id, 2)
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [2]
    assert len(stage.ledger.read("begin")) == 2


def test_runs_that_would_overlap_are_left_out_and_take_no_lock_away(
    make_stage: Callable[..., Stage],
) -> None:
    """B129: beat ticks each second, a body takes two and a half, two workers are free."""
    tick = {
        "task": "faults.work",
        "schedule": 1.0,
        "kwargs": {"plan": {"then": {"*": "ask 2.5"}}},
        "options": {"idempotency_key": "only"},
    }
    stage = make_stage(beat_schedule={"tick": tick}, lease_idempotency_retention=0.0)
    stage.workers(2, concurrency=2)
    beat = stage.beat()

    eventually(lambda: len(stage.ledger.read("end")) >= 3, timeout=30)
    beat.stop()

    for job in stage.rows("job"):
        stage.assert_accepted_once(job["id"], 1)
    moments = sorted(
        (line["monotonic"], {"begin": 1, "end": -1}[line["what"]])
        for line in stage.ledger.read()
        if line["what"] in ("begin", "end")
    )
    running = [sum(change for _, change in moments[: n + 1]) for n in range(len(moments))]
    assert max(running) == 1, moments
    assert min(running) == 0
    # Some of seven ticks or more were left out.
    assert len(stage.rows("job")) <= 4


def test_a_key_is_held_as_long_as_its_job_runs_and_the_job_submits_its_own_next_run(
    make_stage: Callable[..., Stage],
) -> None:
    """B130: no time of a lock is guessed; three leases long, then the next run under a new key."""
    stage = make_stage()
    stage.worker(concurrency=2)
    plan = {"wait": {"*": "go"}, "next": "run-2"}
    sent = stage.send(plan, idempotency_key="run-1")
    stage.wait_begun(sent.id)

    # A renewal comes each third of a lease, ±10 %.
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= 9, timeout=5 * LEASE)
    assert stage.send(plan, idempotency_key="run-1").id == sent.id
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    (submitted,) = stage.ledger.read("next")
    stage.assert_accepted_once(submitted["sent"], 1)
    assert stage.job(submitted["sent"])["idempotency_key"] == "run-2"
    assert len(stage.ledger.read("begin")) == 2
