"""Waiting for something to become true, with a deadline: what tests do instead of sleeping.

Not a retry: what is polled must be safe to ask many times.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def eventually(
    ask: Callable[[], T],
    *,
    timeout: float = 10.0,
    interval: float = 0.02,
    what: str | Callable[[], str] = "",
) -> T:
    """Ask again and again until the answer is true, and return that answer.

    Args:
        ask: returns something true when it is so. An ``AssertionError`` counts as "not yet".
        timeout: seconds until this gives up. It is asked once more after the last pause, so that a
            test stopped by a busy machine is not failed by it.
        interval: seconds between two questions.
        what: for the message; a function is called at the end (say, to read a log).

    Returns:
        The first true answer.

    Raises:
        AssertionError: not true in time; from the last ``AssertionError`` of ``ask``, if any.
    """
    deadline = time.monotonic() + timeout
    while True:
        last_try = time.monotonic() >= deadline
        problem: AssertionError | None = None
        try:
            answer = ask()
        except AssertionError as error:
            problem = error
        else:
            if answer:
                return answer
        if last_try:
            said = what() if callable(what) else what
            message = f"not so within {timeout:g} s: {said or getattr(ask, '__name__', ask)}"
            raise AssertionError(message) from problem
        time.sleep(interval)


def never(ask: Callable[[], object], *, during: float, what: str = "") -> None:
    """Assert that the answer stays false for so many seconds.

    The price of it is the whole time: use it only where nothing else tells.
    """
    end = time.monotonic() + during
    while time.monotonic() < end:
        answer = ask()
        if answer:
            message = f"happened, and should not: {what or getattr(ask, '__name__', ask)}: {answer}"
            raise AssertionError(message)
        time.sleep(0.02)
