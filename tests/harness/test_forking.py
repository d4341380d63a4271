from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking, processes
from tests.support.workers import CeleryProcess

APP = "tests.support.telling_app"


class Told(CeleryProcess):
    """``celery -A APP report``: it imports the app, prints, and ends."""

    def command(self) -> list[str]:
        return [*super().command(), "report"]


def facts(folder: Path, **env: str) -> dict[str, Any]:
    """Return what a process says of itself, and see that it ended well."""
    told = folder / "told.json"
    process = Told(APP, name="told", folder=folder, env={"TELLING_FILE": str(told), **env})
    assert process.start().wait() == 0, process.log()
    assert "software -> celery" in process.log()
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def test_a_fork_is_what_a_start_by_exec_is(tmp_path: Path) -> None:
    forked = facts(tmp_path, TZ="Asia/Tokyo")
    by_exec = facts(tmp_path, TZ="Asia/Tokyo", CELERY_LEASE_TEST_EXEC="1")

    assert by_exec["environment"].pop("CELERY_LEASE_TEST_EXEC") == "1"
    assert forked == by_exec
    assert (forked["leads"], forked["dies by"]) == (True, signal.SIGKILL)


@pytest.mark.parametrize(
    ("pool", "env", "how"),
    [
        ("prefork", {}, "forked"),
        ("threads", {"TZ": "UTC"}, "forked"),
        ("gevent", {}, "by exec"),
        ("prefork", {"LD_PRELOAD": "libfaketime.so.1"}, "by exec"),
        ("prefork", {"PYTHONPATH": "/elsewhere"}, "by exec"),
        ("prefork", {"CELERY_LEASE_TEST_EXEC": "1"}, "by exec"),
    ],
)
def test_what_would_not_be_the_same_is_started_by_exec(
    pool: str, env: dict[str, str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CELERY_LEASE_TEST_EXEC", raising=False)
    own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **own, **env}
    command = [sys.executable, "-m", "celery", "-A", "app", "worker", "-P", pool]

    assert forking.can_be_forked(command, environment) is (how == "forked")
    assert not forking.can_be_forked(["/usr/bin/python3", *command[1:]], environment)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[forking.Forked]:
    """A worker that has nothing to do."""
    command = ["-A", APP, "worker", "-P", "solo", "-l", "INFO"]
    env = {**os.environ, "TELLING_FILE": "/dev/null"}
    forked = forking.nursery().fork(command, folder=Path.cwd(), log=tmp_path / "log", env=env)
    yield forked
    processes.kill_tree(forked.pid)
    forked.wait()


def test_the_end_of_a_fork_is_known_and_waited_for(worker: forking.Forked) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.1)
    assert worker.poll() is None

    worker.send_signal(signal.SIGKILL)

    assert worker.wait(5) == -signal.SIGKILL
    assert worker.poll() == -signal.SIGKILL
    worker.send_signal(signal.SIGKILL)


def test_an_answer_that_nobody_waited_for_is_of_no_other_question(
    worker: forking.Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where pytest's limit of time strikes between a question and its answer."""
    nursery = forking.nursery()
    with monkeypatch.context() as patched:
        patched.setattr(forking.Nursery, "_answer", lambda *_: pytest.fail("interrupted"))
        with pytest.raises(pytest.fail.Exception):
            nursery.ask({"ended": worker.pid})
    processes.send(worker.pid, signal.SIGKILL)
    processes.wait_gone(worker.pid)

    # The answer to the first question was that it runs.
    assert worker.poll() == -signal.SIGKILL


def test_nothing_of_it_outlives_who_started_it(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from tests.support import forking\n"
        "log = pathlib.Path(sys.argv[1])\n"
        "env = {**os.environ, 'TELLING_FILE': '/dev/null'}\n"
        f"told = ['-A', '{APP}', 'worker', '-P', 'solo', '-l', 'INFO']\n"
        "one = forking.nursery().fork(told, folder=pathlib.Path.cwd(), log=log, env=env)\n"
        "print(one.pid, forking.nursery()._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert all(processes.is_alive(pid) for pid in pids)
        starter.kill()

    for pid in pids:
        processes.wait_gone(pid)
