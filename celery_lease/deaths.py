"""Why a child died, in one line, from what its parent can read.

The exception that billiard reports has the signal or the exit code. Whether a SIGKILL was the
kernel's, for want of memory, stands in the counters of the control group (cgroup v2,
``memory.events``: Linux, Documentation/admin-guide/cgroup-v2.rst); where they cannot be read
nothing is claimed.
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
        found = re.search(r"^0::/?(.*)$", own.read_text(), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    # In a container the path may be that of the host, and the container's own is mounted.
    for folder in (cgroups / found[1], cgroups):
        if (folder / "memory.events").is_file():
            return folder / "memory.events"
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
