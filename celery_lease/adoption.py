"""A message that its publisher did not record becomes a job, at its claim.

Another language, ``send_task`` in a program without celery-lease, or a store that was away.
"""

from __future__ import annotations

from typing import Any

from kombu import serialization
from kombu.utils import json as kombu_json

from celery_lease.messages import (
    RECORDED_HEADER,
    VERSION_HEADER,
    freeze_callbacks,
    key_of,
    seconds_until,
)
from celery_lease.records import Message, NewJob
from celery_lease.settings import TaskSettings


def adopted_job(app: Any, task: Any, request: Any, *, task_settings: TaskSettings) -> NewJob:
    """Return a job for a message that its publisher did not record, from the task's request.

    The original bytes are in the worker's main process; the same call is serialised anew.
    """
    delivery = request.delivery_info or {}
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
        replaced_task_nesting=request.replaced_task_nesting,
    )
    headers = {**(request.headers or {}), **built.headers, VERSION_HEADER: 1, RECORDED_HEADER: True}
    if request.stamped_headers:
        headers["stamped_headers"] = request.stamped_headers
        headers["stamps"] = request.stamps
    content_type, content_encoding, payload = serialization.dumps(
        freeze_callbacks(built.body), task.serializer or app.conf.task_serializer
    )
    properties = {**built.properties, "correlation_id": request.correlation_id or request.id}
    if delivery.get("priority") is not None:
        properties["priority"] = delivery["priority"]
    exchange, routing_key = delivery.get("exchange") or "", delivery.get("routing_key") or ""
    message = Message(
        version=1,
        headers=kombu_json.dumps(headers),
        properties=kombu_json.dumps(properties),
        body=payload.encode(content_encoding) if isinstance(payload, str) else payload,
        content_type=content_type,
        content_encoding=content_encoding,
        exchange=exchange,
        routing_key=routing_key,
    )
    return NewJob(
        job_id=request.id,
        task=task.name,
        message=message,
        expires_seconds=seconds_until(request.expires),
        max_attempts=task_settings.max_attempts,
        on_expiry=task_settings.on_expiry,
        queue=None if exchange else routing_key or None,
        # A stranger's may be anything; the message keeps it.
        priority=delivery["priority"] if isinstance(delivery.get("priority"), int) else None,
        submitter=request.origin,
        root_id=request.root_id,
        parent_id=request.parent_id,
        group_id=request.group,
        key=key_of(task, task_settings, headers, request.args or (), request.kwargs or {}),
        follows=True,
    )
