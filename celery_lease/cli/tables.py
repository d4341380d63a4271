"""Jobs, attempts and settings as tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from celery_lease.cli.documents import held_seconds, is_expired
from celery_lease.cli.output import Table
from celery_lease.settings import SettingRow
from celery_lease.states import JobState
from celery_lease.store.models import Attempt, Job


def jobs(rows: Sequence[Job], *, now: datetime) -> Table:
    """Return a listing of jobs."""
    return Table(
        columns=("job", "task", "state", "attempts", "lost", "failed", "age", "why"),
        rows=[
            (
                row.id,
                row.task,
                row.state.value,
                str(row.fencing_token),
                str(row.lost_count),
                str(row.failure_count),
                span((now - row.created_at).total_seconds()),
                why(row, now=now),
            )
            for row in rows
        ],
        empty="no jobs",
        right=frozenset({"attempts", "lost", "failed", "age"}),
    )


def attempts(rows: Sequence[Attempt], *, now: datetime) -> Table:
    """Return a listing of attempts."""
    return Table(
        columns=("job", "attempt", "state", "worker", "claimed", "held", "renewals", "why"),
        rows=[
            (
                row.job_id,
                str(row.fencing_token),
                row.state.value,
                row.worker or row.owner,
                instant(row.claimed_at),
                span(held_seconds(row, now=now)),
                str(row.renewal_count),
                _lease_or_end(row, now=now),
            )
            for row in rows
        ],
        empty="no attempts",
        right=frozenset({"attempt", "held", "renewals"}),
    )


def settings(rows: Sequence[SettingRow]) -> Table:
    """Return the settings in force."""
    return Table(
        columns=("setting", "value", "default", "unit", "per task", "what it trades"),
        rows=[
            (
                row.name,
                _value(row.value),
                "" if row.value == row.default else _value(row.default),
                row.unit,
                "yes" if row.task_attribute else "",
                row.summary,
            )
            for row in rows
        ],
    )


def why(row: Job, *, now: datetime) -> str:
    """Return why a job is where it is, in a few words."""
    if row.state in (JobState.SCHEDULED, JobState.RETRY_WAIT):
        seconds = (row.available_at - now).total_seconds()
        return f"due in {span(seconds)}" if seconds >= 0 else f"due for {span(-seconds)}"
    if row.error_type is not None and row.state is not JobState.SUCCEEDED:
        return error_text(row.error_type, row.error_message)
    return row.state_reason or ""


def stop_text(row: Attempt) -> str:
    """Return why an attempt ended, in a few words."""
    said = [row.stop_reason or ""]
    if row.error_type is not None:
        said.append(error_text(row.error_type, row.error_message))
    return "; ".join(word for word in said if word)


def lease_left(row: Attempt, *, now: datetime) -> str:
    """Return how long the lease of a live attempt lasts."""
    left = (row.lease_expires_at - now).total_seconds()
    if is_expired(row, now=now):
        return f"lease ended {span(-left)} ago, not given on yet"
    return f"lease ends in {span(left)}"


def error_text(error_type: str, error_message: str | None) -> str:
    """Return an error on one line."""
    first = (error_message or "").strip().splitlines()[:1]
    return ": ".join([error_type, *first])


def instant(value: datetime) -> str:
    """Return an instant for people: UTC, to the millisecond."""
    return value.strftime("%Y-%m-%d %H:%M:%S.") + f"{value.microsecond // 1000:03d}Z"


def span(seconds: float) -> str:
    """Return a duration for people: two units at most."""
    if seconds < 0:
        # Never of the store's clock alone, but a listing and its clock are two questions.
        return f"-{span(-seconds)}"
    if seconds < 10:  # noqa: PLR2004 - below, the fraction is what one looks for
        return f"{seconds:.3g}s" if seconds >= 0.001 else "0s"  # noqa: PLR2004
    whole = round(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size}{unit}" + (f"{rest}{smaller}" if rest else "")
    return f"{whole}s"


def _lease_or_end(row: Attempt, *, now: datetime) -> str:
    if row.is_live:
        return lease_left(row, now=now)
    late = "" if row.late_outcome is None else f"came back with {row.late_outcome.value}: rejected"
    return "; ".join(word for word in (stop_text(row), late) if word)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
