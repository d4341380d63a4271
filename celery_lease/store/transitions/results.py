"""What the result backend keeps beside the jobs: results, groups, and what a chord has counted.

Of a leased job the job row itself is the result, and only what that row has no place for comes
here (its children, its own custom states), under the fencing token of the attempt that said it.
A task without a lease has its result here, under token 0.

Called by ``backend`` only. No arrow of a job is here: nothing of this changes a job's state.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from celery_lease.store.dialects import Later, clock, clock_once, insert_if_absent
from celery_lease.store.engine import Store
from celery_lease.store.transitions.statements import FINAL, clean

#: Celery's word for a success: the one that nothing is written over.
SUCCESS = "SUCCESS"
#: Kept for a leased job whose result the user forgot; no word of Celery's.
FORGOTTEN = "FORGOTTEN"


def keep_result(
    store: Store, task_id: str, *, status: str, meta: bytes, fencing_token: int = 0
) -> bool:
    """Keep a state of a task, with its encoded meta.

    The first success wins, as in Celery's own backends, and a smaller token never writes over a
    larger one: a stale attempt changes nothing that its successor has said.

    Args:
        store: the store.
        task_id: Celery's task id.
        status: Celery's state, or the user's own word.
        meta: the whole meta as the backend encodes it.
        fencing_token: of the attempt that says it, 0 without a lease.

    Returns:
        False when a success, or a later attempt's word, is there.
    """
    table = store.tables.result
    values = {"status": clean(status, 255), "meta": meta, "fencing_token": fencing_token}
    may = sa.or_(
        table.c.fencing_token < fencing_token,
        sa.and_(
            table.c.fencing_token == fencing_token, table.c.status.not_in([SUCCESS, FORGOTTEN])
        ),
    )

    def work() -> bool:
        # Most tasks store one state, their last.
        if _insert_if_absent(store, table, task_id=task_id, stored_at=clock(), **values):
            return True
        change = sa.update(table).where(table.c.task_id == task_id, may)
        with store.single() as connection:
            statement = change.values(stored_at=clock(), **values)
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def forget_result(store: Store, task_id: str) -> None:
    """Forget what a task gave. The record of a leased job stays, without its result.

    The bytes of an unsettled job stay too, until it is pruned: a replay still needs them.
    """
    job, table = store.tables.job, store.tables.result
    final = job.c.state.in_(FINAL)
    known = select(job.c.fencing_token).where(job.c.id == task_id, final)
    dropped = (
        sa.update(job)
        .where(job.c.id == task_id, final, job.c.settled_at.is_not(None))
        .values(result=None, result_type=None)
    )

    def work() -> None:
        with store.transaction() as connection:
            # The job first, as everywhere: the order of the locks.
            connection.execute(dropped)
            token = connection.execute(known).scalar()
            connection.execute(sa.delete(table).where(table.c.task_id == task_id))
            if token is not None:
                connection.execute(
                    sa.insert(table).values(
                        task_id=task_id,
                        status=FORGOTTEN,
                        meta=None,
                        fencing_token=token,
                        stored_at=clock(),
                    )
                )

    store.retrying(work)


def keep_group(store: Store, group_id: str, *, result: bytes) -> None:
    """Keep which results belong to a group; a second call writes over the first."""
    table = store.tables.group

    def work() -> None:
        values = {"result": result, "stored_at": clock()}
        if not _insert_if_absent(store, table, id=group_id, **values):
            with store.single() as connection:
                connection.execute(sa.update(table).where(table.c.id == group_id).values(**values))

    store.retrying(work)


def drop_group(store: Store, group_id: str) -> None:
    """Forget which results belong to a group; the results stay."""
    table = store.tables.group

    def work() -> None:
        with store.single() as connection:
            connection.execute(sa.delete(table).where(table.c.id == group_id))

    store.retrying(work)


# -- chords ----------------------------------------------------------------------------------


def size_chord(
    store: Store, chord_id: str, *, size: int | None = None, header: bytes | None = None
) -> None:
    """Say how many parts a chord has, or how its header is nested; what is None stays."""
    table = store.tables.chord
    values = {
        name: value for name, value in (("size", size), ("header", header)) if value is not None
    }

    def work() -> None:
        if _insert_if_absent(store, table, id=chord_id, created_at=clock(), **values):
            return
        with store.single() as connection:
            connection.execute(sa.update(table).where(table.c.id == chord_id).values(**values))

    store.retrying(work)


def expect_part(store: Store, chord_id: str, task_id: str) -> None:
    """Add one more part to a chord; the same one again changes nothing."""
    values = {"chord_id": chord_id, "task_id": task_id, "is_added": True, "stored_at": clock()}
    store.retrying(lambda: _insert_if_absent(store, store.tables.chord_part, **values))


def count_part(
    store: Store, chord_id: str, task_id: str, *, status: str, result: bytes, position: int | None
) -> bool:
    """Count one part of a chord, once, however often it is told.

    Args:
        store: the store.
        chord_id: Celery's group id.
        task_id: the part.
        status: how it ended.
        result: its encoded result.
        position: its place in the header, None behind all others.

    Returns:
        False when it had been counted: a replay, or a message that was delivered twice.
    """
    table = store.tables.chord_part
    values = {"status": status, "result": result, "position": position}

    def work() -> bool:
        key = {"chord_id": chord_id, "task_id": task_id}
        if _insert_if_absent(store, table, **key, is_added=False, stored_at=clock(), **values):
            return True
        # There already: expected by ``expect_part``, or counted.
        change = sa.update(table).where(
            table.c.chord_id == chord_id, table.c.task_id == task_id, table.c.status.is_(None)
        )
        with store.single() as connection:
            statement = change.values(stored_at=clock(), **values)
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def claim_chord(store: Store, chord_id: str, nonce: str, *, claim_seconds: float) -> bool:
    """Take it on oneself to fire a chord whose parts are all there; one caller may.

    Args:
        store: the store.
        chord_id: the chord.
        nonce: names the caller, so that its repetition after a lost reply wins again.
        claim_seconds: how long another one's claim is respected: its process may be dead.

    Returns:
        False when it has been fired, or somebody else is about to.
    """
    table = store.tables.chord
    statement = (
        sa.update(table)
        .where(
            table.c.id == chord_id,
            table.c.fired_at.is_(None),
            sa.or_(
                table.c.claim_nonce.is_(None),
                table.c.claim_nonce == nonce,
                table.c.claimed_at < Later(clock(), -claim_seconds),
            ),
        )
        .values(claim_nonce=nonce, claimed_at=clock())
    )

    def work() -> bool:
        with store.single() as connection:
            return connection.execute(statement).rowcount == 1

    return store.retrying(work)


def yield_chord(store: Store, chord_id: str, nonce: str) -> None:
    """Give up a claim: the body was not published, and another part's word may do it at once."""
    table = store.tables.chord
    statement = (
        sa.update(table)
        .where(table.c.id == chord_id, table.c.claim_nonce == nonce, table.c.fired_at.is_(None))
        .values(claim_nonce=None, claimed_at=None)
    )

    def work() -> None:
        with store.single() as connection:
            connection.execute(statement)

    store.retrying(work)


