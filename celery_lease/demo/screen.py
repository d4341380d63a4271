"""What the demo shows, and how: one protocol, two plain ways to show it, and the choice.

``rich_screen`` is the third way, taken on a terminal where rich is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TextIO

from celery_lease.demo.verdict import Check

#: Seconds between two lines of progress where nothing can be redrawn.
_PROGRESS_SECONDS = 5.0


class Kind(Enum):
    """What kind of thing happened."""

    STEP = "·"
    KILLED = "✖"
    FROZEN = "‖"
    THAWED = "▸"
    RECOVERED = "↻"
    REJECTED = "⊘"
    DONE = "✓"


@dataclass(frozen=True, slots=True)
class Happened:
    """One line of the story: seconds since the start, and a sentence with `names` in backticks."""

    seconds: float
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker now: its name, how it is, and what it is at."""

    name: str
    condition: str
    doing: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that moves."""

    seconds: float
    done: int
    total: int
    workers: Sequence[WorkerView]


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One attempt of a job that needed more than one, in words."""

    job: str
    token: str
    worker: str
    claimed: str
    ended: str
    state: str
    reason: str
    late: str


HISTORY_TITLES = HistoryRow(
    "job", "token", "worker", "claimed", "ended", "ended as", "why", "its late result"
)


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of the show."""

    history: Sequence[HistoryRow]
    checks: Sequence[Check]
    summary: str

    @property
    def holds(self) -> bool:
        """True when every check does."""
        return all(check.holds for check in self.checks)


class Screen(Protocol):
    """Where the demo is shown."""

    def open(self, lines: Sequence[str]) -> None:
        """Say what is coming."""

    def tell(self, happened: Happened) -> None:
        """Add a line to the story."""

    def show(self, snapshot: Snapshot) -> None:
        """Bring what moves up to date."""

    def settle(self) -> None:
        """Take away what moves: nothing moves any more."""

    def close(self, closing: Closing) -> None:
        """Show history and verdict."""


class SilentScreen:
    """Shows nothing (``--json``)."""

    def open(self, lines: Sequence[str]) -> None:
        """Nothing."""

    def tell(self, happened: Happened) -> None:
        """Nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def close(self, closing: Closing) -> None:
        """Nothing."""


class PlainScreen:
    """Lines of text, for a pipe, a log, or where rich is missing.

    Args:
        out: where they go.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_fancy = is_unicode(out)
        self._next_progress = _PROGRESS_SECONDS
        self._last_done = -1

    def open(self, lines: Sequence[str]) -> None:
        """Say what is coming."""
        for line in lines:
            self._write(line.replace("`", ""))
        self._write("")

    def tell(self, happened: Happened) -> None:
        """Add a line to the story."""
        mark = f"{happened.kind.value} " if self._is_fancy else ""
        self._write(f"{happened.seconds:5.1f} s  {mark}{happened.text.replace('`', '')}")

    def show(self, snapshot: Snapshot) -> None:
        """Add a line about the progress now and then, if there was some."""
        if snapshot.seconds < self._next_progress or snapshot.done == self._last_done:
            return
        self._next_progress = snapshot.seconds + _PROGRESS_SECONDS
        self._last_done = snapshot.done
        self.tell(
            Happened(snapshot.seconds, Kind.STEP, f"{snapshot.done} of {snapshot.total} jobs")
        )

    def settle(self) -> None:
        """Nothing moves here."""

    def close(self, closing: Closing) -> None:
        """Show history and verdict."""
        self._write("\nattempts of the jobs that needed more than one")
        rows = [_cells(row) for row in (HISTORY_TITLES, *closing.history)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._write("  " + "  ".join(padded).rstrip())
        self._write("\nverdict")
        for check in closing.checks:
            self._write(f"  {self._mark(check)} {check.claim}: {check.found or '-'}")
            for problem in check.problems:
                self._write(f"      {problem}")
        self._write(f"\n{closing.summary}")

    def _mark(self, check: Check) -> str:
        if self._is_fancy:
            return "✓" if check.holds else "✗"
        return "ok  " if check.holds else "FAIL"

    def _write(self, line: str) -> None:
        if not self._is_fancy:
            line = line.replace("…", "...").encode("ascii", "replace").decode()
        self._out.write(f"{line}\n")
        self._out.flush()


def screen_for(out: TextIO) -> Screen:
    """Return the best way to show the demo there."""
    if out.isatty() and is_unicode(out):
        try:
            from celery_lease.demo.rich_screen import RichScreen  # noqa: PLC0415  rich is optional
        except ImportError:
            return PlainScreen(out)
        return RichScreen()
    return PlainScreen(out)


def standard_screen(*, is_silent: bool) -> Screen:
    """Return the screen for standard output."""
    return SilentScreen() if is_silent else screen_for(sys.stdout)


def is_unicode(out: TextIO) -> bool:
    """Tell whether a stream can carry more than ASCII."""
    return "utf" in (out.encoding or "").lower()


def _cells(row: HistoryRow) -> list[str]:
    return [
        row.job,
        row.token,
        row.worker,
        row.claimed,
        row.ended,
        row.state,
        row.reason,
        row.late,
    ]
