"""The only wiring: what is made for one app, and where it hooks into Celery.

Everything below this floor is given what it needs through its constructor; only this module
reads ``app.conf`` (with ``get``: ``add_defaults`` would override the user, celery-facts §11)
and keeps one ``Extension`` an app. Nothing here connects: the store is reached at its first
use in a process.

It is long because it is the only one: two wirings would each have to know what the other has done.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from celery import signals
from celery.app.amqp import AMQP
from celery.utils.imports import symbol_by_name

from celery_lease import periodic, steps, worker
from celery_lease.bulk import Batch, batch_groups
from celery_lease.calls import app_behind, is_unsent
from celery_lease.celery_events import EventStream
from celery_lease.claims import PATH_VARIABLE, ClaimTeller, LocalTeller, Teller
from celery_lease.dispatch import BrokerPublisher
from celery_lease.exceptions import SettingError
from celery_lease.listening import expect_result
from celery_lease.messages import KEY_HEADER
from celery_lease.owners import OwnerFolder
from celery_lease.publishing import LeaseConnections
from celery_lease.reaper import PassResult, Reaper
from celery_lease.recording import RecordingProducer
from celery_lease.revocation import store_first
from celery_lease.runtime import PerProcess, Runtime
from celery_lease.settings import (
    SETTINGS,
    Settings,
    TaskSettings,
    for_task,
    load,
    unknown_options,
    unknown_settings,
)
from celery_lease.stopping import StopFlag
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema
from celery_lease.worker_heartbeat import WorkerHeartbeat

logger = logging.getLogger(__name__)


class Extension:
    """celery-lease for one Celery app.

    Args:
        app: the app; not kept alive.
    """

    def __init__(self, app: Any) -> None:
        self._app = weakref.ref(app)
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._store: Store | None = None
        self._owner_folder: OwnerFolder | None = None
        self._connections: LeaseConnections | None = None
        self._runtimes = PerProcess(self._make_runtime)
        self._task_settings: dict[str, TaskSettings] = {}
        #: Set while a worker runs in this process. Forked children have copies of them, of which
        #: only the flag and the event stream are of use there.
        self.worker_thread: worker.WorkerThread | None = None
        self.claims: worker.WorkerClaims | None = None
        self.stop_flag: StopFlag | None = None
        self.event_stream: EventStream | None = None
        self.worker_heartbeat: WorkerHeartbeat | None = None

    @property
    def app(self) -> Any:
        """The app."""
        app = self._app()
        if app is None:
            raise RuntimeError("the Celery app of this extension is gone")
        return app

    @property
    def settings(self) -> Settings:
        """The app's settings, read and checked together at their first use.

        Raises:
            SettingError: names each setting that cannot work, and what to do.
        """
        if self._settings is None:
            self._settings = self._read_settings({})
        return self._settings

    def _read_settings(self, changes: Mapping[str, object]) -> Settings:
        conf = self.app.conf
        namespace = getattr(self.app, "namespace", None)
        ours = ("lease_", f"{namespace}_lease_".lower())
        problems = unknown_settings(
            [str(key) for key in conf if str(key).lower().startswith(ours)],
            namespace=namespace,
        )
        if problems:
            raise SettingError(problems)
        transport = conf.get("broker_transport_options") or {}
        return load(
            lambda name, default: changes[name] if name in changes else conf.get(name, default),
            visibility_timeout=transport.get("visibility_timeout"),
        )

    def change_settings(self, changes: Mapping[str, object]) -> None:
        """Put settings into ``app.conf``, which may have been read already.

        Raises:
            SettingError: what is in use was made by other settings; or they cannot work.
        """
        with self._lock:
            read, changed = self._settings, []
            if read is not None:
                wanted = self._read_settings(changes)
                changed = [
                    setting.name
                    for setting in SETTINGS
                    if getattr(wanted, setting.field) != getattr(read, setting.field)
                ]
                if changed and self._is_in_use:
                    problem = (
                        f"install() comes too late to change {', '.join(changed)}: call it, or set "
                        "app.conf, before the first job is sent and before the worker starts"
                    )
                    raise SettingError([problem])
            self.app.conf.update(changes)
            if changed:
                self._settings = None
                self._task_settings.clear()
        if changed and self.app.finalized:
            self.on_finalized()

    @property
    def _is_in_use(self) -> bool:
        made = (self._store, self._owner_folder, self._connections, self._runtimes.existing())
        return any(one is not None for one in made)

    @property
    def store(self) -> Store:
        """The store, its tables checked at the first use in a process.

        Raises:
            StoreUnavailable: it cannot be reached.
            SchemaMismatch: its tables are missing, older or newer than this code.
        """
        store = self.raw_store
        ensure_schema(store, auto_migrate=self.settings.store_auto_migrate)
        return store

    @property
    def raw_store(self) -> Store:
        """The store, whatever its tables are (for ``migrate``)."""
        if self._store is None:
            settings = self.settings
            with self._lock:
                if self._store is None:
                    self._store = Store(
                        url=settings.store_url,
                        schema=settings.store_schema,
                        table_prefix=settings.store_table_prefix,
                        engine_options=settings.store_engine_options,
                    )
        return self._store

    @property
    def owner_folder(self) -> OwnerFolder:
        """The folder of this host's owner files."""
        if self._owner_folder is None:
            self._owner_folder = OwnerFolder(self.settings.run_dir, store=self.raw_store)
        return self._owner_folder

    @property
    def runtime(self) -> Runtime:
        """This process's leases."""
        return self._runtimes.get()

    @property
    def connections(self) -> LeaseConnections:
        """This app's own connections to the broker."""
        if self._connections is None:
            with self._lock:
                if self._connections is None:
                    self._connections = LeaseConnections(
                        self.app, timeout_seconds=self.settings.publish_timeout
                    )
        return self._connections

    def tell(self, word: Callable[[Extension, Store], object]) -> None:
        """Have the store told something by the thread of this worker; nothing without a worker."""
        if self.worker_thread is not None:
            self.worker_thread.tell(functools.partial(word, self))

    def begin_worker(self) -> None:
        """Forget what an earlier worker of this process has left: its stop, its claims."""
        self.stop_runtime()
        self._runtimes.forget()
        self.stop_flag = StopFlag()
        self.claims = worker.WorkerClaims()

    def stop_runtime(self) -> None:
        """Write what this process still has to say, and end its threads."""
        runtime = self._runtimes.existing()
        if runtime is not None:
            runtime.stop()
        if self._connections is not None:
            self._connections.close()
        if self.event_stream is not None:
            self.event_stream.flush()

    def _make_runtime(self) -> Runtime:
        # The raw store: a delivery waits for its tables to be checked as it waits for a claim.
        return Runtime(
            store=self.raw_store,
            settings=self.settings,
            worker=worker.node_name(),
            owner_folder=self.owner_folder,
            teller=self._make_teller(),
            stop_flag=self.stop_flag,
            is_child=self._is_child(),
            on_vanished=lambda vanished: self.reaper().follow_up(vanished),
            prepare=lambda: ensure_schema(
                self.raw_store, auto_migrate=self.settings.store_auto_migrate
            ),
        )

    def _make_teller(self) -> Teller | None:
        """Return how this process says to its worker's main process what it has claimed."""
        if self.claims is not None and not self._is_child():
            return LocalTeller(self.claims.heard)
        path = os.environ.get(PATH_VARIABLE)
        if path is None:
            return None
        try:
            return ClaimTeller(path)
        except OSError as error:
            # Its messages are acknowledged at the end of the attempt.
            logger.warning("lease.claim.untold problem=%r", str(error))
            return None

    def _is_child(self) -> bool:
        """Tell whether this is a process of a worker's pool: forked from one, or spawned."""
        if self.claims is not None:
            return self.claims.pid != os.getpid()
        return PATH_VARIABLE in os.environ

    def check_at_start(self) -> None:
        """Check the app's settings and the options of all its leased tasks together.

        Raises:
            SettingError: names each that cannot work, and what to do.
        """
        # It needs this module, and a program that only publishes needs neither.
        from celery_lease.request import request_problem  # noqa: PLC0415

        problems: list[str] = []
        settings = self.settings
        for name, task in self.app.tasks.items():
            if is_leased(task):
                try:
                    for_task(settings, task_options(type(task)), task=name)
                except SettingError as error:
                    problems.extend(error.problems)
                problem = request_problem(task.Request)
                if problem is not None:
                    problems.append(f"task {name}: {problem}")
        if problems:
            raise SettingError(problems)
        # Makes the engine, which connects to nothing: the driver is then loaded before the
        # pool forks, and its memory shared by the children.
        self.raw_store.engine  # noqa: B018
        # An unusable folder is said once, here, and not by every child.
        self.owner_folder.is_usable  # noqa: B018

    def reaper(self, **options: Any) -> Reaper:
        """Return a reaper of this app."""
        return Reaper(
            store=self.store,
            settings=self.settings,
            publisher=BrokerPublisher(self.app, self.connections),
            worker=worker.node_name(),
            **options,
        )

    def run_pass(self) -> dict[str, int]:
        """Make one pass of the reaper and return its counts."""
        return dict(self.reaper().run_pass().counts)

    def settings_for(self, task: Any) -> TaskSettings:
        """Return a task's settings: its attributes over the app's.

        Raises:
            SettingError: names the task and each option that cannot work.
        """
        known = self._task_settings.get(task.name)
        if known is None:
            # Not its type(): a task may be given as the proxy that the decorator returns.
            known = for_task(self.settings, task_options(task.__class__), task=task.name)
            self._task_settings[task.name] = known
        return known

    def is_leased(self, name: str) -> bool:
        """Tell whether a task of this process runs under a lease."""
        return is_leased(self.app._tasks.get(name))  # noqa: SLF001  the property finalizes

    def recording(self, producer: Any, name: str, body: object) -> Any:
        """Return a producer that records one message of a leased task before sending it."""
        task = self.app._tasks[name]  # noqa: SLF001
        return RecordingProducer(
            producer,
            body=body,
            task=task,
            store=self.store,
            settings=self.settings,
            task_settings=self.settings_for(task),
            connections=self.connections,
            submitter=socket.gethostname(),
        )

    def stand_in(self, name: str) -> Any:
        """Return a producer to call a leased task with, so that no other one is waited for.

        None where the call may publish something else by it, or by the app's pool anyway.
        """
        # What is of another protocol is not recorded, and leaves by what the call was given.
        if self.app.conf.task_protocol not in (None, 2):
            return None
        return self.connections.stand_in() if self.is_leased(name) else None

    def batch(self, producer: Any) -> Batch:
        """Return a batch of new jobs, to be sent by one producer."""
        return Batch(
            producer=producer,
            store=lambda: self.store,
            settings=self.settings,
            connections=self.connections,
            submitter=socket.gethostname(),
        )

    def on_finalized(self) -> None:
        """Put the reaper into the beat schedule."""
        settings = self.settings
        periodic.schedule(
            self.app,
            interval_seconds=settings.reaper_interval,
            queue=settings.reaper_queue,
        )


