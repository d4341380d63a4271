"""One pass of the reaper: what gives the jobs of vanished runners on.

Safe to run many times at once: every step is guarded rows, locked with SKIP LOCKED, in
batches, with a cap a pass. No transaction is open while a message is published. A pass is
complete, and recorded, even if publishing failed: the jobs stay dispatchable.

What it is not: it knows no Celery. ``Publisher`` is what it asks to put a message on the
broker and to close the books; nothing a user serialised is decoded here.

One file, although it is long: a pass is one walk, and what it does for one job others ask for, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from celery_lease import events
from celery_lease.records import Dispatchable, Message, Outcome, Vanished
from celery_lease.settings import Settings
from celery_lease.states import JobState
from celery_lease.store import queries, transitions
from celery_lease.store.engine import Store

#: A pass later than this many intervals grants the amnesty. At 2 every pass that a worker runs
#: by itself would: median recovery 67 s instead of 35 s (design, section 5).
LATE_PASS_INTERVALS = 3


class PublishFailed(Exception):
    """Raised by a publisher when a message did not reach the broker, as far as is known.

    Attributes:
        is_away: False where the broker answered and refused this message: another one may get
            there.
    """

    def __init__(self, problem: str, *, is_away: bool = True) -> None:
        self.is_away = is_away
        super().__init__(problem)


class Publisher(Protocol):
    """What the reaper asks of the Celery floor."""

    def publish(self, candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        """Put a stored message on the broker; ``PublishFailed`` if it cannot."""

    def close_books(self, outcome: Outcome, message: Message) -> bool:
        """Tell Celery an end that no body returned; False when only a replay can."""


@dataclass(slots=True)
class PassResult:
    """What one pass did.

    Attributes:
        counts: how many by kind: extended, expired, interrupted, woken, cancelled, overdue,
            dispatched, unpublished, replayed, closed, pruned.
        seconds: how long it took.
    """

    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, kind: str, number: int = 1) -> None:
        """Count."""
        if number:
            self.counts[kind] = self.counts.get(kind, 0) + number


class Reaper:
    """Runs passes over one store.

    Args:
        store: the store.
        settings: the app's settings.
        publisher: puts messages on the broker.
        worker: who runs it, for the record.
        around: entered around each step that uses the store or the broker (a worker's main
            process keeps forks out of them).
        monotonic: the clock that ``seconds`` is measured with.
    """

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        publisher: Publisher,
        worker: str | None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._publisher = publisher
        self._worker = worker
        self._around = around
        self._monotonic = monotonic

    def is_due(self) -> bool:
        """Tell whether no pass has been recorded for two intervals."""
        with self._around():
            last = queries.last_pass(self._store)
        return last is None or last.age_seconds >= 2 * self._settings.reaper_interval

    def run_pass(self) -> PassResult:
        """Make one pass.

        Raises:
            StoreUnavailable: the store is away; the next pass goes on from there.
        """
        started = self._monotonic()
        result = PassResult()
        for step in (
            self._grant_amnesty,
            self._expire,
            self._move_on,
            self._dispatch,
            self._settle,
            self._prune,
        ):
            step(result)
        with self._around():
            transitions.record_pass(
                self._store, counts=json.dumps(result.counts), worker=self._worker
            )
        result.seconds = self._monotonic() - started
        self._report(result.counts, result.seconds)
        return result

    def _report(self, counts: Mapping[str, int], seconds: float) -> None:
        events.emit(events.PASS_COMPLETED, worker=self._worker, seconds=seconds, **counts)

    def _grant_amnesty(self, result: PassResult) -> None:
        with self._around():
            last = queries.last_pass(self._store)
            late = LATE_PASS_INTERVALS * self._settings.reaper_interval
            if last is None or last.age_seconds > late:
                ended_since = None if last is None else last.finished_at
                result.add("extended", transitions.extend(self._store, ended_since=ended_since))

    def _expire(self, result: PassResult) -> None:
        tried: set[str] = set()
        while len(tried) < self._settings.reaper_limit:
            with self._around():
                batch = transitions.expire(
                    self._store,
                    limit=self._settings.reaper_batch,
                    lost_backoff=self._settings.lost_backoff,
                )
            if not batch:
                return
            for vanished in batch:
                tried.add(vanished.job_id)
                report_vanished(vanished)
                result.add("expired")
                if vanished.state is JobState.INTERRUPTED:
                    result.add("interrupted")

    def _move_on(self, result: PassResult) -> None:
        batch = self._settings.reaper_batch
        grace = self._settings.queued_timeout
        moves: dict[str, Callable[[], list[str]]] = {
            "woken": lambda: transitions.wake(
                self._store, limit=batch, dispatched_grace_seconds=grace
            ),
            "overdue": lambda: transitions.pass_deadline(self._store, limit=batch),
            "cancelled": lambda: transitions.expire_unstarted(self._store, limit=batch),
        }
        for kind, move in moves.items():
            moved = 0
            while moved < self._settings.reaper_limit:
                with self._around():
                    ids = move()
                moved += len(ids)
                if kind == "cancelled":
                    for job_id in ids:
                        report_cancelled(job_id, worker=self._worker, reason="expires")
                if len(ids) < batch:
                    break
            result.add(kind, moved)

    def send_due(self) -> int:
        """Send the waiting jobs that are due, between two passes (``lease_defer_precision``).

        What it cannot send is queued, and a pass sends it.

        Returns:
            How many were sent.
        """
        batch, sent, moved = self._settings.reaper_batch, 0, 0
        while moved < self._settings.reaper_limit:
            with self._around():
                ids = transitions.wake(
                    self._store,
                    limit=batch,
                    dispatched_grace_seconds=self._settings.queued_timeout,
                )
            moved += len(ids)
            for job_id in ids:
                with self._around():
                    candidate = queries.dispatchable(self._store, job_id)
                    try:
                        sent += int(candidate is not None and self.dispatch(candidate))
                    except PublishFailed as error:
                        if error.is_away:
                            return sent
            if len(ids) < batch:
                break
        return sent

    def _dispatch(self, result: PassResult) -> None:
        sent = 0
        while sent < self._settings.reaper_limit:
            with self._around():
                candidates = queries.undispatched(self._store, limit=self._settings.reaper_batch)
                if len(candidates) < self._settings.reaper_batch:
                    candidates += queries.unclaimed(
                        self._store,
                        queued_timeout=self._settings.queued_timeout,
                        limit=self._settings.reaper_batch - len(candidates),
                    )
            if not candidates:
                return
            for candidate in candidates:
                with self._around():
                    try:
                        done = self.dispatch(candidate)
                    except PublishFailed as error:
                        result.add("unpublished")
                        if error.is_away:
                            # Give the batch up, the jobs stay dispatchable.
                            return
                        continue
                result.add("dispatched", int(done))
            sent += len(candidates)

    def dispatch(self, candidate: Dispatchable, *, replay: bool = False) -> bool:
        """Put one job's newest message on the broker.

        The dispatch is recorded first: two dispatchers never send the same one. If the process
        dies between the record and the publish, the job is sent again after
        ``lease_queued_timeout``.

        Returns:
            False when another dispatcher has it or the job has moved on.

        Raises:
            PublishFailed: the broker did not take it; the job is undispatched again, unless the
                broker refused this very message. That counts as sent and unclaimed: tried again at
                growing gaps, it is not in the way of the others.
        """
        if not transitions.dispatch(self._store, candidate, replay=replay):
            return False
        message = queries.message(self._store, candidate.job_id, candidate.message_version)
        if message is None:
            return False
        try:
            self._publisher.publish(candidate, message, replay=replay)
        except PublishFailed as error:
            events.emit(
                events.PUBLISH_FAILED,
                job_id=candidate.job_id,
                worker=self._worker,
                reason=str(error),
            )
            if error.is_away:
                transitions.undispatch(
                    self._store, candidate.job_id, dispatch_count=candidate.dispatch_count + 1
                )
                if not replay:
                    # It may be this message all the same: the next pass begins with another one.
                    transitions.put_last(self._store, candidate.job_id)
            raise
        except Exception:
            # Not the broker's, but of whoever runs this: the time limit of a body.
            transitions.undispatch(
                self._store, candidate.job_id, dispatch_count=candidate.dispatch_count + 1
            )
            raise
        events.emit(
            events.JOB_REPLAYED if replay else events.JOB_DISPATCHED,
            job_id=candidate.job_id,
            worker=self._worker,
            message_version=candidate.message_version,
            dispatch_count=candidate.dispatch_count + 1,
        )
        return True

    def _settle(self, result: PassResult) -> None:
        with self._around():
            waiting = queries.unsettled(
                self._store,
                grace_seconds=self._settings.settle_grace,
                again_seconds=self._settings.queued_timeout,
                limit=self._settings.reaper_batch,
            )
        for outcome, candidate in waiting:
            with self._around():
                try:
                    result.add(self.settle(outcome, candidate))
                except PublishFailed as error:
                    result.add("unpublished")
                    if error.is_away:
                        return

    def settle(self, outcome: Outcome, candidate: Dispatchable) -> str:
        """Have Celery told one outcome: by closing the books, else by a replay.

        Returns:
            What was done: ``closed``, ``replayed`` or ``taken`` (by another reaper).

        Raises:
            PublishFailed: the broker or the result backend did not take it; tried again by a
                later pass.
        """
        if outcome.by_attempt:
            return "replayed" if self.dispatch(candidate, replay=True) else "taken"
        # The dispatch record is what keeps two reapers from telling it twice.
        if not transitions.dispatch(self._store, candidate, replay=True):
            return "taken"
        message = queries.message(self._store, outcome.job_id, candidate.message_version)
        if message is None:
            return "taken"
        try:
            if not self._publisher.close_books(outcome, message):
                self._publisher.publish(candidate, message, replay=True)
                return "replayed"
        except PublishFailed as error:
            events.emit(
                events.PUBLISH_FAILED,
                job_id=outcome.job_id,
                worker=self._worker,
                reason=str(error),
            )
            raise
        transitions.settle(
            self._store, [(outcome.job_id, outcome.fencing_token, outcome.finished_at)]
        )
        return "closed"

    def follow_up(self, vanished: Vanished) -> None:
        """Do at once what a vanished runner's job needs next; the next pass is the fallback."""
        try:
            if vanished.state is JobState.QUEUED:
                candidate = queries.dispatchable(self._store, vanished.job_id)
                if candidate is not None:
                    self.dispatch(candidate)
            elif vanished.state.is_final:
                self.settle_now(vanished.job_id)
        except PublishFailed:
            # It stays queued and undispatched, or unsettled: a pass sends it.
            return

    def send_now(self, job_id: str) -> None:
        """Dispatch a job that has just become queued; a pass is the fallback."""
        candidate = queries.dispatchable(self._store, job_id)
        if candidate is not None:
            try:
                self.dispatch(candidate)
            except PublishFailed:
                return

    def settle_now(self, job_id: str) -> None:
        """Have Celery told a final job's outcome at once; a pass is the fallback."""
        found = queries.outcome(self._store, job_id)
        if found is not None:
            try:
                self.settle(*found)
            except PublishFailed:
                return

    def settle_many(self, job_ids: Sequence[str]) -> None:
        """Have Celery told the outcomes of final jobs, one batch of them; passes do the rest.

        Whoever waits for this must not wait for thousands, nor for each of them where the broker
        or the result backend is away.
        """
        for job_id in job_ids[: self._settings.reaper_batch]:
            found = queries.outcome(self._store, job_id)
            if found is not None:
                try:
                    self.settle(*found)
                except PublishFailed as error:
                    if error.is_away:
                        return

    def _prune(self, result: PassResult) -> None:
        with self._around():
            removed = transitions.prune(
                self._store,
                succeeded_seconds=self._settings.keep_succeeded,
                failed_seconds=self._settings.keep_failed,
                limit=self._settings.reaper_batch,
            )
        result.add("pruned", removed)


def report_cancelled(job_id: str, *, worker: str | None, reason: str) -> None:
    """Emit that a job was cancelled, and why."""
    events.emit(events.JOB_CANCELLED, job_id=job_id, worker=worker, reason=reason)


def report_vanished(vanished: Vanished) -> None:
    """Emit what became of a vanished runner's job."""
    events.emit(
        events.LEASE_EXPIRED,
        job_id=vanished.job_id,
        fencing_token=vanished.fencing_token,
        worker=vanished.worker,
        owner=vanished.owner,
        cause=vanished.cause.value,
        state=vanished.state.value,
    )
    if vanished.state is JobState.INTERRUPTED:
        events.emit(
            events.JOB_INTERRUPTED,
            job_id=vanished.job_id,
            fencing_token=vanished.fencing_token,
            worker=vanished.worker,
        )
    elif vanished.state is JobState.HELD:
        events.emit(
            events.JOB_HELD,
            job_id=vanished.job_id,
            fencing_token=vanished.fencing_token,
            worker=vanished.worker,
        )
