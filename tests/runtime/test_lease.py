"""The lease as a body sees it: a deadline that needs no thread, and reports that wait."""

from __future__ import annotations

import pytest

from celery_lease.exceptions import HandOver, LeaseLost
from celery_lease.lease import NULL_LEASE, current_lease, in_force
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