def is_leased(task: Any) -> bool:
    """Tell whether a task object runs under a lease."""
    return bool(getattr(task, "_lease_protocol", False))


def refuse_call_options(name: str, options: Mapping[str, object]) -> None:
    """Refuse what a call cannot say.

    Raises:
        SettingError: a ``lease_…`` option is among its options.
    """
    wrong = sorted(option for option in options if option.startswith("lease_"))
    if wrong:
        raise SettingError(
            [f"apply_async() of {name} got {option}: set it on the task" for option in wrong]
        )


def task_options(cls: type) -> dict[str, object]:
    """Return the ``lease_…`` options that a task class and its bases set.

    Not the ``None`` of each that ``LeasedTask`` itself has: there it says that none is set, and in
    another class it is a value.
    """
    return {
        name: value
        for base in reversed(cls.__mro__)
        if "_lease_protocol" not in vars(base)
        for name, value in vars(base).items()
        if name.startswith("lease_")
    }


_extensions: weakref.WeakKeyDictionary[Any, Extension] = weakref.WeakKeyDictionary()
_installing = threading.RLock()


def install(app: Any, **settings: Any) -> Extension:
    """Add celery-lease to an app; binding the first ``LeasedTask`` does the same.

    Args:
        app: the Celery app.
        **settings: settings to put into ``app.conf``, by their full names
            (``lease_store_url=…``). They take effect until the first of them is used: until a
            job is sent, the store is asked or a worker starts.

    Raises:
        SettingError: a name is not a setting of celery-lease, or it comes too late to change one.

    .. versionadded:: 0.1
    """
    app = app_behind(app)
    problems = unknown_settings([name for name in settings if name.startswith("lease_")])
    for name in settings:
        if not name.startswith("lease_"):
            is_ours = not unknown_settings([f"lease_{name}"])
            remedy = f"write lease_{name}" if is_ours else f"set app.conf.{name}"
            # Without its value, which may be a password.
            problems.append(f"install() got {name}, which is no setting of celery-lease: {remedy}")
    if problems:
        raise SettingError(problems)
    with _installing:
        extension = _extensions.get(app)
        if extension is not None and settings:
            extension.change_settings(settings)
        if extension is None:
            if settings:
                app.conf.update(settings)
            extension = _extensions[app] = Extension(app)
            _wire(app, extension)
    return extension


