"""K10: revoke, time limit, expiry (B077 to B082); the ways to end a job, whatever restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.brokers import Broker
from tests.faults.stage import Stage

# --- nobody is there to hear it -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["result", "control", "terminate", "list", "stamp"])
def test_what_is_revoked_while_no_worker_is_up_never_runs(
    how: str, broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B079: the revocation is in the store, and the claim refuses."""
    stage = make_stage(broker=broker)
    signature = stage.signature({})
    signature.stamp(order="A 7%_'é")
    sent = signature.apply_async()

    revoke(stage, how, sent.id)
    stage.worker(concurrency=1)
    after = stage.send({})

    stage.assert_accepted_once(after.id, 1)
    assert_cancelled(stage, sent.id, attempts=0)
    stage.wait_quiet()


def revoke(stage: Stage, how: str, job_id: str, **options: Any) -> None:
    """Revoke a job in one of Celery's ways."""
    control = stage.app.control
    ways: dict[str, Callable[[], object]] = {
        "result": lambda: stage.result(job_id).revoke(**options),
        "control": lambda: control.revoke(job_id, **options),
        "terminate": lambda: control.terminate(job_id, **options),
        "list": lambda: control.revoke(["unknown", job_id], **options),
        "stamp": lambda: control.revoke_by_stamped_headers({"order": ["B", "A 7%_'é"]}, **options),
    }
    ways[how]()


def assert_cancelled(stage: Stage, job_id: str, *, attempts: int) -> None:
    """Assert that a job ended once, as cancelled, in the store and for Celery."""
    job = stage.wait_settled(job_id)
    assert job["state"] == "cancelled", job
    assert [a["state"] for a in stage.attempts(job_id)] == ["cancelled"] * attempts
    assert len(stage.ledger.read("begin", job=job_id)) == attempts
    assert stage.ledger.read("end", job=job_id) == []
    assert stage.wait_result(job_id)[0] == "REVOKED"
    assert {status for status, _ in stage.published(job_id)} <= {"REVOKED"}
