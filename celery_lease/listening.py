"""Listening for the result of a leased job: what Celery does before it publishes.

``send_task`` calls the result backend's ``on_task_call`` first. Where that is the broker, or as far
away as it, the caller would wait there instead of in the publish, and without a record of the job
(measured with Celery 5.7 on Redis as both: more than 20 s while it is frozen, an error after 19 s
while it refuses). So the backend of an app with leased tasks has an ``on_task_call`` of ours.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery._state import task_join_will_block
from kombu.common import maybe_declare

if TYPE_CHECKING:
    from celery_lease.publishing import LeaseConnections

_GUARDED = "_lease_on_task_call"
_expected: ContextVar[str | None] = ContextVar("celery_lease_expected", default=None)


def expect_result(backend: Any, task_id: str, connections: LeaseConnections) -> None:
    """Have the next ``on_task_call`` of this id not wait for a broker that is away.

    Args:
        backend: the app's result backend.
        task_id: of a leased job that is about to be published.
        connections: the app's, for leased messages.
    """
    listen = _ways.get(type(backend).on_task_call.__module__)
    if listen is None:
        return
    _expected.set(task_id)
    if _GUARDED in vars(backend):
        return
    stock = backend.on_task_call

    def on_task_call(producer: Any, called_id: str) -> Any:
        if _expected.get() != called_id:
            return stock(producer, called_id)
        _expected.set(None)
        return listen(backend, connections)

    vars(backend)[_GUARDED] = True
    backend.on_task_call = on_task_call


def _later(backend: Any, connections: LeaseConnections) -> None:
    """Subscribe to nothing: ``AsyncResult.get`` and ``then`` do, and read what is there already."""


def _declare_replies(backend: Any, connections: LeaseConnections) -> None:
    """Declare the queue of the replies, on a connection that does not wait for ever."""
    if task_join_will_block() or connections.breaker.is_open():
        return
    try:
        connections.ask(lambda producer: maybe_declare(backend.binding(producer.channel)))
    except Exception as error:
        # Whoever asks for the result declares it then. The publish finds the same, and says so.
        if not connections.is_away(error):
            raise


#: By the module whose ``on_task_call`` a backend has; others than these do nothing there.
_ways = {"celery.backends.redis": _later, "celery.backends.rpc": _declare_replies}
