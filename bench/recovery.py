"""How soon a job runs again after each way in which its runner can end.

Real workers on this machine; the time is from the signal to the first line of the next body. The
bounds are those of the issue that asked for them, and of docs/recovery.md.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.place import Place
from bench.recovery_app import make_app
from tests.support.waiting import eventually
from tests.support.workers import Beat, CeleryWorker

if TYPE_CHECKING:
    from typing_extensions import Self

APP = "bench.recovery_app"
#: seconds: short enough to wait for, long enough to be told from the passes
LEASE = 6.0
INTERVAL = 1.0
#: seconds: what follows the pass that finds it (design, section 5; issue 3)
REST = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to end a runner.

    Attributes:
        name: in the results.
        title: for people.
        bound: seconds within which the next attempt begins.
        other_host: True when the workers may not see each other's processes.
    """

    name: str
    title: str
    bound: float
    other_host: bool = False


WAYS = (
    Way("child", "SIGKILL to the child that runs it", 1.0),
    Way("tree", "SIGKILL to the whole worker, another on the same host", 1.0),
    Way(
        "tree-elsewhere",
        "the same, the other on another host",
        LEASE + INTERVAL + REST,
        other_host=True,
    ),
    Way("stop", "SIGTERM to the worker, the body hands over", 1.0),
)


def run(place: Place, *, kills: int) -> list[dict[str, Any]]:
    """Measure each way ``kills`` times; return the distribution of each."""
    return [_measure(place, way, kills) for way in WAYS]


def _measure(place: Place, way: Way, kills: int) -> dict[str, Any]:
    with _Stage(place, way) as stage:
        seconds = sorted(stage.once() for _ in range(kills))
    return {
        "way": way.name,
        "title": way.title,
        "bound": way.bound,
        "kills": kills,
        "seconds": [round(one, 3) for one in seconds],
    }


class _Stage:
    """Two workers (for ``child`` one) and beat, on a fresh store."""

    def __init__(self, place: Place, way: Way) -> None:
        self._way = way
        store = place.fresh()
        self._temporary = TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._marks = self._folder / "marks"
        self._environment = {
            "BENCH_BROKER": place.valkey.url,
            "BENCH_DATABASE": store,
            "BENCH_MARKS": str(self._marks),
        }
        self._workers: list[CeleryWorker] = []
        self._started = 0
        self._read = 0
        self._marked: dict[tuple[str, int], tuple[int, float]] = {}

    def _conf(self, host: str) -> dict[str, Any]:
        conf: dict[str, Any] = {"lease_duration": LEASE, "lease_reaper_interval": INTERVAL}
        if self._way.other_host:
            # Owner files are a host's: a folder each is a host each.
            folder = self._folder / f"run-{host}"
            folder.mkdir(mode=0o700, exist_ok=True)
            conf["lease_run_dir"] = str(folder)
        return conf

    def __enter__(self) -> Self:
        self._app = make_app(self._environment | {"BENCH_CONF": self._text("here")})
        self._beat = Beat(APP, env=self._environment | {"BENCH_CONF": self._text("beat")})
        self._beat.start()
        for _ in range(1 if self._way.name == "child" else 2):
            self._start()
        self._beat.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._workers, self._beat):
            process.close()
        self._app.close()
        self._temporary.cleanup()

    def _text(self, host: str) -> str:
        return json.dumps(self._conf(host))

    def _start(self) -> None:
        self._started += 1
        name = f"w{self._started}"
        env = self._environment | {"BENCH_CONF": self._text(name)}
        worker = CeleryWorker(APP, name=name, concurrency=2, env=env)
        self._workers.append(worker.start())
        worker.wait_ready()

    def once(self) -> float:
        """End one runner; return the seconds to the next body."""
        job_id = self._app.tasks["wait"].delay(self._way.name == "stop").id
        pid, _ = self._wait_begun(job_id, 1)
        holder = next(w for w in self._workers if pid in w.children())
        started_at = time.monotonic()
        if self._way.name == "child":
            os.kill(pid, signal.SIGKILL)
        elif self._way.name == "stop":
            holder.send(signal.SIGTERM)
        else:
            holder.kill_group()
        _, begun_at = self._wait_begun(job_id, 2)
        if self._way.name != "child":
            holder.wait()
            holder.close()
            self._workers.remove(holder)
            self._start()
        return begun_at - started_at

    def _wait_begun(self, job_id: str, token: int) -> tuple[int, float]:
        return eventually(
            lambda: self._marks_of().get((job_id, token)),
            timeout=60,
            interval=0.01,
            what=lambda: "\n".join(w.log()[-3000:] for w in self._workers),
        )

    def _marks_of(self) -> dict[tuple[str, int], tuple[int, float]]:
        if self._marks.exists():
            # Without what is being written at this moment.
            lines = self._marks.read_text().split("\n")[:-1]
            for line in lines[self._read :]:
                job_id, token, pid, at = json.loads(line)
                self._marked[job_id, token] = (pid, at)
            self._read = len(lines)
        return self._marked
