"""Jobs and attempts as JSON documents: the keys stay, those who read them are programs."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum
from typing import Any, Final

from celery_lease.store.models import Attempt, Job

JSON_TYPE: Final = "application/json"

#: What a listing says of a job. Its message, and with it the user's arguments, is not shown.
JOB_KEYS: Final = (
    "id",
    "task",
    "state",
    "state_reason",
    "fencing_token",
    "resumed_token",
    "lease_owner",
    "lost_count",
    "failure_count",
    "max_attempts",
    "on_expiry",
    "available_at",
    "expires_at",
    "deadline_at",
    "message_version",
    "dispatched_at",
    "first_dispatched_at",
    "dispatch_count",
    "idempotency_key",
    "active_key",
    "arguments_digest",
    "submitter",
    "root_id",
    "parent_id",
    "group_id",
    "queue",
    "priority",
    "schedule",
    "slot_at",
    "accepted_attempt",
    "accepted_late",
    "result_type",
    "result_size",
    "error_type",
    "error_message",
    "settled_at",
    "created_at",
    "finished_at",
)
#: What it says of an attempt.
ATTEMPT_KEYS: Final = (
    "job_id",
    "fencing_token",
    "state",
    "stop_reason",
    "worker",
    "owner",
    "message_version",
    "lease_seconds",
    "lease_expires_at",
    "last_renewed_at",
    "renewal_count",
    "extended_at",
    "stop_requested_at",
    "claimed_at",
    "acknowledged_at",
    "ended_at",
    "worker_claimed_at",
    "worker_ended_at",
    "error_type",
    "error_message",
    "failure_class",
    "retryable",
    "rejected_at",
    "late_outcome",
    "late_result_size",
    "late_result_digest",
)
_JOB_TEXTS = ("requires", "unmet")
_ATTEMPT_TEXTS = ("progress", "checkpoint")


def job(row: Job) -> dict[str, Any]:
    """Return what a listing says of a job."""
    return {key: plain(getattr(row, key)) for key in JOB_KEYS} | {
        key: parsed(getattr(row, key)) for key in _JOB_TEXTS
    }


def attempt(row: Attempt, *, now: datetime) -> dict[str, Any]:
    """Return what a listing says of an attempt, and what follows from it at ``now``."""
    return (
        {key: plain(getattr(row, key)) for key in ATTEMPT_KEYS}
        | {key: parsed(getattr(row, key)) for key in _ATTEMPT_TEXTS}
        | {
            "held_seconds": held_seconds(row, now=now),
            "is_live": row.is_live,
            "is_expired": is_expired(row, now=now),
            "worker_ahead_seconds": ahead_seconds(row.claimed_at, row.worker_claimed_at),
        }
    )


def job_with_attempts(row: Job, *, now: datetime) -> dict[str, Any]:
    """Return everything of a job but its message; a result that is not JSON is not decoded."""
    return job(row) | {
        "result": json_value(row.result, row.result_type),
        "store_time": plain(now),
        "attempts": [attempt(one, now=now) | {"traceback": one.traceback} for one in row.attempts],
    }


def plain(value: object) -> object:
    """Return a column's value in JSON's types."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return value.value if isinstance(value, Enum) else value


def parsed(text: str | None) -> object:
    """Return what a JSON text says; a text that is none as it is."""
    return None if text is None else _loads(text, text)


def json_value(result: bytes | None, content_type: str | None) -> object:
    """Return a result that is JSON; None for another one, which only its reader may decode."""
    if result is None or content_type != JSON_TYPE:
        return None
    try:
        return _loads(result.decode("utf-8"), None)
    except UnicodeDecodeError:
        return None


def held_seconds(row: Attempt, *, now: datetime) -> float:
    """Return how long an attempt has been, or was, the one that holds the lease."""
    return ((row.ended_at or now) - row.claimed_at).total_seconds()


def is_expired(row: Attempt, *, now: datetime) -> bool:
    """Tell whether the lease of a live attempt has ended without anything done about it yet."""
    return row.is_live and row.lease_expires_at < now


def ahead_seconds(store: datetime | None, worker: datetime | None) -> float | None:
    """Return how far the worker's clock was ahead, request time included; None if unknown."""
    if store is None or worker is None:
        return None
    return (worker - store).total_seconds()


def _loads(text: str, otherwise: object) -> object:
    # NaN and Infinity are not JSON, and would make a document that others cannot read.
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return otherwise


def _refuse(constant: str) -> object:
    raise ValueError(constant)
