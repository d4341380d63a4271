"""``renew`` and ``extend``: what moves the end of a lease, on the attempt rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import case, select, tuple_
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Held, Renewal, Renewed
from celery_lease.states import LIVE_STATES, AttemptState
from celery_lease.store.dialects import Later, by_primary_key, clock, unindexed
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import clean

#: Reports in one statement, in bytes: with each escaped, as the drivers of MySQL do, still less
#: than the smallest ``max_allowed_packet`` that a server has by default (16 MiB, MariaDB).
REPORT_BYTES = 2 * 1024 * 1024


def renew(store: Store, renewals: Sequence[Renewal]) -> Renewed:
    """Move the expiry of all leases of a process, in one statement on the attempt rows alone.

    Reports of more than ``REPORT_BYTES`` take a statement more each time, after that of the leases
    which say little. A report that the database refuses keeps no lease from being renewed.

    A renewal that arrives after the expiry but before anything was done about it succeeds
    (seed S4, B098). Rows locked by another transaction are skipped: unanswered, not lost.

    Args:
        store: the store.
        renewals: the leases, with the progress and checkpoints that changed. When a stop was
            requested or a message acknowledged is written once: saying it again changes nothing.

    Returns:
        Which were renewed, which are lost, and which must be asked for again.

    Raises:
        StoreUnavailable: nothing is known; the local deadline goes on running.
    """
    if not renewals:
        return Renewed(frozenset(), {}, frozenset())
    renewed: set[tuple[str, int]] = set()
    refused: set[tuple[str, int]] = set()
    for batch in _batches(renewals):
        _renew_batch(store, batch, renewed, refused)
    missing = {_pair(r) for r in renewals} - renewed
    lost: dict[tuple[str, int], AttemptState | None] = {}
    unanswered: set[tuple[str, int]] = set()
    if missing:
        ends = store.retrying(lambda: _attempt_states(store, missing), tries=2)
        for pair in missing:
            state = ends.get(pair)
            if state is not None and state.is_live:
                unanswered.add(pair)
            else:
                lost[pair] = state
    return Renewed(frozenset(renewed), lost, frozenset(unanswered), frozenset(refused))


def _pair(renewal: Renewal) -> tuple[str, int]:
    return renewal.lease.job_id, renewal.lease.fencing_token


def _batches(renewals: Sequence[Renewal]) -> Iterator[list[Renewal]]:
    """Give renewals by statements that the database takes, the smallest first."""
    batch: list[Renewal] = []
    size = 0
    for renewal in sorted(renewals, key=lambda r: r.report_bytes):
        if batch and size + renewal.report_bytes > REPORT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(renewal)
        size += renewal.report_bytes
    yield batch


def _renew_batch(
    store: Store,
    batch: Sequence[Renewal],
    renewed: set[tuple[str, int]],
    refused: set[tuple[str, int]],
) -> None:
    """Renew by one statement; if that fails, without the reports, and then each with its own.

    A packet that is too large looks like an outage: MariaDB cuts the connection. In an outage the
    second statement fails, too.
    """
    try:
        renewed |= store.retrying(lambda: _renew_rows(store, batch), tries=2)
    except (StoreUnavailable, DBAPIError):
        reporting = [r for r in batch if r.report_bytes]
        if not reporting:
            raise
        bare = [replace(r, progress=None, checkpoint=None) for r in batch]
        renewed |= store.retrying(lambda: _renew_rows(store, bare), tries=2)
        if len(reporting) == 1:
            refused.update(renewed & {_pair(r) for r in reporting})
            return
        for one in reporting:
            _renew_batch(store, [one], renewed, refused)


def _renew_rows(store: Store, renewals: Sequence[Renewal]) -> set[tuple[str, int]]:
    attempt = store.tables.attempt
    pairs = tuple_(attempt.c.job_id, attempt.c.fencing_token)
    leases = [r.lease for r in renewals]
    guard = _live_rows_of(attempt, leases)
    # The pair as one text: PostgreSQL makes a list of (id, token) rows an OR of as many
    # conditions, and 500 leases took it a second.
    exactly = _pair_text(attempt).in_([_pair_key(lease) for lease in leases])
    free = by_primary_key(
        select(attempt.c.job_id, attempt.c.fencing_token)
        .where(*guard, exactly)
        .with_for_update(skip_locked=True),
        attempt,
    )
    change = by_primary_key(sa.update(attempt).values(_renewal_values(attempt, renewals)), attempt)
    if store.dialect.returning:
        # The sub-select only keeps the UPDATE from waiting; the guards stand in both. Not as a
        # join, which PostgreSQL makes a loop in a loop when it expects one row.
        statement = change.where(unindexed(pairs.in_(free)), *guard).returning(
            attempt.c.job_id, attempt.c.fencing_token
        )
        with store.single() as connection:
            return {(row[0], row[1]) for row in connection.execute(statement)}
    with store.transaction() as connection:
        got = {(row[0], row[1]) for row in connection.execute(free)}
        if got:
            connection.execute(change.where(pairs.in_(sorted(got)), *guard))
        return got


def _live_rows_of(attempt: Any, leases: Sequence[Held]) -> list[ColumnElement[bool]]:
    return [
        attempt.c.job_id.in_([lease.job_id for lease in leases]),
        attempt.c.owner.in_(sorted({lease.owner for lease in leases})),
        unindexed(
            attempt.c.ended_at.is_(None),
            attempt.c.state.in_([state.value for state in LIVE_STATES]),
        ),
    ]


def _pair_text(attempt: Any) -> ColumnElement[str]:
    token = sa.cast(attempt.c.fencing_token, sa.String(20))
    return sa.cast(attempt.c.job_id, sa.String(255)).concat(":").concat(token)


def _pair_key(lease: Held) -> str:
    return f"{lease.job_id}:{lease.fencing_token}"


def _renewal_values(attempt: Any, renewals: Sequence[Renewal]) -> dict[Any, Any]:
    values: dict[Any, Any] = {
        attempt.c.lease_expires_at: Later(clock(), attempt.c.lease_seconds),
        attempt.c.last_renewed_at: clock(),
        attempt.c.renewal_count: attempt.c.renewal_count + 1,
        attempt.c.state: AttemptState.ACTIVE.value,
    }
    # By job *and token*: a process that lost a job and claimed it again asks for both once.
    for column, texts in (
        (attempt.c.progress, [(r.lease, r.progress) for r in renewals]),
        (attempt.c.checkpoint, [(r.lease, r.checkpoint) for r in renewals]),
    ):
        changed = {
            _pair_key(lease): sa.literal(clean(text), sa.Text)
            for lease, text in texts
            if text is not None
        }
        if changed:
            values[column] = case(changed, value=_pair_text(attempt), else_=column)
    for column, leases in (
        (attempt.c.stop_requested_at, [r.lease for r in renewals if r.stop_requested]),
        (attempt.c.acknowledged_at, [r.lease for r in renewals if r.acknowledged]),
    ):
        if leases:
            said = _pair_text(attempt).in_([_pair_key(lease) for lease in leases])
            values[column] = case((said, sa.func.coalesce(column, clock())), else_=column)
    return values


def _attempt_states(
    store: Store, pairs: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], AttemptState]:
    attempt = store.tables.attempt
    statement = select(attempt.c.job_id, attempt.c.fencing_token, attempt.c.state).where(
        tuple_(attempt.c.job_id, attempt.c.fencing_token).in_(sorted(pairs))
    )
    with store.single() as connection:
        rows = connection.execute(statement).all()
    return {(row[0], row[1]): AttemptState(row[2]) for row in rows}


def extend(store: Store, *, ended_since: datetime | None) -> int:
    """Grant the amnesty: leases that ended while no pass was made get a full lease from now.

    Args:
        store: the store.
        ended_since: when the last completed pass ended, None when there was none.

    Returns:
        How many were extended. A lease is extended at most once between two renewals, so
        that a dead runner is not kept for ever by passes that are always late.
    """
    attempt = store.tables.attempt
    guard = [
        attempt.c.ended_at.is_(None),
        attempt.c.lease_expires_at < clock(),
        sa.or_(attempt.c.extended_at.is_(None), attempt.c.extended_at < attempt.c.last_renewed_at),
    ]
    if ended_since is not None:
        guard.append(attempt.c.lease_expires_at >= ended_since)
    pairs = tuple_(attempt.c.job_id, attempt.c.fencing_token)
    free = (
        select(attempt.c.job_id, attempt.c.fencing_token)
        .where(*guard)
        .with_for_update(skip_locked=True)
    )
    change = by_primary_key(
        sa.update(attempt).values(
            {
                attempt.c.lease_expires_at: Later(clock(), attempt.c.lease_seconds),
                attempt.c.extended_at: clock(),
            }
        ),
        attempt,
    )

    def work() -> int:
        if store.dialect.returning:
            with store.single() as connection:
                return int(connection.execute(change.where(pairs.in_(free), *guard)).rowcount)
        with store.transaction() as connection:
            got = [(row[0], row[1]) for row in connection.execute(free)]
            if not got:
                return 0
            return int(connection.execute(change.where(pairs.in_(got), *guard)).rowcount)

    return store.retrying(work)
