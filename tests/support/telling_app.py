"""An app that writes down at its import in what process it is: a fork must not be another."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from celery import Celery

app = Celery("telling", broker="memory://")

_PR_GET_PDEATHSIG = 2


def _death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def _links() -> list[str]:
    # The folder that is read has one, too, which is gone.
    there = [entry for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
    links = {entry.name: str(entry.readlink()) for entry in there}
    return sorted(f"{n} {link}" for n, link in links.items() if not link.startswith("/proc/"))


Path(os.environ["TELLING_FILE"]).write_text(
    json.dumps(
        {
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "arguments": sys.argv,
            "path": sys.path,
            "flags": str(sys.flags),
            "main": sys.modules["__main__"].__name__,
            "leads": os.getpid() == os.getsid(0) == os.getpgrp(),
            "dies by": _death_signal(),
            "files": _links(),
            "signals": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "threads": threading.active_count(),
            "zone": time.tzname,
            "limits": [resource.getrlimit(one) for one in range(resource.RLIMIT_NOFILE + 1)],
            "mask": os.umask(0o22),
        }
    )
)
