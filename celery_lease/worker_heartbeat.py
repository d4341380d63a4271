"""The heartbeat that a worker's main process makes for its children (``lease_heartbeat_from``).

A call into C that holds Python's global lock starves the heartbeat thread of its own process: one
backtracking regular expression renewed nothing in eleven seconds (celery-facts, section 13). The
main process has a lock of its own. It renews, with the owner and token that the child said over
the claim socket, in one statement a worker.

A child that is gone or frozen must not be renewed for ever, so each renewal needs a sign of life
since the last: the child's heartbeat thread has spoken, or the child has used processor time.
A body in a long C call cannot speak but computes; one that sleeps lets its thread speak; one that
is stopped, whether by SIGSTOP or by the freezer of its control group, or that waits in a C call
which holds the lock, does neither. Where there is no ``/proc`` only speech counts.

Authoritative is the store. The child renews by itself until it has heard of a renewal from here,
and again when it has heard of none for a while.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from celery_lease import events
from celery_lease.claims import Answer, Claim
from celery_lease.exceptions import StoreError
from celery_lease.records import Held, Renewal, Renewed

logger = logging.getLogger(__name__)

#: States of a process that does not run: stopped, traced, a zombie, dead (proc(5)).
_NOT_RUNNING = frozenset("TtZXx")
#: Share of a processor from which on a child computes. A thread that waits for Python's lock looks
#: 200 times a second whether it is free: 0.25 % for each such thread (measured, CPython 3.11), and
#: the heartbeat's is one of them while a body sleeps with the lock in its hands.
COMPUTING_SHARE = 0.01
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: A child speaks with each of its heartbeats; for so many of them its last word is news.
SILENT_HEARTBEATS = 1.5
#: Time to the next try when the store did not answer.
AGAIN_SECONDS = 0.5


@dataclass(slots=True)
class _Watched:
    claim: Claim
    due: float
    spoken_at: float
    processor_ticks: int = -1
    looked_at: float = 0.0
    sent_at: float | None = None


class WorkerHeartbeat:
    """Renews leases for the children of one main process.

    Args:
        renew: the store's ``renew``.
        answer: says something to the child with a pid.
        worker: node name, for events.
        around: entered around each use of the store (forks are kept out of it).
        monotonic: the clock.
        processes: where the processes of this machine are described.
    """

    def __init__(
        self,
        *,
        renew: Callable[[Sequence[Renewal]], Renewed],
        answer: Callable[[Answer, int], None],
        worker: str,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        monotonic: Callable[[], float] = time.monotonic,
        processes: Path = Path("/proc"),
    ) -> None:
        self._renew = renew
        self._answer = answer
        self._worker = worker
        self._around = around
        self._monotonic = monotonic
        self._processes = processes
        self._lock = threading.Lock()
        self._wakeup = threading.Event()
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, claim: Claim) -> float | None:
        """Renew a lease from now on, or take its child's word that it lives.

        Returns:
            The monotonic clock at the send of its last accepted renewal, None without one. A child
            asks for it after a long call into C: its socket keeps few answers (ten, by Linux's
            ``net.unix.max_dgram_qlen``), and the oldest.
        """
        key = (claim.job_id, claim.fencing_token)
        with self._lock:
            known = self._watched.get(key)
            now = self._monotonic()
            if known is not None:
                known.spoken_at = now
                return known.sent_at
            # Soon: until the child has heard of a renewal it makes its own.
            self._watched[key] = _Watched(claim, now + claim.heartbeat_seconds / 2, now)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name="celery-lease-worker-heartbeat", daemon=True
                )
                self._thread.start()
        self._wakeup.set()
        return None

    def forget(self, job_id: str, fencing_token: int) -> None:
        """Renew a lease no more: its attempt has ended, or its child."""
        with self._lock:
            self._watched.pop((job_id, fencing_token), None)

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """End the thread, within the timeout."""
        self._stopping = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def beat_once(self) -> None:
        """Renew, in one statement, every lease whose child has given a sign of life."""
        with self._lock:
            watched = list(self._watched.values())
        alive = [one for one in watched if self._lives(one)]
        now = self._monotonic()
        for one in watched:
            one.due = now + one.claim.heartbeat_seconds
        if not alive:
            return
        held = [Held(one.claim.job_id, one.claim.fencing_token, one.claim.owner) for one in alive]
        try:
            with self._around():
                answer = self._renew([Renewal(lease) for lease in held])
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, worker=self._worker, reason=str(error))
            for one in alive:
                one.due = self._monotonic() + min(AGAIN_SECONDS, one.claim.heartbeat_seconds / 2)
            return
        for one in alive:
            self._tell(one, answer, now)

    def _tell(self, one: _Watched, answer: Renewed, sent_at: float) -> None:
        key = (one.claim.job_id, one.claim.fencing_token)
        if key in answer.renewed:
            one.sent_at = sent_at
            said = Answer(*key, sent_at=sent_at)
        elif key in answer.lost:
            state = answer.lost[key]
            self.forget(*key)
            lost = "its row is gone" if state is None else f"the attempt is {state}"
            said = Answer(*key, lost=lost)
        else:
            return
        self._answer(said, one.claim.pid)

    def _lives(self, one: _Watched) -> bool:
        """Tell whether a child has given a sign of life of late."""
        now = self._monotonic()
        has_spoken = now - one.spoken_at < SILENT_HEARTBEATS * one.claim.heartbeat_seconds
        state, ticks = self._look_at(one.claim.pid)
        if state in _NOT_RUNNING:
            return False
        least = COMPUTING_SHARE * (now - one.looked_at) * _TICKS_PER_SECOND
        # Most of the first tick may have been used before the last look.
        has_computed = ticks - one.processor_ticks > 1 + least and one.processor_ticks >= 0
        one.processor_ticks, one.looked_at = ticks, now
        return has_spoken or has_computed

    def _look_at(self, pid: int) -> tuple[str, int]:
        """Return a process's state and processor ticks: "X" when it is gone, "" when unknown."""
        try:
            # The name, in parentheses, may have spaces and parentheses in it (proc(5)).
            fields = (self._processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return fields[0], int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return "X", -1
            except OSError:
                pass
            return "", -1

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                due = min((one.due for one in self._watched.values()), default=None)
            self._wakeup.wait(None if due is None else max(0.0, due - self._monotonic()))
            self._wakeup.clear()
            if due is None or due > self._monotonic():
                continue
            try:
                self.beat_once()
            except Exception:
                # The thread's outer edge: the children renew by themselves then.
                logger.exception("lease.heartbeat.failed worker=%s", self._worker)
                self._wakeup.wait(AGAIN_SECONDS)
