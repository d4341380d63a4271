"""renew: the expiry of all leases of a process moves, on the attempt rows alone."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Accepted, Held, Renewed, Stale
from celery_lease.states import AttemptState, JobState, LossCause
from celery_lease.store import transitions
from celery_lease.store.dialects import clock
from celery_lease.store.transitions.renewal import REPORT_BYTES
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    ONE,
    OTHER,
    ROUNDS,
    about,
    at_once,
    attempt_row,
    changes_of,
    claimed,
    errors_of,
    expired,
    holding,
    in_background,
    lock_attempt,
    lock_job,
    move_back,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    statements_of,
    store_now,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies


def test_a_renewal_moves_the_expiry_and_makes_the_attempt_active(store: Store) -> None:
    lease = running(store, lease_seconds=40.0)
    move_back(store, "job", seconds=10)
    now = store_now(store)

    with changes_of(store) as changes:
        answer = transitions.renew(store, [renewal(lease)])

    assert answer == Renewed(frozenset({("job", 1)}), {}, frozenset())
    assert about(changes.pop("attempt job 1.lease_expires_at"), now, seconds=40)
    assert about(changes.pop("attempt job 1.last_renewed_at"), now)
    assert changes == {"attempt job 1.state": "active", "attempt job 1.renewal_count": 1}


def test_progress_and_checkpoint_ride_along(store: Store) -> None:
    first, second, third = (running(store, name) for name in ("a", "b", "c"))

    transitions.renew(
        store,
        [
            renewal(first, progress='{"done": 1}'),
            renewal(second, checkpoint="5"),
            renewal(third),
        ],
    )

    texts = {
        lease.job_id: (
            attempt_row(store, lease)["progress"],
            attempt_row(store, lease)["checkpoint"],
        )
        for lease in (first, second, third)
    }
    assert texts == {"a": ('{"done": 1}', None), "b": (None, "5"), "c": (None, None)}


def test_unchanged_progress_and_checkpoint_stay(store: Store) -> None:
    lease = running(store)
    transitions.renew(store, [renewal(lease, progress="1", checkpoint="2")])

    transitions.renew(store, [renewal(lease)])

    assert attempt_row(store, lease)["progress"] == "1"
    assert attempt_row(store, lease)["checkpoint"] == "2"
    assert attempt_row(store, lease)["renewal_count"] == 2


@pytest.mark.parametrize(
    ("flag", "column"),
    [("stop_requested", "stop_requested_at"), ("acknowledged", "acknowledged_at")],
)
def test_what_a_renewal_says_once_is_written_once_and_for_its_own_lease(
    store: Store, flag: str, column: str
) -> None:
    lease, other = running(store), running(store, "other")
    now = store_now(store)

    with changes_of(store) as changes:
        transitions.renew(store, [renewal(lease, **{flag: True}), renewal(other)])

    assert about(changes[f"attempt job 1.{column}"], now)
    written = {name.partition(".")[2] for name in changes}
    assert written - {"lease_expires_at", "last_renewed_at"} == {column, "state", "renewal_count"}
    assert attempt_row(store, other)[column] is None
    move_back(store, "job", seconds=10)
    first = attempt_row(store, lease)[column]
    transitions.renew(store, [renewal(other, **{flag: True}), renewal(lease, **{flag: True})])
    assert attempt_row(store, lease)[column] == first
    assert about(attempt_row(store, other)[column], now)


def test_both_are_written_with_what_else_a_renewal_says(store: Store) -> None:
    one, other = running(store, "one"), running(store, "other")

    transitions.renew(
        store,
        [
            renewal(one, stop_requested=True, checkpoint="5"),
            renewal(other, acknowledged=True, progress="1"),
        ],
    )

    first, second = attempt_row(store, one), attempt_row(store, other)
    assert (first["acknowledged_at"], second["stop_requested_at"]) == (None, None)
    assert None not in (first["stop_requested_at"], second["acknowledged_at"])
    assert (first["checkpoint"], second["progress"]) == ("5", "1")


def test_a_renewal_that_says_nothing_of_a_stop_costs_nothing_for_it(store: Store) -> None:
    lease = running(store)

    with statements_of(store) as silent:
        transitions.renew(store, [renewal(lease, progress="1")])
    with statements_of(store) as said:
        transitions.renew(store, [renewal(lease, progress="1", stop_requested=True)])

    assert not any("stop_requested_at" in s or "acknowledged_at" in s for s, _ in silent)
    assert len(said) == len(silent)
    assert any("stop_requested_at" in statement for statement, _ in said)


def test_two_attempts_of_one_job_in_one_batch_do_not_mix_their_texts(store: Store) -> None:
    """A process that lost a job and claimed it again still asks for the old lease once."""
    stale = running(store)
    transitions.lost(store, stale, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
    lease = claimed(store)

    answer = transitions.renew(
        store,
        [
            renewal(lease, progress="mine", checkpoint="mine"),
            renewal(stale, progress="stale", checkpoint="stale", stop_requested=True),
        ],
    )

    assert answer.renewed == {("job", 2)}
    assert answer.lost == {("job", 1): AttemptState.LOST}
    assert attempt_row(store, lease)["progress"] == "mine"
    assert attempt_row(store, lease)["checkpoint"] == "mine"
    assert attempt_row(store, lease)["stop_requested_at"] is None
    assert attempt_row(store, stale)["progress"] is None


def test_nothing_to_renew_asks_nothing(store: Store) -> None:
    with statements_of(store) as seen:
        answer = transitions.renew(store, [])

    assert answer == Renewed(frozenset(), {}, frozenset())
    assert seen == []


def test_many_leases_are_renewed_together(store: Store) -> None:
    leases = [running(store, f"job{number}") for number in range(60)]
    for lease in leases:
        move_back(store, lease.job_id, seconds=10)
    before = rows(store)["attempt"]

    answer = transitions.renew(store, [renewal(lease, progress=lease.job_id) for lease in leases])

    assert answer.renewed == {(lease.job_id, 1) for lease in leases}
    for key, attempt in rows(store)["attempt"].items():
        assert attempt["lease_expires_at"] > before[key]["lease_expires_at"]
        assert attempt["progress"] == key[0]


def test_a_renewal_names_every_lease_once_however_many(store: Store) -> None:
    lease = running(store)
    gone = [Held(f"gone{number}", 1, ONE) for number in range(1500)]

    answer = transitions.renew(store, [renewal(lease), *map(renewal, gone)])

    assert answer.renewed == {("job", 1)}
    assert answer.lost == dict.fromkeys([(one.job_id, 1) for one in gone])
    assert answer.unanswered == frozenset()


def test_a_renewal_after_the_end_of_the_lease_succeeds_while_nobody_has_acted(
    store: Store,
) -> None:
    """B098, and the other way round in the next test."""
    lease = expired(store)
    now = store_now(store)

    answer = transitions.renew(store, [renewal(lease)])

    assert answer.renewed == {("job", 1)}
    assert about(attempt_row(store, lease)["lease_expires_at"], now, seconds=30)
    assert transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF) == []


def test_a_renewal_after_the_lease_was_given_on_is_lost(store: Store) -> None:
    lease = expired(store)
    transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)

    with nothing_changes(store):
        answer = transitions.renew(store, [renewal(lease)])

    assert answer == Renewed(frozenset(), {("job", 1): AttemptState.EXPIRED}, frozenset())


@pytest.mark.parametrize("end", ["release", "cancel", "lost", "complete", "deadline"])
def test_an_ended_lease_is_never_revived(store: Store, end: str) -> None:
    lease = running(store, deadline_seconds=5.0)
    if end == "release":
        transitions.release(store, lease, parting())
    elif end == "cancel":
        transitions.cancel(store, "job")
    elif end == "lost":
        transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
    elif end == "complete":
        transitions.complete(store, lease, parting(), result=None, result_type=None)
    else:
        move_back(store, "job", seconds=6)
        transitions.pass_deadline(store, limit=9)

    with nothing_changes(store):
        said = {"progress": "1", "checkpoint": "1", "stop_requested": True, "acknowledged": True}
        answer = transitions.renew(store, [renewal(lease, **said)])

    assert answer.renewed == answer.unanswered == frozenset()
    assert answer.lost == {("job", 1): AttemptState(attempt_row(store, lease)["state"])}


def test_another_processes_lease_is_not_renewed(store: Store) -> None:
    running(store)
    move_back(store, "job", seconds=10)

    with nothing_changes(store):
        answer = transitions.renew(store, [renewal(Held("job", 1, OTHER))])

    assert answer.renewed == frozenset()


@pytest.mark.parametrize("token", [0, 2])
def test_a_lease_under_another_token_is_not_renewed(store: Store, token: int) -> None:
    running(store)

    with nothing_changes(store):
        answer = transitions.renew(store, [renewal(Held("job", token, ONE))])

    assert answer == Renewed(frozenset(), {("job", token): None}, frozenset())


def test_a_renewal_whose_reply_was_lost_is_made_again(
    store: Store, lose_replies: LoseReplies
) -> None:
    lease = running(store)

    with lose_replies(store, 1):
        answer = transitions.renew(store, [renewal(lease, progress="1")])

    assert answer.renewed == {("job", 1)}
    assert attempt_row(store, lease)["progress"] == "1"


def test_a_lease_whose_row_is_locked_is_unanswered_and_the_others_are_renewed(
    row_store: Store,
) -> None:
    locked, free = running(row_store, "locked"), running(row_store, "free")

    with holding(row_store, lock_attempt(row_store, locked)):
        started = store_now(row_store)
        answer = transitions.renew(row_store, [renewal(locked), renewal(free)])
        took = (store_now(row_store) - started).total_seconds()

    assert answer == Renewed(frozenset({("free", 1)}), {}, frozenset({("locked", 1)}))
    assert attempt_row(row_store, locked)["renewal_count"] == 0
    assert took < 1.5


@pytest.mark.parametrize("how", [{}, {"read": True}], ids=["for update", "for share"])
def test_a_renewal_is_never_kept_waiting_by_whoever_holds_the_job_row(
    row_store: Store, how: dict[str, bool]
) -> None:
    """A user's fenced transaction holds it for as long as it likes."""
    lease = running(row_store)

    with holding(row_store, lock_job(row_store, **how)):
        started = store_now(row_store)
        answer = transitions.renew(row_store, [renewal(lease, progress="1")])
        took = (store_now(row_store) - started).total_seconds()

    assert answer.renewed == {("job", 1)}
    assert took < 1.5


