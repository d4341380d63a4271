"""A delivery of a leased task as the worker's main process sees it.

Celery's own ``Request`` decides here what becomes of a message whose child has died, was killed by
a hard time limit, or is cancelled by a stop. For a leased job the store decides: this class says
what it saw (``endings``), takes the message off the broker, and writes nothing into the result
backend. Its ``on_success`` and ``execute_using_pool`` cannot be overridden: Celery puts its own
over them (``create_request_cls``; read: celery 5.5 to 5.7, ``celery/worker/request.py``).

Acknowledging at the claim must leave ``acknowledged`` False: a cold shutdown cancels what is not
acknowledged and waits for the rest to the end of its body (celery-facts, section 5).
"""

from __future__ import annotations

import copy
import functools
import logging
from contextlib import suppress
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_revoked
from celery.worker import state
from celery.worker.request import Request
from celery.worker.request import logger as request_logger
from celery.worker.state import task_ready
from kombu.utils.imports import symbol_by_name

from celery_lease import events
from celery_lease.claims import Answer, Claim
from celery_lease.deaths import death_reason
from celery_lease.endings import (
    Gone,
    limit_exceeded,
    runner_lost,
    settle_told,
)
from celery_lease.extension import Extension, extension_of
from celery_lease.messages import (
    CONTENT_TYPE_HEADER,
    RECORDED_HEADER,
    VERSION_HEADER,
    dispatch_count_of,
)
from celery_lease.records import Held
from celery_lease.revocation import end_first, is_stamped
from celery_lease.settings import Ack
from celery_lease.task import encode_error

logger = logging.getLogger(__name__)


