"""The servers of a run: PostgreSQL that waits for the disk, Valkey with its append-only file.

The measured processes connect as the role ``bench``, the measurement itself as ``postgres``, so
that only the former are counted.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import redis

from bench.counting import SqlCounts, from_events, from_rows
from tests.support.folders import ServerFolder
from tests.support.servers import PostgreSQL, Valkey

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_COUNTS = (
    "SELECT s.calls, s.query, s.wal_bytes::bigint FROM pg_stat_statements s"
    " JOIN pg_roles r ON r.oid = s.userid WHERE r.rolname = 'bench' AND s.toplevel"
)
#: Redis commands of the measurement itself.
_OUR_COMMANDS = {"llen", "hlen", "info", "config", "ping", "flushall"}


class Place:
    """The two servers, and a fresh database in each for every run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self.has_statements = False
        self._database: str | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.valkey = stack.enter_context(Valkey(durable=True))
            self.postgresql = self._start_postgresql(stack)
            folder = ServerFolder()
            stack.callback(folder.remove)
            self.folder: Path = folder.path
            self.redis = stack.enter_context(redis.Redis.from_url(self.valkey.url))
            self._admin = stack.enter_context(self.connect("postgres"))
            self._admin.execute("CREATE ROLE bench LOGIN")
            if self.has_statements:
                self._admin.execute("CREATE EXTENSION pg_stat_statements")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start_postgresql(self, stack: ExitStack) -> PostgreSQL:
        options = {"shared_buffers": "128MB"}
        # Debian's contrib modules come with its server; the wheel has none of them.
        self.has_statements = any(Path("/usr/lib/postgresql").glob("*/lib/pg_stat_statements.so"))
        if self.has_statements:
            options |= {
                "shared_preload_libraries": "pg_stat_statements",
                "pg_stat_statements.max": "10000",
            }
        return stack.enter_context(PostgreSQL(durable=True, options=options))

    def connect(self, database: str) -> psycopg.Connection:
        """Return an autocommit connection of the measurement's own role."""
        return psycopg.connect(
            host="127.0.0.1",
            port=self.postgresql.port,
            user="postgres",
            dbname=database,
            autocommit=True,
        )

    def fresh(self) -> str:
        """Empty Valkey, make a new database, and return its SQLAlchemy URL."""
        self.drop()
        self.redis.flushall()
        for leftover in self.folder.iterdir():
            leftover.unlink()
        self._database = f"bench{next(self._numbers)}"
        self.create(self._database)
        return self.url(self._database)

    def create(self, database: str) -> None:
        """Make an empty database of the measured role."""
        self._admin.execute(f"CREATE DATABASE {database} OWNER bench")
        self._admin.execute("CHECKPOINT")

    @property
    def database(self) -> str:
        """The newest database of ``fresh``."""
        assert self._database is not None
        return self._database

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database, for the measured role."""
        return f"postgresql+psycopg://bench@127.0.0.1:{self.postgresql.port}/{database}"

    def drop(self) -> None:
        """Drop the newest database of ``fresh``."""
        if self._database is not None:
            self.remove(self._database)
            self._database = None

    def remove(self, database: str) -> None:
        """Drop a database, whoever is connected to it."""
        self._admin.execute(f"DROP DATABASE {database} WITH (FORCE)")

    # --- counters -----------------------------------------------------------------------------

    @property
    def events_path(self) -> Path | None:
        """Where the processes note their statements; None when the server counts them."""
        return None if self.has_statements else self.folder / "sql"

    def reset_counts(self) -> None:
        """Set all counters to zero."""
        self.redis.config_resetstat()
        if self.events_path is None:
            self._admin.execute("SELECT pg_stat_statements_reset()")
        else:
            from_events(self.events_path)

    def sql_counts(self) -> SqlCounts:
        """Return what was sent to PostgreSQL since ``reset_counts``."""
        if self.events_path is None:
            return from_rows(self._admin.execute(_COUNTS).fetchall())
        return from_events(self.events_path)

    def redis_commands(self) -> int:
        """Return how many commands Valkey has run since ``reset_counts``, ours left out."""
        stats = self.redis.info("commandstats")
        return sum(
            value["calls"]
            for name, value in stats.items()
            if name.removeprefix("cmdstat_").split("|")[0] not in _OUR_COMMANDS
        )

    def undone(self) -> int:
        """Return how many messages wait or are unacknowledged."""
        return int(self.redis.llen("celery")) + int(self.redis.hlen("unacked"))

    def settings(self) -> dict[str, str]:
        """Return the settings of the servers that matter here."""
        names = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
        found = {
            f"postgresql {name}": str(self._admin.execute(f"SHOW {name}").fetchone()[0])  # type: ignore[index]
            for name in names
        }
        info = self.redis.info("server")
        found["valkey version"] = str(info.get("valkey_version") or info["redis_version"])
        for name in ("appendonly", "appendfsync"):
            found[f"valkey {name}"] = str(self.redis.config_get(name)[name])
        return found
