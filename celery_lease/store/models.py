"""``Job`` and ``Attempt``: the rows as classes, for programs and people that read.

For reading only: a state that is changed through them is changed without its guard (see
``transitions``), and nothing stops that but this sentence. What is large (results,
tracebacks) is loaded when it is asked for, and only while the session is open.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, column_property, deferred, foreign, registry, relationship

from celery_lease.states import AttemptState, JobState, LateOutcome, OnExpiry
from celery_lease.store.schema import DEFAULT_PREFIX, Tables, build_tables


class Job:
    """One job, as the store has it. Read only; instants are aware UTC, by the store's clock.

    ``result`` is loaded at its first use in an open session. ``attempts`` is never loaded
    by itself, so that a listing cannot turn into one query a row: ask for it with
    ``select(Job).options(selectinload(Job.attempts))``, or use ``history.job``.

    .. versionadded:: 0.1
    """

    id: Mapped[str]
    """The Celery task id."""
    task: Mapped[str]
    """The task's name."""
    state: Mapped[JobState]
    state_reason: Mapped[str | None]
    """One line on why it is in this state."""
    fencing_token: Mapped[int]
    """The newest attempt's token, 0 before the first claim."""
    resumed_token: Mapped[int | None]
    """The token it had when it was last resumed; None when it never was."""
    lease_owner: Mapped[str | None]
    """The process that holds the lease; None unless running."""
    lost_count: Mapped[int]
    """How many runners vanished."""
    failure_count: Mapped[int]
    """How often the body raised."""
    max_attempts: Mapped[int]
    """The loss that ends the job (``lease_max_attempts``)."""
    on_expiry: Mapped[OnExpiry]
    """What becomes of it when its runner vanishes."""
    available_at: Mapped[datetime]
    """When it is or was due."""
    expires_at: Mapped[datetime | None]
    """Celery's ``expires``: it does not start later."""
    deadline_at: Mapped[datetime | None]
    """It does not run later."""
    message_version: Mapped[int]
    """The version of its message that is in force."""
    dispatched_at: Mapped[datetime | None]
    """When its message was last put on the broker; None when it has to be put there."""
    first_dispatched_at: Mapped[datetime | None]
    """When it was first put there since it was queued; None until it is sent again."""
    dispatch_count: Mapped[int]
    """How often it was."""
    idempotency_key: Mapped[str | None]
    active_key: Mapped[str | None]
    """The idempotency key while it is held."""
    arguments_digest: Mapped[str | None]
    submitter: Mapped[str | None]
    """Who published it (a node name)."""
    root_id: Mapped[str | None]
    """Celery's root id."""
    parent_id: Mapped[str | None]
    """Celery's parent id."""
    group_id: Mapped[str | None]
    """Celery's group id."""
    queue: Mapped[str | None]
    priority: Mapped[int | None]
    schedule: Mapped[str | None]
    """The schedule it fills a slot of."""
    slot_at: Mapped[datetime | None]
    """The due time of that slot."""
    requires: Mapped[str | None]
    """JSON text: what a worker must have."""
    unmet: Mapped[str | None]
    """JSON text: which of that no worker had."""
    accepted_attempt: Mapped[int | None]
    """The token of the attempt whose outcome is the job's; None when no attempt's is."""
    accepted_late: Mapped[bool | None]
    """True when it was accepted after its lease had ended, before anybody took over."""
    result: Mapped[bytes | None]
    """The serialised result. Large: loaded when it is asked for."""
    result_size: Mapped[int | None]
    """How many bytes ``result`` has."""
    result_type: Mapped[str | None]
    """The content type of ``result``."""
    error_type: Mapped[str | None]
    """``module.Class`` of what ended it."""
    error_message: Mapped[str | None]
    settled_at: Mapped[datetime | None]
    """When Celery was known to have stored its outcome and sent its callbacks."""
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    """When it became final; None unless it is."""
    attempts: Mapped[list[Attempt]]
    """Every attempt, the first one first. Not loaded unless asked for."""

    @property
    def is_final(self) -> bool:
        """True when nothing but ``resume`` changes it."""
        return self.state.is_final

    @property
    def is_settled(self) -> bool:
        """True when Celery's own bookkeeping of its outcome is done."""
        return self.settled_at is not None

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} {self.state}>"


