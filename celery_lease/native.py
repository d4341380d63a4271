"""Threads and locks of the operating system, whatever gevent has put in their place.

Under gevent's monkey patching a ``threading.Thread`` is a greenlet, and a body that computes
without yielding starves it: no renewal in all that time (celery-facts, section 13; B096). What is
made here stays native. Of eventlet it knows nothing: there the heartbeat is a green thread.

What may be used in such a thread: a socket that gevent made belongs to the hub of the thread it
was made in, so connections are never shared with the greenlets (``Store.apart``).
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Any


def is_patched() -> bool:
    """Tell whether gevent has replaced the threads of this process."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("_thread"))


def _original(name: str) -> Any:
    monkey = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)


def allocate_lock() -> _thread.LockType:
    """Return a native lock; enter it by ``with``, never by a method of ours around it.

    An interruption may strike between two instructions. ``with`` on the lock itself has none
    between the acquisition and the protection; a Python ``__enter__`` (``threading.Condition``
    has one) does, and would leave the lock locked for ever.
    """
    lock: _thread.LockType = _original("allocate_lock")()
    return lock


class NativeThread:
    """A daemon thread of the operating system.

    Args:
        target: what it runs.
        name: its name, where threads are not patched.
    """

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target = target
        self._name = name
        self._ended = allocate_lock()
        self._ended.acquire()
        self._ident: int | None = None

    def start(self) -> None:
        """Begin."""
        if is_patched():
            _original("start_new_thread")(self._run, ())
        else:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def is_alive(self) -> bool:
        """Tell whether it has not ended yet."""
        return self._ended.locked()

    def is_current(self) -> bool:
        """Tell whether it is the one that asks."""
        return bool(self._ident == _original("get_ident")())

    def join(self, timeout_seconds: float) -> None:
        """Wait for its end, within the timeout."""
        if self._ended.acquire(timeout=timeout_seconds):
            self._ended.release()

    def _run(self) -> None:
        self._ident = _original("get_ident")()
        try:
            self._target()
        finally:
            self._ended.release()


class Bell:
    """Wakes one thread that waits for it; what ``threading.Condition`` is for, made of locks.

    ``ring`` takes no lock: a body may call it and be interrupted anywhere in it.
    """

    def __init__(self) -> None:
        self._silent = allocate_lock()
        self._silent.acquire()

    def ring(self) -> None:
        """End the wait that is under way, or the next one."""
        try:
            self._silent.release()
        except RuntimeError:
            # It rings already.
            return

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait until it rings, at most so long; None for as long as it takes."""
        if timeout_seconds is None:
            self._silent.acquire()
        else:
            self._silent.acquire(timeout=min(timeout_seconds, _thread.TIMEOUT_MAX))
