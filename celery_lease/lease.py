"""The lease as a body sees it.

What it is not: it talks to no store. The heartbeat moves its deadline and collects what the
body reports; ``runtime`` ends it. A body that runs without a lease (called as a function,
eager, inside another task) gets ``NULL_LEASE``, whose calls do nothing.

What a body calls takes no lock: ``LeaseLost`` may strike anywhere in it, and a lock left locked
would end the heartbeat of the whole process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from celery_lease.backoff import local_deadline
from celery_lease.exceptions import HandOver, LeaseLost, PayloadTooLarge
from celery_lease.interrupt import Interruption
from celery_lease.records import Claimed, Held, Renewal
from celery_lease.stall import StallWatch
from celery_lease.stopping import StopFlag

T = TypeVar("T")

#: After so many heartbeats without word of a renewal by the main process the child makes its own.
SILENT_HEARTBEATS = 1.5
#: A report that the store refuses so often is not written: a fault of the network passes sooner.
REPORT_TRIES = 3


class NullLease:
    """The lease of a body that runs without one: every call is a no-op."""

    job_id: str | None = None
    fencing_token: int = 0
    lost: bool = False
    last_checkpoint: Any = None
    is_held: bool = False
    stop_requested: bool = False

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
        from_worker: True when the worker's main process is to renew it.
        on_doubt: called when the lease looks lost by its own clock: something may have been heard
            that nobody has taken yet.
        on_surrender: called once, by the thread of the body, when ``check`` finds the lease gone.
        on_checkpoint: called after a checkpoint, so that it is written soon.
        stall_timeout_seconds: the longest time without progress, None for no limit.
        stop_flag: raised when the worker is asked to stop, None outside of a worker.
        max_checkpoint_bytes: the largest checkpoint (``lease_max_result_bytes``).
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
        on_doubt: Callable[[Lease], None] = lambda _: None,
        from_worker: bool = False,
        on_checkpoint: Callable[[], None],
        stop_flag: StopFlag | None = None,
        stall_timeout_seconds: float | None = None,
        max_checkpoint_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held: Held = claimed.lease
        self.message_version = claimed.message_version
        self.lease_seconds = lease_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self._on_surrender = on_surrender
        self._on_doubt = on_doubt
        self.from_worker = from_worker
        self._renewed_by_worker_at = -math.inf
        self._on_checkpoint = on_checkpoint
        self._max_checkpoint_bytes = max_checkpoint_bytes
        self._stop_flag = stop_flag
        self._is_stop_written = False
        self._is_acknowledged_written = False
        self.is_known = False
        """True once the worker's main process has heard of this lease."""
        self.is_acknowledged = False
        """True once the broker no longer has the message."""
        self.is_told_to_stop = False
        """True when the main process stops this body alone."""
        self._monotonic = monotonic
        self._sent_at = sent_at
        self._lost_reason: str | None = None
        self._surrendered = False
        # The body only ever puts a newer report in; the heartbeat remembers which it has taken.
        self._progress: _Report | None = None
        self._checkpoint: _Report | None = None
        self._taken_progress: _Report | None = None
        self._taken_checkpoint: _Report | None = None
        self._last_checkpoint_text = claimed.checkpoint
        self.stall_watch = StallWatch(stall_timeout_seconds, began_at=monotonic())
        self._interruption = _nobody(claimed.lease)
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
        if self._lost_reason is None and self.is_past:
            # A call into C may have kept the heartbeat from hearing of the main process's renewals.
            self._on_doubt(self)
        return self._lost_reason is not None or self.is_past

    @property
    def is_past(self) -> bool:
        """True past the deadline by this process's own clock."""
        return self._monotonic() >= self.deadline

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

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]  # constant in the null lease
        """True once the worker was asked to stop: save a checkpoint and ``release()`` soon.

        True from the signal on, in every pool. Who goes on is not disturbed: the lease is renewed
        until the body ends or its process is killed.
        """
        return self.is_told_to_stop or (self._stop_flag is not None and self._stop_flag.is_set())

    def check(self) -> None:
        """Raise if the lease is gone; call it before a side effect and in every loop.

        Raises:
            LeaseLost: another attempt may run this job now: stop, and change nothing more.
        """
        if not self.lost:
            return
        reason = self._lost_reason or "no renewal was accepted in time"
        # It raises by itself: a second LeaseLost must not strike in what follows.
        self._interruption.suspend()
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
        self.stall_watch.report(text, self._monotonic())
        self._progress = _Report(text)

    def checkpoint(self, value: Any) -> None:
        """Save where a later attempt may go on; written within about a second.

        Args:
            value: anything JSON can hold, as JSON at most ``lease_max_result_bytes`` bytes.

        Raises:
            TypeError: the value cannot be written as JSON.
            PayloadTooLarge: it is over ``lease_max_result_bytes``; the one before stays.
        """
        text = json.dumps(value, separators=(",", ":"))
        limit = self._max_checkpoint_bytes
        # ASCII: as many bytes as characters.
        if limit is not None and len(text) > limit:
            raise PayloadTooLarge(
                "checkpoint", len(text), limit, "lease_max_result_bytes", self.job_id
            )
        self.stall_watch.move(self._monotonic())
        self._last_checkpoint_text = text
        self._checkpoint = _Report(text)
        self._on_checkpoint()

    @property
    def last_checkpoint(self) -> Any:
        """The newest checkpoint of this or an earlier attempt; None without one."""
        text = self._last_checkpoint_text
        return None if text is None else json.loads(text)

    # -- for the heartbeat and the runtime -----------------------------------------------------

    def renewal(self) -> Renewal:
        """Take what the body reported since the last renewal."""
        progress, checkpoint = self._progress, self._checkpoint
        taken = self._taken_progress, self._taken_checkpoint
        self._taken_progress, self._taken_checkpoint = progress, checkpoint
        return Renewal(
            self.held,
            _new(progress, taken[0]),
            _new(checkpoint, taken[1]),
            stop_requested=self.stop_requested and not self._is_stop_written,
            acknowledged=self.is_acknowledged and not self._is_acknowledged_written,
        )

    def newest_reports(self) -> tuple[str | None, str | None]:
        """Return the newest progress and checkpoint (JSON text), written already or not.

        For the end of the attempt: a renewal that carries them may still fail. Not what the store
        has refused: the end would be refused with it.
        """
        return _unrefused(self._progress), _unrefused(self._checkpoint)

    def refuse(self, renewal: Renewal) -> None:
        """Take word that the store renewed the lease and not what the body had reported.

        It is tried again by a few renewals more, since a connection may break at any time.
        """
        if renewal.progress is not None and self._taken_progress is not None:
            self._taken_progress = self._taken_progress.refused_again()
        if renewal.checkpoint is not None and self._taken_checkpoint is not None:
            self._taken_checkpoint = self._taken_checkpoint.refused_again()

    def give_back(self, renewal: Renewal) -> None:
        """Have what a renewal did not write, or the body's newer report, taken again."""
        if renewal.progress is not None:
            self._taken_progress = None
        if renewal.checkpoint is not None:
            self._taken_checkpoint = None

    def renewed(self, sent_at: float, renewal: Renewal | None = None) -> None:
        """Count the deadline from a renewal that was accepted, and forget what it has written."""
        self._sent_at = max(self._sent_at, sent_at)
        if renewal is not None:
            self._is_stop_written |= renewal.stop_requested
            self._is_acknowledged_written |= renewal.acknowledged

    def renewed_by_worker(self, sent_at: float) -> None:
        """Take word of a renewal that the worker's main process made."""
        self._renewed_by_worker_at = max(self._renewed_by_worker_at, sent_at)
        self.renewed(sent_at)

    @property
    def is_renewed_by_worker(self) -> bool:
        """True while the main process's renewals arrive; the child leaves it to them."""
        return self.from_worker and self.worker_silent_in > 0

    @property
    def worker_silent_in(self) -> float:
        """Seconds until the main process's next renewal is overdue."""
        overdue_at = self._renewed_by_worker_at + SILENT_HEARTBEATS * self.heartbeat_seconds
        return overdue_at - self._monotonic()

    def mark_lost(self, reason: str) -> None:
        """Say that the store no longer knows this lease; ``interrupt`` stops the body."""
        self._lost_reason = reason

    def interrupt(self) -> None:
        """Have ``LeaseLost`` raised in the body, after ``mark_lost``."""
        self._interruption.strike(self._lost_reason or "")

    def run(self, body: Callable[[], T], interruption: Interruption) -> T:
        """Run the body, where an interruption can reach it.

        Raises:
            LeaseLost: it was interrupted.
        """
        self._interruption = interruption
        if self._lost_reason is not None:
            # Lost before there was anything to interrupt.
            interruption.strike(self._lost_reason)
        return interruption.run(body)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Keep ``LeaseLost`` out of a block in the middle of the body: a commit of ours.

        Raises:
            LeaseLost: after the block, if the lease was lost in it and the attempt goes on.
        """
        self._interruption.suspend()
        try:
            yield
        finally:
            if self.ended_by is None:
                self._interruption.resume()

    @property
    def interruption(self) -> Interruption:
        """The body as other threads can reach it."""
        return self._interruption


class _Report:
    """One report of the body: told from an equal one by its identity."""

    __slots__ = ("refusals", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.refusals = 0

    def refused_again(self) -> _Report | None:
        """Count a refusal; returns what counts as taken: itself when it is given up."""
        self.refusals += 1
        return self if self.refusals >= REPORT_TRIES else None


def _unrefused(report: _Report | None) -> str | None:
    return None if report is None or report.refusals else report.text


def _new(report: _Report | None, taken: _Report | None) -> str | None:
    return None if report is None or report is taken else report.text


def _nobody(held: Held) -> Interruption:
    return Interruption(held.job_id, held.fencing_token, is_wanted=False)


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
