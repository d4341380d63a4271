"""Nodes for pytest-celery that are processes on this machine instead of Docker containers.

pytest-celery asks its nodes' containers for little, and never for their class: ``LocalContainer``
has what it asks for (read in 1.3.0: ``api/base.py``, ``api/worker.py``). Tests see pytest-celery's
own names only: ``celery_setup.worker.kill()``, ``restart()``, ``wait_for_log()``.
"""

from __future__ import annotations

import abc
import signal as signals
from typing import TYPE_CHECKING, Any

import celery
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestWorker

from tests.support import processes

if TYPE_CHECKING:
    from tests.support.servers import Server
    from tests.support.workers import CeleryWorker


class LocalContainer(abc.ABC):
    """What pytest-celery calls a container, as far as it uses it."""

    name: str
    #: pytest-celery shows its first twelve characters
    id: str

    @property
    @abc.abstractmethod
    def status(self) -> str:
        """``"running"``, or something else."""

    @abc.abstractmethod
    def logs(self) -> str:
        """Return the log so far."""

    @abc.abstractmethod
    def ready(self) -> bool:
        """Wait until it works."""

    @abc.abstractmethod
    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal, by name or number."""

    @abc.abstractmethod
    def restart(self, timeout: float = 60) -> None:
        """End it, if it runs, and start it again."""

    @abc.abstractmethod
    def teardown(self) -> None:
        """End it for good."""

    def reload(self) -> None:
        """Nothing to ask anew: the process is looked at each time."""


class ServerContainer(LocalContainer):
    """A private server as a broker's or a backend's container."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.name = f"{server.label}-{server.port}"
        self.id = f"local-{server.port}"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """The URL from inside and from outside: one, here. A new dict, since callers change it."""
        return {"url": self._server.url, "host_url": self._server.url, "port": self._server.port}

    @property
    def status(self) -> str:
        """``"running"`` while the process is alive."""
        return "running" if self._server.is_running else "exited"

    def logs(self) -> str:
        """Return the log so far."""
        return self._server.log()

    def ready(self) -> bool:
        """It was, when ``start`` returned."""
        return self._server.is_running

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal; SIGKILL and SIGTERM return when it is gone."""
        number = _number(signal)
        if number == signals.SIGKILL:
            self._server.kill()
        elif number == signals.SIGTERM:
            self._server.stop()
        else:
            processes.send(self._server.pid, number)

    def restart(self, timeout: float = 60) -> None:
        """End it and start it again on the same port."""
        self._server.restart()

    def teardown(self) -> None:
        """End it and remove its folder."""
        self._server.close()


class WorkerContainer(LocalContainer):
    """A worker process as a worker's container."""

    def __init__(self, worker: CeleryWorker) -> None:
        self._worker = worker
        self.name = worker.name
        self.id = "test"

    @property
    def status(self) -> str:
        """``"running"`` while the main process is alive."""
        return "running" if self._worker.is_running else "exited"

    def logs(self) -> str:
        """Return what it has written since its last start."""
        return self._worker.log()

    def ready(self) -> bool:
        """Wait until it consumes."""
        self._worker.wait_ready()
        return True

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to the main process; SIGKILL takes all of it, as Docker does."""
        number = _number(signal)
        if number == signals.SIGKILL:
            self._worker.kill_group()
            return
        self._worker.send(number)
        if number == signals.SIGTERM:
            self._worker.wait()

    def restart(self, timeout: float = 60) -> None:
        """End it, if it runs, and start it again under its name."""
        if self._worker.is_running:
            self._worker.stop()
        self._worker.start().wait_ready(timeout)

    def teardown(self) -> None:
        """Kill what is left of it."""
        self._worker.close()

    def version(self) -> str:
        """Return Celery's version."""
        return str(celery.__version__)

    def log_level(self) -> str:
        """Return the worker's log level."""
        return "INFO"

    def worker_name(self) -> str:
        """Return the name before the ``@``."""
        return self._worker.name

    def worker_queue(self) -> str:
        """Return the queue that a ping is sent to."""
        return "celery"


class LocalBroker(CeleryTestBroker):  # type: ignore[misc]
    """A broker node on a private server."""

    def __init__(self, server: Server) -> None:
        super().__init__(ServerContainer(server))
        self.server = server


class LocalBackend(CeleryTestBackend):  # type: ignore[misc]
    """A result backend node on a private server."""

    def __init__(self, server: Server) -> None:
        super().__init__(ServerContainer(server))
        self.server = server


class LocalWorker(CeleryTestWorker):  # type: ignore[misc]
    """A worker node that is a process; ``process`` can do more than a node."""

    def __init__(self, worker: CeleryWorker, app: celery.Celery | None = None) -> None:
        super().__init__(WorkerContainer(worker), app)
        self.process = worker

    def hostname(self) -> str:
        """Return the name among the workers."""
        return self.process.nodename


def _number(signal: str | int) -> int:
    return signal if isinstance(signal, int) else signals.Signals[signal]
