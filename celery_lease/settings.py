"""The settings: one table, its checks, and the typed objects made from it.

Not a reader of ``app.conf``: ``load`` and ``for_task`` get a function or a mapping and give a
checked object, or one ``SettingError`` with every problem in it. Called by ``extension`` (app),
``task`` (task attributes) and the CLI; the docs page is made from ``as_rows``.

Longer than the house wants, since a setting's name, check, unit and text belong in one place. A new
setting changes two places: a row of ``SETTINGS`` and a field of ``Settings`` (a test compares).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeGuard

from celery_lease.exceptions import SettingError
from celery_lease.keys import template_problem
from celery_lease.masking import MASK, mask_url, names_secret
from celery_lease.states import OnExpiry

_PREFIX = "lease_"
_DAY = 86400.0
# Instants of the databases end in the year 9999; a century from now is safely before.
_LONGEST_SECONDS = 100 * 365 * _DAY
_MEBIBYTE = 1024 * 1024
# Counters are INTEGER columns: 32 bits, signed, on every database.
_LARGEST_WHOLE = 2**31 - 1
# Longer than the longest redelivery a stock broker makes: an SQS message may be invisible for 12 h,
# Redis redelivers after 1 h unless told otherwise (design §12).
_SHORTEST_RETENTION = _DAY
_HEARTBEATS_A_LEASE = 3  # design §5: two may fail before the lease ends
_LONGEST_SHOWN = 80  # characters of a refused value: one line of a terminal


class Ack(str, Enum):
    """When a leased message is acknowledged (``lease_ack``)."""

    CLAIM = "claim"
    """When the claim has committed: the store answers for the job from then on."""
    LATE = "late"
    """After the attempt has ended."""

    __str__ = str.__str__


class HeartbeatFrom(str, Enum):
    """Which process renews a lease (``lease_heartbeat_from``)."""

    CHILD = "child"
    """The one that runs the body, in a thread beside it."""
    WORKER = "worker"
    """The worker's main process, for bodies that hold Python's global lock for long."""

    __str__ = str.__str__


class PublishOnError(str, Enum):
    """What a publisher gets while the broker is down (``lease_publish_on_error``)."""

    STORE = "store"
    RAISE = "raise"

    __str__ = str.__str__


class OnKeyConflict(str, Enum):
    """What a call gets whose key is held with other arguments (``lease_idempotency_conflict``)."""

    RAISE = "raise"
    EXISTING = "existing"

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Kind:
    """What settings of one kind have in common.

    Args:
        unit: "seconds", "bytes", "count" or "".
        type: the Python values accepted, in words.
        check: gives what a value must be when it is not, else None.
        convert: gives the typed value of one that passed the check.
    """

    unit: str
    type: str
    check: Callable[[object], str | None]
    convert: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table.

    Args:
        name: the key in ``app.conf``.
        default: the value when the user set none.
        kind: unit, type, check and conversion.
        summary: one sentence on what it trades.
        is_task_option: True when a ``LeasedTask`` attribute of the same name overrides it.
    """

    name: str
    default: object
    kind: Kind
    summary: str
    is_task_option: bool = False

    @property
    def task_attribute(self) -> str | None:
        """The ``LeasedTask`` attribute that overrides it, None for none."""
        return self.name if self.is_task_option else None

    @property
    def field(self) -> str:
        """The name of its field in ``Settings``."""
        name = self.name.removeprefix(_PREFIX)
        return f"configured_{name}" if name == "heartbeat_interval" else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an app is set to, checked. Each field is the setting of that name (``SETTINGS``)."""

    store_url: str
    store_schema: str | None
    store_table_prefix: str
    store_auto_migrate: bool
    store_engine_options: Mapping[str, object]
    duration: float
    configured_heartbeat_interval: float | None
    """As set; ``heartbeat_interval`` is the one to use."""
    heartbeat_from: HeartbeatFrom
    max_attempts: int
    ack: Ack
    on_expiry: OnExpiry
    lost_backoff: tuple[float, ...]
    interrupt: bool
    stall_timeout: float | None
    reaper_interval: float
    reaper_batch: int
    reaper_limit: int
    reaper_queue: str | None
    reaper_in_worker: bool
    run_dir: str | None
    queued_timeout: float
    publish_on_error: PublishOnError
    publish_timeout: float
    defer_after: float | None
    defer_precision: float | None
    settle_grace: float
    claim_timeout: float
    max_message_bytes: int
    max_result_bytes: int
    idempotency_key: bool | str
    idempotency_retention: float | None
    idempotency_conflict: OnKeyConflict
    keep_succeeded: float | None
    keep_failed: float | None

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two renewals: as set, else a third of ``duration``."""
        return _heartbeat_seconds(self.duration, self.configured_heartbeat_interval)

    def __repr__(self) -> str:
        shown = (f"{f.name}={_plain(f.name, getattr(self, f.name))!r}" for f in fields(self))
        return f"Settings({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What holds for one task: its own attributes over the app's settings, checked."""

    duration_seconds: float
    heartbeat_seconds: float
    heartbeat_from: HeartbeatFrom
    max_attempts: int
    ack: Ack
    on_expiry: OnExpiry
    interrupt: bool
    stall_timeout_seconds: float | None = None
    defer_after_seconds: float | None = 60.0
    idempotency_key: bool | str = False
    idempotency_retention_seconds: float | None = _DAY
    idempotency_conflict: OnKeyConflict = OnKeyConflict.RAISE


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting for people: JSON-able values, secrets masked."""

    name: str
    value: object
    default: object
    unit: str
    type: str
    task_attribute: str | None
    summary: str


def load(
    get: Callable[[str, object], object], *, visibility_timeout: float | None = None
) -> Settings:
    """Read and check all settings of an app.

    Args:
        get: gives the value of a setting's name, or the default it is called with
            (``app.conf.get``).
        visibility_timeout: seconds after which the broker redelivers, None when it does not.

    Raises:
        SettingError: with every problem, when there is one.

    .. versionadded:: 0.1
    """
    values, problems = _read(SETTINGS, get)
    problems += _conflicts(values, visibility_timeout)
    if problems:
        raise SettingError(problems)
    return Settings(**{setting.field: values[setting.name] for setting in SETTINGS})


def for_task(settings: Settings, attributes: Mapping[str, object], *, task: str) -> TaskSettings:
    """Read and check what one task overrides.

    Args:
        settings: the app's.
        attributes: attribute name to value, of those that the task sets; names without ``lease_``
            are left alone. None is a value, as in ``app.conf``: it is not the app's setting.
        task: the task's name, for the message.

    Raises:
        SettingError: with every problem, a misspelt or app-wide name included.

    .. versionadded:: 0.1
    """

    def get(name: str, _default: object) -> object:
        return attributes.get(name, getattr(settings, _BY_NAME[name].field))

    values, problems = _read([s for s in SETTINGS if s.is_task_option], get)
    problems = [
        f"{problem}; leave it out for the app's own" if " is None: " in problem else problem
        for problem in problems
    ]
    together = values | {"lease_keep_succeeded": settings.keep_succeeded}
    problems = unknown_options(attributes) + problems
    problems += [*_heartbeat_conflict(values), *_key_conflict(together)]
    if problems:
        raise SettingError([f"task {task}: {problem}" for problem in problems])
    return TaskSettings(
        duration_seconds=values["lease_duration"],
        heartbeat_seconds=_heartbeat_seconds(
            values["lease_duration"], values["lease_heartbeat_interval"]
        ),
        heartbeat_from=values["lease_heartbeat_from"],
        max_attempts=values["lease_max_attempts"],
        ack=values["lease_ack"],
        on_expiry=values["lease_on_expiry"],
        interrupt=values["lease_interrupt"],
        stall_timeout_seconds=values["lease_stall_timeout"],
        defer_after_seconds=values["lease_defer_after"],
        idempotency_key=values["lease_idempotency_key"],
        idempotency_retention_seconds=values["lease_idempotency_retention"],
        idempotency_conflict=values["lease_idempotency_conflict"],
    )


def unknown_options(attributes: Iterable[str]) -> list[str]:
    """Say which names beginning with ``lease_`` a task cannot have; empty when all are right.

    .. versionadded:: 0.1
    """
    options = [s.name for s in SETTINGS if s.is_task_option]
    problems = []
    for name in attributes:
        if not name.startswith(_PREFIX) or name in options:
            continue
        if name in _BY_NAME:
            problems.append(f"{name} cannot be set on a task: set app.conf.{name} instead")
            continue
        remedy = _did_you_mean(name, options)
        problems.append(f"{name} is not an option of a leased task: {remedy}")
    return problems


def unknown_settings(names: Iterable[str], *, namespace: str | None = None) -> list[str]:
    """Say which keys of ``app.conf`` look like settings of ours and are none; empty when none do.

    Args:
        names: the keys.
        namespace: the app's (``CELERY`` makes ``CELERY_LEASE_DURATION`` of ``lease_duration``).

    .. versionadded:: 0.1
    """
    problems = []
    for key in names:
        name = key
        if namespace and key.upper().startswith(f"{namespace.upper()}_"):
            name = key[len(namespace) + 1 :].lower()
        if name.startswith(_PREFIX) and name not in _BY_NAME:
            problems.append(f"{key} is not a setting: {_did_you_mean(name, list(_BY_NAME))}")
        elif name not in _BY_NAME and name.lower() in _BY_NAME:
            # Celery finds upper-case names only under a namespace (celery-facts F§11).
            problems.append(f"{key} is not read: write it {name.lower()}")
    return problems


def as_rows(settings: Settings | None = None) -> list[SettingRow]:
    """Give the table for people, one row a setting; values are the defaults without ``settings``.

    .. versionadded:: 0.1
    """
    return [
        SettingRow(
            name=s.name,
            value=_plain(s.field, s.default if settings is None else getattr(settings, s.field)),
            default=_plain(s.field, s.default),
            unit=s.kind.unit,
            type=s.kind.type,
            task_attribute=s.task_attribute,
            summary=s.summary,
        )
        for s in SETTINGS
    ]


# --- reading ------------------------------------------------------------------------------------


def _read(
    table: Iterable[Setting], get: Callable[[str, object], object]
) -> tuple[dict[str, Any], list[str]]:
    """Values that passed their own check, by setting name, and the problems of the others."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in table:
        value = get(setting.name, setting.default)
        wanted = setting.kind.check(value)
        if wanted is None:
            values[setting.name] = setting.kind.convert(value)
        else:
            problems.append(f"{setting.name} is {_shown(setting, value)}: it must be {wanted}")
    return values, problems


