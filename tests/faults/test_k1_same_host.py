"""K1 on one host: a worker that was killed whole is known to the others at once (B001, B009).

The lease is far longer than any bound here: what is fast is the owner files' doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_lease.worker import OWNER_LOOK_SECONDS
from tests.faults.stage import SLACK, Stage, counts
from tests.support import processes
from tests.support.waiting import eventually, never

#: seconds
LEASE = 60.0
BOUND = 2 * OWNER_LOOK_SECONDS + SLACK


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    # A killed worker's connection may still be given a message: it is sent again after this.
    return make_stage(lease_duration=LEASE, lease_queued_timeout=30.0)


def waits(stage: Stage, ids: list[str], killed_at: Any) -> list[float]:
    """Return how long after the kill each second attempt was claimed, by the store's clock."""
    for one in ids:
        stage.wait_begun(one, 2)
    return [(stage.attempts(one)[1]["claimed_at"] - killed_at).total_seconds() for one in ids]


def now(stage: Stage) -> Any:
    return stage.scalar("SELECT clock_timestamp()")


@counts(2, 20)
def test_the_jobs_of_a_killed_worker_start_elsewhere_on_the_host_within_a_second(
    count: int, stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    stage.worker(concurrency=4)
    seconds: list[float] = []

    for number in range(count):
        # Only this one is idle enough to take them: the other one's places are for later.
        doomed = stage.worker(concurrency=4, name=f"doomed{number}", settings={})
        ids = [stage.send({"wait": {"1": f"go{number}"}}).id for _ in range(6)]
        for one in ids:
            stage.wait_begun(one)
        theirs = [one for one in ids if stage.attempts(one)[0]["worker"] == doomed.nodename]
        assert theirs
        doomed.kill_group()
        killed_at = now(stage)
        stage.ledger.open_gate(f"go{number}")

        seconds += waits(stage, theirs, killed_at)
        for one in ids:
            token = 2 if one in theirs else 1
            stage.assert_accepted_once(one, token)
            assert stage.job(one)["lost_count"] == token - 1
        for one in theirs:
            first = stage.attempts(one)[0]
            assert first["state"] == "lost"
            assert first["stop_reason"] == "its process is gone (owner file)"

    record_property("restart_seconds", sorted(round(s, 3) for s in seconds))
    assert max(seconds) <= BOUND, seconds


def test_a_worker_that_starts_later_reports_them_at_once(stage: Stage) -> None:
    doomed = stage.worker(concurrency=2)
    ids = [stage.send({"wait": {"1": "never"}}).id for _ in range(2)]
    for one in ids:
        stage.wait_begun(one)
    doomed.kill_group()
    never(lambda: any(stage.attempts(one)[0]["ended_at"] for one in ids), during=1.0)

    stage.worker(concurrency=2)
    ready_at = now(stage)

    assert max(waits(stage, ids, ready_at)) <= BOUND
    for one in ids:
        stage.assert_accepted_once(one, 2)


def test_a_frozen_worker_is_nobodys_loss(stage: Stage) -> None:
    frozen = stage.worker(concurrency=1, name="frozen")
    sent = stage.send({"wait": {"1": "go"}})
    stage.wait_begun(sent.id)
    frozen.freeze()
    stage.worker(concurrency=1)

    never(lambda: stage.attempts(sent.id)[0]["ended_at"], during=4 * OWNER_LOOK_SECONDS)

    stage.ledger.open_gate("go")
    frozen.thaw()
    stage.assert_accepted_once(sent.id, 1)


def test_a_worker_that_ends_in_good_order_leaves_no_file_and_no_loss(
    stage: Stage, tmp_path: Any
) -> None:
    folder = tmp_path / "run"
    first = stage.worker(concurrency=2, settings={"lease_run_dir": str(folder)})
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert list(folder.iterdir())

    assert first.stop() == 0

    assert list(folder.iterdir()) == []


def test_a_worker_without_a_usable_folder_says_so_once_and_leaves_it_to_the_lease(
    make_stage: Callable[..., Stage], tmp_path: Any
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    stage = make_stage(lease_duration=3.0, lease_run_dir=str(folder))
    doomed = stage.worker(concurrency=2)
    ids = [stage.send({"wait": {"1": "never"}}).id for _ in range(2)]
    for one in ids:
        stage.wait_begun(one)
    assert doomed.log().count("lease.owner.unwatched") == 1
    doomed.kill_group()

    stage.worker(concurrency=2)

    for one in ids:
        stage.assert_accepted_once(one, 2)
        assert stage.attempts(one)[0]["state"] == "expired"
    assert list(folder.iterdir()) == []


@counts(1, 10)
def test_a_childs_death_is_told_by_its_own_worker_which_knows_the_signal(
    count: int, stage: Stage
) -> None:
    stage.worker(concurrency=4)

    for _ in range(count):
        ids = [stage.send({"then": {"1": "kill child"}}).id for _ in range(8)]

        for one in ids:
            stage.assert_accepted_once(one, 2)
            assert "SIGKILL" in stage.attempts(one)[0]["stop_reason"]


def test_a_child_killed_under_a_blocking_pool_is_known_within_three_seconds(
    make_stage: Callable[..., Stage], tmp_path: Any
) -> None:
    """Celery itself says so after eleven: no event loop, no pipe to the child (F§4)."""
    box = tmp_path / "broker"
    for name in ("in", "control"):
        (box / name).mkdir(parents=True)
    stage = make_stage(
        lease_duration=LEASE,
        broker_url="filesystem://",
        broker_transport_options={
            "data_folder_in": str(box / "in"),
            "data_folder_out": str(box / "in"),
            "control_folder": str(box / "control"),
            "polling_interval": 0.1,
        },
    )
    worker = stage.worker(concurrency=2)
    sent = stage.send({"wait": {"1": "never"}})
    begun = stage.wait_begun(sent.id)
    killed_at = now(stage)
    processes.send(begun["pid"], 9)

    eventually(lambda: stage.attempts(sent.id)[0]["ended_at"], timeout=10)

    first = stage.attempts(sent.id)[0]
    # A child of its own is left to the pool for a second; two looks, and a busy machine.
    assert (first["ended_at"] - killed_at).total_seconds() <= 3.0
    assert worker.is_running
    assert first["state"] == "lost"
