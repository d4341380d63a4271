"""``enqueue``: a job becomes durable with the caller's own transaction, or not at all.

What it writes is what ``submit`` and ``submit_keyed`` write, with two differences. An error of
the database would end the caller's transaction (PostgreSQL), and so a row that is there already
must not be one. And no lock may be left, until the caller is done, on the row of another job, whose
runner would wait for it, and its worker with all its leases: where a refused INSERT leaves one, the
store looks first, by a connection of its own, and so does it free a key whose time is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Existing, NewJob
from celery_lease.store.callers import Caller
from celery_lease.store.dialects import Ask
from celery_lease.store.engine import Store
from celery_lease.store.transitions.keys import (
    give_up,
    giving_up_statement,
    holder_statement,
    is_same_call,
    key_parameters,
    same_id_statement,
)
from celery_lease.store.transitions.statements import built
from celery_lease.store.transitions.submission import (
    insert_job_statement,
    insert_message_statement,
    job_parameters,
    submit_statement,
)

#: How often a key is found taken that nobody has when one looks, before that is an error.
TRIES = 5


def enqueue(store: Store, place: Store, caller: Caller, job: NewJob) -> Existing | None:
    """Record a job and its message in the caller's transaction.

    Args:
        store: the store.
        place: the same, as ``callers.place_of`` says that its tables are named.
        caller: whose transaction it is.
        job: the job, which nobody has sent.

    Returns:
        None: it is there once the caller commits. ``Existing``: nothing was written.

    Raises:
        StoreUnavailable: others took and gave up its key all the time.
    """
    error: BaseException | None = None
    for _ in range(TRIES):
        found = _committed_in_the_way(store, job) if store.dialect.refusals_lock else None
        if found is None:
            error = _insert_for(place, caller, job)
            if error is None:
                return None
            found = _asked_in_the_way(place, caller.fetch, job) or _committed_in_the_way(store, job)
        if found is None:
            continue
        if found["id"] == job.job_id:
            return Existing(job.job_id)
        if not found["is_over"] and not job.follows:
            return Existing(found["id"], is_same_call(job, found))
        if found["is_over"]:
            _have_it_given_up(store, place, caller, job, found["id"])
        error = _insert_for(place, caller, job, holds_key=bool(found["is_over"]))
        if error is None:
            return None
    raise StoreUnavailable(
        store.masked_url, f"the idempotency key of job {job.job_id} is taken and given up"
    ) from error


def _have_it_given_up(
    store: Store, place: Store, caller: Caller, job: NewJob, holder_id: str
) -> None:
    if store.dialect.one_writer:
        # That is the caller, by now. There are no locks on rows, and so none that is left.
        parameters = key_parameters(job) | {"p_holder": holder_id}
        caller.write(giving_up_statement(place), parameters)
    else:
        give_up(store, job, holder_id)


def _insert_for(
    place: Store, caller: Caller, job: NewJob, *, holds_key: bool = True
) -> BaseException | None:
    """Insert a job and its message; returns an error when its id or its key is taken."""
    parameters = job_parameters(job, holds_key=holds_key)
    if place.dialect.writing_ctes:
        statement = built(place, "submit", submit_statement)
        return None if caller.fetch(statement, parameters) else KeyError(job.job_id)
    # The message first: whatever comes between, and whether or not this is one transaction, there
    # is never a job without one.
    error = caller.insert(built(place, "submit_message", insert_message_statement), parameters)
    if error is not None:
        return error
    error = caller.insert(built(place, "submit_job", insert_job_statement), parameters)
    if error is not None:
        caller.write(built(place, "take_message_back", _take_back), {"p_id": job.job_id})
    return error


def _take_back(place: Store) -> Any:
    message = place.tables.message
    return sa.delete(message).where(message.c.job_id == bindparam("p_id"))


def _asked_in_the_way(place: Store, ask: Ask, job: NewJob) -> Mapping[str, Any] | None:
    """Return the job that has the id, else the one that holds the key."""
    parameters = key_parameters(job)
    found = ask(same_id_statement(place), parameters)
    if not found and job.key is not None:
        found = ask(holder_statement(place), parameters)
    return found[0] if found else None


def _committed_in_the_way(store: Store, job: NewJob) -> Mapping[str, Any] | None:
    """Return the same as the store sees it: a caller with an old snapshot does not."""

    def ask(statement: Any, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        with store.single() as connection:
            return [dict(row) for row in connection.execute(statement, parameters).mappings()]

    return store.retrying(lambda: _asked_in_the_way(store, ask, job))
