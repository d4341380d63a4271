"""What is recorded of a body's exception."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from celery_lease.exceptions import PayloadTooLarge, ResultNotSerialisable
from celery_lease.outcomes import (
    MESSAGE_CHARACTERS,
    TRACEBACK_CHARACTERS,
    failure_of,
    type_name,
)


class SoftTimeLimitExceeded(Exception):
    """Named like billiard's, which floor 1 does not import."""


class Unprintable(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def validation_error() -> ValidationError:
    class Order(BaseModel):
        number: int

    with pytest.raises(ValidationError) as caught:
        Order(number="seven")  # type: ignore[arg-type]  # the point of the test
    return caught.value


@pytest.mark.parametrize(
    ("error", "failure_class", "retryable"),
    [
        (ValueError("x"), "error", True),
        (MemoryError(), "memory", True),
        (SoftTimeLimitExceeded(), "time_limit", True),
        (PayloadTooLarge("result", 2, 1, "lease_max_result_bytes", "t"), "invalid", False),
        (ResultNotSerialisable("t", "json", "no"), "invalid", False),
    ],
)
def test_an_exception_has_a_class(
    error: Exception,
    failure_class: str,
    retryable: bool,  # noqa: FBT001  a column of the table above
) -> None:
    failure = failure_of(error)

    assert (failure.failure_class, failure.retryable) == (failure_class, retryable)


def test_a_pydantic_validation_error_is_invalid_since_the_same_input_fails_again() -> None:
    failure = failure_of(validation_error())

    assert (failure.failure_class, failure.retryable) == ("invalid", False)


def test_a_built_in_exception_is_named_without_its_module() -> None:
    assert type_name(ValueError()) == "ValueError"
    assert type_name(Unprintable()) == f"{__name__}.Unprintable"


def test_long_texts_are_cut_to_the_start_of_the_message_and_the_end_of_the_traceback() -> None:
    with pytest.raises(ValueError, match="mmm") as caught:
        raise ValueError("m" * (TRACEBACK_CHARACTERS + MESSAGE_CHARACTERS))

    failure = failure_of(caught.value)

    assert failure.error_message == "m" * MESSAGE_CHARACTERS
    assert failure.traceback is not None
    assert len(failure.traceback) == TRACEBACK_CHARACTERS


def test_an_exception_without_a_text_is_recorded_all_the_same() -> None:
    failure = failure_of(Unprintable())

    assert failure.error_message == "<its text cannot be made: RuntimeError>"
    assert failure.traceback
