"""K8: canvas (B063)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from celery import chord

from tests.faults.stage import Stage
from tests.support.proxy import Proxy
from tests.support.waiting import eventually


def test_a_chord_whose_member_died_waits_for_its_next_attempt(
    make_stage: Callable[..., Stage],
) -> None:
    """B063: the body runs once, with all results; no error path was ever taken."""
    stage = make_stage(lease_duration=2.0)
    stage.worker(concurrency=3)
    header = [stage.signature({}), stage.signature({"then": {"1": "kill child"}})]
    header += [stage.signature({})]
    joined = chord(
        [part.on_error(stage.on_error()) for part in header],
        stage.note("chord").on_error(stage.on_error()),
    )

    body = joined.apply_async()
    parts = [one.id for one in body.parent.results]

    for one, token in zip(parts, (1, 2, 1), strict=True):
        stage.assert_accepted_once(one, token)
    assert stage.wait_result(body.id) == ("SUCCESS", None)
    assert [one["value"] for one in stage.ledger.read("chord")] == [[1, 2, 1]]
    assert stage.ledger.read("errback") == []
    for one in (*parts, body.id):
        assert {status for status, _ in stage.published(one)} == {"SUCCESS"}


def test_a_chord_whose_member_is_given_up_takes_its_error_path_once(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(lease_max_attempts=2, lease_duration=2.0)
    stage.worker(concurrency=3)
    joined = chord(
        [stage.signature({"then": {"*": "kill child"}}), stage.signature({})],
        stage.note("chord").on_error(stage.on_error()),
    )

    body = joined.apply_async()
    poison, other = (one.id for one in body.parent.results)

    stage.wait_settled(poison)
    assert stage.job(poison)["state"] == "interrupted"
    stage.assert_accepted_once(other, 1)
    assert stage.wait_result(body.id)[0] == "FAILURE"
    assert stage.ledger.read("chord") == []
    # A pass later nothing has been said twice.
    stage.run_pass()
    assert [one["job"] for one in stage.ledger.read("errback")] == [body.id]


@pytest.mark.parametrize("patience", ["enough", "too little"])
def test_a_chord_whose_body_is_sent_while_the_store_is_away_runs_its_body(
    patience: str,
    make_stage: Callable[..., Stage],
    start_proxy: Callable[[int], Proxy],
    postgresql: Any,
    postgresql_url: str,
) -> None:
    """Celery would take it for failed, and no replay of a part would send it again."""
    proxy = start_proxy(postgresql.port)
    stage = make_stage(
        store_url=postgresql_url,
        worker_settings={"lease_store_url": proxy.url(postgresql_url)},
        faults_wait_at="lease.outcome.accepted",
        lease_claim_timeout=30.0 if patience == "enough" else 1.0,
    )
    stage.worker(concurrency=1)
    joined = chord([stage.signature({})], stage.signature({}, name="body")).apply_async()
    eventually(lambda: stage.ledger.read("there"), timeout=30)

    proxy.cut()
    stage.ledger.open_gate("harm done")
    if patience == "too little":
        # Nobody has recorded it, and it is on the broker.
        eventually(lambda: stage.broker.waiting() + stage.broker.unacknowledged() > 0, timeout=30)
    proxy.heal()

    eventually(lambda: stage.rows("job", "id = :id", id=joined.id), timeout=30)
    stage.assert_accepted_once(joined.id, 1)
    assert len(stage.ledger.read("begin", job=joined.id)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_that_ends_as_it_sends_the_body_of_a_chord_loses_no_body(
    number: int, make_stage: Callable[..., Stage]
) -> None:
    """Celery marks the chord as done if anything is raised there; a claim outlives a kill."""
    stage = make_stage(
        faults_wait_at="before_task_publish",
        # How long the claim on the chord lives, and between two replays.
        broker_connection_timeout=1.0,
        task_publish_retry=False,
        lease_settle_grace=2.0,
        lease_queued_timeout=3.0,
    )
    stage.worker(concurrency=1)
    joined = chord([stage.signature({})], stage.signature({}, name="body")).apply_async()
    there = eventually(lambda: stage.ledger.read("there"), timeout=30)

    os.kill(there[0]["pid"], number)
    stage.ledger.open_gate("harm done")

    eventually(lambda: stage.rows("job", "id = :id", id=joined.id), timeout=40)
    stage.assert_accepted_once(joined.id, 1)
    part = joined.parent.results[0].id
    stage.assert_accepted_once(part, 1)
    assert len(stage.ledger.read("begin", job=part)) == 1
    assert len(stage.ledger.read("begin", job=joined.id)) == 1
