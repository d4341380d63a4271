"""extend: leases that ended while no pass was made get a full lease from now, once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from celery_lease.store import queries, transitions
from celery_lease.store.dialects import Later, clock
from tests.store.builders import (
    NO_BACKOFF,
    ROUNDS,
    about,
    at_once,
    attempt_row,
    changes_of,
    errors_of,
    expired,
    holding,
    in_background,
    lock_attempt,
    move_back,
    move_passes_back,
    nothing_changes,
    parting,
    renewal,
    running,
    store_now,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from celery_lease.store.engine import Store


def test_a_lease_that_has_ended_gets_a_full_lease_from_now(store: Store) -> None:
    lease = expired(store)
    now = store_now(store)

    with changes_of(store) as changes:
        count = transitions.extend(store, ended_since=None)

    assert count == 1
    assert about(changes.pop("attempt job 1.lease_expires_at"), now, seconds=30)
    assert about(changes.pop("attempt job 1.extended_at"), now)
    assert changes == {}
    assert transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF) == []
    assert transitions.renew(store, [renewal(lease)]).renewed == {("job", 1)}


def test_live_and_ended_attempts_are_left_alone(store: Store) -> None:
    running(store, "live")
    released = expired(store, "released")
    transitions.release(store, released, parting())

    with nothing_changes(store):
        count = transitions.extend(store, ended_since=None)

    assert count == 0


def test_a_lease_is_extended_once_between_two_renewals(store: Store) -> None:
    lease = expired(store)
    transitions.extend(store, ended_since=None)
    move_back(store, "job", seconds=31)

    with nothing_changes(store):
        again = transitions.extend(store, ended_since=None)

    assert again == 0
    assert len(transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)) == 1
    assert attempt_row(store, lease)["ended_at"] is not None


def test_a_lease_that_was_renewed_since_may_be_extended_again(store: Store) -> None:
    lease = expired(store)
    transitions.extend(store, ended_since=None)
    move_back(store, "job", seconds=5)
    transitions.renew(store, [renewal(lease)])
    move_back(store, "job", seconds=31)

    count = transitions.extend(store, ended_since=None)

    assert count == 1


def test_only_leases_that_ended_since_the_last_pass_are_extended(store: Store) -> None:
    """Who was dead before the outage is not kept by it."""
    expired(store, "before")
    move_back(store, "before", seconds=100)
    transitions.record_pass(store, counts="{}", worker=None)
    move_passes_back(store, seconds=60)
    expired(store, "since")
    last = queries.last_pass(store)
    assert last is not None

    count = transitions.extend(store, ended_since=last.finished_at)

    assert count == 1
    given_on = transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    assert [one.job_id for one in given_on] == ["before"]


def test_a_lease_that_ended_in_the_moment_of_the_last_pass_is_extended(store: Store) -> None:
    lease = expired(store)
    ended = attempt_row(store, lease)["lease_expires_at"]

    after = transitions.extend(store, ended_since=ended + timedelta(milliseconds=1))
    exactly = transitions.extend(store, ended_since=ended)

    assert (after, exactly) == (0, 1)


def test_many_leases_are_extended_together_by_their_own_lengths(store: Store) -> None:
    leases = [running(store, f"job{n}", lease_seconds=10.0 + n) for n in range(20)]
    for lease in leases:
        move_back(store, lease.job_id, seconds=60)
    now = store_now(store)

    count = transitions.extend(store, ended_since=None)

    assert count == 20
    assert about(attempt_row(store, leases[0])["lease_expires_at"], now, seconds=10)
    assert about(attempt_row(store, leases[19])["lease_expires_at"], now, seconds=29)


def test_a_lease_whose_row_is_locked_is_skipped(row_store: Store) -> None:
    locked = expired(row_store, "locked")
    expired(row_store, "free")

    with holding(row_store, lock_attempt(row_store, locked)):
        count = transitions.extend(row_store, ended_since=None)

    assert count == 1
    assert attempt_row(row_store, locked)["extended_at"] is None


def test_a_lease_that_is_renewed_while_extend_looks_at_it_is_not_extended(store: Store) -> None:
    lease = expired(store)
    attempt = store.tables.attempt

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(lambda: transitions.extend(store, ended_since=None)) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.1)
            holder.execute(attempt.update().values(lease_expires_at=Later(clock(), 30)))
            holder.commit()
            count = answer()

    assert count == 0
    assert attempt_row(store, lease)["extended_at"] is None


@ROUNDS
def test_of_two_passes_at_once_each_lease_is_extended_by_one(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        for n in range(5):
            expired(store, f"job{number}-{n}")

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            counts = at_once(
                *[lambda s=s: transitions.extend(s, ended_since=None) for s in (store, other_store)]
            )

        assert errors == other_errors == []
        assert sum(counts) == 5
        assert transitions.extend(store, ended_since=None) == 0
