"""Every exception this package raises, in one tree.

``LeaseError`` is the root of what goes wrong; ``LeaseInterrupt`` (a ``BaseException``) is
the root of what interrupts a body, so that a body's own ``except Exception`` cannot
swallow it. Each class builds its message from facts, which stay readable as attributes and
are its ``args``: pickle and Celery's JSON result backends build an exception from those.
"""

from __future__ import annotations

from collections.abc import Sequence


class LeaseError(Exception):
    """Root of all errors of celery-lease."""


class SettingError(LeaseError):
    """Raised when a setting, or a set of settings, cannot work.

    Args:
        problems: one sentence a problem, each naming the setting, its value and the remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class StoreError(LeaseError):
    """Root of what goes wrong between this process and the store."""


class StoreUnavailable(StoreError):
    """Raised when the store could not be reached, or did not answer, within the bound.

    Args:
        url: the store's URL with its password masked.
        reason: what the driver said, one line.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(url, reason)

    def __str__(self) -> str:
        return (
            f"the lease store {self.url} cannot be used: {self.reason}. "
            "Check that it runs and that lease_store_url is right"
        )


class ChordClaimed(StoreError):
    """Raised when another process is about to publish the body of a chord, and takes its time.

    Nothing is lost: whoever was told so leaves its part unsettled, and a later pass tells it again.

    Args:
        chord_id: Celery's group id.
        task_id: the part that was told.

    .. versionadded:: 0.1
    """

    def __init__(self, chord_id: str, task_id: str) -> None:
        self.chord_id = chord_id
        self.task_id = task_id
        super().__init__(chord_id, task_id)

    def __str__(self) -> str:
        return (
            f"another process claims to publish the body of chord {self.chord_id} and has not yet: "
            f"its part {self.task_id} is left unsettled, and told again by a later pass"
        )


class SchemaMismatch(StoreError):
    """Raised when the store's tables are missing, older or newer than this code.

    Args:
        url: the store's URL with its password masked.
        found: the revision in the database, None when there are no tables.
        expected: the revision this code works with.
        remedy: what to do, one sentence.
    """

    def __init__(self, url: str, found: str | None, expected: str, remedy: str) -> None:
        self.url = url
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(url, found, expected, remedy)

    def __str__(self) -> str:
        return (
            f"the lease store {self.url} has schema revision {self.found or 'none'}, "
            f"this code needs {self.expected}: {self.remedy}"
        )


class PayloadTooLarge(LeaseError):
    """Raised when a message, a result or a checkpoint is larger than its setting allows.

    Args:
        what: "message", "result" or "checkpoint".
        size: bytes it has.
        limit: bytes it may have.
        setting: the name of the setting that says so.
        task: the task's name; of a checkpoint, the job's id.
    """

    def __init__(self, what: str, size: int, limit: int, setting: str, task: str) -> None:
        self.what = what
        self.size = size
        self.limit = limit
        self.setting = setting
        self.task = task
        super().__init__(what, size, limit, setting, task)

    def __str__(self) -> str:
        return (
            f"the {self.what} of task {self.task} has {self.size} bytes, {self.setting} allows "
            f"{self.limit}: "
            "pass a reference to the data instead, or raise the setting"
        )


class ResultNotSerialisable(LeaseError):
    """Raised when a body returned what the result serializer cannot encode.

    Args:
        task: the task's name.
        serializer: the serializer that refused.
        reason: what it said.
    """

    def __init__(self, task: str, serializer: str, reason: str) -> None:
        self.task = task
        self.serializer = serializer
        self.reason = reason
        super().__init__(task, serializer, reason)

    def __str__(self) -> str:
        return (
            f"the result of task {self.task} cannot be serialised with {self.serializer!r} "
            f"({self.reason}): "
            "return plain data, set result_serializer, or use ignore_result=True"
        )


class JobNotFound(LeaseError):
    """Raised when a job id is not in the store.

    Args:
        job_id: the id asked for.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(job_id)

    def __str__(self) -> str:
        return f"no job {self.job_id} in the lease store"


class IdempotencyConflict(LeaseError):
    """Raised when a call uses an idempotency key that a call with other arguments holds.

    Args:
        task: the task's name.
        key: the key.
        job_id: the job that holds it.
    """

    def __init__(self, task: str, key: str, job_id: str) -> None:
        self.task = task
        self.key = key
        self.job_id = job_id
        super().__init__(task, key, job_id)

    def __str__(self) -> str:
        return (
            f"the idempotency key {self.key!r} of task {self.task} is held by job {self.job_id}, "
            "which was given other arguments: use another key, "
            "or set lease_idempotency_conflict to 'existing'"
        )


class StaleWrite(LeaseError):
    """Raised when an attempt that no longer holds the lease tries to change its job.

    Args:
        job_id: the job.
        fencing_token: the token the caller holds.
    """

    def __init__(self, job_id: str, fencing_token: int) -> None:
        self.job_id = job_id
        self.fencing_token = fencing_token
        super().__init__(job_id, fencing_token)

    def __str__(self) -> str:
        return (
            f"attempt {self.fencing_token} of job {self.job_id} no longer holds the lease: "
            "nothing was changed"
        )


class JobEnded(LeaseError):
    """Root of what a caller gets from ``AsyncResult.get()`` for an end that no body returned.

    Built from its message alone, since Celery's JSON result backends rebuild an exception
    from the arguments it was created with.
    """


class JobInterrupted(JobEnded):
    """Raised when ``lease_max_attempts`` runners vanished under the job."""


class JobRunnerLost(JobEnded):
    """Raised when the job's runner vanished and ``lease_on_expiry`` is ``fail``."""


class JobUnfit(JobEnded):
    """Raised when a message of another program has what a job cannot: its body does not run.

    .. versionadded:: 0.1
    """


class DeadlineExceeded(JobEnded):
    """Raised when the job was not done by its deadline."""


class JobUnsendable(JobEnded):
    """Raised when what follows a job of a canvas could be no message: it was never sent.

    Its text tells what the publish raised: a message over ``lease_max_message_bytes``, arguments
    that its serializer cannot say, a key that cannot be made or is held with other arguments.

    .. versionadded:: 0.1
    """


class BodyAborted(LeaseError):
    """Raised when a body ended by a ``BaseException`` of its own: Celery sees this in its place.

    Let through, such an exception ends a solo worker and leaves a threads pool's message
    unacknowledged; ``asyncio.CancelledError`` is the common one.

    Args:
        error_type: the exception's type name.
        text: its text.
    """

    def __init__(self, error_type: str, text: str) -> None:
        self.error_type = error_type
        self.text = text
        super().__init__(error_type, text)

    def __str__(self) -> str:
        return f"the body ended by {self.error_type}: {self.text}"


class LeaseInterrupt(BaseException):
    """Root of what interrupts a body. A ``BaseException``: ``except Exception`` lets it pass."""


class LeaseLost(LeaseInterrupt):
    """Raised when this attempt's lease is gone: stop, another attempt may run.

    Args:
        job_id: the job.
        fencing_token: the token of the lost lease.
        reason: how it was noticed, one line.
    """

    def __init__(self, job_id: str, fencing_token: int, reason: str) -> None:
        self.job_id = job_id
        self.fencing_token = fencing_token
        self.reason = reason
        super().__init__(job_id, fencing_token, reason)

    def __str__(self) -> str:
        return f"lease {self.fencing_token} of job {self.job_id} is lost: {self.reason}"


class HandOver(LeaseInterrupt):
    """Raised when a body gives its job back: another worker goes on from the last checkpoint."""
