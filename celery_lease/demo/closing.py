"""The end of the show in words and in JSON: who had which attempt, and the verdict."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery_lease.demo.evidence import AttemptSeen, Evidence, JobSeen
from celery_lease.demo.screen import Closing, HistoryRow
from celery_lease.demo.verdict import verdict


def closing_of(evidence: Evidence) -> Closing:
    """Return what is shown at the end."""
    checks = verdict(evidence)
    failed = sum(not check.holds for check in checks)
    said = "everything held" if not failed else f"{failed} of {len(checks)} checks do not hold"
    return Closing(
        history=_history(evidence),
        checks=checks,
        summary=f"{said}: {len(evidence.jobs)} jobs, {len(evidence.attempts())} attempts, "
        f"{evidence.seconds:.1f} s",
    )


def as_json(evidence: Evidence, closing: Closing) -> dict[str, Any]:
    """Return the same for a program."""
    return {
        "holds": closing.holds,
        "seconds": round(evidence.seconds, 1),
        "jobs": len(evidence.jobs),
        "attempts": len(evidence.attempts()),
        "checks": [
            {
                "claim": check.claim,
                "holds": check.holds,
                "found": check.found,
                "problems": list(check.problems),
            }
            for check in closing.checks
        ],
        "history": [
            _attempt_as_json(evidence, job, attempt)
            for job in _affected(evidence)
            for attempt in job.attempts
        ],
    }


def _attempt_as_json(evidence: Evidence, job: JobSeen, attempt: AttemptSeen) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "package": evidence.names.get(job.id),
        "fencing_token": attempt.token,
        "worker": attempt.worker,
        "state": attempt.state.value,
        "stop_reason": attempt.stop_reason,
        "claimed_at": attempt.claimed_at.isoformat(),
        "ended_at": None if attempt.ended_at is None else attempt.ended_at.isoformat(),
        "accepted": attempt.token == job.accepted_attempt,
        "rejected_at": None if attempt.rejected_at is None else attempt.rejected_at.isoformat(),
        "late_outcome": None if attempt.late_outcome is None else attempt.late_outcome.value,
        "late_result_digest": attempt.late_digest,
    }


def _history(evidence: Evidence) -> list[HistoryRow]:
    rows = []
    for job in _affected(evidence):
        for attempt in job.attempts:
            is_first = attempt is job.attempts[0]
            name = evidence.names.get(job.id, job.id)
            rows.append(_row(name if is_first else "", attempt, evidence.started_at))
    return rows


def _row(job: str, attempt: AttemptSeen, started: datetime) -> HistoryRow:
    late = ""
    if attempt.rejected_at is not None:
        outcome = "" if attempt.late_outcome is None else f"{attempt.late_outcome.value}, "
        late = f"{outcome}rejected {_since(started, attempt.rejected_at)}"
    return HistoryRow(
        job=job,
        token=str(attempt.token),
        worker=attempt.worker.partition("@")[0],
        claimed=_since(started, attempt.claimed_at),
        ended="" if attempt.ended_at is None else _since(started, attempt.ended_at),
        state=attempt.state.value,
        reason=attempt.stop_reason or "",
        late=late,
    )


def _affected(evidence: Evidence) -> list[JobSeen]:
    return [job for job in evidence.jobs if len(job.attempts) > 1]


def _since(started: datetime, instant: datetime) -> str:
    return f"{(instant - started).total_seconds():.1f} s"
