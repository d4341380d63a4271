"""Tasks that exist twice, alike but for the lease: ``plain.…`` and ``leased.…``.

Each body writes its name into the ledger, and returns it with what it was given: the value of a
canvas tells which steps it has gone through, and with what. Under ``<tag> ids`` are the ids.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

from celery import Task, chain, chord, group

from celery_lease import LeasedTask, current_lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

KINDS = {"plain": Task, "leased": LeasedTask}


def add_twins(app: Celery, book: Any) -> None:
    """Add them to the app of these tests."""
    for kind, base in KINDS.items():
        _add_kind(app, book, kind, base)


def _add_kind(app: Celery, book: Any, kind: str, base: type[Task]) -> None:
    options = {"base": base, "bind": True}

    @app.task(**options, name=f"{kind}.work", max_retries=2)
    def work(self: Task, *values: Any, tag: str, name: str, then: str = "") -> Any:
        book.note(tag, name)
        book.note(f"{tag} ids", f"{name} {self.request.id}")
        act, _, what = then.partition(" ")
        if act:
            acts = _Acts(self, book, tag, lambda n, **k: work.s(tag=tag, name=n, **k))
            value = getattr(acts, act)(what)
            if value is not None:
                return [name, value]
        return name if act == "short" else [name, *values]

    @app.task(base=base, name=f"{kind}.item")
    def item(tag: str, number: int) -> int:
        book.note(tag, f"item {number} {current_lease().is_held}")
        return number

    @app.task(base=base, name=f"{kind}.noted")
    def noted(one: list[Any]) -> int:
        return int(item(*one))

    # One argument of Celery's: it is sent as a task of its own.
    @app.task(**options, name=f"{kind}.on_error")
    def on_error(self: Task, failed: str, *, tag: str, name: str) -> list[str]:
        book.note(tag, name)
        return [name, failed]

    # Three: Celery calls it where the failure is told.
    @app.task(base=base, name=f"{kind}.on_error_told")
    def on_error_told(request: Any, error: Any, traceback: Any, *, tag: str, name: str) -> None:
        book.note(tag, f"{name} {error!r}")


class _Acts:
    """What a body does besides: ``fail``, ``retry``, ``replace chain``, ``die once`` and so on."""

    def __init__(self, task: Task, book: Any, tag: str, work: Callable[..., Any]) -> None:
        self._task = task
        self._book = book
        self._tag = tag
        self._work = work

    def fail(self, what: str) -> None:
        raise ValueError(what or "failed")

    def retry(self, _: str) -> None:
        if self._task.request.retries < 2:
            raise self._task.retry(countdown=0)

    def replace(self, what: str) -> None:
        raise self._task.replace(_replacement(what, self._work))

    def grow(self, what: str) -> None:
        self._task.add_to_chord(self._work(what))

    def wait(self, what: str) -> None:
        self._book.wait(self._tag, what, seconds=60)

    def die(self, when: str) -> None:
        """End the process, at the first attempt or at each."""
        if when == "always" or self._task.lease.fencing_token == 1:
            self._book.note(f"{self._tag} told", json.dumps(self.told("stamps")))
            os.kill(os.getpid(), signal.SIGKILL)

    def told(self, what: str) -> Any:
        """Return what the message brought."""
        request = self._task.request
        return request.delivery_info["priority"] if what == "priority" else request.stamps

    def short(self, _: str) -> None:
        """Return the name alone."""


def _replacement(what: str, work: Callable[..., Any]) -> Any:
    """Return what a task replaces itself with; each of its bodies has a name of its own."""
    return {
        "task": lambda: work("x"),
        "chain": lambda: chain(work("x"), work("y")),
        "group": lambda: group(work("x"), work("y")),
        "chord": lambda: chord([work("x"), work("y")], work("z")),
        "again": lambda: work("x", then="replace task"),
    }[what]()
