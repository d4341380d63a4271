"""PgBouncer in transaction pooling mode, in front of a PostgreSQL server."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING, ClassVar

import psycopg

from tests.support.servers.server import Server

if TYPE_CHECKING:
    from tests.support.servers.postgresql import PostgreSQL


class PgBouncer(Server):
    """A PgBouncer for all databases of one PostgreSQL server; up in 0.05 s.

    Transaction pooling: nothing of a session outlives a transaction, neither ``SET`` nor advisory
    locks nor (before PgBouncer 1.21) prepared statements. Parameters that a client sends with its
    login, such as ``options``, are refused, as by a pooler that nobody tuned for us.

    Args:
        behind: the server; it must be started first.
        pool_size: connections to the server for each database.
    """

    label: ClassVar[str] = "PgBouncer"
    packages: ClassVar[tuple[str, ...]] = ("pgbouncer",)
    # At once; SIGTERM waits for clients in newer versions.
    stop_signal: ClassVar[signal.Signals] = signal.SIGQUIT

    def __init__(self, behind: PostgreSQL, *, pool_size: int = 20) -> None:
        super().__init__()
        self._behind = behind
        self._pool_size = pool_size

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: its package is not installed."""
        return None if _program() else f"PgBouncer: not installed (Debian: {cls.packages[0]})"

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database ``postgres``, through the pooler."""
        return self.url_for("postgres")

    def url_for(self, database: str) -> str:
        """Return SQLAlchemy's URL of a database of the server behind, through the pooler."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def prepare(self) -> None:
        """Nothing to make."""

    def configure(self) -> None:
        """Write its two files."""
        users = self.write("users.txt", '"postgres" ""\n')
        self.write(
            "pgbouncer.ini",
            f"""\
[databases]
* = host=127.0.0.1 port={self._behind.port} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
admin_users = postgres
pool_mode = transaction
default_pool_size = {self._pool_size}
max_client_conn = 200
""",
        )

    def command(self) -> list[str]:
        """Run in the foreground, log to standard error."""
        return [str(_program()), str(self.folder / "pgbouncer.ini")]

    def ask(self) -> None:
        """Go through it to the server, without prepared statements."""
        psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", connect_timeout=2
        ).close()


def _program() -> str | None:
    return shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
