"""One process as the store sees it: its owner name, its leases, and how they begin and end.

What it is not: it knows no Celery. ``task`` asks it to claim a delivery and to end an attempt;
it adds the heartbeat, patience during short outages of the store, and the record of what came
too late.

One file, although it is long: each way for an attempt to end stands beside the others, so that it
shows that all of them take the lease out of the heartbeat first.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TypeVar

from celery_lease import events
from celery_lease.backoff import full_jitter
from celery_lease.claims import Teller
from celery_lease.exceptions import StoreUnavailable
from celery_lease.heartbeat import Heartbeat, Settled
from celery_lease.lease import Lease
from celery_lease.link import WorkerLink
from celery_lease.native import NativeThread, is_patched
from celery_lease.owners import OwnerFile, OwnerFolder
from celery_lease.reaper import report_vanished
from celery_lease.records import (
    Accepted,
    ClaimAnswer,
    Claimed,
    Delivery,
    Failure,
    FinishAnswer,
    Late,
    Stale,
    Vanished,
)
from celery_lease.settings import HeartbeatFrom, Settings, TaskSettings
from celery_lease.states import LossCause
from celery_lease.stopping import StopFlag
from celery_lease.store import transitions
from celery_lease.store.engine import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Waits between two tries of a store that is away, seconds: first and longest.
PATIENCE_FIRST_SECONDS = 0.1
PATIENCE_LONGEST_SECONDS = 2.0
#: An outcome is tried at least this long, even if the lease is nearly over.
SHORTEST_PATIENCE_SECONDS = 2.0


def owner_name() -> str:
    """Return a name for this process that no other ever has: host, pid and a random part.

    The random part is what makes it unique: hosts share names and pids come back (B042).
    """
    return f"{owner_prefix(os.getpid())}{uuid.uuid4().hex[:12]}"


def owner_prefix(pid: int) -> str:
    """Return how the owner names of a process of this host begin."""
    return f"{socket.gethostname()[:100]}:{pid}:"


class Runtime:
    """The leases of one process.

    Args:
        store: the store.
        settings: the app's settings.
        worker: Celery's node name.
        prepare: checks the store's tables before a claim; cheap once they are checked.
        owner_folder: where this process's owner file is, None for none.
        teller: says to the worker's main process what was claimed, None where there is none.
        stop_flag: raised when the worker is asked to stop, None outside of a worker.
        is_child: True in a process of a worker's pool.
        on_vanished: does at once what the job of a runner that gave up needs next; may block.
        monotonic: the clock of local deadlines.
        sleep: waits during an outage.
    """

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        worker: str,
        prepare: Callable[[], None] = lambda: None,
        owner_folder: OwnerFolder | None = None,
        teller: Teller | None = None,
        stop_flag: StopFlag | None = None,
        is_child: bool = False,
        on_vanished: Callable[[Vanished], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._prepare = prepare
        self.settings = settings
        self.worker = worker
        self.owner = owner_name()
        self._owner_file = None if owner_folder is None else OwnerFile(owner_folder, self.owner)
        self.link = WorkerLink(teller, owner=self.owner, monotonic=monotonic, sleep=sleep)
        self._stop_flag = stop_flag
        self._is_child = is_child
        self._stop_watch: threading.Thread | None = None
        self._on_vanished = on_vanished
        self._monotonic = monotonic
        self._sleep = sleep
        # What our own threads use; under gevent they are native and share no connection.
        self._threads_store = store.apart() if is_patched() else store
        self.heartbeat = Heartbeat(
            renew=lambda renewals: transitions.renew(self._threads_store, renewals),
            settle=lambda outcomes: transitions.settle(self._threads_store, outcomes),
            worker=worker,
            before_beat=self.link.talk,
            on_stalled=self._give_up_stalled,
            monotonic=monotonic,
        )

    @property
    def is_apart(self) -> bool:
        """True in a child: the worker's main process is another one."""
        return self._is_child

    @property
    def is_stopping(self) -> bool:
        """True once this process's worker was asked to stop."""
        return self._stop_flag is not None and self._stop_flag.is_set()

    # -- the beginning -------------------------------------------------------------------------

    def claim(
        self,
        *,
        job_id: str,
        message_version: int,
        task_settings: TaskSettings,
        replay: bool = False,
        dispatch_count: int | None = None,
    ) -> tuple[ClaimAnswer, Lease | None]:
        """Claim a delivery, waiting through a short outage of the store.

        Returns:
            The store's answer, and the lease, already under the heartbeat, when it was won.

        Raises:
            StoreUnavailable: the store stayed away for ``lease_claim_timeout`` seconds.
        """
        delivery = Delivery(
            job_id=job_id,
            message_version=message_version,
            owner=self.owner,
            worker=self.worker,
            nonce=uuid.uuid4().hex,
            lease_seconds=task_settings.duration_seconds,
            worker_now=_now(),
            replay=replay,
            settle_grace_seconds=self.settings.settle_grace,
            dispatch_count=dispatch_count,
        )
        sends: list[float] = []
        if self._owner_file is not None:
            self._owner_file.create()

        def ask() -> ClaimAnswer:
            self._prepare()
            sends.append(self._monotonic())
            return transitions.claim(self.store, delivery, lost_backoff=self.settings.lost_backoff)

        answer = self._patiently(ask, until=self._monotonic() + self.settings.claim_timeout)
        if not isinstance(answer, Claimed):
            return answer, None
        # A repetition may be told of the first call's claim, so the deadline counts from the
        # first send; a renewal then says how long the lease really has.
        lease = self._hold(answer, task_settings, sends[0])
        try:
            self.link.talk({})
            self.link.say(lease)
            self._watch_for_stop()
            if len(sends) > 1:
                self.confirm(lease)
        except BaseException:
            # No body will run: left in the heartbeat it would be renewed for ever.
            self.surrender(lease, reason="the claim broke off")
            raise
        return answer, lease

    def _hold(self, claimed: Claimed, task_settings: TaskSettings, sent_at: float) -> Lease:
        lease = Lease(
            claimed,
            lease_seconds=task_settings.duration_seconds,
            heartbeat_seconds=task_settings.heartbeat_seconds,
            sent_at=sent_at,
            on_surrender=self._renew_no_more,
            on_checkpoint=self.heartbeat.beat_soon,
            on_doubt=self.link.ask,
            from_worker=task_settings.heartbeat_from is HeartbeatFrom.WORKER and self.link.is_apart,
            stop_flag=self._stop_flag,
            stall_timeout_seconds=task_settings.stall_timeout_seconds,
            max_checkpoint_bytes=self.settings.max_result_bytes,
            monotonic=self._monotonic,
        )
        self.heartbeat.add(lease)
        if claimed.took_over is not None:
            events.emit(
                events.LEASE_EXPIRED,
                job_id=lease.job_id,
                fencing_token=claimed.took_over,
                worker=self.worker,
                taken_over_by=lease.fencing_token,
            )
        events.emit(
            events.CLAIM_WON,
            job_id=lease.job_id,
            fencing_token=lease.fencing_token,
            worker=self.worker,
        )
        return lease

    def _renew_no_more(self, lease: Lease) -> None:
        """Take a lease that was given up out of the heartbeat, and out of the main process's."""
        self.heartbeat.remove(lease)
        if lease.from_worker:
            lease.from_worker = False
            # One that is lost on the way is no harm: nobody else speaks for that lease any more.
            self.link.say(lease)

    def _watch_for_stop(self) -> None:
        """Have it written soon that the body was asked to stop: its process may be killed soon."""
        if self._stop_flag is None or self._stop_watch is not None:
            return
        flag = self._stop_flag

        def watch() -> None:
            if flag.wait():
                self.heartbeat.beat_soon()

        self._stop_watch = threading.Thread(target=watch, name="celery-lease-stop", daemon=True)
        self._stop_watch.start()

    def confirm(self, lease: Lease) -> bool:
        """Renew a lease now; True when the store says that it is still held."""
        renewal = lease.renewal()
        sent_at = self._monotonic()
        answer = self._patiently(
            lambda: transitions.renew(self.store, [renewal]), until=lease.surely_ended_at
        )
        key = (lease.job_id, lease.fencing_token)
        if key in answer.renewed:
            lease.renewed(sent_at, renewal)
            if key in answer.refused:
                lease.refuse(renewal)
            return True
        lease.give_back(renewal)
        return key in answer.unanswered and not lease.lost

    # -- the end -------------------------------------------------------------------------------

    def finish(
        self,
        lease: Lease,
        transition: Callable[[transitions.Parting], FinishAnswer],
        *,
        reason: str | None,
        failure: Failure | None = None,
        late: Late,
        shielded: Callable[[Callable[[], FinishAnswer]], FinishAnswer] = lambda call: call(),
    ) -> FinishAnswer:
        """End an attempt by a transition; what comes too late is kept and changes nothing.

        The lease leaves the heartbeat first, so that no loss can be reported for it later.

        Args:
            lease: the lease.
            transition: called with what the runner says; repeated during a short outage.
            reason: one word on why the attempt ends.
            failure: what the body raised.
            late: what to keep if the lease was not mine any more.
            shielded: runs each try with time-limit signals held back.

        Raises:
            StoreUnavailable: the store stayed away until the lease had surely ended; nothing
                is known, and the job is given on by the reaper.
        """
        self.heartbeat.remove(lease)
        progress, checkpoint = lease.newest_reports()
        parting = transitions.Parting(
            reason=reason,
            worker_now=_now(),
            failure=failure or Failure(),
            progress=progress,
            checkpoint=checkpoint,
        )
        if lease.surrendered:
            self.surrender(lease, reason="the body went on after LeaseLost")
            answer: FinishAnswer = Stale(None)
        else:
            until = max(lease.surely_ended_at, self._monotonic() + SHORTEST_PATIENCE_SECONDS)
            answer = self._patiently(lambda: shielded(lambda: transition(parting)), until=until)
        if isinstance(answer, Accepted):
            events.emit(
                events.OUTCOME_ACCEPTED,
                job_id=lease.job_id,
                fencing_token=lease.fencing_token,
                worker=self.worker,
                outcome=late.outcome.value,
            )
        else:
            self.reject(lease, late)
        return answer

    def reject(self, lease: Lease, late: Late) -> None:
        """Keep a late outcome on its own attempt row."""
        events.emit(
            events.OUTCOME_REJECTED,
            job_id=lease.job_id,
            fencing_token=lease.fencing_token,
            worker=self.worker,
            outcome=late.outcome.value,
        )
        try:
            transitions.reject(self.store, lease.held, late)
        except StoreUnavailable as error:
            # Only the diagnosis is lost: the job belongs to another attempt already.
            events.emit(events.STORE_UNAVAILABLE, worker=self.worker, reason=str(error))

    def surrender(self, lease: Lease, *, reason: str) -> Vanished | None:
        """End an attempt whose lease was given up, and have its job given on at once.

        Returns:
            What the policy did. None: the attempt had ended already, or the store is away; then the
            lease runs out, and a pass gives the job on.
        """
        self._renew_no_more(lease)
        try:
            vanished = transitions.lost(
                self.store,
                lease.held,
                cause=LossCause.LOST,
                reason=reason,
                lost_backoff=self.settings.lost_backoff,
            )
            if vanished is not None:
                report_vanished(vanished)
                self._on_vanished(vanished)
        except StoreUnavailable as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self.worker, reason=str(error))
            return None
        return vanished

    def _give_up_stalled(self, lease: Lease) -> None:
        self._renew_no_more(lease)
        # In a thread of its own: the store and the broker may be slow, the heartbeat must not be.
        thread = NativeThread(lambda: self._end_stalled(lease), name="celery-lease-stall")
        thread.start()

    def _end_stalled(self, lease: Lease) -> None:
        """End the attempt of a body without progress, with its stack, and interrupt the body."""
        silence = lease.stall_watch.silence_seconds(self._monotonic())
        reason = f"no progress for {silence:.1f} s"
        stack = lease.interruption.stack()
        try:
            vanished = self._patiently(
                lambda: transitions.lost(
                    self._threads_store,
                    lease.held,
                    cause=LossCause.STALLED,
                    reason=reason,
                    lost_backoff=self.settings.lost_backoff,
                    trace=stack,
                ),
                # Nobody renews it any more: then it has run out, and the reaper gives it on.
                until=lease.surely_ended_at,
            )
        except StoreUnavailable:
            vanished = None
        except Exception:
            # The thread's outer edge; the lease runs out all the same.
            logger.exception("lease.stall.failed worker=%s", self.worker)
            vanished = None
        # Not before: interrupted, the body would end its attempt without the stack.
        lease.mark_lost(f"the attempt is stalled: {reason}")
        lease.interrupt()
        if vanished is None:
            return
        events.emit(
            events.ATTEMPT_STALLED,
            job_id=lease.job_id,
            fencing_token=lease.fencing_token,
            worker=self.worker,
            silence_seconds=silence,
            state=vanished.state,
        )
        report_vanished(vanished)
        lease.interruption.run_beside(lambda: self._on_vanished(vanished))

    def settle_later(self, outcome: Settled) -> None:
        """Record that Celery has been told an outcome."""
        self.heartbeat.settle_later(outcome)

    def stop(self) -> None:
        """Write what is left and end the thread."""
        self.heartbeat.stop()
        self.link.close()
        # With a lease left, in a thread that nobody waits for, its file tells its end at once.
        if self._owner_file is not None and self.heartbeat.is_empty:
            self._owner_file.remove()

    def _patiently(self, call: Callable[[], T], *, until: float) -> T:
        tries = 0
        while True:
            try:
                return call()
            except StoreUnavailable as error:
                events.emit(events.STORE_UNAVAILABLE, worker=self.worker, reason=str(error))
                left = until - self._monotonic()
                if left <= 0:
                    raise
                wait = PATIENCE_FIRST_SECONDS + full_jitter(
                    PATIENCE_FIRST_SECONDS, PATIENCE_LONGEST_SECONDS, tries, random.random
                )
                tries += 1
                self._sleep(min(wait, max(left, 0.01)))


def _now() -> datetime:
    return datetime.now(timezone.utc)


class PerProcess:
    """Makes a ``Runtime`` at its first use in a process, and a new one after a fork.

    Args:
        make: builds it.
    """

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None
        self._pid = -1

    def get(self) -> Runtime:
        """Return this process's runtime."""
        pid = os.getpid()
        runtime = self._runtime
        if runtime is not None and self._pid == pid:
            return runtime
        if self._pid not in (-1, pid):
            # After a fork the lock may be held for ever by a thread that is not here.
            self._lock = threading.Lock()
        with self._lock:
            if self._runtime is None or self._pid != pid:
                self._runtime = self._make()
                self._pid = pid
            return self._runtime

    def forget(self) -> None:
        """Make a new one at the next use: this process begins another life as a worker."""
        self._runtime = None

    def existing(self) -> Runtime | None:
        """Return this process's runtime if there is one."""
        return self._runtime if self._pid == os.getpid() else None
