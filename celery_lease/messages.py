"""What a task message is: its headers, its key, what it says of itself, its exact bytes.

What it is not: nothing here records a message (``recording``) or puts one on the broker
(``dispatch``).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from operator import itemgetter
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from celery.app.task import Context
from celery.utils import uuid
from celery.utils.functional import maybe_list
from celery.utils.time import maybe_iso8601
from kombu import Exchange, serialization
from kombu.compression import compress, decompress
from kombu.utils import json as kombu_json

from celery_lease.exceptions import PayloadTooLarge, SettingError
from celery_lease.keys import Underivable, bound_arguments, checked_key, derived_key, digest_of
from celery_lease.records import IdempotencyKey, Message
from celery_lease.settings import OnKeyConflict, TaskSettings

VERSION_HEADER = "lease_message"
RECORDED_HEADER = "lease_recorded"
DISPATCH_HEADER = "lease_dispatch"
#: Also set by callers in other languages.
KEY_HEADER = "lease_idempotency_key"
#: Why the job of another program's message cannot run: said in each attempt in its body's place.
UNFIT_HEADER = "lease_unfit"
#: Where a worker's main process tells a child what a message was serialised with (``adoption``).
CONTENT_TYPE_HEADER = "lease_content_type"
REPLAY_MARK = "replay"
#: Where a task's request keeps which outcome is settled when Celery has told it.
SETTLES_MARK = "_lease_settles"
OWN_HEADERS = (VERSION_HEADER, RECORDED_HEADER, DISPATCH_HEADER, CONTENT_TYPE_HEADER)

#: Where Celery has RabbitMQ delay messages, and what it puts before a routing key: so many bits of
#: the seconds (kombu 5.5 to 5.7, ``transport/native_delayed_delivery.py``).
DELAYING_EXCHANGE = "celery_delayed_27"
_DELAY = re.compile(r"^(?:(?:[01]\.){28})+")

#: Where signatures stand in a canvas (celery 5.5 to 5.7, ``celery/canvas.py``).
_CANVASES = {"chain": ("tasks",), "group": ("tasks",), "chord": ("header", "body")}

#: Content types that decode to plain data. Pickle is not among them, whatever the app accepts.
PLAIN_CONTENT = frozenset(
    {"application/json", "application/x-yaml", "application/x-msgpack", "application/msgpack"}
)


def dispatch_key(job_id: str, version: int, count: int, *, replay: bool = False) -> str:
    """Return what a message says of itself: job, message version, dispatch count."""
    key = f"{job_id}:{version}:{count}"
    return f"{key}:{REPLAY_MARK}" if replay else key


def is_replay(key: object) -> bool:
    """Tell whether a dispatch key marks a message that was sent to settle a final job."""
    return isinstance(key, str) and key.endswith(f":{REPLAY_MARK}")


def dispatch_count_of(headers: Mapping[str, Any]) -> int | None:
    """Return which dispatch of its job a message was; None when it does not say, or is a replay."""
    key = headers.get(DISPATCH_HEADER)
    if not isinstance(key, str) or is_replay(key):
        return None
    count = key.rpartition(":")[2]
    return int(count) if count.isdecimal() else None


def encoded(
    body: Any, version: int, headers: dict[str, Any], options: Mapping[str, Any], *, limit: int
) -> tuple[Message, dict[str, Any]]:
    """Serialise a message as kombu's producer would (``Producer._prepare``).

    Args:
        body: what is sent.
        version: of the job's message.
        headers: of the message; a compression is added to them.
        options: what the producer's ``publish`` was called with.
        limit: bytes that the body may have.

    Returns:
        The message, and the options without what is done by now.

    Raises:
        PayloadTooLarge: the body is longer.
        TypeError: a content type was given, with which kombu would not serialise.
    """
    options = dict(options)
    # The serializer says both: as kombu has it, without a type the encoding means nothing.
    options.pop("content_encoding", None)
    given = options.pop("content_type", None)
    if given:
        text = (
            f"a task's message is serialised by Celery: give serializer, not content_type={given!r}"
        )
        raise TypeError(text)
    content_type, content_encoding, payload = serialization.dumps(
        body, options.pop("serializer", None)
    )
    if isinstance(payload, str):
        payload = payload.encode(content_encoding)
    compression = options.pop("compression", None)
    if compression:
        payload, headers["compression"] = compress(payload, compression)
    if len(payload) > limit:
        raise PayloadTooLarge(
            "message", len(payload), limit, "lease_max_message_bytes", headers["task"]
        )
    exchange = options.get("exchange")
    message = Message(
        version=version,
        headers=kombu_json.dumps(headers),
        properties=kombu_json.dumps(_properties(options)),
        body=payload,
        content_type=content_type,
        content_encoding=content_encoding,
        exchange=exchange.name if isinstance(exchange, Exchange) else exchange or "",
        routing_key=options.get("routing_key") or "",
    )
    return message, options


def freeze_callbacks(body: Any) -> Any:
    """Return the body with an id on every link and errback that has none.

    A replay of the bookkeeping sends them again; with a fixed id a leased callback runs once
    (celery-facts, section 3). The caller's own signatures are not touched: the same one may be
    linked to several tasks.
    """
    if not (isinstance(body, tuple) and len(body) == 3):  # noqa: PLR2004  args, kwargs, embed
        return body
    args, kwargs, embed = body
    embed = dict(embed)
    for name in ("callbacks", "errbacks"):
        if embed.get(name):
            embed[name] = [_frozen(callback) for callback in embed[name]]
    if embed.get("chord"):
        embed["chord"] = _with_frozen_errbacks(embed["chord"])
    return args, kwargs, embed


def _with_frozen_errbacks(body: Any) -> Any:
    """Return the body of a chord with an id on each of its errbacks.

    Celery sends them, and not the body, when a part has failed. Every part brings a body of its
    own, and each may be the one that is told from: the ids are made of the body's id.
    """
    if not isinstance(body, dict):
        return body
    options = dict(body.get("options") or {})
    errbacks, body_id = maybe_list(options.get("link_error")), options.get("task_id")
    if errbacks and body_id:
        names = (f"{body_id} errback {number}" for number in itertools.count())
        options["link_error"] = [
            _frozen(errback, str(uuid5(NAMESPACE_OID, name)))
            for errback, name in zip(errbacks, names, strict=False)
        ]
    plain = {**body, "options": options}
    if body.get("subtask_type") == "group":
        # Its members fail one by one, each with its own.
        tasks = [_with_frozen_errbacks(one) for one in body["kwargs"]["tasks"]]
        plain["kwargs"] = {**body["kwargs"], "tasks": tasks}
    return plain


def _frozen(callback: Any, task_id: str | None = None) -> Any:
    """Return a signature with an id, and so has each one in it; those that are there are kept.

    Not by ``Signature.freeze``, which makes result objects that wait for results in this process.
    """
    if not isinstance(callback, dict):
        return callback
    kind, plain = callback.get("subtask_type"), dict(callback)
    if kind in _CANVASES:
        kwargs = plain["kwargs"] = dict(callback.get("kwargs") or {})
        for name in _CANVASES[kind]:
            inner = kwargs.get(name)
            is_one = isinstance(inner, dict)
            kwargs[name] = _frozen(inner) if is_one else [_frozen(one) for one in inner or ()]
    if kind in {None, "group"}:
        # A chain has the id of its last step, a chord that of its body.
        options = plain["options"] = dict(callback.get("options") or {})
        options["task_id"] = options.get("task_id") or task_id or str(uuid())
    return plain


def _properties(options: dict[str, Any]) -> dict[str, Any]:
    """Return what of the publish options belongs to the message itself."""
    left_out = {
        "exchange",
        "routing_key",
        "retry",
        "retry_policy",
        "declare",
        "timeout",
        "confirm_timeout",
        "expiration",  # relative: it is counted anew from ``expires`` at each dispatch
        "mandatory",
        "immediate",
    }
    return {k: v for k, v in options.items() if k not in left_out and v is not None}


def key_of(
    task: Any,
    task_settings: TaskSettings,
    headers: Mapping[str, Any],
    args: Any,
    kwargs: Any,
    *,
    serializer: str | None = None,
) -> IdempotencyKey | None:
    """Return the idempotency key of a call: what its header says, else what its task makes of it.

    Args:
        task: the task.
        task_settings: its settings.
        headers: of the message.
        args: positional arguments.
        kwargs: keyword arguments.
        serializer: of the arguments, where it is not the task's.

    Raises:
        SettingError: the task's template cannot be filled from the call's arguments.
        TypeError: the key that was given is no text.
        ValueError: it is empty, or the arguments cannot be serialised.
    """
    given, rule = headers.get(KEY_HEADER), task_settings.idempotency_key
    if given is None and rule is False:
        return None
    arguments = bound_arguments(task.run, args, kwargs)
    digest = digest_of(canonical(arguments, serializer or task.serializer))
    try:
        text = derived_key(arguments, digest, rule=rule) if given is None else checked_key(given)
    except Underivable as error:
        raise SettingError([f"task {task.name}: lease_idempotency_key: {error}"]) from error
    if text is None:
        return None
    is_compared = task_settings.idempotency_conflict is OnKeyConflict.RAISE
    return IdempotencyKey(
        text=text,
        arguments_digest=digest if is_compared else None,
        retention_seconds=task_settings.idempotency_retention_seconds,
    )


def canonical(arguments: Mapping[str, Any], serializer: str | None) -> bytes:
    """Return arguments as bytes: the same for equal ones, whatever the order of names or of a set.

    What only a serializer like pickle can say is as that says it, which may differ for equal ones.
    """
    ordered = dict(sorted(arguments.items()))
    for said in (lambda: ordered, lambda: _in_order(ordered)):
        try:
            return str(kombu_json.dumps(said(), sort_keys=True)).encode()
        except (TypeError, ValueError):
            # JSON cannot say it, or has no order for the keys of a dictionary in it.
            continue
    payload = serialization.dumps(ordered, serializer)[2]
    return str(payload).encode() if isinstance(payload, str) else bytes(payload)


def _in_order(value: Any) -> Any:
    """Return a value with its sets and dictionaries as lists: sets have no order between processes.

    Raises:
        TypeError: a member of one is nothing that JSON can say.
    """
    if isinstance(value, set | frozenset):
        return ["set", sorted(kombu_json.dumps(_in_order(one)) for one in value)]
    if isinstance(value, Mapping):
        pairs = [(kombu_json.dumps(_in_order(k)), _in_order(v)) for k, v in value.items()]
        return ["dict", sorted(pairs, key=itemgetter(0))]
    if isinstance(value, list | tuple):
        return [_in_order(one) for one in value]
    return value


def queue_name(options: dict[str, Any], message: Message) -> str | None:
    """Return the queue that a message goes to, None when its exchange alone decides."""
    for entity in options.get("declare") or ():
        name = getattr(entity, "name", None)
        if name and not isinstance(entity, Exchange):
            return str(name)
    return message.routing_key if not message.exchange else None


def undelayed(options: Mapping[str, Any], queues: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return where a message goes that the broker is to hold until its ETA.

    With quorum queues Celery sends it to an exchange of RabbitMQ that delays it by what its routing
    key says (celery 5.5 to 5.7, ``app/base.py``). Sent there again it would be delayed again.

    Args:
        options: of the publish.
        queues: the app's, by name.

    Returns:
        Exchange, routing key and queue in the place of these options; None when it is no such
        message, or goes to no queue that the app knows.
    """
    exchange = options.get("exchange")
    name = exchange.name if isinstance(exchange, Exchange) else exchange
    key = options.get("routing_key") or ""
    if name != DELAYING_EXCHANGE or not _DELAY.match(key):
        return None
    # A retry of a message that came by this way may have several.
    key = _DELAY.sub("", key)
    for queue in queues.values():
        if queue.routing_key == key and queue.exchange is not None and queue.exchange.name:
            return {
                **options,
                "exchange": queue.exchange.name,
                "routing_key": key,
                "declare": [queue],
            }
    return None


