"""K5: a fleet that is deployed again and again under its jobs (B045)."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from tests.faults.stage import Stage, counts
from tests.support.workers import CeleryWorker

#: seconds that a supervisor gives a worker between SIGTERM and SIGKILL
GRACE = 4.0
#: a body is longer
STEPS, STEP_SECONDS = 60, 0.1


@counts(24, 200)
def test_jobs_longer_than_the_grace_end_under_rolling_restarts(
    count: int, make_stage: Callable[..., Stage]
) -> None:
    """None is lost, none starts from the beginning, none is counted as lost."""
    stage = make_stage(lease_duration=30.0)
    ids = [
        stage.app.tasks["faults.steps"].apply_async((STEPS, STEP_SECONDS)).id for _ in range(count)
    ]
    fleet = stage.workers(2, concurrency=8)
    names = itertools.count(3)
    stops = Counter[str]()

    for turn in itertools.count():
        leaving = fleet[turn % 2]
        time.sleep(1.0)  # the time between two restarts of a deploy; nothing is waited for
        if all_done(stage, count):
            break
        stops[restart(leaving)] += 1
        fleet[turn % 2] = stage.worker(concurrency=8, name=f"worker{next(names)}")

    assert sum(stops.values()) >= 2, stops
    for one in ids:
        job = stage.job(one)
        attempts = stage.attempts(one)
        assert job["state"] == "succeeded", (job, attempts)
        assert job["lost_count"] == 0, (job, attempts)
        assert {a["state"] for a in attempts[:-1]} <= {"released", "lost"}, attempts
        assert attempts[-1]["state"] == "completed", attempts
    assert any(len(stage.attempts(one)) > 1 for one in ids)
    # The step at which one was killed is done again; nothing before it ever is.
    steps = Counter((e["job"], e["step"]) for e in stage.ledger.read("step"))
    assert set(steps) == {(one, step) for one in ids for step in range(STEPS)}
    begun = Counter(e["job"] for e in stage.ledger.read("step", step=0) if e["token"] > 1)
    killed = Counter(one for one in ids for a in stage.attempts(one) if a["state"] != "released")
    assert all(begun[one] <= killed[one] for one in ids), begun


def all_done(stage: Stage, count: int) -> bool:
    done = stage.scalar("SELECT count(*) FROM celery_lease_job WHERE finished_at IS NOT NULL")
    return bool(done == count)


def restart(worker: CeleryWorker) -> str:
    """Stop a worker as a supervisor does; return what ended it."""
    worker.send(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        worker.wait(GRACE)
        return "by itself"
    worker.kill_group()
    return "killed"
