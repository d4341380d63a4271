"""``submit`` (and ``adopt`` at the claim): a job and its message become durable together.

A job with an idempotency key holds it from this very statement on (``submit_keyed`` in
``keys``): what keeps two of a task from holding one is the unique index, not a look before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, case, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from celery_lease.records import Message, NewJob
from celery_lease.states import NEVER_SENT, JobState
from celery_lease.store.dialects import Later, clock, insert_if_absent
from celery_lease.store.engine import Store
from celery_lease.store.schema import NAME
from celery_lease.store.transitions.statements import built, clean, may_be_id, seconds

#: What the column has room for.
LARGEST_PRIORITY = 2**31 - 1


def submit(store: Store, job: NewJob) -> bool:
    """Record a job and the first version of its message; also ``adopt`` at the claim.

    A job with an idempotency key is submitted by ``submit_keyed``.

    Returns:
        True when the row is the caller's to publish. False: a job with this id exists, in
        whatever state; nothing was written and nothing is to be published.

    Raises:
        StoreUnavailable: nothing is known to be written; nothing may be published.
    """
    tries = 0

    def work() -> bool:
        nonlocal tries
        tries += 1
        if insert_job(store, job):
            return True
        # A repetition after a lost reply finds its own row: the same bytes, never claimed.
        return tries > 1 and is_own_submit(store, job)

    return store.retrying(work)


def submit_many(store: Store, jobs: Sequence[NewJob]) -> set[str]:
    """Record many jobs, and the first version of the message of each, in one transaction.

    Args:
        store: the store.
        jobs: jobs without an idempotency key; a few hundred, all in memory at once.

    Returns:
        The ids of the rows that are the caller's to publish. The others exist already, as in
        ``submit``: only then is each job recorded by itself.

    Raises:
        StoreUnavailable: nothing is known to be written; nothing may be published.
    """
    tries = 0
    # Two callers never wait for each other.
    in_order = sorted(jobs, key=lambda job: job.job_id)

    def work() -> set[str]:
        nonlocal tries
        tries += 1
        try:
            with store.transaction() as connection:
                insert_in(store, connection, [job_parameters(job) for job in in_order])
        except IntegrityError:
            return {job.job_id for job in jobs if submit_again(job)}
        return {job.job_id for job in jobs}

    def submit_again(job: NewJob) -> bool:
        return insert_job(store, job) or (tries > 1 and is_own_submit(store, job))

    return store.retrying(work) if jobs else set()


def submit_failed(store: Store, job: NewJob, *, error_type: str, error_message: str) -> bool:
    """Record a job that is never sent: → failed, without an attempt; a pass tells Celery.

    Args:
        store: the store.
        job: the job; its message is what closes its books, and no body runs by it.
        error_type: of the exception that Celery is told.
        error_message: its text.

    Returns:
        False when a job with this id exists; nothing was written.

    Raises:
        StoreUnavailable: nothing is known to be written.
    """
    parameters = job_parameters(job)
    failure = {
        "p_error_type": clean(error_type, 255),
        "p_error_message": clean(error_message),
    }

    def work() -> bool:
        try:
            with store.transaction() as connection:
                insert_in(store, connection, parameters)
                connection.execute(
                    built(store, "submit_failed", _failing_statement), parameters | failure
                )
        except IntegrityError:
            if _job_exists(store, job.job_id):
                return False
            raise
        return True

    return store.retrying(work)


def _failing_statement(store: Store) -> Any:
    job = store.tables.job
    return (
        sa.update(job)
        .where(job.c.id == bindparam("p_id"))
        .values(
            state=JobState.FAILED.value,
            state_reason=NEVER_SENT,
            error_type=bindparam("p_error_type"),
            error_message=bindparam("p_error_message"),
            finished_at=clock(),
        )
    )


def insert_job(store: Store, job: NewJob, *, holds_key: bool = True) -> bool:
    """Insert a job and its message.

    Args:
        store: the store.
        job: the job.
        holds_key: False for one that waits for the holder of its key.

    Returns:
        False when its id or its key is taken; nothing was written.
    """
    parameters = job_parameters(job, holds_key=holds_key)
    if store.dialect.writing_ctes:
        with store.single() as connection:
            row = connection.execute(built(store, "submit", submit_statement), parameters).first()
        return row is not None
    try:
        with store.transaction() as connection:
            insert_in(store, connection, parameters)
    except IntegrityError:
        if job.key is not None or _job_exists(store, job.job_id):
            return False
        raise
    return True


def insert_in(
    store: Store, connection: Connection, parameters: dict[str, Any] | list[dict[str, Any]]
) -> None:
    """Insert a job and its message, or many, in a transaction of the caller's."""
    connection.execute(built(store, "submit_job", insert_job_statement), parameters)
    connection.execute(built(store, "submit_message", insert_message_statement), parameters)


