"""The app of these tests, in a worker whose processes die at one point of a result's way.

``LEASE_TEST_DIES`` names a function of the store's transitions and whether before or after it:
``before count_part``. The first process that comes there is killed, no other.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import redis

from celery_lease import backend
from celery_lease.store import transitions
from tests.worker.apps.leased import app
from tests.worker.apps.tasks import Ledger

__all__ = ["app"]

_when, _name = os.environ["LEASE_TEST_DIES"].split()
_ledger = Ledger(os.environ["LEASE_TEST_LEDGER"])
_inner = getattr(transitions, _name)

# The claim of who died at its chord runs out within the test.
backend.CHORD_CLAIM_SECONDS = 2.0


def _die_once() -> None:
    # Two children may come here at once: one of them is the first.
    with redis.Redis.from_url(os.environ["LEASE_TEST_LEDGER"]) as client:
        is_first = client.set("dying", 1, nx=True)
    if is_first:
        _ledger.note("dying", "died")
        os.kill(os.getpid(), signal.SIGKILL)


@functools.wraps(_inner)
def _dies(*args: Any, **kwargs: Any) -> Any:
    if _when == "before":
        _die_once()
    answer = _inner(*args, **kwargs)
    if _when == "after":
        _die_once()
    return answer


setattr(transitions, _name, _dies)
