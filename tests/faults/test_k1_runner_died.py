"""K1: the runner died, and its work with it (B001, B002, B004, B005, B009)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pytest_celery import CeleryTestSetup

from tests.faults.stage import INTERVAL, SLACK, Stage, counts
from tests.support.waiting import eventually

#: seconds
DURATION = 6.0
#: where nobody needs to renew in time
SHORT = {"lease_duration": 2.0}


@pytest.fixture
def worker_options(worker_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers of the kills: a lease long enough to be told from the passes' interval."""
    for options in worker_options:
        options["env"]["FAULTS_CONF"] = options["env"]["FAULTS_CONF"].replace(
            '"lease_duration": 3.0', f'"lease_duration": {DURATION}'
        )
    return worker_options


@pytest.mark.parametrize("passes_by", ["beat", "workers"])
@counts(1, 20)
def test_jobs_of_a_killed_worker_end_elsewhere_within_the_bound(
    passes_by: str,
    count: int,
    celery_setup: CeleryTestSetup,
    cluster_stage: Stage,
    record_property: Callable[[str, object], None],
) -> None:
    stage = cluster_stage
    nodes = {node.process.nodename: node for node in celery_setup.worker_cluster}
    if passes_by == "beat":
        stage.beat()
    bound = DURATION + SLACK + INTERVAL * (1.0 if passes_by == "beat" else 2.5)
    waits = []

    for number in range(count):
        # More than one worker has room for: both hold some.
        ids = [stage.send({"wait": {"1": f"go{number}"}}).id for _ in range(6)]
        for one in ids:
            stage.wait_begun(one)
        holders = {one: stage.attempts(one)[0]["worker"] for one in ids}
        victim = sorted(nodes)[number % 2]
        nodes[victim].kill("SIGKILL")
        stage.ledger.open_gate(f"go{number}")

        for one in ids:
            token = 2 if holders[one] == victim else 1
            stage.assert_accepted_once(one, token)
            assert stage.job(one)["lost_count"] == token - 1
            assert len(stage.ledger.read("begin", job=one)) == token
        for one in ids:
            if holders[one] == victim:
                first, second = stage.attempts(one)
                assert first["state"] in {"expired", "lost"}
                waits.append(second["claimed_at"] - first["last_renewed_at"])
        nodes[victim].restart()

    assert len(waits) >= 2 * count
    record_property("recovery_seconds", sorted(round(w.total_seconds(), 2) for w in waits))
    assert max(waits) <= timedelta(seconds=bound), waits


# --- killed at a point of a delivery ------------------------------------------------------------


def test_a_worker_killed_before_the_claim_loses_a_message_and_no_attempt(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(faults_kill_at="task_prerun")
    first = stage.worker(concurrency=1)

    sent = stage.send({})
    first.wait()
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 1)
    assert stage.job(sent.id)["lost_count"] == 0
    assert stage.job(sent.id)["dispatch_count"] >= 2


def test_a_worker_killed_between_claim_and_body_has_used_up_an_attempt(
    make_stage: Callable[..., Stage],
) -> None:
    """B029: the attempt is on record before the body, so that even this death counts."""
    stage = make_stage(faults_kill_at="lease.claim.won", **SHORT)
    first = stage.worker(concurrency=1)

    sent = stage.send({})
    first.wait()
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 2)
    assert stage.job(sent.id)["lost_count"] == 1
    assert [e["token"] for e in stage.ledger.read("begin", job=sent.id)] == [2]


def test_a_child_killed_by_the_users_own_call_is_an_attempt_that_was_lost(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(**SHORT)
    stage.worker(concurrency=1)

    sent = stage.signature({}, task="dies_before_body").apply_async()

    stage.assert_accepted_once(sent.id, 2)
    assert [e["token"] for e in stage.ledger.read("begin", job=sent.id)] == [2]


@pytest.mark.parametrize("where", ["lease.outcome.accepted", "task_success"])
def test_a_worker_killed_after_the_commit_and_before_the_acknowledgement_ran_the_body_once(
    where: str, make_stage: Callable[..., Stage]
) -> None:
    """After the store's commit; after Celery stored the result and sent the link."""
    # Longer than a busy machine needs to settle a replay: else it would be replayed again.
    stage = make_stage(faults_kill_at=where, lease_settle_grace=2.0, lease_queued_timeout=10.0)
    first = stage.worker(concurrency=1)

    sent = stage.send({}, link=stage.note("link"))
    first.wait()
    assert stage.job(sent.id)["settled_at"] is None
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.ledger.read("begin", job=sent.id)) == 1
    links = eventually(lambda: stage.ledger.read("link"))
    # A callback that is not leased is sent once more where the crash hid that it had been.
    assert len(links) <= (1 if where == "lease.outcome.accepted" else 2)
    assert {one["value"] for one in links} == {1}


def test_a_worker_killed_after_the_side_effect_does_it_again_and_is_accepted_once(
    make_stage: Callable[..., Stage],
) -> None:
    """What a lease cannot do: an effect outside is repeated; its outcome is still one."""
    stage = make_stage(**SHORT)
    first = stage.worker(concurrency=1)
    sent = stage.send({"then": {"1": "kill group"}}, link=stage.note("link"))
    first.wait()
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 2)

    assert [e["token"] for e in stage.ledger.read("begin", job=sent.id)] == [1, 2]
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [2]


# --- only the child died ------------------------------------------------------------------------


def test_a_child_that_died_is_no_failure_of_its_job(make_stage: Callable[..., Stage]) -> None:
    """B001, B004, B005: killed or gone with code 0; no FAILURE is ever stored, no errback fired."""
    stage = make_stage(**SHORT)
    stage.worker(concurrency=2)

    ids = [
        stage.send({"then": {"1": death}}, link_error=stage.on_error()).id
        for death in ("kill child", "exit")
    ]

    for one in ids:
        stage.assert_accepted_once(one, 2)
        assert stage.job(one)["lost_count"] == 1
        assert [e["token"] for e in stage.ledger.read("begin", job=one)] == [1, 2]
        assert {status for status, _ in stage.published(one)} == {"SUCCESS"}
    assert stage.ledger.read("errback") == []
