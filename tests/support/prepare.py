"""``python -m tests.support.prepare``: install the servers for the tests, or say what is missing.

It installs only as root, and only where nobody minds: in a container, or where ``CI=true``. The
packages' services are kept from starting. It never fails: a server that is missing in the end skips
its tests (with ``CI=true``: fails them), which says more than an error here would.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.servers import MariaDB, PgBouncer, PostgreSQL, RabbitMQ, Valkey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import Server

_SERVERS: tuple[type[Server], ...] = (Valkey, PostgreSQL, MariaDB, RabbitMQ, PgBouncer)
# What single tests need besides: a package, and a file by which it is known to be there.
_TOOLS = {"libfaketime": "*/faketime/libfaketime.so.1"}
_LIBRARIES = Path("/usr/lib")
# Asked by every Debian package before it starts its service; 101 means: do not.
_POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> None:
    """Install what is missing, if we may; report what is still missing."""
    wanted = [package for server in _missing() for package in server.packages]
    wanted += [package for package, files in _TOOLS.items() if not any(_LIBRARIES.glob(files))]
    if wanted and (reason := _hands_off()) is None:
        print(f"installing the servers that the tests use: {' '.join(wanted)}", flush=True)
        _install(wanted)
    elif wanted:
        print(f"not installing servers: {reason}. With them: apt-get install {' '.join(wanted)}")
    for server in _missing():
        print(f"missing, its tests cannot run: {server.unavailable_reason()}", flush=True)


def _missing() -> list[type[Server]]:
    return [server for server in _SERVERS if server.unavailable_reason() is not None]


def _hands_off() -> str | None:
    """Return why nothing is to be installed on this machine, None if it may be."""
    if shutil.which("apt-get") is None:
        return "no apt-get here"
    if os.getuid() != 0:
        return "not root"
    if os.environ.get("CI", "").lower() in {"1", "true"} or _in_container():
        return None
    return "this looks like somebody's own machine (CI=true would do it)"


def _in_container() -> bool:
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return True
    try:
        words = Path("/proc/1/environ").read_bytes() + Path("/proc/1/cgroup").read_bytes()
    except OSError:
        return False
    return any(mark in words for mark in (b"container=", b"docker", b"kubepods", b"lxc"))


def _install(packages: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    with _no_services():
        for command in (["apt-get", "update", "-qq"], install):
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                print(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep the packages' services from starting, by a policy of ours where there is none."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


if __name__ == "__main__":
    main()
