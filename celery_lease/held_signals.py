"""Signals that wait while something must not be torn: a commit of ours, Celery's bookkeeping.

By handlers, not by a mask: a signal that one thread blocks is delivered to another one, and raised
in the main thread all the same. Holds may overlap, a claim's with the bookkeeping of the replay it
turned out to be: they are counted, and the user's handler is back when the last has ended.

Only the main thread handles signals. In another one every call does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class _Held:
    handler: Any
    holds: int = 1
    has_come: bool = False

    def wait(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal: the handler that stands here meanwhile."""
        del number, frame
        self.has_come = True


# A process has one main thread, and one handler a signal.
_held: dict[int, _Held] = {}


def hold(numbers: Iterable[int]) -> bool:
    """Have signals wait; False outside of the main thread, where there is nothing to let go."""
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in numbers:
        held = _held.get(number)
        if held is not None:
            held.holds += 1
            continue
        handler = signal.getsignal(number)
        # None was not installed by Python, and could not be restored.
        if handler is not None:
            held = _held[number] = _Held(handler)
            signal.signal(number, held.wait)
    return True


def let_go(numbers: Iterable[int], *, dropped: Iterable[int] = ()) -> None:
    """End a hold; what has come meanwhile is raised now, unless another hold goes on.

    Args:
        numbers: what ``hold`` was called with.
        dropped: which of them are forgotten if they have come: what they limit is over.
    """
    forgotten = frozenset(dropped)
    come = []
    for number in numbers:
        held = _held.get(number)
        if held is None:
            continue
        if number in forgotten:
            held.has_come = False
        held.holds -= 1
        if held.holds:
            continue
        # In this order: one that comes in between finds either handler, and is not swallowed.
        del _held[number]
        signal.signal(number, held.handler)
        if held.has_come:
            come.append(number)
    # Last: a handler that raises must find the others restored.
    for number in come:
        signal.raise_signal(number)
