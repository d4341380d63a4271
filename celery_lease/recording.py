"""Recording what Celery publishes, before it is published.

``RecordingProducer`` stands in for the kombu producer of one task message: the job and the
message's exact bytes are durable before the message is sent. It is reached from
``AMQP.send_task_message``, through which every task message of an app goes (``delay``,
``apply_async``, canvas, beat, ``retry``, ``send_task``). Read: celery 5.5 to 5.7,
``celery/app/amqp.py``.

Longer than the house wants: what may come between a record and its publish (a key that is held, a
delay, a store or a broker that is away) is decided in one order, in one class.

A message whose publisher was another program is recorded at its claim (``adoption``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from celery._state import get_current_task
from celery.exceptions import SoftTimeLimitExceeded

from celery_lease import events
from celery_lease.calls import JobExists, Resend, Send, current_resend, is_new_id, taker_of
from celery_lease.exceptions import (
    IdempotencyConflict,
    JobUnsendable,
    StaleWrite,
    StoreError,
    StoreUnavailable,
)
from celery_lease.messages import (
    DISPATCH_HEADER,
    KEY_HEADER,
    OWN_HEADERS,
    RECORDED_HEADER,
    SETTLES_MARK,
    VERSION_HEADER,
    dispatch_key,
    encoded,
    freeze_callbacks,
    is_delayed_by_broker,
    key_of,
    queue_name,
    seconds_until,
    undelayed,
)
from celery_lease.outcomes import type_name
from celery_lease.publishing import BrokerAway, LeaseConnections
from celery_lease.records import Accepted, IdempotencyKey, Late, Message, NewJob
from celery_lease.settings import PublishOnError, Settings, TaskSettings
from celery_lease.states import LateOutcome
from celery_lease.store import queries, transitions
from celery_lease.store.engine import Store

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: How long the last task of a replacing canvas waits for the end of the attempt it replaces,
#: which is being written at that moment, and how often it looks.
REPLACED_SECONDS = 10.0
REPLACED_POLL_SECONDS = 0.05

BROKER_AWAY = "the broker did not answer a moment ago: the job is recorded, and sent later"

#: How often a message that follows a job asks for a store that is away.
CLOSING_POLL_SECONDS = 0.5


class RecordingProducer:
    """Records one task message in the store, then hands it to the real producer.

    Everything but the publish of that message passes through.

    Args:
        producer: the kombu producer.
        body: the body of the message to record; other messages are not touched.
        task: the task.
        store: the store.
        settings: the app's settings.
        task_settings: the task's.
        connections: the app's, for leased messages.
        submitter: who publishes.
    """

    def __init__(
        self,
        producer: Any,
        *,
        body: object,
        task: Any,
        store: Store,
        settings: Settings,
        task_settings: TaskSettings,
        connections: LeaseConnections,
        submitter: str,
    ) -> None:
        self._producer = producer
        self._connections = connections if connections.serves(producer) else None
        self._of_app = connections
        self._body = body
        self._leased_task = task
        self._task = task.name
        self._store = store
        self._settings = settings
        self._task_settings = task_settings
        self._submitter = submitter
        self._dispatch_count: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Record the message, then publish it.

        Raises:
            StoreUnavailable: nothing was recorded and nothing was sent.
            PayloadTooLarge: the serialised message is over ``lease_max_message_bytes``.
            StaleWrite: the lease of the runner that publishes itself again is lost.
            IdempotencyConflict: its key is held by a job with other arguments.
            JobExists: its key is held (``may_exist``).
        """
        if body is not self._body:
            return self._publish_event(body, options)
        given = options.pop("headers")
        headers = {name: value for name, value in given.items() if name not in OWN_HEADERS}
        frozen = freeze_callbacks(body)
        try:
            send = self._accepted(frozen, dict(headers), options)
        except (StoreError, StaleWrite, JobExists, SoftTimeLimitExceeded):
            raise
        except Exception as error:
            # A hook or a signal of that job may call a task, too, and gets the error.
            if is_new_id(headers["id"]) or not _is_closing_books(headers["id"]):
                raise
            self._record_unsendable(frozen, headers, error)
            return None
        return None if send is None else send()

    def _accepted(
        self, frozen: Any, headers: dict[str, Any], options: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Have a message recorded, or taken; returns what sends it, None if it is not to leave."""
        resend = current_resend()
        if resend is not None and headers["id"] == resend.lease.job_id:
            version = resend.lease.message_version + 1
        else:
            resend, version = None, 1
        if resend is None and headers.get("replaced_task_nesting"):
            version = self._version_after_replaced(headers["id"])
        headers[VERSION_HEADER] = version
        headers[RECORDED_HEADER] = True
        # A retry, or a replacement, is the job that holds the key.
        key = self._key(frozen, headers) if version == 1 else None
        home = undelayed(options, self._leased_task.app.amqp.queues)
        message, options = encoded(
            frozen, version, headers, options, limit=self._settings.max_message_bytes
        )
        if home is not None:
            message = replace(message, exchange=home["exchange"], routing_key=home["routing_key"])
        routing = home or options
        is_deferred = self._is_deferred(headers) and not is_delayed_by_broker(message)
        taker = taker_of(self._leased_task.app, headers, frozen[2]) if version == 1 else None
        if taker is not None:
            job = self._new_job(message, headers, routing, key, leaves=not is_deferred)
            taker.take(job, self._sending(message, headers, options))
            return None
        is_away = (
            not is_deferred
            and self._connections is not None
            and self._connections.breaker.is_open()
        )
        leaves = not is_away and not is_deferred
        if not self._recorded(
            headers, lambda: self._record(message, headers, routing, resend, key, leaves=leaves)
        ):
            return None
        if headers.get(RECORDED_HEADER) and not leaves:
            if is_away:
                self._not_sent(BrokerAway(BROKER_AWAY), headers)
            return None
        return lambda: self._send(message, headers, options)

    def _sending(self, message: Message, headers: dict[str, Any], options: dict[str, Any]) -> Send:
        def send(producer: Any = None, *, is_recorded: bool = True) -> None:
            if not is_recorded:
                del headers[RECORDED_HEADER]
            self._put(producer or self._producer, message, headers, options)

        return send

    def _record_unsendable(self, body: Any, headers: dict[str, Any], error: Exception) -> None:
        """Record what follows a job, and cannot be a message, as the failed job that it is.

        Whoever sends it is a job that has succeeded, which Celery would make a failure of, at each
        replay again. So its canvas is told of this error, by the books of this job, and once.

        Raises:
            StoreError: nothing was recorded; a replay does it.
        """
        # Never run: its arguments may be what cannot be recorded.
        stripped: Any = ((), {}, body[2])
        headers[VERSION_HEADER] = 1
        headers[RECORDED_HEADER] = True
        try:
            message, _ = encoded(stripped, 1, headers, {}, limit=self._settings.max_message_bytes)
            job = self._new_job(message, headers, {}, None, leaves=False)
            transitions.submit_failed(
                self._store,
                replace(job, queue=None, priority=None),
                error_type=f"{JobUnsendable.__module__}.{JobUnsendable.__name__}",
                error_message=f"{type_name(error)}: {error}",
            )
        except StoreError:
            raise
        except Exception as trouble:
            raise error from trouble
        self._tell_not_sent(error, headers)

    def _publish_event(self, body: Any, options: dict[str, Any]) -> Any:
        """Publish ``task-sent``: it comes after its job, and must not make that a failure."""
        if self._connections is None:
            return self._producer.publish(body, **options)
        if self._connections.breaker.is_open():
            return None
        try:
            return self._connections.publish(body, **options)
        except Exception as error:
            if not self._connections.is_away(error):
                raise
            logger.warning("lease.publish.event_dropped reason=%r", str(error))
            return None

    def _is_deferred(self, headers: Mapping[str, Any]) -> bool:
        """Tell whether a message stays in the store until it is nearly due."""
        after, delay = self._task_settings.defer_after_seconds, seconds_until(headers.get("eta"))
        if after is None or delay is None or delay <= after:
            return False
        # It would leave later, and by the app's own broker: not for one that the caller chose.
        return self._connections is not None or not self._of_app.is_bounded

    def _key(self, body: Any, headers: dict[str, Any]) -> IdempotencyKey | None:
        args, kwargs = body[:2]
        key = key_of(self._leased_task, self._task_settings, headers, args, kwargs)
        if key is not None:
            headers[KEY_HEADER] = key.text
        return key

    def _recorded(self, headers: dict[str, Any], record: Callable[[], bool]) -> bool:
        """Record a message, in the end perhaps not; True when it is to be sent."""
        answer = recorded_in_the_end(
            record, job_id=headers["id"], settings=self._settings, submitter=self._submitter
        )
        if answer is None:
            del headers[RECORDED_HEADER]
        return answer is not False

    def _version_after_replaced(self, job_id: str) -> int:
        """Return the message version of the task of a replacing canvas that has the job's id.

        The canvas is published before the replaced attempt is ended, so that it cannot be lost
        between the two; its last task may come here sooner than that end.

        Raises:
            StoreUnavailable: that attempt goes on running. Whoever publishes here is not
                settled, then, and publishes again when it is replayed.
        """
        until = time.monotonic() + REPLACED_SECONDS
        while True:
            before = queries.replaced_version(self._store, job_id)
            if before is not None:
                return before + 1
            if not queries.is_running(self._store, job_id):
                # Asked again: it may have ended between the two questions.
                before = queries.replaced_version(self._store, job_id)
                return 1 if before is None else before + 1
            if time.monotonic() >= until:
                raise StoreUnavailable(
                    self._store.masked_url, f"the attempt that job {job_id} replaces has not ended"
                )
            time.sleep(REPLACED_POLL_SECONDS)

    def _record(
        self,
        message: Message,
        headers: dict[str, Any],
        options: dict[str, Any],
        resend: Resend | None,
        key: IdempotencyKey | None,
        *,
        leaves: bool,
    ) -> bool:
        """Make the message durable; True when it is to be sent, if it leaves now."""
        if self._dispatch_count is not None:
            # Celery repeats a refused callback publish on this same producer.
            return True
        if message.version > 1:
            delay = seconds_until(headers.get("eta")) or 0.0
            # A retry that is due at once may end before Celery has stored the RETRY of this
            # attempt, which would then stand over its outcome for ever.
            put_off = resend is not None and resend.kind is LateOutcome.RETRIED and delay <= 0
            again = transitions.Again(
                message=message,
                delay_seconds=delay,
                expires_seconds=seconds_until(headers.get("expires")),
                queue=queue_name(options, message),
                priority=options.get("priority"),
                dispatched=leaves and not put_off,
                task=self._task,
                keeps_key=resend is not None and resend.keeps_key,
            )
            if resend is not None:
                self._record_again(again, resend)
                resend.is_put_off = put_off
            elif not transitions.reopen(self._store, headers["id"], again):
                return False
            self._dispatch_count = self._dispatches(headers["id"]) if again.dispatched else 0
            return not put_off
        job = self._new_job(message, headers, options, key, leaves=leaves)
        if not submitted(self._store, job):
            # A job with this id exists, in whatever state: it is that job, and to run it
            # again is ``resume`` (design, section 9). A chain whose step was sent twice in a
            # crash window ends here, too.
            return False
        self._dispatch_count = int(leaves)
        return True

    def _dispatches(self, job_id: str) -> int:
        """Return which dispatch of its job a message of a later version is."""
        try:
            return queries.dispatch_count(self._store, job_id) or 1
        except StoreUnavailable as error:
            # It is recorded, and leaves. Its claim tells nothing of the queue, that is all.
            events.emit(events.STORE_UNAVAILABLE, worker=self._submitter, reason=str(error))
            return 1

    def _new_job(
        self,
        message: Message,
        headers: dict[str, Any],
        options: dict[str, Any],
        key: IdempotencyKey | None,
        *,
        leaves: bool,
    ) -> NewJob:
        return NewJob(
            job_id=headers["id"],
            task=self._task,
            message=message,
            delay_seconds=seconds_until(headers.get("eta")) or 0.0,
            expires_seconds=seconds_until(headers.get("expires")),
            max_attempts=self._task_settings.max_attempts,
            on_expiry=self._task_settings.on_expiry,
            queue=queue_name(options, message),
            priority=options.get("priority"),
            submitter=headers.get("origin") or self._submitter,
            root_id=headers.get("root_id"),
            parent_id=headers.get("parent_id"),
            group_id=headers.get("group"),
            dispatched=leaves,
            key=key,
            follows=not is_new_id(headers["id"]),
        )

    def _record_again(self, again: transitions.Again, resend: Resend) -> None:
        """End the attempt by the new version of its own job."""
        replaces = resend.kind is LateOutcome.REPLACED
        act = transitions.replace if replaces else transitions.retry_later
        lease = resend.lease
        try:
            answer = resend.runtime.finish(
                lease,
                lambda parting: act(self._store, lease.held, parting, again),
                reason=resend.kind.value,
                failure=resend.failure,
                late=Late(resend.kind, failure=resend.failure),
                shielded=resend.shielded,
            )
        except StoreUnavailable as error:
            resend.error = error
            raise
        if not isinstance(answer, Accepted):
            resend.error = StaleWrite(lease.job_id, lease.fencing_token)
            raise resend.error
        lease.ended_by = resend.kind.value

    def _send(self, message: Message, headers: dict[str, Any], options: dict[str, Any]) -> Any:
        job_id = headers["id"]
        try:
            return self._put(self._producer, message, headers, options)
        except Exception as error:
            # Whether the broker has it is not known. It stays queued, and the reaper sends it
            # again under the same id: the claim lets one of the two run.
            if not headers.get(RECORDED_HEADER):
                # Nobody would send it again.
                self._tell_not_sent(error, headers)
                raise
            if isinstance(error, SoftTimeLimitExceeded):
                # Of the body that publishes: it is told once.
                self._give_back(job_id, message.version)
                raise
            if self._connections is None or self._connections.is_away(error):
                self._give_back(job_id, message.version)
            # Else the broker refused this message: it counts as sent and unclaimed, so that trying
            # it again is not in the way of the others.
            self._not_sent(error, headers)
            return None

    def _put(
        self, producer: Any, message: Message, headers: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        if headers.get(RECORDED_HEADER):
            headers[DISPATCH_HEADER] = dispatch_key(
                headers["id"], message.version, self._dispatch_count or 1
            )
        headers[VERSION_HEADER] = message.version
        return (self._connections or producer).publish(
            message.body,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=headers,
            **options,
        )

    def _not_sent(self, error: Exception, headers: Mapping[str, Any]) -> None:
        """Say that a recorded message did not leave, and to the caller if he wants to know."""
        self._tell_not_sent(error, headers)
        # A retry has ended its attempt, and what follows a job comes after its end: an error would
        # make a failure of it.
        is_wanted = self._settings.publish_on_error is PublishOnError.RAISE
        if is_wanted and current_resend() is None and not _is_closing_books(headers["id"]):
            raise error

    def _tell_not_sent(self, error: Exception, headers: Mapping[str, Any]) -> None:
        events.emit(
            events.PUBLISH_FAILED,
            job_id=headers["id"],
            worker=self._submitter,
            reason=str(error),
        )

    def _give_back(self, job_id: str, version: int) -> None:
        try:
            transitions.undispatch(
                self._store, job_id, dispatch_count=None, message_version=version
            )
        except StoreUnavailable as error:
            # Then it counts as dispatched, and is sent again after lease_queued_timeout.
            events.emit(events.STORE_UNAVAILABLE, worker=self._submitter, reason=str(error))


def recorded_in_the_end(
    record: Callable[[], T], *, job_id: str, settings: Settings, submitter: str
) -> T | None:
    """Return what ``record`` returns; None: what cannot be refused leaves unrecorded in the end.

    What Celery sends as it closes a job's books is such a one: a chord whose body could not be
    sent counts as failed, and no replay sends it again. It is waited for, as a claim is; then
    it goes out as a message from a stranger does, and is recorded at its claim.

    Raises:
        StoreUnavailable: it can be refused: nothing was recorded.
    """
    until = time.monotonic() + settings.claim_timeout
    while True:
        try:
            return record()
        except StoreUnavailable as error:
            if not _is_closing_books(job_id):
                raise
            events.emit(events.STORE_UNAVAILABLE, worker=submitter, reason=str(error))
        if time.monotonic() >= until:
            return None
        time.sleep(CLOSING_POLL_SECONDS)


def submitted(store: Store, job: NewJob) -> bool:
    """Record a new job; False when there is one with its id, in whatever state.

    Raises:
        StoreUnavailable: nothing is known to be written; nothing may be published.
        IdempotencyConflict: its key is held by a job with other arguments.
        JobExists: its key is held.
    """
    if job.key is None:
        is_new = transitions.submit(store, job)
    else:
        existing = transitions.submit_keyed(store, job)
        if existing is not None and existing.job_id != job.job_id:
            if not existing.same_arguments:
                raise IdempotencyConflict(job.task, job.key.text, existing.job_id)
            raise JobExists(existing.job_id)
        is_new = existing is None
    if is_new:
        events.emit(events.JOB_SUBMITTED, job_id=job.job_id, task=job.task)
    return is_new


def _is_closing_books(job_id: str) -> bool:
    """Tell whether a leased job of this worker has ended, and Celery sends what follows it."""
    task = get_current_task()
    request = None if task is None else task.request_stack.top
    return request is not None and request.id != job_id and SETTLES_MARK in request.__dict__
