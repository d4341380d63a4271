"""The witness: one table in the store's database that says in which order things happened.

Bodies write their effects into it under a guard, as ``design.md`` §11 asks of a fenced transaction;
triggers write down each claim and each end of a job, and what must never be: a change of what
had ended. All rows of one job are written while its row is locked, so that within a job the
sequence number is the order of the commits, whatever any clock says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

from celery_lease.records import Held
from celery_lease.store.schema import build_tables

_STORE = build_tables()
_metadata = sa.MetaData()

WITNESS = sa.Table(
    "soak_witness",
    _metadata,
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("job_id", sa.String(255), nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("step", sa.String(64), nullable=False, default=""),
    sa.Column("detail", sa.String(64)),
    # Of an effect alone: a commit whose reply was lost is repeated, and must not count twice.
    sa.Column("mark", sa.String(255), unique=True),
    sqlite_autoincrement=True,
)


@dataclass(frozen=True)
class _Trigger:
    """A trigger that writes a row. Conditions are SQL with ``{differs:a,b}`` resolved by database.

    Args:
        kind: of the row, and of the trigger's name.
        table: whose rows it watches.
        on: ``INSERT`` or ``UPDATE``.
        job: the column with the job's id.
        when: its condition, empty for always.
        changed: columns of which one must have changed, besides.
    """

    kind: str
    table: str
    on: str
    job: str
    when: str = ""
    changed: tuple[str, ...] = ()


_TRIGGERS = (
    _Trigger("claimed", _STORE.attempt.name, "INSERT", "job_id"),
    _Trigger(
        "rewritten",
        _STORE.attempt.name,
        "UPDATE",
        "job_id",
        when="OLD.ended_at IS NOT NULL",
        changed=("state", "ended_at", "stop_reason"),
    ),
    _Trigger(
        "finished",
        _STORE.job.name,
        "UPDATE",
        "id",
        when="OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL",
    ),
    _Trigger(
        "reopened",
        _STORE.job.name,
        "UPDATE",
        "id",
        when="OLD.finished_at IS NOT NULL",
        changed=("state", "finished_at", "accepted_attempt", "fencing_token", "result"),
    ),
    _Trigger(
        "jumped",
        _STORE.job.name,
        "UPDATE",
        "id",
        when="NEW.fencing_token <> OLD.fencing_token "
        "AND NEW.fencing_token <> OLD.fencing_token + 1",
    ),
)


def create(store_url: str) -> None:
    """Make the table and its triggers; the store's own tables must be there."""
    engine = engine_of(store_url)
    with engine.begin() as connection:
        _metadata.create_all(connection)
        for trigger in _TRIGGERS:
            for statement in _statements(trigger, connection.dialect.name):
                connection.exec_driver_sql(statement)
    engine.dispose()


def _statements(trigger: _Trigger, dialect: str) -> list[str]:
    conditions = [trigger.when] if trigger.when else []
    if trigger.changed:
        differs = [_differs(column, dialect) for column in trigger.changed]
        conditions.append(f"({' OR '.join(differs)})")
    condition = " AND ".join(conditions)
    insert = (
        "INSERT INTO soak_witness (kind, job_id, token, step, detail) VALUES "
        f"('{trigger.kind}', NEW.{trigger.job}, NEW.fencing_token, '', NEW.state)"
    )
    name, head = f"soak_{trigger.kind}", f"AFTER {trigger.on} ON {trigger.table} FOR EACH ROW"
    if dialect == "postgresql":
        when = f"WHEN ({condition})" if condition else ""
        body = f"$$ BEGIN {insert}; RETURN NULL; END $$"
        return [
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS {body}",
            f"CREATE TRIGGER {name} {head} {when} EXECUTE FUNCTION {name}()",
        ]
    if dialect == "sqlite":
        when = f"WHEN {condition}" if condition else ""
        return [f"CREATE TRIGGER {name} {head} {when} BEGIN {insert}; END"]
    body = f"IF {condition} THEN {insert}; END IF" if condition else insert
    return [f"CREATE TRIGGER {name} {head} BEGIN {body}; END"]


def _differs(column: str, dialect: str) -> str:
    old, new = f"OLD.{column}", f"NEW.{column}"
    if dialect == "postgresql":
        return f"{new} IS DISTINCT FROM {old}"
    return f"{new} IS NOT {old}" if dialect == "sqlite" else f"NOT ({new} <=> {old})"


def engine_of(store_url: str, **options: Any) -> sa.Engine:
    """Return an engine that keeps no connection: nothing that a fork or a cut could spoil.

    With bounds: a client that hangs would hold what it has locked.
    """
    arguments = _ARGUMENTS[sa.make_url(store_url).get_backend_name()]
    return sa.create_engine(store_url, poolclass=NullPool, connect_args=arguments, **options)


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "postgresql": {
        "connect_timeout": 3,
        "options": "-c idle_in_transaction_session_timeout=5000 -c lock_timeout=2000",
    },
    "mysql": {"connect_timeout": 3, "read_timeout": 5, "write_timeout": 5},
    "sqlite": {"timeout": 5},
}


class Witness:
    """Writes effects.

    Args:
        store_url: of the store, as this process reaches it.
    """

    def __init__(self, store_url: str) -> None:
        self._is_sqlite = store_url.startswith("sqlite")
        # SQLite: our own BEGIN, see ``write``.
        options = {"isolation_level": "AUTOCOMMIT"} if self._is_sqlite else {}
        self._engine = engine_of(store_url, **options)

    def write(self, held: Held, step: str) -> bool:
        """Write an effect if the job is still *mine*, in one transaction with the look.

        Returns:
            False: it is not, and nothing was written.
        """
        job = _STORE.job
        mine = (
            sa.select(job.c.id)
            .where(
                job.c.id == held.job_id,
                job.c.state == "running",
                job.c.fencing_token == held.fencing_token,
                job.c.lease_owner == held.owner,
            )
            # While this is held nobody takes over. SQLite has one writer at a time instead.
            .with_for_update(read=True)
        )
        row = {
            "kind": "effect",
            "job_id": held.job_id,
            "token": held.fencing_token,
            "step": step,
            "mark": f"{held.job_id} {held.fencing_token} {step}",
        }
        with self._engine.connect() as connection:
            if self._is_sqlite:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            if connection.execute(mine).first() is None:
                self._end(connection, "ROLLBACK")
                return False
            try:
                connection.execute(WITNESS.insert(), row)
            except IntegrityError:
                # The mark is this attempt's alone: an earlier call's commit had arrived.
                self._end(connection, "ROLLBACK")
                return True
            self._end(connection, "COMMIT")
        return True

    def _end(self, connection: sa.Connection, how: str) -> None:
        if self._is_sqlite:
            connection.exec_driver_sql(how)
        elif how == "COMMIT":
            connection.commit()
        else:
            connection.rollback()
