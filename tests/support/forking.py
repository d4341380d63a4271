"""Celery's processes without the second that each spends on importing the same modules.

A *nursery* is a process that has imported what a worker needs, and nothing else: no app, no
connection, no thread. A worker is then a fork of it, which takes the environment, the folder and
the log that it is given, leads a session of its own, and runs what ``python -m celery`` runs. It is
a process like any other: only the imports are older than it is.

What a fork cannot be is started by ``exec`` as ever: a process with another interpreter, with other
variables for the interpreter or the linker, or one that has modules patched before they are
imported (gevent). ``CELERY_LEASE_TEST_EXEC=1`` starts all of them so, as ``make long`` does.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What most workers import by themselves.
PRELOADED = (
    "alembic.migration",
    "alembic.script",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.database",
    "celery.backends.redis",
    "celery.backends.rpc",
    "celery.beat",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.events.state",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.pidbox",
    "celery.worker.strategy",
    "celery_lease.backend",
    "celery_lease.cli",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "psycopg",
    "pymysql",
    "sqlalchemy.dialects.mysql.pymysql",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)
#: A request is one packet: a command with its environment.
_MOST_BYTES = 200_000
_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1
#: Of every process of ours, if its environment does not say otherwise (``workers``).
_OWN = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
_FOLDER = Path(__file__).resolve().parents[2]


class Forked:
    """A process that a nursery has forked; of ``subprocess.Popen`` what tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """A process to fork others from; it ends with the one that started it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=_FOLDER,
                env={**_OWN, **os.environ},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(
        self, arguments: Sequence[str], *, folder: Path, log: Path, env: Mapping[str, str]
    ) -> Forked:
        """Start ``celery`` with these arguments; see ``processes.spawn``."""
        words = {"folder": str(folder), "log": str(log), "env": dict(env)}
        return Forked(self, self.ask({"arguments": list(arguments), **words}))

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Have the nursery do something and return its answer."""
        with self._lock:
            number = next(self._numbers)
            self._control.send(json.dumps([number, request]).encode())
            return self._answer(number)

    def _answer(self, number: int) -> Any:
        while True:
            said = self._control.recv(_MOST_BYTES)
            assert said, "the nursery has ended: its error is above"
            answered, answer = json.loads(said)
            # Else it is of one that was interrupted (a time limit of pytest's).
            if answered == number:
                return answer

    def close(self) -> None:
        """End it."""
        self._control.close()
        if self.pid == os.getpid():
            self._process.wait()


_nursery: Nursery | None = None
_making = threading.Lock()


def nursery() -> Nursery:
    """Return this process's nursery, started at its first use."""
    global _nursery  # noqa: PLW0603  one a process
    with _making:
        if _nursery is None or _nursery.pid != os.getpid():
            _nursery = Nursery()
            atexit.register(_nursery.close)
        return _nursery


def can_be_forked(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Tell whether a process that is started by ``exec`` would be the same as a fork."""

    def of_the_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {n: v for n, v in variables.items() if n.startswith(("PYTHON", "LD_", "MALLOC_"))}

    return (
        not env.get("CELERY_LEASE_TEST_EXEC")
        and command[:3] == [sys.executable, "-m", "celery"]
        and not {"gevent", "eventlet"}.intersection(command)
        and of_the_start(env) == {**_OWN, **of_the_start(os.environ)}
    )


# --- in the nursery -------------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    """Answer requests until whoever asks is gone; returns in a forked process, to be the worker."""
    for name in PRELOADED:
        importlib.import_module(name)
    # What is there now is not copied because a collection has looked at it.
    gc.freeze()
    # Kept: whoever asked may not have heard the answer.
    ended: dict[int, int] = {}
    own_pid = os.getpid()
    while True:
        try:
            said = control.recv(_MOST_BYTES)
        except ConnectionError:
            said = b""
        if not said:
            os._exit(0)
        number, request = json.loads(said)
        if "ended" in request:
            asked = request["ended"]
            if asked not in ended:
                pid, status = os.waitpid(asked, os.WNOHANG)
                if pid:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(asked)
        else:
            answer = os.fork()
            ended.pop(answer, None)
            if answer == 0:
                control.close()
                _become(parent=own_pid, **request)
                return
        control.send(json.dumps([number, answer]).encode())


def _become(
    *, parent: int, arguments: list[str], folder: str, log: str, env: dict[str, str]
) -> None:
    os.setsid()
    # As ``processes.spawn`` has it: nothing outlives the test run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It has ended before that.
        os._exit(1)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv[1:] = arguments


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    import celery.__main__

    sys.argv[0] = str(celery.__main__.__file__)
    sys.exit(celery.__main__.main())
