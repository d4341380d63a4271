"""The app of these tests, with a result backend that takes a while to store a RETRY."""

from __future__ import annotations

import functools
import time
from typing import Any

from tests.worker.apps.leased import app

__all__ = ["app"]

_backend = type(app.backend)
_inner = _backend.mark_as_retry


@functools.wraps(_inner)
def _slowly(*args: Any, **kwargs: Any) -> Any:
    time.sleep(1.0)  # the slowness itself: another child has the next attempt done meanwhile
    return _inner(*args, **kwargs)


_backend.mark_as_retry = _slowly