def job_parameters(job: NewJob, *, holds_key: bool = True) -> dict[str, Any]:
    """Return the parameters of ``insert_in``.

    Raises:
        ValueError: an id, a name or a priority that has no place in a table. The database would
            say so, too, and end the transaction that a caller has open.
        TypeError: it is no text, or no whole number.
    """
    _check(job)
    key = job.key
    return message_parameters(job.job_id, job.message) | {
        "p_key": None if key is None else key.text,
        "p_active_key": key.text if key is not None and holds_key else None,
        "p_arguments": None if key is None else key.arguments_digest,
        "p_id": job.job_id,
        "p_task": job.task,
        "p_state": (JobState.SCHEDULED if job.delay_seconds > 0 else JobState.QUEUED).value,
        "p_delay": max(job.delay_seconds, 0.0),
        "p_expires": job.expires_seconds,
        "p_deadline": job.deadline_seconds,
        "p_max_attempts": job.max_attempts,
        "p_on_expiry": job.on_expiry.value,
        "p_version": job.message.version,
        "p_dispatched": 1 if job.dispatched else 0,
        "p_submitter": clean(job.submitter, 255),
        "p_root": _id_text(job.root_id),
        "p_parent": _id_text(job.parent_id),
        "p_group": _id_text(job.group_id),
        "p_queue": job.queue,
        "p_priority": whole_priority(job.priority),
    }


def _check(job: NewJob) -> None:
    texts: dict[str, object] = {"task_id": job.job_id, "task": job.task}
    if job.queue is not None:
        texts["queue"] = job.queue
    _check_texts(texts)


def whole_priority(given: Any) -> int | None:
    """Return a priority as a whole number: ``"5"`` and ``5.0`` are to kombu what 5 is.

    Raises:
        TypeError: it is no number.
        ValueError: no broker and no table has room for it.
    """
    if given is None:
        return None
    try:
        priority = int(given)
    except (TypeError, ValueError, OverflowError):
        priority = None
    if priority is None or (isinstance(given, float) and given != priority):
        message = f"priority is an int, not {type(given).__name__}: {given!r}"
        raise TypeError(message)
    if not -LARGEST_PRIORITY <= priority <= LARGEST_PRIORITY:
        message = f"priority is a number of at most 32 bits, not {priority}"
        raise ValueError(message)
    return priority


def _id_text(given: object) -> str | None:
    """Return an id of Celery's that the caller may choose, of whatever type."""
    return None if given is None else clean(str(given), NAME)


def _check_texts(texts: Mapping[str, object]) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            message = f"{name} is a str, not {type(text).__name__}: {text!r}"
            raise TypeError(message)
        if not may_be_id(text):
            message = (
                f"{name} has at most {NAME} characters, no NUL and no lone surrogate: "
                f"{text[:NAME]!r}"
            )
            raise ValueError(message)


