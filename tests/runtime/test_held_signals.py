"""Signals that wait: counted holds, what is dropped, and whose handlers are left alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from celery_lease import bookkeeping
from celery_lease.held_signals import hold, let_go
from tests.support.waiting import eventually

LIMIT, STOP = signal.SIGUSR1, signal.SIGTERM
BOTH = (STOP, LIMIT)


@pytest.fixture
def struck() -> Iterator[list[int]]:
    """What the user's handlers have been called with."""
    struck: list[int] = []

    def handle(number: int, _frame: object) -> None:
        struck.append(number)

    before = {number: signal.signal(number, handle) for number in BOTH}
    yield struck
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_comes_meanwhile_strikes_at_the_end(struck: list[int]) -> None:
    assert hold(BOTH)
    signal.raise_signal(LIMIT)
    signal.raise_signal(STOP)
    assert struck == []

    let_go(BOTH)

    assert sorted(struck) == sorted(BOTH)
    signal.raise_signal(LIMIT)
    assert struck[2:] == [LIMIT]


def test_holds_may_overlap_in_any_order(struck: list[int]) -> None:
    """A claim's, and that of the bookkeeping of the replay it turns out to be."""
    hold({LIMIT})
    hold(BOTH)
    signal.raise_signal(LIMIT)
    let_go({LIMIT})
    assert struck == []

    let_go(BOTH)

    assert struck == [LIMIT]
    signal.raise_signal(LIMIT)
    assert struck == [LIMIT, LIMIT]


def test_what_is_dropped_is_forgotten_and_the_next_one_strikes(struck: list[int]) -> None:
    hold(BOTH)
    signal.raise_signal(LIMIT)
    signal.raise_signal(STOP)

    let_go(BOTH, dropped={LIMIT})

    assert struck == [STOP]
    signal.raise_signal(LIMIT)
    assert struck == [STOP, LIMIT]


def test_one_that_is_sent_while_another_thread_runs_waits_too(struck: list[int]) -> None:
    """A mask would have that thread take it, and the main thread raise it."""
    hold(BOTH)
    thread = threading.Thread(target=os.kill, args=(os.getpid(), LIMIT))
    thread.start()
    thread.join()
    for _ in range(1000):
        # Instructions between which Python would call the handler.
        assert struck == []

    let_go(BOTH)

    eventually(lambda: struck == [LIMIT])


def test_another_thread_holds_nothing(struck: list[int]) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(hold(BOTH)))
    thread.start()
    thread.join()

    signal.raise_signal(LIMIT)

    assert (answers, struck) == ([False], [LIMIT])


def test_a_signal_that_is_ignored_is_ignored_again(struck: list[int]) -> None:
    signal.signal(STOP, signal.SIG_IGN)

    hold(BOTH)
    signal.raise_signal(STOP)
    let_go(BOTH)

    assert signal.getsignal(STOP) is signal.SIG_IGN
    assert struck == []


def test_bookkeeping_that_is_begun_twice_is_ended_once(struck: list[int]) -> None:
    bookkeeping.begin()
    bookkeeping.begin()
    signal.raise_signal(STOP)
    signal.raise_signal(LIMIT)
    assert struck == []

    bookkeeping._end()

    # A limit of a body that is over limits nothing.
    assert struck == [STOP]
    bookkeeping._end()
    signal.raise_signal(LIMIT)
    assert struck == [STOP, LIMIT]
