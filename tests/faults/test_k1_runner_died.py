"""K1: the runner died, and its work with it (B001 to B009), and what only looks so (B053, B054)."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded
from pytest_celery import CeleryTestSetup

from celery_lease import history
from celery_lease.cli.documents import is_expired
from tests.faults.brokers import Broker
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


# --- killed at a point of a delivery ----------------------------------------------------------


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


# --- only the child died ----------------------------------------------------------------------


#: how a child dies, and what its attempt says of it
DEATHS = {
    "kill child": "signal 9 (SIGKILL)",
    "segfault": "signal 11 (SIGSEGV)",
    "exit": "exitcode 0",
    "exit 1": "exitcode 1",
    # By a stranger: no stop of its worker.
    "terminate": "SystemExit",
}


def test_a_job_whose_child_died_runs_again_at_once(
    make_stage: Callable[..., Stage], record_property: Callable[[str, object], None]
) -> None:
    """B001, B004, B005, B007: one loss, with its cause; Celery and the user's hooks hear nothing.

    The lease is a minute long: nobody has waited for its end.
    """
    stage = make_stage(lease_duration=60.0)
    worker = stage.worker(concurrency=2)
    waits = {}

    for death, cause in DEATHS.items():
        sent = stage.send({"then": {"1": death}}, link_error=stage.on_error())
        stage.wait_begun(sent.id, token=2)

        stage.assert_accepted_once(sent.id, 2)
        assert stage.job(sent.id)["lost_count"] == 1
        first, _ = stage.attempts(sent.id)
        assert first["state"] == "lost", (death, first)
        assert cause in first["stop_reason"], (death, first)
        assert [e["token"] for e in stage.ledger.read("begin", job=sent.id)] == [1, 2]
        assert {status for status, _ in stage.published(sent.id)} == {"SUCCESS"}
        waits[death] = _seconds_to_next(stage, sent.id)

    stage.wait_quiet()
    for what in ("errback", "on_failure", "on_retry", "task_failure"):
        assert stage.ledger.read(what) == []
    record_property("recovery_seconds", waits)
    # Shown strictly, over many kills, by bench/.
    assert max(waits.values()) <= 1.0 + SLACK, waits
    assert worker.is_running


def test_a_child_killed_for_want_of_memory_says_so(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """B001, by the kernel: the worker's control group has 256 MB, the body wants more."""
    group = _memory_group()
    if group is None:
        pytest.skip("no control group of memory can be made here (root, cgroup v1 or delegated v2)")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    stage = make_stage(lease_duration=60.0)
    worker = stage.worker(concurrency=1, python=str(python))
    try:
        sent = stage.send({"then": {"1": "devour memory"}}, link_error=stage.on_error())

        stage.assert_accepted_once(sent.id, 2)
        first, _ = stage.attempts(sent.id)
        assert (first["state"], stage.job(sent.id)["lost_count"]) == ("lost", 1)
        assert "signal 9 (SIGKILL)" in first["stop_reason"]
        assert "Out of memory" in first["stop_reason"]
        assert stage.ledger.read("errback") == []
        assert worker.is_running
    finally:
        worker.close()
        eventually(lambda: _removed(group))


def _memory_group() -> Path | None:
    """Make a control group below our own, with little memory; None where that cannot be had."""
    own = Path("/proc/self/cgroup").read_text()
    for line, root, limit in (
        (r"^\d+:memory:/(.*)$", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        (r"^0::/(.*)$", "/sys/fs/cgroup", "memory.max"),
    ):
        found = re.search(line, own, re.MULTILINE)
        if found is None:
            continue
        group = Path(root, found[1], f"celery-lease-test-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(256 * 1024 * 1024))
        except OSError:
            _removed(group)
            continue
        return group
    return None


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _seconds_to_next(stage: Stage, job_id: str) -> float:
    (dies,) = stage.ledger.read("dies", job=job_id, token=1)
    (begins,) = stage.ledger.read("begin", job=job_id, token=2)
    return float(begins["monotonic"] - dies["monotonic"])


def test_a_client_that_waits_for_the_result_hears_of_no_loss(
    make_stage: Callable[..., Stage],
) -> None:
    """B008: what it gets is the outcome of the second attempt."""
    stage = make_stage(lease_duration=60.0)
    stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "go"}, "then": {"1": "kill child"}})
    stage.wait_begun(sent.id)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sent.get, timeout=30)
        stage.ledger.open_gate("go")

        assert waiting.result() == 2
    stage.assert_accepted_once(sent.id, 2)


