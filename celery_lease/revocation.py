"""Celery's ``revoke``, ``terminate`` and ``revoke_by_stamped_headers`` for leased jobs.

Celery keeps a revocation in the memory of the workers that hear it: it is gone when they restart,
and was never there where none was up (B079). A leased job is cancelled in the store instead, which
refuses the claim and interrupts the body at its next heartbeat. Two sides do so. Who revokes writes
it before the broadcast, whether or not a worker hears that (``store_first``). A worker that hears a
revocation tells the store too: it may come from an app that knows no store (``listen``).

What it is not: it decides nothing of a delivery (``request``), and unleased tasks are Celery's.
Read: celery 5.5 to 5.7, ``celery/app/control.py`` and ``celery/worker/control.py``.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery.app.control import Control
from celery.utils.functional import maybe_list
from celery.worker.control import Panel
from celery.worker.state import requests
from kombu.utils import json as kombu_json

from celery_lease.exceptions import StoreError, StoreUnavailable
from celery_lease.reaper import report_cancelled
from celery_lease.store import queries, transitions
from celery_lease.worker import copied, node_name

if TYPE_CHECKING:
    from celery_lease.extension import Extension
    from celery_lease.store.engine import Store

logger = logging.getLogger(__name__)

#: Kept on the job, and as the stop reason of its attempt.
REASON = "revoked"
#: Celery's commands that end tasks.
COMMANDS = ("revoke", "terminate", "revoke_by_stamped_headers")
#: Jobs whose headers are read at once.
PAGE = 500
#: What a broadcast says when its jobs have been ended in the store: no worker need do it again, and
#: one that hears it late must not, for a job may have been resumed since. A worker without
#: celery-lease takes no notice of it.
_STORED = "lease_stored"

Stamps = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Revocation:
    """What one command ends.

    Attributes:
        job_ids: tasks by id; not all of them need be leased.
        stamps: tasks by what they are stamped with: one value of one name is enough.
    """

    job_ids: tuple[str, ...] = ()
    stamps: Stamps = field(default_factory=dict)


def revocation_of(command: str, arguments: Mapping[str, Any]) -> Revocation | None:
    """Return what a remote control command ends; None: nothing, or it is another command."""
    if command not in COMMANDS:
        return None
    if command == "revoke_by_stamped_headers":
        stamps = _stamps(arguments.get("headers"))
        return Revocation(stamps=stamps) if stamps else None
    job_ids = tuple(str(one) for one in maybe_list(arguments.get("task_id")) or ())
    return Revocation(job_ids) if job_ids else None


def _stamps(headers: Any) -> dict[str, tuple[Any, ...]]:
    if isinstance(headers, Mapping):
        return {str(name): tuple(maybe_list(values) or ()) for name, values in headers.items()}
    # From a command line. Split as Celery's worker does it, or the two would end different tasks.
    pairs = [one.split("=") for one in headers or () if isinstance(one, str) and "=" in one]
    return {pair[0]: (pair[1],) for pair in pairs}


def is_stamped(stamps: Any, revoked: Mapping[str, Any]) -> bool:
    """Tell whether a message's stamps have one of those values under one of those names.

    Args:
        stamps: of the message: each name with a value or a list of them; None without any.
        revoked: each name with a value or a list of them.
    """
    if not isinstance(stamps, Mapping):
        return False
    return any(
        value in (maybe_list(stamps.get(name)) or ())
        for name, values in revoked.items()
        for value in maybe_list(values) or ()
    )


def cancel_revoked(store: Store, revocation: Revocation) -> list[str]:
    """End the leased jobs that a revocation names.

    Returns:
        The ids of the jobs that were ended now.

    Raises:
        StoreUnavailable: some may not have been ended.
    """
    ended = transitions.cancel_all(store, revocation.job_ids, reason=REASON)
    if revocation.stamps:
        for page in _stamped(store, revocation.stamps):
            ended += transitions.cancel_all(store, page, reason=REASON)
    for job_id in ended:
        report_cancelled(job_id, worker=node_name(), reason=REASON)
    return ended


def _stamped(store: Store, stamps: Stamps) -> Iterator[list[str]]:
    """Give the jobs that carry a stamp, page by page."""
    needles = [_needle(name, value) for name, values in stamps.items() for value in values]
    after = ""
    while needles:
        rows = queries.stamped(store, needles, after=after, limit=PAGE)
        yield [
            job_id for job_id, headers in rows if is_stamped(_stamps_in(job_id, headers), stamps)
        ]
        if len(rows) < PAGE:
            return
        after = rows[-1][0]


def _stamps_in(job_id: str, headers: str) -> Any:
    try:
        return kombu_json.loads(headers).get("stamps")
    except Exception as error:  # noqa: BLE001  a header of the user's own, of a type not known here
        logger.warning("lease.revocation.unreadable job_id=%s problem=%r", job_id, error)
        return None


def _needle(name: str, value: Any) -> str:
    """Return what stands in the headers of every message with that stamp."""
    # What JSON has no word for, kombu writes in one of its own: the name will do.
    return json.dumps(value if isinstance(value, str | int | float) else name)


# -- who revokes -------------------------------------------------------------------------------


def store_first(extension_of: Callable[[Any], Extension | None]) -> None:
    """Have every app of this process write a revocation into its store before it is sent.

    Everything goes by ``Control.broadcast``: ``AsyncResult.revoke``, ``GroupResult.revoke``,
    ``app.control.revoke`` and ``terminate``, ``celery control revoke`` and Flower. The method
    itself is wrapped, once a process. A class of control of its own, as an app has one for AMQP,
    comes too late: an app that only revokes binds no task, and so has no extension yet.

    Args:
        extension_of: gives an app's extension, None for an app without leased tasks.
    """
    sending = Control.broadcast
    if hasattr(sending, "stores_revocations"):
        return

    @functools.wraps(sending)
    def broadcast(
        self: Control, command: str, arguments: Any = None, *args: Any, **options: Any
    ) -> Any:
        revocation = revocation_of(command, {**options, **(arguments or {})})
        extension = None if revocation is None else extension_of(self.app)
        if revocation is None or extension is None:
            return sending(self, command, arguments, *args, **options)
        return _send_stored(
            extension,
            revocation,
            lambda more: sending(self, command, {**(arguments or {}), **more}, *args, **options),
        )

    broadcast.stores_revocations = True  # type: ignore[attr-defined]
    Control.broadcast = broadcast


def _send_stored(
    extension: Extension, revocation: Revocation, send: Callable[[Mapping[str, Any]], Any]
) -> Any:
    """End the leased jobs of a revocation, then send it, whatever came of the first.

    Raises:
        StoreUnavailable: the workers were told, and the store was not.
    """
    ended: list[str] = []
    away: Exception | None = None
    try:
        ended = cancel_revoked(extension.store, revocation)
    except Exception as error:  # noqa: BLE001  raised after the broadcast
        away = error
    try:
        answer = send({_STORED: True} if away is None else {})
    finally:
        # After the broadcast, for it stops bodies; also without, for the jobs have ended.
        _close_books(extension, ended)
    if isinstance(away, StoreUnavailable):
        raise _told_workers_only(away) from away
    if away is not None:
        raise away
    return answer


def _close_books(extension: Extension, job_ids: list[str]) -> None:
    if not job_ids:
        return
    try:
        extension.reaper().settle_many(job_ids)
    except StoreError as error:
        # The next pass does it.
        logger.warning("lease.revocation.untold problem=%s", error)


def _told_workers_only(error: StoreUnavailable) -> StoreUnavailable:
    return StoreUnavailable(
        error.url,
        f"{error.reason}. The revocation was sent to the workers, and is not in the store: one "
        "that runs now writes it there later; to be sure, revoke again when the store is back",
    )


# -- what a worker hears -----------------------------------------------------------------------

_listening: weakref.WeakKeyDictionary[Any, Extension] = weakref.WeakKeyDictionary()


def listen(extension: Extension) -> None:
    """Have a worker of this process tell the store of each revocation that it hears."""
    _listening[extension.app] = extension
    for command in COMMANDS:
        handler = Panel.data[command]
        if not hasattr(handler, "tells_lease_store"):
            Panel.data[command] = _telling(command, handler)


def _telling(command: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def heard(state: Any, *args: Any, **arguments: Any) -> Any:
        is_stored = bool(arguments.pop(_STORED, False))
        extension = _listening.get(state.app)
        if extension is not None:
            _tell(extension, command, arguments, is_stored=is_stored)
        return handler(state, *args, **arguments)

    heard.tells_lease_store = True  # type: ignore[attr-defined]
    return heard


def _tell(
    extension: Extension, command: str, arguments: Mapping[str, Any], *, is_stored: bool
) -> None:
    try:
        revocation = revocation_of(command, arguments)
        here = [] if revocation is None else _deliveries_of(revocation)
    except Exception as error:  # noqa: BLE001  anybody may send anything; Celery answers it
        logger.warning("lease.revocation.malformed problem=%r", error)
        return
    if revocation is not None:
        word = functools.partial(end_heard, revocation=None if is_stored else revocation, here=here)
        extension.tell(word)


def _deliveries_of(revocation: Revocation) -> list[str]:
    """Return the tasks among a revocation's that this worker has in its hands."""
    return [
        request.id
        for request in copied(requests.values())
        if request.id in revocation.job_ids
        or is_stamped(request.request_dict.get("stamps"), revocation.stamps)
    ]


