"""Short-lived folders for servers: directly under /tmp, readable by every user, removed at the end.

Not pytest's ``tmp_path``: that is too long for a Unix socket (107 bytes), and closed to the user
``nobody`` when the tests run as root.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import tempfile
from pathlib import Path

_PREFIX = "clt-"
_TMP = Path("/tmp")
# Name of the file whose lock says that the test process which made the folder still lives.
_OWNER = ".owner"


class ServerFolder:
    """A folder of one server, with a lock that the kernel drops when the test process dies."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_TMP))
        # Not inherited by the processes started later (Python opens files so): only we hold it.
        self._owner = (self.path / _OWNER).open("w")
        fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        give_to_nobody(self.path)

    def remove(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()


def give_to_nobody(path: Path) -> None:
    """Let everybody read a folder, and, if we are root, make it the property of ``nobody``."""
    path.chmod(0o755)
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(path, nobody.pw_uid, nobody.pw_gid)


def reachable_by_nobody(path: Path) -> bool:
    """Tell whether every folder on the way to a path may be entered by everybody."""
    path = path.resolve()
    return all(one.stat().st_mode & 0o005 == 0o005 for one in [path, *path.parents])


def remove_abandoned() -> None:
    """Remove the folders of test processes that were killed before they could."""
    for folder in _TMP.glob(f"{_PREFIX}*"):
        try:
            with (folder / _OWNER).open("r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Still in use, of another user, or just being made.
            continue
