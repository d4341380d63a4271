"""What ``/proc`` says: CPU and memory of processes, and the facts of the machine."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_KILOBYTE = 1024
_MEGABYTE = 1_000_000
_PACKAGES = ("celery", "kombu", "billiard", "redis", "SQLAlchemy", "psycopg")


def cpu_seconds(pids: list[int]) -> float:
    """Return user and system time of processes and of their ended children."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # utime, stime, cutime, cstime: fields 14 to 17 of proc(5); the state is field 3.
        total += sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    return total / _TICK


def memory(pid: int) -> dict[str, float]:
    """Return RSS, PSS and private memory of a process, in MB (10⁶ bytes)."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * _KILOBYTE
    return {
        "rss": found["Rss"] / _MEGABYTE,
        "pss": found["Pss"] / _MEGABYTE,
        "private": (found["Private_Clean"] + found["Private_Dirty"]) / _MEGABYTE,
    }


def busy_seconds() -> tuple[float, float]:
    """Return the machine's busy and stolen CPU seconds since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq) / _TICK, steal / _TICK


def facts(folder: Path) -> dict[str, str]:
    """Return what a reader must know to compare numbers: no names, no paths.

    Args:
        folder: on the disk of the servers.
    """
    found = {
        "cores": str(os.cpu_count()),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "memory": f"{int(_first('/proc/meminfo', 'MemTotal').split()[0]) / 1e6:.0f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fdatasync of 8 kB": f"{_fdatasync_seconds(folder) * 1e6:.0f} µs",
    }
    return found | {name: metadata.version(name) for name in _PACKAGES}


def _first(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _fdatasync_seconds(folder: Path, writes: int = 200) -> float:
    path = folder / "fdatasync"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        started = time.monotonic()
        for _ in range(writes):
            os.pwrite(file, b"x" * 8192, 0)
            os.fdatasync(file)
        return (time.monotonic() - started) / writes
    finally:
        os.close(file)
        path.unlink()