def _conflicts(values: Mapping[str, Any], visibility_timeout: float | None) -> Iterator[str]:
    """Problems of settings which are right each and wrong together."""
    yield from _heartbeat_conflict(values)
    yield from _schema_conflict(values)
    yield from _reaper_conflicts(values)
    yield from _key_conflict(values)
    for name in ("lease_keep_succeeded", "lease_keep_failed"):
        kept = values.get(name)
        if kept is not None and visibility_timeout is not None and kept < visibility_timeout:
            yield (
                f"{name} is {kept} and the broker's visibility_timeout is {visibility_timeout}: "
                "a message redelivered that late would find its job removed; "
                f"raise {name} to {visibility_timeout} or more, or lower visibility_timeout"
            )


def _heartbeat_conflict(values: Mapping[str, Any]) -> Iterator[str]:
    # With half a lease or more between renewals, one late renewal loses it (design §5, B061).
    duration, interval = values.get("lease_duration"), values.get("lease_heartbeat_interval")
    if duration is not None and interval is not None and interval >= duration / 2:
        yield (
            f"lease_heartbeat_interval is {interval} and lease_duration is {duration}: renewals "
            f"must come more than twice a lease; set lease_heartbeat_interval below {duration / 2}"
            f" or lease_duration above {interval * 2}"
        )


