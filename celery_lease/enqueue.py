"""``task.enqueue(…)``: the job joins the caller's own transaction.

The message is made by Celery itself (``apply_async``), so that options, routes and serializers are
Celery's own; what comes out is written by a statement in the caller's transaction, and sent when
that is committed. Nothing but the caller's database is needed until then: no broker, no result
backend.

There is no other place from which such a message could leave: whoever sends it has found the job in
the store, by a connection of the store's own. If the process dies before it could, or the broker is
away, a pass of the reaper sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from celery.backends.rpc import RPCBackend
from celery.utils.imports import symbol_by_name
from kombu.utils import json as kombu_json

from celery_lease import events
from celery_lease.exceptions import IdempotencyConflict, SettingError, StoreError
from celery_lease.extension import Extension, extension_of
from celery_lease.reaper import PublishFailed
from celery_lease.recording import taken_by
from celery_lease.records import NewJob
from celery_lease.store import queries, transitions
from celery_lease.store.callers import Caller, caller_of, place_of
from celery_lease.store.engine import Store

#: How long the end of a caller's transaction goes on sending, and how many jobs it asks for at
#: once. What is left is sent by a pass of the reaper.
SEND_SECONDS = 5.0
SEND_BATCH = 200

_DJANGO = "celery_lease.contrib.django:DjangoCaller"


def enqueue(task: Any, caller: Caller, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
    """Record a job of a task in a caller's transaction, and have it sent when that is committed.

    Returns:
        The ``AsyncResult`` of the job: of the existing one, if its key or its id is taken.

    Raises:
        SettingError: the caller's database is not the store's.
        IdempotencyConflict: the key is held by a job with other arguments.
    """
    if task.app.conf.task_always_eager:
        return task.apply_async(args, kwargs, **options)
    extension = extension_of(task.app)
    place = place_of(extension.raw_store, caller, prepare=lambda: extension.store)
    result, jobs = _made(task, args, kwargs, options)
    for job in jobs:
        new = replace(job, dispatched=False)
        existing = transitions.enqueue(extension.raw_store, place, caller, new)
        if existing is None:
            # What is deferred is no message for now.
            if job.dispatched:
                caller.after_commit(job.job_id, _Committed(extension))
        elif not existing.same_arguments:
            assert job.key is not None
            raise IdempotencyConflict(job.task, job.key.text, existing.job_id)
        elif job.job_id == result.id:
            return task.AsyncResult(existing.job_id)
    parent = task.app.current_worker_task
    if parent and options.get("add_to_parent", True):
        # As Celery does for a call from a body, and now that there is such a job.
        parent.add_trail(result)
    return result


def _made(task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> tuple[Any, list[NewJob]]:
    """Have Celery make a call; return its result, and the job (a signal may have called others).

    Celery's Redis backend subscribes to a result as its task is sent. That would make a caller
    wait for a server that it does not need: ``get()`` subscribes by itself. So it is a call whose
    result is ignored, until its message is made.
    """
    ignores = options.get("ignore_result", task.ignore_result)
    is_hidden = not ignores and not isinstance(task.backend, RPCBackend)
    options = {**options, "add_to_parent": False, "ignore_result": ignores or is_hidden}
    taken = _Taken()
    with taken_by(taken, unsent=True):
        result = task.apply_async(args, kwargs, **options)
    result.ignored = ignores
    if is_hidden:
        return result, [_heeded(job) if job.job_id == result.id else job for job in taken.jobs]
    return result, taken.jobs


def caller_for(task: Any, session: object, using: str | None) -> Caller:
    """Return whose transaction the arguments of ``enqueue()`` mean.

    Raises:
        TypeError: neither or both are given, or it is not a session or a connection.
        SettingError: Django is not installed.
    """
    if (session is None) == (using is None):
        message = (
            "enqueue() takes an SQLAlchemy Session or Connection, or using= with the name of a "
            "database of Django's: one of the two"
        )
        raise TypeError(message)
    if using is None:
        return caller_of(session)
    return _django()(using, extension_of(task.app).raw_store)


def _django() -> Callable[[str, Store], Caller]:
    try:
        found: Callable[[str, Store], Caller] = symbol_by_name(_DJANGO)
    except ModuleNotFoundError as error:
        raise SettingError(
            [f"enqueue(using=…) needs Django ({error}): pip install 'celery-lease[django]'"]
        ) from error
    return found


class _Taken:
    """Keeps the jobs that Celery has made."""

    def __init__(self) -> None:
        self.jobs: list[NewJob] = []

    def take(self, job: NewJob, send: Callable[[], Any]) -> None:
        """Keep a job; it is sent by who finds it in the store."""
        del send
        self.jobs.append(job)


def _heeded(job: NewJob) -> NewJob:
    """Return the job with its message saying that somebody waits for its result."""
    headers = kombu_json.loads(job.message.headers)
    headers["ignore_result"] = False
    return replace(job, message=replace(job.message, headers=kombu_json.dumps(headers)))


@dataclass(frozen=True, slots=True)
class _Committed:
    """Sends jobs whose transaction is over."""

    extension: Extension

    def __call__(self, job_ids: list[str]) -> None:
        """Send those that are there; gives up at the first sign of trouble."""
        until = time.monotonic() + SEND_SECONDS
        try:
            reaper = self.extension.reaper()
            for start in range(0, len(job_ids), SEND_BATCH):
                batch = job_ids[start : start + SEND_BATCH]
                for candidate in queries.committed(self.extension.store, batch):
                    if time.monotonic() > until:
                        return
                    events.emit(events.JOB_SUBMITTED, job_id=candidate.job_id, task=candidate.task)
                    reaper.dispatch(candidate)
        except PublishFailed:
            # It is said in the log already: the broker is away.
            return
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, reason=str(error))
