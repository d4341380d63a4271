"""enqueue: a job in a transaction that is not the store's, and what of it is there afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Existing
from celery_lease.store import queries, transitions
from celery_lease.store.callers import ConnectionCaller, place_of
from celery_lease.store.engine import Store
from tests.store.builders import job_row, new_job, new_message, rows
from tests.store.test_keys import UNTIL_FINAL, keyed, keyed_job, succeeded_keyed


@pytest.fixture
def engine(store: Store) -> Iterator[sa.Engine]:
    """A caller's engine on the store's database."""
    made = sa.create_engine(store._url)
    yield made
    made.dispose()


@contextmanager
def calling(store: Store, engine: sa.Engine) -> Iterator[Any]:
    """Give what enqueues a job in one transaction of a caller's."""
    with engine.begin() as connection:
        caller = ConnectionCaller(connection)
        place = place_of(store, caller, prepare=lambda: None)
        yield lambda job: transitions.enqueue(store, place, caller, job)


def committed(store: Store, *job_ids: str) -> list[str]:
    """Return which of some jobs are to be sent."""
    return [found.job_id for found in queries.committed(store, job_ids)]


def test_it_is_there_and_unsent_after_the_commit(store: Store, engine: sa.Engine) -> None:
    with calling(store, engine) as enqueue:
        assert enqueue(new_job("one", dispatched=False)) is None
        assert enqueue(new_job("later", dispatched=False, delay_seconds=60)) is None
        assert committed(store, "one", "later") == []

    assert committed(store, "one", "later", "nobody") == ["one", "later"]
    assert job_row(store, "one")["dispatched_at"] is None


def test_a_countdown_leaves_with_its_message_once(store: Store, engine: sa.Engine) -> None:
    with calling(store, engine) as enqueue:
        enqueue(new_job("later", dispatched=False, delay_seconds=60))
    (found,) = queries.committed(store, ["later"])

    assert transitions.dispatch(store, found)
    assert not transitions.dispatch(store, found)

    assert committed(store, "later") == []
    assert job_row(store, "later")["state"] == "scheduled"


def test_an_id_or_a_key_that_is_taken_changes_nothing(store: Store, engine: sa.Engine) -> None:
    keyed(store, "one")
    before = rows(store)

    with calling(store, engine) as enqueue:
        assert enqueue(new_job("one")) == Existing("one")
        assert enqueue(keyed_job("two")) == Existing("one")
        assert enqueue(keyed_job("three", digest="sha256:2")) == Existing(
            "one", same_arguments=False
        )

    assert rows(store) == before


def test_a_key_is_taken_from_a_job_whose_time_is_over(store: Store, engine: sa.Engine) -> None:
    succeeded_keyed(store)

    with calling(store, engine) as enqueue:
        assert enqueue(keyed_job("two", retention=UNTIL_FINAL)) is None

    assert job_row(store, "one")["active_key"] is None
    assert job_row(store, "two")["active_key"] == "key"


def test_the_holder_of_a_key_is_not_locked(row_store: Store) -> None:
    """Its runner could not free the key until the caller is done."""
    store, engine = row_store, sa.create_engine(row_store._url)
    keyed(store, "one")

    with calling(store, engine) as enqueue:
        assert enqueue(keyed_job("two")) == Existing("one")
        assert transitions.cancel(store, "one", reason="a test")

    assert job_row(store, "one")["active_key"] is None
    engine.dispose()


def test_a_holder_whose_time_is_over_is_not_locked(row_store: Store) -> None:
    """Its worker settles it at that moment, in the thread that renews all its leases."""
    store, engine = row_store, sa.create_engine(row_store._url)
    succeeded_keyed(store)

    with engine.connect() as connection:
        caller = ConnectionCaller(connection)
        place = place_of(store, caller, prepare=lambda: None)
        assert transitions.enqueue(store, place, caller, keyed_job("two", retention=0.0)) is None
        holder = store.tables.job.c.id == "one"
        with engine.begin() as other:
            other.execute(
                sa.select(store.tables.job.c.id).where(holder).with_for_update(nowait=True)
            ).one()
        connection.rollback()

    # It was true whatever became of the one that wanted the key.
    assert job_row(store, "one")["active_key"] is None
    assert committed(store, "two") == []
    engine.dispose()


