"""K5: shutdown, and the identity of a runner (B034, B036, B038, B042)."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.faults.stage import LEASE, Stage
from tests.support.waiting import eventually


def test_a_body_renews_and_completes_during_a_warm_shutdown(
    make_stage: Callable[..., Stage],
) -> None:
    """B034, B036: for two leases after SIGTERM; a second delivery is refused meanwhile."""
    stage = make_stage()
    leaving = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"*": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    other = stage.worker(concurrency=1)

    leaving.send(signal.SIGTERM)
    leaving.wait_log("Warm shutdown")
    before = stage.attempts(sent.id)[0]["renewal_count"]
    stage.publish_again(sent.id)
    other.wait_log(f"lease.claim.refused job_id={sent.id}")
    # A renewal comes each third of a lease, ±10 %.
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= before + 6, timeout=4 * LEASE)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    assert leaving.wait() == 0
    assert len(stage.attempts(sent.id)) == 1
    assert stage.job(sent.id)["lost_count"] == 0
    assert len(stage.ledger.read("begin")) == 1
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert stage.published(sent.id) == [("SUCCESS", 1)]


def test_a_cold_shutdown_hands_the_job_over_at_once(make_stage: Callable[..., Stage]) -> None:
    """B038: SIGQUIT: it runs again elsewhere, uncounted, long before the lease would end."""
    stage = make_stage(lease_duration=60.0)
    leaving = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "never"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    stage.worker(concurrency=1)

    leaving.send(signal.SIGQUIT)
    leaving.wait()

    stage.assert_accepted_once(sent.id, 2)
    first, second = stage.attempts(sent.id)
    assert first["state"] == "released"
    assert second["claimed_at"] < first["lease_expires_at"]
    assert stage.job(sent.id)["lost_count"] == 0
    assert [e["token"] for e in stage.ledger.read("begin")] == [1, 2]
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [2]
    # Celery's own word for it, RETRY, may stand in between; never a failure.
    assert {status for status, _ in stage.published(sent.id)} <= {"RETRY", "SUCCESS"}


def test_of_two_workers_with_one_name_each_has_its_own_leases(
    make_stage: Callable[..., Stage],
) -> None:
    """B042: killing one takes nothing from the other, and renews nothing of the first."""
    stage = make_stage()
    killed, kept = stage.workers(2, concurrency=2, arguments=["-n", "same@host"])
    ids = [stage.send({"wait": {"1": "go"}}).id for _ in range(4)]
    began = {one: stage.wait_begun(one) for one in ids}
    attempts = {one: stage.attempts(one)[0] for one in ids}
    assert {a["worker"] for a in attempts.values()} == {"same@host"}
    doomed = [one for one in ids if began[one]["pid"] in killed.children()]
    assert len(doomed) == 2
    assert len({a["owner"] for a in attempts.values()}) == 4

    killed.kill_group()
    other = [one for one in ids if one not in doomed]
    eventually(lambda: all(stage.job(one)["lost_count"] == 1 for one in doomed), timeout=4 * LEASE)
    stage.ledger.open_gate("go")

    for one in doomed:
        stage.assert_accepted_once(one, 2)
        assert stage.attempts(one)[0]["renewal_count"] <= attempts[one]["renewal_count"] + 1
    for one in other:
        stage.assert_accepted_once(one, 1)
        assert stage.job(one)["lost_count"] == 0
        assert stage.attempts(one)[0]["owner"] == attempts[one]["owner"]
        assert len(stage.ledger.read("begin", job=one)) == 1
    assert kept.is_running
