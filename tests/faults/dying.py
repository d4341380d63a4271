"""Children that are killed on the way from the end of a body to the end of Celery's bookkeeping.

Which job's, and where, the tests say (``condemn``); each sentence is carried out once. The points
on the way of an outcome, in their order:

* ``committed``: it is in the store, and Celery knows nothing;
* ``sent``: Celery has sent links and the next step, and stored nothing (a failure has none);
* ``stored``: the result backend has it; of a failure, errbacks are not sent, and a part of a chord
  is not counted;
* ``erred``: errbacks are sent, of a job that failed or of the body of a chord that did;
* ``told``: Celery is done, and the store does not know it.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import TYPE_CHECKING, Any

import redis
from celery.backends.base import Backend
from celery.states import READY_STATES

from celery_lease import backend as lease_backend
from celery_lease.runtime import Runtime
from celery_lease.store import transitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POINTS = ("committed", "sent", "stored", "told")
#: Beside them, where there are errbacks.
ERRED = "erred"

_DEATHS = "deaths"


def condemn(client: Any, point: str, job_ids: Iterable[str]) -> None:
    """Have the child that comes to this point with one of these jobs die there, once each."""
    client.sadd(_DEATHS, *(f"{point} {job_id}" for job_id in job_ids))


def pending(client: Any) -> set[str]:
    """Return the sentences that nobody has come to yet."""
    return {one.decode() for one in client.smembers(_DEATHS)}


def make_mortal(app: Any) -> None:
    """Have this process carry the sentences out, at the app's own points."""
    for name in ("complete", "fail"):
        _around(transitions, name, _committed)
    _around(Backend, "mark_as_done", _sent)
    _around(type(app.backend), "store_result", _stored)
    _around(Backend, "_call_task_errbacks", _erred)
    # The claim of who died at its chord runs out within the test.
    lease_backend.CHORD_CLAIM_SECONDS = 2.0
    _around(Runtime, "settle_later", _told)


def _die(point: str, job_id: str) -> None:
    with redis.Redis.from_url(os.environ["LEASE_TEST_LEDGER"]) as client:
        if client.srem(_DEATHS, f"{point} {job_id}"):
            os.kill(os.getpid(), signal.SIGKILL)


def _around(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, functools.wraps(inner)(wrap(inner)))


def _committed(inner: Callable[..., Any]) -> Any:
    def ended(store: Any, lease: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(store, lease, *args, **kwargs)
        _die("committed", lease.job_id)
        return answer

    return ended


def _sent(inner: Callable[..., Any]) -> Any:
    def mark(self: Any, task_id: str, *args: Any, **kwargs: Any) -> Any:
        _die("sent", task_id)
        return inner(self, task_id, *args, **kwargs)

    return mark


def _stored(inner: Callable[..., Any]) -> Any:
    def store(self: Any, task_id: str, result: Any, state: str, **kwargs: Any) -> Any:
        answer = inner(self, task_id, result, state, **kwargs)
        if state in READY_STATES:
            _die("stored", task_id)
        return answer

    return store


def _erred(inner: Callable[..., Any]) -> Any:
    def call(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(self, request, *args, **kwargs)
        _die(ERRED, request.id)
        return answer

    return call


def _told(inner: Callable[..., Any]) -> Any:
    def settle(self: Any, outcome: Any) -> None:
        _die("told", outcome[0])
        inner(self, outcome)

    return settle
