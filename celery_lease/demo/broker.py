"""Celery's filesystem broker, with one thing mended: a message appears whole.

kombu 5.7 opens a message's file under its final name, then writes it
(``kombu/transport/filesystem.py``, ``Channel._put``). A worker that looks in between takes an
empty file, cannot read it, and ends with a ``JSONDecodeError``. Everything else is kombu's:
above all, a message that a worker has taken is gone with that worker.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """A channel whose messages are renamed into the queue's folder."""

    # kombu's own differs from its base class in the same way.
    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        # kombu's own name for it, which puts the oldest first: the clock is one for all processes.
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        target = Path(self.data_folder_out) / name
        # Not yet of any queue: a queue's files are those that end in its name.
        part = target.with_suffix(".part")
        part.write_bytes(dumps(payload).encode())
        os.replace(part, target)  # noqa: PTH105  one system call, said by its name


class Transport(filesystem.Transport):
    """``broker_transport`` of the demo's app."""

    Channel = Channel
