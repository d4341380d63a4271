"""K10: revoke, time limit, expiry (B077 to B082); the ways to end a job, whatever restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states
from kombu.exceptions import OperationalError

from celery_lease import install
from celery_lease.exceptions import StoreUnavailable
from celery_lease.revocation import Revocation, cancel_revoked
from tests.faults.brokers import Broker
from tests.faults.stage import APP, LEASE, SLACK, Stage
from tests.faults.tasks import make_app
from tests.support.waiting import eventually

#: Needs every trick that JSON, LIKE and a URL know.
STAMP = "A 7%_'\\é"
#: A renewal comes each third of a lease, ±10 %.
HEARTBEAT = 1.1 * LEASE / 3
WAYS = ["result", "control", "terminate", "list", "stamp"]


def revoke(stage: Stage, how: str, job_id: str, **options: Any) -> None:
    """Revoke a job in one of Celery's ways."""
    control = stage.app.control
    ways: dict[str, Callable[[], object]] = {
        "result": lambda: stage.result(job_id).revoke(**options),
        "control": lambda: control.revoke(job_id, **options),
        "terminate": lambda: control.terminate(job_id, **options),
        "list": lambda: control.revoke(["unknown", job_id], **options),
        "stamp": lambda: control.revoke_by_stamped_headers({"order": ["B", STAMP]}, **options),
    }
    ways[how]()


def send_stamped(stage: Stage, plan: dict[str, Any], *, task: str = "work", **options: Any) -> str:
    """Send a job with the stamp, and return its id."""
    signature = stage.signature(plan, task=task)
    signature.stamp(order=STAMP)
    return str(signature.apply_async(**options).id)


def assert_cancelled(stage: Stage, job_id: str, *, attempts: int) -> None:
    """Assert that a job ended once, as cancelled, in the store and for Celery."""
    job = stage.wait_settled(job_id)
    assert job["state"] == "cancelled", job
    assert [a["state"] for a in stage.attempts(job_id)] == ["cancelled"] * attempts
    assert len(stage.ledger.read("begin", job=job_id)) == attempts
    assert stage.ledger.read("end", job=job_id) == []
    assert stage.wait_result(job_id)[0] == "REVOKED"
    assert {status for status, _ in stage.published(job_id)} <= {"STARTED", "REVOKED"}


