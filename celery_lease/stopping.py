"""Whether this worker was asked to stop, told to every process of it at once.

A pipe made before the pool forks: the main process writes one byte from its signal handler,
nobody ever reads it, and so every child sees it as readable from then on (level-triggered). No
lock, no store and no broker is touched in the handler. Celery's own ``worker_shutting_down``
comes last on a soft or a cold stop, when the time for a checkpoint is over (celery-facts,
section 7).

What it is not: it stops nothing. The body looks at ``lease.stop_requested`` and decides.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress


class StopFlag:
    """Raised once by the main process of a worker, seen by its children. Made before the fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_raised = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def is_set(self) -> bool:
        """True once this worker was asked to stop; one system call in a child."""
        # In the main process without a system call: gevent has its own ideas of polling.
        if self._is_raised or self._pid == os.getpid():
            return self._is_raised
        self._is_raised = self._wait(0)
        return self._is_raised

    def set(self) -> None:
        """Say that this worker was asked to stop; safe in a signal handler, any number of times."""
        if not self._is_raised:
            self._is_raised = True
            with suppress(OSError):
                os.write(self._writing, b"!")

    def wait(self) -> bool:
        """Wait in a thread of a child until the flag is raised; False when the pipe is closed."""
        self._is_raised = self._wait(None)
        return self._is_raised

    def _wait(self, timeout: int | None) -> bool:
        # Not select(), which has no place for descriptors above 1,023.
        poll = select.poll()
        try:
            poll.register(self._reading, select.POLLIN)
            return any(event & select.POLLIN for _, event in poll.poll(timeout))
        except OSError:
            return False

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in (self._reading, self._writing):
            with suppress(OSError):
                os.close(descriptor)
