"""K5: shutdown, deploy, and the identity of a runner (B034 to B045)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain

from celery_lease.store import transitions
from tests.faults.brokers import Broker
from tests.faults.stage import LEASE, SLACK, Stage
from tests.support.waiting import eventually

#: what a busy machine may add to the 100 ms within which a body knows of a stop
TOLD_SLACK = 0.4
SOFT = {"worker_soft_shutdown_timeout": 4.0}
REMAPPED = {"settings": SOFT, "env": {"REMAP_SIGTERM": "SIGQUIT"}}


# --- bodies that heed the stop --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "number", "options"),
    [
        pytest.param("prefork", signal.SIGTERM, {}, id="prefork warm"),
        pytest.param("prefork", signal.SIGINT, {}, id="prefork Ctrl-C"),
        pytest.param("prefork", signal.SIGQUIT, {"settings": SOFT}, id="prefork soft"),
        pytest.param("prefork", signal.SIGTERM, REMAPPED, id="prefork remapped"),
        pytest.param("threads", signal.SIGTERM, {}, id="threads warm"),
        pytest.param("threads", signal.SIGQUIT, {"settings": SOFT}, id="threads soft"),
        pytest.param("threads", signal.SIGQUIT, {}, id="threads cold"),
        pytest.param("solo", signal.SIGTERM, {}, id="solo warm"),
        # Celery's soft wait sleeps in the body's own thread there.
        pytest.param("solo", signal.SIGQUIT, {}, id="solo cold"),
    ],
)
def test_a_body_is_told_of_the_stop_at_once_and_the_next_worker_goes_on(
    pool: str,
    number: int,
    options: dict[str, Any],
    make_stage: Callable[..., Stage],
    record_property: Callable[[str, object], None],
) -> None:
    """B036, B045: handed over with its checkpoint, uncounted; nobody waits for a minute's lease."""
    stage = make_stage(lease_duration=60.0)
    leaving = stage.worker(pool=pool, concurrency=1, **options)
    sent = stage.send({"stop": {"1": "hand over"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    stage.worker(concurrency=1)

    asked = time.monotonic()
    leaving.send(number)
    leaving.wait()

    stage.assert_accepted_once(sent.id, 2)
    (told,) = stage.ledger.read("stop")
    first, second = stage.attempts(sent.id)
    (_, begun) = stage.ledger.read("begin")
    record_property("told_seconds", told["monotonic"] - asked)
    record_property("handed_over_seconds", begun["monotonic"] - told["monotonic"])
    assert told["monotonic"] - asked <= 0.1 + TOLD_SLACK
    assert begun["monotonic"] - told["monotonic"] <= 1.0 + SLACK
    assert begun["checkpoint"] == {"by": 1}
    assert first["state"] == "released"
    assert stage.job(sent.id)["lost_count"] == 0
    assert second["state"] == "completed"
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [2]
    assert {status for status, _ in stage.published(sent.id)} == {"SUCCESS"}


@pytest.mark.parametrize("how", ["cold", "group"])
def test_a_body_that_is_torn_out_hands_its_job_over_at_once(
    how: str, broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B006, B038, B039: SIGQUIT; SIGTERM to the children too, as systemd and tini send it."""
    stage = make_stage(broker=broker, lease_duration=60.0)
    leaving = stage.worker(concurrency=1)
    sent = stage.send({"items": 5, "wait": {"1": "never"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)
    eventually(lambda: stage.ledger.read("item", item=4))
    stage.worker(concurrency=1)

    asked = time.monotonic()
    if how == "cold":
        leaving.send(signal.SIGQUIT)
    else:
        leaving.kill_group(signal.SIGTERM)
    leaving.wait()

    stage.assert_accepted_once(sent.id, 2)
    (_, begun) = stage.ledger.read("begin")
    assert begun["monotonic"] - asked <= 1.0 + SLACK
    assert begun["checkpoint"] == 5
    first, _ = stage.attempts(sent.id)
    assert first["state"] == "released"
    assert stage.job(sent.id)["lost_count"] == 0
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [2]
    # Celery's own word for it, RETRY, may stand in between; never a failure.
    assert {status for status, _ in stage.published(sent.id)} <= {"RETRY", "SUCCESS"}
    stage.wait_quiet()


@pytest.mark.parametrize("options", [{}, REMAPPED], ids=["warm", "soft"])
def test_a_job_is_handed_over_at_once_though_its_worker_has_another_to_end(
    options: dict[str, Any], broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B038, B045: who ends in time has succeeded; who hands over is not kept by the one who leaves.

    Its message is for another worker, whatever the leaving one had still asked the broker for.
    """
    stage = make_stage(broker=broker, lease_duration=60.0)
    leaving = stage.worker(concurrency=2, **options)
    short = stage.send({"stop": {"1": "finish"}})
    long = stage.send({"stop": {"1": "hand over"}})
    for one in (short, long):
        stage.wait_begun(one.id)
    stage.worker(concurrency=1)

    leaving.send(signal.SIGTERM)
    begun = stage.wait_begun(long.id, token=2)
    stage.ledger.open_gate("finish")
    leaving.wait()

    stage.assert_accepted_once(short.id, 1)
    stage.assert_accepted_once(long.id, 2)
    (told,) = stage.ledger.read("stop", job=long.id)
    assert begun["monotonic"] - told["monotonic"] <= 1.0 + SLACK
    assert begun["checkpoint"] == {"by": 1}
    assert {status for status, _ in stage.published(short.id)} == {"SUCCESS"}
    assert [stage.job(one.id)["lost_count"] for one in (short, long)] == [0, 0]
    assert len(stage.attempts(short.id)) == 1


# --- bodies that do not ---------------------------------------------------------------------------


def test_a_body_renews_and_completes_during_a_warm_shutdown(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B034, B036: for two leases after SIGTERM; a second delivery is refused meanwhile."""
    stage = make_stage(broker=broker)
    leaving = stage.worker(concurrency=1)
    step = stage.signature({"wait": {"*": "go"}})
    step.link(stage.note("link"))
    chain(step, stage.note("next")).apply_async()
    (sent,) = stage.rows("job")
    job_id = sent["id"]
    stage.wait_begun(job_id)
    other = stage.worker(concurrency=1, queues="celery,other")

    leaving.send(signal.SIGTERM)
    leaving.wait_log("Warm shutdown")
    before = stage.attempts(job_id)[0]["renewal_count"]
    # Not where the leaving worker may still take one message.
    stage.publish_again(job_id, queue="other")
    other.wait_log(f"lease.claim.refused job_id={job_id}")
    # A renewal comes each third of a lease, ±10 %.
    eventually(lambda: stage.attempts(job_id)[0]["renewal_count"] >= before + 6, timeout=4 * LEASE)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(job_id, 1)
    assert leaving.wait() == 0
    assert len(stage.attempts(job_id)) == 1
    assert stage.job(job_id)["lost_count"] == 0
    assert len(stage.ledger.read("begin")) == 1
    for what in ("link", "next"):
        assert [one["value"] for one in eventually(lambda w=what: stage.ledger.read(w))] == [1]  # type: ignore[misc]
    assert stage.published(job_id) == [("SUCCESS", 1)]
    stage.wait_quiet()


@pytest.mark.parametrize("where", ["same host", "another host"])
def test_a_body_that_is_killed_after_the_grace_is_not_counted(
    where: str, make_stage: Callable[..., Stage], folders: Callable[[], str]
) -> None:
    """M9: recovered by the owner file, or by the lease's end; it had been asked to stop."""
    shared = folders()
    stage = make_stage(lease_duration=60.0 if where == "same host" else LEASE)
    leaving = stage.worker(concurrency=1, settings={"lease_run_dir": shared})
    sent = stage.send({"stop": {"1": "ignore"}})
    stage.wait_begun(sent.id)
    other = shared if where == "same host" else folders()
    stage.worker(concurrency=1, settings={"lease_run_dir": other})

    leaving.send(signal.SIGTERM)
    eventually(lambda: stage.attempts(sent.id)[0]["stop_requested_at"], timeout=1.0 + SLACK)
    leaving.kill_group()
    killed = time.monotonic()

    stage.assert_accepted_once(sent.id, 2)
    first, _ = stage.attempts(sent.id)
    assert stage.job(sent.id)["lost_count"] == 0
    (_, begun) = stage.ledger.read("begin")
    if where == "same host":
        assert first["state"] == "lost"
        assert begun["monotonic"] - killed <= 1.0 + SLACK
    else:
        assert first["state"] == "expired"


@pytest.mark.parametrize("how", ["cancelled", "revoked", "terminated"])
def test_a_job_is_ended_while_its_worker_stops(how: str, make_stage: Callable[..., Stage]) -> None:
    """B040: the body is interrupted at the next heartbeat at the latest, and the worker can go."""
    stage = make_stage()
    leaving = stage.worker(concurrency=1)
    sent = stage.signature({"wait": {"*": "never"}}, task="interruptible").apply_async()
    stage.wait_begun(sent.id)
    leaving.send(signal.SIGTERM)
    leaving.wait_log("Warm shutdown")

    cancelled = time.monotonic()
    if how == "cancelled":
        transitions.cancel(stage.extension.store, sent.id, reason="operator")
    else:
        sent.revoke(terminate=how == "terminated")

    if how != "terminated":
        # That one's child may die first, where the worker still hears of it.
        (stopped,) = eventually(lambda: stage.ledger.read("interrupted"), timeout=LEASE)
        # A renewal comes each third of a lease, ±10 %.
        assert stopped["monotonic"] - cancelled <= 1.1 * LEASE / 3 + SLACK
    assert leaving.wait() == 0
    assert time.monotonic() - cancelled <= LEASE + 2 * SLACK
    assert stage.job(sent.id)["state"] == "cancelled"
    assert stage.attempts(sent.id)[0]["state"] == "cancelled"
    assert stage.job(sent.id)["lost_count"] == 0


# --- what the worker held besides -----------------------------------------------------------------


def test_waiting_jobs_survive_stops_under_load(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B037: twenty with an ETA, running ones beside them, three workers stopped in turn."""
    stage = make_stage(broker=broker)
    running = [stage.send({"wait": {"*": "go"}}).id for _ in range(2)]
    waiting = [stage.signature({}).apply_async(countdown=4).id for _ in range(20)]

    for number in range(3):
        worker = stage.worker(concurrency=2)
        if number == 0:
            for one in running:
                stage.wait_begun(one)
            stage.ledger.open_gate("go")
        else:
            stage.assert_accepted_once(stage.send({}).id, 1)
        assert worker.stop() == 0
    stage.worker(concurrency=2)

    for one in running + waiting:
        stage.assert_accepted_once(one, 1)
        assert len(stage.ledger.read("begin", job=one)) == 1
        assert stage.job(one)["lost_count"] == 0


def test_no_witness_takes_a_given_up_job_for_running(make_stage: Callable[..., Stage]) -> None:
    """B044: store, result backend and broker say the same, though STARTED had been stored."""
    stage = make_stage(task_track_started=True, lease_max_attempts=1, lease_duration=60.0)
    killed = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"*": "never"}})
    stage.wait_begun(sent.id)
    assert stage.result(sent.id).state == "STARTED"

    killed.kill_group()
    stage.worker(concurrency=1)

    assert stage.wait_settled(sent.id)["state"] == "interrupted"
    assert stage.result(sent.id).state == "FAILURE"
    assert all(a["ended_at"] for a in stage.attempts(sent.id))
    stage.wait_quiet()


# --- the identity of a runner ---------------------------------------------------------------------


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
