"""The tables themselves refuse rows that no transition may write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from celery_lease.store import transitions
from celery_lease.store.dialects import clock
from tests.store.builders import (
    ONE,
    OTHER,
    attempt_row,
    job_row,
    new_job,
    nothing_changes,
    running,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.records import Held
    from celery_lease.store.engine import Store

NOW = clock()


def refused(store: Store, statement: Any) -> None:
    """Assert that the database refuses a statement and is left as it was."""
    with nothing_changes(store), pytest.raises(DBAPIError), store.engine.begin() as connection:
        connection.execute(statement)


def change_job(store: Store, **values: Any) -> Any:
    return sa.update(store.tables.job).values(**values)


def change_attempt(store: Store, **values: Any) -> Any:
    return sa.update(store.tables.attempt).values(**values)


@pytest.mark.parametrize("state", ["lost", "", "Queued", "QUEUED"])
def test_a_job_has_no_other_states(store: Store, state: str) -> None:
    submitted(store)

    refused(store, change_job(store, state=state))


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "interrupted"])
def test_a_final_job_has_the_time_it_finished(store: Store, state: str) -> None:
    submitted(store)

    refused(store, change_job(store, state=state))


@pytest.mark.parametrize("state", ["scheduled", "queued", "retry_wait", "held"])
def test_a_job_that_is_not_final_has_not_finished(store: Store, state: str) -> None:
    submitted(store)

    refused(store, change_job(store, state=state, finished_at=NOW))


def test_a_running_job_has_an_owner(store: Store) -> None:
    submitted(store)

    refused(store, change_job(store, state="running"))


@pytest.mark.parametrize("values", [{"state": "queued"}, {"lease_owner": None}])
def test_only_a_running_job_has_an_owner(store: Store, values: dict[str, Any]) -> None:
    running(store)

    refused(store, change_job(store, **values))


def test_a_job_has_no_other_policies(store: Store) -> None:
    submitted(store)

    refused(store, change_job(store, on_expiry="again"))


@pytest.mark.parametrize(
    "column", ["task", "state", "fencing_token", "available_at", "message_version", "created_at"]
)
def test_what_every_job_has_cannot_be_missing(store: Store, column: str) -> None:
    submitted(store)

    refused(store, change_job(store, **{column: None}))


def test_an_id_is_given_once(store: Store) -> None:
    submitted(store)
    row = job_row(store)

    refused(store, sa.insert(store.tables.job).values(**row))


def test_a_key_is_held_by_one_job_of_a_task(store: Store) -> None:
    submitted(store, "one")
    submitted(store, "two")
    submitted(store, "elsewhere", task="app.other")
    job = store.tables.job
    with store.engine.begin() as connection:
        held = change_job(store, active_key="key").where(job.c.id.in_(["one", "elsewhere"]))
        connection.execute(held)

    refused(store, change_job(store, active_key="key").where(job.c.id == "two"))


def test_jobs_without_a_key_or_a_slot_do_not_exclude_each_other(store: Store) -> None:
    for name in ("one", "two", "three"):
        submitted(store, name)

    assert {job_row(store, name)["active_key"] for name in ("one", "two", "three")} == {None}
    assert {job_row(store, name)["schedule"] for name in ("one", "two", "three")} == {None}


def test_a_slot_of_a_schedule_is_one_job(store: Store) -> None:
    submitted(store, "one")
    submitted(store, "two")
    due = store_now(store)
    job = store.tables.job
    with store.engine.begin() as connection:
        connection.execute(
            change_job(store, schedule="nightly", slot_at=due).where(job.c.id == "one")
        )

    refused(store, change_job(store, schedule="nightly", slot_at=due).where(job.c.id == "two"))


@pytest.mark.parametrize("state", ["running", "", "Active"])
def test_an_attempt_has_no_other_states(store: Store, state: str) -> None:
    running(store)

    refused(store, change_attempt(store, state=state))


@pytest.mark.parametrize(
    "state",
    ["completed", "failed", "retried", "replaced", "released", "expired", "lost", "stalled"],
)
def test_an_attempt_that_is_over_has_the_time_it_ended(store: Store, state: str) -> None:
    running(store)

    refused(store, change_attempt(store, state=state))


@pytest.mark.parametrize("state", ["claimed", "active"])
def test_a_live_attempt_has_not_ended(store: Store, state: str) -> None:
    running(store)

    refused(store, change_attempt(store, state=state, ended_at=NOW))


def test_a_token_is_given_once(store: Store) -> None:
    lease = running(store)

    refused(store, _another_attempt(store, lease, state="lost", ended_at=NOW))


def _another_attempt(store: Store, lease: Held, **changes: Any) -> Any:
    row = attempt_row(store, lease) | {"owner": OTHER, "claim_nonce": "another"} | changes
    return sa.insert(store.tables.attempt).values(**row)


def test_a_row_that_breaks_a_rule_is_no_reason_to_call_the_store_unavailable(
    store: Store,
) -> None:
    lease = running(store)
    broken = {"state": "queued"}

    def work() -> None:
        with store.transaction() as connection:
            connection.execute(change_job(store, **broken))

    with pytest.raises(DBAPIError):
        store.retrying(work)

    assert lease.owner == ONE
    assert transitions.submit(store, new_job("next"))
