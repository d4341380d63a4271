"""celery-lease: Celery tasks that are never lost with a worker and never accepted twice."""

from celery_lease.exceptions import (
    BodyAborted,
    DeadlineExceeded,
    HandOver,
    IdempotencyConflict,
    JobEnded,
    JobInterrupted,
    JobNotFound,
    JobRunnerLost,
    JobUnfit,
    JobUnsendable,
    LeaseError,
    LeaseInterrupt,
    LeaseLost,
    PayloadTooLarge,
    ResultNotSerialisable,
    SchemaMismatch,
    SettingError,
    StaleWrite,
    StoreError,
    StoreUnavailable,
)
from celery_lease.extension import install
from celery_lease.lease import current_lease
from celery_lease.task import LeasedTask

__all__ = [
    "BodyAborted",
    "DeadlineExceeded",
    "HandOver",
    "IdempotencyConflict",
    "JobEnded",
    "JobInterrupted",
    "JobNotFound",
    "JobRunnerLost",
    "JobUnfit",
    "JobUnsendable",
    "LeaseError",
    "LeaseInterrupt",
    "LeaseLost",
    "LeasedTask",
    "PayloadTooLarge",
    "ResultNotSerialisable",
    "SchemaMismatch",
    "SettingError",
    "StaleWrite",
    "StoreError",
    "StoreUnavailable",
    "current_lease",
    "install",
]
