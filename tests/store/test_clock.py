"""The store's clock is the only clock: no process's own time reaches a decision (B102)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from celery_lease.records import Late
from celery_lease.states import LateOutcome, LossCause
from celery_lease.store import queries, transitions
from celery_lease.store.dialects import clock
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    OTHER,
    WORKER_NOW,
    about,
    again,
    attempt_row,
    claimed,
    job_row,
    move_back,
    new_delivery,
    parting,
    renewal,
    rows,
    running,
    statements_of,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_lease.store.engine import Store


def every_arrow(store: Store) -> set[datetime]:
    """Call every function that writes; return the store's own instants that were handed back."""
    bounds = {"delay_seconds": 5.0, "expires_seconds": 600.0, "deadline_seconds": 600.0}
    submitted(store, "a", **bounds)
    transitions.claim(store, new_delivery("a"))
    move_back(store, "a", seconds=5)
    lease = claimed(store, "a")
    transitions.renew(store, [renewal(lease, progress="1", checkpoint="1")])
    move_back(store, "a", seconds=31)
    transitions.record_pass(store, counts="{}", worker=None)
    last = queries.last_pass(store)
    assert last is not None
    transitions.extend(store, ended_since=last.finished_at - timedelta(seconds=60))
    move_back(store, "a", seconds=31)
    transitions.expire(store, limit=9, lost_backoff=(30.0,))
    transitions.reject(store, lease, Late(LateOutcome.SUCCEEDED, b"1", "x"))
    transitions.wake(store, limit=9, dispatched_grace_seconds=1)
    for found in queries.undispatched(store, limit=9):
        transitions.dispatch(store, found)
        transitions.undispatch(store, found.job_id, dispatch_count=found.dispatch_count + 1)
    for name in "bcdefghi":
        lease = running(store, name, deadline_seconds=600.0)
        _ended(store, name, lease)
    queries.unclaimed(store, queued_timeout=1, limit=9)
    found_all = queries.unsettled(store, grace_seconds=-1, again_seconds=1, limit=99)
    outcomes = [(one.job_id, one.fencing_token, one.finished_at) for one, _ in found_all]
    transitions.settle(store, outcomes)
    transitions.resume(store, "b", reason="x", expires_seconds=5.0, deadline_seconds=5.0)
    move_back(store, "b", seconds=6)
    transitions.expire_unstarted(store, limit=9)
    transitions.pass_deadline(store, limit=9)
    transitions.accept(store, "f", reason="x", result=None, result_type=None)
    transitions.prune(store, succeeded_seconds=1, failed_seconds=1, limit=9)
    handed_back = {finished_at for _, _, finished_at in outcomes}
    return handed_back | {last.finished_at - timedelta(seconds=60)}


def _ended(store: Store, name: str, lease: Any) -> None:
    if name == "b":
        transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
    elif name == "c":
        transitions.fail(store, lease, parting(), error=None, error_content_type=None)
    elif name == "d":
        transitions.retry_later(store, lease, parting(), again(delay_seconds=9.0))
    elif name == "e":
        transitions.replace(store, lease, parting(), again(task="app.next"))
    elif name == "f":
        transitions.hold(store, lease, parting())
    elif name == "g":
        transitions.release(store, lease, parting(), delay_seconds=3.0)
    elif name == "h":
        transitions.lost(store, lease, cause=LossCause.LOST, reason="x", lost_backoff=NO_BACKOFF)
    else:
        move_back(store, name, seconds=31)
        transitions.claim(store, new_delivery(name, owner=OTHER))
        transitions.cancel(store, name)


def instants_in(parameters: Any) -> Iterator[datetime]:
    """Yield what is an instant among the parameters of a statement, however the driver has it."""
    if isinstance(parameters, dict):
        parameters = list(parameters.values())
    if isinstance(parameters, list | tuple):
        for value in parameters:
            yield from instants_in(value)
    elif isinstance(parameters, datetime):
        yield parameters if parameters.tzinfo else parameters.replace(tzinfo=timezone.utc)
    elif isinstance(parameters, int) and parameters > 900_000_000_000_000:
        yield datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=parameters)


def test_no_instant_reaches_a_statement_but_the_runners_own_note(store: Store) -> None:
    with statements_of(store) as seen:
        handed_back = every_arrow(store)

    sent = {instant for _, parameters in seen for instant in instants_in(parameters)}
    assert sent - handed_back == {WORKER_NOW}


def test_a_runners_note_of_its_own_clock_is_compared_with_nothing(store: Store) -> None:
    submitted(store)
    future = datetime(2999, 1, 1, tzinfo=timezone.utc)

    lease = claimed(store, worker_now=future)

    assert attempt_row(store, lease)["worker_claimed_at"] == future
    assert about(attempt_row(store, lease)["claimed_at"], store_now(store))
    transitions.renew(store, [renewal(lease)])
    assert transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF) == []


def test_the_clock_is_the_statements_and_not_the_transactions(store: Store) -> None:
    """A lease won after a wait would be short otherwise."""
    with store.transaction() as connection:
        now = sa.select(clock())
        first = connection.execute(now).scalar_one()
        while (later := connection.execute(now).scalar_one()) == first:
            pass

    assert first < later < first + timedelta(seconds=5)


def test_instants_come_back_aware_and_in_utc(store: Store) -> None:
    running(store)

    instants = [
        value
        for table in rows(store).values()
        for row in table.values()
        for value in row.values()
        if isinstance(value, datetime)
    ]

    assert instants
    assert {instant.utcoffset() for instant in instants} == {timedelta(0)}
    assert abs(store_now(store) - datetime.now(timezone.utc)) < timedelta(seconds=10)


def test_an_instant_keeps_its_microseconds_or_milliseconds_through_a_round_trip(
    store: Store,
) -> None:
    lease = running(store)
    transitions.complete(store, lease, parting(), result=None, result_type=None)
    finished_at = job_row(store)["finished_at"]

    assert transitions.settle(store, [("job", 1, finished_at + timedelta(milliseconds=1))]) == 0
    assert transitions.settle(store, [("job", 1, finished_at)]) == 1
