"""Every exception this package raises, in one tree.

``LeaseError`` is the root of what goes wrong; ``LeaseInterrupt`` (a ``BaseException``) is
the root of what interrupts a body, so that a body's own ``except Exception`` cannot
swallow it. Each class builds its message from facts, which stay readable as attributes.
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
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type[SettingError], tuple[Sequence[str]]]:
        return type(self), (self.problems,)


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
        super().__init__(
            f"the lease store {url} cannot be used: {reason}. "
            "Check that it runs and that lease_store_url is right"
        )

    def __reduce__(self) -> tuple[type[StoreUnavailable], tuple[str, str]]:
        return type(self), (self.url, self.reason)


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
        super().__init__(
            f"the lease store {url} has schema revision {found or 'none'}, "
            f"this code needs {expected}: {remedy}"
        )

    def __reduce__(self) -> tuple[type[SchemaMismatch], tuple[str, str | None, str, str]]:
        return type(self), (self.url, self.found, self.expected, self.remedy)


class PayloadTooLarge(LeaseError):
    """Raised when a message or a result is larger than its setting allows.

    Args:
        what: "message" or "result".
        size: bytes it has.
        limit: bytes it may have.
        setting: the name of the setting that says so.
        task: the task's name.
    """

    def __init__(self, what: str, size: int, limit: int, setting: str, task: str) -> None:
        self.what = what
        self.size = size
        self.limit = limit
        self.setting = setting
        self.task = task
        super().__init__(
            f"the {what} of task {task} has {size} bytes, {setting} allows {limit}: "
            "pass a reference to the data instead, or raise the setting"
        )

    def __reduce__(self) -> tuple[type[PayloadTooLarge], tuple[str, int, int, str, str]]:
        return type(self), (self.what, self.size, self.limit, self.setting, self.task)


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
        super().__init__(
            f"the result of task {task} cannot be serialised with {serializer!r} ({reason}): "
            "return plain data, set result_serializer, or use ignore_result=True"
        )

    def __reduce__(self) -> tuple[type[ResultNotSerialisable], tuple[str, str, str]]:
        return type(self), (self.task, self.serializer, self.reason)


class JobNotFound(LeaseError):
    """Raised when a job id is not in the store.

    Args:
        job_id: the id asked for.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"no job {job_id} in the lease store")

    def __reduce__(self) -> tuple[type[JobNotFound], tuple[str]]:
        return type(self), (self.job_id,)


class StaleWrite(LeaseError):
    """Raised when an attempt that no longer holds the lease tries to change its job.

    Args:
        job_id: the job.
        fencing_token: the token the caller holds.
    """

    def __init__(self, job_id: str, fencing_token: int) -> None:
        self.job_id = job_id
        self.fencing_token = fencing_token
        super().__init__(
            f"attempt {fencing_token} of job {job_id} no longer holds the lease: "
            "nothing was changed"
        )

    def __reduce__(self) -> tuple[type[StaleWrite], tuple[str, int]]:
        return type(self), (self.job_id, self.fencing_token)


class JobEnded(LeaseError):
    """Root of what a caller gets from ``AsyncResult.get()`` for an end that no body returned.

    Built from its message alone, since Celery's JSON result backends rebuild an exception
    from the arguments it was created with.
    """


class JobInterrupted(JobEnded):
    """Raised when ``lease_max_attempts`` runners vanished under the job."""


class JobRunnerLost(JobEnded):
    """Raised when the job's runner vanished and ``lease_on_expiry`` is ``fail``."""


class DeadlineExceeded(JobEnded):
    """Raised when the job was not done by its deadline."""


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
        super().__init__(f"lease {fencing_token} of job {job_id} is lost: {reason}")

    def __reduce__(self) -> tuple[type[LeaseLost], tuple[str, int, str]]:
        return type(self), (self.job_id, self.fencing_token, self.reason)


class HandOver(LeaseInterrupt):
    """Raised when a body gives its job back: another worker goes on from the last checkpoint."""
