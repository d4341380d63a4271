"""The event bus: components say what happened, subscribers decide what to do with it.

Synchronous and in-process. Not Celery's event stream and not a log: the one subscriber here turns
events into log lines; others (Celery events, metrics) subscribe from above. Called by everybody.

An event is a name, ``lease.<noun>.<past verb>``, and fields: facts about the job, never what the
user gave it. An event about an attempt has ``job_id``, ``attempt``, ``fencing_token``, ``worker``.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

_logger = logging.getLogger(__name__)

JOB_SUBMITTED: Final = "lease.job.submitted"
JOB_DISPATCHED: Final = "lease.job.dispatched"
JOB_RELEASED: Final = "lease.job.released"
JOB_HELD: Final = "lease.job.held"
JOB_INTERRUPTED: Final = "lease.job.interrupted"
JOB_CANCELLED: Final = "lease.job.cancelled"
JOB_REPLAYED: Final = "lease.job.replayed"
RUNNER_GONE: Final = "lease.runner.gone"
CLAIM_WON: Final = "lease.claim.won"
CLAIM_REFUSED: Final = "lease.claim.refused"
LEASE_RENEWED: Final = "lease.lease.renewed"
LEASE_LOST: Final = "lease.lease.lost"
LEASE_EXPIRED: Final = "lease.lease.expired"
ATTEMPT_STALLED: Final = "lease.attempt.stalled"
OUTCOME_ACCEPTED: Final = "lease.outcome.accepted"
OUTCOME_REJECTED: Final = "lease.outcome.rejected"
PUBLISH_FAILED: Final = "lease.publish.failed"
PASS_COMPLETED: Final = "lease.pass.completed"  # noqa: S105 - one run of the reaper, no password
STORE_UNAVAILABLE: Final = "lease.store.unavailable"

# The house's scale: debug = every job has it, info = recovery at work, warning = look at it.
LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        JOB_SUBMITTED: logging.DEBUG,
        JOB_DISPATCHED: logging.DEBUG,
        JOB_RELEASED: logging.INFO,
        JOB_HELD: logging.WARNING,
        JOB_INTERRUPTED: logging.WARNING,
        JOB_CANCELLED: logging.INFO,
        JOB_REPLAYED: logging.INFO,
        RUNNER_GONE: logging.WARNING,
        CLAIM_WON: logging.DEBUG,
        CLAIM_REFUSED: logging.INFO,
        LEASE_RENEWED: logging.DEBUG,
        LEASE_LOST: logging.WARNING,
        LEASE_EXPIRED: logging.INFO,
        ATTEMPT_STALLED: logging.WARNING,
        OUTCOME_ACCEPTED: logging.DEBUG,
        OUTCOME_REJECTED: logging.WARNING,
        PUBLISH_FAILED: logging.WARNING,
        PASS_COMPLETED: logging.INFO,
        STORE_UNAVAILABLE: logging.WARNING,
    }
)

# Logged when a count (an int among its fields) is not 0: a pass every few seconds that found
# nothing is no news.
_SILENT_WHEN_ALL_ZERO = frozenset({PASS_COMPLETED})
# Every waiting thread of every process emits these for as long as an outage lasts.
_RATE_LIMITED = frozenset({STORE_UNAVAILABLE})
_FIRST_FIELDS = ("job_id", "attempt", "fencing_token", "worker")
# What a user's task was given or gave must not reach a log, even if a component passes it by error.
_NEVER_LOGGED = frozenset({"args", "arguments", "body", "kwargs", "result"})
# Of the form key=value key=value: what would end a value, or a line, is quoted.
_NEEDS_QUOTES = re.compile(r'[\s="\\]|[^ -~]|^$')


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Args:
        name: one of the constants of this module.
        fields: facts by name.
    """

    name: str
    fields: Mapping[str, object]


Subscriber = Callable[[Event], None]