def end_heard(
    extension: Extension, store: Store, revocation: Revocation | None, here: Sequence[str] = ()
) -> None:
    """End the jobs of a revocation that a worker was told of, and have Celery told.

    Args:
        extension: the app's extension.
        store: the store.
        revocation: what it ends; None when who sent it has ended that in the store.
        here: jobs that this worker has in its hands. Who ended one of them may be no worker, and
            send no events: this one does. One that was submitted after its revocation was looked
            for in the store, and came here before the revocation, has not been ended yet.
    """
    if revocation is not None:
        ended = cancel_revoked(store, revocation)
        if ended:
            extension.reaper().settle_many(ended)
    else:
        ended = [one for one in here if end_first(extension, store, one)]
    for job_id in queries.cancelled(store, [one for one in here if one not in ended]):
        report_cancelled(job_id, worker=node_name(), reason=REASON)


def end_first(extension: Extension, store: Store, job_id: str) -> bool:
    """End a job for a revocation that may be older than a resume of it; True when it was ended.

    Only a job whose first message is its last one, and which nobody has resumed: what is sent
    later was sent by somebody who knew.
    """
    if not transitions.cancel_dispatched(store, job_id, dispatch_count=1, reason=REASON):
        return False
    report_cancelled(job_id, worker=node_name(), reason=REASON)
    extension.reaper().settle_now(job_id)
    return True
