"""The app of the soak: bodies of every kind, each writing its effects under the guard."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from sqlalchemy.exc import DBAPIError

from celery_lease import HandOver, LeasedTask, StaleWrite
from celery_lease.lease import Lease
from tests.soak.witness import Witness

#: seconds; a page of a slow body
PAGE = 0.25


class Flaky(Exception):
    """What a body raises that Celery is to try again."""


def make_app(conf: Mapping[str, Any]) -> Celery:
    """Return a new app with the tasks of the soak.

    Args:
        conf: Celery's settings and ours.
    """
    app = Celery("soak", set_as_current=False)
    app.conf.update(conf)
    witness = Witness(conf["lease_store_url"])
    for name, (body, options) in BODIES.items():
        how = write_blindly if body is careless else write
        app.task(
            _task(body, functools.partial(how, witness)),
            base=LeasedTask,
            bind=True,
            shared=False,
            name=name,
            **options,
        )
    return app


def _task(body: Callable[..., object], how: Callable[[Lease, str], None]) -> Callable[..., int]:
    """Return what Celery runs: a body, its last effect, and its token as the result.

    Args:
        body: called with the task and with what writes an effect.
        how: writes an effect.
    """

    # What a chain or a chord hands on comes first; nobody here looks at it.
    def run(task: LeasedTask, *before: object, **plan: Any) -> int:
        lease: Any = task.lease

        def effect(step: str) -> None:
            how(lease, step)

        body(task, effect, **plan)
        effect("final")
        return int(lease.fencing_token)

    return run


def write(witness: Witness, lease: Lease, step: str) -> None:
    """Write an effect, through outages of the store for as long as the lease is trusted.

    Raises:
        LeaseLost: it can no longer be trusted.
        StaleWrite: the job is no longer *mine*; nothing was written.
    """
    while True:
        lease.check()
        try:
            if witness.write(lease.held, step):
                return
        except DBAPIError:
            pause(0.1)
            continue
        raise StaleWrite(lease.job_id, lease.fencing_token)


def write_blindly(witness: Witness, lease: Lease, step: str) -> None:
    """Write an effect without a look at the lease, whatever becomes of it: the guard is alone."""
    while True:
        try:
            witness.write(lease.held, step)
        except DBAPIError:
            pause(0.1)
        else:
            return


# --- the bodies ---------------------------------------------------------------------------------


def short(task: LeasedTask, effect: Effect) -> None:
    """Be done at once."""
    effect("begin")


def slow(task: LeasedTask, effect: Effect, *, pages: int) -> None:
    """Work page by page, from the last checkpoint on; hand over when asked to stop."""
    lease = task.lease
    for page in range(lease.last_checkpoint or 0, pages):
        lease.check()
        pause(PAGE)
        effect(f"page{page}")
        lease.checkpoint(page + 1)
        lease.progress(page + 1, pages)
        if lease.stop_requested:
            raise HandOver


def careless(task: LeasedTask, effect: Effect, *, pages: int) -> None:
    """Work on as a zombie would: no check, no interruption, no ear for a refusal."""
    for page in range(pages):
        pause(PAGE)
        effect(f"page{page}")


def retrying(task: LeasedTask, effect: Effect, *, times: int) -> None:
    """Ask Celery for another try, so many times."""
    effect(f"try{task.request.retries}")
    if task.request.retries < times:
        raise task.retry(countdown=random.choice((0, 0.5)))


def flaky(task: LeasedTask, effect: Effect, *, times: int) -> None:
    """Fail so many times; Celery tries again, but not for ever."""
    effect(f"try{task.request.retries}")
    if task.request.retries < times:
        raise Flaky(task.request.retries)


def poison(task: LeasedTask, effect: Effect, *, how: str, at: int | None) -> None:
    """End the runner, at one token or at each."""
    effect("begin")
    if at is None or task.lease.fencing_token == at:
        die(how)


Effect = Callable[[str], None]

BODIES: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "soak.short": (short, {}),
    "soak.slow": (slow, {}),
    "soak.careless": (careless, {"lease_interrupt": False}),
    "soak.retrying": (retrying, {"max_retries": None}),
    "soak.flaky": (
        flaky,
        {"autoretry_for": (Flaky,), "max_retries": 2, "default_retry_delay": 0.3},
    ),
    "soak.poison": (poison, {"lease_max_attempts": 2}),
}


def pause(seconds: float) -> None:
    """Let time pass; an exception that interrupts the body ends it."""
    threading.Event().wait(seconds)


def die(how: str) -> None:
    """End this process: by SIGKILL, by SIGTERM or by leaving without a word."""
    if how == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGKILL)
    pause(30)
