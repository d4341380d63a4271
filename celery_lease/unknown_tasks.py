"""A message of a leased task that this worker does not have: an old one, during a deploy (B116).

Celery discards it and stores a FAILURE, which the caller believes though no attempt has been made.
A recorded job stays queued instead: nobody has claimed it, so its message is sent again after
``lease_queued_timeout``, with growing gaps, until a worker takes it that has the task.

What it is not: it tells the store nothing. What is not recorded is Celery's. Read: celery 5.5 to
5.7, ``celery/worker/consumer/consumer.py``.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from celery import signals

from celery_lease.messages import RECORDED_HEADER

logger = logging.getLogger(__name__)


def leave_to_store(consumer: Any) -> None:
    """Have a consumer discard such a message without an outcome."""
    consumer.on_unknown_task = functools.partial(
        _on_unknown_task, consumer, consumer.on_unknown_task
    )


def _on_unknown_task(
    consumer: Any, celerys: Any, body: Any, message: Any, exc: BaseException
) -> Any:
    headers = message.headers or {}
    if not headers.get(RECORDED_HEADER):
        return celerys(body, message, exc)
    logger.error(
        "lease.task.unknown job_id=%s task=%s: this worker does not have the task; the job stays "
        "queued and is sent again, for a worker that has it",
        headers.get("id"),
        headers.get("task"),
    )
    message.reject_log_error(logger, consumer.connection_errors)
    signals.task_unknown.send(
        sender=consumer, message=message, exc=exc, name=headers.get("task"), id=headers.get("id")
    )
    return None
