"""A message that its publisher did not record becomes a job, at its claim.

Another language, ``send_task`` in a program without celery-lease, or a store that was away.

Such a message may have what no job can. One worker after the other would give it back, for ever: it
becomes a job all the same, without its arguments and marked with what is wrong (``UNFIT_HEADER``),
and each attempt fails by that in its body's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kombu import serialization
from kombu.utils import json as kombu_json

from celery_lease.exceptions import JobUnfit, PayloadTooLarge
from celery_lease.messages import (
    CONTENT_TYPE_HEADER,
    OWN_HEADERS,
    RECORDED_HEADER,
    UNFIT_HEADER,
    VERSION_HEADER,
    freeze_callbacks,
    key_of,
    seconds_until,
)
from celery_lease.records import Message, NewJob
from celery_lease.settings import TaskSettings
from celery_lease.store.schema import NAME
from celery_lease.store.transitions.statements import may_be_id

#: Characters that are kept of what is wrong with a message.
SAID = 1000


def adopted_job(
    app: Any, task: Any, request: Any, *, task_settings: TaskSettings, limit: int
) -> NewJob:
    """Return a job for a message that its publisher did not record, from the task's request.

    The original bytes are in the worker's main process; the same call is serialised anew, by what
    the message was serialised with: another serializer would make other arguments of it.

    Args:
        app: the Celery app.
        task: the task.
        request: the task's, as Celery has it.
        task_settings: the task's settings.
        limit: bytes that a message's body may have.

    Raises:
        Exception: whatever is wrong with the message; then it is an ``unfit_job``.
    """
    body, headers, properties = _call_of(app, task, request)
    serializer = _serializer_of(app, task, request)
    message = _message(request, body, headers, properties, serializer)
    if len(message.body) > limit:
        raise PayloadTooLarge(
            "message", len(message.body), limit, "lease_max_message_bytes", task.name
        )
    priority = (request.delivery_info or {}).get("priority")
    args, kwargs = request.args or (), request.kwargs or {}
    return NewJob(
        job_id=request.id,
        task=task.name,
        message=message,
        expires_seconds=seconds_until(request.expires),
        max_attempts=task_settings.max_attempts,
        on_expiry=task_settings.on_expiry,
        queue=None if message.exchange else message.routing_key or None,
        # A stranger's may be anything; the message keeps it.
        priority=priority if isinstance(priority, int) else None,
        submitter=None if request.origin is None else str(request.origin),
        root_id=request.root_id,
        parent_id=request.parent_id,
        group_id=request.group,
        key=key_of(task, task_settings, headers, args, kwargs, serializer=serializer),
        follows=True,
    )


def unfit_jobs(
    app: Any, task: Any, request: Any, error: Exception
) -> Iterator[Callable[[], NewJob]]:
    """Give what makes a job of a message that cannot be one as it is: the fullest first.

    Args:
        app: the Celery app.
        task: the task.
        request: the task's, as Celery has it.
        error: what is wrong.
    """
    said = f"{type(error).__name__}: {error}".encode(errors="replace").decode()[:SAID]
    mark = {UNFIT_HEADER: said.replace("\x00", "")}

    def without_arguments() -> NewJob:
        (_, _, embed), headers, properties = _call_of(app, task, request)
        message = _message(request, ((), {}, embed), headers | mark, properties, "json")
        return NewJob(request.id, task.name, message, group_id=request.group)

    def bare() -> NewJob:
        built = app.amqp.as_task_v2(request.id, task.name)
        headers = {**built.headers, VERSION_HEADER: 1, RECORDED_HEADER: True, **mark}
        message = _message(request, built.body, headers, {"correlation_id": request.id}, "json")
        return NewJob(request.id, task.name, message)

    yield without_arguments
    yield bare


def check_id(job_id: object) -> None:
    """Check that a message's id is one that a job can have.

    Raises:
        JobUnfit: it is not.
    """
    if not (isinstance(job_id, str) and job_id and may_be_id(job_id)):
        said = f"a task_id is a text of at most {NAME} characters, not {job_id!r}"
        raise JobUnfit(said[:SAID].encode(errors="replace").decode())


def _call_of(app: Any, task: Any, request: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a call's body, headers and properties, as Celery makes them."""
    limits = request.timelimit or (None, None)
    built = app.amqp.as_task_v2(
        request.id,
        request.task or task.name,
        args=request.args,
        kwargs=request.kwargs,
        group_id=request.group,
        group_index=request.group_index,
        expires=request.expires,
        retries=request.retries,
        chord=request.chord,
        callbacks=request.callbacks,
        errbacks=request.errbacks,
        chain=request.chain,
        reply_to=request.reply_to,
        time_limit=limits[0],
        soft_time_limit=limits[1],
        root_id=request.root_id,
        parent_id=request.parent_id,
        shadow=request.shadow,
        origin=request.origin,
        ignore_result=request.ignore_result,
        # What a sender hides stays hidden.
        argsrepr=request.get("argsrepr"),
        kwargsrepr=request.get("kwargsrepr"),
        replaced_task_nesting=request.replaced_task_nesting,
    )
    sent = {name: said for name, said in (request.headers or {}).items() if name not in OWN_HEADERS}
    headers = {**sent, **built.headers, VERSION_HEADER: 1, RECORDED_HEADER: True}
    if request.stamped_headers:
        headers["stamped_headers"] = request.stamped_headers
        headers["stamps"] = request.stamps
    properties = {**built.properties, "correlation_id": request.correlation_id or request.id}
    priority = (request.delivery_info or {}).get("priority")
    if priority is not None:
        properties["priority"] = priority
    return freeze_callbacks(built.body), headers, properties


def _message(
    request: Any,
    body: Any,
    headers: dict[str, Any],
    properties: dict[str, Any],
    serializer: str,
) -> Message:
    delivery = request.delivery_info or {}
    content_type, content_encoding, payload = serialization.dumps(body, serializer)
    return Message(
        version=1,
        headers=kombu_json.dumps(headers),
        properties=kombu_json.dumps(properties),
        body=payload.encode(content_encoding) if isinstance(payload, str) else payload,
        content_type=content_type,
        content_encoding=content_encoding,
        exchange=delivery.get("exchange") or "",
        routing_key=delivery.get("routing_key") or "",
    )


def _serializer_of(app: Any, task: Any, request: Any) -> str:
    """Return what the delivery was serialised with; the task's own where nobody says it."""
    found = serialization.registry.type_to_name.get(request.get(CONTENT_TYPE_HEADER))
    return str(found or task.serializer or app.conf.task_serializer)
