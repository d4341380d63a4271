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
    # Long enough for another child to have done the next attempt.
    time.sleep(1.0)
    return _inner(*args, **kwargs)


_backend.mark_as_retry = _slowly
