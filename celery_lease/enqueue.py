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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from celery.backends.rpc import RPCBackend
from celery.utils import uuid
from celery.utils.imports import symbol_by_name
from kombu.utils import json as kombu_json

from celery_lease import events
from celery_lease.calls import Send, may_exist, taken_by
from celery_lease.exceptions import IdempotencyConflict, SettingError, StoreError
from celery_lease.extension import Extension, extension_of
from celery_lease.reaper import PublishFailed, Reaper
from celery_lease.records import Dispatchable, NewJob
from celery_lease.store import queries, transitions
from celery_lease.store.callers import Caller, caller_of, place_of
from celery_lease.store.engine import Store

#: How long the end of a caller's transaction goes on sending, and how many jobs it asks for at
#: once. What is left is sent by a pass of the reaper.
SEND_SECONDS = 5.0
SEND_BATCH = 200

_NOT_MADE = (
    "enqueue() made no job of {}: what stands in for its apply_async(), or for send_task() of its "
    "app, has made a message of another id, or none; let it pass the call on as it is, or call "
    "apply_async() after the commit"
)
_DJANGO = "celery_lease.contrib.django:DjangoCaller"


def enqueue(task: Any, caller: Caller, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
    """Record a job of a task in a caller's transaction, and have it sent when that is committed.

    Returns:
        The ``AsyncResult`` of the job: of the existing one, if its key or its id is taken.

    Raises:
        SettingError: the caller's database is not the store's, or the message could not be one
            that leaves later.
        IdempotencyConflict: the key is held by a job with other arguments.
    """
    _refuse_what_leaves_at_once(task, options)
    if task.app.conf.task_always_eager:
        return task.apply_async(args, kwargs, **options)
    extension = extension_of(task.app)
    place = place_of(extension.raw_store, caller, prepare=lambda: extension.store)
    result, job = _made(task, args, kwargs, options)
    existing = transitions.enqueue(
        extension.raw_store, place, caller, replace(job, dispatched=False)
    )
    if existing is not None:
        if existing.same_arguments:
            return task.AsyncResult(existing.job_id)
        assert job.key is not None
        raise IdempotencyConflict(job.task, job.key.text, existing.job_id)
    if job.dispatched:
        # What is deferred is no message for now.
        caller.after_commit(job.job_id, _Committed(extension))
    parent = task.app.current_worker_task
    if parent and options.get("add_to_parent", True):
        # As Celery does for a call from a body, and now that there is such a job.
        parent.add_trail(result)
    return result


def _refuse_what_leaves_at_once(task: Any, options: dict[str, Any]) -> None:
    """Refuse a call whose message would not pass through the store, before it is made.

    Raises:
        SettingError: says which, and what to do.
    """
    app, problem = task.app, None
    given = [name for name in ("connection", "producer") if options.get(name) is not None]
    if given:
        problem = (
            f"enqueue() takes no {' and no '.join(given)}: the message leaves after the commit, "
            "and by the app's own broker; call apply_async() after the commit"
        )
    elif app.tasks.get(task.name) is None or not extension_of(app).is_leased(task.name):
        problem = (
            f"enqueue() needs {task.name} among the tasks of its app, as a leased one: define it "
            "with base=LeasedTask, and do not unregister it"
        )
    elif app.conf.task_protocol not in (None, 2):
        problem = (
            f"enqueue() needs task_protocol 2, and it is {app.conf.task_protocol!r}: its messages "
            "cannot be recorded, and would leave whether or not the transaction is committed"
        )
    if problem is not None:
        raise SettingError([problem])


def _made(task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> tuple[Any, NewJob]:
    """Have Celery make a call; return its result, and the job.

    Celery's Redis backend subscribes to a result as its task is sent. That would make a caller
    wait for a server that it does not need: ``get()`` subscribes by itself. So it is a call whose
    result is ignored, until its message is made.

    Raises:
        SettingError: something else made of the call a message that is not this job's.
    """
    ignores = options.get("ignore_result", task.ignore_result)
    is_hidden = not ignores and not isinstance(task.backend, RPCBackend)
    # Made here, so that this very job is recognised. Those who are told of a publish may call
    # others, which are recorded and sent as always.
    given_id = options.get("task_id") or None
    job_id = given_id or uuid()
    options = {
        **options,
        "task_id": job_id,
        "add_to_parent": False,
        "ignore_result": ignores or is_hidden,
    }
    taken = _Taken()
    # As ``apply_async`` decides it for an id that it makes itself.
    is_known = given_id is not None or options.get("parent_id")
    with (
        taken_by(taken, app=task.app, job_id=job_id),
        nullcontext() if is_known else may_exist(job_id),
    ):
        result = task.apply_async(args, kwargs, **options)
    job = taken.job
    if job is None or result.id != job_id:
        raise SettingError([_NOT_MADE.format(task.name)])
    result.ignored = ignores
    return result, _heeded(job) if is_hidden else job


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
    """Keeps the job that the call is for: it is sent by who finds it in the store."""

    def __init__(self) -> None:
        self.job: NewJob | None = None

    def take(self, job: NewJob, send: Send) -> None:
        """Keep the job."""
        del send
        self.job = job


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
        """Send those that are there; gives up when the broker or the store is away."""
        until = time.monotonic() + SEND_SECONDS
        try:
            reaper = self.extension.reaper()
            for start in range(0, len(job_ids), SEND_BATCH):
                batch = job_ids[start : start + SEND_BATCH]
                for candidate in queries.committed(self.extension.store, batch):
                    if time.monotonic() > until:
                        return
                    events.emit(events.JOB_SUBMITTED, job_id=candidate.job_id, task=candidate.task)
                    if _finds_the_broker_away(reaper, candidate):
                        return
        except StoreError as error:
            events.emit(events.STORE_UNAVAILABLE, reason=str(error))


def _finds_the_broker_away(reaper: Reaper, candidate: Dispatchable) -> bool:
    """Send one job; a message that the broker refuses is not in the way of the others."""
    try:
        reaper.dispatch(candidate)
    except PublishFailed as error:
        # It is said in the log already.
        return error.is_away
    return False