@pytest.mark.parametrize(
    "setting",
    [
        {"task_reject_on_worker_lost": True},
        {"task_retry_on_worker_lost": True},
        {"task_acks_on_failure_or_timeout": False},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_celerys_own_redelivery_is_the_same_job_and_counted_once(
    setting: dict[str, bool], make_stage: Callable[..., Stage]
) -> None:
    """Design section 7: whatever Celery would send again too, there is one claim at a time."""
    stage = make_stage(lease_duration=60.0, **setting)
    stage.worker(concurrency=2)

    sent = stage.send({"then": {"1": "kill child"}}, link_error=stage.on_error())

    stage.assert_accepted_once(sent.id, 2)
    stage.wait_quiet()
    assert stage.job(sent.id)["lost_count"] == 1
    assert len(stage.attempts(sent.id)) == 2
    assert [e["token"] for e in stage.ledger.read("begin")] == [1, 2]
    assert {status for status, _ in stage.published(sent.id)} == {"SUCCESS"}
    for what in ("errback", "on_failure", "on_retry", "task_failure"):
        assert stage.ledger.read(what) == []


def test_the_last_loss_is_told_once(make_stage: Callable[..., Stage]) -> None:
    """M1: one FAILURE, one errback, one ``task_failure``; no hook of the task's in any child."""
    stage = make_stage(lease_duration=60.0, lease_max_attempts=1)
    stage.worker(concurrency=1)

    sent = stage.send({"then": {"*": "kill child"}}, link_error=stage.on_error())

    job = stage.wait_settled(sent.id)
    assert (job["state"], job["lost_count"]) == ("interrupted", 1)
    _assert_told_once(stage, sent.id)
    assert stage.ledger.read("on_failure") == []
    assert "JobInterrupted" in type(stage.result(sent.id).result).__name__


@pytest.mark.parametrize(
    "setting", [{}, {"task_acks_on_failure_or_timeout": False}], ids=["default", "not acknowledged"]
)
def test_a_hard_time_limit_is_one_failure_and_is_told_once(
    setting: dict[str, bool], make_stage: Callable[..., Stage]
) -> None:
    """M14, M15: Celery alone tells it twice, or in each round of an endless redelivery."""
    stage = make_stage(lease_duration=60.0, **setting)
    worker = stage.worker(concurrency=1)

    sent = stage.send({"then": {"*": "overrun"}}, time_limit=1, link_error=stage.on_error())

    job = stage.wait_settled(sent.id)
    assert (job["state"], job["state_reason"]) == ("failed", "time_limit"), job
    (attempt,) = stage.attempts(sent.id)
    assert (attempt["state"], attempt["failure_class"]) == ("failed", "time_limit"), attempt
    assert (job["lost_count"], job["failure_count"]) == (0, 1)
    _assert_told_once(stage, sent.id)
    assert [e["error"] for e in stage.ledger.read("on_failure")] == ["TimeLimitExceeded"]
    assert isinstance(stage.result(sent.id).result, TimeLimitExceeded)
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert worker.is_running


def _assert_told_once(stage: Stage, job_id: str) -> None:
    """Assert it, when every message has been taken and one more pass was made."""
    stage.wait_quiet()
    eventually(lambda: stage.ledger.read("errback"))
    stage.run_pass()
    stage.wait_quiet()
    for what in ("errback", "task_failure"):
        assert [e["job"] for e in stage.ledger.read(what)] == [job_id], what
    assert [status for status, _ in stage.published(job_id)] == ["FAILURE"]
    assert len(stage.ledger.read("begin", job=job_id)) == 1


def test_after_its_runner_vanished_a_job_is_not_shown_as_running(
    make_stage: Callable[..., Stage],
) -> None:
    """B009: its owner, the age of its last beat and its end are on record all the time."""
    stage = make_stage(lease_reaper_in_worker=False, **SHORT)
    worker = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "never"}})
    stage.wait_begun(sent.id)
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= 1)

    worker.kill_group()

    (attempt,) = stage.attempts(sent.id)
    assert attempt["owner"].split(":")[1] == str(stage.wait_begun(sent.id)["pid"])
    assert attempt["last_renewed_at"] < attempt["lease_expires_at"]
    # As ``celery lease`` shows it.
    (shown,) = history.attempts(stage.app, live=True)
    eventually(lambda: is_expired(shown, now=history.now(stage.app)))
    with stage.passes(every=0.3):
        stage.wait_state(sent.id, "queued")
    assert stage.attempts(sent.id)[0]["state"] == "expired"


# --- killed at a point of a delivery, the child alone ---------------------------------------------


