"""Many jobs of one call: recorded in a few statements, sent one after the other on one channel.

``LeasedTask.submit_many`` and ``celery.group`` use it. A batch lives within one call: what a
caller was given a result for is recorded, since the call returns after the last batch.

``group.apply_async`` has a function of ours around it: a group gives its members to
``Task.apply_async`` one by one, and nothing tells the last one from the others (celery 5.5 to 5.7,
``canvas.group``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from celery import group
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils import uuid

from celery_lease import events
from celery_lease.calls import Send, is_taken, taken_by
from celery_lease.exceptions import StoreUnavailable
from celery_lease.publishing import BrokerAway, LeaseConnections
from celery_lease.recording import BROKER_AWAY, recorded_in_the_end, submitted
from celery_lease.records import NewJob
from celery_lease.settings import PublishOnError, Settings
from celery_lease.store import transitions
from celery_lease.store.engine import Store

T = TypeVar("T")

#: Jobs in memory at once, and in one transaction.
BATCH = 500
#: Bytes of message bodies in a transaction, and one message more: MariaDB takes 16 MB in one
#: statement by default (``max_allowed_packet``), headers and all.
BATCH_BYTES = 4_000_000


class Batch:
    """The new jobs of one call, on their way.

    Args:
        producer: sends them.
        store: of the app, when it is first needed.
        settings: the app's settings.
        connections: the app's, for leased messages.
        submitter: who publishes, for the record.
    """

    def __init__(
        self,
        *,
        producer: Any,
        store: Callable[[], Store],
        settings: Settings,
        connections: LeaseConnections,
        submitter: str,
    ) -> None:
        self._producer = producer
        self._connections = connections if connections.serves(producer) else None
        self._store = store
        self._settings = settings
        self._submitter = submitter
        self._held: list[tuple[NewJob, Send]] = []
        self._bytes = 0
        self._is_broker_away = False

    def take(self, job: NewJob, send: Send) -> None:
        """Take a job; with an idempotency key it is recorded at once, since it may be no new one.

        Raises:
            StoreUnavailable: what is held is neither recorded nor sent.
            IdempotencyConflict: its key is held by a job with other arguments.
            JobExists: its key is held.
        """
        if self._is_broker_away:
            # One job has waited for it: the reaper sends these when it is back.
            job = replace(job, dispatched=False)
        if job.key is None:
            self._held.append((job, send))
            self._bytes += len(job.message.body)
            if len(self._held) >= BATCH or self._bytes >= BATCH_BYTES:
                self.flush()
            return
        is_new = self._in_the_end(job, lambda: submitted(self._store(), job))
        if is_new is not False:
            self._send([(job, send)], is_recorded=is_new is not None)

    def flush(self) -> None:
        """Record what is held, in one transaction, and send it.

        If the process dies in between, the reaper sends the rest (``lease_queued_timeout``).

        Raises:
            StoreUnavailable: none of it is known to be recorded, and none is sent.
        """
        held, self._held, self._bytes = self._held, [], 0
        if not held:
            return
        jobs = [job for job, _ in held]
        ids = self._in_the_end(jobs[0], lambda: transitions.submit_many(self._store(), jobs))
        # Of two with one id the first is recorded; the other one is that job.
        first: dict[str, tuple[NewJob, Send]] = {}
        for job, send in held:
            first.setdefault(job.job_id, (job, send))
        ours = [one for job_id, one in first.items() if ids is None or job_id in ids]
        for job, _ in ours:
            events.emit(events.JOB_SUBMITTED, job_id=job.job_id, task=job.task)
        self._send(ours, is_recorded=ids is not None)

    def _in_the_end(self, job: NewJob, record: Callable[[], T]) -> T | None:
        return recorded_in_the_end(
            record, job_id=job.job_id, settings=self._settings, submitter=self._submitter
        )

    def _send(self, taken: Sequence[tuple[NewJob, Send]], *, is_recorded: bool = True) -> None:
        is_first = is_recorded
        for position, (job, send) in enumerate(taken):
            if is_recorded and not job.dispatched:
                continue
            try:
                if is_first:
                    self._ask_breaker()
                    is_first = False
                send(self._producer, is_recorded=is_recorded)
            except Exception as error:
                events.emit(
                    events.PUBLISH_FAILED,
                    job_id=job.job_id,
                    worker=self._submitter,
                    reason=str(error),
                )
                if not is_recorded:
                    # Nobody would send them again.
                    raise
                # A time limit is of the body that publishes: it is told once.
                is_limit = isinstance(error, SoftTimeLimitExceeded)
                is_away = is_limit or self._connections is None or self._connections.is_away(error)
                is_wanted = is_limit or self._settings.publish_on_error is PublishOnError.RAISE
                if is_away or is_wanted:
                    # One that the broker has refused counts as sent, and is not in the way.
                    left = taken[position if is_away else position + 1 :]
                    self._give_back([job.job_id for job, _ in left])
                if is_wanted:
                    raise
                if is_away:
                    self._is_broker_away = True
                    return

    def _ask_breaker(self) -> None:
        if self._connections is not None and self._connections.breaker.is_open():
            raise BrokerAway(BROKER_AWAY)

    def _give_back(self, job_ids: Sequence[str]) -> None:
        try:
            transitions.undispatch_many(self._store(), job_ids)
        except StoreUnavailable as error:
            # Then they count as dispatched, and are sent again after lease_queued_timeout.
            events.emit(events.STORE_UNAVAILABLE, worker=self._submitter, reason=str(error))


@contextmanager
def batched(
    make: Callable[[Any], Batch], app: Any, producer: Any = None, *, group_id: str | None = None
) -> Iterator[Any]:
    """Have the new jobs of a call recorded and sent together; gives the producer to call with.

    In a call that is in a batch already nothing changes. After an error of the call what the
    batch holds is dropped: it is neither recorded nor sent.

    Args:
        make: makes a batch for a producer.
        app: the Celery app.
        producer: the caller's own, None for one of the app's pool.
        group_id: the group that is called: what else is submitted meanwhile, by the generator of
            its members or by who is told of a publish, is not of the batch.
    """
    if is_taken(app, group_id):
        yield producer
        return
    with app.producer_or_acquire(producer) as own:
        batch = make(own)
        with taken_by(batch, app=app, group_id=group_id):
            yield own
        batch.flush()


def batch_groups(maker_for: Callable[[Any], Callable[[Any], Batch] | None]) -> None:
    """Have each group of this process publish in batches; done once.

    Args:
        maker_for: gives what makes the batches of an app, None where it has no leased tasks.
    """
    plain = group.apply_async
    if getattr(plain, "is_lease_batch", False):
        return

    @functools.wraps(plain)
    def apply_async(
        self: Any,
        args: Any = None,
        kwargs: Any = None,
        add_to_parent: bool = True,  # noqa: FBT001, FBT002  Celery's signature
        producer: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        app = self.app
        make = None if app.conf.task_always_eager else maker_for(app)
        if make is None:
            return plain(self, args, kwargs, add_to_parent, producer, *more, **options)
        # Celery makes one of the id that it is given.
        group_id = options.get("task_id") or self.options.get("task_id") or uuid()
        options["task_id"] = group_id
        with batched(make, app, producer, group_id=group_id) as own:
            return plain(self, args, kwargs, add_to_parent, own, *more, **options)

    apply_async.is_lease_batch = True  # type: ignore[attr-defined]
    group.apply_async = apply_async
