"""Where a body can be told to wait, so that a kill or a freeze hits it in its middle.

A gate is a file: while it is there, the one job that was given its name waits at it, and says
so in a second file. No other job knows of gates.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

#: Nobody waits for ever for a demo that is gone.
LONGEST_WAIT_SECONDS = 90.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Reached:
    """Who stands at a gate: a job's attempt."""

    job_id: str
    fencing_token: int


class Gate:
    """One gate.

    Args:
        folder: where its files are.
        name: its name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._shut = folder / f"{name}.shut"
        self._reached = folder / f"{name}.reached"

    def shut(self) -> None:
        """Have whoever comes wait."""
        self._shut.touch()

    def open(self) -> None:
        """Let everybody through."""
        self._shut.unlink(missing_ok=True)

    def reached(self) -> Reached | None:
        """Return who came last, None as long as nobody did."""
        try:
            return Reached(**json.loads(self._reached.read_text()))
        except FileNotFoundError:
            return None

    def pass_through(self, who: Reached) -> None:
        """Wait as long as it is shut."""
        part = self._reached.with_suffix(f".{who.fencing_token}")
        part.write_text(json.dumps(asdict(who)))
        part.replace(self._reached)
        until = time.monotonic() + LONGEST_WAIT_SECONDS
        while self._shut.exists() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
