"""The states of a job and of an attempt, and why each was left.

The words of the protocol and nothing else: no transition lives here (those are
``store/transitions``). A new state changes four things in one commit: this file, the
constraint in ``store/schema.py``, the diagram in ``docs/concepts.md`` and the test suite.
"""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """Where a job stands. Expired, overdue and unschedulable are derived, never stored."""

    SCHEDULED = "scheduled"
    """Waiting for its due time (an ETA or a countdown)."""
    QUEUED = "queued"
    """May be claimed now; a message is on the broker or about to be sent."""
    RUNNING = "running"
    """One attempt holds the lease."""
    RETRY_WAIT = "retry_wait"
    """Waiting for its due time after a retry or after repeated losses."""
    HELD = "held"
    """Waits for a person."""
    SUCCEEDED = "succeeded"
    """Final: one attempt's result was accepted."""
    FAILED = "failed"
    """Final: the body raised, a deadline passed, or the policy says so."""
    CANCELLED = "cancelled"
    """Final: ended by request, or unstarted past its ``expires``."""
    INTERRUPTED = "interrupted"
    """Final: ``lease_max_attempts`` runners vanished under it."""

    __str__ = str.__str__

    @property
    def is_final(self) -> bool:
        """True when nothing but ``resume`` leaves this state."""
        return self in FINAL_STATES


FINAL_STATES = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED}
)
WAITING_STATES = frozenset({JobState.SCHEDULED, JobState.QUEUED, JobState.RETRY_WAIT})


class AttemptState(str, Enum):
    """How one try stands or ended. Written once when it ends; a late outcome changes none of it."""

    CLAIMED = "claimed"
    """Holds the lease; not renewed yet."""
    ACTIVE = "active"
    """Holds the lease; renewed at least once."""
    COMPLETED = "completed"
    FAILED = "failed"
    RETRIED = "retried"
    REPLACED = "replaced"
    RELEASED = "released"
    EXPIRED = "expired"
    """Its lease ended without a renewal, and the job was given on."""
    LOST = "lost"
    """Its runner was reported dead, or gave the lease up for lost."""
    STALLED = "stalled"
    CANCELLED = "cancelled"

    __str__ = str.__str__

    @property
    def is_live(self) -> bool:
        """True while the attempt holds the lease."""
        return self in LIVE_STATES


LIVE_STATES = frozenset({AttemptState.CLAIMED, AttemptState.ACTIVE})


class OnExpiry(str, Enum):
    """What becomes of a job whose runner vanished (``lease_on_expiry``)."""

    RETRY = "retry"
    HOLD = "hold"
    FAIL = "fail"

    __str__ = str.__str__


class LossCause(str, Enum):
    """How a runner was found to have vanished: the attempt state it leaves behind."""

    EXPIRED = "expired"
    LOST = "lost"
    STALLED = "stalled"

    __str__ = str.__str__


class LateOutcome(str, Enum):
    """What a stale attempt tried to report."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRIED = "retried"
    REPLACED = "replaced"
    RELEASED = "released"

    __str__ = str.__str__


class Refusal(str, Enum):
    """Why a delivery was not given the job."""

    RUNNING = "running"
    """Another attempt holds a live lease."""
    NOT_DUE = "not_due"
    FINAL = "final"
    HELD = "held"
    SUPERSEDED = "superseded"
    """The message is an older version: a retry or a replacement has been recorded since."""
    DEADLINE = "deadline"
    EXPIRES = "expires"
    """Celery's ``expires`` passed before the start."""
    PRUNED = "pruned"
    """The message says it was recorded, yet there is no row: it was removed after its retention."""
    POLICY = "policy"
    """The lease had ended, and the policy for vanished runners does not give the job on now."""
    KEY_HELD = "key_held"
    """Another job holds its idempotency key: it waits for that one's end."""
    BUSY = "busy"
    """Its row stayed locked for as long as a delivery waits."""

    __str__ = str.__str__


#: Why a job has succeeded that went on as a canvas and was revoked since: the task of the canvas
#: that has its id is not to run.
REPLACED_REVOKED = "replaced, revoked"
#: Why a job has succeeded that went on as a canvas.
REPLACED_REASONS = (AttemptState.REPLACED.value, REPLACED_REVOKED)
#: Why a job has failed that could be no message: its arguments are not in the store.
NEVER_SENT = "never sent"
