"""The lease as a body sees it.

What it is not: it talks to no store. The heartbeat moves its deadline and collects what the
body reports; ``runtime`` ends it. A body that runs without a lease (called as a function,
eager, inside another task) gets ``NULL_LEASE``, whose calls do nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery_lease.backoff import local_deadline
from celery_lease.exceptions import HandOver, LeaseLost
from celery_lease.records import Claimed, Held, Renewal


class NullLease:
    """The lease of a body that runs without one: every call is a no-op."""

    job_id: str | None = None
    fencing_token: int = 0
    lost: bool = False
    last_checkpoint: Any = None
    is_held: bool = False

    def check(self) -> None:
        """Return: there is nothing to lose."""

    def progress(self, done: float, total: float | None = None) -> None:
        """Ignore the report."""

    def checkpoint(self, value: Any) -> None:
        """Ignore the report."""

    def release(self) -> None:
        """Return: there is no job to give back."""


class Lease(NullLease):
    """One attempt's hold on its job.

    Args:
        claimed: the claim that was won.
        lease_seconds: its length.
        heartbeat_seconds: time between two renewals.
        sent_at: monotonic clock at the send of the claim.
        on_surrender: called once, by the thread of the body, when ``check`` finds the lease gone.
        on_checkpoint: called after a checkpoint, so that it is written soon.
        monotonic: the clock.

    .. versionadded:: 0.1
    """

    is_held = True

    def __init__(
        self,
        claimed: Claimed,
        *,
        lease_seconds: float,
        heartbeat_seconds: float,
        sent_at: float,
        on_surrender: Callable[[Lease], None],
        on_checkpoint: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held: Held = claimed.lease
        self.message_version = claimed.message_version
        self.lease_seconds = lease_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self._on_surrender = on_surrender
        self._on_checkpoint = on_checkpoint
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sent_at = sent_at
        self._lost_reason: str | None = None
        self._surrendered = False
        self._progress: str | None = None
        self._checkpoint: str | None = None
        self._last_checkpoint_text = claimed.checkpoint
        self.ended_by: str | None = None
        """Which transition of this runner ended the attempt already (``retry``, ``replace``)."""

    @property
    def job_id(self) -> str:  # type: ignore[override]  # the null lease has no job
        """The job, which is the Celery task id."""
        return self.held.job_id

    @property
    def fencing_token(self) -> int:  # type: ignore[override]  # constant in the null lease
        """The token of this lease: larger at every claim of the job, never used twice."""
        return self.held.fencing_token

    @property
    def lost(self) -> bool:  # type: ignore[override]  # constant in the null lease
        """True once the lease is known to be gone, or can no longer be trusted."""
        return self._lost_reason is not None or self._monotonic() >= self.deadline

    @property
    def deadline(self) -> float:
        """Monotonic time until which the lease can be trusted.

        Counted from the *send* of the last accepted renewal, minus a margin: the reply may
        have taken long, and the store counts from the moment it wrote.
        """
        return local_deadline(self._sent_at, self.lease_seconds)

    @property
    def surely_ended_at(self) -> float:
        """Monotonic time after which the store, too, takes the lease for ended."""
        return self._sent_at + self.lease_seconds

    @property
    def surrendered(self) -> bool:
        """True once ``check`` has raised: the attempt is given up, whatever the body does."""
        return self._surrendered

    def check(self) -> None:
        """Raise if the lease is gone; call it before a side effect and in every loop.

        Raises:
            LeaseLost: another attempt may run this job now: stop, and change nothing more.
        """
        if not self.lost:
            return
        reason = self._lost_reason or "no renewal was accepted in time"
        if not self._surrendered:
            # First out of the heartbeat: once it has raised, it must never be renewed again.
            self._on_surrender(self)
            self._surrendered = True
            self._lost_reason = reason
        raise LeaseLost(self.job_id, self.fencing_token, reason)

    def release(self) -> None:
        """Give the job back: another worker goes on from the last checkpoint.

        Raises:
            HandOver: always; let it pass.
        """
        raise HandOver

    def progress(self, done: float, total: float | None = None) -> None:
        """Report how far the body is; written with the next renewal.

        Args:
            done: units done.
            total: units in all, None when not known.
        """
        text = json.dumps({"done": done, "total": total}, separators=(",", ":"))
        with self._lock:
            self._progress = text

    def checkpoint(self, value: Any) -> None:
        """Save where a later attempt may go on; written within about a second.

        Args:
            value: anything JSON can hold.

        Raises:
            TypeError: the value cannot be written as JSON.
        """
        text = json.dumps(value, separators=(",", ":"))
        with self._lock:
            self._checkpoint = self._last_checkpoint_text = text
        self._on_checkpoint()

    @property
    def last_checkpoint(self) -> Any:
        """The newest checkpoint of this or an earlier attempt; None without one."""
        text = self._last_checkpoint_text
        return None if text is None else json.loads(text)

    # -- for the heartbeat and the runtime -----------------------------------------------------

    def renewal(self) -> Renewal:
        """Take what the body reported since the last renewal."""
        progress, checkpoint = self.take_reports()
        return Renewal(self.held, progress, checkpoint)

    def take_reports(self) -> tuple[str | None, str | None]:
        """Return progress and checkpoint (JSON text) not yet written, and forget them."""
        with self._lock:
            reports = self._progress, self._checkpoint
            self._progress = self._checkpoint = None
        return reports

    def give_back(self, renewal: Renewal) -> None:
        """Keep what a renewal did not write, unless the body has reported newer."""
        with self._lock:
            self._progress = self._progress or renewal.progress
            self._checkpoint = self._checkpoint or renewal.checkpoint

    def renewed(self, sent_at: float) -> None:
        """Count the deadline from a renewal that was accepted."""
        self._sent_at = max(self._sent_at, sent_at)

    def mark_lost(self, reason: str) -> None:
        """Say that the store no longer knows this lease."""
        self._lost_reason = reason


NULL_LEASE = NullLease()

_current: ContextVar[NullLease] = ContextVar("celery_lease_current", default=NULL_LEASE)


def current_lease() -> NullLease:
    """Return the lease of the body that calls, the null lease outside of one.

    .. versionadded:: 0.1
    """
    return _current.get()


@contextmanager
def in_force(lease: NullLease) -> Iterator[None]:
    """Make a lease the current one for the duration of a body."""
    token = _current.set(lease)
    try:
        yield
    finally:
        _current.reset(token)
