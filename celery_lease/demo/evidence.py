"""What the verdict is computed from: rows of the store, Celery's own results, a plain run.

Read when all is over, and kept as plain records, so that the checks are pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_lease import history
from celery_lease.history import Attempt, Job
from celery_lease.states import AttemptState, JobState, LateOutcome

#: More than there can be of this run.
_ALL = 10_000
Key = tuple[str, int]
"""An attempt: job id and fencing token."""


@dataclass(frozen=True, slots=True)
class AttemptSeen:
    """One attempt, as the store has it at the end."""

    job_id: str
    token: int
    state: AttemptState
    worker: str
    claimed_at: datetime
    ended_at: datetime | None = None
    stop_reason: str | None = None
    progress: str | None = None
    rejected_at: datetime | None = None
    late_outcome: LateOutcome | None = None
    late_result: bytes | None = None
    late_digest: str | None = None

    @property
    def key(self) -> Key:
        """Names it."""
        return self.job_id, self.token


@dataclass(frozen=True, slots=True)
class JobSeen:
    """One job, as the store has it at the end.

    Attributes:
        result: what the store accepted, decoded; None without one.
        celery: state and result in Celery's own result backend.
    """

    id: str
    state: JobState
    accepted_attempt: int | None
    settled: bool
    attempts: tuple[AttemptSeen, ...]
    result: Any
    celery: tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything the verdict knows.

    Attributes:
        names: the job id of each package that was submitted, and that package's name.
        jobs: every job in the store.
        plain: the result of a plain sequential run, by package.
        killed_worker: node name of the worker that was killed.
        killed: the attempts that it was in when it was.
        frozen_worker: node name of the worker that was frozen.
        zombie: the attempt that it was in, past its last check.
        started_at: when the show began, by the store's clock.
        seconds: how long it took.
    """

    names: Mapping[str, str]
    jobs: tuple[JobSeen, ...]
    plain: Mapping[str, Any]
    killed_worker: str
    killed: tuple[Key, ...]
    frozen_worker: str
    zombie: Key
    started_at: datetime
    seconds: float

    def attempts(self) -> list[AttemptSeen]:
        """Return all attempts of all jobs."""
        return [attempt for job in self.jobs for attempt in job.attempts]

    def attempt(self, key: Key) -> AttemptSeen | None:
        """Return one attempt, None when the store has none of that name."""
        return next((attempt for attempt in self.attempts() if attempt.key == key), None)

    def job(self, job_id: str) -> JobSeen | None:
        """Return one job, None when the store has none of that id."""
        return next((job for job in self.jobs if job.id == job_id), None)


def read_jobs(app: Any) -> tuple[JobSeen, ...]:
    """Return every job in an app's store, the oldest first."""
    listed = reversed(history.jobs(app, limit=_ALL))
    return tuple(_job(app, history.job(app, job.id)) for job in listed)


def _job(app: Any, job: Job) -> JobSeen:
    told = app.backend.get_task_meta(job.id, cache=False)
    return JobSeen(
        id=job.id,
        state=job.state,
        accepted_attempt=job.accepted_attempt,
        settled=job.is_settled,
        attempts=tuple(_attempts(job.attempts)),
        result=None if job.result is None else json.loads(job.result),
        celery=(str(told["status"]), told["result"]),
    )


def _attempts(attempts: Iterable[Attempt]) -> Iterable[AttemptSeen]:
    for one in attempts:
        yield AttemptSeen(
            job_id=one.job_id,
            token=one.fencing_token,
            state=one.state,
            worker=one.worker or "",
            claimed_at=one.claimed_at,
            ended_at=one.ended_at,
            stop_reason=one.stop_reason,
            progress=one.progress,
            rejected_at=one.rejected_at,
            late_outcome=one.late_outcome,
            late_result=one.late_result,
            late_digest=one.late_result_digest,
        )