def is_delayed_by_broker(message: Message) -> bool:
    """Tell whether a message is recorded on its way to be delayed by RabbitMQ (``undelayed``)."""
    return message.exchange == DELAYING_EXCHANGE


def seconds_until(instant: Any) -> float | None:
    """Return the seconds from now to an ISO instant, by this process's clock; None without one.

    Only this difference goes to the store, which counts it on its own clock (B102).
    """
    if not instant:
        return None
    when = maybe_iso8601(instant)
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return float((when - datetime.now(timezone.utc)).total_seconds())


def plain_request(message: Message) -> Any | None:
    """Return a message as a task request; None when its body is not plain data.

    Raises:
        ValueError: it cannot be read at all; so do kombu's own errors.
    """
    if message.content_type not in PLAIN_CONTENT:
        return None
    headers = kombu_json.loads(message.headers)
    properties = kombu_json.loads(message.properties)
    payload: Any = message.body
    if headers.get("compression"):
        payload = decompress(payload, headers["compression"])
    args, kwargs, embed = _plain(payload, message)
    request = dict(headers)
    request.update(embed or {})
    return Context(
        request,
        args=args,
        kwargs=kwargs,
        reply_to=properties.get("reply_to"),
        correlation_id=properties.get("correlation_id"),
        delivery_info={"exchange": message.exchange, "routing_key": message.routing_key},
        called_directly=False,
    )


def _plain(payload: Any, message: Message) -> Any:
    try:
        return serialization.loads(
            payload, message.content_type, message.content_encoding, accept=[message.content_type]
        )
    except Exception:
        if message.content_type != "application/json":
            raise
        # A value of a type that is registered elsewhere, or that only looks like one. It stays as
        # it was written, and goes on so where it is sent on.
        text = payload.decode(message.content_encoding) if isinstance(payload, bytes) else payload
        return json.loads(text)