def test_a_renewal_does_not_read_or_write_the_job_row(store: Store) -> None:
    lease = running(store)

    with statements_of(store) as seen:
        transitions.renew(store, [renewal(lease)])

    assert not any(store.tables.job.name in statement for statement, _ in seen)


def test_a_lease_that_ends_while_its_renewal_waits_is_not_renewed(store: Store) -> None:
    """The guard is asked again when the row is free."""
    lease = running(store)
    attempt = store.tables.attempt

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(lambda: transitions.renew(store, [renewal(lease)])) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.1)
            holder.execute(attempt.update().values(state="released", ended_at=clock()))
            # The job's own row, so that the two still agree.
            holder.execute(store.tables.job.update().values(state="queued", lease_owner=None))
            holder.commit()
            renewed = answer()

    assert renewed.renewed == frozenset()
    assert attempt_row(store, lease)["renewal_count"] == 0
    assert attempt_row(store, lease)["state"] == AttemptState.RELEASED


# --- raced --------------------------------------------------------------------------------------


@ROUNDS
def test_renew_against_expire_has_one_winner(store: Store, other_store: Store, rounds: int) -> None:
    for number in range(rounds):
        lease = expired(store, f"job{number}")

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            renewed, given_on = at_once(
                lambda: transitions.renew(store, [renewal(lease)]),
                lambda: transitions.expire(other_store, limit=9, lost_backoff=NO_BACKOFF),
            )

        assert errors == other_errors == []
        found = rows(store)
        job, attempt = found["job"][lease.job_id], found["attempt"][lease.job_id, 1]
        if given_on:
            assert renewed.renewed == frozenset()
            assert attempt["state"] == AttemptState.EXPIRED
            assert attempt["renewal_count"] == 0
            assert (job["state"], job["lost_count"]) == (JobState.QUEUED, 1)
        else:
            assert renewed.lost == {}
            assert attempt["ended_at"] is None
            assert (job["state"], job["lost_count"]) == (JobState.RUNNING, 0)
        transitions.cancel(store, lease.job_id)