def close_chord(store: Store, chord_id: str) -> None:
    """Record that a chord's body, or its error path, has been published; its parts go.

    Whoever held the claim by then: what was published cannot be taken back.
    """
    chord, part = store.tables.chord, store.tables.chord_part

    def work() -> None:
        with store.transaction() as connection:
            connection.execute(
                sa.update(chord)
                .where(chord.c.id == chord_id, chord.c.fired_at.is_(None))
                .values(fired_at=clock())
            )
            connection.execute(sa.delete(part).where(part.c.chord_id == chord_id))

    store.retrying(work)


# -- the end of it ---------------------------------------------------------------------------


def prune_results(
    store: Store, *, seconds: float, waiting_seconds: float | None, limit: int
) -> int:
    """Remove results, groups and chords older than so many seconds (``result_expires``).

    A chord whose body was not published yet may wait for a long step of a chain, of which no row
    says that it belongs to the chord. So it stays for longer, and in any case while a leased part
    of it is not settled, or its newest part is younger. Results of leased jobs go with their jobs
    (``prune``), and so does the word that one was forgotten.

    Args:
        store: the store.
        seconds: their age.
        waiting_seconds: the age of a chord that waits, None for ever; not below ``seconds``.
        limit: rows of a kind at most; call again while something was removed.

    Returns:
        How many rows were removed.
    """
    tables = store.tables
    removed = 0
    result, group, job = tables.result, tables.group, tables.job
    # Else a job that was forgotten would be remembered.
    said = sa.or_(result.c.status != FORGOTTEN, ~sa.exists().where(job.c.id == result.c.task_id))
    removed += _remove(store, result, result.c.stored_at, seconds, limit, said)
    removed += _remove(store, group, group.c.stored_at, seconds, limit)
    chord, part = tables.chord, tables.chord_part
    fired = chord.c.fired_at.is_not(None)
    removed += _remove(store, chord, chord.c.created_at, seconds, limit, fired)
    if waiting_seconds is not None:
        given_up = _given_up(store, waiting_seconds)
        removed += _remove(store, chord, chord.c.created_at, waiting_seconds, limit, *given_up)
    # Also what a late replay left of a chord that had gone.
    waits = sa.exists().where(chord.c.id == part.c.chord_id, chord.c.fired_at.is_(None))
    return removed + _remove(store, part, part.c.stored_at, seconds, limit, ~waits)


def _given_up(store: Store, waiting_seconds: float) -> list[Any]:
    """Return the condition of a chord whose parts have not been heard of, and will not be."""
    chord, part, job = store.tables.chord, store.tables.chord_part, store.tables.job
    fresh = sa.exists().where(
        part.c.chord_id == chord.c.id, part.c.stored_at >= Later(clock_once(), -waiting_seconds)
    )
    # Not settled: it runs or will run, or its word has still to come. Not correlated: groups have
    # no index, and so the jobs are read once, if at all.
    coming = select(job.c.group_id).where(job.c.settled_at.is_(None), job.c.group_id.is_not(None))
    return [chord.c.fired_at.is_(None), ~fresh, chord.c.id.not_in(coming)]


def _remove(
    store: Store, table: sa.Table, age: Any, seconds: float, limit: int, *guard: Any
) -> int:
    keys = list(table.primary_key.columns)
    old = (
        select(*keys)
        .where(age < Later(clock_once(), -seconds), *guard)
        .order_by(age)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )

    def work() -> int:
        with store.transaction() as connection:
            found = sorted(tuple(row) for row in connection.execute(old))
            if not found:
                return 0
            these = sa.tuple_(*keys).in_(found)
            gone = sa.delete(table).where(these, age < Later(clock_once(), -seconds))
            return int(connection.execute(gone).rowcount)

    return store.retrying(work)


def _insert_if_absent(store: Store, table: sa.Table, **values: Any) -> bool:
    """Insert a row; False when its key is there."""
    if store.dialect.writing_ctes:
        # Not the row count: SQLAlchemy keeps none of an INSERT. And no error in the server's log.
        statement = insert_if_absent(table).values(**values).returning(sa.literal(1))
        with store.single() as connection:
            return connection.execute(statement).first() is not None
    try:
        with store.single() as connection:
            connection.execute(sa.insert(table).values(**values))
    except IntegrityError:
        return False
    return True
