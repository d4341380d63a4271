"""Onto stdout: JSON for programs, tables for people, aligned plain text for pipes.

What comes from a task (an error's text, a worker's name) is untrusted: no control character
of it reaches a terminal, and none of it is read as markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a heading.

    Args:
        columns: headings.
        rows: as many cells each.
        empty: what to say when there are no rows.
        right: columns aligned to the right, by heading.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = "nothing found"
    right: frozenset[str] = field(default=frozenset())


def print_json(document: object) -> None:
    """Write one JSON document."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_text(lines: Iterable[str]) -> None:
    """Write lines."""
    for line in lines:
        click.echo(printable(line))


def print_table(table: Table, *, is_plain: bool = False) -> None:
    """Write a table: with rich if it is installed and somebody looks, else as plain text.

    Args:
        table: the table.
        is_plain: True for ``celery --no-color``.
    """
    if not table.rows:
        click.echo(table.empty, err=True)
        return
    if not is_plain and sys.stdout.isatty() and _print_rich(table):
        return
    for line in plain_lines(table):
        click.echo(line)


def plain_lines(table: Table) -> list[str]:
    """Return a table as aligned text, one line a row, nothing cut."""
    lines = [[column.upper() for column in table.columns]]
    lines += [[printable(cell) or "-" for cell in row] for row in table.rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(table.columns))]
    aligned = [
        [
            cell.rjust(width) if column in table.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ]
        for line in lines
    ]
    return ["  ".join(line).rstrip() for line in aligned]


def printable(text: str) -> str:
    """Return text on one line, with what could move a cursor written as an escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _print_rich(table: Table) -> bool:
    """Write a table with rich; False when it is not installed."""
    rich = _rich()
    if rich is None:
        return False
    console, table_class, text = rich
    shown = table_class(box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        shown.add_column(
            column, justify="right" if column in table.right else "left", overflow="fold"
        )
    for row in table.rows:
        shown.add_row(*(text(printable(cell)) for cell in row))
    console().print(shown)
    return True


def _rich() -> tuple[Any, Any, Any] | None:
    """Load rich, which ``celery-lease[cli]`` installs."""
    try:
        from rich.console import Console  # noqa: PLC0415 - optional
        from rich.table import Table as RichTable  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        return None
    return Console, RichTable, Text
