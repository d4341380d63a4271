"""The heartbeat: one daemon thread a process renews all its leases in one statement.

The store is authoritative: a lease that a renewal does not return is asked for without a
lock; ended → lost, live → unanswered, to be asked for again. What happens at each failure:

* the store is away: the deadlines run on; past its own the lease is lost (``Lease.check``);
* the answer names a lease that has left the set meanwhile: it is dropped, so that a loss can
  never hit the next job of the process (the set is read under the lock that ``remove`` takes);
* the thread is starved: the deadlines run on all the same, they need no thread.

It also writes, in one statement, which outcomes Celery has been told (``settle_later``): a
statement of its own for each job would be a fourth one, where three are the floor.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeAlias

from celery_lease import events
from celery_lease.backoff import jittered
from celery_lease.exceptions import StoreError
from celery_lease.lease import Lease
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
#: Time to the next try when the store did not answer, or a row was locked.
AGAIN_SECONDS = 0.5


class Heartbeat:
    """Renews the leases of one process.

    Args:
        renew: the store's ``renew``.
        settle: the store's ``settle``.
        worker: node name, for events.
        monotonic: the clock.
        random: gives a number from 0 up to 1.
    """

    def __init__(
        self,
        *,
        renew: Callable[[Sequence[Renewal]], Renewed],
        settle: Callable[[Sequence[Settled]], int],
        worker: str,
        monotonic: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._renew = renew
        self._settle = settle
        self._worker = worker
        self._monotonic = monotonic
        self._random = random
        self._wakeup = threading.Condition()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._unsettled: list[Settled] = []
        self._next_beat: float | None = None
        self._next_settle: float | None = None
        #: When the thread looks again by itself: a wake-up a job would cost more than the beat.
        self._looks_at = -math.inf
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on; starts the thread at the first one."""
        with self._wakeup:
            self._leases[_key(lease)] = lease
            self._beat_by(self._monotonic() + self._interval(lease))
            self._start()

    def remove(self, lease: Lease) -> None:
        """Take a lease out; no answer that arrives later can touch it."""
        with self._wakeup:
            self._leases.pop(_key(lease), None)
            if not self._leases:
                self._next_beat = None

    def beat_soon(self) -> None:
        """Have the next renewal within ``CHECKPOINT_SECONDS``."""
        with self._wakeup:
            if self._leases:
                self._beat_by(self._monotonic() + CHECKPOINT_SECONDS)

    def settle_later(self, outcome: Settled) -> None:
        """Record, with others, that Celery has been told an outcome."""
        with self._wakeup:
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
        with self._wakeup:
            leases = dict(self._leases)
            self._next_beat = None
        if not leases:
            return
        renewals = {key: lease.renewal() for key, lease in leases.items()}
        sent_at = self._monotonic()
        try:
            answer = self._renew(list(renewals.values()))
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self._worker, reason=str(error))
            self._unanswered(leases, renewals, frozenset(leases))
            return
        self._take_answer(leases, renewals, answer, sent_at)

    def settle_once(self) -> None:
        """Write which outcomes Celery has been told, in one statement."""
        with self._wakeup:
            batch, rest = self._unsettled[:SETTLE_BATCH], self._unsettled[SETTLE_BATCH:]
            self._unsettled = rest
            self._next_settle = self._monotonic() if rest else None
        if not batch:
            return
        try:
            self._settle(batch)
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self._worker, reason=str(error))
            with self._wakeup:
                self._unsettled = batch + self._unsettled
                self._next_settle = self._monotonic() + SETTLE_SECONDS

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """Settle what is left and end the thread, within the timeout."""
        with self._wakeup:
            self._stopped = True
            self._next_settle = self._monotonic() if self._unsettled else None
            self._wakeup.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    # -- inside --------------------------------------------------------------------------------

    def _take_answer(
        self,
        leases: dict[tuple[str, int], Lease],
        renewals: dict[tuple[str, int], Renewal],
        answer: Renewed,
        sent_at: float,
    ) -> None:
        lost = []
        with self._wakeup:
            for key in answer.renewed & self._leases.keys():
                self._leases[key].renewed(sent_at)
            for key, state in answer.lost.items():
                # Matched by (job, token) under the lock that takes leases out before finish.
                lease = self._leases.pop(key, None)
                if lease is not None:
                    reason = "its row is gone" if state is None else f"the attempt is {state}"
                    lease.mark_lost(reason)
                    lost.append((lease, reason))
        for lease, reason in lost:
            events.emit(
                events.LEASE_LOST,
                job_id=lease.job_id,
                fencing_token=lease.fencing_token,
                worker=self._worker,
                reason=reason,
            )
        self._unanswered(leases, renewals, answer.unanswered)
        with self._wakeup:
            for lease in self._leases.values():
                self._beat_by(sent_at + self._interval(lease))

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
        with self._wakeup:
            if self._leases:
                wait = jittered(min(AGAIN_SECONDS, soonest / 2), JITTER, self._random)
                self._beat_by(self._monotonic() + wait)

    def _interval(self, lease: Lease) -> float:
        return jittered(lease.heartbeat_seconds, JITTER, self._random)

    def _beat_by(self, instant: float) -> None:
        if self._next_beat is None or instant < self._next_beat:
            self._next_beat = instant
            self._wake_by(instant)

    def _wake_by(self, instant: float) -> None:
        if instant < self._looks_at:
            self._looks_at = instant
            self._wakeup.notify()

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(
                target=self._run, name="celery-lease-heartbeat", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wakeup:
                wait = self._wait_seconds()
                if wait is None or wait > 0:
                    if self._stopped:
                        return
                    self._looks_at = self._monotonic() + (math.inf if wait is None else wait)
                    self._wakeup.wait(wait)
                    self._looks_at = -math.inf
                    continue
                beat = self._next_beat is not None and self._next_beat <= self._monotonic()
            try:
                if beat:
                    self.beat_once()
                else:
                    self.settle_once()
                    if self._stopped:
                        return
            except Exception:
                # The thread's outer edge: a lease nobody renews would be given on.
                logger.exception("lease.heartbeat.failed worker=%s", self._worker)
                with self._wakeup:
                    self._beat_by(self._monotonic() + AGAIN_SECONDS)

    def _wait_seconds(self) -> float | None:
        due = [when for when in (self._next_beat, self._next_settle) if when is not None]
        return None if not due else max(0.0, min(due) - self._monotonic())


def _key(lease: Lease) -> tuple[str, int]:
    return lease.job_id, lease.fencing_token
