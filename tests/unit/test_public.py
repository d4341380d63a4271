"""The public surface: what a user imports, and that exceptions survive pickling."""

from __future__ import annotations

import pickle

import pytest

import celery_lease
from celery_lease import exceptions

EXAMPLES = [
    exceptions.SettingError(["lease_duration is -1: give seconds above 0"]),
    exceptions.StoreUnavailable("postgresql://u:***@h/d", "refused"),
    exceptions.ChordClaimed("c", "j"),
    exceptions.SchemaMismatch("sqlite:///x", None, "0001", "migrate"),
    exceptions.PayloadTooLarge("result", 2, 1, "lease_max_result_bytes", "t"),
    exceptions.ResultNotSerialisable("t", "json", "no"),
    exceptions.JobNotFound("j"),
    exceptions.IdempotencyConflict("t", "key", "j"),
    exceptions.StaleWrite("j", 3),
    exceptions.JobInterrupted("job j: 3 runners vanished"),
    exceptions.JobRunnerLost("x"),
    exceptions.JobUnfit("x"),
    exceptions.DeadlineExceeded("x"),
    exceptions.LeaseLost("j", 3, "expired"),
    exceptions.HandOver(),
]


def test_the_public_names_are_sorted_and_all_there() -> None:
    names = celery_lease.__all__

    assert names == sorted(names)
    assert all(hasattr(celery_lease, name) for name in names)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_exception_keeps_its_facts_through_pickle(error: BaseException) -> None:
    # A result backend or a pool's pipe may carry it.
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  made two words before

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_every_exception_says_when_it_is_raised() -> None:
    classes = [
        value
        for value in vars(exceptions).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    ]

    for kind in classes:
        assert kind.__doc__ is not None
        assert kind.__doc__.startswith(("Raised when", "Root of")), kind


def test_what_interrupts_a_body_passes_its_except_exception() -> None:
    assert not issubclass(celery_lease.LeaseLost, Exception)
    assert not issubclass(celery_lease.HandOver, Exception)
