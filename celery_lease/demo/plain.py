"""The plain sequential run that the leased jobs are compared with: no Celery, no store.

In a thread of the demo's own process, since it can use the seconds in which everybody waits
for a lease to run out.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from celery_lease.demo.indexing import index_plainly
from celery_lease.demo.library import Package


class PlainRun:
    """Indexes every package, one after the other.

    Args:
        root: the library's folder.
        packages: what to index.
    """

    def __init__(self, root: Path, packages: list[Package]) -> None:
        self._root = root
        self._packages = packages
        self._results: dict[str, Any] = {}
        self._error: Exception | None = None
        self.seconds = 0.0
        # A daemon: a demo that fails does not wait for it.
        self._thread = threading.Thread(target=self._run, name="demo-plain-run", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def at(self) -> str | None:
        """Say where it is; None when it is at nothing."""
        if not self._thread.is_alive():
            return None
        return f"the same plainly, {len(self._results)}/{len(self._packages)} packages"

    def results(self) -> dict[str, Any] | None:
        """Return the results by package, None before all are there.

        Raises:
            Exception: what went wrong in it.
        """
        if self._error is not None:
            raise self._error
        return None if self._thread.is_alive() else self._results

    def _run(self) -> None:
        started = time.monotonic()
        try:
            for package in self._packages:
                self._results[package.name] = index_plainly(self._root, package.files).as_json()
        except Exception as error:  # noqa: BLE001  handed to whoever asks for the results
            self._error = error
        self.seconds = time.monotonic() - started
