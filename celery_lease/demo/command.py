"""``celery lease demo``: one run in a folder of its own, which is gone at the end."""

from __future__ import annotations

import json as jsonlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from celery_lease.demo.closing import as_json, closing_of
from celery_lease.demo.library import NoLibrary
from celery_lease.demo.screen import standard_screen
from celery_lease.demo.stage import DemoFailed, Stage
from celery_lease.demo.story import play
from celery_lease.exceptions import LeaseError

HELD, BROKEN, NOT_SHOWN, INTERRUPTED = 0, 1, 2, 130


def main(broker: str | None = None, keep: bool = False, json: bool = False) -> int:  # noqa: FBT001, FBT002  the command's own options
    """Show the demo.

    Args:
        broker: a broker's URL, None for the embedded one.
        keep: keep the folder with store, logs and messages, and say where it is.
        json: print one JSON object at the end instead of showing anything.

    Returns:
        0 when every check holds, 1 when one does not, 2 when the show could not be given,
        130 when it was interrupted.

    .. versionadded:: 0.1
    """
    folder = Path(tempfile.mkdtemp(prefix="celery-lease-demo-")).resolve()
    try:
        with _own_environment(), _log_into(folder / "demo.log"), _ended_by_signals():
            return _show(folder, broker, is_json=json)
    except (DemoFailed, NoLibrary, LeaseError) as error:
        sys.stderr.write(f"\nthe demo could not be shown: {error}\n")
        return NOT_SHOWN
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left running\n")
        return INTERRUPTED
    finally:
        if keep:
            sys.stderr.write(f"kept: {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _show(folder: Path, broker: str | None, *, is_json: bool) -> int:
    screen = standard_screen(is_silent=is_json)
    stage = Stage(folder=folder, broker=broker, screen=screen)
    try:
        evidence = play(stage)
    finally:
        screen.settle()
        stage.clear()
    ending = closing_of(evidence)
    screen.close(ending)
    if is_json:
        answer = as_json(evidence, ending)
        answer["story"] = [asdict(line) | {"kind": line.kind.name.lower()} for line in stage.told]
        sys.stdout.write(jsonlib.dumps(answer, ensure_ascii=False, indent=2) + "\n")
    return HELD if ending.holds else BROKEN


@contextmanager
def _own_environment() -> Iterator[None]:
    """Keep Celery's variables out: ``CELERY_BROKER_URL`` wins over an app's own setting."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("CELERY_")}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def _log_into(path: Path) -> Iterator[None]:
    """Keep log lines off the screen."""
    logger = logging.getLogger("celery_lease")
    handler = logging.FileHandler(path)
    was_propagating = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = was_propagating
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the demo as Ctrl-C does, with nothing left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
