"""What a worker's main process tells the store of a delivery whose body cannot say it any more.

Each function is a word for ``WorkerThread.tell``: it runs in that thread, is repeated through an
outage of the store, and asks the store first. The store decides what the job does next; Celery's
own FAILURE, errbacks and chord failure for a lost child are never written for a job that will run
again (celery-facts, sections 3 and 4).

What it is not: it reads no exit code and no request. ``request`` does, and says here what it saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.states import READY_STATES

from celery_lease.bookkeeping import is_chord_unsent
from celery_lease.reaper import report_vanished
from celery_lease.records import Failure, Held
from celery_lease.runtime import owner_prefix
from celery_lease.states import LossCause
from celery_lease.store import queries, transitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_lease.extension import Extension
    from celery_lease.store.engine import Store

#: Dispatches after which a message whose child dies before any claim is left to the next pass: it
#: is not counted, and would otherwise go round without a gap (B032).
PROMPT_DISPATCHES = 2


@dataclass(frozen=True, slots=True)
class Gone:
    """A child that is gone, and the delivery it had.

    Attributes:
        job_id: the job.
        pid: the child.
        lease: the lease it held, None when the main process has not heard of one.
        dispatch_count: of the delivery, None when its message does not say.
        reason: how it ended, one line.
        is_stopping: True when the worker had been asked to stop.
    """

    job_id: str
    pid: int | None
    lease: Held | None
    dispatch_count: int | None
    reason: str
    is_stopping: bool


def runner_lost(extension: Extension, store: Store, gone: Gone) -> None:
    """Report a child that died: its job is given on now, or its outcome is told now."""
    lease = _lease_of(store, gone)
    if lease is not None:
        vanished = transitions.lost(
            store,
            lease,
            cause=LossCause.LOST,
            reason=gone.reason,
            lost_backoff=extension.settings.lost_backoff,
            stopping=gone.is_stopping,
        )
        if vanished is not None:
            report_vanished(vanished)
            extension.reaper().follow_up(vanished)
            return
    _tell_or_send(extension, store, gone, lease)


def limit_exceeded(extension: Extension, store: Store, gone: Gone, error: bytes) -> None:
    """Record a hard time limit as the failure it is, once, whoever of the two says it first.

    The child is told to stop and may have written the same; Celery is told by a replay.

    Args:
        extension: the app's extension.
        store: the store.
        gone: the child and its delivery.
        error: the exception as Celery's JSON backends keep it.
    """
    lease = _lease_of(store, gone)
    if lease is not None:
        transitions.fail(
            store,
            lease,
            transitions.Parting(
                reason="time_limit",
                failure=Failure(
                    error_type="billiard.exceptions.TimeLimitExceeded",
                    error_message=gone.reason,
                    failure_class="time_limit",
                    retryable=False,
                ),
            ),
            error=error,
            error_content_type="application/json",
        )
    _tell_or_send(extension, store, gone, lease)


def settle_told(
    extension: Extension, store: Store, told: Sequence[tuple[Held, str | None]]
) -> None:
    """Settle what a child that died had told Celery, and had not settled yet.

    Args:
        extension: the app's extension.
        store: the store.
        told: each lease, with the group of its job.
    """
    outcomes = []
    for lease, group_id in told:
        if not _has_outcome(extension.app.backend, lease.job_id) or is_chord_unsent(
            extension.app.backend, group_id
        ):
            continue
        found = queries.outcome(store, lease.job_id)
        # Another attempt's has another token, and is not settled by this one's.
        if found is not None:
            outcomes.append((lease.job_id, lease.fencing_token, found[0].finished_at))
    transitions.settle(store, outcomes)


def _has_outcome(backend: Any, job_id: str) -> bool:
    """Tell whether Celery has stored an outcome: an acknowledgement may have had other reasons."""
    try:
        return backend.get_state(job_id) in READY_STATES
    except Exception:  # noqa: BLE001  in doubt it is told once more
        return False


def _lease_of(store: Store, gone: Gone) -> Held | None:
    """Return the lease of the child: as it said, else as the store knows its process."""
    if gone.lease is not None or gone.pid is None:
        return gone.lease
    live = queries.live_attempt(store, gone.job_id)
    if live is None or not live.owner.startswith(owner_prefix(gone.pid)):
        return None
    return Held(live.job_id, live.fencing_token, live.owner)


def _tell_or_send(extension: Extension, store: Store, gone: Gone, lease: Held | None) -> None:
    """Have the outcome of that lease told, or the message sent again that was never claimed."""
    if lease is not None:
        found = queries.outcome(store, gone.job_id)
        # Another attempt's outcome is that runner's to tell.
        if found is not None and found[0].fencing_token == lease.fencing_token:
            extension.reaper().settle_now(gone.job_id)
    elif gone.dispatch_count is not None:
        # Only if it is still this delivery's: what was sent since is on the broker.
        transitions.undispatch(store, gone.job_id, dispatch_count=gone.dispatch_count)
        if gone.dispatch_count <= PROMPT_DISPATCHES:
            extension.reaper().send_now(gone.job_id)
