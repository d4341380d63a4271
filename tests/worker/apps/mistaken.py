"""The app of these tests, in a worker in which we make one mistake: the first error breaks us."""

from __future__ import annotations

import functools
from typing import Any

from celery_lease import task
from tests.worker.apps.leased import app

__all__ = ["app"]

_inner = task.encode_error


@functools.wraps(_inner)
def _mistaken(*args: Any, **kwargs: Any) -> Any:
    task.encode_error = _inner
    message = "a mistake of ours"
    raise RuntimeError(message)


task.encode_error = _mistaken
