"""How long to wait, and what becomes of a job whose runner vanished.

Pure functions: time and randomness are arguments, nothing is read or written. Called by the store's
transitions (the policy), by the heartbeat and ``lease`` (local deadline, jitter) and by the reaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_lease.states import JobState, LossCause, OnExpiry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUNNER_LOST = "runner_lost"
"""State reason: one runner vanished, and ``lease_on_expiry`` said what to do."""
MAX_ATTEMPTS = "max_attempts"
"""State reason: ``lease_max_attempts`` runners vanished."""
STOPPED = "stopped"
"""State reason: its runner was asked to stop and then vanished, which is no loss."""

UNCOUNTED_ENDS = 10
"""Ends of a job that are spared: hand-overs, and runners that vanished after a request to stop.

A fleet that is restarted ten times under one job is no fault of the job's; one that always outlives
the grace would go on for ever otherwise (design §7).
"""

BY_ITSELF = ("retry",)
"""Why an attempt was given back where its body said so by a bare ``Retry``: as often as it likes,
as without a lease. It waits each time. (``Reject(requeue=True)`` has the cap: design §10.)"""

# Doublings beyond this change nothing under any cap, and 2.0 ** 1024 would overflow.
_MOST_DOUBLINGS = 1000


@dataclass(frozen=True, slots=True)
class AfterLoss:
    """What becomes of a job whose runner vanished.

    Args:
        state: the state to reach.
        delay_seconds: how long until it may be dispatched, 0 for at once and for states that wait
            for nobody or for a person.
        reason: the state reason to record, ``RUNNER_LOST``, ``MAX_ATTEMPTS`` or ``STOPPED``.
        is_counted: False when ``lost_count`` stays as it is.
    """

    state: JobState
    delay_seconds: float
    reason: str
    is_counted: bool = True


def is_loss_counted(*, cause: LossCause, stop_requested: bool, uncounted_ends: int) -> bool:
    """Tell whether a vanished runner counts as a loss of its job (design §7).

    One that was asked to stop and then vanished does not: its fleet was restarted, the job did
    nothing wrong. A stall always does, since it is the body that stands still.

    Args:
        cause: how the runner was found to have vanished.
        stop_requested: whether it had been asked to stop.
        uncounted_ends: earlier ends of the job that were spared, from 0; the cap bounds them.

    .. versionadded:: 0.1
    """
    spared = stop_requested and cause is not LossCause.STALLED
    return not spared or uncounted_ends >= UNCOUNTED_ENDS


def after_loss(
    *,
    lost_count: int,
    max_attempts: int,
    on_expiry: OnExpiry,
    schedule: Sequence[float],
    is_counted: bool = True,
) -> AfterLoss:
    """Apply the one policy for every vanished runner, however it was noticed (design §4).

    Args:
        lost_count: losses of the job; including this one, and so at least 1, if it is counted.
        max_attempts: the loss that ends the job; 1 = it never runs again.
        on_expiry: what to do before that. It is about not knowing what a runner has done, and so
            holds for one that was asked to stop, too.
        schedule: ``lease_lost_backoff``, seconds by loss, the last repeating.
        is_counted: False spares the job: this loss neither ends it nor has it wait.

    Raises:
        ValueError: when a counted loss has a ``lost_count`` below 1, or the schedule is empty.

    .. versionadded:: 0.1
    """
    delay_seconds = lost_delay_seconds(schedule, lost_count) if is_counted else 0.0
    if is_counted and lost_count >= max_attempts:
        return AfterLoss(JobState.INTERRUPTED, 0.0, MAX_ATTEMPTS)
    if on_expiry == OnExpiry.HOLD:
        return AfterLoss(JobState.HELD, 0.0, RUNNER_LOST, is_counted)
    if on_expiry == OnExpiry.FAIL:
        return AfterLoss(JobState.FAILED, 0.0, RUNNER_LOST, is_counted)
    if not is_counted:
        return AfterLoss(JobState.QUEUED, 0.0, STOPPED, is_counted)
    # Without a delay never retry_wait, which only a pass of the reaper would end.
    state = JobState.RETRY_WAIT if delay_seconds > 0 else JobState.QUEUED
    return AfterLoss(state, delay_seconds, RUNNER_LOST)


def lost_delay_seconds(schedule: Sequence[float], lost_count: int) -> float:
    """Seconds before the dispatch that follows a loss.

    Args:
        schedule: seconds by loss, the last repeating.
        lost_count: losses of the job including this one, at least 1.

    Raises:
        ValueError: when ``lost_count`` is below 1 (an index of -1 would be the longest wait) or the
            schedule is empty.

    .. versionadded:: 0.1
    """
    if lost_count < 1 or not schedule:
        raise ValueError(f"no delay for loss {lost_count} in schedule {tuple(schedule)}")
    return float(schedule[min(lost_count, len(schedule)) - 1])


#: The gap between two messages of one job is at most so many times ``lease_queued_timeout``: 5 h
#: 20 min by default, so that a job whose messages are really lost is not forgotten.
LARGEST_GAP = 64


def redispatch_gap_seconds(queued_timeout_seconds: float, waited_seconds: float) -> float:
    """Seconds an unclaimed message has before the next one is sent.

    The gaps double, up to a cap: in a backlog every message is merely late, and its messages must
    not multiply (design §8). They begin anew whenever the job was queued anew: what it has been
    through before says nothing about this message.

    Args:
        queued_timeout_seconds: the gap after the first dispatch.
        waited_seconds: from its first message since it was queued to its last.

    .. versionadded:: 0.1
    """
    gap = queued_timeout_seconds + max(waited_seconds, 0.0)
    return float(min(gap, LARGEST_GAP * queued_timeout_seconds))


#: Of so many waiting jobs of a queue one is sent again to see whether its messages are lost: half
#: a per cent a time, so that an hour of that stays far below the 10 % that issue 4 allows.
JOBS_A_PROBE = 200
#: And never more than these at a time: one that is claimed says all.
MOST_PROBES = 10


def probe_count(waiting_count: int) -> int:
    """How many of a queue's waiting jobs are sent again to see whether their messages are lost.

    Args:
        waiting_count: jobs whose message should be in the queue, at least 1.

    .. versionadded:: 0.1
    """
    return min(max(waiting_count // JOBS_A_PROBE, 1), MOST_PROBES)


def full_jitter(
    base_seconds: float, cap_seconds: float, attempt: int, random: Callable[[], float]
) -> float:
    """Seconds to wait before a retry: anything from 0 up to the exponential back-off.

    "Full jitter" of Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015:
    of the variants measured there it needs the fewest calls under contention.

    Args:
        base_seconds: the most before the first retry.
        cap_seconds: the most before any.
        attempt: retries so far, from 0.
        random: gives a number from 0 up to, not including, 1.

    .. versionadded:: 0.1
    """
    exponential_seconds = base_seconds * 2.0 ** min(attempt, _MOST_DOUBLINGS)
    return min(cap_seconds, exponential_seconds) * random()


def jittered(seconds: float, fraction: float, random: Callable[[], float]) -> float:
    """Seconds moved by up to ``fraction`` of them, earlier or later.

    Keeps processes that started together from writing together ever after.

    Args:
        seconds: the middle.
        fraction: the largest shift as a part of it, 0 to 1.
        random: gives a number from 0 up to, not including, 1.

    .. versionadded:: 0.1
    """
    return seconds * (1 + fraction * (2 * random() - 1))


def local_deadline(sent_at_monotonic: float, lease_seconds: float) -> float:
    """The monotonic instant past which the runner must take its lease for lost.

    It counts from when the accepted renewal was *sent*: the store set the expiry later than that,
    so that the runner stops before the store lets anybody take over, however long the reply was on
    its way. What is left is that two clocks do not run equally fast, that a thread wakes late, and
    that a write needs time to arrive: a margin of a twentieth of the lease, at least 0.05 s (a late
    thread) and at most 2 s (enough for a clock 2 s a lease off, without eating a long lease). In
    doubt the runner stops early; that costs a repeated run, never a second one beside it.

    Args:
        sent_at_monotonic: ``time.monotonic()`` before the request went out.
        lease_seconds: the lease that request asked for.

    .. versionadded:: 0.1
    """
    margin_seconds = max(0.05, min(2.0, lease_seconds / 20))
    return sent_at_monotonic + lease_seconds - margin_seconds
