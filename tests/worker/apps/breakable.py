"""Tasks whose body is broken off: its lease is taken away, its job cancelled, or it hangs."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from celery_lease import LeasedTask, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

LONG = 30.0


def loops() -> None:
    """Compute; a greenlet yields now and then."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        sum(range(1000))
        time.sleep(0)


def naps() -> None:
    """Sleep in short pieces, as a thread that can be interrupted does."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        time.sleep(0.05)


def sleeps() -> None:
    """Sleep in one piece."""
    time.sleep(LONG)


def waits_for_a_lock() -> None:
    """Wait for what never comes, for as long as it takes."""
    # Something else has to go on, or gevent finds that nothing ever can.
    queue.Queue[int]().get(timeout=LONG)


def reads_a_socket() -> None:
    """Wait for a peer that says nothing."""
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


WAYS: dict[str, Callable[[], None]] = {
    "loop": loops,
    "naps": naps,
    "sleep": sleeps,
    "lock": waits_for_a_lock,
    "socket": reads_a_socket,
}


def hangs_in_a_lock() -> None:
    """Ask again and again for a lock that is never given back."""
    lock = threading.Lock()
    lock.acquire()
    end = time.monotonic() + LONG
    while time.monotonic() < end and not lock.acquire(timeout=0.02):
        pass


def add_breakable_tasks(app: Celery, book: Any) -> None:
    """Add them to an app; each is broken off at its first attempt and is done at the second."""
    _add_interrupted(app, book)
    _add_stalled(app, book)


def _add_interrupted(app: Celery, book: Any) -> None:  # noqa: C901 - a list of tasks

    @app.task(name="b.works", base=LeasedTask, bind=True, lease_duration=3)
    def works(self: LeasedTask, tag: str, way: str) -> str:
        if self.lease.fencing_token > 1:
            return "done"
        book.note(tag, "ready")
        try:
            WAYS[way]()
        except LeaseLost:
            book.note(tag, "interrupted")
            raise
        book.note(tag, "went on")
        return "of the stale attempt"

    @app.task(name="b.kept", base=LeasedTask, bind=True, lease_duration=3, lease_interrupt=False)
    def kept(self: LeasedTask, tag: str) -> str:
        if self.lease.fencing_token > 1:
            return "done"
        book.note(tag, "ready")
        end = time.monotonic() + LONG
        while not self.lease.lost and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(20):
            # Interrupted late it would be here.
            time.sleep(0.02)
        book.note(tag, "went on")
        return "of the stale attempt"

    @app.task(name="b.swallows", base=LeasedTask, bind=True, lease_duration=3)
    def swallows(self: LeasedTask, tag: str) -> str:
        if self.lease.fencing_token > 1:
            return "done"
        book.note(tag, "ready")
        try:
            naps()
        except:  # noqa: E722 - what must not be written, and is
            book.note(tag, "swallowed")
        time.sleep(0.1)
        book.note(tag, "went on")
        return "of the stale attempt"

    @app.task(name="b.computes", base=LeasedTask, bind=True, lease_duration=3)
    def computes(self: LeasedTask, tag: str) -> str:
        """Compute for two leases, and never let another greenlet run."""
        book.note(tag, "ready")
        end = time.monotonic() + 6
        while time.monotonic() < end:
            sum(range(1000))
        book.note(tag, "computed")
        return "done"


def _add_stalled(app: Celery, book: Any) -> None:
    @app.task(
        name="b.hangs", base=LeasedTask, bind=True, lease_duration=30, lease_stall_timeout=1.5
    )
    def hangs(self: LeasedTask, tag: str) -> str:
        if self.lease.fencing_token > 1:
            return "done"
        self.lease.progress(1, 10)
        book.note(tag, "ready")
        try:
            hangs_in_a_lock()
        except LeaseLost:
            book.note(tag, "interrupted")
            raise
        return "of the stale attempt"

    @app.task(
        name="b.hangs_always",
        base=LeasedTask,
        lease_stall_timeout=0.5,
        lease_max_attempts=1,
    )
    def hangs_always(tag: str) -> None:
        hangs_in_a_lock()

    @app.task(name="b.slow", base=LeasedTask, bind=True, lease_duration=3, lease_stall_timeout=1)
    def slow(self: LeasedTask, tag: str, how: str) -> str:
        """Take five times the stall timeout, with progress all the while."""
        for step in range(25):
            if how == "progress":
                self.lease.progress(step)
            else:
                self.lease.checkpoint("the same")
            time.sleep(0.2)
        return "slow and done"
