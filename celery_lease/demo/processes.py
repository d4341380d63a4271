"""The demo's workers and beat as processes: started, killed, frozen and thawed as a whole.

Each leads a session and so a process group, which its pool's children are in too: a signal to
the group is what a machine that dies, or stands still, looks like.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import celery_lease
from celery_lease.demo import variables

CONCURRENCY = 2
STOP_SECONDS = 8.0
_FREEZE_SECONDS = 2.0
_LOOK_SECONDS = 0.01
_LOG_LINES = 12
_PROC = Path("/proc")
_STOPPED = frozenset("Tt")
_GONE = frozenset("ZXx")


class CeleryProcess:
    """One ``celery worker`` or ``celery beat``.

    Args:
        name: for people; of a worker also the first half of its node name.
        arguments: what follows ``celery -A celery_lease.demo.workers``.
        folder: the run's folder, where it runs and logs.
        broker: a broker's URL, None for the embedded one.
    """

    def __init__(
        self, name: str, arguments: list[str], *, folder: Path, broker: str | None
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and package
                [sys.executable, "-m", "celery", "-A", "celery_lease.demo.workers", *arguments],
                cwd=folder,
                env=_environment(folder, broker),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal that killed it), None while it runs."""
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        """True once a worker takes messages, or beat sends them."""
        log = self._log.read_text(errors="replace")
        return " ready." in log or "beat: Starting..." in log

    def last_words(self) -> str:
        """Return the end of its log."""
        lines = self._log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    def kill(self) -> None:
        """SIGKILL all of it; returns when nothing of it runs any more."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._until(lambda states: not states)

    def freeze(self) -> None:
        """SIGSTOP all of it; returns when all stand still."""
        self._signal(signal.SIGSTOP)
        self._until(lambda states: states <= _STOPPED)

    def thaw(self) -> None:
        """SIGCONT all of it."""
        self._signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Have it end when its running bodies have (a warm shutdown)."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def end(self, timeout_seconds: float) -> None:
        """Wait for its end, and kill what is left of it then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_seconds))
        self.kill()

    def _signal(self, number: int) -> None:
        # Gone already, or (macOS) nothing but zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _until(self, holds: Callable[[set[str]], bool]) -> None:
        if not _PROC.joinpath("self", "stat").exists():
            time.sleep(0.2)
            return
        end = time.monotonic() + _FREEZE_SECONDS
        while not holds(set(_states(self._process.pid))) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


def start_worker(name: str, *, folder: Path, broker: str | None) -> CeleryProcess:
    """Start a worker."""
    options = ["-n", node_name(name), "-P", "prefork", "-c", str(CONCURRENCY), "-l", "INFO"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    return CeleryProcess(name, ["worker", *options, *quiet], folder=folder, broker=broker)


def start_beat(*, folder: Path, broker: str | None) -> CeleryProcess:
    """Start beat."""
    options = ["--schedule", str(folder / "beat-schedule"), "--pidfile=", "-l", "INFO"]
    return CeleryProcess("beat", ["beat", *options], folder=folder, broker=broker)


def node_name(name: str) -> str:
    """Return a worker's name as the store has it."""
    return f"{name}@demo"


def end_all(processes: list[CeleryProcess], *, stop_seconds: float) -> None:
    """End processes together: asked first when there is time for it, killed then."""
    until = time.monotonic() + stop_seconds
    for process in processes:
        process.thaw()
        if stop_seconds > 0:
            process.ask_to_stop()
    for process in processes:
        process.end(until - time.monotonic())


def _environment(folder: Path, broker: str | None) -> dict[str, str]:
    # CELERY_BROKER_URL and its like would win over the demo's own settings.
    env = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    env |= {
        variables.FOLDER: str(folder),
        variables.BROKER: broker or "",
        variables.PARENT: str(os.getpid()),
        "C_FORCE_ROOT": "1",
        "PYTHONUNBUFFERED": "1",
        # kombu's filesystem broker moves what it has taken to the folder for temporary files.
        "TMPDIR": str(scratch),
    }
    source = Path(celery_lease.__file__).parents[1]
    if not {"site-packages", "dist-packages"} & set(source.parts):
        # A checkout that is not installed is found by the workers too.
        paths = [str(source), *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _states(group: int) -> Iterator[str]:
    """Give the state letter of each process in a group that has not ended."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, _, process_group = fields[:3]
        if int(process_group) == group and state not in _GONE:
            yield state