class Attempt:
    """One try at a job, as the store has it. Read only.

    Instants are aware UTC by the store's clock, but ``worker_claimed_at`` and
    ``worker_ended_at``: those are by the worker's. ``traceback`` and ``late_result`` are
    loaded at their first use in an open session; ``job`` never is by itself.

    .. versionadded:: 0.1
    """

    job_id: Mapped[str]
    fencing_token: Mapped[int]
    """1 for the first; with the job's id it names the attempt."""
    state: Mapped[AttemptState]
    stop_reason: Mapped[str | None]
    """Why it ended, one word or line."""
    worker: Mapped[str | None]
    """Celery's node name."""
    owner: Mapped[str]
    """The process: host, pid and a random part."""
    claim_nonce: Mapped[str]
    """Names the delivery that claimed."""
    message_version: Mapped[int]
    """The version of the message it was claimed with."""
    lease_seconds: Mapped[float]
    """How long one renewal lasts."""
    lease_expires_at: Mapped[datetime]
    """When the lease ends, or would have ended without another renewal."""
    last_renewed_at: Mapped[datetime]
    """The newest renewal; the claim before there is one."""
    renewal_count: Mapped[int]
    extended_at: Mapped[datetime | None]
    """When a pass last gave it more time after an outage."""
    stop_requested_at: Mapped[datetime | None]
    """When it was asked to stop."""
    progress: Mapped[str | None]
    """JSON text of the newest progress."""
    checkpoint: Mapped[str | None]
    """JSON text of the newest checkpoint."""
    claimed_at: Mapped[datetime]
    acknowledged_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    """None while it holds the lease."""
    worker_claimed_at: Mapped[datetime | None]
    """By the worker's clock."""
    worker_ended_at: Mapped[datetime | None]
    """By the worker's clock; None when the worker did not report the end."""
    error_type: Mapped[str | None]
    error_message: Mapped[str | None]
    traceback: Mapped[str | None]
    """Truncated, still long: loaded when it is asked for."""
    failure_class: Mapped[str | None]
    retryable: Mapped[bool | None]
    """Whether another attempt could have ended differently."""
    rejected_at: Mapped[datetime | None]
    """When a stale outcome of it was refused."""
    late_outcome: Mapped[LateOutcome | None]
    """What that outcome was: kept for diagnosis, never the job's."""
    late_result: Mapped[bytes | None]
    """The result it came with. Large: loaded when it is asked for."""
    late_result_size: Mapped[int | None]
    """How many bytes ``late_result`` has."""
    late_result_digest: Mapped[str | None]
    """``sha256:...`` of that result, also when it was too large to keep."""
    job: Mapped[Job]
    """Its job. Not loaded unless asked for."""

    @property
    def is_live(self) -> bool:
        """True while it holds the lease, renewed in time or not."""
        return self.state.is_live

    def __repr__(self) -> str:
        return f"<Attempt {self.fencing_token} of {self.job_id} {self.state}>"


def models_for(prefix: str, schema: str | None = None) -> tuple[type[Job], type[Attempt]]:
    """Return the two classes for the tables of a store.

    Args:
        prefix: ``lease_store_table_prefix``.
        schema: ``lease_store_schema``.

    Returns:
        ``Job`` and ``Attempt`` for the default tables, subclasses of them for others.

    .. versionadded:: 0.1
    """
    if (prefix, schema) == (DEFAULT_PREFIX, None):
        return Job, Attempt
    return _others(prefix, schema)


@cache
def _others(prefix: str, schema: str | None) -> tuple[type[Job], type[Attempt]]:
    job, attempt = type("Job", (Job,), {}), type("Attempt", (Attempt,), {})
    _map(job, attempt, prefix, schema)
    return job, attempt


def _map(job: type[Job], attempt: type[Attempt], prefix: str, schema: str | None) -> None:
    # Tables of their own, so that the states are read as words and the store's stay as they are.
    tables = build_tables(prefix, schema)
    for column, words in (
        (tables.job.c.state, JobState),
        (tables.job.c.on_expiry, OnExpiry),
        (tables.attempt.c.state, AttemptState),
        (tables.attempt.c.late_outcome, LateOutcome),
    ):
        column.type = _words(words)
    _map_one(
        job,
        Job,
        tables.job,
        large=("result",),
        result_size=column_property(sa.func.length(tables.job.c.result)),
        attempts=relationship(
            attempt,
            primaryjoin=_attempts_of(tables),
            order_by=tables.attempt.c.fencing_token,
            viewonly=True,
            lazy="raise",
        ),
    )
    _map_one(
        attempt,
        Attempt,
        tables.attempt,
        large=("traceback", "late_result"),
        late_result_size=column_property(sa.func.length(tables.attempt.c.late_result)),
        job=relationship(
            job, primaryjoin=_attempts_of(tables), viewonly=True, lazy="raise", uselist=False
        ),
    )


def _attempts_of(tables: Tables) -> sa.ColumnElement[bool]:
    return tables.job.c.id == foreign(tables.attempt.c.job_id)


def _map_one(
    model: type[Any], default: type[Any], table: sa.Table, *, large: tuple[str, ...], **more: Any
) -> None:
    properties = {name: deferred(table.c[name]) for name in large} | more
    # "Concrete": a subclass with a whole table of its own; a query for one reads one table.
    inherited = {} if model is default else {"inherits": default, "concrete": True}
    # A registry each: within one, two classes named Job are a warning.
    registry().map_imperatively(model, table, properties=properties, **inherited)


def _words(words: type[Enum]) -> sa.Enum:
    return sa.Enum(
        words,
        native_enum=False,
        create_constraint=False,
        values_callable=lambda members: [member.value for member in members],
    )


_map(Job, Attempt, DEFAULT_PREFIX, None)
