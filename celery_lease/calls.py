"""What a call says of the messages that it publishes, on their way through Celery to the record.

Between ``apply_async`` and ``RecordingProducer`` lies Celery's own code, which hands nothing on. So
it is said by what is in force around the call: it publishes its own job again (``resending``), its
key may be held (``may_exist``), or its new jobs are somebody's to record and send (``taken_by``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from celery_lease.lease import Lease
from celery_lease.records import Failure, NewJob
from celery_lease.runtime import Runtime
from celery_lease.states import LateOutcome


@dataclass(slots=True)
class Resend:
    """A runner is publishing its own job again: a retry, or a replacement of itself.

    Attributes:
        runtime: the runner.
        lease: its lease.
        kind: ``RETRIED`` or ``REPLACED``.
        failure: what made it retry.
        shielded: runs the transition with time-limit signals held back.
        keeps_key: True when it stays the same task, and so keeps its idempotency key.
        error: why nothing was published, None when it was.
        is_put_off: True when the message is to leave only after Celery has stored the RETRY.
    """

    runtime: Runtime
    lease: Lease
    kind: LateOutcome
    failure: Failure = field(default_factory=Failure)
    shielded: Callable[[Callable[[], Any]], Any] = lambda call: call()
    keeps_key: bool = True
    error: Exception | None = None
    is_put_off: bool = False


_resend: ContextVar[Resend | None] = ContextVar("celery_lease_resend", default=None)


@contextmanager
def resending(resend: Resend) -> Iterator[Resend]:
    """Have the next publish of this very job end its attempt instead of recording a new job."""
    token = _resend.set(resend)
    try:
        yield resend
    finally:
        _resend.reset(token)


def current_resend() -> Resend | None:
    """Return what is in force by ``resending``, None without one."""
    return _resend.get()


class JobExists(Exception):
    """Raised through Celery's publishing when a key is held: nothing was recorded or sent."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(job_id)


_may_exist: ContextVar[str | None] = ContextVar("celery_lease_may_exist", default=None)


@contextmanager
def may_exist(task_id: str) -> Iterator[None]:
    """Have the publish of this id raise ``JobExists`` if its key is held.

    Without it a job is recorded under its id all the same, and follows the holder of its key:
    whoever publishes a part of a canvas cannot exchange the id that others wait for.
    """
    token = _may_exist.set(task_id)
    try:
        yield
    finally:
        _may_exist.reset(token)


def is_new_id(job_id: str) -> bool:
    """Tell whether an id is known to nobody yet, so that the id of another may stand for it."""
    return job_id == _may_exist.get()


class Send(Protocol):
    """Puts the message of a taken job on the broker, as its first dispatch."""

    def __call__(self, producer: Any = None, *, is_recorded: bool = True) -> None:
        """Send it.

        Args:
            producer: to send it with, if not the one that the call had; the app's own connections
                come first (``publishing``).
            is_recorded: False: it goes out as a message from a stranger does, and is recorded at
                its claim.

        Raises:
            Exception: whatever the publish raised; whether the broker has it is not known.
        """


class Taker(Protocol):
    """Takes the new jobs of a call, which are otherwise recorded and sent one by one."""

    def take(self, job: NewJob, send: Send) -> None:
        """Take a job that is neither recorded nor sent."""


@dataclass(slots=True, eq=False)
class _Taking:
    """Which new jobs are given to a taker.

    A context may be copied while it is set, by a task of asyncio's or for another thread, and
    outlive the call: nobody would look into the taker any more.
    """

    taker: Taker
    app: Any
    group_id: str | None
    job_id: str | None
    thread: int = field(default_factory=threading.get_ident)
    is_over: bool = False

    def is_for(self, app: Any) -> bool:
        """Tell whether it goes on, and for an app: its store and broker are the app's."""
        return not self.is_over and self.thread == threading.get_ident() and self.app is app

    def takes(self, app: Any, headers: Mapping[str, Any], embed: Mapping[str, Any]) -> bool:
        """Tell whether it takes a job."""
        if not self.is_for(app):
            return False
        if self.job_id is not None:
            return bool(headers["id"] == self.job_id)
        if self.group_id is None or headers.get("group") == self.group_id:
            return True
        # A member that is a chain: its first step is sent, and its last one is the group's.
        last = next(iter(embed.get("chain") or ()), None) or {}
        return bool((last.get("options") or {}).get("group_id") == self.group_id)


_taking: ContextVar[_Taking | None] = ContextVar("celery_lease_taking", default=None)


@contextmanager
def taken_by(
    taker: Taker, *, app: Any, group_id: str | None = None, job_id: str | None = None
) -> Iterator[None]:
    """Give the new jobs that this call publishes to a taker, in this thread and until its end.

    Args:
        taker: the taker.
        app: only jobs of this app are given to it.
        group_id: only members of this group are given to it; None for any.
        job_id: only this job is given to it, and does not leave within the call (``is_unsent``).
    """
    taking = _Taking(taker, app_behind(app), group_id, job_id)
    token = _taking.set(taking)
    try:
        yield
    finally:
        taking.is_over = True
        _taking.reset(token)


def taker_of(app: Any, headers: Mapping[str, Any], embed: Mapping[str, Any]) -> Taker | None:
    """Return who takes a new job that is published here, None if nobody does.

    Args:
        app: whose job it is.
        headers: of its message.
        embed: the third part of its body.
    """
    taking = _taking.get()
    return taking.taker if taking is not None and taking.takes(app, headers, embed) else None


def is_unsent(app: Any, job_id: str) -> bool:
    """Tell whether a job that an app publishes here leaves at another time, if it does at all."""
    taking = _taking.get()
    return taking is not None and taking.job_id == job_id and taking.is_for(app_behind(app))


def is_taken(app: Any, group_id: str | None = None) -> bool:
    """Tell whether the new jobs of the call that runs, of a group, are given to a taker."""
    taking = _taking.get()
    return (
        taking is not None
        and taking.is_for(app_behind(app))
        and taking.group_id in (None, group_id)
    )


def app_behind(app: Any) -> Any:
    """Return the app that a proxy (``current_app``) stands for, or the app itself."""
    return app._get_current_object() if hasattr(app, "_get_current_object") else app  # noqa: SLF001  Celery has no public name for it
