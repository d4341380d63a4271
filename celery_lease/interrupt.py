"""Interrupting a body whose lease is lost: ``LeaseLost``, one shot, only while the body runs.

Three ways, by where the body runs (celery-facts, section 6):

* the main thread of a process (prefork, solo): a signal, whose handler raises. It ends a sleep,
  a lock and a socket at once;
* another thread (the threads pool): an asynchronous exception, at the thread's next bytecode; a
  call into C that blocks returns first;
* a greenlet of gevent: thrown in by the hub, when the greenlet waits.

What it is not: it talks to no store and decides nothing. The heartbeat and the stall thread call
``strike``; the attempt calls ``run`` around the body, and ``suspend`` around what is ours inside
it (a retry's commit). Under eventlet, and with ``lease_interrupt = False``, nothing strikes.

The one rule: nothing may be raised outside of ``run``. Whoever raises looks at ``armed`` in the
last moment, under the same guard under which the body's thread clears it. A strike that comes
between the body's end and that clearing leaves ``run`` as a ``LeaseLost``.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from celery_lease.exceptions import LeaseLost
from celery_lease.native import allocate_lock

T = TypeVar("T")

#: Of a stalled body's stack the innermost frames are kept, as of a traceback.
STACK_CHARACTERS = 65_536
#: A greenlet's stack is taken by its hub. One that does not answer is running a greenlet, whose
#: stack is then the thread's.
HUB_SECONDS = 0.5


class Interruption:
    """One body as other threads can reach it; this one leaves it alone (see ``here``).

    Args:
        job_id: whose lease.
        fencing_token: which lease.
        is_wanted: False makes ``strike`` do nothing (``lease_interrupt``).
    """

    def __init__(self, job_id: str, fencing_token: int, *, is_wanted: bool) -> None:
        self._job_id = job_id
        self._fencing_token = fencing_token
        self._is_wanted = is_wanted
        self._ident = threading.get_ident()
        self._reason: str | None = None
        self._armed = False
        self._struck = False

    def run(self, body: Callable[[], T]) -> T:
        """Return what the body returns.

        Raises:
            LeaseLost: it was interrupted, and did not catch it.
        """
        try:
            try:
                self.resume()
                return body()
            finally:
                self.suspend()
        except BaseException:
            # A time limit may have struck inside ``suspend`` itself.
            self.suspend()
            raise

    def strike(self, reason: str) -> None:
        """Interrupt the body, once, as soon as it is armed; safe in any thread, at any time."""
        if self._reason is None:
            self._reason = reason

    def suspend(self) -> None:
        """Let nothing be raised from now on: the body has ended, or is in a commit of ours."""
        self._armed = False

    def resume(self) -> None:
        """Arm it.

        Raises:
            LeaseLost: it was struck before.
        """

    def stack(self) -> str:
        """Return the stack of the body, for a thread that is not its own; empty if it has none."""
        return _text(sys._current_frames().get(self._ident))  # noqa: SLF001  documented

    def run_beside(self, call: Callable[[], None]) -> None:
        """Run a call of another thread's where it may use the connections that the body uses."""
        call()

    def _take(self) -> bool:
        """Use the one shot up; False when there is none."""
        if not self._armed or self._struck or self._reason is None:
            return False
        self._armed = False
        self._struck = True
        return True

    def _error(self) -> LeaseLost:
        return LeaseLost(self._job_id, self._fencing_token, self._reason or "")


class _BySignal(Interruption):
    """A body in the main thread.

    That thread alone writes the flags, so there is no lock: a handler that waited for one would
    wait for the code that it interrupted.
    """

    _number = 0

    def resume(self) -> None:
        global _in_main_thread  # noqa: PLW0603  a process has one main thread, and one body in it
        if not self._is_wanted:
            return
        number = _listen()
        if number is not None:
            self._number = number
            _in_main_thread = self
            self._armed = True
            self.deliver()

    def strike(self, reason: str) -> None:
        super().strike(reason)
        # Not if somebody else listens to that signal by now.
        if self._armed and signal.getsignal(self._number) is _on_signal:
            signal.pthread_kill(self._ident, self._number)

    def deliver(self) -> None:
        """Raise in the main thread what it was struck with."""
        if self._take():
            raise self._error()


class _ByAsyncException(Interruption):
    """A body in a thread of a pool."""

    def __init__(self, job_id: str, fencing_token: int, *, is_wanted: bool) -> None:
        super().__init__(job_id, fencing_token, is_wanted=is_wanted)
        self._lock = allocate_lock()

    def resume(self) -> None:
        if not self._is_wanted:
            return
        with self._lock:
            self._armed = True
            taken = self._take()
        if taken:
            raise self._error()

    def suspend(self) -> None:
        with self._lock:
            self._armed = False
        # One that was sent and has not struck yet would hit the wrapper, or the next body. CPython
        # 3.11 has always raised it before this line; nothing promises that.
        _set_async_exc(self._ident, None)

    def strike(self, reason: str) -> None:
        with self._lock:
            super().strike(reason)
            if self._take():
                _set_async_exc(self._ident, self._class())

    def _class(self) -> type[LeaseLost]:
        """Return a class for CPython to instantiate: it takes no instance, and has no arguments."""
        facts = self._job_id, self._fencing_token, self._reason or ""

        def made(error: LeaseLost) -> None:
            LeaseLost.__init__(error, *facts)

        members = {"__init__": made, "__module__": LeaseLost.__module__}
        return type(LeaseLost.__name__, (LeaseLost,), members)


