"""The heartbeat: one daemon thread a process renews all its leases in one statement.

(In several, where bodies report much at a time: ``store/transitions/renewal``.)

The store is authoritative: a lease that a renewal does not return is asked for without a
lock; ended → lost, live → unanswered, to be asked for again. What happens at each failure:

* the store is away: the deadlines run on; past its own the lease is lost (``Lease.check``);
* the answer names a lease that has left the set meanwhile: it is dropped, so that a loss can
  never hit the next job of the process (the set is read under the lock that ``remove`` takes);
* it will not take what a body reports: the lease is renewed without that, and it is offered a
  few times more, so that the other leases wait for nothing;
* the thread is starved: the deadlines run on all the same, they need no thread;
* a body makes no progress (``lease_stall_timeout``): its lease leaves the set for good, and
  ``on_stalled`` ends the attempt in a thread of its own, so that the others are renewed in time.

It also writes, in one statement, which outcomes Celery has been told (``settle_later``): a
statement of its own for each job would be a fourth one, where three are the floor.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

from celery_lease import events
from celery_lease.backoff import jittered
from celery_lease.exceptions import StoreError
from celery_lease.lease import Lease
from celery_lease.native import Bell, NativeThread, allocate_lock
from celery_lease.records import Renewal, Renewed

logger = logging.getLogger(__name__)

Settled: TypeAlias = tuple[str, int, datetime]

#: Renewals of many processes must not meet (seed S1); ±10 % (design, section 5).
JITTER = 0.1
#: A checkpoint is written this soon, at most one write a second.
CHECKPOINT_SECONDS = 1.0
#: Outcomes are settled this soon after Celery was told.
SETTLE_SECONDS = 1.0
#: Outcomes settled in one statement.
SETTLE_BATCH = 200
#: A thread that wakes this much too late was not running; nor was the body.
OVERSLEPT_SECONDS = 0.5
#: Time to the next try when the store did not answer, or a row was locked.
AGAIN_SECONDS = 0.5


class Heartbeat:
    """Renews the leases of one process.

    Args:
        renew: the store's ``renew``.
        settle: the store's ``settle``.
        worker: node name, for events.
        before_beat: called with the leases before each renewal, to hear what the worker's main
            process has to say of them; gives those that are lost, with the reason.
        on_stalled: called with each lease whose body has stalled; it must not block.
        monotonic: the clock.
        random: gives a number from 0 up to 1.
    """

    def __init__(
        self,
        *,
        renew: Callable[[Sequence[Renewal]], Renewed],
        settle: Callable[[Sequence[Settled]], int],
        worker: str,
        before_beat: Callable[
            [Mapping[tuple[str, int], Lease]], Mapping[tuple[str, int], str]
        ] = lambda _: {},
        on_stalled: Callable[[Lease], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._renew = renew
        self._settle = settle
        self._worker = worker
        self._on_stalled = on_stalled
        self._before_beat = before_beat
        self._monotonic = monotonic
        self._random = random
        self._lock = allocate_lock()
        self._bell = Bell()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._unsettled: list[Settled] = []
        self._next_beat: float | None = None
        self._next_settle: float | None = None
        #: When the thread looks again by itself: a wake-up a job would cost more than the beat.
        self._looks_at = -math.inf
        self._is_hurried = False
        self._thread: NativeThread | None = None
        self._stopped = False

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on; starts the thread at the first one."""
        with self._lock:
            self._leases[_key(lease)] = lease
            self._beat_by(self._monotonic() + self._interval(lease))
            self._wake_by(lease.stall_watch.stalls_at)
            self._start()

    def remove(self, lease: Lease) -> None:
        """Take a lease out; no answer that arrives later can touch it."""
        with self._lock:
            self._leases.pop(_key(lease), None)
            if not self._leases:
                self._next_beat = None
                self._is_hurried = False

    @property
    def is_empty(self) -> bool:
        """True when it renews nothing."""
        return not self._leases

    def beat_soon(self) -> None:
        """Have the next renewal within ``CHECKPOINT_SECONDS``; called by bodies, takes no lock."""
        if not self._is_hurried:
            self._is_hurried = True
            self._bell.ring()

    def settle_later(self, outcome: Settled) -> None:
        """Record, with others, that Celery has been told an outcome."""
        with self._lock:
            self._unsettled.append(outcome)
            due = self._monotonic() + (
                SETTLE_SECONDS if len(self._unsettled) < SETTLE_BATCH else 0.0
            )
            if self._next_settle is None or due < self._next_settle:
                self._next_settle = due
                self._start()
                self._wake_by(due)

    def beat_once(self) -> None:
        """Renew every lease once, in one statement."""
        with self._lock:
            leases = dict(self._leases)
            self._next_beat = None
            self._is_hurried = False
        if not leases:
            return
        self._hear(leases)
        renewals = {key: lease.renewal() for key, lease in leases.items()}
        for key, lease in leases.items():
            if lease.is_renewed_by_worker and not renewals[key].has_news:
                del renewals[key]
        if not renewals:
            with self._lock:
                for lease in self._leases.values():
                    self._beat_by(self._monotonic() + self._interval(lease))
            return
        leases = {key: leases[key] for key in renewals}
        sent_at = self._monotonic()
        try:
            answer = self._renew(list(renewals.values()))
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self._worker, reason=str(error))
            self._unanswered(leases, renewals, frozenset(leases))
            return
        self._take_answer(leases, renewals, answer, sent_at)

    def _hear(self, leases: Mapping[tuple[str, int], Lease]) -> None:
        lost = self._before_beat(leases)
        if lost:
            self._lose(lost)

    def look_for_stalls(self) -> None:
        """Give the leases of stalled bodies up: they are never renewed again."""
        now = self._monotonic()
        with self._lock:
            stalled = [
                lease for lease in self._leases.values() if lease.stall_watch.is_stalled(now)
            ]
            for lease in stalled:
                del self._leases[_key(lease)]
        for lease in stalled:
            self._on_stalled(lease)

    def settle_once(self) -> None:
        """Write which outcomes Celery has been told, in one statement."""
        with self._lock:
            batch, rest = self._unsettled[:SETTLE_BATCH], self._unsettled[SETTLE_BATCH:]
            self._unsettled = rest
            self._next_settle = self._monotonic() if rest else None
        if not batch:
            return
        try:
            self._settle(batch)
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self._worker, reason=str(error))
            with self._lock:
                self._unsettled = batch + self._unsettled
                self._next_settle = self._monotonic() + SETTLE_SECONDS

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """Settle what is left and end the thread, within the timeout."""
        with self._lock:
            self._stopped = True
            self._next_settle = self._monotonic() if self._unsettled else None
            self._bell.ring()
            thread = self._thread
        if thread is not None and not thread.is_current():
            thread.join(timeout_seconds)

    # -- inside --------------------------------------------------------------------------------

    def _take_answer(
        self,
        leases: dict[tuple[str, int], Lease],
        renewals: dict[tuple[str, int], Renewal],
        answer: Renewed,
        sent_at: float,
    ) -> None:
        with self._lock:
            for key in answer.renewed & self._leases.keys():
                self._leases[key].renewed(sent_at, renewals[key])
        for key in answer.refused:
            leases[key].refuse(renewals[key])
            logger.warning(
                "lease.report.refused job_id=%s fencing_token=%s worker=%s bytes=%d",
                *key,
                self._worker,
                renewals[key].report_bytes,
            )
        self._lose(
            {
                key: "its row is gone" if state is None else f"the attempt is {state}"
                for key, state in answer.lost.items()
            }
        )
        self._unanswered(leases, renewals, answer.unanswered)
        with self._lock:
            for lease in self._leases.values():
                self._beat_by(sent_at + self._interval(lease))

    def _lose(self, reasons: Mapping[tuple[str, int], str]) -> None:
        """Take out the leases that the store no longer knows, and interrupt their bodies."""
        lost = []
        with self._lock:
            for key, reason in reasons.items():
                # Matched by (job, token) under the lock that takes leases out before finish.
                lease = self._leases.pop(key, None)
                if lease is not None:
                    lease.mark_lost(reason)
                    lost.append((lease, reason))
        for lease, reason in lost:
            lease.interrupt()
            events.emit(
                events.LEASE_LOST,
                job_id=lease.job_id,
                fencing_token=lease.fencing_token,
                worker=self._worker,
                reason=reason,
            )

    def _unanswered(
        self,
        leases: dict[tuple[str, int], Lease],
        renewals: dict[tuple[str, int], Renewal],
        keys: frozenset[tuple[str, int]],
    ) -> None:
        if not keys:
            return
        for key in keys:
            leases[key].give_back(renewals[key])
        soonest = min(leases[key].heartbeat_seconds for key in keys)
        with self._lock:
            if self._leases:
                wait = jittered(min(AGAIN_SECONDS, soonest / 2), JITTER, self._random)
                self._beat_by(self._monotonic() + wait)

    def _interval(self, lease: Lease) -> float:
        interval = jittered(lease.heartbeat_seconds, JITTER, self._random)
        # Not later than the main process's word is overdue: a whole beat after that the lease would
        # nearly be over (1.5 + 1.1 of 3 beats).
        return min(interval, lease.worker_silent_in) if lease.is_renewed_by_worker else interval

    def _beat_by(self, instant: float) -> None:
        if self._next_beat is None or instant < self._next_beat:
            self._next_beat = instant
            self._wake_by(instant)

    def _wake_by(self, instant: float) -> None:
        if instant < self._looks_at:
            self._looks_at = instant
            self._bell.ring()

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = NativeThread(self._run, name="celery-lease-heartbeat")
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                wait = self._wait_seconds()
                if self._stopped and wait > 0:
                    return
                began_at = self._monotonic()
                self._looks_at = began_at + wait
            if wait > 0:
                self._bell.wait(None if wait == math.inf else wait)
                self._forgive(began_at)
                continue
            try:
                # Before the beat: what has stalled is never renewed again.
                self.look_for_stalls()
                if self._is_beat_due():
                    self.beat_once()
                else:
                    self.settle_once()
                    if self._stopped:
                        return
            except Exception:
                # The thread's outer edge: a lease nobody renews would be given on.
                logger.exception("lease.heartbeat.failed worker=%s", self._worker)
                with self._lock:
                    self._beat_by(self._monotonic() + AGAIN_SECONDS)

    def _wait_seconds(self) -> float:
        """Return the time to the next thing to do, infinity when there is none."""
        if self._is_hurried and self._leases:
            self._beat_by(self._monotonic() + CHECKPOINT_SECONDS)
        due = [when for when in (self._next_beat, self._next_settle) if when is not None]
        due += [lease.stall_watch.stalls_at for lease in self._leases.values()]
        return max(0.0, min(due, default=math.inf) - self._monotonic())

    def _is_beat_due(self) -> bool:
        return self._next_beat is not None and self._next_beat <= self._monotonic()

    def _forgive(self, began_at: float) -> None:
        """Count no silence while the process was frozen, or a call into C held its lock.

        In that time no body could report; afterwards each may go on as if nothing had been. That
        it did not run is known of the time after this thread should have looked; of the wait
        that began before it may be so.
        """
        now = self._monotonic()
        with self._lock:
            overslept = now - self._looks_at
            if overslept > OVERSLEPT_SECONDS:
                for lease in self._leases.values():
                    lease.stall_watch.forgive(overslept, self._looks_at - began_at, now)


def _key(lease: Lease) -> tuple[str, int]:
    return lease.job_id, lease.fencing_token
