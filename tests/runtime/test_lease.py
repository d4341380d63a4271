"""The lease as a body sees it: a deadline that needs no thread, and reports that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_lease.exceptions import HandOver, LeaseLost, PayloadTooLarge
from celery_lease.interrupt import here
from celery_lease.lease import NULL_LEASE, Lease, current_lease, in_force
from tests.runtime.fakes import Clock, make_lease


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_deadline_is_before_the_end_that_the_store_counts(clock: Clock) -> None:
    lease = make_lease(clock, seconds=30)

    assert clock() < lease.deadline < lease.surely_ended_at == clock() + 30


def test_it_counts_from_the_send_of_the_renewal_and_not_from_its_reply(clock: Clock) -> None:
    lease = make_lease(clock, seconds=30)
    clock.move(10)
    sent_at = clock()
    clock.move(8)

    lease.renewed(sent_at)

    assert lease.surely_ended_at == sent_at + 30


def test_a_reply_that_comes_out_of_order_never_shortens_it(clock: Clock) -> None:
    lease = make_lease(clock)
    end = lease.surely_ended_at

    lease.renewed(clock() - 20)

    assert lease.surely_ended_at == end


def test_past_the_deadline_check_raises_although_nobody_said_that_it_is_lost(clock: Clock) -> None:
    # B091, B092
    lease = make_lease(clock, seconds=30)
    lease.check()

    clock.move(30)

    assert lease.lost
    with pytest.raises(LeaseLost, match="no renewal was accepted in time"):
        lease.check()


def test_once_it_has_raised_a_late_renewal_does_not_bring_it_back(clock: Clock) -> None:
    lease = make_lease(clock, seconds=30)
    clock.move(30)
    with pytest.raises(LeaseLost):
        lease.check()

    lease.renewed(clock())

    assert lease.lost
    assert lease.surrendered
    with pytest.raises(LeaseLost):
        lease.check()
    # It left the heartbeat once, before the body heard of it.
    assert lease.surrenders == [lease]  # type: ignore[attr-defined]


def test_a_loss_that_the_store_reported_is_told_with_its_reason(clock: Clock) -> None:
    lease = make_lease(clock)

    lease.mark_lost("the attempt is expired")

    with pytest.raises(LeaseLost, match="lease 1 of job job is lost: the attempt is expired"):
        lease.check()


def test_reports_are_taken_once_and_given_back_unless_the_body_has_newer(clock: Clock) -> None:
    lease = make_lease(clock)
    lease.progress(1, 10)
    lease.checkpoint({"page": 1})

    first = lease.renewal()
    assert (first.progress, first.checkpoint) == ('{"done":1,"total":10}', '{"page":1}')
    assert lease.renewal().checkpoint is None

    lease.checkpoint({"page": 2})
    lease.give_back(first)

    again = lease.renewal()
    assert (again.progress, again.checkpoint) == ('{"done":1,"total":10}', '{"page":2}')
    assert lease.last_checkpoint == {"page": 2}


def test_what_the_body_reported_last_is_written_at_its_end_even_if_a_renewal_has_it(
    clock: Clock,
) -> None:
    # That renewal may still fail, and the next attempt goes on from the checkpoint.
    lease = make_lease(clock)
    assert lease.newest_reports() == (None, None)
    lease.progress(1)
    lease.checkpoint("a")

    lease.renewal()

    assert lease.newest_reports() == ('{"done":1,"total":null}', '"a"')


def test_an_equal_report_is_written_once_for_each_time_it_is_made(clock: Clock) -> None:
    lease = make_lease(clock)
    lease.checkpoint(1)
    assert lease.renewal().checkpoint == "1"
    assert lease.renewal().checkpoint is None

    lease.checkpoint(1)

    assert lease.renewal().checkpoint == "1"


# --- interruption -------------------------------------------------------------------------------


def running(lease: Lease, body: Callable[[], object]) -> object:
    return lease.run(body, here(lease.job_id, lease.fencing_token, is_wanted=True))


def lose(lease: Lease) -> None:
    lease.mark_lost("the attempt is expired")
    lease.interrupt()


def test_a_lease_that_is_lost_before_its_body_begins_begins_none(clock: Clock) -> None:
    lease = make_lease(clock)
    lose(lease)
    began: list[int] = []

    with pytest.raises(LeaseLost, match="the attempt is expired"):
        running(lease, lambda: began.append(1))

    assert began == []


def test_a_commit_of_ours_inside_the_body_is_over_before_it_strikes(clock: Clock) -> None:
    lease = make_lease(clock)
    steps: list[str] = []

    def body() -> None:
        with lease.uninterrupted():
            lose(lease)
            steps.append("committed")
        steps.append("went on")

    with pytest.raises(LeaseLost):
        running(lease, body)

    assert steps == ["committed"]


def test_after_the_attempt_has_ended_inside_its_body_nothing_strikes(clock: Clock) -> None:
    lease = make_lease(clock)

    def body() -> str:
        with lease.uninterrupted():
            lease.ended_by = "retried"
        lose(lease)
        return "went on"

    assert running(lease, body) == "went on"


def test_check_raises_once_and_is_not_struck_while_it_gives_the_lease_up(clock: Clock) -> None:
    lease = make_lease(clock)

    def surrender(_: Lease) -> None:
        lose(lease)

    lease._on_surrender = surrender

    def body() -> None:
        lease.mark_lost("gone")
        try:
            lease.check()
        finally:
            assert lease.surrendered

    with pytest.raises(LeaseLost, match="gone"):
        running(lease, body)


def test_a_checkpoint_that_is_no_json_is_refused_at_once(clock: Clock) -> None:
    lease = make_lease(clock)

    with pytest.raises(TypeError):
        lease.checkpoint(object())

    assert lease.last_checkpoint is None


def test_release_is_a_hand_over(clock: Clock) -> None:
    with pytest.raises(HandOver):
        make_lease(clock).release()


def test_no_base_exception_of_ours_is_caught_by_except_exception() -> None:
    assert not issubclass(LeaseLost, Exception)
    assert not issubclass(HandOver, Exception)


def test_a_checkpoint_over_the_limit_is_refused_at_once_and_the_one_before_stays(
    clock: Clock,
) -> None:
    lease = make_lease(clock, max_checkpoint_bytes=10)
    lease.checkpoint("x" * 8)

    with pytest.raises(PayloadTooLarge, match="11 bytes, lease_max_result_bytes"):
        lease.checkpoint("x" * 9)

    assert lease.last_checkpoint == "x" * 8
    assert lease.renewal().checkpoint == f'"{"x" * 8}"'


def test_the_null_lease_does_nothing() -> None:
    NULL_LEASE.check()
    NULL_LEASE.progress(1, 2)
    NULL_LEASE.checkpoint(object())
    assert (NULL_LEASE.is_held, NULL_LEASE.lost, NULL_LEASE.fencing_token) == (False, False, 0)
    assert NULL_LEASE.last_checkpoint is None


def test_the_current_lease_ends_with_its_body(clock: Clock) -> None:
    lease = make_lease(clock)

    with in_force(lease):
        assert current_lease() is lease
        with in_force(NULL_LEASE):
            assert current_lease() is NULL_LEASE
        assert current_lease() is lease
    assert current_lease() is NULL_LEASE
