"""Putting recorded messages on the broker, and closing the books in Celery.

``BrokerPublisher`` sends recorded messages again, byte for byte, and closes the books in
Celery for an end that no body returned. It never unpickles: what only pickle can read is
sent to a worker as a replay instead.
"""

from __future__ import annotations

from typing import Any

from amqp.exceptions import PreconditionFailed
from celery import signals, states
from celery.exceptions import ImproperlyConfigured, SoftTimeLimitExceeded, TaskRevokedError
from kombu.exceptions import ContentDisallowed, SerializationError
from kombu.serialization import prepare_accept_content
from kombu.utils import json as kombu_json

from celery_lease import exceptions
from celery_lease.messages import DISPATCH_HEADER, PLAIN_CONTENT, dispatch_key, plain_request
from celery_lease.publishing import LeaseConnections
from celery_lease.reaper import PublishFailed
from celery_lease.records import Dispatchable, Message, Outcome
from celery_lease.states import JobState

#: What is wrong with one job, and not with the broker or the result backend.
_OF_THE_JOB = (
    # Somebody else is at it.
    exceptions.ChordClaimed,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ContentDisallowed,
    ImproperlyConfigured,
    SerializationError,
)


class BrokerPublisher:
    """Puts recorded messages on the broker and closes books in Celery.

    Args:
        app: the Celery app.
        connections: the app's, for leased messages.
    """

    def __init__(self, app: Any, connections: LeaseConnections) -> None:
        self._app = app
        self._connections = connections

    def publish(self, candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        """Put a stored message on the broker, as it was.

        Raises:
            PublishFailed: it did not get there, as far as is known.
            SoftTimeLimitExceeded: nor then.
        """
        try:
            headers = kombu_json.loads(message.headers)
            properties = kombu_json.loads(message.properties)
        except Exception as error:
            # A value in them whose type this process does not know.
            raise PublishFailed(f"{type(error).__name__}: {error}", is_away=False) from error
        headers[DISPATCH_HEADER] = dispatch_key(
            candidate.job_id, message.version, candidate.dispatch_count + 1, replay=replay
        )
        if replay or candidate.due_seconds <= 0:
            # It is due by the store's clock. A worker would hold it until it is by its own, too,
            # and one that an operator has resumed before its time until that has come.
            headers["eta"] = None
        if replay or candidate.expires_seconds is None:
            # A settlement is not limited by ``expires``, nor is a job that started in time and
            # lost its runner: a worker would discard the message.
            headers["expires"] = None
        else:
            properties["expiration"] = max(candidate.expires_seconds, 0.0)
        policy = dict(self._app.conf.task_publish_retry_policy)
        policy["max_retries"] = min(policy.get("max_retries") or 1, 1)
        try:
            self._publish(
                message.body,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=headers,
                exchange=message.exchange,
                routing_key=message.routing_key,
                declare=self._declared(candidate.queue, message),
                retry=True,
                retry_policy=policy,
                **properties,
            )
        except SoftTimeLimitExceeded:
            # Of the body that this runs in: it is told once.
            raise
        except Exception as error:
            is_away = self._connections.is_away(error)
            raise PublishFailed(f"{type(error).__name__}: {error}", is_away=is_away) from error

    def _publish(self, body: Any, *, declare: list[Any], **options: Any) -> None:
        try:
            self._put(body, declare=declare, **options)
        except PreconditionFailed:
            if not declare:
                raise
            # There is a queue of that name, with arguments that only its submitter knows.
            self._put(body, declare=[], **options)

    def _put(self, body: Any, **options: Any) -> None:
        # The breaker is not asked: a pass gives its batch up by itself, and finds out that the
        # broker is back.
        if self._connections.is_bounded:
            self._connections.publish(body, **options)
            return
        with self._app.producer_or_acquire() as producer:
            producer.publish(body, **options)

    def _declared(self, name: str | None, message: Message) -> list[Any]:
        """Return the queue to declare: a broker restarted without data would drop the message.

        Only its name is recorded. A queue of that name that is bound elsewhere is not the one that
        the submitter meant, and would keep it from being declared.
        """
        if name is None:
            return []
        queues = self._app.amqp.queues
        found = queues.get(name)
        if not message.exchange:
            # It names the queue: one that is not known is made as Celery makes it.
            is_named = message.routing_key == name and queues.create_missing
            found = queues[name] if found is None and is_named else found
            return [] if found is None else [found]
        if found is None and queues.create_missing:
            missing = queues.new_missing(name)
            if message.routing_key == missing.routing_key:
                found = missing
        is_meant = found is not None and found.exchange.name == message.exchange
        return [found] if is_meant else []

    def close_books(self, outcome: Outcome, message: Message) -> bool:
        """Tell Celery an end that no body returned: result backend, errbacks, chord.

        Returns:
            False when only a worker can: the message's body, or what its chord has stored, may be
            other than plain data, or this process does not have the task.

        Raises:
            PublishFailed: the result backend or the broker did not take it.
        """
        try:
            return self._close_books(outcome, message)
        except PublishFailed:
            raise
        except Exception as trouble:
            # Its own trouble is not in the way of the others.
            is_away = not isinstance(trouble, _OF_THE_JOB)
            raise PublishFailed(
                f"{type(trouble).__name__}: {trouble}", is_away=is_away
            ) from trouble

    def _close_books(self, outcome: Outcome, message: Message) -> bool:
        request = plain_request(message)
        if request is None or request.task not in self._app.tasks:
            # A program that only submits, or revokes: the task may have a backend of its own.
            return False
        if outcome.state is JobState.SUCCEEDED and request.chord and self._accepts_pickle():
            # The last part of a chord reads what the others have stored.
            return False
        backend = self._backend(request)
        error = ending_error(outcome, task=request.task)
        store_result = not request.ignore_result
        if outcome.state is JobState.SUCCEEDED:
            backend.mark_as_done(request.id, None, request=request, store_result=store_result)
        elif outcome.state is JobState.CANCELLED:
            tell_cancelled(backend, request, error, store_result=store_result)
        else:
            backend.mark_as_failure(request.id, error, request=request, store_result=store_result)
            self._signal_failure(request, error)
        return True

    def _backend(self, request: Any) -> Any:
        return self._app.tasks[request.task].backend

    def _accepts_pickle(self) -> bool:
        conf = self._app.conf
        accepted = prepare_accept_content(conf.result_accept_content or conf.accept_content)
        return not accepted <= PLAIN_CONTENT

    def _signal_failure(self, request: Any, error: Exception) -> None:
        """Send ``task_failure``, as Celery does in the main process for a lost child."""
        task = self._app.tasks.get(request.task)
        if task is not None:
            signals.task_failure.send(
                sender=task,
                task_id=request.id,
                exception=error,
                args=request.args,
                kwargs=request.kwargs,
                traceback=None,
                einfo=None,
            )


def tell_cancelled(backend: Any, request: Any, error: Exception, *, store_result: bool) -> None:
    """Tell Celery that a job was cancelled: its result is REVOKED, and what waits for it ends.

    Not by ``mark_as_revoked``: that leaves the rest of a chain to wait for ever, and with it the
    chord that its last step is a part of (B065). It calls no errbacks either.

    Args:
        backend: the task's result backend.
        request: the task's request.
        error: the typed exception for the end of the job.
        store_result: False where nobody asks for the result.
    """
    backend.mark_as_failure(
        request.id,
        TaskRevokedError(str(error)),
        request=request,
        store_result=store_result,
        call_errbacks=False,
        state=states.REVOKED,
    )


def ending_error(outcome: Outcome, *, task: str) -> Exception:
    """Return the typed exception for an end that no body returned."""
    name = (outcome.error_type or "").rpartition(".")[2]
    kind = getattr(exceptions, name, None)
    if not (isinstance(kind, type) and issubclass(kind, exceptions.JobEnded)):
        kind = exceptions.JobEnded
    text = outcome.error_message or outcome.state_reason or outcome.state.value
    return kind(f"job {outcome.job_id} ({task}): {text}")
