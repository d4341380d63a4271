"""What becomes of attempts, in Celery's own event stream: no STARTED for ever.

An attempt that ends without an outcome sends nothing in Celery, and Flower would show it STARTED
until another one ends (celery-facts, section 12). Whoever ended it says so here: ``task-retried``
when the job goes on, ``task-failed`` when it does not, and a ``lease-…`` event with the details,
which Celery's ``State`` leaves alone. Nothing is sent for a claim, or for an end that Celery itself
tells; nothing at all while nobody has asked for events (``-E``, ``worker_send_task_events``, or
``enable_events`` by remote control, which Flower does by itself).

What happens at each failure: a send that fails or takes long is given up; the job never waits
longer for it than ``WAIT_SECONDS``. A ``task-retried`` is sent at once or not at all: a late one
would put a job that has succeeded meanwhile back to RETRY.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from celery_lease import events
from celery_lease.events import Event
from celery_lease.states import JobState, LossCause

logger = logging.getLogger(__name__)

#: How long the emitter waits for its event to be out: its next step may dispatch the job, and the
#: next attempt's ``task-started`` must not come first. A few milliseconds, of a broker that works.
WAIT_SECONDS = 2.0
#: What is tried of a broker that does not answer.
CONNECT_SECONDS = 1.0
#: Without a broker nothing is tried for so long.
QUIET_SECONDS = 5.0
#: One warning in so long, with a count.
WARNING_SECONDS = 60.0
#: How often remote control may switch events on and off, as far as we see.
LOOK_SECONDS = 1.0
#: Events that wait at most: more than an outage can make useful.
LONGEST_QUEUE = 1000

Fields: TypeAlias = dict[str, object]
Told: TypeAlias = list[tuple[str, Fields]]

_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {LossCause.EXPIRED.value: "lease-expired", LossCause.LOST.value: "lease-lost"}
)
# Not those of Celery's envelope; ``job_id`` is its ``uuid``.
_DETAILS = (
    "fencing_token",
    "worker",
    "owner",
    "cause",
    "reason",
    "state",
    "outcome",
    "taken_over_by",
    "silence_seconds",
)
_RETRIED: Final = "task-retried"
#: What Celery is told of an attempt that ended without an outcome, by the job's state.
_FINAL: Final[Mapping[str, str]] = MappingProxyType(
    {JobState.INTERRUPTED.value: "JobInterrupted", JobState.FAILED.value: "JobRunnerLost"}
)


def told(event: Event) -> Told:
    """Return the events of Celery's stream that one of ours makes: type and fields, in order.

    .. versionadded:: 0.1
    """
    make = _MAKERS.get(event.name)
    return [] if make is None else make(event.fields)


def _vanished(given: Mapping[str, object]) -> Told:
    details = _details(given)
    if "taken_over_by" in given:
        # The next attempt has begun, and Celery has said so.
        return [("lease-expired", details)]
    kind = _KINDS.get(str(_plain(given.get("cause"))))
    # A stall is told by ``ATTEMPT_STALLED``.
    return [] if kind is None else [_after(given), (kind, details)]


def _stalled(given: Mapping[str, object]) -> Told:
    return [_after(given), ("lease-stalled", _details(given))]


def _released(given: Mapping[str, object]) -> Told:
    return [_after(given), ("lease-released", _details(given))]


def _cancelled(given: Mapping[str, object]) -> Told:
    # Celery has said so of a job that it revoked itself; a child that it told to stop may have
    # given the job back since.
    is_expired = given.get("reason") == "expires"
    revoked = {"uuid": given["job_id"], "terminated": False, "signum": None, "expired": is_expired}
    return [("task-revoked", revoked), ("lease-cancelled", _details(given))]


def _refused(given: Mapping[str, object]) -> Told:
    # Celery has said STARTED. Who cancelled the job may be no worker, and have said nothing.
    return _cancelled(given) if given.get("state") == JobState.CANCELLED.value else []


def _single(kind: str) -> Callable[[Mapping[str, object]], Told]:
    return lambda given: [(kind, _details(given))]


def _after(given: Mapping[str, object]) -> tuple[str, Fields]:
    """Return Celery's own event for an end without an outcome, with Celery's fields."""
    final = _FINAL.get(str(_plain(given.get("state"))))
    why = _plain(given.get("reason") or given.get("cause") or "stalled")
    text = f"attempt {given.get('fencing_token')} on {given.get('worker')}: {why}"
    fields = {
        "uuid": given["job_id"],
        "exception": f"{final or 'LeaseLost'}({text!r})",
        "traceback": "",
    }
    return "task-failed" if final else _RETRIED, fields


def _details(given: Mapping[str, object]) -> Fields:
    found = {name: _plain(given[name]) for name in _DETAILS if given.get(name) is not None}
    return {"uuid": given["job_id"], **found}


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


_MAKERS: Final[Mapping[str, Callable[[Mapping[str, object]], Told]]] = MappingProxyType(
    {
        events.LEASE_EXPIRED: _vanished,
        events.CLAIM_REFUSED: _refused,
        events.ATTEMPT_STALLED: _stalled,
        events.JOB_RELEASED: _released,
        events.JOB_HELD: _single("lease-held"),
        events.JOB_INTERRUPTED: _single("lease-interrupted"),
        events.JOB_CANCELLED: _cancelled,
        events.OUTCOME_REJECTED: _single("lease-rejected"),
    }
)


class EventStream:
    """A subscriber of the event bus that tells a worker's events to Celery's event stream.

    Made in the worker's main process before the pool forks: its children inherit it, subscribed,
    and the switch is in memory that they share.

    Args:
        app: the Celery app.
        node_name: the worker, the sender of its events.
        gate: makes what keeps forks out of a block: a ``ForkGate`` that is the last.
        is_on: True when the worker sends events from its start.
    """

    def __init__(
        self,
        app: Any,
        *,
        node_name: str,
        gate: Callable[[], Callable[[], AbstractContextManager[object]]],
        is_on: bool,
    ) -> None:
        self._app = app
        self._node_name = node_name
        self._gate = gate
        self._switch = mmap.mmap(-1, 1)
        self._switch[0] = int(is_on)
        self._main_pid = os.getpid()
        self._timer: Any = None
        self._sender = self._new_sender()
        _streams.add(self)
        events.subscribe(self)

    def __call__(self, event: Event) -> None:
        """Send what a bus event means to Celery, and wait a moment until it is out."""
        if event.name in _MAKERS and self._switch[0]:
            items = [_Item(kind, fields) for kind, fields in told(event)]
            if self._sender.put(items) and not self._is_event_loop():
                self._sender.wait(items, WAIT_SECONDS)

    def _is_event_loop(self) -> bool:
        # Of the worker's main process: whatever waits there keeps all its deliveries waiting.
        return (
            os.getpid() == self._main_pid and threading.current_thread() is threading.main_thread()
        )

    def start(self, parent: Any) -> None:
        """Follow the worker, whose events remote control may switch on and off."""
        self._timer = parent.timer.call_repeatedly(LOOK_SECONDS, self.look, (parent,))

    def look(self, parent: Any) -> None:
        """Switch with the worker's own task events."""
        dispatcher = getattr(getattr(parent, "consumer", None), "event_dispatcher", None)
        if dispatcher is not None:
            groups = dispatcher.groups
            self._switch[0] = int(dispatcher.enabled and (not groups or "task" in groups))

    def flush(self, timeout_seconds: float = 0.5) -> None:
        """Wait for what this process has said, within the timeout."""
        self._sender.flush(timeout_seconds)

    def stop(self) -> None:
        """Send what is left and end."""
        events.unsubscribe(self)
        if self._timer is not None:
            self._timer.cancel()
        self._sender.flush(0.5)
        self._sender.stop()

    def after_fork_in_child(self) -> None:
        """Begin anew: the parent's thread is not here, and its connection is not ours."""
        _inherited.append(self._sender)
        self._sender = self._new_sender()

    def _new_sender(self) -> _Sender:
        return _Sender(self._app, node_name=self._node_name, gate=self._gate())


