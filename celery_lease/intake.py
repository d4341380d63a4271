"""What a worker takes from the broker, and that it takes nothing more once it is asked to stop.

A body hands its job over within milliseconds of the signal; its message must reach another worker.
Celery stops consuming later: after the whole wait of a soft shutdown, and on Redis a ``BRPOP`` that
is under way takes a message even then, which comes back when the worker's last body has ended
(seen with celery 5.7 and kombu 5.7: the next worker started after 5.6 s instead of 0.1 s).

What it is not: it does not stop the worker, and Celery cancels its consumers once more.
"""

from __future__ import annotations

import logging
import socket
import ssl
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

#: Redis answers the end of our half of the connection at once; a dead one must not keep us.
REDIS_SECONDS = 0.5
#: Whose code must not be entered again while it is half way through: it shares one buffer for all
#: that it writes.
_TRANSPORTS = ("amqp.", "redis.", "kombu.transport.", "vine.")


def end_intake(consumer: Any, frame: FrameType | None = None) -> None:
    """Have the broker give nothing more to a worker; called in signal handlers, never raises.

    Args:
        consumer: Celery's, None for none. Other transports than Redis and AMQP are left to Celery.
        frame: where the signal has struck. In the middle of the transport's own code nothing is
            done, and the messages of that moment come back when the worker ends.
    """
    try:
        tasks = getattr(consumer, "task_consumer", None)
        if tasks is None or _is_in_transport(frame):
            return
        kind = consumer.connection.transport.driver_type
        if kind == "redis":
            tasks.cancel()
            _end_redis_wait(tasks.channel)
        elif kind == "amqp":
            for tag in list(tasks._active_tags.values()):  # noqa: SLF001  kombu 5.5 to 5.7
                # Celery waits for the answer when it cancels; a signal handler must not.
                tasks.channel.basic_cancel(tag, nowait=True)
    except Exception as error:  # noqa: BLE001  the worker stops all the same, only later
        logger.debug("lease.intake.unended problem=%r", error)


def _is_in_transport(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_TRANSPORTS):
            return True
        frame = frame.f_back
    return False


def _end_redis_wait(channel: Any) -> None:
    """Call a ``BRPOP`` back. What it has taken meanwhile is read, and goes back to its queue."""
    sock = getattr(channel._in_poll or None, "_sock", None)  # noqa: SLF001  as above
    if sock is None or isinstance(sock, ssl.SSLSocket):
        # Nothing is under way. TLS has no half-close: it ends by itself, after a second.
        return
    sock.settimeout(REDIS_SECONDS)
    # Redis drops a client that has ended its half; what it had sent before can still be read.
    sock.shutdown(socket.SHUT_WR)
    try:
        channel._brpop_read()  # noqa: SLF001  as ``Channel.close`` does
    except channel.connection_errors:
        # Nothing was under way any more; kombu has closed the connection.
        return
