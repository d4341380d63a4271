"""One run of one system: enqueue, drain, single jobs, memory.

The drain is counted from the first body that ran to the moment the system itself has recorded the
last job: all bodies have run, and no message waits or is unacknowledged (a late acknowledgement
comes after the result). The worker's start is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.place import Place
from bench.systems import System
from tests.support import processes
from tests.support.workers import ROOT, CeleryWorker

#: Jobs before the measured ones: connections are made, statements compiled.
WARM_JOBS = 20
CONCURRENCY = 2
#: The first single jobs are not counted.
DROPPED_SINGLES = 3
MARK_BYTES = 8
GIVE_UP_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        jobs: in one enqueue and drain.
        singles: single jobs on an idle worker.
        repetitions: of everything.
    """

    jobs: int
    singles: int
    repetitions: int


def run(place: Place, system: System, sizes: Sizes) -> dict[str, Any]:
    """Measure one system once, on a fresh database and with a fresh worker."""
    env = _environment(place, system, place.fresh())
    found = _enqueue(place, env, sizes.jobs)
    worker = CeleryWorker(
        "bench.app",
        name="bench",
        concurrency=CONCURRENCY,
        loglevel="WARNING",
        env=env,
        folder=place.folder,
    )
    try:
        found |= _drain(place, worker, Path(env["BENCH_MARKS"]), sizes.jobs)
        found |= _memory(worker)
        found |= _singles(env, sizes.singles)
    except BaseException:
        print(worker.log()[-3000:], file=sys.stderr)
        raise
    finally:
        worker.close()
    return found


def _environment(place: Place, system: System, database: str) -> dict[str, str]:
    marks = place.folder / "marks"
    marks.write_bytes(b"")
    env = {
        "BENCH_SYSTEM": system.name,
        "BENCH_BROKER": place.valkey.url,
        "BENCH_DATABASE": database,
        "BENCH_MARKS": str(marks),
    }
    if place.events_path is not None:
        env["BENCH_SQL_EVENTS"] = str(place.events_path)
    return env


def _enqueue(place: Place, env: dict[str, str], jobs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.enqueue", str(WARM_JOBS), str(jobs)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "warm\n":
            raise RuntimeError("bench.enqueue did not get warm")
        place.reset_counts()
        process.stdin.write("go\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
    sql = place.sql_counts()
    return {
        "enqueue_per_second": jobs / said["seconds"],
        "enqueue_cpu_ms": said["cpu_seconds"] / jobs * 1000,
        "enqueue_statements": sql.per_job(jobs),
        "enqueue_statements_all": sql.statements / jobs,
        "enqueue_round_trips": sql.round_trips / jobs,
        "enqueue_redis_commands": place.redis_commands() / jobs,
    }


def _drain(place: Place, worker: CeleryWorker, marks: Path, jobs: int) -> dict[str, Any]:
    total = jobs + WARM_JOBS
    place.reset_counts()
    spawned = time.monotonic()
    worker.start()
    _wait(worker, lambda: _count(marks) > 0, poll=0.002)
    before = _Snapshot(place, worker)
    _wait(worker, lambda: _count(marks) >= total, poll=0.01)
    _wait(worker, lambda: place.undone() == 0, poll=0.001)
    ended = time.monotonic()
    after = _Snapshot(place, worker)
    sql = place.sql_counts()
    commands = place.redis_commands()
    first = int.from_bytes(marks.read_bytes()[:MARK_BYTES], "little") / 1e9
    counted = total - before.jobs
    worker_cpu = after.worker_cpu - before.worker_cpu
    server_cpu = after.server_cpu - before.server_cpu
    seconds = after.at - before.at
    others = after.busy - before.busy - worker_cpu - server_cpu - (after.own_cpu - before.own_cpu)
    return {
        "drain_per_second": (total - 1) / (ended - first),
        "worker_start_seconds": first - spawned,
        "worker_cpu_ms": worker_cpu / counted * 1000,
        "server_cpu_ms": server_cpu / counted * 1000,
        "run_statements": sql.per_job(total),
        "run_statements_all": sql.statements / total,
        "run_round_trips": sql.round_trips / total,
        "run_redis_commands": commands / total,
        "run_wal_bytes": sql.wal_bytes / total,
        "others_cores": max(0.0, others / seconds),
        "stolen_cores": (after.stolen - before.stolen) / seconds,
        "statements": [
            {"calls": calls, "text": " ".join(text.split())[:160]} for calls, text in sql.each[:12]
        ],
    }


class _Snapshot:
    """CPU so far, and how many jobs had run."""

    def __init__(self, place: Place, worker: CeleryWorker) -> None:
        self.jobs = _count(place.folder / "marks")
        self.at = time.monotonic()
        self.worker_cpu = machine.cpu_seconds(processes.tree(worker.pid))
        servers = [*processes.tree(place.postgresql.pid), *processes.tree(place.valkey.pid)]
        self.server_cpu = machine.cpu_seconds(servers)
        own = os.times()
        self.own_cpu = own.user + own.system
        self.busy, self.stolen = machine.busy_seconds()


def _memory(worker: CeleryWorker) -> dict[str, Any]:
    """Return the memory of the main process, and the mean of its children's."""
    children = [machine.memory(pid) for pid in worker.children()]
    family = [machine.memory(worker.pid), *children]
    found: dict[str, Any] = {}
    for kind in ("rss", "pss", "private"):
        found[f"main_{kind}_mb"] = family[0][kind]
        found[f"child_{kind}_mb"] = statistics.mean(child[kind] for child in children)
        found[f"process_{kind}_mb"] = statistics.mean(one[kind] for one in family)
    return found


def _singles(env: dict[str, str], singles: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.single", str(singles + DROPPED_SINGLES)]
    said = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True
    )
    rows = json.loads(said.stdout)[DROPPED_SINGLES:]
    return {
        "idle_start_ms": [row["start"] for row in rows],
        "idle_done_ms": [row["done"] for row in rows if row["done"] is not None],
    }


def _count(marks: Path) -> int:
    return marks.stat().st_size // MARK_BYTES


def _wait(worker: CeleryWorker, ready: Any, *, poll: float) -> None:
    until = time.monotonic() + GIVE_UP_SECONDS
    while not ready():
        if not worker.is_running or time.monotonic() > until:
            raise RuntimeError(f"the worker did not get on\n{worker.log()[-3000:]}")
        time.sleep(poll)