def test_a_child_that_dies_before_its_claim_is_replaced_without_a_tight_loop(
    make_stage: Callable[..., Stage],
) -> None:
    """No claim, so no loss; sent again at once two times, then by the passes (B032)."""
    stage = make_stage(faults_kill_child_at="task_prerun", faults_kills=5, lease_duration=60.0)
    stage.worker(concurrency=1)

    sent = stage.send({})

    stage.assert_accepted_once(sent.id, 1)
    job = stage.job(sent.id)
    assert (job["lost_count"], job["dispatch_count"]) == (0, 6), job
    died = [e["monotonic"] for e in stage.ledger.read("dies")]
    gaps = [later - earlier for earlier, later in pairwise(died)]
    assert len(gaps) == 4
    assert max(gaps[:2]) <= 1.0 + SLACK, gaps
    # A pass of a worker's own comes two intervals after the last one; the first may be near.
    assert gaps[3] >= INTERVAL, gaps
    stage.wait_quiet()


def test_an_unrecorded_job_whose_child_dies_before_its_claim_stays_on_the_broker(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """Nothing but its message knows it."""
    stage = make_stage(broker=broker, faults_kill_child_at="task_prerun")
    stage.worker(concurrency=1)

    sent = stage.send_by_name({})

    eventually(lambda: stage.rows("job"), timeout=20)
    stage.assert_accepted_once(sent, 1)
    assert len(stage.ledger.read("dies")) == 1
    stage.wait_quiet()


@pytest.mark.parametrize("where", ["lease.outcome.accepted", "task_success"])
def test_a_child_that_dies_after_the_commit_has_its_outcome_told_at_once(
    where: str, make_stage: Callable[..., Stage]
) -> None:
    """By a replay now, and not after the grace of half a minute; the body does not run again."""
    stage = make_stage(faults_kill_child_at=where, lease_settle_grace=60.0, lease_duration=60.0)
    stage.worker(concurrency=1)

    sent = stage.send({}, link=stage.note("link"), link_error=stage.on_error())

    stage.assert_accepted_once(sent.id, 1)
    (died,) = stage.ledger.read("dies")
    links = eventually(lambda: stage.ledger.read("link"))
    assert links[-1]["monotonic"] - died["monotonic"] <= 1.0 + SLACK
    # A callback that is not leased is sent once more where the death hid that it had been.
    assert len(links) <= (1 if where == "lease.outcome.accepted" else 2)
    assert {one["value"] for one in links} == {1}
    assert len(stage.ledger.read("begin")) == 1
    assert stage.ledger.read("errback") == []
    assert stage.job(sent.id)["lost_count"] == 0


# --- recycled children ----------------------------------------------------------------------------


@counts(40, 1000)
def test_a_child_for_each_job_is_no_loss(count: int, make_stage: Callable[..., Stage]) -> None:
    """B054: ``worker_max_tasks_per_child`` = 1."""
    stage = make_stage(worker_max_tasks_per_child=1, lease_duration=60.0)
    stage.worker(concurrency=4)

    ids = [stage.send({}).id for _ in range(count)]

    _assert_all_done_at_once(stage, ids)


def test_a_child_that_is_replaced_for_its_memory_is_no_loss(
    make_stage: Callable[..., Stage],
) -> None:
    """B053: the limit is just above what a child has before its first job."""
    stage = make_stage(lease_duration=60.0)
    probe = stage.worker(concurrency=1, name="probe")
    stage.assert_accepted_once(stage.send({}).id, 1)
    (child,) = probe.children()
    base = _resident_kilobytes(child)
    assert probe.stop() == 0
    # Each job leaves it above.
    stage.worker(concurrency=2, settings={"worker_max_memory_per_child": base - 500})

    ids = [stage.send({}).id for _ in range(50)]

    _assert_all_done_at_once(stage, ids)
    assert len({e["pid"] for e in stage.ledger.read("begin")}) > 10


def _resident_kilobytes(pid: int) -> int:
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1])


def _assert_all_done_at_once(stage: Stage, ids: list[str]) -> None:
    """Assert that each job had one attempt, which nobody counted as lost or failed."""
    done = "state = 'succeeded' AND settled_at IS NOT NULL"
    eventually(
        lambda: set(ids) <= {j["id"] for j in stage.rows("job", done)},
        timeout=30 + len(ids) / 3,
        interval=0.2,
        what=lambda: str(stage.rows("job", f"NOT ({done})")),
    )
    jobs = [j for j in stage.rows("job") if j["id"] in set(ids)]
    assert {(j["fencing_token"], j["lost_count"], j["failure_count"]) for j in jobs} == {(1, 0, 0)}
    assert {a["state"] for a in stage.rows("attempt")} == {"completed"}
    assert Counter(e["job"] for e in stage.ledger.read("begin")) >= Counter(ids)
    assert stage.ledger.read("task_failure") == []
    assert all(stage.published(one) == [("SUCCESS", 1)] for one in ids)
