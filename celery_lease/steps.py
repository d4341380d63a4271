"""The boot steps of a worker: what is checked, begun and ended with it.

Two of them, since the pool stops after every step that needs it, and its bodies may go on for long:
what they need to the last is ended by a step of the consumer, whose steps are shut down when all
of the worker's have stopped.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from celery import bootsteps

from celery_lease.celery_events import EventStream
from celery_lease.claims import PATH_VARIABLE, ClaimSocket
from celery_lease.exceptions import StoreUnavailable
from celery_lease.intake import end_intake
from celery_lease.revocation import listen
from celery_lease.stopping import StopFlag
from celery_lease.store import transitions
from celery_lease.unknown_tasks import leave_to_store
from celery_lease.worker import ForkGate, WorkerClaims, WorkerThread, be_node, node_name
from celery_lease.worker_heartbeat import WorkerHeartbeat

if TYPE_CHECKING:
    from celery_lease.extension import Extension

logger = logging.getLogger(__name__)

#: How often the pool looks for children that have died.
POOL_LOOK_SECONDS = 0.25


def steps_for(
    extension: Extension,
) -> tuple[type[bootsteps.StartStopStep], type[bootsteps.StartStopStep]]:
    """Return the steps for the workers and for the consumers of one app."""
    return (
        type("LeaseStep", (_LeaseStep,), {"extension": extension}),
        type("LeaseEndStep", (_LeaseEndStep,), {"extension": extension}),
    )


class _LeaseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Checks the settings before the pool starts, and the store after."""

    extension: ClassVar[Extension]
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._looking: Any = None
        be_node(parent.hostname)
        self.extension.check_at_start()
        # Before the pool forks: its children inherit them.
        self.extension.event_stream = EventStream(
            parent.app,
            node_name=parent.hostname,
            gate=functools.partial(ForkGate, is_last=True),
            is_on=bool(parent.task_events),
        )
        self.extension.begin_worker()
        listen(self.extension)
        claims = self.extension.claims
        if claims is not None and is_forking(parent):
            claims.socket = _claim_socket(claims)

    def start(self, parent: Any) -> None:
        """Check the store, and begin what the main process does beside its loop."""
        extension = self.extension
        try:
            extension.store  # noqa: B018  checks the tables
        except StoreUnavailable as error:
            # It may come later: deliveries wait for it, and nothing runs unclaimed.
            logger.error("lease.store.unavailable %s", error)  # noqa: TRY400
        extension.worker_thread = WorkerThread(
            extension,
            interval_seconds=extension.settings.reaper_interval,
            makes_passes=extension.settings.reaper_in_worker,
            precision_seconds=extension.settings.defer_precision,
        )
        extension.worker_thread.start()
        if extension.event_stream is not None:
            extension.event_stream.start(parent)
        hub = getattr(parent, "hub", None)
        if hub is not None:
            self._look_at_pool(hub, parent.pool)
        self._listen(hub)

    def _look_at_pool(self, hub: Any, pool: Any) -> None:
        """Have the pool look for dead children often.

        Celery itself notices 45 % of the deaths three to five seconds late: the pipe that tells of
        one is ready before the process can be waited for (celery-facts, section 4).
        """
        maintain = getattr(pool, "maintain_pool", None)
        if maintain is not None:
            self._looking = hub.call_repeatedly(POOL_LOOK_SECONDS, maintain)

    def _listen(self, hub: Any) -> None:
        ear = self._ear
        if ear is None:
            return
        extension = self.extension
        extension.worker_heartbeat = WorkerHeartbeat(
            renew=lambda renewals: transitions.renew(extension.store, renewals),
            answer=ear.answer,
            worker=node_name(),
            around=ForkGate(),
        )
        if hub is None:
            ear.start_thread()
        else:
            hub.add_reader(ear.fileno(), ear.read)

    @property
    def _ear(self) -> ClaimSocket | None:
        claims = self.extension.claims
        return None if claims is None else claims.socket

    def close(self, parent: Any) -> None:
        """Ask the bodies to stop where no signal did: an embedded worker, a remote shutdown."""
        if self.extension.stop_flag is not None:
            self.extension.stop_flag.set()
        end_intake(getattr(parent, "consumer", None))

    def stop(self, parent: Any) -> None:
        """End what needs the loop."""
        hub = getattr(parent, "hub", None)
        if self._looking is not None:
            self._looking.cancel()
        if self._ear is not None and hub is not None:
            hub.remove_reader(self._ear.fileno())

    terminate = stop


class _LeaseEndStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Ends the rest after the last body, and says what the consumer does with unknown tasks."""

    extension: ClassVar[Extension]

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        leave_to_store(parent)

    def shutdown(self, parent: Any) -> None:
        """End the threads and the socket."""
        del parent
        extension = self.extension
        thread, extension.worker_thread = extension.worker_thread, None
        if thread is not None:
            thread.stop()
        stream, extension.event_stream = extension.event_stream, None
        if stream is not None:
            stream.stop()
        heartbeat, extension.worker_heartbeat = extension.worker_heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        claims, extension.claims = extension.claims, None
        if claims is not None and claims.socket is not None:
            claims.socket.close()
            os.environ.pop(PATH_VARIABLE, None)
        if extension.stop_flag is not None:
            # It is raised by now, and stays so for who holds it.
            extension.stop_flag.close()


def is_forking(parent: Any) -> bool:
    """Tell whether a worker's bodies run in processes of their own."""
    pool = parent.pool_cls
    name = pool if isinstance(pool, str) else pool.__module__
    return not name.endswith(("solo", "thread", "threads", "gevent", "eventlet"))


def _claim_socket(claims: WorkerClaims) -> ClaimSocket | None:
    try:
        ear = ClaimSocket(claims.heard)
    except OSError as error:
        logger.warning(
            "lease.claim.unheard problem=%r: messages are acknowledged at the end of the attempt; "
            "make the temporary folder writable",
            str(error),
        )
        return None
    os.environ[PATH_VARIABLE] = ear.path
    return ear


def watch_signals(flag: StopFlag, consumer: Any) -> None:
    """Raise the flag at the first signal that stops the worker, before Celery's own handler.

    From then on nothing is taken from the broker: what a body hands over is for another worker.

    Celery's ``worker_shutting_down`` comes last on a soft and a cold stop. The handlers of Celery
    are there when ``worker_ready`` is sent; they replace themselves when they run, and by then the
    flag is up.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        before = signal.getsignal(signum)
        # Once: ``worker_ready`` comes again after each reconnection.
        if callable(before) and not hasattr(before, "raises_lease_flag"):
            signal.signal(signum, _raising(flag, consumer, before))


def _raising(flag: StopFlag, consumer: Any, before: Callable[..., Any]) -> Callable[..., Any]:
    def handle(signum: int, frame: Any) -> Any:
        flag.set()
        end_intake(consumer, frame)
        return before(signum, frame)

    handle.raises_lease_flag = True  # type: ignore[attr-defined]
    return handle
