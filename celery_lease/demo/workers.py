"""What the demo's workers and beat load: ``celery -A celery_lease.demo.workers worker``.

Each of these processes ends with the one that started it, however that ends: a demo that is
interrupted or killed leaves no worker behind, not even a frozen one (Linux: prctl(2),
PR_SET_PDEATHSIG; elsewhere only an orderly end of the demo cleans up).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

from celery import signals

from celery_lease.demo import variables
from celery_lease.demo.app import create_app

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    The signal comes at the end of the *thread* that forked: both the demo and a prefork
    worker start their processes from their main thread.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        # It ended before it could be asked for.
        os._exit(1)


end_with(int(os.environ[variables.PARENT]))
_worker = os.getpid()


@signals.worker_process_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _end_with_the_worker(**_: Any) -> None:
    end_with(_worker)


app = create_app(Path(os.environ[variables.FOLDER]), os.environ.get(variables.BROKER) or None)