class LeaseRequest(Request):  # type: ignore[misc]  # Celery has no types
    """A delivery of a leased task."""

    #: What its child has said of the claim it won.
    _claim: Claim | None = None
    #: The broker has been told, whatever ``acknowledged`` says.
    _is_acknowledged_at_claim = False
    _is_reported = False

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        # Celery tells the child nothing of it, which may have to record the message (``adoption``).
        # Not in ``delivery_info``: a retry is published with all that is there.
        self._request_dict[CONTENT_TYPE_HEADER] = message.content_type

    @property
    def _extension(self) -> Extension:
        return extension_of(self._app)

    # -- the claim -----------------------------------------------------------------------------

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Take note of the child; its claim may have been heard of before this."""
        super().on_accepted(pid, time_accepted)
        claims = self._extension.claims
        if claims is not None:
            claims.on_accepted(self)

    def on_claimed(self, claim: Claim) -> Answer:
        """Acknowledge the message: the claim has committed, and the reaper answers for the job."""
        self._claim = claim
        if not self._is_acknowledged_at_claim and not self.acknowledged and self._acks_at_claim():
            self._is_acknowledged_at_claim = True
            self._on_ack(request_logger, self._connection_errors)
        heartbeat, sent_at = self._extension.worker_heartbeat, None
        if claim.from_worker and heartbeat is not None and not self.acknowledged:
            sent_at = heartbeat.watch(claim)
        else:
            # A lease that its child has given up is renewed no more.
            self._renew_no_more()
        return Answer(
            claim.job_id,
            claim.fencing_token,
            acknowledged=self._is_acknowledged_at_claim,
            sent_at=sent_at,
        )

    def _acks_at_claim(self) -> bool:
        return self._extension.settings_for(self.task).ack is Ack.CLAIM

    def acknowledge(self) -> None:
        """Acknowledge the message, unless the broker has been told at the claim.

        Celery calls it when the child has reported its end, bookkeeping included.
        """
        self._renew_no_more()
        claims = self._extension.claims
        if claims is not None and self._claim is not None and not self._is_reported:
            claims.on_told(self._claim, self._request_dict.get("group"))
        if self._is_acknowledged_at_claim:
            self.acknowledged = True
        super().acknowledge()

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  Celery's signature
        """Give the message back, unless it is gone: then the store has the job."""
        self._renew_no_more()
        if self._is_acknowledged_at_claim:
            self.acknowledged = True
        super().reject(requeue)

    def _renew_no_more(self) -> None:
        heartbeat, claim = self._extension.worker_heartbeat, self._claim
        if heartbeat is not None and claim is not None:
            heartbeat.forget(claim.job_id, claim.fencing_token)

    # -- the end -------------------------------------------------------------------------------

    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: Any = True,  # noqa: FBT002  Celery's own signature
        return_ok: Any = False,  # noqa: FBT002  Celery's own signature
    ) -> Any:
        """Take what a child reported, or that it is gone.

        Of some errors Celery makes more than the failure that a child has told. It raises a
        ``MemoryError`` again in the main process (5.7): a prefork or solo worker ends, and the
        message is delivered again. It gives the message of a ``TimeLimitExceeded``, which a replay
        raises, back to the broker for ever where the user has set ``task_acks_on_timeout`` False.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if not return_ok and self._is_child_gone(error):
            return self._on_gone(error)
        if not return_ok and isinstance(error, SystemExit | KeyboardInterrupt):
            # The signal that ended the child was ours. The message stays unacknowledged and is
            # delivered again, as Celery has it since 5.6; in 5.5 it was a FAILURE.
            self._renew_no_more()
            return task_ready(self)
        if isinstance(error, MemoryError | TimeLimitExceeded | WorkerLostError):
            exc_info = copy.copy(exc_info)
            exc_info.exception = _Told(error)
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  Celery's signature
        """Take word of a time limit; a hard one has come to ``on_failure`` a moment before."""
        if soft:
            super().on_timeout(soft=soft, timeout=timeout)
        elif not self._is_reported:
            self._on_gone(TimeLimitExceeded(timeout))

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """Stop the body as its worker stops; a lost connection to the broker is no reason.

        What was acknowledged at its claim is nothing that the broker would deliver again (B021).
        Solo and threads cannot stop a body: it is told by ``lease.stop_requested``, and goes on.
        """
        if self._is_acknowledged_at_claim and not options and not self._is_stopping():
            return
        self._say_stopping()
        # Raised in the signal's handler it would be a failure of solo's body, which it interrupts,
        # or the end of a threads worker beside its bodies.
        with suppress(NotImplementedError):
            super().cancel(pool, signal, **options)

    # -- what revokes it -----------------------------------------------------------------------

    @property
    def _is_recorded(self) -> bool:
        """Whether the store knows the job, as far as is known here."""
        return self._claim is not None or bool(self._request_dict.get(RECORDED_HEADER))

    def revoked(self) -> bool:
        """Tell whether the delivery is not even to be handed to the pool.

        Celery goes by what this worker remembers and by this host's clock. Of a recorded job the
        store is asked, by the claim: it knows of revocations before this worker's start, of
        ``resume`` after one, and has the clock that ``expires`` is counted on. What was revoked
        before it was a job (a stamp; the id of a chain's next step, of a chord's body, of what is
        enqueued and not committed) is in no store: what the worker remembers of it holds for the
        job's first message.
        """
        if not self._is_recorded:
            return bool(super().revoked())
        if not self._already_revoked and self._is_first() and self._is_remembered():
            request_logger.info("Discarding revoked task: %s[%s]", self.name, self.id)
            self._announce_revoked("revoked", terminated=False, signum=None, expired=False)
        return bool(self._already_revoked)

    def _is_first(self) -> bool:
        """Tell whether it is a job's first message; what ``resume`` sends never is."""
        headers = self._request_dict
        return headers.get(VERSION_HEADER) == 1 and dispatch_count_of(headers) == 1

    def _is_remembered(self) -> bool:
        """Tell whether this worker has heard its id, or a stamp of it, revoked."""
        stamps = self._request_dict.get("stamps")
        return self.id in state.revoked or is_stamped(stamps, state.revoked_stamps)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the body of a revoked job at once; the store ends the job.

        Celery would also remember to end a body that has not begun: its claim is refused instead,
        unless somebody has resumed the job meanwhile. Threads and solo cannot end a body: it is
        interrupted at its next heartbeat.
        """
        if self._is_recorded and not self.time_start:
            return
        with suppress(NotImplementedError):
            super().terminate(pool, signal)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:  # noqa: FBT001  Celery's signature
        """Say that the delivery was revoked, and have the store end the job.

        Whoever ends it in the store tells Celery's result backend and the chord, and does it once.
        """
        is_recorded = self._is_recorded
        if not is_recorded:
            super()._announce_revoked(reason, terminated, signum, expired)
        else:
            task_ready(self)
            self.send_event("task-revoked", terminated=terminated, signum=signum, expired=expired)
            self.acknowledge()
            self._already_revoked = True
            task_revoked.send(
                self.task,
                request=self._context,
                terminated=terminated,
                signum=signum,
                expired=expired,
            )
        if expired:
            # What expired is ended by the reaper, by the store's clock.
            return
        self._extension.tell(functools.partial(end_first, job_id=self.id))
        if terminated and is_recorded:
            # The revocation may be older than this attempt (a resume, and a worker that heard it
            # late): one that the store has not ended goes on elsewhere.
            gone = self._gone(WorkerLostError("its body was terminated"))
            self._extension.tell(functools.partial(runner_lost, gone=gone))

    def _say_stopping(self) -> None:
        """Have the child know that the signal that ends its body is ours: it gives the job back."""
        claims, claim = self._extension.claims, self._claim
        if claims is not None and claims.socket is not None and claim is not None:
            answer = Answer(claim.job_id, claim.fencing_token, stopping=True)
            claims.socket.answer(answer, claim.pid)

    def _announce_cancelled(self, **_: Any) -> None:
        """Say that the body was stopped; what its job does next is in the store, and no RETRY."""
        task_ready(self)
        self.send_event("task-cancelled")
        self._already_cancelled = True

    def _is_child_gone(self, error: BaseException) -> bool:
        """Tell the end of a child from an exception that a body raised and a child sent."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # billiard 4.3 reports the exit of a child before it ends.
            return not (self._already_cancelled or self._already_revoked)
        return isinstance(error, WorkerLostError | TimeLimitExceeded)

    def _on_gone(self, error: BaseException) -> None:
        """Have the store told that the child is gone; it says what the job does next."""
        task_ready(self)
        recorded = self._is_recorded
        if self._is_reported:
            return
        self._is_reported = True
        if not recorded:
            # Nothing but the message knows this job, as far as is known here.
            self.reject(requeue=True)
        else:
            self.acknowledge()
        gone = self._gone(error)
        claims = self._extension.claims
        told = [] if claims is None or gone.pid is None else claims.told_by(gone.pid)
        # Of the jobs that it had before this one.
        told = [one for one in told if one[0] != gone.lease]
        if told:
            self._extension.tell(functools.partial(settle_told, told=told))
        if self._already_revoked:
            # The store was told of that.
            return
        events.emit(
            events.RUNNER_GONE,
            job_id=self.id,
            fencing_token=None if gone.lease is None else gone.lease.fencing_token,
            worker=self._hostname,
            pid=gone.pid,
            reason=gone.reason,
        )
        if isinstance(error, TimeLimitExceeded):
            meta = encode_error(self.task, error)
            self._extension.tell(functools.partial(limit_exceeded, gone=gone, error=meta))
        else:
            self._extension.tell(functools.partial(runner_lost, gone=gone))

    def _gone(self, error: BaseException) -> Gone:
        claim = self._claim
        return Gone(
            job_id=self.id,
            pid=self.worker_pid,
            lease=None if claim is None else Held(claim.job_id, claim.fencing_token, claim.owner),
            dispatch_count=dispatch_count_of(self._request_dict),
            reason=death_reason(error),
            is_stopping=self._is_stopping(),
        )

    def _is_stopping(self) -> bool:
        flag = self._extension.stop_flag
        return (
            (flag is not None and flag.is_set())
            or state.should_stop is not None
            or state.should_terminate is not None
        )


def request_problem(given: Any) -> str | None:
    """Say why a ``Request`` cannot be that of a leased task; None when it can.

    Without ours nobody acknowledges at the claim or asks the store when a child dies: recovery
    would be switched off.

    Args:
        given: a class, or the name of one.
    """
    try:
        found = symbol_by_name(given)
    except Exception as error:  # noqa: BLE001  whatever its module does
        return f"Request is {given!r}, which cannot be imported: {type(error).__name__}: {error}"
    if isinstance(found, type) and issubclass(found, LeaseRequest):
        return None
    return f"Request is {given!r}: derive it from celery_lease.request.LeaseRequest"


class _Told(Exception):
    """Stands in for an error that a child has told, and looks like it in Celery's events."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        super().__init__(str(error))

    def __repr__(self) -> str:
        return repr(self._error)
