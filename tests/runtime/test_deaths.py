"""Why a child died, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError

from celery_lease.deaths import OutOfMemoryCounter, death_reason

KILLED = WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL) Job: 17.")
ENDED = WorkerLostError("Worker exited prematurely: exitcode 0 Job: 3.")


class Group:
    """A control group in a folder, as Linux shows it to a process in it."""

    def __init__(self, folder: Path, *, path: str = "", files: str = "", version: int = 2) -> None:
        self.cgroups = folder / "cgroups"
        self.own = folder / "own"
        memory = f"4:memory:/{path}\n0::/\n" if version == 1 else f"0::/{path}\n"
        self.own.write_text(f"9:name=systemd:/elsewhere\n{memory}")
        mounted = self.cgroups / ("memory" if version == 1 else "") / files
        self._file = mounted / ("memory.oom_control" if version == 1 else "memory.events")
        self._file.parent.mkdir(parents=True)
        self._version = version
        self.count(0)

    def count(self, oom_kill: int) -> None:
        """Say how many processes the kernel has killed."""
        # As in Linux' Documentation/admin-guide: cgroup-v2.rst, cgroup-v1/memory.rst
        before = (
            "oom_kill_disable 0\nunder_oom 0"
            if self._version == 1
            else f"low 0\nhigh 0\nmax 7\noom {oom_kill + 5}"
        )
        self._file.write_text(f"{before}\noom_kill {oom_kill}\n")

    def counter(self) -> OutOfMemoryCounter:
        """Return a counter that looks here."""
        return OutOfMemoryCounter(self.cgroups, self.own)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "files"),
    [("", ""), ("user/worker", "user/worker"), ("../../hosts/view", "")],
    ids=["root", "own", "container"],
)
def test_a_kill_for_want_of_memory_is_told_from_another(
    path: str, files: str, version: int, tmp_path: Path
) -> None:
    group = Group(tmp_path, path=path, files=files, version=version)
    counter = group.counter()

    before = death_reason(KILLED, counter)
    group.count(1)
    killed = death_reason(KILLED, counter)
    after = death_reason(KILLED, counter)

    assert before == after == "Worker exited prematurely: signal 9 (SIGKILL)"
    assert killed == f"{before} Out of memory: the kernel killed it (cgroup oom_kill)."


def test_a_kill_before_the_worker_started_is_not_its_childs(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.count(3)

    assert "memory" not in death_reason(KILLED, group.counter())


def test_another_end_is_never_taken_for_one(tmp_path: Path) -> None:
    group = Group(tmp_path)
    counter = group.counter()
    group.count(1)

    assert death_reason(ENDED, counter) == "Worker exited prematurely: exitcode 0"
    # It was another child's: that one's report comes later, or its delivery had ended.
    assert "memory" in death_reason(KILLED, counter)


@pytest.mark.parametrize("harm", ["no such file", "no own group", "file gone", "no number"])
def test_where_the_counter_cannot_be_read_nothing_is_claimed(harm: str, tmp_path: Path) -> None:
    group = Group(tmp_path)
    if harm == "no such file":
        group._file.unlink()
    elif harm == "no own group":
        group.own.unlink()
    counter = group.counter()
    if harm == "file gone":
        group._file.unlink()
    elif harm == "no number":
        group._file.write_text("oom_kill\n")

    assert death_reason(KILLED, counter) == "Worker exited prematurely: signal 9 (SIGKILL)"


def test_an_exit_says_its_code() -> None:
    assert death_reason(SystemExit(3)) == "the child left with 3"
    assert death_reason(SystemExit()) == "the child left with None"


def test_it_is_one_line_and_never_empty() -> None:
    assert death_reason(TimeLimitExceeded(7)) == "TimeLimitExceeded(7,)"
    assert death_reason(WorkerLostError("")) == "WorkerLostError"
