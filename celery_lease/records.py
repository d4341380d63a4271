"""The values that travel between the floors: frozen, typed, without behaviour.

Durations are seconds (float). Instants are aware UTC datetimes. What Celery serialised
(headers, properties, body, results) is carried as text or bytes and never decoded here.

It is long because each field is described, and one file because a value is read beside its
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from celery_lease.states import AttemptState, JobState, LateOutcome, LossCause, OnExpiry, Refusal


@dataclass(frozen=True, slots=True)
class Message:
    """One version of a job's message, exactly as it goes to the broker.

    Attributes:
        version: 1 for the first; a retry or a replacement is the next one.
        headers: JSON text of the message headers.
        properties: JSON text of the message properties (priority, correlation id, …).
        body: the serialised, possibly compressed body.
        content_type: as kombu named it.
        content_encoding: as kombu named it.
        exchange: exchange name, empty for the default exchange.
        routing_key: routing key.
    """

    version: int
    headers: str
    properties: str
    body: bytes
    content_type: str
    content_encoding: str
    exchange: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """The key under which a job is submitted.

    Attributes:
        text: the key; one job of a task holds it at a time.
        arguments_digest: what the call's arguments are known by, None to compare none.
        retention_seconds: how long a succeeded job holds it, None for as long as its row is kept.
    """

    text: str
    arguments_digest: str | None = None
    retention_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class NewJob:
    """What ``submit`` and ``adopt`` write.

    Attributes:
        job_id: the Celery task id.
        task: the task's name.
        message: the first message.
        delay_seconds: time to the due instant, 0 when it is due now.
        expires_seconds: time to Celery's ``expires``, None without one.
        deadline_seconds: time to the deadline, None without one.
        max_attempts: the loss that ends the job (``lease_max_attempts``).
        on_expiry: policy for a vanished runner.
        queue: the queue the message goes to.
        priority: the message's priority, None without one.
        submitter: who published it (a node name).
        root_id: Celery's root id.
        parent_id: Celery's parent id.
        group_id: Celery's group id.
        dispatched: True when the caller publishes the message right after the commit.
        key: its idempotency key, None without one.
        follows: True when its id is known to others already (a canvas, an adopted message): if
            its key is held it is recorded all the same, and ends as the job that holds it.
    """

    job_id: str
    task: str
    message: Message
    delay_seconds: float = 0.0
    expires_seconds: float | None = None
    deadline_seconds: float | None = None
    max_attempts: int = 3
    on_expiry: OnExpiry = OnExpiry.RETRY
    queue: str | None = None
    priority: int | None = None
    submitter: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None
    dispatched: bool = True
    key: IdempotencyKey | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Existing:
    """The job that a submit found instead of a place for its own.

    Attributes:
        job_id: that job; the submitted id, when it is the id that exists.
        same_arguments: False when it holds the submitted key with other arguments.
    """

    job_id: str
    same_arguments: bool = True


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message in the hands of a runner that asks for the job.

    Attributes:
        job_id: the job.
        message_version: the version the message says it is.
        owner: the asking process (host, pid, random part).
        worker: Celery's node name.
        nonce: one random text a delivery, so that a repeated claim gets the same token.
        lease_seconds: length of the lease asked for.
        worker_now: the runner's own clock, kept for diagnosis and never compared.
        replay: True when the reaper sent this message to have a final outcome published again.
        settle_grace_seconds: how long a fresh outcome is left to the runner that made it.
        dispatch_count: which dispatch of its job the message says it is, None when it does not.
    """

    job_id: str
    message_version: int
    owner: str
    worker: str
    nonce: str
    lease_seconds: float
    worker_now: datetime
    replay: bool = False
    settle_grace_seconds: float = 30.0
    dispatch_count: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Names a lease: which job, under which token, by which process (*mine*)."""

    job_id: str
    fencing_token: int
    owner: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A won claim.

    Attributes:
        lease: the lease that was won.
        message_version: the version in force.
        lost_count: runners that vanished so far.
        checkpoint: JSON text of the newest checkpoint of an earlier attempt, None without one.
        took_over: the token of the attempt whose ended lease was taken over, None otherwise.
    """

    lease: Held
    message_version: int
    lost_count: int
    checkpoint: str | None = None
    took_over: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A delivery that was not given the job.

    Attributes:
        refusal: why.
        state: the job's state as read, None when there is no row.
        owner: who holds the lease, None when nobody does.
        vanished: the policy that this delivery applied to an ended lease, None otherwise.
    """

    refusal: Refusal
    state: JobState | None
    owner: str | None = None
    vanished: Vanished | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A final outcome that Celery may not have been told yet.

    Attributes:
        job_id: the job.
        fencing_token: its token when it became final.
        finished_at: when it became final; with the token it names this very outcome.
        state: the final state.
        state_reason: why.
        result: serialised result, or the exception as Celery's JSON backends keep it.
        result_type: content type of ``result``.
        error_type: the exception's type name.
        error_message: its text.
        by_attempt: True when a body returned or raised it.
    """

    job_id: str
    fencing_token: int
    finished_at: datetime
    state: JobState
    state_reason: str | None
    result: bytes | None
    result_type: str | None
    error_type: str | None
    error_message: str | None
    by_attempt: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A delivery of a job that is final and whose bookkeeping in Celery is to be done again."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no row for this job."""