def _wire(app: Any, extension: Extension) -> None:
    _record_publishes(app, extension)
    batch_groups(_batches_of)
    periodic.register(app, extension.run_pass)
    step, end_step = steps.steps_for(extension)
    app.steps["worker"].add(step)
    app.steps["consumer"].add(end_step)
    if app.finalized:
        extension.on_finalized()
    else:
        app.on_after_finalize.connect(lambda **_: extension.on_finalized(), sender=app, weak=False)


def _batches_of(app: Any) -> Callable[[Any], Batch] | None:
    app = app_behind(app)
    extension = _extensions.get(app)
    return None if extension is None else extension.batch


def _record_publishes(app: Any, extension: Extension) -> None:
    """Have every task message of the app pass ``RecordingProducer``.

    ``AMQP.send_task_message`` is where all of them go, and the one place that knows the
    serializer, the exact body and the producer (celery 5.5 to 5.7). The app makes its AMQP
    object at its first use; one that is there already changes its class.
    """
    base = symbol_by_name(app.amqp_cls)
    kind = type("RecordingAMQP", (_Recording, base), {"_lease_extension": extension})
    app.amqp_cls = kind
    made = app.__dict__.get("amqp")
    if made is not None:
        made.__class__ = kind
        made.task_protocols.update({1: made.as_task_v1, 2: made.as_task_v2})
        for name in ("create_task_message", "send_task_message"):
            made.__dict__.pop(name, None)