def celery(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``celery -A …`` with the app of the stage."""
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**{k: v for k, v in os.environ.items() if "PYTEST" not in k}, **stage.env()},
    )


# --- nobody is there to hear it -------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_what_is_revoked_while_no_worker_is_up_never_runs(
    how: str, make_stage: Callable[..., Stage]
) -> None:
    """B079: the revocation is in the store, and the claim refuses."""
    stage = make_stage()
    sent, kept = send_stamped(stage, {}), stage.signature({})
    kept.stamp(order="C")
    kept_id = kept.apply_async().id

    revoke(stage, how, sent)
    assert_cancelled(stage, sent, attempts=0)
    stage.worker(concurrency=1)

    stage.assert_accepted_once(kept_id, 1)
    stage.wait_quiet()
    assert_cancelled(stage, sent, attempts=0)


def test_a_command_line_revokes_while_no_worker_is_up(make_stage: Callable[..., Stage]) -> None:
    """B079: ``celery control revoke`` says that nobody answered, and the job has ended."""
    stage = make_stage()
    by_id, by_stamp = send_stamped(stage, {}), stage.signature({})
    by_stamp.stamp(order="C")
    stamped = by_stamp.apply_async().id
    cancelled = stage.send({}).id

    said = celery(stage, "control", "revoke", by_id)
    celery(stage, "control", "revoke_by_stamped_headers", "order=C", "malformed")
    celery(stage, "lease", "cancel", cancelled, "--reason", "not wanted, says Ada")

    assert "No nodes replied" in said.stderr
    for job_id in (by_id, stamped, cancelled):
        assert_cancelled(stage, job_id, attempts=0)
    assert stage.job(cancelled)["state_reason"] == "not wanted, says Ada"


def test_what_cannot_be_read_keeps_nothing_else_from_being_revoked(
    make_stage: Callable[..., Stage],
) -> None:
    """An id that is none, and a job whose headers hold a type that is not known here."""
    stage = make_stage()
    by_id, by_stamp = stage.send({}).id, send_stamped(stage, {})
    unknown = {"order": {"__type__": "unknown", "__value__": STAMP}}
    kept = stage.signature({}).set(headers={"trace": unknown, "order": STAMP}).apply_async().id

    stage.app.control.revoke(["odd\ud800", "odd\x00", by_id])
    stage.app.control.revoke_by_stamped_headers({"order": STAMP})

    assert_cancelled(stage, by_id, attempts=0)
    assert_cancelled(stage, by_stamp, attempts=0)
    assert stage.job(kept)["state"] == "queued"


def test_a_revoked_eta_job_stays_revoked_over_a_restart(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B079: its message is in a worker's memory; that worker and its revocations die."""
    stage = make_stage(broker=broker)
    killed = stage.worker(concurrency=1)
    sent = stage.signature({}).apply_async(countdown=4)
    killed.wait_log(f"[{sent.id}] received")

    stage.result(sent.id).revoke()
    killed.kill_group()
    stage.worker(concurrency=1)
    later = stage.signature({}).apply_async(countdown=5)

    stage.assert_accepted_once(later.id, 1)
    assert_cancelled(stage, sent.id, attempts=0)


def test_a_revocation_that_a_stranger_sends_is_written_by_who_hears_it(
    make_stage: Callable[..., Stage],
) -> None:
    """B079: an app that knows no store revokes; the worker that heard it is killed."""
    stage = make_stage()
    killed = stage.worker(concurrency=1)
    by_id = stage.signature({}).apply_async(countdown=60).id
    by_stamp = send_stamped(stage, {}, countdown=60)

    with Celery("stranger", broker=stage.broker.url, set_as_current=False) as stranger:
        stranger.control.revoke(["unknown", by_id])
        stranger.control.revoke_by_stamped_headers({"order": STAMP})
        for one in (by_id, by_stamp):
            assert_cancelled(stage, one, attempts=0)
        killed.kill_group()

    assert stage.run_pass().get("dispatched", 0) == 0


def test_a_store_that_is_away_is_said_and_the_workers_are_told(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """A revocation is durable, or it raises; here a worker, which has the store, writes it."""
    stage = make_stage()
    stage.worker(concurrency=1)
    sent = stage.signature({}).apply_async(countdown=60)
    nowhere = {"broker_url": stage.broker.url, "lease_store_url": "postgresql://u:p@127.0.0.1:1/x"}
    with make_app(nowhere, tmp_path) as cut_off:
        install(cut_off)

        with pytest.raises(StoreUnavailable, match=r"sent to the workers, and is not in the store"):
            cut_off.control.revoke(sent.id)

    assert_cancelled(stage, sent.id, attempts=0)


def test_a_broker_that_is_away_keeps_nothing_from_being_cancelled(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """The error is Celery's; the job has ended all the same."""
    stage = make_stage()
    sent = stage.send({})
    conf = {k: stage.app.conf.get(k) for k in ("result_backend", "lease_store_url")}
    with make_app({**conf, "broker_url": "redis://127.0.0.1:1/0"}, tmp_path) as cut_off:
        extension = install(cut_off)

        with pytest.raises(OperationalError):
            cut_off.control.revoke(sent.id)

        extension.raw_store.close()

    assert_cancelled(stage, sent.id, attempts=0)


# --- bodies that run ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", *WAYS])
def test_a_running_body_stops_within_a_heartbeat(
    how: str, make_stage: Callable[..., Stage], record_property: Callable[[str, object], None]
) -> None:
    """B078: cancelled in the store or revoked, and not run again though a worker is free."""
    stage = make_stage()
    first, _ = stage.workers(2, concurrency=1)
    sent = send_stamped(stage, {"wait": {"*": "never"}}, task="interruptible")
    stage.wait_begun(sent)

    asked = time.monotonic()
    if how == "cancel":
        assert celery(stage, "lease", "cancel", sent, "--reason", "x").returncode == 0
        asked = time.monotonic()
    else:
        revoke(stage, how, sent)

    assert_cancelled(stage, sent, attempts=1)
    if how == "terminate":
        eventually(lambda: stage.broker.unacknowledged() == 0)
    else:
        (stopped,) = eventually(lambda: stage.ledger.read("interrupted"), timeout=LEASE + SLACK)
        record_property("stopped_seconds", stopped["monotonic"] - asked)
        assert stopped["monotonic"] - asked <= HEARTBEAT + SLACK
    assert stage.run_pass().get("dispatched", 0) == 0
    for _ in range(2):
        stage.assert_accepted_once(stage.send({}).id, 1)
    assert_cancelled(stage, sent, attempts=1)
    assert stage.job(sent)["lost_count"] == 0
    assert first.is_running


@pytest.mark.parametrize(
    ("who", "number", "ack"),
    [
        ("we", "TERM", "claim"),
        ("we", "KILL", "late"),
        ("stranger", "TERM", "late"),
        ("stranger", "KILL", "claim"),
    ],
)
def test_a_terminated_body_is_not_run_again(
    who: str, number: str, ack: str, make_stage: Callable[..., Stage]
) -> None:
    """B078: its child dies under it; the death is no loss, and its message is not redelivered."""
    stage = make_stage(lease_duration=60.0, lease_ack=ack)
    stage.workers(2, concurrency=1)
    sent = stage.send({"wait": {"*": "never"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)

    asked = time.monotonic()
    if who == "we":
        stage.app.control.revoke(sent.id, terminate=True, signal=number)
    else:
        with Celery("stranger", broker=stage.broker.url, set_as_current=False) as stranger:
            stranger.control.revoke(sent.id, terminate=True, signal=number)

    assert_cancelled(stage, sent.id, attempts=1)
    assert time.monotonic() - asked <= 1.0 + 2 * SLACK
    for _ in range(3):
        stage.assert_accepted_once(stage.send({}).id, 1)
    stage.wait_quiet()
    assert stage.run_pass().get("dispatched", 0) == 0
    assert_cancelled(stage, sent.id, attempts=1)
    assert stage.job(sent.id)["lost_count"] == 0
    assert stage.ledger.read("link") == []


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_pool_without_processes_stops_it_too(pool: str, make_stage: Callable[..., Stage]) -> None:
    """B078: Celery's threads cannot terminate; the next heartbeat does."""
    stage = make_stage()
    worker = stage.worker(pool=pool, concurrency=2)
    sent = stage.signature({"wait": {"*": "never"}}, task="interruptible").apply_async()
    stage.wait_begun(sent.id)

    stage.result(sent.id).revoke(terminate=True)

    assert_cancelled(stage, sent.id, attempts=1)
    stage.wait_quiet()
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert worker.is_running


# --- on the way to a body -------------------------------------------------------------------------


@pytest.mark.parametrize("terminate", [False, True])
def test_a_job_that_was_handed_to_the_pool_is_revoked(
    terminate: bool,  # noqa: FBT001  a parameter
    make_stage: Callable[..., Stage],
) -> None:
    """B080: two run, the third waits in the pool."""
    stage = make_stage(worker_prefetch_multiplier=4, lease_duration=60.0)
    worker = stage.worker(concurrency=2)
    busy = [stage.send({"wait": {"*": "go"}}).id for _ in range(2)]
    third = stage.send({}).id
    for one in busy:
        stage.wait_begun(one)
    worker.wait_log(f"[{third}] received")

    stage.result(third).revoke(terminate=terminate)
    stage.ledger.open_gate("go")

    for one in busy:
        stage.assert_accepted_once(one, 1)
    stage.wait_quiet()
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert_cancelled(stage, third, attempts=0)


@pytest.mark.parametrize("how", ["control", "terminate", "stamp"])
def test_a_revoked_job_that_is_resumed_runs_where_its_revocation_is_remembered(
    how: str, make_stage: Callable[..., Stage]
) -> None:
    """B080: the store decides at the claim, not what a worker has heard some time ago."""
    stage = make_stage(worker_prefetch_multiplier=4)
    worker = stage.worker(concurrency=1)
    busy = stage.send({"wait": {"*": "go"}}).id
    stage.wait_begun(busy)
    sent = send_stamped(stage, {})
    worker.wait_log(f"[{sent}] received")

    revoke(stage, how, sent)
    assert_cancelled(stage, sent, attempts=0)
    said = celery(stage, "lease", "resume", sent, "--reason", "wanted after all")
    assert said.returncode == 0, said.stderr
    stage.ledger.open_gate("go")

    stage.wait_settled(sent)
    assert stage.job(sent)["state"] == "succeeded", stage.job(sent)
    assert len(stage.ledger.read("begin", job=sent)) == 1
    assert stage.wait_result(sent) == ("SUCCESS", 1)


def test_a_stamp_that_workers_remember_ends_what_is_submitted_later(
    make_stage: Callable[..., Stage],
) -> None:
    """As in Celery, as long as a worker remembers it; then the end is in the store."""
    stage = make_stage()
    worker = stage.worker(concurrency=1)
    stage.app.control.revoke_by_stamped_headers({"order": STAMP}, reply=True)

    later = send_stamped(stage, {})
    worker.wait_log("Discarding revoked task")

    assert_cancelled(stage, later, attempts=0)
    stage.wait_quiet()


@pytest.mark.parametrize("how", ["control", "terminate"])
def test_a_worker_that_hears_it_late_leaves_a_resumed_job_alone(
    how: str, make_stage: Callable[..., Stage]
) -> None:
    """B080: it was frozen, or busy, or without its broker; the store was told when it was said."""
    stage = make_stage()
    late = stage.worker(concurrency=1, queues="elsewhere")
    sent, fence = stage.send({"wait": {"*": "go"}}).id, stage.send({}, countdown=60).id
    late.freeze()
    revoke(stage, how, sent)
    said = celery(stage, "lease", "resume", sent, "--reason", "wanted after all")
    assert said.returncode == 0, said.stderr
    stage.worker(concurrency=1)
    stage.wait_begun(sent)

    late.thaw()
    with Celery("stranger", broker=stage.broker.url, set_as_current=False) as stranger:
        stranger.control.revoke(fence)

    assert_cancelled(stage, fence, attempts=0)
    assert stage.job(sent)["state"] == "running"
    stage.ledger.open_gate("go")
    stage.wait_state(sent, "succeeded")
    assert len(stage.ledger.read("begin", job=sent)) == 1


@pytest.mark.parametrize("how", ["chain", "chord"])
def test_what_is_revoked_before_it_is_a_job_never_runs(
    how: str, make_stage: Callable[..., Stage]
) -> None:
    """B079: the caller holds the id of a job that is submitted later; and ``resume`` runs it."""
    stage = make_stage()
    stage.worker(concurrency=1)
    before = stage.signature({"wait": {"*": "go"}}, name="before")
    canvas = chain if how == "chain" else lambda one, then: chord([one], then, app=stage.app)
    sent = canvas(before, stage.signature({})).apply_async()
    eventually(lambda: stage.ledger.read("begin", name="before"))

    stage.app.control.revoke(sent.id, reply=True)
    stage.ledger.open_gate("go")

    eventually(lambda: stage.rows("job", "id = :id", id=sent.id))
    assert_cancelled(stage, sent.id, attempts=0)
    said = celery(stage, "lease", "resume", sent.id, "--reason", "wanted after all")
    assert said.returncode == 0, said.stderr
    assert stage.wait_state(sent.id, "succeeded")
    assert len(stage.ledger.read("begin", job=sent.id)) == 1


def test_a_job_that_went_on_as_a_canvas_does_not_come_back_once_revoked(
    make_stage: Callable[..., Stage],
) -> None:
    """It is kept in the store: no worker has heard of it."""
    stage = make_stage()
    stage.worker(concurrency=1)
    sent = stage.send({"canvas": [{"wait": {"*": "go"}}, {}]}, link=stage.note("link")).id
    eventually(lambda: stage.ledger.read("begin", name="step 0"))
    stage.wait_state(sent, "succeeded")

    cancel_revoked(stage.extension.store, Revocation((sent,)))
    stage.ledger.open_gate("go")

    stage.wait_state(sent, "cancelled")
    stage.wait_settled(sent)
    assert stage.wait_result(sent)[0] == "REVOKED"
    stage.wait_quiet()
    assert len(stage.ledger.read("begin", job=sent)) == 1
    assert stage.ledger.read("link") == []
    said = celery(stage, "lease", "resume", sent, "--reason", "wanted after all")
    assert said.returncode == 0, said.stderr
    stage.wait_state(sent, "succeeded")
    assert [one["name"] for one in stage.ledger.read("begin", job=sent)] == ["", "step 1"]
    eventually(lambda: stage.ledger.read("link"))


# --- what follows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_revoked_part_ends_its_chord_once(when: str, make_stage: Callable[..., Stage]) -> None:
    """The chord's error comes once, and its body never."""
    stage = make_stage()
    parts = [stage.signature({}), stage.signature({"wait": {"*": "never"}}, task="interruptible")]
    if when == "running":
        stage.worker(concurrency=2)
    body = stage.note("body").on_error(stage.on_error())
    chord(group(*parts), body, app=stage.app).apply_async()
    revoked = eventually(
        lambda: [m["job_id"] for m in stage.rows("message") if "interruptible" in m["headers"]]
    )[0]
    if when == "running":
        stage.wait_begun(revoked)

    stage.result(revoked).revoke(terminate=when == "running")
    if when == "waiting":
        stage.worker(concurrency=2)

    assert_cancelled(stage, revoked, attempts=int(when == "running"))
    eventually(lambda: stage.ledger.read("errback"))
    stage.assert_accepted_once(stage.send({}).id, 1)
    stage.wait_quiet()
    assert len(stage.ledger.read("errback")) == 1
    assert stage.ledger.read("body") == []


def test_a_chord_that_only_pickle_can_read_is_ended_by_a_worker(
    make_stage: Callable[..., Stage],
) -> None:
    """Who cancels decodes no pickle: the worker that gets the message tells Celery of it."""
    stage = make_stage(task_serializer="pickle", accept_content=["json", "pickle"])
    parts = [stage.signature({}), stage.signature({}, name="revoked").set(countdown=60)]
    body = stage.note("body").on_error(stage.on_error())
    sent = chord(group(*parts), body, app=stage.app).apply_async()
    revoked = sent.parent.results[1].id

    stage.result(revoked).revoke()
    stage.worker(concurrency=1)

    assert_cancelled(stage, revoked, attempts=0)
    eventually(lambda: stage.ledger.read("errback"))
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert len(stage.ledger.read("errback")) == 1
    assert stage.ledger.read("body") == []


def test_a_chain_that_only_pickle_can_read_is_ended_by_a_worker(
    make_stage: Callable[..., Stage],
) -> None:
    """B065: its next step would be waited for, for ever."""
    stage = make_stage(task_serializer="pickle", accept_content=["json", "pickle"])
    first = stage.signature({}, name="revoked").set(countdown=30)
    last = chain(first, stage.signature({}, name="next"), app=stage.app).apply_async()

    stage.result(last.parent.id).revoke()
    stage.worker(concurrency=1)

    assert_cancelled(stage, last.parent.id, attempts=0)
    eventually(lambda: stage.result(last.id).state == states.REVOKED)
    assert stage.ledger.read("begin", name="next") == []


def test_a_group_is_revoked_as_a_whole(make_stage: Callable[..., Stage]) -> None:
    """``GroupResult.revoke`` is one command for all; it ends more than one batch."""
    stage = make_stage()
    sent = group(stage.signature({}) for _ in range(130)).apply_async()

    sent.revoke()
    while stage.run_pass().get("closed"):
        pass

    assert {row["state"] for row in stage.rows("job")} == {"cancelled"}
    for one in sent.results:
        assert_cancelled(stage, one.id, attempts=0)


# --- time limits ----------------------------------------------------------------------------------


def test_a_hard_limit_that_is_not_acknowledged_is_one_failure(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B077: Celery would requeue it for ever, with a FAILURE each round; B082: after PROGRESS."""
    stage = make_stage(broker=broker, task_acks_on_timeout=False)
    stage.worker(concurrency=1)
    sent = stage.send(
        {"state": "PROGRESS", "wait": {"*": "never"}},
        time_limit=1,
        link_error=stage.on_error(),
    )

    job = stage.wait_settled(sent.id)

    assert (job["state"], job["state_reason"], job["failure_count"]) == ("failed", "time_limit", 1)
    assert [a["failure_class"] for a in stage.attempts(sent.id)] == ["time_limit"]
    status, _ = stage.wait_result(sent.id)
    assert status == "FAILURE"
    stage.wait_quiet()
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert [status for status, _ in stage.published(sent.id)] == ["PROGRESS", "FAILURE"]
    assert len(stage.ledger.read("begin", job=sent.id)) == 1
    for what in ("errback", "on_failure", "task_failure"):
        assert len(stage.ledger.read(what, job=sent.id)) == 1, what


# --- expiry ---------------------------------------------------------------------------------------


def test_what_is_claimed_in_time_runs_and_what_is_not_never_does(
    make_stage: Callable[..., Stage],
) -> None:
    """B081: by the store's clock at the claim; it ends once, and is not dispatched again.

    The worker's clock has no say: the rows' times are moved, not the messages'.
    """
    stage = make_stage(worker_prefetch_multiplier=4, lease_reaper_in_worker=False)
    worker = stage.worker(concurrency=1)
    busy = stage.send({"wait": {"*": "go"}}).id
    stage.wait_begun(busy)
    # For the worker's clock the first has expired when its turn comes, the second has not.
    in_time, late = stage.send({}, expires=1).id, stage.send({}, expires=3600).id
    for one in (in_time, late):
        worker.wait_log(f"[{one}] received")
    move = "UPDATE celery_lease_job SET expires_at = expires_at {} interval '1 hour' WHERE id = :id"
    stage.execute(move.format("+"), id=in_time)
    stage.execute(move.format("-"), id=late)
    over = "SELECT clock_timestamp() > :at + interval '1 s'"
    sent_at = stage.job(in_time)["created_at"]
    eventually(lambda: stage.scalar(over, at=sent_at))

    stage.ledger.open_gate("go")
    stage.assert_accepted_once(in_time, 1)
    worker.wait_log(f"lease.claim.refused job_id={late}")
    counted = [stage.run_pass() for _ in range(2)]

    assert_cancelled(stage, late, attempts=0)
    assert stage.job(late)["state_reason"] == "expires"
    assert [one.get("cancelled", 0) for one in counted] == [1, 0]
    assert sum(one.get("dispatched", 0) for one in counted) == 0
    assert stage.job(late)["dispatch_count"] <= 2  # the second is the closing of its books
    inspected = stage.app.control.inspect().revoked()
    assert list(inspected.values()) == [[]], "no flood of expired ids among the workers"