ClaimAnswer = Claimed | Refused | Replay | Absent


@dataclass(frozen=True, slots=True)
class Failure:
    """What a body raised.

    Attributes:
        error_type: ``module.Class``.
        error_message: its text, truncated.
        traceback: its traceback, truncated.
        failure_class: ``error``, ``invalid``, ``time_limit``, ``memory`` …
        retryable: whether another attempt could end differently.
    """

    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None
    failure_class: str | None = None
    retryable: bool | None = None


@dataclass(frozen=True, slots=True)
class Late:
    """What a stale attempt produced: kept on its own row.

    Attributes:
        outcome: what it tried to report.
        result: serialised result, None when there is none or it is over the cap.
        digest: ``sha256:…`` of the serialised result.
        failure: what it raised.
    """

    outcome: LateOutcome
    result: bytes | None = None
    digest: str | None = None
    failure: Failure = field(default_factory=Failure)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The transition is in force.

    Attributes:
        finished_at: when the job became final, None when it did not.
        delay_seconds: time to the next due instant, 0 when due now.
    """

    finished_at: datetime | None = None
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stale:
    """The lease was no longer the caller's: nothing was changed.

    Attributes:
        attempt_state: how the caller's own attempt had ended, None when its row is gone.
    """

    attempt_state: AttemptState | None


FinishAnswer = Accepted | Stale


@dataclass(frozen=True, slots=True)
class Renewal:
    """One lease in a heartbeat.

    Attributes:
        lease: the lease to renew.
        progress: JSON text, None when unchanged.
        checkpoint: JSON text, None when unchanged.
        stop_requested: True when the runner was asked to stop; the first such renewal is kept.
        acknowledged: True when its message was acknowledged; the first such renewal is kept.
    """

    lease: Held
    progress: str | None = None
    checkpoint: str | None = None
    stop_requested: bool = False
    acknowledged: bool = False

    @property
    def has_news(self) -> bool:
        """True when it would write more than the end of the lease."""
        return (
            self.progress is not None
            or self.checkpoint is not None
            or self.stop_requested
            or self.acknowledged
        )

    @property
    def report_bytes(self) -> int:
        """How much the reports add to a statement, about."""
        return len(self.progress or "") + len(self.checkpoint or "")


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to a heartbeat; every lease asked for is in exactly one of the three.

    Attributes:
        renewed: (job id, token) pairs whose expiry moved.
        lost: pairs whose attempt has ended, with the state it is in (None: the row is gone).
        unanswered: pairs that were locked just then; ask again.
        refused: those of ``renewed`` whose reports the database would not take.
    """

    renewed: frozenset[tuple[str, int]]
    lost: Mapping[tuple[str, int], AttemptState | None]
    unanswered: frozenset[tuple[str, int]]
    refused: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Vanished:
    """The policy applied to one vanished runner.

    Attributes:
        job_id: the job.
        fencing_token: the token of the attempt that ended.
        cause: the attempt's end.
        state: the job's state now.
        delay_seconds: time to its next due instant.
        finished_at: when it became final, None when it did not.
        worker: node name of the vanished runner.
        owner: its process.
        is_counted: False when it was asked to stop before: no loss of the job's.
    """

    job_id: str
    fencing_token: int
    cause: LossCause
    state: JobState
    delay_seconds: float
    finished_at: datetime | None
    worker: str | None
    owner: str | None
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """An attempt that holds a lease, renewed in time or not.

    Attributes:
        job_id: the job.
        fencing_token: its token.
        owner: the process that holds it.
        worker: node name of that process's worker.
        task: the job's task.
    """

    job_id: str
    fencing_token: int
    owner: str
    worker: str | None
    task: str


@dataclass(frozen=True, slots=True)
class Dispatchable:
    """A queued job whose message is to be put on the broker.

    Attributes:
        job_id: the job.
        task: its task.
        dispatch_count: as read; the guard of ``dispatch``.
        message_version: the newest version.
        queue: the queue to declare.
        expires_seconds: time left to ``expires``, None without one.
        due_seconds: time left until it is due, 0 or less when it is.
    """

    job_id: str
    task: str
    dispatch_count: int
    message_version: int
    queue: str | None
    expires_seconds: float | None = None
    due_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits, and what waits for longer than it should.

    Attributes:
        queued_count: queued jobs.
        oldest_queued_seconds: how long the oldest of them has been due, 0 without one.
        unclaimed_count: queued jobs whose message left too long ago.
        overdue_running_count: running jobs whose lease ended too long ago.
        unsettled_count: jobs that became final too long ago for Celery not to know.
        overdue_waiting_count: jobs in the store alone, scheduled or waiting for a retry, that were
            due too long ago.
    """

    queued_count: int
    oldest_queued_seconds: float
    unclaimed_count: int
    overdue_running_count: int
    unsettled_count: int
    overdue_waiting_count: int = 0


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The reaper's last completed pass.

    Attributes:
        finished_at: by the store's clock.
        age_seconds: how long ago, by the store's clock.
        counts: what it did.
        worker: who ran it.
    """

    finished_at: datetime
    age_seconds: float
    counts: Mapping[str, int]
    worker: str | None
