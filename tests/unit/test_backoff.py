"""How long to wait, and what becomes of a job whose runner vanished."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_lease.backoff import (
    MAX_ATTEMPTS,
    RUNNER_LOST,
    STOPPED,
    UNCOUNTED_ENDS,
    AfterLoss,
    after_loss,
    full_jitter,
    is_loss_counted,
    jittered,
    local_deadline,
    lost_delay_seconds,
    redispatch_gap_seconds,
)
from celery_lease.states import JobState, LossCause, OnExpiry

SCHEDULE = (0, 1, 4, 16, 60)
RANDOM = st.floats(0, 1, exclude_max=True)


def loss(
    lost_count: int, *, max_attempts: int = 9, on_expiry: OnExpiry = OnExpiry.RETRY
) -> AfterLoss:
    return after_loss(
        lost_count=lost_count, max_attempts=max_attempts, on_expiry=on_expiry, schedule=SCHEDULE
    )


# --- the policy for a vanished runner -----------------------------------------------------------


def test_the_first_loss_queues_the_job_at_once() -> None:
    assert loss(1) == AfterLoss(JobState.QUEUED, 0.0, RUNNER_LOST)


@pytest.mark.parametrize(("lost_count", "delay_seconds"), [(2, 1.0), (3, 4.0), (4, 16.0)])
def test_later_losses_wait_by_the_schedule(lost_count: int, delay_seconds: float) -> None:
    assert loss(lost_count) == AfterLoss(JobState.RETRY_WAIT, delay_seconds, RUNNER_LOST)


def test_a_job_never_waits_for_the_reaper_without_a_delay() -> None:
    after = after_loss(lost_count=2, max_attempts=9, on_expiry=OnExpiry.RETRY, schedule=(0, 0))

    assert after.state is JobState.QUEUED


def test_a_job_whose_policy_is_hold_waits_for_a_person_at_the_first_loss() -> None:
    assert loss(1, on_expiry=OnExpiry.HOLD) == AfterLoss(JobState.HELD, 0.0, RUNNER_LOST)


def test_a_job_whose_policy_is_fail_ends_at_the_first_loss() -> None:
    assert loss(1, on_expiry=OnExpiry.FAIL) == AfterLoss(JobState.FAILED, 0.0, RUNNER_LOST)


@pytest.mark.parametrize("on_expiry", list(OnExpiry))
@pytest.mark.parametrize(("lost_count", "max_attempts"), [(1, 1), (3, 3), (4, 3)])
def test_the_last_allowed_loss_interrupts_the_job_whatever_the_policy(
    on_expiry: OnExpiry, lost_count: int, max_attempts: int
) -> None:
    after = loss(lost_count, max_attempts=max_attempts, on_expiry=on_expiry)

    assert after == AfterLoss(JobState.INTERRUPTED, 0.0, MAX_ATTEMPTS)


def test_one_loss_less_than_allowed_does_not_interrupt_the_job() -> None:
    assert loss(2, max_attempts=3).state is JobState.RETRY_WAIT


def test_a_loss_that_is_not_counted_queues_the_job_at_once_and_never_interrupts_it() -> None:
    after = after_loss(
        lost_count=5,
        max_attempts=1,
        on_expiry=OnExpiry.RETRY,
        schedule=SCHEDULE,
        is_counted=False,
    )

    assert after == AfterLoss(JobState.QUEUED, 0.0, STOPPED, is_counted=False)


@pytest.mark.parametrize(
    ("on_expiry", "state"), [(OnExpiry.HOLD, JobState.HELD), (OnExpiry.FAIL, JobState.FAILED)]
)
def test_a_loss_that_is_not_counted_is_held_or_failed_like_any_other(
    on_expiry: OnExpiry, state: JobState
) -> None:
    after = after_loss(
        lost_count=0, max_attempts=1, on_expiry=on_expiry, schedule=SCHEDULE, is_counted=False
    )

    assert after == AfterLoss(state, 0.0, RUNNER_LOST, is_counted=False)


@pytest.mark.parametrize(
    ("cause", "stop_requested", "uncounted_ends", "is_counted"),
    [
        (LossCause.LOST, False, 0, True),
        (LossCause.EXPIRED, False, 0, True),
        (LossCause.LOST, True, 0, False),
        (LossCause.EXPIRED, True, UNCOUNTED_ENDS - 1, False),
        (LossCause.EXPIRED, True, UNCOUNTED_ENDS, True),
        (LossCause.LOST, True, UNCOUNTED_ENDS + 1, True),
        (LossCause.STALLED, True, 0, True),
    ],
)
def test_only_a_runner_that_was_asked_to_stop_is_spared_and_only_so_often(
    cause: LossCause, *, stop_requested: bool, uncounted_ends: int, is_counted: bool
) -> None:
    counted = is_loss_counted(
        cause=cause, stop_requested=stop_requested, uncounted_ends=uncounted_ends
    )

    assert counted is is_counted


# --- delays -------------------------------------------------------------------------------------


def test_the_last_delay_of_the_schedule_repeats() -> None:
    assert [lost_delay_seconds(SCHEDULE, n) for n in (1, 5, 6, 1000)] == [0.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize(("schedule", "lost_count"), [(SCHEDULE, 0), (SCHEDULE, -1), ((), 1)])
def test_a_loss_that_was_not_counted_has_no_delay(
    schedule: tuple[float, ...], lost_count: int
) -> None:
    with pytest.raises(ValueError, match="no delay for loss"):
        lost_delay_seconds(schedule, lost_count)


def test_the_gap_before_the_next_dispatch_doubles_up_to_a_cap() -> None:
    waited, gaps = 0.0, []
    for _ in range(9):
        gaps.append(redispatch_gap_seconds(300.0, waited))
        waited += gaps[-1]

    assert gaps == [300.0 * n for n in (1, 2, 4, 8, 16, 32, 64, 64, 64)]


def test_a_message_that_was_sent_before_its_due_time_has_the_first_gap() -> None:
    assert redispatch_gap_seconds(300.0, -5000.0) == 300.0


def test_the_back_off_doubles_up_to_a_cap() -> None:
    def nearly_one() -> float:
        return 1.0

    waits = [full_jitter(1.0, 10.0, attempt, nearly_one) for attempt in (0, 1, 2, 3, 4, 100_000)]

    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@given(base=st.floats(0, 1e6), cap=st.floats(0, 1e6), attempt=st.integers(0, 10**6), r=RANDOM)
def test_a_jittered_back_off_lies_between_nothing_and_its_cap(
    base: float, cap: float, attempt: int, r: float
) -> None:
    assert 0 <= full_jitter(base, cap, attempt, lambda: r) <= cap


def test_jitter_moves_by_the_fraction_in_both_directions() -> None:
    assert jittered(10.0, 0.1, lambda: 0.0) == 9.0
    assert jittered(10.0, 0.1, lambda: 0.5) == 10.0
    assert jittered(10.0, 0.1, lambda: 1.0) == 11.0


# --- the runner's own deadline ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease_seconds", "margin_seconds"),
    [(0.5, 0.05), (1.0, 0.05), (30.0, 1.5), (40.0, 2.0), (86400.0, 2.0)],
)
def test_the_local_deadline_is_a_margin_before_the_lease_ends(
    lease_seconds: float, margin_seconds: float
) -> None:
    deadline = local_deadline(1000.0, lease_seconds)

    assert deadline == pytest.approx(1000.0 + lease_seconds - margin_seconds)


@given(sent_at=st.floats(0, 1e9), lease_seconds=st.floats(0.01, 86400))
def test_the_runner_stops_before_the_store_may_give_the_job_on(
    sent_at: float, lease_seconds: float
) -> None:
    assert local_deadline(sent_at, lease_seconds) < sent_at + lease_seconds