@ROUNDS
def test_renew_against_complete_keeps_the_completion_and_never_deadlocks(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        leases = [running(store, f"job{number}-{n}") for n in range(4)]

        with errors_of(store) as errors, errors_of(other_store) as other_errors:
            answers = at_once(
                *[
                    lambda lease=lease: transitions.complete(
                        store, lease, parting(), result=b"1", result_type=JSON
                    )
                    for lease in leases
                ],
                *[lambda: transitions.renew(other_store, list(map(renewal, leases)))] * 4,  # type: ignore[list-item]
            )

        assert errors == other_errors == []
        assert all(isinstance(answer, Accepted) for answer in answers[:4])
        found = rows(store)
        for lease in leases:
            assert found["job"][lease.job_id]["state"] == JobState.SUCCEEDED
            assert found["attempt"][lease.job_id, 1]["state"] == AttemptState.COMPLETED


def test_a_renewal_of_a_frozen_holder_does_not_touch_its_successor(store: Store) -> None:
    frozen = expired(store)
    successor = claimed(store, owner=OTHER)
    before = attempt_row(store, successor)

    transitions.renew(store, [renewal(frozen, progress="old", checkpoint="old")])

    assert attempt_row(store, successor) == before
    done = transitions.complete(store, frozen, parting(), result=b"old", result_type=JSON)
    assert done == Stale(AttemptState.EXPIRED)


# --- large reports ------------------------------------------------------------------------------


def test_many_large_reports_are_written_by_several_statements_and_small_ones_by_one(
    store: Store,
) -> None:
    leases = [running(store, f"job{number}") for number in range(6)]
    large = '"' + "x" * (REPORT_BYTES // 2 + 1) + '"'
    news = [renewal(lease, checkpoint=large) for lease in leases[:4]]
    small = [renewal(leases[4], progress="1"), renewal(leases[5])]

    with statements_of(store) as seen:
        answer = transitions.renew(store, news + small)

    assert len(answer.renewed) == 6
    assert [attempt_row(store, lease)["checkpoint"] for lease in leases[:4]] == [large] * 4
    assert attempt_row(store, leases[4])["progress"] == "1"
    updates = [str(values) for statement, values in seen if statement.startswith("UPDATE")]
    assert len(updates) == 4
    assert max(map(len, updates)) < 2 * REPORT_BYTES
    # Those that say little first: they are the most, and owe nothing to the others.
    assert all(f"'{leases[number].job_id}'" in updates[0] for number in (4, 5))


def test_a_report_that_the_database_refuses_keeps_no_lease_from_being_renewed(
    store: Store,
) -> None:
    bad, good, silent = (running(store, name) for name in ("bad", "good", "silent"))
    news = [renewal(bad, checkpoint='"refused"'), renewal(good, checkpoint='"fine"')]

    with refusing(store, "refused"):
        answer = transitions.renew(store, [*news, renewal(silent)])

    pairs = {(lease.job_id, lease.fencing_token) for lease in (bad, good, silent)}
    assert answer.renewed == pairs
    assert answer.refused == {("bad", 1)}
    assert attempt_row(store, good)["checkpoint"] == '"fine"'
    assert attempt_row(store, bad)["checkpoint"] is None


def test_a_statement_over_the_largest_packet_of_the_server_keeps_no_lease_from_being_renewed(
    kept_store: Callable[[str, str], Store], kept_mariadb: str
) -> None:
    """Its connection is cut without a word on why, as in an outage."""
    store = kept_store(kept_mariadb, "one")
    big, small = running(store, "packet-big"), running(store, "packet-small")

    news = [renewal(big, checkpoint=f'"{"x" * 17_000_000}"'), renewal(small, checkpoint="1")]
    answer = transitions.renew(store, news)

    assert answer.renewed == {("packet-big", 1), ("packet-small", 1)}
    assert answer.refused == {("packet-big", 1)}
    assert attempt_row(store, small)["checkpoint"] == "1"


def test_an_outage_is_no_refusal(store: Store, lose_requests: LoseReplies) -> None:
    lease = running(store)

    with lose_requests(store, 4), pytest.raises(StoreUnavailable):
        transitions.renew(store, [renewal(lease, checkpoint="1")])


@contextmanager
def refusing(store: Store, text: str) -> Iterator[None]:
    """Have the database refuse, for good, whatever has a text in it."""

    def refuse(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        del connection, cursor
        if text in str(parameters):
            raise sa.exc.DataError(statement, None, ValueError("refused"))

    sa.event.listen(store.base_engine, "before_cursor_execute", refuse)
    try:
        yield
    finally:
        sa.event.remove(store.base_engine, "before_cursor_execute", refuse)
