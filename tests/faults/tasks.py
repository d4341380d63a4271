"""The app of the faults: leased bodies that do what their plan says, and plain callbacks."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, signals

from celery_lease import LeasedTask, events
from celery_lease.exceptions import LeaseLost
from tests.faults.ledger import Ledger


class DiesBeforeBody(LeasedTask):
    """A user's base whose ``__call__`` ends its process at the first attempt: claimed, no body."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.lease.fencing_token == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*args, **kwargs)


def make_app(conf: Mapping[str, Any], folder: Path) -> Celery:
    """Return a new app with the tasks of the faults.

    Args:
        conf: Celery's settings and ours. ``faults_kill_at`` (an event of ours, or the name of a
            Celery signal) has the first process that comes there kill its whole group.
        folder: of the ledger.
    """
    app = Celery("faults", set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_prefetch_multiplier=1,
        **conf,
    )
    ledger = Ledger(folder)
    # Not shared: a test process makes several such apps.
    leased = {"base": LeasedTask, "bind": True, "shared": False}

    def body(task: LeasedTask, plan: dict[str, Any], name: str) -> int:
        lease = task.lease
        token = lease.fencing_token
        mine = {"job": task.request.id, "token": token, "name": name}
        ledger.write("begin", **mine, checkpoint=lease.last_checkpoint)
        try:
            gate = _chosen(plan.get("wait", {}), token)
            if gate is not None:
                ledger.wait_at(gate, lease.check if plan.get("check") else lambda: None)
            _act(task, _chosen(plan.get("then", {}), token), ledger)
        except LeaseLost:
            ledger.write("interrupted", **mine)
            raise
        ledger.write("end", **mine)
        return int(token)

    @app.task(**leased, name="faults.work")
    def work(self: LeasedTask, *before: Any, plan: dict[str, Any], name: str = "") -> int:
        return body(self, plan, name)

    @app.task(**{**leased, "base": DiesBeforeBody}, name="faults.dies_before_body")
    def dies_before_body(
        self: LeasedTask, *before: Any, plan: dict[str, Any], name: str = ""
    ) -> int:
        return body(self, plan, name)

    @app.task(shared=False, name="faults.note")
    def note(value: Any, what: str) -> None:
        ledger.write(what, value=value)

    @app.task(shared=False, name="faults.on_error")
    def on_error(task_id: str) -> None:
        ledger.write("errback", job=task_id)

    if "faults_kill_at" in conf:
        _kill_at(conf["faults_kill_at"], ledger)
    return app


def _chosen(by_token: Mapping[str, str], token: int) -> str | None:
    """What a plan says for an attempt: its own entry, else that of all (``*``)."""
    return by_token.get(str(token), by_token.get("*"))


def _act(task: LeasedTask, action: str | None, ledger: Ledger) -> None:
    lease = task.lease
    if action == "fail":
        raise ValueError(f"attempt {lease.fencing_token}")
    if action == "retry":
        raise task.retry(countdown=0)
    if action == "progress":
        lease.progress(99, 100)
    elif action == "checkpoint":
        lease.checkpoint({"by": lease.fencing_token})
    elif action == "kill child":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill group":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    elif action == "exit":
        os._exit(0)
    elif action is not None and action.startswith("hold the GIL "):
        # Through a PyDLL it is not released: a C extension in a long computation.
        ctypes.PyDLL(None).sleep(int(action.removeprefix("hold the GIL ")))


def _kill_at(where: str, ledger: Ledger) -> None:
    def kill(*_: Any, **__: Any) -> None:
        if ledger.is_first("kill"):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    if where in events.LEVELS:
        events.subscribe(lambda event: kill() if event.name == where else None)
    else:

        def killed(sender: Any = None, **_: Any) -> None:
            if getattr(sender, "name", "") == "faults.work":
                kill()

        getattr(signals, where).connect(killed, weak=False)
