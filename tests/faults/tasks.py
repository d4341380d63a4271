"""The app of the faults: leased bodies that do what their plan says, and plain callbacks."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery, chain, signals
from sqlalchemy.pool import NullPool

from celery_lease import LeasedTask, events
from celery_lease.exceptions import LeaseLost
from celery_lease.extension import extension_of
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
            Celery signal) has the first process that comes there kill its whole group;
            ``faults_kill_child_at`` has the first ``faults_kills`` (1) kill themselves alone.
            ``faults_wait_at`` has the first process that comes there wait at the gate "harm done".
            ``faults_busy_parent`` has a thread in a worker's main process that always holds a lock;
            ``faults_without`` are tasks that it does not have, as before a deploy.
            ``faults_store_before_fork`` has the store used at import and before the pool forks.
        folder: of the ledger.
    """
    app = Celery("faults", set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        **{"worker_prefetch_multiplier": 1, **conf},
    )
    ledger = Ledger(folder)

    # Not shared: a test process makes several such apps. Not interrupted: what a body says that
    # goes on without its lease is what these tests are about.
    leased = {"base": _with_hooks(ledger), "bind": True, "shared": False, "lease_interrupt": False}

    def body(task: LeasedTask, plan: dict[str, Any], name: str) -> int:
        lease = task.lease
        token = lease.fencing_token
        mine = {"job": task.request.id, "token": token, "name": name}
        ledger.write("begin", **mine, checkpoint=lease.last_checkpoint)
        try:
            _go_through(task, plan, ledger, mine)
            gate = _chosen(plan.get("wait", {}), token)
            if gate is not None:
                ledger.wait_at(gate, lease.check if plan.get("check") else lambda: None)
            _act(task, _chosen(plan.get("then", {}), token), ledger, mine)
            _heed_stop(task, _chosen(plan.get("stop", {}), token), ledger, mine)
            _submit_next(task, plan.get("next"), ledger, mine)
            _go_on(task, plan.get("canvas"))
        except LeaseLost:
            ledger.write("interrupted", **mine)
            _act(task, _chosen(plan.get("linger", {}), token), ledger, mine)
            raise
        ledger.write("end", **mine)
        return int(token)

    def add(name: str, **options: Any) -> None:
        @app.task(**{**leased, **options}, name=f"faults.{name}")
        def task(self: LeasedTask, *before: Any, plan: dict[str, Any], name: str = "") -> int:
            return body(self, plan, name)

    add("work")
    add("interruptible", lease_interrupt=True)
    add("long_lease", lease_duration=600.0)
    add("dies_before_body", base=DiesBeforeBody)

    @app.task(**leased, name="faults.steps")
    def steps(self: LeasedTask, number: int, seconds: float) -> int:
        """Go through steps from the last checkpoint on, and hand over when asked to stop."""
        lease = self.lease
        for step in range(lease.last_checkpoint or 0, number):
            ledger.write("step", job=self.request.id, token=lease.fencing_token, step=step)
            time.sleep(seconds)
            lease.checkpoint(step + 1)
            if lease.stop_requested:
                lease.release()
        return number

    _add_callbacks(app, ledger)
    _harm(app, conf, ledger)
    for name in conf.get("faults_without", ()):
        app.tasks.unregister(name)
    return app


def _add_callbacks(app: Celery, ledger: Ledger) -> None:
    @app.task(shared=False, name="faults.note")
    def note(value: Any, what: str) -> None:
        ledger.write(what, value=value)

    @app.task(shared=False, name="faults.on_error")
    def on_error(task_id: str) -> None:
        ledger.write("errback", job=task_id)


def _with_hooks(ledger: Ledger) -> type[LeasedTask]:
    """Return a user's base, whose hooks write into the ledger that they were called."""

    class Hooked(LeasedTask):
        abstract = True

        def on_failure(self, exc: Any, task_id: str, *_: Any) -> None:
            ledger.write("on_failure", job=task_id, error=type(exc).__name__)

        def on_retry(self, exc: Any, task_id: str, *_: Any) -> None:
            ledger.write("on_retry", job=task_id)

    return Hooked


def _harm(app: Celery, conf: Mapping[str, Any], ledger: Ledger) -> None:
    def failed(sender: Any = None, task_id: str = "", **_: Any) -> None:
        if getattr(sender, "app", None) is app:
            ledger.write("task_failure", job=task_id)

    signals.task_failure.connect(failed, weak=False)
    if "faults_kill_at" in conf:
        _kill_at(conf["faults_kill_at"], lambda: _kill_group_once(ledger))
    if "faults_kill_child_at" in conf:
        kills = conf.get("faults_kills", 1)
        _kill_at(conf["faults_kill_child_at"], lambda: _kill_child(ledger, kills))
    if "faults_wait_at" in conf:
        _kill_at(conf["faults_wait_at"], lambda: _wait_once(ledger))
    if "faults_busy_parent" in conf:
        signals.worker_init.connect(_log_for_ever, weak=False)
    if "faults_store_before_fork" in conf:
        _use_store(app)
        signals.worker_init.connect(lambda **_: _use_store(app), weak=False)


def _wait_once(ledger: Ledger) -> None:
    if ledger.is_first("there"):
        ledger.write("there")
        ledger.wait_at("harm done")


def _log_for_ever(**_: Any) -> None:
    """Hold the locks of logging nearly all the time, in a thread of the main process (B047)."""

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            select.select((), (), (), 0.02)

    noisy = logging.getLogger("faults.noisy")
    noisy.propagate = False
    noisy.addHandler(Slow())

    def run() -> None:
        while True:
            noisy.warning("busy")

    threading.Thread(target=run, name="faults-noisy", daemon=True).start()


