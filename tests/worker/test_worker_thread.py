"""The main process's thread to the store: what keeps one of its tasks does not keep the others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.worker import WorkerThread
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AWAY = StoreUnavailable("postgresql://x", "a row is locked")


class Word:
    """Told to the store; raises what is prepared, then works."""

    def __init__(self, heard: list[str], name: str, *errors: Exception) -> None:
        self._heard = heard
        self._name = name
        self._errors = list(errors)

    def __call__(self, _store: Any) -> None:
        """Be told."""
        if self._errors:
            raise self._errors.pop(0)
        self._heard.append(self._name)


@pytest.fixture
def thread(tmp_path: Path) -> Iterator[WorkerThread]:
    """A thread that has not begun."""
    extension: Any = SimpleNamespace(store=None, owner_folder=tmp_path)
    made = WorkerThread(extension, interval_seconds=0.2)
    yield made
    if made._thread.is_alive():
        made.stop()


def test_one_word_that_cannot_be_told_keeps_no_other(thread: WorkerThread) -> None:
    heard: list[str] = []
    thread.tell(Word(heard, "locked", AWAY))
    thread.tell(Word(heard, "one"))
    thread.tell(Word(heard, "two"))

    with pytest.raises(StoreUnavailable):
        thread.tell_once()
    assert heard == ["one", "two"]
    thread.tell_once()

    assert heard == ["one", "two", "locked"]
    thread.tell_once()
    assert heard == ["one", "two", "locked"]


@pytest.mark.parametrize("error", [AWAY, ValueError("a mistake")], ids=["store", "mistake"])
def test_what_keeps_one_step_keeps_no_other_and_not_the_thread(
    error: Exception, thread: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, passes, told = [], [], threading.Event()

    def look() -> None:
        looks.append(1)
        raise error

    def make_pass() -> bool:
        passes.append(1)
        raise error

    monkeypatch.setattr("celery_lease.worker.OWNER_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(thread, "look_for_the_dead", look)
    monkeypatch.setattr(thread, "look_once", make_pass)
    thread.tell(Word([], "never", *[error] * 1000))
    thread.start()

    eventually(lambda: len(looks) > 2 and len(passes) > 2, timeout=10)
    thread.tell(lambda _store: told.set())
    assert told.wait(10)
