"""``examples/transactional_enqueue``: an order and its job, both or neither; SQLAlchemy, Django."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "transactional_enqueue"


def shown(command: str) -> list[str]:
    """Return what the README shows after a command, each time."""
    text = (EXAMPLE / "README.md").read_text()
    return re.findall(rf"\$ {re.escape(command)}\n(.*?)(?=\$|```)", text, re.DOTALL)


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """Ask the example's database."""
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def test_with_sqlalchemy(
    project: Path,
    env: dict[str, str],
    run: Callable[..., str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    run("-m", "celery", "-A", "tasks", "lease", "migrate")

    assert run("order.py") == shown("python order.py")[0]
    # It has left, and was not sent by a pass.
    assert len(list((project / "queue").glob("*.msg"))) == 1
    start_worker("tasks", cwd=project, env=env, concurrency=1, lean=False)
    eventually((project / "confirmed.txt").exists, timeout=30)

    database = project / "shop.sqlite3"
    assert (project / "confirmed.txt").read_text() == shown("cat confirmed.txt")[0]
    assert rows(database, "SELECT item FROM orders") == [("a lamp",)]
    assert len(rows(database, "SELECT id FROM celery_lease_job")) == 1


def test_with_django(
    project: Path,
    env: dict[str, str],
    run: Callable[..., str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    run = partial(run, folder="django_shop")
    folder = project / "django_shop"
    run("manage.py", "migrate")
    run("-m", "celery", "-A", "shop", "lease", "migrate")

    assert run("manage.py", "order") == shown("python manage.py order")[0]
    assert len(list((folder / "queue").glob("*.msg"))) == 1
    assert "No changes" in run("manage.py", "makemigrations", "--check")
    start_worker("shop", cwd=folder, env=env, concurrency=1, lean=False)
    eventually((folder / "confirmed.txt").exists, timeout=30)

    database = folder / "shop.sqlite3"
    assert (folder / "confirmed.txt").read_text() == shown("cat confirmed.txt")[1]
    assert rows(database, "SELECT item FROM shop_order") == [("a lamp",)]
    assert len(rows(database, "SELECT id FROM celery_lease_job")) == 1
