"""K2: the broker hands out work that is still running, or done (B010, B018)."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.faults.stage import Stage
from tests.support.waiting import eventually

#: seconds after which the broker gives an unacknowledged message to somebody else
VISIBILITY = 2.0


def test_a_message_that_is_there_twice_runs_its_body_once(make_stage: Callable[..., Stage]) -> None:
    """Copies that come before, during and after the body are refused."""
    stage = make_stage()
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.publish_again(sent.id)
    one = stage.worker(concurrency=2)
    stage.wait_begun(sent.id)
    other = stage.worker(concurrency=2)

    stage.publish_again(sent.id)
    eventually(lambda: refusals(one.log() + other.log(), sent.id) == 2)
    stage.ledger.open_gate("go")
    stage.assert_accepted_once(sent.id, 1)
    stage.publish_again(sent.id)
    eventually(lambda: refusals(one.log() + other.log(), sent.id) == 3)

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.attempts(sent.id)) == 1
    assert len(stage.ledger.read("begin")) == 1
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert stage.published(sent.id) == [("SUCCESS", 1)]


def test_a_body_longer_than_the_visibility_timeout_runs_once(
    make_stage: Callable[..., Stage],
) -> None:
    """B010: it is given out again, and refused while the lease lives."""
    stage = make_stage(
        # Acknowledged at the end: only so does the broker give it out again.
        lease_ack="late",
        broker_transport_options={
            "visibility_timeout": VISIBILITY,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
    )
    workers = stage.workers(2, concurrency=2)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    begun = stage.wait_begun(sent.id)

    # Once: the refusal acknowledges the message, and from then on the reaper answers for the job.
    eventually(lambda: refusals("".join(w.log() for w in workers), sent.id), timeout=40)
    eventually(lambda: time.monotonic() > begun["monotonic"] + 3 * VISIBILITY)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.attempts(sent.id)) == 1
    assert len(stage.ledger.read("begin")) == 1
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert stage.published(sent.id) == [("SUCCESS", 1)]


def refusals(log: str, job_id: str) -> int:
    return log.count(f"lease.claim.refused job_id={job_id}")
