"""The demo on a terminal. Needs rich, which ``celery-lease[cli]`` brings."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from celery_lease.demo.screen import (
    HISTORY_TITLES,
    Closing,
    Happened,
    HistoryRow,
    Kind,
    Snapshot,
    WorkerView,
)

_STYLES = {
    Kind.STEP: "dim",
    Kind.KILLED: "bold red",
    Kind.FROZEN: "bold cyan",
    Kind.THAWED: "bold yellow",
    Kind.RECOVERED: "bold green",
    Kind.REJECTED: "bold magenta",
    Kind.DONE: "bold green",
}
_CONDITIONS = {
    "starting": ("◌", "dim"),
    "at work": ("●", "green"),
    "killed": ("✖", "red"),
    "frozen": ("‖", "cyan"),
    "stopping": ("○", "dim"),
}
_BAR_CELLS = 40


class RichScreen:
    """A story that scrolls, above a few lines that move."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def open(self, lines: Sequence[str]) -> None:
        """Say what is coming."""
        self._console.print()
        for number, line in enumerate(lines):
            self._console.print(_sentence(line, "bold" if number == 0 else ""))
        self._console.print()
        self._live.start()

    def tell(self, happened: Happened) -> None:
        """Add a line to the story."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=7, justify="right", no_wrap=True)
        grid.add_column(width=1)
        grid.add_column()
        grid.add_row(
            Text(f"{happened.seconds:.1f} s", "dim"),
            Text(happened.kind.value, _STYLES[happened.kind]),
            _sentence(happened.text),
        )
        self._console.print(grid)

    def show(self, snapshot: Snapshot) -> None:
        """Draw what moves anew."""
        workers = Table.grid(padding=(0, 2))
        workers.add_column(no_wrap=True)
        workers.add_column(width=8, no_wrap=True)
        workers.add_column(no_wrap=True, overflow="ellipsis")
        for worker in snapshot.workers:
            workers.add_row(*_worker(worker))
        jobs = Table.grid(padding=(0, 2))
        jobs.add_row(
            ProgressBar(snapshot.total, snapshot.done, width=_BAR_CELLS),
            Text(f"{snapshot.done} of {snapshot.total} jobs"),
            Text(f"{snapshot.seconds:.0f} s", "dim"),
        )
        self._live.update(Padding(Group(workers, "", jobs), (1, 0, 0, 2)), refresh=True)

    def settle(self) -> None:
        """Take away what moves."""
        self._live.stop()

    def close(self, closing: Closing) -> None:
        """Show history and verdict."""
        self._console.print()
        self._console.print(_history(closing.history))
        self._console.print()
        self._console.print(_verdict(closing))
        self._console.print()
        self._console.print(Text(closing.summary, "bold green" if closing.holds else "bold red"))


def _worker(worker: WorkerView) -> tuple[Text, Text, Text]:
    mark, style = _CONDITIONS[worker.condition]
    return (
        Text.assemble((mark, style), " ", (worker.name, "bold")),
        Text(worker.condition, style),
        Text(worker.doing),
    )


def _history(rows: Sequence[HistoryRow]) -> Table:
    table = Table(
        title="attempts of the jobs that needed more than one",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    titles = HISTORY_TITLES
    for title in (titles.job, titles.token, titles.worker, titles.claimed, titles.ended):
        right = title in (titles.token, titles.claimed, titles.ended)
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for title in (titles.state, titles.reason, titles.late):
        table.add_column(title)
    for row in rows:
        won = row.state == "completed"
        table.add_row(
            Text(row.job, "bold"),
            row.token,
            row.worker,
            row.claimed,
            row.ended,
            Text(row.state, "green" if won else "yellow"),
            Text(row.reason, "dim"),
            Text(row.late, "magenta"),
        )
    return table


def _verdict(closing: Closing) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=1)
    grid.add_column()
    for check in closing.checks:
        mark = Text("✓", "bold green") if check.holds else Text("✗", "bold red")
        grid.add_row(mark, Text(check.claim, "bold"))
        if check.found:
            grid.add_row("", Text(check.found, "dim"))
        for problem in check.problems:
            grid.add_row("", Text(problem, "red"))
    return grid


def _sentence(text: str, style: str = "") -> Text:
    """Return a sentence with what is in backticks set off."""
    shown = Text(style=style)
    for number, part in enumerate(text.split("`")):
        shown.append(part, "bold blue" if number % 2 else None)
    return shown
