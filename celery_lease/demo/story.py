"""The show: which worker is killed, frozen and thawed, and when.

Nothing here is timed by hope: each act waits until the store says that the scene is set. What
is claimed at the end is not this module's to say (``verdict``).
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from celery_lease import history
from celery_lease.demo.app import (
    AFTER_THE_LAST_CHECK,
    HALFWAY,
    INDEX_TO_THE_END,
    gate,
    store_path,
)
from celery_lease.demo.evidence import Evidence, Key, read_jobs
from celery_lease.demo.gates import Gate
from celery_lease.demo.library import Package
from celery_lease.demo.processes import node_name, start_beat, start_worker
from celery_lease.demo.screen import Kind
from celery_lease.demo.stage import (
    ALL,
    BEAT,
    LOOK_SECONDS,
    DemoFailed,
    Stage,
    progress_of,
    short_name,
)
from celery_lease.history import Attempt
from celery_lease.states import AttemptState

FIRST, SECOND, REPLACEMENT = "w1", "w2", "w3"
#: Longest waits, seconds; a quiet machine needs a tenth.
_SCENE_SECONDS = 60.0
_TAKE_OVER_SECONDS = 45.0
_LATE_SECONDS = 30.0
_PLAIN_SECONDS = 90.0
_FREEZE_TRIES = 20


def play(stage: Stage) -> Evidence:
    """Give the show; return what can be said about it.

    Raises:
        DemoFailed: it cannot go on.
    """
    _introduce(stage)
    started_at = history.now(stage.app) - timedelta(seconds=stage.seconds())
    _begin(stage)
    killed_worker, killed = _kill_one(stage)
    _go_on(stage)
    zombie = _freeze_one(stage)
    frozen_at = stage.seconds()
    plain = stage.run_plainly()
    _see_it_taken_over(stage, zombie)
    _thaw(stage, zombie, frozen_at)
    _see_it_through(stage)
    stage.ask_to_stop()
    results = stage.until(plain.results, seconds=_PLAIN_SECONDS, what="the plain run to end")
    stage.tell(Kind.STEP, f"the same plainly, without Celery, took {plain.seconds:.1f} s")
    # Read when nobody is left to change anything.
    stage.stop()
    return Evidence(
        names=stage.names,
        jobs=read_jobs(stage.app),
        plain=results,
        killed_worker=killed_worker,
        killed=killed,
        frozen_worker=zombie.worker or "",
        zombie=_key(zombie),
        started_at=started_at,
        seconds=stage.seconds(),
    )


def _introduce(stage: Stage) -> None:
    files = sum(len(package.files) for package in stage.packages)
    megabytes = sum(package.size for package in stage.packages) / 1e6
    jobs = f"The jobs: index {files} files ({megabytes:.1f} MB) of {stage.root}"
    stage.screen.open(
        [
            "One worker will be killed in mid-job, another frozen until its lease is gone.",
            f"{jobs}, one leased job a package.",
        ]
    )
    if stage.broker is None:
        return
    try:
        with stage.app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=5)
    except Exception as error:
        raise DemoFailed(f"the broker cannot be reached: {error}") from error


def _begin(stage: Stage) -> None:
    for name in (HALFWAY, AFTER_THE_LAST_CHECK):
        _gate(stage, name).shut()
    # Before the workers: kombu's filesystem broker is not made for two that declare a queue.
    stage.submit(stage.to_kill)
    for package in _others(stage)[::2]:
        stage.submit(package)
    stage.tell(Kind.STEP, f"{len(stage.names)} jobs submitted")
    for name in (FIRST, SECOND):
        stage.enter(name, start_worker(name, folder=stage.folder, broker=stage.broker))
    stage.enter(BEAT, start_beat(folder=stage.folder, broker=stage.broker))
    stage.tell(Kind.STEP, f"workers `{FIRST}` and `{SECOND}`, and beat, started")


def _kill_one(stage: Stage) -> tuple[str, tuple[Key, ...]]:
    target = stage.until(
        lambda: _half_done(stage),
        seconds=_SCENE_SECONDS,
        what=f"a worker to be in the middle of {stage.to_kill.name}",
    )
    name = short_name(target.worker)
    stage.kill(name)
    _gate(stage, HALFWAY).open()
    # It is dead, so what it held stays as it is until somebody finds out.
    held = history.attempts(stage.app, worker=node_name(name), live=True, limit=ALL)
    held.sort(key=lambda one: one.job_id != target.job_id)
    scenes = " and ".join(stage.scene(attempt) for attempt in held)
    stage.tell(Kind.KILLED, f"worker `{name}` SIGKILLed while it indexes {scenes}")
    return node_name(name), tuple(map(_key, held))


def _half_done(stage: Stage) -> Attempt | None:
    """Return who is in the middle of the first leading role, its checkpoint in the store."""
    reached = _gate(stage, HALFWAY).reached()
    if reached is None:
        return None
    attempt = stage.live_attempt(reached.job_id, reached.fencing_token)
    if attempt is None or attempt.checkpoint is None:
        return None
    return attempt if progress_of(attempt)[0] == len(stage.to_kill.files) // 2 else None


def _go_on(stage: Stage) -> None:
    worker = start_worker(REPLACEMENT, folder=stage.folder, broker=stage.broker)
    stage.enter(REPLACEMENT, worker)
    before = len(stage.names)
    stage.submit(stage.to_freeze, task=INDEX_TO_THE_END)
    for package in _others(stage)[1::2]:
        stage.submit(package)
    more = len(stage.names) - before
    stage.tell(
        Kind.STEP, f"worker `{REPLACEMENT}` started in its place; {more} more jobs submitted"
    )


def _freeze_one(stage: Stage) -> Attempt:
    stage.until(
        stage.workers_are_ready,
        seconds=_SCENE_SECONDS,
        what="every worker to be ready, so that a healthy one is left",
    )
    for _ in range(_FREEZE_TRIES):
        attempt = stage.until(
            lambda: _past_its_last_check(stage),
            seconds=_SCENE_SECONDS,
            what=f"a worker to be past its last check() in {stage.to_freeze.name}",
        )
        name = short_name(attempt.worker)
        stage.freeze(name)
        if _is_free(store_path(stage.folder)):
            still = stage.live_attempt(*_key(attempt))
            if still is not None:
                _gate(stage, AFTER_THE_LAST_CHECK).open()
                left = (still.lease_expires_at - history.now(stage.app)).total_seconds()
                stage.tell(
                    Kind.FROZEN,
                    f"worker `{name}` frozen (SIGSTOP) after the last check() in "
                    f"{stage.scene(still)}; its lease has {left:.1f} s left",
                )
                return still
        stage.thaw(name)
        time.sleep(LOOK_SECONDS)
    raise DemoFailed("no moment was found to freeze a worker without freezing the store")


def _past_its_last_check(stage: Stage) -> Attempt | None:
    reached = _gate(stage, AFTER_THE_LAST_CHECK).reached()
    if reached is None:
        return None
    return stage.live_attempt(reached.job_id, reached.fencing_token)


def _is_free(path: Path) -> bool:
    """Tell whether the SQLite file can be written.

    A process that is stopped while it writes keeps the lock, so that nobody can: on a machine
    of its own, with a database server, it would not do that to the others.
    """
    with closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        return True


def _see_it_taken_over(stage: Stage, zombie: Attempt) -> None:
    name = stage.to_freeze.name

    def completed() -> Attempt | None:
        for one in history.attempts(stage.app, job_id=zombie.job_id):
            is_later = one.fencing_token > zombie.fencing_token
            if is_later and one.state is AttemptState.COMPLETED:
                return one
        return None

    winner = stage.until(
        completed, seconds=_TAKE_OVER_SECONDS, what=f"another worker to take {name} over"
    )
    stage.tell(
        Kind.DONE,
        f"`{name}` completed by `{short_name(winner.worker)}` (token {winner.fencing_token}), "
        f"while token {zombie.fencing_token} stands still",
    )


def _thaw(stage: Stage, zombie: Attempt, frozen_at: float) -> None:
    name = short_name(zombie.worker)
    stage.thaw(name)
    thawed_at = stage.seconds()
    stage.tell(
        Kind.THAWED,
        f"worker `{name}` thawed after {thawed_at - frozen_at:.1f} s; it does not know",
    )

    def rejected() -> bool:
        return any(
            _key(one) == _key(zombie) and one.rejected_at is not None
            for one in history.attempts(stage.app, job_id=zombie.job_id)
        )

    stage.until(rejected, seconds=_LATE_SECONDS, what="the zombie's late result to arrive")
    stage.tell(
        Kind.REJECTED,
        f"its late result for `{stage.to_freeze.name}` (token {zombie.fencing_token}) came: "
        "rejected, kept on its own attempt",
    )


def _see_it_through(stage: Stage) -> None:
    def all_over() -> bool:
        jobs = history.jobs(stage.app, limit=ALL)
        over = [job for job in jobs if job.is_final and job.is_settled]
        return len(over) == len(jobs) >= len(stage.names)

    stage.until(
        all_over, seconds=_SCENE_SECONDS, what="every job to end and be settled with Celery"
    )
    stage.tell(Kind.DONE, f"all {len(stage.names)} jobs are final, and settled with Celery")


def _others(stage: Stage) -> list[Package]:
    roles = (stage.to_kill, stage.to_freeze)
    return [package for package in stage.packages if package not in roles]


def _gate(stage: Stage, name: str) -> Gate:
    return gate(stage.folder, name)


def _key(attempt: Attempt) -> Key:
    return attempt.job_id, attempt.fencing_token