def _key_conflict(values: Mapping[str, Any]) -> Iterator[str]:
    # The row is what holds the key.
    held, kept = values.get("lease_idempotency_retention"), values.get("lease_keep_succeeded")
    if held is not None and kept is not None and held > kept:
        yield (
            f"lease_idempotency_retention is {held} and lease_keep_succeeded is {kept}: a key is "
            "held no longer than its job is kept; lower the first, raise the second, "
            "or set lease_idempotency_retention to None, for as long as the job is kept"
        )


def _schema_conflict(values: Mapping[str, Any]) -> Iterator[str]:
    url, schema = values.get("lease_store_url"), values.get("lease_store_schema")
    if url is not None and schema is not None and not url.startswith("postgresql"):
        yield (
            f"lease_store_schema is {schema!r} and lease_store_url is {mask_url(url)!r}: only "
            "PostgreSQL has schemas; leave lease_store_schema unset, "
            "or name the database in lease_store_url"
        )


def _reaper_conflicts(values: Mapping[str, Any]) -> Iterator[str]:
    batch, limit = values.get("lease_reaper_batch"), values.get("lease_reaper_limit")
    if batch is not None and limit is not None and batch > limit:
        yield (
            f"lease_reaper_batch is {batch} and lease_reaper_limit is {limit}: a transaction "
            "cannot take more rows than a whole step; lower the first or raise the second"
        )
    interval, timeout = values.get("lease_reaper_interval"), values.get("lease_queued_timeout")
    if interval is not None and timeout is not None and timeout < 2 * interval:
        yield (
            f"lease_queued_timeout is {timeout} and lease_reaper_interval is {interval}: messages "
            "would be sent again before a worker could take them; set lease_queued_timeout to "
            f"{2 * interval} or more, or lower lease_reaper_interval"
        )


