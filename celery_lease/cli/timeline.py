"""One job for people: what it is, and what happened to it in the order of the store's clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from celery_lease.cli.documents import ahead_seconds, json_value
from celery_lease.cli.output import Table
from celery_lease.cli.tables import error_text, instant, lease_left, span, stop_text
from celery_lease.store.models import Attempt, Job

_LONGEST_RESULT = 500  # characters: more is what --json is for


@dataclass(frozen=True, slots=True)
class _Happening:
    """One line of the timeline.

    Args:
        at: by the store's clock.
        what: in words.
        attempt: its token, None for what concerns the job.
        ahead: how far the worker's clock was ahead, seconds.
    """

    at: datetime
    what: str
    attempt: int | None = None
    ahead: float | None = None


def heading(job: Job, *, now: datetime) -> list[str]:
    """Return what the job is and how it stands, a line each."""
    facts = {
        "job": job.id,
        "task": job.task,
        "state": job.state.value + (f" ({job.state_reason})" if job.state_reason else ""),
        "held by": job.lease_owner,
        "accepted": _accepted(job),
        "result": _result(job),
        "error": None if job.error_type is None else error_text(job.error_type, job.error_message),
        "counts": (
            f"{job.fencing_token} attempts, {job.lost_count} of {job.max_attempts} runners lost, "
            f"{job.failure_count} failures"
        ),
        "on expiry": job.on_expiry.value,
        "queue": job.queue,
        "due": instant(job.available_at) if not job.is_final else None,
        "expires": None if job.expires_at is None else instant(job.expires_at),
        "deadline": None if job.deadline_at is None else instant(job.deadline_at),
        "submitter": job.submitter,
        "root": job.root_id if job.root_id != job.id else None,
        "parent": job.parent_id,
        "group": job.group_id,
        "now": f"{instant(now)} by the store's clock",
    }
    width = max(len(name) for name in facts)
    return [f"{name:{width}}  {value}" for name, value in facts.items() if value is not None]


def events(job: Job, *, now: datetime) -> Table:
    """Return what happened to the job and its attempts, the oldest first."""
    # In the order in which it must have happened: the sort keeps it within one instant.
    happenings = list(_beginning(job))
    for attempt in job.attempts:
        happenings += _of_attempt(attempt, job, now=now)
    happenings += _end(job)
    happenings.sort(key=lambda happening: happening.at)
    return Table(
        columns=("store's clock", "worker's", "attempt", "what happened"),
        rows=[
            (
                instant(happening.at),
                "" if happening.ahead is None else f"{happening.ahead:+.3f}s",
                "" if happening.attempt is None else str(happening.attempt),
                happening.what,
            )
            for happening in happenings
        ],
        right=frozenset({"worker's", "attempt"}),
    )


def tracebacks(job: Job) -> Iterator[str]:
    """Return the tracebacks of the attempts that have one, under a heading each."""
    for attempt in job.attempts:
        if attempt.traceback:
            yield ""
            yield f"attempt {attempt.fencing_token}:"
            yield from attempt.traceback.splitlines()


def _beginning(job: Job) -> Iterator[_Happening]:
    said = [f"recorded by {job.submitter}" if job.submitter else "recorded"]
    if job.queue:
        said.append(f"for queue {job.queue}")
    yield _Happening(job.created_at, ", ".join(said))
    if job.dispatched_at is not None:
        times = "" if job.dispatch_count == 1 else f" ({job.dispatch_count} times in all)"
        yield _Happening(job.dispatched_at, f"message last put on the broker{times}")


def _end(job: Job) -> Iterator[_Happening]:
    if job.finished_at is not None:
        yield _Happening(job.finished_at, f"job {job.state.value}")
    if job.settled_at is not None:
        yield _Happening(job.settled_at, "settled: Celery's own bookkeeping is done")


def _of_attempt(attempt: Attempt, job: Job, *, now: datetime) -> Iterator[_Happening]:
    token = attempt.fencing_token
    worker = attempt.worker or "an unnamed worker"
    yield _Happening(
        attempt.claimed_at,
        f"claimed by {worker} ({attempt.owner}), lease of {span(attempt.lease_seconds)}",
        token,
        ahead_seconds(attempt.claimed_at, attempt.worker_claimed_at),
    )
    if attempt.renewal_count:
        times = "once" if attempt.renewal_count == 1 else f"{attempt.renewal_count} times"
        yield _Happening(attempt.last_renewed_at, f"last renewed ({times} in all)", token)
    if attempt.extended_at is not None:
        yield _Happening(attempt.extended_at, "lease extended after an outage", token)
    if attempt.stop_requested_at is not None:
        yield _Happening(attempt.stop_requested_at, "asked to stop", token)
    if attempt.lease_expires_at < (attempt.ended_at or now):
        yield _Happening(attempt.lease_expires_at, "lease ended without a renewal", token)
    if attempt.ended_at is None:
        yield _Happening(now, f"still {attempt.state.value}: {lease_left(attempt, now=now)}", token)
    else:
        yield _ended(attempt, job, attempt.ended_at)
    if attempt.rejected_at is not None:
        yield _Happening(attempt.rejected_at, _rejected(attempt), token)


def _ended(attempt: Attempt, job: Job, ended_at: datetime) -> _Happening:
    said = f"{attempt.state.value} after {span((ended_at - attempt.claimed_at).total_seconds())}"
    reason = stop_text(attempt)
    if reason:
        said += f": {reason}"
    if job.accepted_attempt == attempt.fencing_token:
        said += "; accepted as the job's outcome"
    ahead = ahead_seconds(ended_at, attempt.worker_ended_at)
    return _Happening(ended_at, said, attempt.fencing_token, ahead)


def _rejected(attempt: Attempt) -> str:
    if attempt.late_outcome is None:
        return "came back stale: rejected"
    said = f"came back with {attempt.late_outcome.value}: rejected"
    if attempt.late_result_size is not None:
        said += f", its result of {attempt.late_result_size} bytes kept on the attempt"
    if attempt.late_result_digest is not None:
        said += f" ({attempt.late_result_digest})"
    return said


def _accepted(job: Job) -> str | None:
    # 0 is the outcome of the job that it follows: its state says which.
    if not job.accepted_attempt:
        return "no attempt's outcome" if job.is_final else None
    late = ", after its lease had ended and before anybody took over" if job.accepted_late else ""
    return f"attempt {job.accepted_attempt}{late}"


def _result(job: Job) -> str | None:
    """Return the result if it is JSON; another one is not decoded, only measured."""
    if job.result is None:
        return None
    value = json_value(job.result, job.result_type)
    if value is None and job.result != b"null":
        return f"<{job.result_type}, {len(job.result)} bytes>"
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST_RESULT:
        return f"{text[:_LONGEST_RESULT]}... ({len(job.result)} bytes: all of it with --json)"
    return text
