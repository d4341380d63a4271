"""K8: canvas (B063)."""

from __future__ import annotations

from collections.abc import Callable

from celery import chord

from tests.faults.stage import Stage


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