def _heartbeat_seconds(duration_seconds: float, configured: float | None) -> float:
    return duration_seconds / _HEARTBEATS_A_LEASE if configured is None else configured


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    # Compared without the prefix that all share, or every name would resemble every other.
    close = difflib.get_close_matches(
        name.removeprefix(_PREFIX), [k.removeprefix(_PREFIX) for k in known], n=1
    )
    if close:
        return f"did you mean {_PREFIX}{close[0]}?"
    return f"choose from {', '.join(sorted(known))}"


# --- showing ------------------------------------------------------------------------------------


def _shown(setting: Setting, value: object) -> str:
    """A refused value for a message."""
    may_hide_secrets = setting.name in {"lease_store_url", "lease_store_engine_options"}
    if may_hide_secrets and isinstance(value, str | Mapping):
        text = repr(_plain(setting.field, value))
    elif may_hide_secrets and value is not None:
        text = f"of type {type(value).__name__}"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _plain(name: str, value: object) -> object:
    """A value in JSON's types with its secrets masked; ``name`` is its path, which tells them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    return _plain_scalar(name, value)


def _plain_scalar(name: str, value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool):
        return value
    if names_secret(name):
        return MASK
    if isinstance(value, str):
        is_suspect = name == "store_url" or "://" in value or names_secret(value)
        return mask_url(value) if is_suspect else value
    # Others not by their repr: that of partial(connect, password=...) shows what it holds.
    return value if isinstance(value, int | float) else f"<{type(value).__name__}>"


# --- the kinds of settings ----------------------------------------------------------------------


def _seconds(
    *,
    at_least: float | None = None,
    at_most: float = _LONGEST_SECONDS,
    is_optional: bool = False,
) -> Kind:
    """A duration, more than 0 unless ``at_least`` says otherwise."""
    lower = "more than 0" if at_least is None else f"at least {at_least:.0f}"
    wanted = f"a number of seconds, {lower} and at most {at_most:.0f}"
    wanted += ", or None" if is_optional else ""

    def check(value: object) -> str | None:
        if value is None and is_optional:
            return None
        # NaN and the infinities fail the comparison.
        if not _is_number(value) or not 0 < value <= at_most:
            return wanted
        return wanted if at_least is not None and value < at_least else None

    return Kind(
        unit="seconds",
        type="float or int, or None" if is_optional else "float or int",
        check=check,
        convert=lambda value: None if value is None else float(value),
    )


def _whole(unit: str) -> Kind:
    """A whole number, at least 1."""

    def check(value: object) -> str | None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and _is_number(value) and 1 <= value <= _LARGEST_WHOLE:
            return None
        return f"a whole number from 1 to {_LARGEST_WHOLE}"

    return Kind(unit=unit, type="int", check=check, convert=int)


def _choice(choices: type[Enum]) -> Kind:
    """One value of an enum, given as its string or as the member."""
    values = [member.value for member in choices]
    *others, last = map(repr, values)
    wanted = f"{', '.join(others)} or {last}" if others else last

    def check(value: object) -> str | None:
        return None if isinstance(value, str) and value in values else wanted

    return Kind(unit="", type=wanted, check=check, convert=choices)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_url(value: object) -> str | None:
    if not isinstance(value, str):
        return "a string; of a sqlalchemy URL: url.render_as_string(hide_password=False)"
    if value.startswith("postgres://"):
        return "written postgresql://, which is the name SQLAlchemy knows"
    if not re.match(r"[a-z][a-z0-9_+]*://", value):
        return "a database URL such as postgresql+psycopg://user:password@host/name"
    return None


def _check_name(value: object) -> str | None:
    is_name = value is None or (isinstance(value, str) and value.strip() != "")
    return None if is_name else "a name, or None"


def _check_folder(value: object) -> str | None:
    # A relative one would be another folder in each worker's working directory.
    is_absolute = isinstance(value, str) and value.startswith("/") and "\0" not in value
    return None if value is None or is_absolute else "the absolute path of a folder, or None"


def _check_table_prefix(value: object) -> str | None:
    is_identifier = isinstance(value, str) and re.fullmatch(r"[a-z_][a-z0-9_]{0,30}", value)
    wanted = "1 to 31 of a-z, 0-9 and _, not beginning with a digit"
    return None if is_identifier else wanted


def _check_engine_options(value: object) -> str | None:
    is_options = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return None if is_options else "a mapping of sqlalchemy.create_engine's arguments"


def _check_held(value: object) -> str | None:
    if value is None or (_is_number(value) and 0 <= value <= _LONGEST_SECONDS):
        return None
    return f"a number of seconds, from 0 to {_LONGEST_SECONDS:.0f}, or None"


def _check_key_rule(value: object) -> str | None:
    if isinstance(value, bool):
        return None
    problem = template_problem(value) if isinstance(value, str) else "it is neither"
    wanted = "True, False or a template such as 'order-{order_id}'"
    return None if problem is None else f"{wanted}: {problem}"


def _check_backoff(value: object) -> str | None:
    is_schedule = (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(_is_number(delay) and 0 <= delay <= _LONGEST_SECONDS for delay in value)
        and value[0] == 0
    )
    # The bounds of design §5 promise that a first loss waits for nothing.
    return None if is_schedule else "a sequence of seconds, the first 0, such as (0, 1, 4, 16, 60)"


# Strict: the string "False" of an environment variable is true.
_FLAG = Kind("", "bool", lambda value: None if isinstance(value, bool) else "True or False")
_NAME = Kind("", "str or None", _check_name)
_FOLDER = Kind("", "str or None", _check_folder)
_URL = Kind("", "str", _check_url)
_TABLE_PREFIX = Kind("", "str", _check_table_prefix)
_ENGINE_OPTIONS = Kind("", "mapping", _check_engine_options, dict)
_BACKOFF = Kind(
    "seconds",
    "list or tuple of numbers, the first 0",
    _check_backoff,
    lambda value: tuple(float(delay) for delay in value),
)
_KEY_RULE = Kind("", "bool or str", _check_key_rule)
_HELD = Kind(
    "seconds",
    "float or int, or None",
    _check_held,
    lambda value: None if value is None else float(value),
)
_DURATION = _seconds()
_RETENTION = _seconds(at_least=_SHORTEST_RETENTION, is_optional=True)
_COUNT = _whole("count")
_BYTES = _whole("bytes")

# --- the table ----------------------------------------------------------------------------------

SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="lease_store_url",
        default="sqlite:///celery-lease.sqlite3",
        kind=_URL,
        summary="The SQL database that holds every job: the default is a file in the working "
        "directory, enough for one host; several hosts need a server.",
    ),
    Setting(
        name="lease_store_schema",
        default=None,
        kind=_NAME,
        summary="The PostgreSQL schema of the tables, None for the connection's own: keeps them "
        "apart from yours, and is created with them.",
    ),
    Setting(
        name="lease_store_table_prefix",
        default="celery_lease_",
        kind=_TABLE_PREFIX,
        summary="What every table's name begins with: lets two apps share a database, and must "
        "not change once jobs exist.",
    ),
    Setting(
        name="lease_store_auto_migrate",
        default=True,
        kind=_FLAG,
        summary="True creates the tables in a database that has none; False leaves that to "
        "an operator, for a database user who may not create tables. An older schema is "
        "never upgraded by itself.",
    ),
    Setting(
        name="lease_store_engine_options",
        default=MappingProxyType({}),
        kind=_ENGINE_OPTIONS,
        summary="Arguments passed on to sqlalchemy.create_engine, an isolation_level being that of "
        "transactions: a larger pool renews sooner under load and costs connections in every "
        "process.",
    ),
    Setting(
        name="lease_duration",
        default=30.0,
        kind=_seconds(at_most=_DAY),
        summary="How long an attempt may be silent before its job is given on: shorter recovers "
        "sooner, longer survives longer pauses of the worker or the database.",
        is_task_option=True,
    ),
    Setting(
        name="lease_heartbeat_interval",
        default=None,
        kind=_seconds(is_optional=True),
        summary="How often a lease is renewed, None for a third of lease_duration: shorter "
        "tolerates more failed renewals and writes more.",
        is_task_option=True,
    ),
    Setting(
        name="lease_heartbeat_from",
        default=HeartbeatFrom.CHILD,
        kind=_choice(HeartbeatFrom),
        summary="Who renews the lease in a prefork worker: 'child', a thread beside the body, sees "
        "a frozen process at once; 'worker', the main process, keeps the lease of a body that is "
        "in a long call into C which holds Python's global lock.",
        is_task_option=True,
    ),
    Setting(
        name="lease_max_attempts",
        default=3,
        kind=_COUNT,
        summary="How many runners may vanish under a job: the n-th loss ends it as interrupted, "
        "1 never runs it again after a loss; more outlives bad luck, fewer stops a job that kills "
        "its workers. A runner that was asked to stop is no loss.",
        is_task_option=True,
    ),
    Setting(
        name="lease_ack",
        default=Ack.CLAIM,
        kind=_choice(Ack),
        summary="When the message is acknowledged: 'claim', once the claim is in the store, so "
        "that no visibility or consumer timeout of the broker disturbs a long body; 'late', at the "
        "end of the attempt, so that a worker holds no more messages than it runs.",
        is_task_option=True,
    ),
    Setting(
        name="lease_on_expiry",
        default=OnExpiry.RETRY,
        kind=_choice(OnExpiry),
        summary="What becomes of a job whose runner vanished: 'retry' runs it again, 'hold' "
        "keeps it for a person, 'fail' ends it.",
        is_task_option=True,
    ),
    Setting(
        name="lease_lost_backoff",
        default=(0.0, 1.0, 4.0, 16.0, 60.0),
        kind=_BACKOFF,
        summary="The wait before the dispatch after the first, second, ... loss, the last "
        "repeating: longer spares the workers a job that kills them, shorter ends sooner.",
    ),
    Setting(
        name="lease_interrupt",
        default=True,
        kind=_FLAG,
        summary="Whether LeaseLost is raised inside the body when its lease is lost or its job "
        "cancelled: True frees the worker soon, False suits a body that must not be broken off "
        "anywhere and calls lease.check() where it may stop.",
        is_task_option=True,
    ),
    Setting(
        name="lease_stall_timeout",
        default=None,
        kind=_seconds(is_optional=True),
        summary="How long a body may run without lease.progress() of another value or "
        "lease.checkpoint() before its attempt ends as stalled and the job is given on, None for "
        "ever: shorter frees a hung worker sooner, and must be longer than the slowest step.",
        is_task_option=True,
    ),
    Setting(
        name="lease_reaper_interval",
        default=5.0,
        kind=_DURATION,
        summary="How often a pass looks for expired leases and due jobs: shorter recovers sooner "
        "and queries the store more.",
    ),
    Setting(
        name="lease_reaper_batch",
        default=100,
        kind=_COUNT,
        summary="How many rows the reaper changes in one transaction: more is faster, fewer "
        "holds locks for a shorter time.",
    ),
    Setting(
        name="lease_reaper_limit",
        default=2000,
        kind=_COUNT,
        summary="How many rows a pass handles at most in each of its steps: more clears a "
        "backlog sooner, fewer keeps a pass short.",
    ),
    Setting(
        name="lease_reaper_queue",
        default=None,
        kind=_NAME,
        summary="The queue of the reaper's messages, None for Celery's default queue: one of its "
        "own does not wait behind long bodies and needs a worker that consumes it.",
    ),
    Setting(
        name="lease_reaper_in_worker",
        default=True,
        kind=_FLAG,
        summary="True lets a worker run a pass itself when none was recorded for two intervals; "
        "False leaves recovery to beat or cron alone.",
    ),
    Setting(
        name="lease_run_dir",
        default=None,
        kind=_FOLDER,
        summary="The private folder of the locked files by which the workers of one host see "
        "within a second that another was killed, None for one under XDG_RUNTIME_DIR or the "
        "temporary folder: set it where workers of one user do not share these.",
    ),
    Setting(
        name="lease_queued_timeout",
        default=300.0,
        kind=_DURATION,
        summary="How long a dispatched job may stay unclaimed before its message is suspected to "
        "be lost: sent again if a later one of its queue was claimed, else by a few probes, the "
        "gaps doubling; shorter repairs a lost message sooner, longer sends fewer in vain.",
    ),
    Setting(
        name="lease_publish_on_error",
        default=PublishOnError.STORE,
        kind=_choice(PublishOnError),
        summary="What a publisher gets while the broker is down: 'store' keeps the job and the "
        "reaper sends it later, 'raise' shows the caller the broker's error as well.",
    ),
    Setting(
        name="lease_publish_timeout",
        default=5.0,
        kind=_seconds(at_most=_DAY),
        summary="How long a publisher waits for a broker that does not answer (Redis, RabbitMQ), "
        "with its connection and a second try, before the job is left to the reaper: longer puts "
        "up with a slower broker, shorter with a shorter wait of the caller.",
    ),
    Setting(
        name="lease_defer_after",
        default=60.0,
        kind=_HELD,
        summary="A job whose countdown, ETA or retry delay is longer stays in the store and is "
        "sent when it is due; 0 keeps every delayed job there, None none: longer starts more of "
        "them to the second, shorter keeps more out of the workers' memory and the broker's hands.",
        is_task_option=True,
    ),
    Setting(
        name="lease_defer_precision",
        default=None,
        kind=_seconds(is_optional=True),
        summary="How often a worker looks for jobs in the store that are due, None with each pass "
        "of the reaper: shorter sends them closer to their time and queries the store more.",
    ),
    Setting(
        name="lease_settle_grace",
        default=30.0,
        kind=_DURATION,
        summary="How long a final job may be without confirmed Celery bookkeeping before it is "
        "replayed: shorter repairs results and callbacks sooner, but below some seconds a busy "
        "machine has callbacks sent twice, for settling is written in batches a second apart.",
    ),
    Setting(
        name="lease_claim_timeout",
        default=30.0,
        kind=_DURATION,
        summary="How long a delivery waits for an unreachable store before it is requeued: "
        "longer rides out an outage in place, shorter frees the worker.",
    ),
    Setting(
        name="lease_max_message_bytes",
        default=8 * _MEBIBYTE,
        kind=_BYTES,
        summary="The largest message recorded: more carries larger arguments and makes the store "
        "grow; on MySQL and MariaDB keep it below half of the server's max_allowed_packet.",
    ),
    Setting(
        name="lease_max_result_bytes",
        default=8 * _MEBIBYTE,
        kind=_BYTES,
        summary="The largest result recorded, and the largest checkpoint of a body: more takes "
        "larger ones and makes the store grow; on MySQL and MariaDB keep it below half of the "
        "server's max_allowed_packet.",
    ),
    Setting(
        name="lease_idempotency_key",
        default=False,
        kind=_KEY_RULE,
        summary="Whether each call of a task has an idempotency key, so that it is submitted once: "
        "True makes it of the arguments, a template such as 'order-{order_id}' of those it names; "
        "False leaves it to the call, so that equal calls are different jobs.",
        is_task_option=True,
    ),
    Setting(
        name="lease_idempotency_retention",
        default=_DAY,
        kind=_HELD,
        summary="How long after success a job holds its idempotency key, 0 only until it is final, "
        "None for as long as it is kept: longer refuses a later repetition, shorter allows the "
        "same call again sooner.",
        is_task_option=True,
    ),
    Setting(
        name="lease_idempotency_conflict",
        default=OnKeyConflict.RAISE,
        kind=_choice(OnKeyConflict),
        summary="What a call gets whose idempotency key is held with other arguments: 'raise' "
        "shows the mistake, 'existing' gives the existing job whatever its arguments were.",
        is_task_option=True,
    ),
    Setting(
        name="lease_keep_succeeded",
        default=7 * _DAY,
        kind=_RETENTION,
        summary="How long a succeeded job is kept, None for ever: longer tells more of the past "
        "and refuses later duplicates, shorter keeps the tables small.",
    ),
    Setting(
        name="lease_keep_failed",
        default=30 * _DAY,
        kind=_RETENTION,
        summary="How long a failed, cancelled or interrupted job is kept, None for ever: longer "
        "leaves more time to look into it, shorter keeps the tables small.",
    ),
)

_BY_NAME = MappingProxyType({setting.name: setting for setting in SETTINGS})
