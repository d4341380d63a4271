"""What ``doctor`` looks at: facts of the app, of the store, of broker and workers.

Read here, judged in ``checks``. Store and broker are asked by a thread each, with a bound: what is
frozen answers nobody, and a doctor that hangs helps nobody either. Nothing is changed, no table is
made, and no secret is kept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from celery.backends.base import DisabledBackend

from celery_lease.exceptions import SchemaMismatch, StoreUnavailable
from celery_lease.extension import Extension, is_leased
from celery_lease.masking import mask_url
from celery_lease.owners import network_file_system
from celery_lease.records import Backlog, PassRecord
from celery_lease.settings import Ack, Settings
from celery_lease.states import JobState
from celery_lease.store import queries, reads
from celery_lease.store.migrations import HEAD, current_revision

T = TypeVar("T")

#: Seconds for all questions; they are asked at once.
PATIENCE_SECONDS: Final = 6.0
#: Seconds that workers get to answer; Celery's own default.
PING_SECONDS: Final = 1.0
#: Seconds after which what waits has waited for too long.
LONG_SECONDS: Final = 60.0
#: Waiting jobs whose queues are looked at.
WAITING_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """A leased task.

    Attributes:
        lease_seconds: its lease.
        is_late: its messages are acknowledged at the end of the attempt.
        longest_seconds: its time limit, None without one.
        retry_delay_seconds: Celery's ``default_retry_delay``, 0 if it never retries.
        redelivers: which of Celery's redelivery options it sets.
        defer_after_seconds: the longest delay with which its messages leave, None without one.
    """

    name: str
    lease_seconds: float
    is_late: bool
    longest_seconds: float | None
    retry_delay_seconds: float
    redelivers: tuple[str, ...] = ()
    defer_after_seconds: float | None = None

    def keeps_in_store(self, delay_seconds: float) -> bool:
        """Tell whether a job with so long a delay waits in the store, and not in a worker."""
        return self.defer_after_seconds is not None and delay_seconds > self.defer_after_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFacts:
    """What the app is set to, beside celery-lease's own settings.

    Attributes:
        transport: kombu's driver type: ``redis``, ``amqp``, ``sqs`` …
        visibility_timeout: as set in ``broker_transport_options``, None without.
        redelivers: which of Celery's redelivery settings are on.
        pickles: which settings allow pickle.
        owner_folder: of the owner files.
        owner_folder_problem: why it cannot be used, None when it can.
        network_file_system: its type, where an SQLite file is on one.
    """

    transport: str
    broker: str
    visibility_timeout: float | None
    prefetch_multiplier: int
    soft_shutdown_seconds: float
    redelivers: tuple[str, ...]
    has_results: bool
    pickles: tuple[str, ...]
    default_queue: str
    tasks: tuple[TaskFacts, ...]
    owner_folder: str = ""
    owner_folder_problem: str | None = None
    network_file_system: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What the store answered.

    Attributes:
        is_there: False for an SQLite file that nobody has made yet.
        revision: of its tables; the rest is only there if it is the one that the code needs.
        waiting: how many jobs are queued, by queue; of the first ``WAITING_LIMIT``.
    """

    is_there: bool = True
    revision: str | None
    clock_offset_seconds: float = 0.0
    isolation: str = ""
    backlog: Backlog = field(default_factory=lambda: Backlog(0, 0.0, 0, 0, 0))
    last_pass: PassRecord | None = None
    waiting: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether the tables are those that this code needs."""
        return self.revision == HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Who answered on the broker.

    Attributes:
        queues: node name to the queues it consumes.
        busy: those that run something now.
        answers_possible: False where the transport carries no remote control.
    """

    queues: Mapping[str, frozenset[str]] = field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    answers_possible: bool = True

    @property
    def consumed(self) -> frozenset[str]:
        """Every queue that some worker consumes."""
        return frozenset().union(*self.queues.values())

    def is_idle_on(self, queue: str) -> bool:
        """Tell whether a worker that runs nothing consumes a queue."""
        return any(
            queue in queues and node not in self.busy for node, queues in self.queues.items()
        )


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Instead of facts: why there are none."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was found."""

    settings: Settings
    app: AppFacts
    store: StoreFacts | Unanswered
    workers: WorkerFacts | Unanswered


def gather(extension: Extension, *, patience: float = PATIENCE_SECONDS) -> Facts:
    """Ask app, store and broker.

    Args:
        extension: of the app, whose settings have been checked.
        patience: seconds for all of them together.
    """
    until = time.monotonic() + patience
    store = _Question(lambda: store_facts(extension), until=until)
    workers = _Question(lambda: worker_facts(extension.app), until=until)
    app = app_facts(extension)
    return Facts(
        settings=extension.settings,
        app=app,
        store=store.answer(),
        workers=workers.answer(),
    )


class _Question(Generic[T]):
    """A call in a thread of its own, which is left behind if it does not return in time."""

    def __init__(self, ask: Callable[[], T], *, until: float) -> None:
        self._ask = ask
        self._until = until
        self._answer: T | Unanswered | None = None
        self._thread = threading.Thread(target=self._run, name="celery-lease-doctor", daemon=True)
        self._thread.start()

    def answer(self) -> T | Unanswered:
        self._thread.join(max(0.0, self._until - time.monotonic()))
        return self._answer or Unanswered("no answer in time")

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was found
            said = error.reason if isinstance(error, StoreUnavailable) else str(error)
            lines = said.strip().splitlines()
            self._answer = Unanswered(lines[0][:300] if lines else type(error).__name__)


