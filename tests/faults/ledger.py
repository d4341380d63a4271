"""The third witness: a file to which bodies and callbacks append, and gates that bodies wait at.

It knows neither the store nor Celery, and survives whatever a test does to both.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Ledger:
    """A file of JSON lines, and gates, in one folder; several processes may write at once.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "ledger"

    def write(self, what: str, **fields: Any) -> None:
        """Append a line, in one write, with who and when by two clocks."""
        entry = {
            "what": what,
            "pid": os.getpid(),
            # Linux: the same clock in every process
            "monotonic": time.monotonic(),
            "wall": time.time(),
            **fields,
        }
        line = f"{json.dumps(entry)}\n".encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def read(self, what: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return the entries, oldest first; only those with these fields."""
        if not self._path.exists():
            return []
        entries = [json.loads(line) for line in self._path.read_text().splitlines()]
        wanted = fields if what is None else {"what": what, **fields}
        return [e for e in entries if all(e.get(k) == v for k, v in wanted.items())]

    def open_gate(self, name: str) -> None:
        """Let everybody through who waits at this gate, now and later."""
        (self._folder / f"gate-{name}").touch()

    def wait_at(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until a gate is open; for bodies."""
        gate = self._folder / f"gate-{name}"
        while not gate.exists():
            meanwhile()
            # Not time.sleep: under libfaketime its absolute wait fails now and then (EINVAL).
            select.select((), (), (), 0.01)

    def is_first(self, name: str) -> bool:
        """Tell whether nobody has asked this before, in any process."""
        try:
            (self._folder / f"once-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
