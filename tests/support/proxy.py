"""A TCP proxy on 127.0.0.1 whose cable can be pulled: between a worker and one of its servers.

``cut()`` is what a client notices at once (reset, then refused); ``stall()`` is what it does not
(nothing arrives any more, no error): a firewall that drops, a machine that is gone.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

# Close with a reset instead of an orderly end: on, 0 seconds.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forward a port of its own to another one.

    Args:
        target: the port of the server on 127.0.0.1.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._flowing = threading.Event()
        self._answering = threading.Event()
        self._ending = threading.Event()
        self._pairs: dict[threading.Thread, tuple[socket.socket, socket.socket]] = {}
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name=f"proxy-{self.port}")
        self.heal()
        self._acceptor.start()

    def url(self, url: str) -> str:
        """Return a URL of the server with the proxy's port in it."""
        assert f":{self._target}" in url, url
        return url.replace(f":{self._target}", f":{self.port}")

    def cut(self) -> None:
        """Reset all connections, and every new one, until ``heal``."""
        self._open.clear()
        with self._lock:
            for pair in self._pairs.values():
                _reset(*pair)

    def stall(self) -> None:
        """Let nothing through, in either direction, until ``heal``; connections stay open."""
        self._flowing.clear()

    def mute(self) -> None:
        """Let through what clients say and drop what is answered, until ``heal``."""
        self._answering.clear()

    def heal(self) -> None:
        """Let everything through again; what was held back by ``stall`` arrives now."""
        self._open.set()
        self._flowing.set()
        self._answering.set()

    def lead_to(self, target: int) -> None:
        """Forward new connections to another port: the address has moved to another server."""
        self._target = target

    @property
    def connection_count(self) -> int:
        """How many connections go through it now."""
        with self._lock:
            return len(self._pairs)

    def close(self) -> None:
        """End it and all its connections."""
        self._ending.set()
        self._flowing.set()
        self.cut()
        self._acceptor.join(5)
        for thread in list(self._pairs):
            thread.join(5)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._ending.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket()
        refused = not self._open.is_set() or server.connect_ex(("127.0.0.1", self._target)) != 0
        if refused:
            _reset(client, server)
            return
        thread = threading.Thread(target=self._forward, args=(client, server), daemon=True)
        with self._lock:
            self._pairs[thread] = (client, server)
        thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            for one in other:
                one.settimeout(None)
                selector.register(one, selectors.EVENT_READ)
            while self._open.is_set() and not self._ending.is_set():
                for key, _ in selector.select(0.05):
                    source: socket.socket = key.fileobj  # type: ignore[assignment]
                    # Not read while stalled, so that the sender's buffers fill as in life.
                    while not self._flowing.wait(0.05) and self._open.is_set():
                        pass
                    data = source.recv(65536)
                    if not data:
                        return self._forget(client, server, reset=False)
                    if source is client or self._answering.is_set():
                        other[source].sendall(data)
        return self._forget(client, server, reset=True)

    def _forget(self, client: socket.socket, server: socket.socket, *, reset: bool) -> None:
        with self._lock:
            self._pairs.pop(threading.current_thread(), None)
            if reset:
                _reset(client, server)
        client.close()
        server.close()


def _reset(*connections: socket.socket) -> None:
    for one in connections:
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Wakes a thread that reads from it; close alone would not.
            one.shutdown(socket.SHUT_RD)
        one.close()
