"""Counting statements: in PostgreSQL, or, where it lacks the extension, by SQLAlchemy's events."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, event

#: Statements that only frame others; each is a round trip all the same.
FRAMES = ("BEGIN", "COMMIT", "ROLLBACK")


@dataclass(frozen=True, slots=True)
class SqlCounts:
    """What one role has sent.

    Attributes:
        statements: top-level statements without BEGIN, COMMIT, ROLLBACK.
        round_trips: with them.
        each: (calls, text) of every statement, the most frequent first; empty by events.
        wal_bytes: write-ahead log they made; 0 by events.
    """

    statements: int
    round_trips: int
    each: tuple[tuple[int, str], ...] = ()
    wal_bytes: int = 0

    def per_job(self, jobs: int) -> float:
        """Return the statements a job, without those that belong to no job (the reaper's …).

        A statement belongs to a job if it was sent at least half as often as there are jobs.
        """
        if not self.each:
            return self.statements / jobs
        return sum(calls for calls, text in self.each if calls >= jobs / 2 and _is_own(text)) / jobs


def _is_own(text: str) -> bool:
    return not text.upper().startswith(FRAMES)


def from_rows(rows: Iterable[tuple[int, str, int]]) -> SqlCounts:
    """Return the counts of (calls, text, WAL bytes) rows of ``pg_stat_statements``."""
    rows = list(rows)
    each = tuple(sorted(((calls, text) for calls, text, _ in rows), reverse=True))
    return SqlCounts(
        statements=sum(calls for calls, text in each if _is_own(text)),
        round_trips=sum(calls for calls, _ in each),
        each=each,
        wal_bytes=sum(wal for _, _, wal in rows),
    )


def count_by_events(path: Path) -> None:
    """Have every engine of this process note its statements in a file: one letter each."""
    opened: dict[int, int] = {}

    def note(letter: bytes) -> None:
        pid = os.getpid()
        if pid not in opened:
            opened[pid] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(opened[pid], letter)

    def frames(connection: object) -> None:
        options = connection.get_execution_options()  # type: ignore[attr-defined]
        if options.get("isolation_level") != "AUTOCOMMIT":
            note(b"F")

    event.listen(Engine, "before_cursor_execute", lambda *_: note(b"S"))
    for name in ("begin", "commit", "rollback"):
        event.listen(Engine, name, frames)


def from_events(path: Path) -> SqlCounts:
    """Return what ``count_by_events`` noted, and begin anew."""
    letters = path.read_bytes() if path.exists() else b""
    path.write_bytes(b"")
    return SqlCounts(letters.count(b"S"), len(letters))