class EventBus:
    """Passes each event to every subscriber, in the emitter's thread, in order of subscription."""

    def __init__(self) -> None:
        # No lock, which a fork in another thread could leave locked in the child: appending to a
        # list and copying it are each one step under the interpreter's own lock.
        self._subscriptions: list[_Subscription] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass every event to ``subscriber`` from now on; once, however often it is subscribed.

        .. versionadded:: 0.1
        """
        if not any(s.subscriber == subscriber for s in self._subscriptions):
            self._subscriptions.append(_Subscription(subscriber))

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop passing events to ``subscriber``; nothing happens when it is not subscribed.

        .. versionadded:: 0.1
        """
        for subscription in tuple(self._subscriptions):
            if subscription.subscriber == subscriber:
                self._subscriptions.remove(subscription)

    def emit(self, name: str, /, **fields: object) -> None:
        """Tell every subscriber that something happened; what one of them raises stays here.

        .. versionadded:: 0.1
        """
        event = Event(name, MappingProxyType(fields))
        for subscription in tuple(self._subscriptions):
            subscription.deliver(event)


class LogSubscriber:
    """Turns events into log lines ``name key=value ...`` on ``celery_lease.events``.

    Args:
        quiet_seconds: how long after a line of a rate-limited event the next ones are only counted;
            two passes of the reaper at its default interval.
        clock: gives monotonic seconds.
    """

    def __init__(
        self, *, quiet_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._quiet_until: dict[str, float] = {}
        self._suppressed_counts: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Log one event, or nothing when its level is off or it is no news."""
        level = LEVELS.get(event.name, logging.INFO)
        if not _logger.isEnabledFor(level) or _is_silent(event):
            return
        if event.name not in _RATE_LIMITED:
            _logger.log(level, "%s", _line(event))
        elif self._may_speak(event.name):
            suppressed_count = self._suppressed_counts.pop(event.name, 0)
            _logger.log(level, "%s", _line(event, suppressed_count=suppressed_count or None))

    def _may_speak(self, name: str) -> bool:
        """True when the quiet time is over. Two threads at once may both log: no harm, no lock."""
        now = self._clock()
        if now < self._quiet_until.get(name, now):
            self._suppressed_counts[name] = self._suppressed_counts.get(name, 0) + 1
            return False
        self._quiet_until[name] = now + self._quiet_seconds
        return True


class _Subscription:
    """One subscriber, and whether it has been reported as broken."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self._is_reported = False

    def deliver(self, event: Event) -> None:
        try:
            self.subscriber(event)
        except Exception:
            # Not BaseException: LeaseLost and Celery's time limits may strike here as anywhere, and
            # are meant for the body.
            if self._is_reported:
                return
            self._is_reported = True
            _logger.exception(
                "an event subscriber failed on %s; it stays subscribed, further failures of it "
                "are not logged: %r",
                event.name,
                self.subscriber,
            )


def _is_silent(event: Event) -> bool:
    return event.name in _SILENT_WHEN_ALL_ZERO and not any(
        value
        for name, value in event.fields.items()
        if isinstance(value, int) and name not in _FIRST_FIELDS
    )


def _line(event: Event, **extra: object) -> str:
    """The event on one line: name, the fields that say which attempt, the others as emitted."""
    return " ".join([event.name, *_pairs({**event.fields, **extra})])


def _pairs(fields: Mapping[str, object]) -> Iterator[str]:
    ordered = [*(f for f in _FIRST_FIELDS if f in fields), *fields]
    for name in dict.fromkeys(ordered):
        value = fields[name]
        if value is not None and name not in _NEVER_LOGGED:
            yield f"{name}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float):
        value = round(value, 3)  # milliseconds are as fine as a reader of a log wants
    text = str(value)
    return json.dumps(text) if _NEEDS_QUOTES.search(text) else text


LOG_SUBSCRIBER: Final = LogSubscriber()
"""Subscribed by default; ``unsubscribe(LOG_SUBSCRIBER)`` ends the lines."""

_BUS: Final = EventBus()
_BUS.subscribe(LOG_SUBSCRIBER)

emit = _BUS.emit
subscribe = _BUS.subscribe
unsubscribe = _BUS.unsubscribe
