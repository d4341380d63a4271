"""Celery workers and beat as processes of their own, to be killed and frozen by tests.

Each is the leader of a session and a process group, which holds its pool's children too: a signal
to the group is what the end of a container or a machine looks like.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import forking, processes
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

#: the checkout: its ``tests`` and ``celery_lease`` are found from here
ROOT = Path(__file__).resolve().parents[2]

_numbers = itertools.count(1)


class WorkerEnded(RuntimeError):
    """Raised when a process has ended that a test waits for; the message ends with its log."""


class CeleryProcess:
    """One ``python -m celery -A APP …`` process.

    Args:
        app: what ``-A`` gets, for example ``"tests.worker.apps.plain"``.
        name: of the process, for its log and, for a worker, before the ``@``.
        env: added to our own environment; ``CELERY_BROKER_URL`` and ``CELERY_RESULT_BACKEND`` are
            read by Celery itself. A value None removes the variable.
        cwd: working directory, which is also first on the module path; the checkout by default.
        folder: where the log goes; a temporary one by default.
        python: the interpreter, ours by default.
    """

    #: a line of the log that has this text says that it is at work
    ready_text = ""

    def __init__(
        self,
        app: str,
        *,
        name: str = "",
        env: Mapping[str, str | None] | None = None,
        cwd: Path = ROOT,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self.app = app
        self.name = name or f"{type(self).__name__.lower()}{next(_numbers)}"
        self.cwd = cwd
        self.folder = folder or Path(tempfile.mkdtemp(prefix="celery-"))
        self.log_path = self.folder / f"{self.name}.log"
        self._python = python
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | forking.Forked | None = None
        self._log_start = 0

    def command(self) -> list[str]:
        """Return the command line."""
        return [self._python, "-m", "celery", "-A", self.app]

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start it; ``wait_ready`` waits for it. After it has ended: start another, same name."""
        assert not self.is_running, f"{self.name} runs already"
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command, env = self.command(), self._environment()
        if forking.can_be_forked(command, env):
            self._process = forking.nursery().fork(
                command[3:], folder=self.cwd, log=self.log_path, env=env
            )
        else:
            self._process = processes.spawn(command, folder=self.cwd, log=self.log_path, env=env)
        return self

    def wait_ready(self, timeout: float = 30.0) -> Self:
        """Wait until its log says that it is at work."""
        return self.wait_log(self.ready_text, timeout=timeout)

    def wait_log(self, text: str, timeout: float = 10.0) -> Self:
        """Wait until the log of the running process has a text.

        Raises:
            WorkerEnded: it has ended without that text.
        """

        def said() -> bool:
            ended = not self.is_running
            if text in self.log():
                return True
            if ended:
                message = f"{self.name} ended with {self.exit_code}\n{self.log()[-4000:]}"
                raise WorkerEnded(message)
            return False

        eventually(said, timeout=timeout, what=lambda: f"{text!r} in:\n{self.log()[-4000:]}")
        return self

    def stop(self, timeout: float = 20.0) -> int:
        """Ask it to end (SIGTERM: warm shutdown), kill it if it does not; return the exit code."""
        assert self._process is not None, f"{self.name} was never started"
        return processes.end(self._process, number=signal.SIGTERM, timeout=timeout)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait for its end and return the exit code (negative: the signal that killed it)."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.wait(timeout)

    # --- harm ---------------------------------------------------------------------------------

    def send(self, number: int) -> None:
        """Send a signal to the main process alone."""
        processes.send(self.pid, number)

    def kill_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the whole group; for SIGKILL: return when all are gone.

        The main process stays a zombie for nobody: its exit code is taken.
        """
        family = processes.tree(self.pid)
        os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            self.wait()
            for one in family:
                # Some body may have started a process in a session of its own.
                processes.kill_tree(one)

    def freeze(self) -> None:
        """Stop all its processes, as a paused machine does; connections stay open."""
        processes.freeze_tree(self.pid)

    def thaw(self) -> None:
        """Let it go on after ``freeze``."""
        processes.thaw_tree(self.pid)

    # --- what it is and says ------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The main process."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the main process is alive (a frozen one is)."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def children(self) -> list[int]:
        """Return the direct children that are alive: with prefork, the pool."""
        return processes.children(self.pid)

    def log(self) -> str:
        """Return what it has written since its last start."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Kill what is left of it."""
        if self._process is not None and self._process.poll() is None:
            processes.kill_tree(self._process.pid)
            self._process.wait()

    def __enter__(self) -> Self:
        return self.start().wait_ready()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _environment(self) -> dict[str, str]:
        merged: dict[str, str | None] = {
            # As root Celery only warns, unless pickle is accepted; then it refuses.
            "C_FORCE_ROOT": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in os.environ.items() if "PYTEST" not in name},
            **self._env,
        }
        return {name: value for name, value in merged.items() if value is not None}


class CeleryWorker(CeleryProcess):
    """A Celery worker.

    Args:
        app: see ``CeleryProcess``, as are the arguments not listed here.
        pool: ``"prefork"``, ``"threads"``, ``"solo"``, ``"gevent"`` …
        concurrency: processes, threads or greenlets of the pool.
        queues: what it consumes, comma-separated; the app's default queue if empty.
        loglevel: of the worker.
        lean: without gossip and mingle, which tests seldom need: mingle alone waits for a second.
        arguments: more of the command line.
    """

    ready_text = " ready."

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        queues: str = "",
        loglevel: str = "INFO",
        lean: bool = True,
        arguments: Sequence[str] = (),
        name: str = "",
        env: Mapping[str, str | None] | None = None,
        cwd: Path = ROOT,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        super().__init__(app, name=name, env=env, cwd=cwd, folder=folder, python=python)
        self._arguments = [
            *("-n", self.nodename, "-P", pool, "-c", str(concurrency), "-l", loglevel),
            *(("-Q", queues) if queues else ()),
            *(("--without-gossip", "--without-mingle") if lean else ()),
            *arguments,
        ]

    @property
    def nodename(self) -> str:
        """Its name among the workers, as events and ``inspect`` have it."""
        return f"{self.name}@test"

    def command(self) -> list[str]:
        """Return the command line."""
        return [*super().command(), "worker", *self._arguments]


class Beat(CeleryProcess):
    """Celery's beat, with its schedule file beside its log.

    Args:
        app: see ``CeleryProcess``, as are the arguments not listed here.
        max_interval: seconds at most between two looks at the schedule; whole ones, says Celery.
        arguments: more of the command line.
    """

    ready_text = "beat: Starting..."

    def __init__(
        self,
        app: str,
        *,
        max_interval: int = 1,
        loglevel: str = "INFO",
        arguments: Sequence[str] = (),
        name: str = "",
        env: Mapping[str, str | None] | None = None,
        cwd: Path = ROOT,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        super().__init__(app, name=name, env=env, cwd=cwd, folder=folder, python=python)
        self._arguments = [
            *("--schedule", str(self.folder / f"{self.name}-schedule"), "--pidfile="),
            *("--max-interval", str(max_interval), "-l", loglevel),
            *arguments,
        ]

    def command(self) -> list[str]:
        """Return the command line."""
        return [*super().command(), "beat", *self._arguments]
