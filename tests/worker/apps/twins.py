"""Tasks that exist twice, alike but for the lease: ``plain.…`` and ``leased.…``.

Each body writes its name into the ledger, and returns it with what it was given: the value of a
canvas tells which steps it has gone through, and with what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task

from celery_lease import LeasedTask

if TYPE_CHECKING:
    from celery import Celery

KINDS = {"plain": Task, "leased": LeasedTask}


def add_twins(app: Celery, book: Any) -> None:
    """Add them to the app of these tests."""
    for kind, base in KINDS.items():
        _add_kind(app, book, kind, base)


def _add_kind(app: Celery, book: Any, kind: str, base: type[Task]) -> None:
    options = {"base": base, "bind": True}

    @app.task(**options, name=f"{kind}.work", max_retries=2)
    def work(self: Task, *values: Any, tag: str, name: str, then: str = "") -> list[Any]:
        book.note(tag, name)
        if then == "fail":
            raise ValueError(name)
        return [name, *values]

    # One argument of Celery's: it is sent as a task of its own.
    @app.task(**options, name=f"{kind}.on_error")
    def on_error(self: Task, failed: str, *, tag: str, name: str) -> list[str]:
        book.note(tag, name)
        return [name, failed]
