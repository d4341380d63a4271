"""The way of leased messages to the broker: connections of our own, and a bound on each publish.

Celery's own connections may wait for ever: redis-py has no socket timeout unless it is given one,
and the consumers of a worker must not have one. Here nothing waits longer than
``lease_publish_timeout``. What did not leave is in the store, and the reaper sends it.

Who is authoritative: the store. A publish that failed may have reached the broker all the same;
the job is sent again under its id, and the claim lets one of the two messages run.

One file, although it is long: what bounds a try, what counts as an outage and what the breaker
remembers of it are one rule.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from amqp.exceptions import ChannelError, FrameError, FrameSyntaxError, MessageNacked
from kombu import Connection, Producer
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.utils.functional import fxrange

#: For so long after a failed publish jobs are only recorded: a caller that submits a thousand jobs
#: while the broker is away must not wait a thousand times. Then one publish tries again.
PAUSE_SECONDS = 5.0

#: What a publish retries with where Celery's ``task_publish_retry_policy`` says nothing.
_POLICY: Mapping[str, Any] = {
    "max_retries": 3,
    "interval_start": 0.0,
    "interval_step": 0.2,
    "interval_max": 0.2,
}

#: How the drivers are told to give up, by kombu's ``driver_name``. Others are not told: what their
#: transport options mean is theirs to say (SQLAlchemy's go to ``create_engine``).
_REDIS, _AMQP = "redis", "py-amqp"

#: What Redis says when it takes no message at all; the driver has an error of its own for some, and
#: cuts the word off. Whatever else it answers concerns the key, or the message.
_REDIS_TAKES_NOTHING = (
    "READONLY",
    "OOM",
    "MISCONF",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "NOREPLICAS",
    "NOAUTH",
    "BUSY",
    "UNKILLABLE",
)
_REDIS_TAKES_NOTHING_ERRORS = ("ReadOnlyError", "OutOfMemoryError", "ClusterDownError")


class BrokerAway(OperationalError):
    """Raised when a publish failed a moment ago: the broker was not asked again."""


class Breaker:
    """Remembers that the broker did not answer, and lets one publish at a time find out more.

    Args:
        pause_seconds: after a failure nobody asks for so long.
        monotonic: the clock.
    """

    def __init__(
        self, *, pause_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause_seconds = pause_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._until: float | None = None

    def is_open(self) -> bool:
        """Tell whether a publish need not be tried now.

        False once after each pause: whoever gets that answer tries, and the others go on waiting
        for what becomes of it, or for another pause if nothing does.
        """
        with self._lock:
            if self._until is None:
                return False
            now = self._monotonic()
            if now < self._until:
                return True
            self._until = now + self._pause_seconds
            return False

    def failed(self) -> None:
        """Say that a publish failed."""
        with self._lock:
            self._until = self._monotonic() + self._pause_seconds

    def succeeded(self) -> None:
        """Say that a publish reached the broker, which may have refused it."""
        # Read without the lock: nearly always there is nothing to say.
        if self._until is not None:
            with self._lock:
                self._until = None


class _Process:
    """What belongs to one process: a fork must not share connections."""

    def __init__(self, limit: int | None) -> None:
        self.pid = os.getpid()
        self.idle: list[Producer] = []
        self.lock = threading.Lock()
        self.places = threading.BoundedSemaphore(limit) if limit else None
        self.breaker = Breaker(pause_seconds=PAUSE_SECONDS)
        self.served: dict[Any, bool] = {}
        #: How many hosts of a failover URL are passed over: they did not answer.
        self.passed_over = 0


#: Of processes that this one was forked from. Collected, their sockets would be shut down, which
#: ends the parent's connections, too.
_left_behind: list[_Process] = []


class LeaseConnections:
    """An app's connections for leased messages.

    Args:
        app: the Celery app; not kept alive.
        timeout_seconds: for one publish, with its connection and its retries
            (``lease_publish_timeout``). One step of it may take half: so much is left for another
            try on a new connection.
    """

    def __init__(self, app: Any, *, timeout_seconds: float) -> None:
        self._app_ref = weakref.ref(app)
        self._timeout_seconds = timeout_seconds
        self._process: _Process | None = None
        # Closed with the app: its extension does not outlive it either.
        weakref.finalize(app, self.close)

    @property
    def _app(self) -> Any:
        app = self._app_ref()
        if app is None:
            raise RuntimeError("the Celery app of these connections is gone")
        return app

    @property
    def breaker(self) -> Breaker:
        """This process's memory of a broker that did not answer."""
        return self._here().breaker

    def serves(self, producer: Any) -> bool:
        """Tell whether a producer is one of the app's own broker, which ours can stand in for.

        One that the caller made for another broker, or on a channel of his own, is used as it is;
        so is any on a driver that cannot be told to give up.
        """
        theirs = getattr(producer, "__connection__", None)
        return theirs is not None and self._leads_here(theirs)

    @property
    def is_bounded(self) -> bool:
        """Whether the app's broker is reached by a driver that can be told to give up."""
        return self.stand_in() is not None

    def stand_in(self) -> Producer | None:
        """Return a producer for Celery to hold while it makes a message that leaves by ours.

        It connects to nothing. Celery takes one of the app's pool, which may have none left for as
        long as the broker is frozen: plain tasks do not give theirs back.

        None where messages leave by the app's pool.
        """
        connection = self._app.connection_for_write()
        return Producer(connection, auto_declare=False) if self._leads_here(connection) else None

    def _leads_here(self, connection: Any) -> bool:
        known, place = self._here().served, _place(connection)
        if place not in known:
            own = self._app.connection_for_write()
            known[place] = place == _place(own) and own.transport.driver_name in (_REDIS, _AMQP)
        return known[place]

    def publish(
        self,
        body: Any,
        *,
        retry: bool = True,
        retry_policy: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Publish one message, as ``kombu.Producer.publish`` does, within the timeout.

        Args:
            body: see there.
            retry: try again on a new connection if there is time left.
            retry_policy: how often, and with which pauses; of ``task_publish_retry_policy``.
            **options: see there.

        Raises:
            Exception: what the last try raised; whether the broker has the message is not known.
                ``is_away`` tells whether it is the broker's trouble or this message's.
        """

        def send(producer: Producer) -> Any:
            # Celery gives a None for each that the call leaves out.
            patience = {n: s for n, s in self._patience(producer).items() if options.get(n) is None}
            return producer.publish(body, retry=False, **{**options, **patience})

        return self.ask(send, retry=retry, retry_policy=retry_policy)

    def ask(
        self,
        act: Callable[[Producer], Any],
        *,
        retry: bool = True,
        retry_policy: Mapping[str, Any] | None = None,
    ) -> Any:
        """Have a producer do something, within the timeout; see ``publish``.

        Args:
            act: what is done, perhaps again on a new connection.
            retry: see ``publish``.
            retry_policy: see ``publish``.
        """
        policy = {**_POLICY, **(retry_policy or {})}
        # A try that began in time takes half of the timeout at most.
        until = time.monotonic() + self._timeout_seconds / 2
        pauses = _pauses(policy)
        for retries in itertools.count():
            here = self._here()
            passed_over = here.passed_over
            try:
                with self.producer() as producer:
                    answer = act(producer)
            except Exception as error:
                if not self.is_away(error):
                    if is_refusal(error):
                        self.breaker.succeeded()
                    raise
                # Those that are idle were made before it, and lead to the same broker.
                self.close()
                with here.lock:
                    if here.passed_over == passed_over:
                        # A host that is frozen takes all the time there is. Once for all threads:
                        # two of them would come back to it.
                        here.passed_over += 1
                pause, most = next(pauses), policy["max_retries"]
                is_last = not retry or (most is not None and retries >= most)
                if is_last or time.monotonic() + pause >= until:
                    self.breaker.failed()
                    raise
            else:
                self.breaker.succeeded()
                return answer
            time.sleep(pause)
        raise AssertionError("unreachable")

    def is_away(self, error: Exception) -> bool:
        """Tell whether an error is the broker's: no other message would have got there either.

        False where the message itself was refused: its exchange is missing, its queue full, its
        key of another type. So, too, where it cannot be said to the broker: what amqp cannot put
        into a frame is a *connection* error to it.
        """
        if is_refusal(error) or isinstance(error, FrameError | FrameSyntaxError):
            return False
        transport = self._app.connection_for_write().transport
        return isinstance(
            error,
            (
                OSError,
                OperationalError,
                LimitExceeded,
                *transport.connection_errors,
                *transport.channel_errors,
            ),
        )

    @contextmanager
    def producer(self) -> Iterator[Producer]:
        """Give a producer; its connection is dropped when the block raises.

        Raises:
            LimitExceeded: all ``broker_pool_limit`` of them were in use for too long.
        """
        here = self._here()
        if here.places is not None and not here.places.acquire(timeout=self._timeout_seconds / 2):
            raise LimitExceeded(self._app.conf.broker_pool_limit)
        try:
            with here.lock:
                producer = here.idle.pop() if here.idle else None
            producer = producer or Producer(self._connection())
            try:
                yield producer
            except BaseException:
                _drop(producer)
                raise
            if here.places is None:
                # ``broker_pool_limit`` is 0: Celery keeps none either.
                _drop(producer)
            else:
                with here.lock:
                    here.idle.append(producer)
        finally:
            if here.places is not None:
                here.places.release()

    def close(self) -> None:
        """Close what is idle. The next publish connects again."""
        here = self._process
        if here is None or here.pid != os.getpid():
            return
        with here.lock:
            idle, here.idle = here.idle, []
        for producer in idle:
            _drop(producer)

    def _patience(self, producer: Producer) -> dict[str, float]:
        if producer.connection.transport.driver_name != _AMQP:
            return {}
        step = self._timeout_seconds / 2
        return {"timeout": step, "confirm_timeout": step}

    def _connection(self) -> Connection:
        step = self._timeout_seconds / 2
        conf = self._app.conf
        given = self._app.connection_for_write()
        connection: Connection = self._app.connection_for_write(
            connect_timeout=min(conf.broker_connection_timeout or step, step),
            transport_options=_bounded(
                conf.broker_transport_options or {},
                driver=given.transport.driver_name,
                step_seconds=step,
                hosts=len(given.alt or ()),
            ),
        )
        hosts = len(connection.alt or ())
        for _ in range(self._here().passed_over % hosts if hosts > 1 else 0):
            connection.maybe_switch_next()
        return connection

    def _here(self) -> _Process:
        here = self._process
        if here is None or here.pid != os.getpid():
            if here is not None:
                _left_behind.append(here)
            here = self._process = _Process(self._app.conf.broker_pool_limit)
        return here


def is_refusal(error: Exception) -> bool:
    """Tell whether a broker has answered that it does not take this message."""
    if isinstance(error, ChannelError | MessageNacked):
        return True
    # Without an import: the driver is an extra.
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("redis.")}
    return (
        "ResponseError" in names
        and names.isdisjoint(_REDIS_TAKES_NOTHING_ERRORS)
        and not str(error).startswith(_REDIS_TAKES_NOTHING)
    )


def _pauses(policy: Mapping[str, Any]) -> Iterator[float]:
    """Return the pauses of a retry policy, as kombu's ``retry_over_time`` makes them."""
    start, step, most = (policy[f"interval_{name}"] for name in ("start", "step", "max"))
    for pause in fxrange(start, most + start, step, repeatlast=True):
        yield min(float(pause), float(most))


def _bounded(
    given: Mapping[str, Any], *, driver: str, step_seconds: float, hosts: int
) -> dict[str, Any]:
    """Return the transport options of the user with a bound on each step.

    Args:
        given: ``broker_transport_options``.
        driver: kombu's ``driver_name``.
        step_seconds: the bound.
        hosts: how many brokers the URL names.
    """

    def within(name: str, bound: float) -> float:
        return min(given.get(name) or bound, bound)

    # Else a connection is tried for ever while it is refused (kombu 5.7, ``default_channel``).
    options: dict[str, Any] = {
        "max_retries": max(hosts - 1, 0),
        "interval_start": 0.0,
        "interval_step": 0.0,
        "interval_max": 0.0,
        "connect_retries_timeout": step_seconds,
    }
    if driver == _REDIS:
        options["socket_timeout"] = within("socket_timeout", step_seconds)
        options["socket_connect_timeout"] = within("socket_connect_timeout", step_seconds)
    else:
        # Whole seconds: amqp packs them into a timeval.
        whole = max(1, math.floor(step_seconds))
        options["read_timeout"] = max(1, math.floor(within("read_timeout", whole)))
        options["write_timeout"] = max(1, math.floor(within("write_timeout", whole)))
        # A frozen broker takes what fits into the socket's buffer: without its word a message
        # that is lost there counts as dispatched until ``lease_queued_timeout``.
        options["confirm_publish"] = given.get("confirm_publish", True)
    return options


def _place(connection: Any) -> Any:
    """Return where a connection leads, whatever its options are and whichever host it is at."""
    if connection.alt:
        return connection.transport_cls, tuple(connection.alt)
    return (
        connection.transport_cls,
        connection.hostname,
        connection.port,
        connection.userid,
        connection.virtual_host,
    )


def _drop(producer: Producer) -> None:
    """Forget a connection without a word to the broker, which may be frozen."""
    connection = producer.connection
    producer.channel = None
    with suppress(Exception):
        connection.collect()
