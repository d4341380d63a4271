from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import processes
from tests.support.folders import ServerFolder, remove_abandoned
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAMILY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A process with one child; both wait for input that never comes."""
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE)
    eventually(lambda: len(processes.tree(process.pid)) == 2, what="parent and child")
    yield process
    processes.kill_tree(process.pid)
    process.communicate()


def test_a_zombie_is_gone_although_it_takes_signals(family: subprocess.Popen[bytes]) -> None:
    family.kill()
    processes.wait_gone(family.pid)

    os.kill(family.pid, 0)

    assert processes.state(family.pid) == "Z"
    assert not processes.is_alive(family.pid)


def test_a_tree_is_frozen_and_thawed_as_one(family: subprocess.Popen[bytes]) -> None:
    everybody = processes.tree(family.pid)

    processes.freeze_tree(family.pid)

    assert all(processes.is_frozen(one) and processes.is_alive(one) for one in everybody)

    processes.thaw_tree(family.pid)

    eventually(lambda: not any(processes.is_frozen(one) for one in everybody))


def test_a_killed_tree_leaves_nobody(family: subprocess.Popen[bytes]) -> None:
    everybody = processes.tree(family.pid)

    processes.kill_tree(family.pid)

    assert not any(processes.is_alive(one) for one in everybody)


def test_a_process_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    starter = (
        "import os, pathlib, signal; from tests.support import processes;"
        f"p = processes.spawn(['sleep', '1000'], folder=pathlib.Path('/'),"
        f" log=pathlib.Path({str(tmp_path / 'log')!r}), env={{'PATH': os.environ['PATH']}});"
        # Our death counts from the moment that setpriv has asked for it.
        "name = pathlib.Path(f'/proc/{p.pid}/comm');"
        "processes.eventually(lambda: name.read_text().strip() == 'sleep');"
        "print(p.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", starter], capture_output=True, text=True, check=False
    )

    assert done.returncode == -signal.SIGKILL, done.stderr
    processes.wait_gone(int(done.stdout))


def test_folders_of_a_killed_test_run_are_removed_and_ours_stay() -> None:
    maker = (
        "import os, signal; from tests.support.folders import ServerFolder;"
        "print(ServerFolder().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", maker], capture_output=True, text=True, check=False
    )
    ours = ServerFolder()

    remove_abandoned()

    assert done.stdout.startswith("/tmp/")
    assert not os.path.exists(done.stdout.strip())  # noqa: PTH110  # a string, printed by another
    assert ours.path.exists()
    ours.remove()
    assert not ours.path.exists()


def test_eventually_passes_on_the_last_assertion() -> None:
    def never_so() -> bool:
        assert 1 + 1 == 3
        return True

    with pytest.raises(AssertionError, match="not so within") as caught:
        eventually(never_so, timeout=0.05)

    assert isinstance(caught.value.__cause__, AssertionError)