class _ByHub(Interruption):
    """A body in a greenlet of gevent.

    The hub runs while no greenlet of its thread does, so that what it runs meets no half-done
    step of the body's: no lock.
    """

    def __init__(self, job_id: str, fencing_token: int, *, is_wanted: bool, gevent: Any) -> None:
        super().__init__(job_id, fencing_token, is_wanted=is_wanted)
        hub = gevent.get_hub()
        self._spawn = gevent.spawn
        self._greenlet = gevent.getcurrent()
        self._loop = hub.loop
        # What threading says is the greenlet.
        self._ident = hub.thread_ident

    def resume(self) -> None:
        if self._is_wanted:
            self._armed = True
            if self._take():
                raise self._error()

    def strike(self, reason: str) -> None:
        super().strike(reason)
        self._loop.run_callback_threadsafe(self._throw)

    def _throw(self) -> None:
        if self._take():
            # As gevent's own kill() does it, from the hub.
            self._greenlet.throw(self._error())

    def stack(self) -> str:
        found: list[str] = []
        ready = allocate_lock()
        ready.acquire()

        def take() -> None:
            found.append(_text(self._greenlet.gr_frame))
            ready.release()

        # Only there the frames of a greenlet keep still.
        self._loop.run_callback_threadsafe(take)
        if ready.acquire(timeout=HUB_SECONDS):
            return found[0]
        return super().stack()

    def run_beside(self, call: Callable[[], None]) -> None:
        # A connection of the greenlets' cannot be used by another thread.
        self._loop.run_callback_threadsafe(self._spawn, call)


def here(job_id: str, fencing_token: int, *, is_wanted: bool) -> Interruption:
    """Return what can interrupt the body that is about to run in this very thread or greenlet.

    Args:
        job_id: whose lease.
        fencing_token: which lease.
        is_wanted: ``lease_interrupt``.

    .. versionadded:: 0.1
    """
    if _is_in_greenlet():
        gevent = _gevent()
        if gevent is None:
            # eventlet: a signal would hit whichever green thread is running.
            return Interruption(job_id, fencing_token, is_wanted=False)
        return _ByHub(job_id, fencing_token, is_wanted=is_wanted, gevent=gevent)
    in_main = threading.current_thread() is threading.main_thread()
    kind = _BySignal if in_main else _ByAsyncException
    return kind(job_id, fencing_token, is_wanted=is_wanted)


def _is_in_greenlet() -> bool:
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and greenlet.getcurrent().parent is not None


def _gevent() -> Any:
    """Return gevent if it runs this greenlet; it is never imported for that."""
    gevent = sys.modules.get("gevent")
    hub = None if gevent is None else gevent._hub_local.get_hub_if_exists()  # noqa: SLF001
    return None if hub is None else gevent


# --- the signal -----------------------------------------------------------------------------------

_in_main_thread: _BySignal | None = None
_number: int | None = None


def _listen() -> int | None:
    """Have a signal of our own raise in the main thread; return its number, None without one.

    A real-time signal that nobody uses: SIGUSR2 is Celery's debugger's and many users', and
    billiard's blocking pool replaces its handler (celery-facts, section 6). Once installed the
    handler stays, for a signal that comes late would end the process; a user's own handler is
    never replaced: where one has been installed over ours, the next free signal is taken.
    """
    global _number  # noqa: PLW0603  one a process, as handlers are
    if _number is None or signal.getsignal(_number) is not _on_signal:
        _number = next((n for n in _candidates() if signal.getsignal(n) is signal.SIG_DFL), None)
        if _number is not None:
            signal.signal(_number, _on_signal)
    return _number


def _candidates() -> range | tuple[int, ...]:
    if hasattr(signal, "SIGRTMIN"):
        return range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    return (signal.SIGUSR2,)


def _on_signal(number: int, frame: FrameType | None) -> None:
    del number, frame
    if _in_main_thread is not None:
        _in_main_thread.deliver()


# --- the others -----------------------------------------------------------------------------------


def _set_async_exc(ident: int, kind: type[BaseException] | None) -> None:
    # None is NULL: what was set and has not been raised is forgotten.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if kind is None else ctypes.py_object(kind)
    )


def _text(frame: FrameType | None) -> str:
    return "" if frame is None else "".join(traceback.format_stack(frame))[-STACK_CHARACTERS:]
