"""When a body counts as stalled: time is an argument."""

from __future__ import annotations

import math

from celery_lease.stall import StallWatch


def test_silence_counts_from_the_start_of_the_attempt() -> None:
    watch = StallWatch(10, began_at=100)

    assert watch.stalls_at == 110
    assert not watch.is_stalled(109.9)
    assert watch.is_stalled(110)
    assert watch.silence_seconds(103) == 3


def test_without_a_timeout_nothing_stalls() -> None:
    watch = StallWatch(None, began_at=0)

    assert watch.stalls_at == math.inf
    assert not watch.is_stalled(1e9)


def test_only_another_value_is_progress() -> None:
    watch = StallWatch(10, began_at=0)

    watch.report("1", 4)
    assert watch.stalls_at == 14
    watch.report("1", 8)
    assert watch.stalls_at == 14
    watch.report("2", 9)
    assert watch.stalls_at == 19


def test_a_value_that_was_reported_before_another_one_is_progress_again() -> None:
    # A body that works in rounds counts from the start in each.
    watch = StallWatch(10, began_at=0)

    for instant, value in enumerate(["1", "2", "1", "2"]):
        watch.report(value, instant)

    assert watch.stalls_at == 13


def test_a_checkpoint_is_progress_even_if_it_is_the_same() -> None:
    watch = StallWatch(10, began_at=0)

    watch.move(5)
    watch.move(7)

    assert watch.stalls_at == 17


def test_time_in_which_the_process_did_not_run_is_left_out() -> None:
    watch = StallWatch(10, began_at=0)

    watch.forgive(60, 3, now=65)

    assert watch.silence_seconds(65) == 2
    assert not watch.is_stalled(72)
    assert watch.is_stalled(73)


def test_what_is_not_known_is_forgiven_once_between_two_reports() -> None:
    # Or a body in one starving call after another would never count as stalled.
    watch = StallWatch(10, began_at=0)

    watch.forgive(1, 4, now=5)
    assert watch.silence_seconds(5) == 0
    watch.forgive(1, 4, now=10)
    assert watch.silence_seconds(10) == 4

    watch.report("1", 11)
    watch.forgive(1, 4, now=16)
    assert watch.silence_seconds(16) == 0


def test_more_is_never_forgiven_than_there_was() -> None:
    watch = StallWatch(10, began_at=0)
    watch.report("1", 4)

    watch.forgive(3, 3, now=5)

    assert watch.silence_seconds(5) == 0