@dataclass(slots=True, eq=False)
class _Item:
    kind: str
    fields: Fields
    put_at: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_too_late(self) -> bool:
        return self.kind == _RETRIED and time.monotonic() > self.put_at + WAIT_SECONDS


class _Sender:
    """One process's thread and connection for events, both made at the first one.

    A connection of its own: one of the app's pools would wait for an absent broker for ever, and
    that of the worker's dispatcher belongs to the event loop.
    """

    def __init__(
        self, app: Any, *, node_name: str, gate: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._app = app
        self._node_name = node_name
        self._gate = gate
        self._wakeup = threading.Condition()
        self._queue: deque[_Item] = deque(maxlen=LONGEST_QUEUE)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._dispatcher: Any = None
        self._quiet_until = 0.0
        self._is_slow = False
        self._warn_after = 0.0
        self._unsent_count = 0

    def put(self, items: list[_Item]) -> bool:
        """Have events sent; False when it is of no use to wait for that."""
        if time.monotonic() < self._quiet_until:
            self._unsent_count += len(items)
            return False
        with self._wakeup:
            self._queue.extend(items)
            self._wakeup.notify()
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="celery-lease-events", daemon=True
                )
                self._thread.start()
        return not self._is_slow

    def wait(self, items: list[_Item], seconds: float) -> None:
        """Wait until events are out, or given up."""
        until = time.monotonic() + seconds
        for item in items:
            if not item.done.wait(max(0.0, until - time.monotonic())):
                # Nobody else waits in vain before the next one is out.
                self._is_slow = True
                return

    def flush(self, seconds: float) -> None:
        """Wait until all events are out, or given up."""
        with self._wakeup:
            items = list(self._queue)
        self.wait(items, seconds)

    def stop(self) -> None:
        """End the thread; it closes its connection."""
        with self._wakeup:
            self._stopped = True
            self._wakeup.notify()
            thread = self._thread
        if thread is not None:
            thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._wakeup:
                # It stays in the queue until it is out, for ``flush``.
                while not self._queue and not self._stopped:
                    self._wakeup.wait()
                if not self._queue:
                    break
                item = self._queue[0]
            try:
                with self._gate():
                    self._send(item)
            except Exception as error:  # noqa: BLE001  whatever a transport raises
                # The thread's outer edge, and of no concern to any job.
                self._give_up(error)
            finally:
                item.done.set()
                with self._wakeup, suppress(IndexError, ValueError):
                    self._queue.remove(item)
        self._disconnect()

    def _send(self, item: _Item) -> None:
        if item.is_too_late or time.monotonic() < self._quiet_until:
            self._unsent_count += 1
            return
        had_connection = self._dispatcher is not None
        try:
            self._connected().send(item.kind, **item.fields)
        except Exception:
            # The broker may have ended an idle connection long ago.
            if not had_connection:
                raise
            self._disconnect()
            self._connected().send(item.kind, **item.fields)
        self._is_slow = False

    def _connected(self) -> Any:
        if self._dispatcher is None:
            # Without heartbeats, which nobody would send between two events.
            connection = self._app.connection_for_write(
                connect_timeout=CONNECT_SECONDS, heartbeat=0
            )
            # Without an answer from the broker this thread would hold the gate for ever.
            for option in _TIMEOUTS.get(connection.transport.driver_name, ()):
                connection.transport_options.setdefault(option, CONNECT_SECONDS)
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            self._dispatcher = self._app.events.Dispatcher(
                connection, self._node_name, buffer_while_offline=False
            )
        return self._dispatcher

    def _disconnect(self) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            with suppress(Exception):
                dispatcher.close()
            with suppress(Exception):
                dispatcher.connection.release()

    def _give_up(self, error: Exception) -> None:
        self._disconnect()
        now = time.monotonic()
        self._quiet_until = now + QUIET_SECONDS
        self._unsent_count += 1
        if now >= self._warn_after:
            self._warn_after = now + WARNING_SECONDS
            count, self._unsent_count = self._unsent_count, 0
            logger.warning(
                "lease.events.unsent worker=%s count=%d problem=%r",
                self._node_name,
                count,
                f"{type(error).__name__}: {error}",
            )


_TIMEOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "redis": ("socket_timeout", "socket_connect_timeout"),
        "py-amqp": ("read_timeout", "write_timeout"),
    }
)
_streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
#: The parents' senders, kept so that nothing in this process closes their connections.
_inherited: list[_Sender] = []


def _begin_anew() -> None:
    for stream in list(_streams):
        stream.after_fork_in_child()


os.register_at_fork(after_in_child=_begin_anew)