# --- the app ------------------------------------------------------------------------------------


def app_facts(extension: Extension) -> AppFacts:
    """Read the app; nothing is connected."""
    app, conf = extension.app, extension.app.conf
    with app.connection_for_read() as connection:
        transport = connection.transport.driver_type
        broker = connection.as_uri(include_password=True)
    options = conf.broker_transport_options or {}
    folder = extension.owner_folder
    path = sqlite_path(extension.settings.store_url)
    return AppFacts(
        transport=transport,
        broker=mask_url(broker),
        visibility_timeout=options.get("visibility_timeout"),
        prefetch_multiplier=conf.worker_prefetch_multiplier,
        # Celery 5.5 and later have it.
        soft_shutdown_seconds=conf.get("worker_soft_shutdown_timeout", 0.0) or 0.0,
        redelivers=tuple(name for name in _REDELIVERY_SETTINGS if conf.get(name)),
        has_results=not isinstance(app.backend, DisabledBackend),
        pickles=_pickles(conf),
        default_queue=conf.task_default_queue,
        tasks=tuple(
            _task_facts(extension, task) for _, task in sorted(app.tasks.items()) if is_leased(task)
        ),
        owner_folder=str(folder.path),
        owner_folder_problem=folder.problem(),
        network_file_system=None if path is None else network_file_system(path.parent),
    )


_REDELIVERY_SETTINGS = ("task_reject_on_worker_lost", "task_retry_on_worker_lost")
_REDELIVERY_OPTIONS = ("reject_on_worker_lost", "retry_on_worker_lost")


def _task_facts(extension: Extension, task: Any) -> TaskFacts:
    settings = extension.settings_for(task)
    conf = extension.app.conf
    limits = (
        task.time_limit,
        task.soft_time_limit,
        conf.task_time_limit,
        conf.task_soft_time_limit,
    )
    known = [limit for limit in limits if limit]
    return TaskFacts(
        name=task.name,
        lease_seconds=settings.duration_seconds,
        is_late=settings.ack is Ack.LATE,
        longest_seconds=float(known[0]) if known else None,
        retry_delay_seconds=float(task.default_retry_delay or 0) if task.max_retries != 0 else 0.0,
        defer_after_seconds=settings.defer_after_seconds,
        # Of the class: bound, each has the app's setting as well.
        redelivers=tuple(
            option for option in _REDELIVERY_OPTIONS if _own_option(type(task), option)
        ),
    )


def _own_option(cls: type, option: str) -> bool:
    return any(vars(base).get(option) is True for base in cls.__mro__)


def _pickles(conf: Any) -> tuple[str, ...]:
    names = {"pickle", "application/x-python-serialize"}
    single = ("task_serializer", "result_serializer")
    listed = ("accept_content", "result_accept_content")
    return tuple(
        [name for name in single if conf.get(name) in names]
        + [name for name in listed if names & {str(one) for one in conf.get(name) or ()}]
    )


# --- the store ----------------------------------------------------------------------------------


def store_facts(extension: Extension) -> StoreFacts:
    """Ask the store. Nothing is made: not even the empty file that SQLite would make."""
    path = sqlite_path(extension.settings.store_url)
    if path is not None and not path.exists():
        return StoreFacts(is_there=False, revision=None)
    store = extension.raw_store
    try:
        revision = current_revision(store)
        if revision != HEAD:
            return StoreFacts(revision=revision)
        waiting = reads.jobs(store, states={JobState.QUEUED}, limit=WAITING_LIMIT)
    except SchemaMismatch:
        # A table or a column is missing, whatever the revision says.
        return StoreFacts(revision=None)
    default = extension.app.conf.task_default_queue
    return StoreFacts(
        revision=revision,
        clock_offset_seconds=reads.clock_offset(store),
        isolation=reads.isolation(store),
        backlog=reads.backlog(store, seconds=LONG_SECONDS),
        last_pass=queries.last_pass(store),
        waiting=Counter(job.queue or default for job in waiting),
    )


def sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite URL, None for another database's."""
    parts = urlsplit(url)
    if not parts.scheme.startswith("sqlite"):
        return None
    return Path(unquote(parts.path.removeprefix("/")))


# --- the workers --------------------------------------------------------------------------------


def worker_facts(app: Any) -> WorkerFacts:
    """Ask the broker, and by way of it the workers."""
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=4)
        if "fanout" not in connection.transport.implements.exchange_type:
            return WorkerFacts(answers_possible=False)
        inspect = app.control.inspect(timeout=PING_SECONDS, connection=connection)
        online = inspect.ping() or {}
        if not online:
            return WorkerFacts()
        # As soon as all who are there have answered, and not when the time is over.
        inspect = app.control.inspect(
            timeout=PING_SECONDS, connection=connection, limit=len(online)
        )
        queues = inspect.active_queues() or {}
        active = inspect.active() or {}
    return WorkerFacts(
        queues={node: frozenset(one["name"] for one in queues.get(node) or ()) for node in online},
        busy=frozenset(node for node, bodies in active.items() if bodies),
    )
