"""What every private server of the tests can do: start, stop, die, freeze, come back.

A server owns one folder and one port (it keeps both over a restart, so that clients find it again)
and one process, which is a child of the test process and dies with it.
"""

from __future__ import annotations

import abc
import atexit
import os
import signal
import weakref
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.support import processes
from tests.support.folders import ServerFolder
from tests.support.ports import free_port
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self


class ServerDied(RuntimeError):
    """Raised when a server has ended by itself; the message ends with its log."""


class Server(abc.ABC):
    """One private server. Use it as a context, or call ``close()``."""

    #: what a person calls it
    label: ClassVar[str]
    #: Debian packages it comes from, empty if it comes with the test dependencies
    packages: ClassVar[tuple[str, ...]] = ()
    #: several servers refuse to run as root
    as_nobody: ClassVar[bool] = True
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    #: what the kernel sends it when the test process dies
    death_signal: ClassVar[signal.Signals] = signal.SIGKILL
    start_seconds: ClassVar[float] = 30.0
    stop_seconds: ClassVar[float] = 15.0

    def __init__(self) -> None:
        self._folder: ServerFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        _running.add(self)

    # --- what each server says of itself ------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this server cannot be had on this machine, None if it can."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The URL of the server, the way its users in the tests write it."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make the data in ``folder``; called once, before the first start."""

    @abc.abstractmethod
    def command(self) -> list[str]:
        """Return the command that runs the server in the foreground."""

    @abc.abstractmethod
    def ask(self) -> None:
        """Ask something that only a server that is ready answers; any exception means: not yet."""

    def configure(self) -> None:
        """Write the files that name a port; called before every start."""

    def choose_ports(self) -> None:
        """Take the ports; called again if the first were taken by somebody faster."""
        self._port = free_port()

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the server: nothing of the caller's leaks into it."""
        return {
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "PATH": os.environ.get("PATH", os.defpath),
            "TMPDIR": str(self.folder),
            "TZ": "UTC",
        }

    # --- what a test does with it -------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Its folder: data, configuration, log. Made at first use."""
        if self._folder is None:
            self._folder = ServerFolder()
        return self._folder.path

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1."""
        return self._port

    @property
    def pid(self) -> int:
        """Its process. Asking before the first start is an error."""
        assert self._process is not None, f"{self.label} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is alive (a frozen one is)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it and wait until it answers; after ``stop`` or ``kill`` with the data it had."""
        if self.is_running:
            return self
        first = self._port == 0
        if not first:
            return self._run()
        self.choose_ports()
        self.prepare()
        try:
            return self._run()
        except ServerDied:
            # Most likely the port was taken between our look and its bind.
            self.choose_ports()
            return self._run()

    def stop(self) -> None:
        """End it in its orderly way; kill it if that takes too long."""
        if self._process is not None:
            processes.end(self._process, number=self.stop_signal, timeout=self.stop_seconds)

    def kill(self) -> None:
        """Kill it, and the processes it has started, with SIGKILL."""
        if self._process is not None and self._process.poll() is None:
            processes.kill_tree(self._process.pid)
            self._process.wait()

    def restart(self, *, kill: bool = False) -> None:
        """End it (or kill it) and start it again on the same port."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop all its processes: connections stay open, and nothing answers."""
        processes.freeze_tree(self.pid)

    def thaw(self) -> None:
        """Let it go on after ``freeze``."""
        processes.thaw_tree(self.pid)

    def close(self) -> None:
        """End it and remove its folder. It cannot be started again."""
        _running.discard(self)
        try:
            self.stop()
        finally:
            if self._folder is not None:
                self._folder.remove()

    def log(self) -> str:
        """Return what it has logged so far."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- helpers, for the servers too ---------------------------------------------------------

    def write(self, name: str, text: str) -> Path:
        """Write a file of its configuration that its user can read, whatever our umask."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o644)
        return path

    def set_up(self, *command: str) -> None:
        """Run a command that makes the data, as the server's user."""
        log = self.folder / "log"
        process = processes.spawn(
            command,
            folder=self.folder,
            log=log,
            env=self.environment(),
            as_nobody=self.as_nobody,
        )
        if process.wait(60) != 0:
            message = f"{command[0]} failed with {process.returncode}\n{self.log()[-3000:]}"
            raise ServerDied(message)

    def _run(self) -> Self:
        self.configure()
        self._process = processes.spawn(
            self.command(),
            folder=self.folder,
            log=self.folder / "log",
            env=self.environment(),
            as_nobody=self.as_nobody,
            death_signal=self.death_signal,
        )
        try:
            eventually(
                self._answers,
                timeout=self.start_seconds,
                what=lambda: f"{self.label} answers\n{self.log()[-3000:]}",
            )
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            message = f"{self.label} ended with code {code}\n{self.log()[-3000:]}"
            raise ServerDied(message)
        try:
            self.ask()
        except Exception:
            return False
        return True


class External:
    """A server that somebody else runs, named by an environment variable. Not ours to kill."""

    def __init__(self, url: str) -> None:
        self.url = url

    def close(self) -> None:
        """Do nothing: it goes on."""

    def __getattr__(self, name: str) -> object:
        """Skip the test that wants to do more than connect."""
        if name.startswith("__"):
            raise AttributeError(name)
        return pytest.skip(f"needs a server of its own ({name}), and was given {self.url!r}")


# What is still to be closed when the test process ends without its fixtures having done so.
_running: weakref.WeakSet[Server] = weakref.WeakSet()
_owner = os.getpid()


@atexit.register
def _close_all() -> None:
    # A forked child inherits this function, not the servers.
    if os.getpid() == _owner:
        for server in list(_running):
            server.kill()
            server.close()
