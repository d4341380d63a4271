"""MariaDB, from Debian's packages."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pymysql

from tests.support.servers.server import Server


class MariaDB(Server):
    """A MariaDB server; first start 2 s, later ones 0.2 s. User and password ``lease``.

    Args:
        durable: write and flush at each commit. Off by default, which is right where only the
            process may die; on for measurements.
        options: further options of the server, name (with hyphens) to value.
    """

    label: ClassVar[str] = "MariaDB"
    packages: ClassVar[tuple[str, ...]] = ("mariadb-server-core", "mariadb-client-core")

    def __init__(self, *, durable: bool = False, options: dict[str, str] | None = None) -> None:
        super().__init__()
        self._options = {
            "character-set-server": "utf8mb4",
            "innodb-buffer-pool-size": "64M",
            "innodb-flush-log-at-trx-commit": "1" if durable else "2",
            "innodb-log-file-size": "16M",
            "max-connections": "200",
            **(options or {}),
        }

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: its packages are not installed."""
        for program in ("mariadbd", "mariadb-install-db"):
            if shutil.which(program, path=_PATH) is None:
                return f"MariaDB: no {program} (Debian: {' '.join(cls.packages)})"
        return None

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database ``lease``."""
        return f"mysql+pymysql://lease:lease@127.0.0.1:{self.port}/lease"

    def prepare(self) -> None:
        """Make the system tables, and a file that makes the user at the first start."""
        # --no-defaults comes first, else /etc/mysql is read; --force: a host name that does not
        # resolve is no reason to stop.
        self.set_up(
            str(shutil.which("mariadb-install-db", path=_PATH)),
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            "--force",
        )
        self.write(
            "init.sql",
            "create database if not exists lease;\n"
            "create user if not exists lease@'127.0.0.1' identified by 'lease';\n"
            "grant all on *.* to lease@'127.0.0.1' with grant option;\n",
        )

    def command(self) -> list[str]:
        """Run in the foreground, log to standard error."""
        return [
            str(shutil.which("mariadbd", path=_PATH)),
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            f"--init-file={self.folder / 'init.sql'}",
            f"--socket={self.folder / 's.sock'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--port={self.port}",
            f"--tmpdir={self.folder}",
            "--bind-address=127.0.0.1",
            "--skip-log-bin",
            "--skip-name-resolve",
            *(f"--{name}={value}" for name, value in self._options.items()),
        ]

    def ask(self) -> None:
        """Connect as the user that the first start makes."""
        # connect_timeout ends with the kernel's handshake: a frozen server passes it.
        pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="lease",
            password="lease",
            connect_timeout=2,
            read_timeout=2,
        ).close()


# Servers' programs are in sbin, which a user's PATH often lacks.
_PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
