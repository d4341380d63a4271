"""Processes that tests start, freeze, kill and look at, always by their id. Linux only: /proc.

A process that has ended stays a *zombie* until its parent, or process 1, has asked for its exit
code; ``kill(pid, 0)`` succeeds on it. "Is it gone?" is therefore read from the state letter in
``/proc/PID/stat``: in a container whose process 1 never asks, a zombie stays for ever.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.forking import Forked

# Zombie and dead: the process runs no more, whatever kill(pid, 0) says.
_GONE = {"Z", "X", "x"}
# Stopped by a signal, and by a tracer.
_STOPPED = {"T", "t"}


def state(pid: int) -> str | None:
    """Return the state letter of a process (``R``, ``S``, ``T``, ``Z`` …), None without one."""
    fields = _stat(pid)
    return fields[0] if fields else None


def is_alive(pid: int) -> bool:
    """Tell whether a process still runs, or could run on: a zombie does not, a frozen one does."""
    return state(pid) not in {None, *_GONE}


def is_frozen(pid: int) -> bool:
    """Tell whether a process is stopped by SIGSTOP."""
    return state(pid) in _STOPPED


def children(pid: int) -> list[int]:
    """Return the direct children of a process that are alive, oldest id first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] not in _GONE and int(fields[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


def tree(pid: int) -> list[int]:
    """Return a process and all that descend from it, parents first, as long as they are alive."""
    found = [pid] if is_alive(pid) else []
    for child in children(pid):
        found.extend(tree(child))
    return found


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is not an error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def freeze_tree(pid: int) -> None:
    """Stop a process and its descendants, as a paused machine would; returns when all stand."""
    # Again until nobody new turns up: one that still ran may have forked meanwhile.
    frozen: set[int] = set()
    while new := set(tree(pid)) - frozen:
        for one in sorted(new):
            send(one, signal.SIGSTOP)
        frozen |= new
    for one in frozen:
        eventually(lambda one=one: is_frozen(one) or not is_alive(one), what=f"{one} frozen")  # type: ignore[misc]


def thaw_tree(pid: int) -> None:
    """Let a frozen process and its descendants go on."""
    for one in tree(pid):
        send(one, signal.SIGCONT)


def kill_tree(pid: int, *, timeout: float = 10.0) -> None:
    """Kill a process and its descendants with SIGKILL; returns when all are gone."""
    doomed: set[int] = set()
    # The parent is frozen first, so that it cannot replace a child in between.
    send(pid, signal.SIGSTOP)
    while new := set(tree(pid)) - doomed:
        for one in sorted(new):
            send(one, signal.SIGKILL)
        doomed |= new
    for one in doomed:
        wait_gone(one, timeout=timeout)


def wait_gone(pid: int, *, timeout: float = 10.0) -> None:
    """Wait until a process is gone (a zombie is)."""
    eventually(lambda: not is_alive(pid), timeout=timeout, what=f"process {pid} gone")


def end(process: subprocess.Popen[bytes] | Forked, *, number: int, timeout: float) -> int:
    """End a child with a signal, kill its whole tree if it does not; return its exit code."""
    family = tree(process.pid)
    if process.poll() is None:
        process.send_signal(number)
        # A frozen process takes SIGTERM only once it runs again.
        thaw_tree(process.pid)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
    for one in family:
        # What outlived its parent has no reason to: it would hold the port or the data folder.
        if one != process.pid and is_alive(one) and not _gone_soon(one):
            kill_tree(one)
    return process.wait()


def spawn(
    command: Sequence[str],
    *,
    folder: Path,
    log: Path,
    env: Mapping[str, str],
    as_nobody: bool = False,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with its output appended to a file.

    Args:
        command: the program and its arguments.
        folder: its working directory.
        log: where standard output and error go; stdin is empty.
        env: its whole environment.
        as_nobody: give up root, if we have it: several servers refuse to run as root.
        death_signal: what the kernel sends when *this* process dies (the thread that calls: call
            from the main thread), so that a killed test run leaves nothing behind.
    """
    # setpriv and not preexec_fn, which may deadlock, and warns, in a process that has threads.
    with log.open("ab") as output:
        return subprocess.Popen(
            [*setpriv(as_nobody=as_nobody, death_signal=death_signal), *command],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def setpriv(*, as_nobody: bool, death_signal: signal.Signals | None = None) -> list[str]:
    """Return the words before a command that give up root and ask for a signal at our death.

    Empty where neither is wanted, or possible (setpriv is part of util-linux).
    """
    words: list[str] = []
    if as_nobody and os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        words += [f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    if death_signal is not None:
        words.append(f"--pdeathsig={death_signal.name.removeprefix('SIG')}")
    program = shutil.which("setpriv")
    if program is None:
        if as_nobody and os.getuid() == 0:
            message = "setpriv (package util-linux) is needed to start a server that refuses root"
            raise RuntimeError(message)
        return []
    return [program, *words, "--"] if words else []


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on (a name may hold blanks)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _gone_soon(pid: int) -> bool:
    try:
        wait_gone(pid, timeout=2)
    except AssertionError:
        return False
    return True
