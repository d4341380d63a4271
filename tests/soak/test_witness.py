"""The witness, on each database: the guard refuses what is stale, the triggers see everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_lease.records import Held
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema
from tests.soak import evidence, witness
from tests.soak.checker import violations
from tests.soak.evidence import Evidence
from tests.soak.witness import WITNESS, Witness
from tests.store.builders import OTHER, claimed, finished, move_back, running


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(url=database_url)
    ensure_schema(store, auto_migrate=True)
    witness.create(database_url)
    yield store
    store.close()


def url_of(store: Store) -> str:
    return store._url.render_as_string(hide_password=False)


def look(store: Store) -> Evidence:
    return evidence.read(url_of(store), promised=[], follows=[])


def spoil(store: Store, table: sa.Table, **values: Any) -> None:
    """Change a row as no transition would."""
    with store.transaction() as connection:
        assert connection.execute(sa.update(table).values(**values)).rowcount == 1


def rules(store: Store) -> set[str]:
    return {one.rule for one in violations(look(store))}


def told(store: Store, job_id: str = "job") -> list[tuple[str, int, str]]:
    return [(line.kind, line.token, line.step) for line in look(store).witness[job_id]]


def succeeded(store: Store) -> Held:
    held = running(store)
    assert Witness(url_of(store)).write(held, "final")
    finished(store, held)
    assert violations(look(store)) == []
    return held


def test_claims_effects_and_ends_stand_in_their_order(store: Store) -> None:
    book = Witness(url_of(store))
    first = running(store)
    assert book.write(first, "begin")

    move_back(store, "job", 31)
    second = claimed(store, owner=OTHER)
    assert book.write(second, "final")
    finished(store, second)

    assert told(store) == [
        ("claimed", 1, ""),
        ("effect", 1, "begin"),
        ("claimed", 2, ""),
        ("effect", 2, "final"),
        ("finished", 2, ""),
    ]
    assert violations(look(store)) == []


def test_an_effect_that_is_not_mine_is_refused_and_leaves_nothing(store: Store) -> None:
    book = Witness(url_of(store))
    first = running(store)
    move_back(store, "job", 31)
    second = claimed(store, owner=OTHER)

    assert not book.write(first, "stale token")
    assert not book.write(dataclasses.replace(second, owner=first.owner), "another's owner")
    finished(store, second)
    assert not book.write(second, "after the end")

    assert {kind for kind, _, _ in told(store)} == {"claimed", "finished"}


def test_an_effect_whose_reply_was_lost_is_written_once(store: Store) -> None:
    held = running(store)

    assert Witness(url_of(store)).write(held, "begin")
    assert Witness(url_of(store)).write(held, "begin")

    assert told(store) == [("claimed", 1, ""), ("effect", 1, "begin")]


def test_an_effect_written_without_the_guard_is_found(store: Store) -> None:
    held = succeeded(store)

    with store.transaction() as connection:
        row = {"kind": "effect", "job_id": held.job_id, "token": 1, "step": "late"}
        connection.execute(WITNESS.insert(), row)

    assert "stale" in rules(store)


def test_a_change_of_an_ended_attempt_is_found(store: Store) -> None:
    succeeded(store)

    spoil(store, store.tables.attempt, stop_reason="because")

    assert "rewritten" in rules(store)


def test_a_change_of_a_final_job_is_found(store: Store) -> None:
    succeeded(store)

    spoil(store, store.tables.job, result=b"2")

    assert "rewritten" in rules(store)


def test_a_token_that_jumps_is_found(store: Store) -> None:
    running(store)

    spoil(store, store.tables.job, fencing_token=3)

    assert "rewritten" in rules(store)


def test_bookkeeping_of_an_ended_attempt_is_no_violation(store: Store) -> None:
    """A late outcome, and that Celery has been told, are added to what had ended."""
    succeeded(store)

    spoil(store, store.tables.attempt, late_outcome="succeeded")
    spoil(store, store.tables.job, dispatch_count=7)

    assert rules(store) == set()
