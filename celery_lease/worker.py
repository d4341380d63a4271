"""The worker's main process: what it hears of claims, and its thread to the store.

Recovery must hang neither on beat nor on a free slot of the pool (seed S2): a worker that sees
no pass recorded for two intervals makes one itself, in a thread of its main process. That
thread and a fork must not meet: a child forked while it holds a lock of a library would hang
on that lock (B047). ``ForkGate`` keeps forks out of each of its steps.

What becomes of a single delivery is not here: ``request`` sees it, ``endings`` tells it. When
all this begins and ends is in ``steps``.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery.worker import state

from celery_lease import events
from celery_lease.exceptions import StoreError
from celery_lease.owners import OwnerWatch, report_dead_owners
from celery_lease.reaper import report_vanished
from celery_lease.records import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_lease.claims import Answer, Claim, ClaimSocket
    from celery_lease.extension import Extension
    from celery_lease.records import Vanished
    from celery_lease.store.engine import Store

logger = logging.getLogger(__name__)

#: A fork waits this long for the thread's step to end, then happens anyway.
FORK_WAIT_SECONDS = 5.0
#: How often the owner files of this host are looked at: a whole worker that was killed is known
#: within a second (design, section 5).
OWNER_LOOK_SECONDS = 0.5
#: How long, and of how many attempts, it is remembered that Celery was told. A child settles
#: within ``SETTLE_SECONDS`` (``heartbeat``), unless it dies first.
TOLD_SECONDS = 5.0
MOST_TOLD = 1000
#: Children remembered by their names in the store: those that live, and the last that died.
MOST_OWNERS = 1000
#: Claims kept of which the pool has not said yet that the job was accepted.
MOST_EARLY = 1000
EARLY_SECONDS = 5.0


class ForkGate:
    """A lock that a fork of this process waits for.

    Args:
        is_last: True for the gate of a thread that others wait for inside theirs: a fork takes it
            after all of those, or it would hold what they need while it waits for them.
    """

    def __init__(self, *, is_last: bool = False) -> None:
        self.is_last = is_last
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
        for gate in sorted(_gates, key=lambda gate: gate.is_last):
            getattr(gate, call)()

    return run


os.register_at_fork(
    before=_each("before_fork"),
    after_in_parent=_each("after_fork_in_parent"),
    after_in_child=_each("after_fork_in_child"),
)

_node_name: str | None = None


def be_node(name: str) -> None:
    """Take Celery's node name: one worker a process, whose children inherit it."""
    global _node_name  # noqa: PLW0603  see above
    _node_name = name


def node_name() -> str:
    """Return Celery's node name of this worker, or the host and pid of another process."""
    return _node_name or f"{socket.gethostname()}:{os.getpid()}"