def message_parameters(job_id: str, message: Message) -> dict[str, Any]:
    """Return the parameters of ``insert_message_statement``.

    Raises:
        ValueError: a name that has no place in a table.
        TypeError: it is no text.
    """
    _check_texts(
        {
            "content_type": message.content_type,
            "content_encoding": message.content_encoding,
            "exchange": message.exchange,
            "routing_key": message.routing_key,
        }
    )
    return {
        "p_id": job_id,
        "p_version": message.version,
        "p_headers": message.headers,
        "p_properties": message.properties,
        "p_body": message.body,
        "p_content_type": message.content_type,
        "p_content_encoding": message.content_encoding,
        "p_exchange": message.exchange,
        "p_routing_key": message.routing_key,
    }


def _job_values() -> dict[str, Any]:
    dispatched = bindparam("p_dispatched", type_=sa.Integer)
    return {
        "id": bindparam("p_id"),
        "task": bindparam("p_task"),
        "state": bindparam("p_state"),
        "fencing_token": 0,
        "lost_count": 0,
        "failure_count": 0,
        "max_attempts": bindparam("p_max_attempts"),
        "on_expiry": bindparam("p_on_expiry"),
        "available_at": Later(clock(), seconds("p_delay")),
        "expires_at": Later(clock(), seconds("p_expires")),
        "deadline_at": Later(clock(), seconds("p_deadline")),
        "message_version": bindparam("p_version"),
        "dispatched_at": case((dispatched == 1, clock())),
        "dispatch_count": dispatched,
        "idempotency_key": bindparam("p_key"),
        "active_key": bindparam("p_active_key"),
        "arguments_digest": bindparam("p_arguments"),
        "submitter": bindparam("p_submitter"),
        "root_id": bindparam("p_root"),
        "parent_id": bindparam("p_parent"),
        "group_id": bindparam("p_group"),
        "queue": bindparam("p_queue"),
        "priority": bindparam("p_priority", type_=sa.Integer),
        "created_at": clock(),
    }


def _message_values() -> dict[str, Any]:
    return {
        "version": bindparam("p_version", type_=sa.Integer),
        "headers": bindparam("p_headers", type_=sa.Text),
        "properties": bindparam("p_properties", type_=sa.Text),
        "body": bindparam("p_body", type_=sa.LargeBinary),
        "content_type": bindparam("p_content_type", type_=sa.Text),
        "content_encoding": bindparam("p_content_encoding", type_=sa.Text),
        "exchange": bindparam("p_exchange", type_=sa.Text),
        "routing_key": bindparam("p_routing_key", type_=sa.Text),
        "created_at": clock(),
    }


def insert_job_statement(store: Store) -> Any:
    """Return the INSERT of a job."""
    return sa.insert(store.tables.job).values(**_job_values())


def insert_message_statement(store: Store) -> Any:
    """Return the INSERT of one message version."""
    return sa.insert(store.tables.message).values(job_id=bindparam("p_id"), **_message_values())


def submit_statement(store: Store) -> Any:
    """Return the INSERT of a job and its message in one statement; it gives the id, or no row."""
    job, message = store.tables.job, store.tables.message
    added = insert_if_absent(job).values(**_job_values()).returning(job.c.id).cte("added")
    values = _message_values()
    source = select(added.c.id, *values.values())
    written = sa.insert(message).from_select(["job_id", *values], source)
    return select(added.c.id).add_cte(written.returning(message.c.version).cte("written"))


def _job_exists(store: Store, job_id: str) -> bool:
    job = store.tables.job
    with store.single() as connection:
        return connection.execute(select(job.c.id).where(job.c.id == job_id)).first() is not None


def is_own_submit(store: Store, new: NewJob) -> bool:
    """Tell whether a job is there as this very submit writes it, and was never claimed."""
    job, message = store.tables.job, store.tables.message
    statement = (
        select(message.c.body)
        .join(job, job.c.id == message.c.job_id)
        .where(
            job.c.id == new.job_id,
            job.c.fencing_token == 0,
            message.c.version == new.message.version,
        )
    )
    with store.single() as connection:
        body = connection.execute(statement).scalar()
    return body is not None and bytes(body) == new.message.body
