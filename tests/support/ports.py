"""Free ports for private servers. Not a reservation: another process can still be faster.

A server that finds its port taken at its first start takes another one and tries once more
(``servers/server.py``).
"""

from __future__ import annotations

import random
import socket

# Below Linux' range for outgoing connections (32768 and up): a port of that range may be taken by
# any client while a killed server is down, and the server could not come back on it.
_LOWEST, _HIGHEST = 20000, 32000
# Seeded by the system, not by the test: two test workers must not choose the same.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listened on a moment ago."""
    for _ in range(200):
        port = _RANDOM.randrange(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    message = f"no free port between {_LOWEST} and {_HIGHEST}"
    raise RuntimeError(message)


def is_open(port: int) -> bool:
    """Tell whether somebody accepts connections on that port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