class WorkerThread:
    """The main process's dealings with the store.

    Word of what never reaches a child, a look at the owner files of this host, a pass when nobody
    else makes one, and a look for jobs that are due.

    Args:
        extension: the app's extension.
        interval_seconds: ``lease_reaper_interval``.
        makes_passes: ``lease_reaper_in_worker``.
        precision_seconds: ``lease_defer_precision``, None to leave due jobs to the passes.
    """

    def __init__(
        self,
        extension: Extension,
        *,
        interval_seconds: float,
        makes_passes: bool = True,
        precision_seconds: float | None = None,
    ) -> None:
        self._extension = extension
        self._interval_seconds = interval_seconds
        self._makes_passes = makes_passes
        self._precision_seconds = precision_seconds
        self._gate = ForkGate()
        self._watch = OwnerWatch(extension.owner_folder)
        self._wakeup = threading.Event()
        self._stopping = False
        self._told: deque[Callable[[Store], object]] = deque()
        self._thread = threading.Thread(target=self._run, name="celery-lease-worker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Tell what is left and end, within the timeout."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join(timeout_seconds)

    def tell(self, word: Callable[[Store], object]) -> None:
        """Have the store told something soon; never blocks, for the event loop calls it."""
        self._told.append(word)
        self._wakeup.set()

    def tell_once(self) -> None:
        """Tell the store what has been collected; what it cannot take now is told later."""
        failed: StoreError | None = None
        for _ in range(len(self._told)):
            word = self._told.popleft()
            try:
                with self._gate():
                    word(self._extension.store)
            except StoreError as error:
                # To the tail: one locked row must not keep the others from being told.
                self._told.append(word)
                failed = error
        if failed is not None:
            raise failed

    def look_for_the_dead(self) -> None:
        """Report the leases of every process of this host that is gone."""
        with self._gate():
            report_dead_owners(
                self._extension.raw_store,
                self._watch,
                lost_backoff=self._extension.settings.lost_backoff,
                on_vanished=self._on_vanished,
                is_ours=self._is_ours,
            )

    def _is_ours(self, owner: str) -> bool:
        claims = self._extension.claims
        return claims is not None and claims.has_heard_of(owner)

    def _on_vanished(self, vanished: Vanished) -> None:
        report_vanished(vanished)
        self._extension.reaper().follow_up(vanished)

    def look_once(self) -> bool:
        """Make a pass if none was recorded for two intervals; tell whether one was made."""
        with self._gate():
            reaper = self._extension.reaper(around=self._gate)
        if not reaper.is_due():
            return False
        reaper.run_pass()
        return True

    def send_due(self) -> None:
        """Send the jobs in the store that are due."""
        with self._gate():
            reaper = self._extension.reaper(around=self._gate)
        reaper.send_due()

    def _run(self) -> None:
        look_due = time.monotonic()
        pass_due = time.monotonic() + self._interval_seconds / 2
        precision = self._precision_seconds
        send_due = math.inf if precision is None else time.monotonic() + precision
        while not self._stopping:
            self._wakeup.wait(max(0.0, min(look_due, pass_due, send_due) - time.monotonic()))
            self._wakeup.clear()
            # Each by itself: what keeps one from the store need not keep the others.
            self._try(self.tell_once)
            if time.monotonic() >= look_due:
                look_due = time.monotonic() + OWNER_LOOK_SECONDS
                self._try(self.look_for_the_dead)
            if precision is not None and time.monotonic() >= send_due:
                send_due = time.monotonic() + precision
                self._try(self.send_due)
            if time.monotonic() >= pass_due:
                pass_due = time.monotonic() + self._interval_seconds / 2
                if self._makes_passes and not self._stopping:
                    self._try(self.look_once)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=node_name(), reason=str(error))
        except Exception:
            # The thread's outer edge: without it this worker never reaps again.
            logger.exception("lease.pass.failed worker=%s", node_name())


class WorkerClaims:
    """What the main process has heard of its children's claims.

    A word of a claim and the pool's word that the job was accepted come by two ways, and either
    may be first.
    """

    def __init__(self) -> None:
        #: The main process: its children have a copy of this that hears nothing.
        self.pid = os.getpid()
        self._early: dict[tuple[str, int], tuple[float, Claim]] = {}
        self._owners: dict[str, None] = {}
        self._told: deque[tuple[float, Claim, str | None]] = deque(maxlen=MOST_TOLD)
        self.socket: ClaimSocket | None = None

    def heard(self, claim: Claim) -> Answer | None:
        """Take a claim; None when its delivery is not known yet."""
        self._owners[claim.owner] = None
        if len(self._owners) > MOST_OWNERS:
            self._owners.pop(next(iter(self._owners)))
        for request in copied(state.active_requests):
            if request.id == claim.job_id and request.worker_pid == claim.pid:
                if hasattr(request, "on_claimed"):
                    return request.on_claimed(claim)  # type: ignore[no-any-return]
                return None
        if claim.job_id not in state.requests:
            # Of an attempt that has ended: it must not be taken for the job's next one.
            return None
        if len(self._early) >= MOST_EARLY:
            self._early.pop(next(iter(self._early)))
        self._early[claim.job_id, claim.pid] = (time.monotonic(), claim)
        return None

    def has_heard_of(self, owner: str) -> bool:
        """Tell whether a process is, or was, a child of this one."""
        return owner in self._owners

    def on_told(self, claim: Claim, group_id: str | None) -> None:
        """Remember that Celery has stored the end of an attempt and sent its callbacks."""
        self._told.append((time.monotonic(), claim, group_id))

    def told_by(self, pid: int) -> list[tuple[Held, str | None]]:
        """Return what a child has told Celery of late, and its groups: it settles it later."""
        since = time.monotonic() - TOLD_SECONDS
        return [
            (Held(claim.job_id, claim.fencing_token, claim.owner), group_id)
            for at, claim, group_id in self._told
            if claim.pid == pid and at >= since
        ]

    def on_accepted(self, request: Any) -> None:
        """Give a delivery the claim that was heard of before it was accepted."""
        at, claim = self._early.pop((request.id, request.worker_pid), (0.0, None))
        if claim is not None and time.monotonic() - at < EARLY_SECONDS:
            answer = request.on_claimed(claim)
            if self.socket is not None:
                self.socket.answer(answer, claim.pid)


def copied(requests: Any) -> tuple[Any, ...]:
    """Copy a set of requests that other threads of a threads pool change meanwhile."""
    while True:
        try:
            return tuple(requests)
        except RuntimeError:
            continue
