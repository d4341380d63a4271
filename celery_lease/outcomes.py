"""What a body's exception says about the job: its class, and whether a retry could help.

Pure: no store, no Celery. The whole table of what a body can raise is in docs/guarantees.md;
``task`` acts on it.
"""

from __future__ import annotations

import traceback as tracebacks

from celery_lease.exceptions import JobUnfit, PayloadTooLarge, ResultNotSerialisable
from celery_lease.records import Failure

#: Texts longer than this are cut: the beginning of a message, the end of a traceback.
MESSAGE_CHARACTERS = 8_192
TRACEBACK_CHARACTERS = 65_536


def failure_of(error: BaseException) -> Failure:
    """Return what is recorded of an exception."""
    failure_class, retryable = _class_of(error)
    return Failure(
        error_type=type_name(error),
        error_message=_text_of(error)[:MESSAGE_CHARACTERS],
        traceback=_traceback_of(error),
        failure_class=failure_class,
        retryable=retryable,
    )


def type_name(error: BaseException) -> str:
    """Return ``module.Class`` of an exception, the bare class name of a built-in one."""
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )


def _class_of(error: BaseException) -> tuple[str, bool]:
    if isinstance(error, JobUnfit | PayloadTooLarge | ResultNotSerialisable) or _is_validation(
        error
    ):
        # The same arguments give the same error: a retry cannot help (seed S1).
        return "invalid", False
    if isinstance(error, MemoryError):
        return "memory", True
    if type(error).__name__ in ("SoftTimeLimitExceeded", "TimeLimitExceeded"):
        return "time_limit", True
    return "error", True


def _is_validation(error: BaseException) -> bool:
    """Tell a pydantic validation error without importing an optional package (B115)."""
    kind = type(error)
    return kind.__name__ == "ValidationError" and kind.__module__.split(".")[0].startswith(
        "pydantic"
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001  a user's __str__ may do anything
        return f"<its text cannot be made: {type(trouble).__name__}>"


def _traceback_of(error: BaseException) -> str:
    try:
        text = "".join(tracebacks.format_exception(type(error), error, error.__traceback__))
    except Exception as trouble:  # noqa: BLE001  a user's __str__ may do anything
        return f"<its traceback cannot be made: {type(trouble).__name__}>"
    return text[-TRACEBACK_CHARACTERS:]
