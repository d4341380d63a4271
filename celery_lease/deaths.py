"""Why a child died, in one line, from what its parent can read.

The exception that billiard reports has the signal or the exit code. Whether a SIGKILL was the
kernel's, for want of memory, stands in a counter of the control group (``memory.events`` of cgroup
v2, ``memory.oom_control`` of v1: Linux, Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst); where it cannot be read nothing is claimed.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


class OutOfMemoryCounter:
    """Tells whether the kernel has killed a process of this control group since it was asked."""

    def __init__(self, cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> None:
        self._events = _events_file(cgroups, own)
        self._lock = threading.Lock()
        self._seen = self._count()

    def has_grown(self) -> bool:
        """True when it has killed one since the last call."""
        with self._lock:
            count = self._count()
            grown = count > self._seen
            self._seen = count
        return grown

    def _count(self) -> int:
        if self._events is None:
            return 0
        try:
            text = self._events.read_text()
        except OSError:
            return 0
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0


def _events_file(cgroups: Path, own: Path) -> Path | None:
    try:
        groups = own.read_text()
    except OSError:
        return None
    # Version 1 first: where the memory controller is its, version 2 has a group without one.
    for line, root, name in (
        (r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/?(.*)$", cgroups / "memory", "memory.oom_control"),
        (r"^0::/?(.*)$", cgroups, "memory.events"),
    ):
        found = re.search(line, groups, re.MULTILINE)
        # In a container the path may be that of the host, and the container's own is mounted.
        for folder in (root / found[1], root) if found else ():
            if (folder / name).is_file():
                return folder / name
    return None


_counter = OutOfMemoryCounter()


def death_reason(error: BaseException, counter: OutOfMemoryCounter | None = None) -> str:
    """Return why a child died, one line.

    Args:
        error: what billiard reports of it.
        counter: tells an out-of-memory kill from another SIGKILL.
    """
    if isinstance(error, SystemExit):
        return f"the child left with {error.code!r}"
    # billiard adds the number of the job, which says nothing to anybody.
    text = re.sub(r"\s*Job: \d+\.?\s*$", "", str(error)).strip()
    text = text or type(error).__name__
    if "SIGKILL" in text and (counter or _counter).has_grown():
        text += " Out of memory: the kernel killed it (cgroup oom_kill)."
    return text