def test_who_meets_a_key_of_an_open_transaction_is_told_and_does_not_hang(
    row_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, engine = row_store, sa.create_engine(row_store._url)
    retrying = store.retrying
    monkeypatch.setattr(store, "retrying", lambda work, **_: retrying(work, tries=2))

    with calling(store, engine) as enqueue:
        assert enqueue(keyed_job("one")) is None
        with pytest.raises(StoreUnavailable, match="an open transaction holds a row"):
            transitions.submit_keyed(store, keyed_job("two"))

    assert transitions.submit_keyed(store, keyed_job("two")) == Existing("one")
    engine.dispose()


def test_an_engine_that_is_gone_is_forgotten(store: Store) -> None:
    """One a tenant, a test, an event loop."""
    places = set()
    for _ in range(5):
        made = sa.create_engine(store._url, poolclass=sa.NullPool)
        with made.connect() as connection:
            places.add(place_of(store, ConnectionCaller(connection), prepare=lambda: None))
        made.dispose()
        del made, connection
        gc.collect()

    assert len(places) == 1
    gone = [one for one in store.seen_by if isinstance(one, weakref.ref) and one() is None]
    assert len(gone) <= 1


@pytest.mark.parametrize(
    "option",
    [
        {"stream_results": True},
        {"yield_per": 10},
        {"schema_translate_map": {None: "tenant", "public": "tenant", "main": "tenant"}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_a_connection_was_told_for_its_own_statements_is_not_for_ours(
    store: Store, engine: sa.Engine, option: dict[str, Any]
) -> None:
    with calling(store, engine.execution_options(**option)) as enqueue:
        assert enqueue(keyed_job("one", dispatched=False)) is None
        assert enqueue(keyed_job("two")) == Existing("one")

    assert committed(store, "one") == ["one"]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"job_id": "x" * 256}, ValueError, "task_id has at most 255"),
        ({"job_id": "a\x00b"}, ValueError, "task_id .* no NUL"),
        ({"job_id": 5}, TypeError, "task_id is a str, not int"),
        ({"queue": "q" * 256}, ValueError, "queue has at most 255"),
        ({"queue": "a\x00b"}, ValueError, "queue .* no NUL"),
        ({"message": replace(new_message(), exchange="e" * 256)}, ValueError, "exchange has at"),
        ({"message": replace(new_message(), routing_key="r" * 256)}, ValueError, "routing_key has"),
        ({"message": replace(new_message(), routing_key=7)}, TypeError, "routing_key is a str"),
        ({"priority": "high"}, TypeError, "priority is an int, not str"),
        ({"priority": 2.5}, TypeError, "priority is an int, not float"),
        ({"priority": 2**31}, ValueError, "priority .* 32 bits"),
        ({"priority": -(2**40)}, ValueError, "priority .* 32 bits"),
    ],
)
def test_what_has_no_place_in_a_table_is_said_and_the_transaction_goes_on(
    store: Store, engine: sa.Engine, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    wrong = replace(new_job("wrong", dispatched=False), **changes)
    with calling(store, engine) as enqueue:
        with pytest.raises(error, match=said):
            enqueue(wrong)
        assert enqueue(new_job("right", dispatched=False)) is None
    with pytest.raises(error, match=said):
        transitions.submit(store, wrong)
    with pytest.raises(error, match=said):
        transitions.submit_many(store, [wrong])

    assert committed(store, "right") == ["right"]
    assert list(rows(store)["job"]) == ["right"]


def test_what_just_has_a_place_in_a_table_is_recorded(store: Store) -> None:
    most = {"queue": "q" * 255, "priority": 2**31 - 1}

    assert transitions.submit(store, replace(new_job("x" * 255), **most))