class _Recording(AMQP):  # type: ignore[misc]  # Celery has no types
    """AMQP whose task sender records leased tasks."""

    _lease_extension: Extension

    def as_task_v2(self, task_id: str, name: str, *args: Any, **options: Any) -> Any:
        """Make a task message; the last thing that Celery does before it asks for the result."""
        extension = self._lease_extension
        if extension.is_leased(name):
            refuse_call_options(name, options)
        if extension.is_leased(name) and not options.get("ignore_result"):
            expect_result(extension.app.backend, task_id, extension.connections)
        return super().as_task_v2(task_id, name, *args, **options)

    def as_task_v1(self, task_id: str, name: str, *args: Any, **options: Any) -> Any:
        """Make a message of the old protocol: it is not recorded, and has no place for a key."""
        if self._lease_extension.is_leased(name):
            refuse_call_options(name, options)
            headers = options.get("headers") or {}
            if options.get("idempotency_key") is not None or KEY_HEADER in headers:
                raise SettingError([f"an idempotency key of {name} needs task_protocol 2"])
        return super().as_task_v1(task_id, name, *args, **options)

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()
        extension = self._lease_extension

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            body = message.body
            if extension.is_leased(name) and isinstance(body, tuple):
                key = options.pop("idempotency_key", None)
                if key is not None:
                    message.headers[KEY_HEADER] = key
                producer = extension.recording(producer, name, body)
                if is_unsent(extension.app, message.headers["id"]):
                    # Celery's event says that it was sent, and needs the broker.
                    message = message._replace(sent_event=None)
            return send(producer, name, message, **options)

        return send_task_message


def extension_of(app: Any) -> Extension:
    """Return an app's extension, installed if it is not yet."""
    app = app_behind(app)
    return _extensions.get(app) or install(app)


def extension_if_leased(app: Any) -> Extension | None:
    """Return an app's extension; None for an app without leased tasks, as far as is known here.

    Tasks are bound late, and a process that only revokes may not even import them: the app that
    says where its store is has some.
    """
    app = app_behind(app)
    if app not in _extensions:
        if app.conf.get("lease_store_url"):
            return install(app)
        if not app.finalized and app.autofinalize:
            app.finalize(auto=True)
    return _extensions.get(app)


def store_of(app: Any) -> Store:
    """Return an app's store, with its tables checked."""
    return extension_of(app).store


def settings_of(app: Any) -> Settings:
    """Return an app's settings."""
    return extension_of(app).settings


def check_options(cls: type) -> list[str]:
    """Return the problems of a task class's ``lease_…`` options."""
    return unknown_options(task_options(cls))


def run_pass(app: Any) -> PassResult:
    """Make one pass of the reaper."""
    return extension_of(app).reaper().run_pass()


def _stop_runtimes(**_: Any) -> None:
    # Children leave by os._exit: nothing else would write what the heartbeat still has.
    for extension in list(_extensions.values()):
        extension.stop_runtime()


def _schedule_in_beat(sender: Any, **_: Any) -> None:
    """Put the reaper back into a schedule that was assigned after the app was finalized."""
    conf, extension = sender.app.conf, _extensions.get(sender.app)
    if extension is not None and periodic.REAP not in conf.beat_schedule:
        extension.on_finalized()
        # The scheduler has read the schedule already.
        sender.scheduler.update_from_dict({periodic.REAP: conf.beat_schedule[periodic.REAP]})


def _watch_signals(sender: Any, **_: Any) -> None:
    extension = _extensions.get(sender.app)
    if extension is not None and extension.stop_flag is not None:
        steps.watch_signals(extension.stop_flag, sender)


def _shutting_down(**_: Any) -> None:
    # Where the signal's handler was replaced by somebody: late on a soft stop, not too late.
    for extension in list(_extensions.values()):
        if extension.stop_flag is not None:
            extension.stop_flag.set()


store_first(extension_if_leased)
signals.worker_ready.connect(_watch_signals, weak=False)
signals.worker_shutting_down.connect(_shutting_down, weak=False)
signals.beat_init.connect(_schedule_in_beat, weak=False)
signals.worker_process_shutdown.connect(_stop_runtimes, weak=False)
signals.worker_shutdown.connect(_stop_runtimes, weak=False)
