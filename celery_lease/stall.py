"""When a running body counts as stalled: no progress for ``lease_stall_timeout`` seconds.

Pure: time is an argument. Called by ``lease``, where the body reports, and by ``heartbeat``,
which looks. A renewal proves that the process lives; only progress proves that the body does
(seed S0, B050).
"""

from __future__ import annotations

import math


class StallWatch:
    """How long ago one body was seen to get on.

    The body's thread writes and the heartbeat reads, each a single value: no lock, which an
    interruption of the body could leave locked.

    Args:
        timeout_seconds: the longest silence, None for no limit.
        began_at: monotonic time at the start of the attempt.
    """

    def __init__(self, timeout_seconds: float | None, *, began_at: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._moved_at = began_at
        self._seen: str | None = None
        self._is_forgiven = False

    @property
    def stalls_at(self) -> float:
        """Monotonic time at which it counts as stalled; infinity without a limit."""
        if self.timeout_seconds is None:
            return math.inf
        return self._moved_at + self.timeout_seconds

    def is_stalled(self, now: float) -> bool:
        """Tell whether the silence has lasted for the whole timeout."""
        return now >= self.stalls_at

    def silence_seconds(self, now: float) -> float:
        """Return how long ago the body was last seen to get on."""
        return now - self._moved_at

    def report(self, progress: str, now: float) -> None:
        """Take a report of progress; the same one again is no progress (B050)."""
        if progress != self._seen:
            self._seen = progress
            self.move(now)

    def move(self, now: float) -> None:
        """Take a sign of life that needs no comparison: a checkpoint."""
        self._moved_at = now
        self._is_forgiven = False

    def forgive(self, surely_seconds: float, perhaps_seconds: float, now: float) -> None:
        """Leave out a time in which the whole process did not run (frozen, or starved).

        Args:
            surely_seconds: so long it did not run at all.
            perhaps_seconds: for so long before that nobody knows. Left out once between two
                reports of progress: a body that hangs in one starving call after another must
                not be forgiven for ever.
            now: monotonic time.
        """
        if not self._is_forgiven:
            self._is_forgiven = True
            surely_seconds += perhaps_seconds
        self._moved_at = min(now, self._moved_at + surely_seconds)