def _use_store(app: Celery) -> None:
    """Open connections and leave them in the pool, for children to inherit (B103)."""
    store = extension_of(app).store
    with store.engine.connect() as one, store.engine.connect() as other:
        for connection in (one, other):
            assert connection.scalar(sa.text("SELECT 1")) == 1


def _chosen(by_token: Mapping[str, str], token: int) -> str | None:
    """What a plan says for an attempt: its own entry, else that of all (``*``)."""
    return by_token.get(str(token), by_token.get("*"))


def _submit_next(
    task: LeasedTask, key: str | None, ledger: Ledger, mine: Mapping[str, Any]
) -> None:
    """Submit the next run under a key of its own."""
    if key is not None:
        sent = task.apply_async(kwargs={"plan": {}}, idempotency_key=key)
        ledger.write("next", **mine, sent=sent.id)


def _go_on(task: LeasedTask, plans: list[Any] | None) -> None:
    """Go on as a chain, whose last task has the job's id."""
    if plans:
        steps = [task.si(plan=one, name=f"step {number}") for number, one in enumerate(plans)]
        raise task.replace(chain(*steps))


def _go_through(
    task: LeasedTask, plan: Mapping[str, Any], ledger: Ledger, mine: Mapping[str, Any]
) -> None:
    """Do ``items`` one by one, from the last checkpoint on; wait at a gate after ``pause`` ones."""
    if "state" in plan:
        task.update_state(state=plan["state"], meta={"done": 1})
    if "items" not in plan:
        return
    for item in range(task.lease.last_checkpoint or 0, plan["items"]):
        ledger.write("item", **mine, item=item)
        task.lease.checkpoint(item + 1)
        if item + 1 == plan.get("pause"):
            ledger.wait_at("pause")


def _act(task: LeasedTask, action: str | None, ledger: Ledger, mine: Mapping[str, Any]) -> None:
    lease = task.lease
    if action == "fail":
        raise ValueError(f"attempt {lease.fencing_token}")
    if action == "retry":
        raise task.retry(countdown=0)
    if action == "retry in 5 s":
        raise task.retry(countdown=5)
    if action == "retry to nowhere":
        raise task.retry(countdown=0, queue="nowhere")
    if action == "progress":
        lease.progress(99, 100)
    elif action == "checkpoint":
        lease.checkpoint({"by": lease.fencing_token})
    elif action is not None and action.startswith("hold the GIL "):
        # Through a PyDLL it is not released: a C extension that waits.
        ctypes.PyDLL(None).sleep(int(action.removeprefix("hold the GIL ")))
    elif action is not None and action.partition(" ")[0] in LONG:
        kind, _, seconds = action.partition(" ")
        LONG[kind](task, float(seconds))
    elif action is not None:
        ledger.write("dies", **mine)
        DEATHS[action]()
        # A signal sent to oneself may come a moment later.
        ledger.wait_at("never")


def _compute(task: LeasedTask, seconds: float) -> None:
    """Compute in one call into C, which never lets go of Python's lock."""
    del task
    end = time.monotonic() + seconds
    all(map(end.__gt__, iter(time.monotonic, None)))


def _spin(task: LeasedTask, seconds: float) -> None:
    """Compute in Python, without ever yielding to another greenlet."""
    del task
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _ask(task: LeasedTask, seconds: float) -> None:
    """Wait for an answer in a driver of a database (PostgreSQL)."""
    engine = sa.create_engine(task.app.conf.lease_store_url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})


#: What a body can be busy with for some seconds: ``compute 9``, ``spin 6``, ``ask 20``.
LONG: Mapping[str, Callable[[LeasedTask, float], None]] = {
    "compute": _compute,
    "spin": _spin,
    "ask": _ask,
}

#: How a body ends its process.
DEATHS: Mapping[str, Callable[[], object]] = {
    "kill child": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill group": lambda: os.killpg(os.getpgrp(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    # Written to, not only asked for.
    "devour memory": lambda: b"x" * (1 << 30),
    # With ``time_limit``: the pool ends it.
    "overrun": lambda: None,
}


def _heed_stop(
    task: LeasedTask, answer: str | None, ledger: Ledger, mine: Mapping[str, Any]
) -> None:
    """Wait until the worker is asked to stop, then ``hand over``, ``finish`` or ``ignore`` it."""
    if answer is None:
        return
    while not task.lease.stop_requested:
        # Looks often, so that the ledger has the instant.
        select.select((), (), (), 0.002)
    ledger.write("stop", **mine)
    if answer == "ignore":
        ledger.wait_at("never")
    if answer == "finish":
        ledger.wait_at("finish")
    if answer == "hand over":
        task.lease.checkpoint({"by": task.lease.fencing_token})
        task.lease.release()


def _kill_group_once(ledger: Ledger) -> None:
    if ledger.is_first("kill"):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _kill_child(ledger: Ledger, kills: int) -> None:
    if any(ledger.is_first(f"kill{number}") for number in range(kills)):
        ledger.write("dies")
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_at(where: str, kill: Callable[[], None]) -> None:
    if where in events.LEVELS:
        events.subscribe(lambda event: kill() if event.name == where else None)
    else:

        def killed(sender: Any = None, **_: Any) -> None:
            # The signals of a publish have the task's name for a sender.
            if getattr(sender, "name", sender) == "faults.work":
                kill()

        getattr(signals, where).connect(killed, weak=False)
