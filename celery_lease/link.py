"""A runner's tie to its worker's main process: what it says of its leases, and what it hears.

Nobody waits: a word that was not answered is said again with the next heartbeat. The two exceptions
wait a moment because the alternative costs a job: a body that looks lost by its own clock, and one
that a signal is about to end.

What it is not: it decides nothing of a lease. What it hears is written into the lease; who is lost
it gives back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeAlias

from celery_lease.claims import Answer, Claim, Teller
from celery_lease.lease import Lease

logger = logging.getLogger(__name__)

Leases: TypeAlias = Mapping[tuple[str, int], Lease]
#: Leases that the main process found lost, with the reason.
Lost: TypeAlias = Mapping[tuple[str, int], str]

#: A body that doubts its lease waits so long at most for the main process's word.
ANSWER_SECONDS = 1.0
#: A body that a signal ends waits so long for the word that its worker stops, and looks so often.
STOP_WORD_SECONDS = 0.5
STOP_POLL_SECONDS = 0.01


class WorkerLink:
    """What one process has to do with its worker's main process.

    Args:
        teller: the way there, None where there is none.
        owner: this process.
        monotonic: the clock.
        sleep: waits.
    """

    def __init__(
        self,
        teller: Teller | None,
        *,
        owner: str,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._teller = teller
        self._owner = owner
        self._monotonic = monotonic
        self._sleep = sleep

    @property
    def is_apart(self) -> bool:
        """True when the main process is another one, and can be told."""
        return self._teller is not None and self._teller.is_apart

    def say(self, lease: Lease) -> None:
        """Say that a lease is held, or that it is no more to be renewed; never raises."""
        if self._teller is None:
            return
        claim = Claim(
            job_id=lease.job_id,
            fencing_token=lease.fencing_token,
            owner=self._owner,
            pid=os.getpid(),
            lease_seconds=lease.lease_seconds,
            heartbeat_seconds=lease.heartbeat_seconds,
            from_worker=lease.from_worker,
        )
        try:
            self._teller.tell(claim)
        except Exception:
            # In one process it is a call: what the broker says to an acknowledgement, say. The
            # message is acknowledged at the end of the attempt.
            logger.exception("lease.claim.untold job_id=%s", lease.job_id)

    def talk(self, leases: Leases) -> Lost:
        """Take the answers, and say again what was not answered; never blocks."""
        lost: dict[tuple[str, int], str] = {}
        if self._teller is None:
            return lost
        for answer in self._teller.answers():
            _take(answer, leases, lost)
        for lease in leases.values():
            # The word of a lease that the main process renews is the sign of life it waits for.
            # In one process it was heard at once, and the heartbeat's thread must not acknowledge.
            if self.is_apart and (not lease.is_known or lease.from_worker):
                self.say(lease)
        return lost

    def ask(self, lease: Lease) -> None:
        """Ask for the last renewal by the main process: the heartbeat here may have been starved.

        Called by the body, whose lease looks lost by its own clock.
        """
        if self._teller is None or not lease.from_worker:
            return
        leases = _only(lease)
        self.talk(leases)
        for answer in self._teller.answers(wait_seconds=ANSWER_SECONDS):
            # One that is lost looks so already.
            _take(answer, leases, {})
            if not lease.is_past:
                return

    def is_stop(self, lease: Lease) -> bool:
        """Tell whether the signal that ends a body is a stop of its worker.

        The signal may come a moment before the word. Anything else, as a revocation or a stranger's
        ``kill``, is the main process's to judge, and has the same moment to reach the store.
        """
        until = self._monotonic() + STOP_WORD_SECONDS
        while not lease.stop_requested and self._monotonic() < until:
            self.talk(_only(lease))
            self._sleep(STOP_POLL_SECONDS)
        return lease.stop_requested

    def close(self) -> None:
        """End it."""
        if self._teller is not None:
            self._teller.close()


def _only(lease: Lease) -> Leases:
    return {(lease.job_id, lease.fencing_token): lease}


def _take(answer: Answer, leases: Leases, lost: dict[tuple[str, int], str]) -> None:
    key = (answer.job_id, answer.fencing_token)
    lease = leases.get(key)
    if lease is None:
        return
    lease.is_known = True
    lease.is_acknowledged |= answer.acknowledged
    lease.is_told_to_stop |= answer.stopping
    if answer.sent_at is not None:
        lease.renewed_by_worker(answer.sent_at)
    if answer.lost is not None:
        lost[key] = answer.lost
