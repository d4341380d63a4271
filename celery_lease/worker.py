"""The worker's main process: checks at start, and a reaper that needs neither beat nor pool.

Recovery must hang neither on beat nor on a free slot of the pool (seed S2): a worker that sees
no pass recorded for two intervals makes one itself, in a thread of its main process. That
thread and a fork must not meet: a child forked while it holds a lock of a library would hang
on that lock (B047). ``ForkGate`` keeps forks out of each of its steps.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionWithTraceback
from celery import bootsteps
from celery.worker.request import Request

from celery_lease import events
from celery_lease.exceptions import StoreUnavailable
from celery_lease.states import JobState
from celery_lease.store import queries, transitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_lease.store.engine import Store

logger = logging.getLogger(__name__)

#: A fork waits this long for the thread's step to end, then happens anyway.
FORK_WAIT_SECONDS = 5.0


class ForkGate:
    """A lock that a fork of this process waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        _gates.add(self)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep forks out of a block."""
        with self._lock:
            yield

    def before_fork(self) -> None:
        """Wait for the block to end."""
        self._held = self._lock.acquire(timeout=FORK_WAIT_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Let blocks begin again."""
        if self._held:
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Begin anew: the thread that may hold the lock is not here."""
        self._lock = threading.Lock()


_gates: weakref.WeakSet[ForkGate] = weakref.WeakSet()


def _each(call: str) -> Any:
    def run() -> None:
        for gate in list(_gates):
            getattr(gate, call)()

    return run


os.register_at_fork(
    before=_each("before_fork"),
    after_in_parent=_each("after_fork_in_parent"),
    after_in_child=_each("after_fork_in_child"),
)

_node_name: str | None = None


def node_name() -> str:
    """Return Celery's node name of this worker, or the host and pid of another process."""
    return _node_name or f"{socket.gethostname()}:{os.getpid()}"


class ReaperThread:
    """The main process's dealings with the store.

    A pass when nobody else makes one, and word of what never reaches a child.

    Args:
        extension: the app's extension.
        interval_seconds: ``lease_reaper_interval``.
        makes_passes: ``lease_reaper_in_worker``.
    """

    def __init__(
        self, extension: Any, *, interval_seconds: float, makes_passes: bool = True
    ) -> None:
        self._extension = extension
        self._interval_seconds = interval_seconds
        self._makes_passes = makes_passes
        self._gate = ForkGate()
        self._wakeup = threading.Event()
        self._stopping = False
        self._told: deque[Callable[[Store], object]] = deque()
        self._thread = threading.Thread(target=self._run, name="celery-lease-reaper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End, within the timeout."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join(timeout_seconds)

    def tell(self, word: Callable[[Store], object]) -> None:
        """Have the store told something soon; never blocks, for the event loop calls it."""
        self._told.append(word)
        self._wakeup.set()

    def tell_once(self) -> None:
        """Tell the store what has been collected; what it cannot take now is told later."""
        while self._told:
            word = self._told.popleft()
            try:
                with self._gate():
                    word(self._extension.store)
            except StoreUnavailable:
                self._told.appendleft(word)
                raise

    def look_once(self) -> bool:
        """Make a pass if none was recorded for two intervals; tell whether one was made."""
        with self._gate():
            reaper = self._extension.reaper(around=self._gate)
        if not reaper.is_due():
            return False
        reaper.run_pass()
        return True

    def _run(self) -> None:
        due = time.monotonic() + self._interval_seconds / 2
        while not self._stopping:
            self._wakeup.wait(max(0.0, due - time.monotonic()))
            self._wakeup.clear()
            try:
                self.tell_once()
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval_seconds / 2
                    if self._makes_passes and not self._stopping:
                        self.look_once()
            except StoreUnavailable as error:
                events.emit(events.STORE_UNAVAILABLE, worker=node_name(), reason=str(error))
            except Exception:
                # The thread's outer edge: without it this worker never reaps again.
                logger.exception("lease.pass.failed worker=%s", node_name())


class LeaseRequest(Request):  # type: ignore[misc]  # Celery has no types
    """A delivery of a leased task, as the worker's main process sees it."""

    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: Any = True,  # noqa: FBT002  Celery's own signature
        return_ok: Any = False,  # noqa: FBT002  Celery's own signature
    ) -> Any:
        """Take a failure; a body's ``MemoryError`` must not end the main process.

        Celery raises it again there (5.7, ``celery/worker/request.py``): a prefork or solo
        worker ends, and the message is delivered again. The child has survived it.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, MemoryError):
            exc_info = copy.copy(exc_info)
            exc_info.exception = _MemoryExhausted(error)
        return super().on_failure(exc_info, send_failed_event, return_ok)


class _MemoryExhausted(Exception):
    """Stands in for a ``MemoryError``, and looks like it in Celery's events."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        super().__init__(str(error))

    def __repr__(self) -> str:
        return repr(self._error)


def cancel_revoked(store: Store, job_id: str) -> None:
    """End a job that Celery revoked, whichever worker forgets the revocation afterwards."""
    if transitions.cancel(store, job_id, reason="revoked") is not JobState.CANCELLED:
        return
    found = queries.outcome(store, job_id)
    if found is not None:
        # Celery has told it already: REVOKED is stored, and its chord has the part.
        outcome = found[0]
        transitions.settle(store, [(job_id, outcome.fencing_token, outcome.finished_at)])


def step_for(extension: Any) -> type[bootsteps.StartStopStep]:
    """Return the worker's boot step for one app."""

    class LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
        """Checks the settings before the pool starts, the store after, then watches passes."""

        requires = ("celery.worker.components:Pool",)

        def __init__(self, parent: Any, **options: Any) -> None:
            global _node_name  # noqa: PLW0603  one worker a process; its children inherit it
            super().__init__(parent, **options)
            _node_name = parent.hostname
            extension.check_at_start()

        def start(self, parent: Any) -> None:
            del parent
            try:
                extension.store  # noqa: B018  checks the tables
            except StoreUnavailable as error:
                # It may come later: deliveries wait for it, and nothing runs unclaimed.
                logger.error("lease.store.unavailable %s", error)  # noqa: TRY400
            extension.worker_thread = ReaperThread(
                extension,
                interval_seconds=extension.settings.reaper_interval,
                makes_passes=extension.settings.reaper_in_worker,
            )
            extension.worker_thread.start()

        def stop(self, parent: Any) -> None:
            del parent
            thread, extension.worker_thread = extension.worker_thread, None
            if thread is not None:
                thread.stop()

        terminate = stop

    return LeaseStep
