"""``LeasedTask``: a delivery, step by step.

Both checks of the lease sit in ``__call__``, since Celery publishes callbacks and the next
chain step before it stores the result (celery-facts, section 2): before the body a refused
delivery ends in ``Ignore``, and between the body and the callbacks a stale outcome does.
``Ignore`` writes nothing, fires nothing and acknowledges; ``Reject`` would be a FAILURE in
Celery 5.7. No ``BaseException`` of ours ever leaves ``__call__``: it would kill a solo worker.

A user's own ``__call__`` (Flask's app-context pattern) becomes the body: every subclass gets
an entry of its own around it, whether or not it calls ``super()``.

The file is long because it is one walk: delivery, claim, body, end. Whoever checks that nothing
of ours leaves ``__call__`` has it before him whole.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar

from billiard.exceptions import TimeLimitExceeded
from celery import Signature, Task, signals
from celery.app.trace import task_has_custom
from celery.exceptions import Ignore, Reject, Retry
from celery.utils import uuid
from celery.utils.serialization import ensure_serializable
from kombu import serialization

from celery_lease import bookkeeping, events, interrupt
from celery_lease.adoption import adopted_job, check_id, unfit_jobs
from celery_lease.backoff import BY_ITSELF, UNCOUNTED_ENDS
from celery_lease.bulk import BATCH, batched
from celery_lease.calls import JobExists, Resend, may_exist, resending
from celery_lease.dispatch import ending_error, tell_cancelled
from celery_lease.enqueue import caller_for, enqueue
from celery_lease.exceptions import (
    BodyAborted,
    HandOver,
    IdempotencyConflict,
    JobUnfit,
    LeaseLost,
    PayloadTooLarge,
    ResultNotSerialisable,
    SettingError,
    StaleWrite,
    StoreError,
    StoreUnavailable,
)
from celery_lease.extension import (
    Extension,
    check_options,
    extension_of,
    install,
    is_leased,
    refuse_call_options,
)
from celery_lease.held_signals import hold, let_go
from celery_lease.keys import template_problem, unknown_fields
from celery_lease.lease import NULL_LEASE, Lease, current_lease, in_force
from celery_lease.messages import (
    DISPATCH_HEADER,
    RECORDED_HEADER,
    SETTLES_MARK,
    UNFIT_HEADER,
    VERSION_HEADER,
    dispatch_count_of,
    is_replay,
    seconds_until,
)
from celery_lease.outcomes import failure_of, type_name
from celery_lease.reaper import report_vanished
from celery_lease.records import (
    Absent,
    Accepted,
    ClaimAnswer,
    Failure,
    FinishAnswer,
    Late,
    NewJob,
    Outcome,
    Refused,
    Replay,
)
from celery_lease.runtime import Runtime
from celery_lease.settings import TaskSettings
from celery_lease.states import JobState, LateOutcome
from celery_lease.store import queries, transitions

logger = logging.getLogger(__name__)

#: Seconds before a job that its body gave back by ``Reject(requeue=True)``, or by ``Retry`` without
#: an instant to come, runs again: no delivery loop without a gap (B032).
REQUEUE_SECONDS = 1.0
#: A delivery that reaches a worker which stops is given back after so long, for another one.
STOPPING_SECONDS = 0.2
#: The pool counts the hard time limit from a moment before the delivery reached ``__call__``.
LIMIT_SLACK_SECONDS = 0.5
#: The module of the tasks that Celery adds to each app by itself. With ``task_cls`` they have our
#: class, and stay what they are: some wait for others, and their bodies are other tasks' (``map``).
_BUILT_IN = "celery.app.builtins"
#: Where a request keeps which ``__call__`` its delivery is in.
_ENTERED = "_lease_entered"
#: Where it keeps that the message of a retry leaves when Celery has stored the RETRY.
_PUT_OFF = "_lease_put_off"


def _entry(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` that runs another one as a leased body."""

    @functools.wraps(inner)
    def entry(self: LeasedTask, *args: Any, **kwargs: Any) -> Any:
        body = functools.partial(inner, self, *args, **kwargs)
        return _delivered(self, entry, body)

    entry.is_lease_entry = True  # type: ignore[attr-defined]
    return entry


class LeasedTask(Task):  # type: ignore[misc]  # Celery has no types
    """A Celery task whose jobs are never lost with a worker and never accepted twice.

    Use it as ``base=LeasedTask``, or derive your own base from it. Every option below is a
    class attribute or a decorator option, named like the setting it overrides.

    .. versionadded:: 0.1
    """

    abstract = True
    #: Not before the claim: until then a message can be given back (``lease_ack``).
    acks_late = True
    #: What the worker's main process does with a delivery of it.
    Request: Any = "celery_lease.request:LeaseRequest"

    lease_duration: ClassVar[float | None] = None
    lease_heartbeat_interval: ClassVar[float | None] = None
    lease_heartbeat_from: ClassVar[str | None] = None
    lease_max_attempts: ClassVar[int | None] = None
    lease_ack: ClassVar[str | None] = None
    lease_on_expiry: ClassVar[str | None] = None
    lease_interrupt: ClassVar[bool | None] = None
    lease_stall_timeout: ClassVar[float | None] = None
    lease_defer_after: ClassVar[float | None] = None
    lease_idempotency_key: ClassVar[bool | str | None] = None
    lease_idempotency_retention: ClassVar[float | None] = None
    lease_idempotency_conflict: ClassVar[str | None] = None

    _lease_protocol = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__:
            found = kind.__dict__.get("__call__")
            if found is not None:
                if not getattr(found, "is_lease_entry", False):
                    cls.__call__ = _entry(found)
                return

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind to an app, which adds celery-lease to it.

        Raises:
            SettingError: the task has a ``lease_…`` option that is not one, or a ``Request`` that
                is not derived from ``celery_lease.request.LeaseRequest``. One that is given by its
                name is looked at as a worker starts.
        """
        if cls.__module__ == _BUILT_IN:
            cls._lease_protocol = False
            cls.acks_late, cls.Request = (_without_leases(cls, n) for n in ("acks_late", "Request"))
            bound = super().bind(app)
            install(app)
            return bound
        bound = super().bind(app)
        problems = check_options(cls) + _template_problems(cls) + _request_problems(cls)
        if problems:
            raise SettingError([f"task {cls.name}: {problem}" for problem in problems])
        # An option, a setting or an annotation may have said otherwise: the claim needs a
        # message that can still be given back.
        cls.acks_late = True
        install(app)
        return bound

    @property
    def lease(self) -> Any:
        """The lease of the running body; outside of one, a null lease whose calls do nothing."""
        return current_lease()

    def apply_async(  # noqa: PLR0917  Celery's signature
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Record the job and publish its message; see ``celery.Task.apply_async``.

        With an idempotency key (``idempotency_key="…"``, 1 character or more, or made by
        ``lease_idempotency_key``) that a job of this task holds, nothing is sent.

        Returns:
            The ``AsyncResult`` of the job: of the existing one, if it holds the key. With a
            ``task_id``, as in a canvas, always of that id; a job under a held key then ends as
            the one that holds it.

        Raises:
            StoreUnavailable: nothing was recorded and nothing was sent.
            PayloadTooLarge: the message is over ``lease_max_message_bytes``.
            SettingError: a ``lease_…`` option was given, which a call does not take.
            IdempotencyConflict: the key is held by a job with other arguments.
        """
        if not self._lease_protocol:
            return super().apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, **options
            )
        refuse_call_options(self.name, options)
        if not (producer or options.get("publisher") or options.get("connection")):
            producer = extension_of(self.app).stand_in(self.name)
        named = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        options |= {name: value for name, value in named.items() if value is not None}
        # Celery gives ``parent_id`` with what it sends after a body: an error raised there would
        # make a failure of a parent that has succeeded.
        if task_id or options.get("parent_id"):
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        # Made here, so that this very publish is recognised.
        job_id = str(uuid())
        try:
            with may_exist(job_id):
                return super().apply_async(args, kwargs, task_id=job_id, **options)
        except JobExists as existing:
            self._forget_pending(job_id)
            return self.AsyncResult(existing.job_id)
        except IdempotencyConflict:
            self._forget_pending(job_id)
            raise

    def submit_many(
        self, calls: Iterable[Sequence[Any] | Signature], *, producer: Any = None, **options: Any
    ) -> list[Any]:
        """Submit many jobs of this task, recorded in a few statements.

        Args:
            calls: each the positional arguments of one, or a signature of this task, with
                arguments and options of its own. It may be a generator: a batch is read, recorded
                and sent before the next one is read.
            producer: a kombu producer, None for one of the app's pool.
            **options: for each of them, as of ``apply_async``; a signature's own win.

        Returns:
            The ``AsyncResult`` of each job, in the order of the calls.

        Raises:
            StoreUnavailable: the batch it happened in is not known to be recorded, and none of
                it was sent; earlier ones were.
            TypeError: a call is neither: nothing of its batch is recorded or sent.
            PayloadTooLarge: a message is over ``lease_max_message_bytes``: nothing of its batch
                is recorded or sent.
            IdempotencyConflict: a key is held by a job with other arguments; so there, too.

        .. versionadded:: 0.1
        """
        make = extension_of(self.app).batch
        left, results = iter(calls), []
        # Read before the batch begins: what a generator submits by itself is recorded at once.
        while some := [self._call_of(call) for call in islice(left, BATCH)]:
            own = producer or extension_of(self.app).stand_in(self.name)
            with batched(make, self.app, own) as own:
                results += [
                    call.apply_async(producer=own, **{**options, **call.options}) for call in some
                ]
        return results

    def _call_of(self, call: Sequence[Any] | Signature) -> Any:
        if isinstance(call, dict):
            if call.get("task") != self.name:
                raise TypeError(
                    f"submit_many() of {self.name} got a signature of {call.get('task')}: write "
                    "one of this task, or a group of them all"
                )
            return self.app.signature(call)
        if isinstance(call, list | tuple):
            return self.s(*call)
        raise TypeError(
            f"submit_many() of {self.name} got {call!r}: write a tuple of arguments, or a signature"
        )

    def enqueue(
        self,
        session: Any = None,
        args: Any = None,
        kwargs: Any = None,
        *,
        using: str | None = None,
        **options: Any,
    ) -> Any:
        """Record the job in a transaction of your own, and publish its message after the commit.

        After a rollback, to a savepoint as well, there is no job. The message leaves right after
        the commit: as the connection goes back to its pool, or begins its next transaction. If
        this process dies in between, or the broker is away, it leaves by a pass of the reaper.

        The database must be that of ``lease_store_url``. Neither the broker nor the result
        backend is used before the commit (``rpc://`` excepted). With ``task_always_eager`` the
        body runs at once, as with ``apply_async``.

        Args:
            session: an SQLAlchemy ``Session`` or ``Connection``.
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            using: the name of a database of Django's, instead of ``session``.
            **options: all that ``apply_async`` takes.

        Returns:
            The ``AsyncResult`` of the job, as ``apply_async``; its id is known before the commit.

        Raises:
            TypeError: ``session`` is something else.
            SettingError: the database is not the store's; Django is not installed.
            IdempotencyConflict: the key is held by a job with other arguments.
            PayloadTooLarge: the message is over ``lease_max_message_bytes``.
            StoreUnavailable: the store, asked beside the transaction, could not be used.

        Errors of the statements in your transaction are those of your database library.

        .. versionadded:: 0.1
        """
        return enqueue(self, caller_for(self, session, using), args, kwargs, options)

    def _forget_pending(self, task_id: str) -> None:
        """Stop listening for a result that will not come: Celery began before it published."""
        self.backend.remove_pending_result(self.AsyncResult(task_id))

    def retry(
        self, args: Any = None, kwargs: Any = None, exc: Any = None, *more: Any, **options: Any
    ) -> Any:
        """Retry the task as a new attempt of the same job; see ``celery.Task.retry``.

        The attempt is closed, with the new message version, before the message leaves; if the
        lease is lost nothing is published and ``Ignore`` is raised.
        """
        lease = _lease_of(self)
        if lease is None:
            return super().retry(args, kwargs, exc, *more, **options)
        if lease.ended_by is not None:
            raise Ignore(f"this attempt has ended already: {lease.ended_by}")
        extension = extension_of(self.app)
        resend = Resend(
            runtime=extension.runtime,
            lease=lease,
            kind=LateOutcome.RETRIED,
            failure=failure_of(exc) if isinstance(exc, BaseException) else Failure(),
            shielded=shielded,
        )
        with lease.uninterrupted(), resending(resend):
            try:
                return super().retry(args, kwargs, exc, *more, **options)
            except Reject:
                # Celery turns whatever the publish raised into a failure of the task.
                if isinstance(resend.error, StaleWrite | StoreUnavailable):
                    lease.ended_by = "lost"
                    raise Ignore(str(resend.error)) from resend.error
                raise
            finally:
                self.request_stack.top.__dict__[_PUT_OFF] = resend.is_put_off

    def on_replace(self, sig: Any) -> Any:
        """Replace the running task; the lease ends with the transition that fits."""
        lease = _lease_of(self)
        if lease is None:
            return super().on_replace(sig)
        with lease.uninterrupted():
            return self._replaced(lease, sig)

    def _replaced(self, lease: Lease, sig: Any) -> Any:
        extension = extension_of(self.app)
        runtime = extension.runtime
        first = _first_of(sig)
        # In a chain the rest of the chain follows the replacement, and is one canvas with it.
        if first.options.get("task_id") == lease.job_id and is_leased(
            self.app.tasks.get(first.task)
        ):
            resend = Resend(
                runtime=runtime,
                lease=lease,
                kind=LateOutcome.REPLACED,
                shielded=shielded,
                keeps_key=first.task == self.name,
            )
            with resending(resend):
                try:
                    sig.delay()
                except StaleWrite as error:
                    lease.ended_by = "lost"
                    raise Ignore(str(error)) from error
            raise Ignore("replaced")
        if not runtime.confirm(lease):
            runtime.heartbeat.remove(lease)
            lease.ended_by = "lost"
            runtime.reject(lease, Late(LateOutcome.REPLACED))
            raise Ignore("the lease is lost: nothing was published")
        sig.delay()
        runtime.finish(
            lease,
            lambda parting: transitions.replace_away(runtime.store, lease.held, parting),
            reason=LateOutcome.REPLACED.value,
            late=Late(LateOutcome.REPLACED),
            shielded=shielded,
        )
        lease.ended_by = "replace"
        raise Ignore("replaced")


def _first_of(sig: Any) -> Any:
    """Return what leaves first when a signature is sent: of a chain its first step."""
    while sig.get("subtask_type") == "chain" and sig.tasks:
        sig = sig.tasks[0]
    return sig


def _template_problems(cls: type[LeasedTask]) -> list[str]:
    """Say which arguments a task's template of keys names that the task does not have."""
    rule = cls.lease_idempotency_key
    if not isinstance(rule, str) or template_problem(rule):
        # What is no template is told with all that is wrong with the settings.
        return []
    return [
        f"lease_idempotency_key is {rule!r}: the task has no argument {name!r}"
        for name in unknown_fields(rule, cls.run)
    ]


def _without_leases(cls: type[LeasedTask], name: str) -> Any:
    """Return what a task's class has of an option, as if ``LeasedTask`` said nothing of it."""
    own = (vars(kind) for kind in cls.__mro__ if kind is not LeasedTask)
    return next(said[name] for said in own if name in said)


def _request_problems(cls: type[LeasedTask]) -> list[str]:
    """Say why a task's ``Request`` cannot be its; by a name it is looked up as a worker starts."""
    if isinstance(cls.Request, str):
        return []
    # It needs this module, and a program that only publishes needs neither.
    from celery_lease.request import request_problem  # noqa: PLC0415

    problem = request_problem(cls.Request)
    return [] if problem is None else [problem]


def _super_call(self: LeasedTask, *args: Any, **kwargs: Any) -> Any:
    return super(LeasedTask, self).__call__(*args, **kwargs)


# What comes after LeasedTask in the MRO of a task with several bases is the body.
LeasedTask.__call__ = _entry(_super_call)


def is_under_lease(request: Any) -> bool:
    """Tell whether a request is that of a delivery which came to a leased ``__call__``."""
    return _ENTERED in getattr(request, "__dict__", ())


def _lease_of(task: Task) -> Lease | None:
    """Return the lease under which this task's own body runs, None for any other call."""
    lease = current_lease()
    if isinstance(lease, Lease) and task.request.id == lease.job_id:
        return lease
    return None


def _delivered(task: LeasedTask, entry: Callable[..., Any], body: Callable[[], Any]) -> Any:
    """Run a body: under a lease when a worker delivers it, plainly otherwise."""
    request = task.request_stack.top
    entered = None if request is None else request.__dict__.get(_ENTERED)
    if entered is not None and len(task.request_stack) == 1 and entry not in entered:
        # A user's __call__ reaches this one by super(): the lease is in force already.
        entered.add(entry)
        try:
            return body()
        finally:
            entered.remove(entry)
    if (
        # The same one again: the body calls its own task.
        entered is not None
        or request is None
        or request.called_directly
        or request.is_eager
        or len(task.request_stack) != 1
        or not is_leased(task)
    ):
        with in_force(NULL_LEASE):
            return body()
    request.__dict__[_ENTERED] = {entry}
    return _Delivery(task, request).run(body)


class _Delivery:
    """One delivery of one job to this process."""

    def __init__(self, task: LeasedTask, request: Any) -> None:
        self._task = task
        self._request = request
        self.began_at = time.monotonic()
        self._extension: Extension = extension_of(task.app)
        self._settings: TaskSettings = self._extension.settings_for(task)
        self._runtime: Runtime = self._extension.runtime
        #: Why the body cannot run: its message, of another program, has what a job cannot.
        self._unfit: str | None = request.get(UNFIT_HEADER)

    def run(self, body: Callable[[], Any]) -> Any:
        """Claim, run the body, end the attempt, and give Celery what it is to publish."""
        if self._runtime.is_stopping:
            # What this worker hands over it must not take up again, while it still consumes.
            time.sleep(STOPPING_SECONDS)
            raise Reject("this worker stops", requeue=True)
        with _limits_held_back() as let_through:
            answer, lease = self._claimed()
            if isinstance(answer, Replay):
                return self._replay(answer.outcome)
            if lease is None:
                raise self._refused(answer)

            def limited_body() -> Any:
                let_through()
                if self._unfit is not None:
                    raise JobUnfit(f"job {lease.job_id} ({self._task.name}): {self._unfit}")
                return body()

            return _Attempt(self, lease).run(limited_body)

    @property
    def may_interrupt(self) -> bool:
        """Whether a lost lease interrupts the body."""
        return self._settings.interrupt

    # -- claim ---------------------------------------------------------------------------------

    def _claimed(self) -> tuple[ClaimAnswer, Lease | None]:
        try:
            return self._claim()
        except (Reject, JobUnfit):
            raise
        except Exception as error:
            # A mistake of ours, or a store that refuses us, is no failure of the job.
            logger.exception("lease.claim.failed job_id=%s", self._request.id)
            time.sleep(REQUEUE_SECONDS)
            raise Reject(error, requeue=True) from error

    def _claim(self) -> tuple[ClaimAnswer, Lease | None]:
        request = self._request
        # There is no job of such an id, and can be none: it is a failure as without a lease.
        check_id(request.id)
        version = request.get(VERSION_HEADER)
        try:
            answer, lease = self._ask(version if isinstance(version, int) else 1)
            if isinstance(answer, Absent) and not request.get(RECORDED_HEADER):
                self._adopt()
                answer, lease = self._ask(1)
        except StoreError as error:
            # Never run unclaimed, and nothing is lost: the message goes back to the broker.
            events.emit(
                events.STORE_UNAVAILABLE,
                job_id=request.id,
                worker=self._runtime.worker,
                reason=str(error),
            )
            raise Reject(error, requeue=True) from error
        return answer, lease

    def _ask(self, version: int) -> tuple[ClaimAnswer, Lease | None]:
        return self._runtime.claim(
            job_id=self._request.id,
            message_version=version,
            task_settings=self._settings,
            replay=is_replay(self._request.get(DISPATCH_HEADER)),
            dispatch_count=dispatch_count_of(self._request),
        )

    def _adopt(self) -> None:
        """Record a job whose publisher did not (another language, ``send_task`` elsewhere)."""
        task, request = self._task, self._request
        try:
            self._record(
                adopted_job(
                    task.app,
                    task,
                    request,
                    task_settings=self._settings,
                    limit=self._extension.settings.max_message_bytes,
                )
            )
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is: it comes from anywhere
            logger.warning("lease.message.unfit job_id=%s reason=%r", request.id, str(error))
            self._adopt_unfit(error)

    def _adopt_unfit(self, error: Exception) -> None:
        """Record a job that fails by what is wrong with its message: given back it would return.

        What the store does not record then either is no fault of this message's.
        """
        refused = error
        for make in unfit_jobs(self._task.app, self._task, self._request, error):
            try:
                self._record(make())
            except StoreError:
                raise
            except Exception as again:  # noqa: BLE001  there may be less to record
                refused = again
            else:
                self._unfit = f"{type(error).__name__}: {error}"
                return
        raise refused

    def _record(self, job: NewJob) -> None:
        if job.key is None:
            transitions.submit(self._runtime.store, job)
        else:
            transitions.submit_keyed(self._runtime.store, job)

    def _refused(self, answer: ClaimAnswer) -> Ignore:
        refusal = answer.refusal.value if isinstance(answer, Refused) else "pruned"
        owner = answer.owner if isinstance(answer, Refused) else None
        state = answer.state if isinstance(answer, Refused) else None
        events.emit(
            events.CLAIM_REFUSED,
            job_id=self._request.id,
            worker=self._runtime.worker,
            refusal=refusal,
            state=None if state is None else state.value,
            owner=owner,
            dispatch=self._request.get(DISPATCH_HEADER),
        )
        if isinstance(answer, Refused) and answer.vanished is not None:
            report_vanished(answer.vanished)
            self._extension.reaper().follow_up(answer.vanished)
        return Ignore(f"job {self._request.id} is not this delivery's to run: {refusal}")

    # -- replay --------------------------------------------------------------------------------

    def _replay(self, outcome: Outcome) -> Any:
        """Have Celery publish a stored outcome, without running the body."""
        if outcome.state is JobState.CANCELLED:
            self._tell_revoked(outcome)
            raise Ignore(f"job {self._request.id} was cancelled")
        self.settle_after(outcome.fencing_token, outcome.finished_at)
        if outcome.state is JobState.SUCCEEDED:
            return self._stored_result(outcome)
        if not outcome.by_attempt or outcome.result is None:
            raise ending_error(outcome, task=self._task.name)
        # Written by ``encode_error``, always JSON: nothing else is decoded, whatever the row says.
        meta = serialization.loads(
            outcome.result, "application/json", "utf-8", accept=["application/json"]
        )
        raise self._task.backend.exception_to_python(meta)

    def _tell_revoked(self, outcome: Outcome) -> None:
        """Tell Celery of a cancelled job, for which a task can return or raise nothing.

        Who cancelled it has done so already, unless it could not read the message.
        """
        request, task = self._request, self._task
        ignored = _is_result_ignored(task, request)
        try:
            error = ending_error(outcome, task=task.name)
            tell_cancelled(task.backend, request, error, store_result=not ignored)
        except Exception:
            # The result backend is away: a pass sends another message.
            logger.exception("lease.job.untold job_id=%s", request.id)
            return
        # At once: Celery 5.5 fails a chord as often as it is told, and another copy may wait.
        with suppress(StoreError):
            transitions.settle(
                self._runtime.store, [(request.id, outcome.fencing_token, outcome.finished_at)]
            )

    def _stored_result(self, outcome: Outcome) -> Any:
        if outcome.result is None:
            return None
        conf = self._task.app.conf
        return serialization.loads(
            outcome.result,
            outcome.result_type,
            "utf-8",
            accept=serialization.prepare_accept_content(
                conf.result_accept_content or conf.accept_content
            ),
        )

    def settle_after(self, fencing_token: int, finished_at: Any) -> None:
        """Settle this outcome once Celery has stored it and sent its callbacks."""
        self._request.__dict__[SETTLES_MARK] = (self._request.id, fencing_token, finished_at)
        if self._runtime.is_apart:
            bookkeeping.begin()


class _Attempt:
    """One attempt: the body under its lease, and what becomes of what it did."""

    def __init__(self, delivery: _Delivery, lease: Lease) -> None:
        self._delivery = delivery
        self._task = delivery._task  # noqa: SLF001  one role in two classes of this file
        self._request = delivery._request  # noqa: SLF001
        self._extension = delivery._extension  # noqa: SLF001
        self._runtime = delivery._runtime  # noqa: SLF001
        self._lease = lease
        #: What Celery is to see as the failure of the task, recorded as such.
        self._failed_by: BaseException | None = None

    def run(self, body: Callable[[], Any]) -> Any:
        """Return the body's value if it is this attempt's to give; raise what Celery is to see."""
        try:
            return self._tried(body)
        except _Ended as ended:
            self._send_put_off()
            raise ended.raises from ended.__cause__
        except Retry:
            # Celery stores it first: ``task_retry`` sends the message.
            raise
        except Exception as error:
            self._send_put_off()
            if error is self._failed_by or isinstance(error, Ignore | Reject | BodyAborted):
                raise
            # A mistake of ours is no outcome of the job.
            logger.exception("lease.attempt.failed job_id=%s", self._lease.job_id)
            self._give_up(error)
            raise Ignore("celery-lease failed: the job is given on") from error

    def _give_up(self, error: BaseException) -> None:
        """Have the job given on; a lease that stayed in the heartbeat would be renewed for ever."""
        try:
            self._runtime.surrender(self._lease, reason=f"celery-lease failed: {error}")
        except Exception:
            # It is out of the heartbeat by now: the lease runs out.
            logger.exception("lease.attempt.failed job_id=%s", self._lease.job_id)

    def _send_put_off(self) -> None:
        """Send the message of a retry that Celery will not hear of."""
        with suppress(StoreUnavailable):
            send_put_off(self._task, self._request)

    def _tried(self, body: Callable[[], Any]) -> Any:
        try:
            interruption = interrupt.here(
                self._lease.job_id,
                self._lease.fencing_token,
                is_wanted=self._delivery.may_interrupt,
            )
            with in_force(self._lease):
                value = self._lease.run(body, interruption)
            return self._returned(value)
        except _Ended:
            raise
        except Retry as error:
            raise self._retried(error) from error
        except Ignore as error:
            raise self._ignored(error) from error
        except Reject as error:
            raise self._rejected(error) from error
        except (LeaseLost, HandOver) as error:
            # Raised on, a BaseException of ours would end a solo worker.
            raise self._interrupted(error) from None
        except Exception as error:
            self._raised(error)
            self._failed_by = error
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            self._torn_down(error)
            raise
        except BaseException as error:
            self._raised(error)
            raise BodyAborted(type_name(error), str(error)) from error

    # -- what the body did ---------------------------------------------------------------------

    def _returned(self, value: Any) -> Any:
        if self._lease.ended_by is not None:
            # ``retry(throw=False)``: the attempt ended with the retry, whatever was returned.
            raise _Ended(Ignore(f"this attempt has ended already: {self._lease.ended_by}"))
        result, content_type = encode_result(
            self._task, self._request, value, self._extension.settings.max_result_bytes
        )
        late = Late(LateOutcome.SUCCEEDED, result, _digest(result))
        told = self._is_told(("callbacks", "chain", "chord"), ("on_success", "after_return"))
        answer = self._finish(
            lambda parting: transitions.complete(
                self._runtime.store,
                self._lease.held,
                parting,
                result=result,
                result_type=content_type,
                settled=told,
            ),
            reason=None,
            late=late,
        )
        if not isinstance(answer, Accepted) or answer.finished_at is None:
            raise _Ended(Ignore("the lease was lost: this result is kept and not accepted"))
        if not told:
            self._delivery.settle_after(self._lease.fencing_token, answer.finished_at)
        return value

    def _is_told(self, followers: tuple[str, ...], hooks: tuple[str, ...]) -> bool:
        """Tell whether an end is known to Celery as soon as it is in the store.

        So it is where the store is Celery's result backend (``backend``), nothing follows the job,
        and the user's task has no hook that a replay would have to call.
        """
        return (
            getattr(self._task.backend, "is_lease_store", False)
            and not any(getattr(self._request, name, None) for name in followers)
            and not any(task_has_custom(self._task, name) for name in hooks)
        )

    def _raised(self, error: BaseException) -> None:
        """Record a failure of the body; raises ``Ignore`` when it is not this attempt's to say."""
        if self._lease.ended_by is not None:
            raise Ignore(f"this attempt has ended already: {self._lease.ended_by}") from error
        told = self._is_told(("errbacks", "chain", "chord"), ("on_failure", "after_return"))
        answer = self._fail(error, settled=told)
        if answer.finished_at is None:
            # It was accepted, and an operator has resumed the job since: it is not its outcome.
            raise Ignore("this failure is no longer the job's outcome") from error
        if not told:
            self._delivery.settle_after(self._lease.fencing_token, answer.finished_at)

    def _fail(self, error: BaseException, *, settled: bool) -> Accepted:
        failure = failure_of(error)
        meta = encode_error(self._task, error)
        answer = self._finish(
            lambda parting: transitions.fail(
                self._runtime.store,
                self._lease.held,
                parting,
                error=meta,
                error_content_type="application/json",
                settled=settled,
            ),
            reason=failure.failure_class,
            failure=failure,
            late=Late(LateOutcome.FAILED, failure=failure),
        )
        if not isinstance(answer, Accepted):
            raise Ignore("the lease was lost: this failure is kept and not accepted") from error
        return answer

    def _retried(self, error: Retry) -> Any:
        if self._lease.ended_by == LateOutcome.RETRIED.value:
            return error
        if self._lease.ended_by is not None:
            return Ignore(f"this attempt has ended already: {self._lease.ended_by}")
        # A bare ``Retry`` publishes nothing in Celery: give the job back, due when it says.
        self._release("retry", delay_seconds=_seconds_of(error.when))
        return error

    def _ignored(self, error: Ignore) -> Any:
        if self._lease.ended_by is not None:
            return error
        answer = self._finish(
            lambda parting: transitions.complete(
                self._runtime.store,
                self._lease.held,
                parting,
                result=None,
                result_type=None,
                settled=True,
            ),
            reason="ignored",
            late=Late(LateOutcome.SUCCEEDED),
        )
        return error if isinstance(answer, Accepted) else Ignore("the lease was lost")

    def _rejected(self, error: Reject) -> Any:
        if self._lease.ended_by is not None:
            return Ignore(f"this attempt has ended already: {self._lease.ended_by}")
        if error.requeue:
            self._release("rejected", delay_seconds=REQUEUE_SECONDS)
            return Ignore("given back")
        cause = error.reason if isinstance(error.reason, BaseException) else error
        try:
            self._fail(cause, settled=True)
        except Ignore as stale:
            return stale
        return error

    def _interrupted(self, error: BaseException) -> Any:
        if isinstance(error, HandOver):
            self._release("hand-over")
            return Ignore("handed over")
        self._runtime.surrender(self._lease, reason=str(error))
        return Ignore(str(error))

    def _torn_down(self, error: BaseException) -> None:
        """End the attempt of a body under which its process ends."""
        if self._lease.ended_by is not None:
            return
        # Where the store is away the lease runs out instead; the exit goes on either way.
        with suppress(_Ended, Ignore):
            if is_signal_exit(error):
                limit = self._hard_limit_passed()
                if limit is not None:
                    # The main process says the same; whoever is first, Celery is told once.
                    self._fail(TimeLimitExceeded(limit), settled=False)
                    return
                if self._runtime.link.is_stop(self._lease):
                    self._release("stopped")
                    return
        self._runtime.surrender(self._lease, reason=f"{type(error).__name__}: {error}")

    def _hard_limit_passed(self) -> float | None:
        """Return the hard time limit that this attempt has passed, None if it has not."""
        limits = self._request.timelimit or (None, None)
        limit = limits[0] or self._task.time_limit
        if not limit or time.monotonic() < self._delivery.began_at + limit - LIMIT_SLACK_SECONDS:
            return None
        return float(limit)

    # -- ends ----------------------------------------------------------------------------------

    def _finish(
        self,
        transition: Callable[[transitions.Parting], FinishAnswer],
        *,
        reason: str | None,
        late: Late,
        failure: Failure | None = None,
    ) -> FinishAnswer:
        try:
            return self._runtime.finish(
                self._lease,
                transition,
                reason=reason,
                failure=failure,
                late=late,
                shielded=shielded,
            )
        except StoreUnavailable as error:
            # The outcome could not be recorded, so Celery must not hear of it either: the
            # reaper gives the job on.
            raise _Ended(Ignore(str(error))) from error
        except Exception as error:
            logger.exception("lease.attempt.failed job_id=%s", self._lease.job_id)
            raise _Ended(Ignore("celery-lease failed: the job is given on")) from error

    def _release(self, reason: str, *, delay_seconds: float = 0.0) -> None:
        if reason not in BY_ITSELF and self._released_too_often():
            # Given back again and again, it would go round for ever: from now on it counts.
            self._runtime.surrender(self._lease, reason=f"{reason}, too often")
            return
        answer = self._finish(
            lambda parting: transitions.release(
                self._runtime.store, self._lease.held, parting, delay_seconds=delay_seconds
            ),
            reason=reason,
            late=Late(LateOutcome.RELEASED),
        )
        if isinstance(answer, Accepted):
            events.emit(
                events.JOB_RELEASED,
                job_id=self._lease.job_id,
                fencing_token=self._lease.fencing_token,
                worker=self._runtime.worker,
                reason=reason,
            )
            if not delay_seconds:
                self._extension.reaper().send_now(self._lease.job_id)

    def _released_too_often(self) -> bool:
        try:
            count = queries.uncounted_ends(self._runtime.store, self._lease.job_id)
        except StoreUnavailable:
            return False
        return count >= UNCOUNTED_ENDS


def _seconds_of(when: Any) -> float:
    """Return how long a bare ``Retry`` waits: by a number of seconds, or until an instant."""
    try:
        said = float(when if isinstance(when, int | float) else seconds_until(when) or 0.0)
    except (TypeError, ValueError, AttributeError):
        # It is the body's, and may be anything.
        said = 0.0
    return said if 0.0 < said < math.inf else REQUEUE_SECONDS


class _Ended(Exception):
    """Raised inside an attempt that has ended; carries what Celery is to see."""

    def __init__(self, raises: Exception) -> None:
        self.raises = raises
        super().__init__(str(raises))


def encode_result(
    task: LeasedTask, request: Any, value: Any, limit: int
) -> tuple[bytes | None, str | None]:
    """Return a result as bytes and their content type; (None, None) when nobody asks for it.

    Raises:
        ResultNotSerialisable: the result serializer cannot encode it, and somebody asks.
        PayloadTooLarge: it is over ``lease_max_result_bytes``.
    """
    followed = bool(request.callbacks or request.chain or request.chord)
    ignored = _is_result_ignored(task, request)
    if (ignored and not followed) or value is None:
        return None, None
    serializer = getattr(task.backend, "serializer", None) or task.app.conf.result_serializer
    try:
        # A result object among them, as Celery's own backends store it.
        value = task.backend.prepare_value(value)
        content_type, _, payload = serialization.dumps(value, serializer)
    except Exception as error:
        if _is_disabled(task.backend) and not followed:
            return None, None
        raise ResultNotSerialisable(task.name, serializer, str(error)) from error
    encoded = payload.encode() if isinstance(payload, str) else bytes(payload)
    if len(encoded) > limit:
        raise PayloadTooLarge("result", len(encoded), limit, "lease_max_result_bytes", task.name)
    return encoded, content_type


def _is_result_ignored(task: LeasedTask, request: Any) -> bool:
    said = request.ignore_result
    return bool(task.ignore_result if said is None else said)


def _is_disabled(backend: Any) -> bool:
    return type(backend).__name__ == "DisabledBackend"


def encode_error(task: LeasedTask, error: BaseException) -> bytes:
    """Return an exception as Celery's JSON backends keep it."""
    meta = task.backend.prepare_exception(error, serializer="json")
    try:
        return str(serialization.dumps(meta, "json")[2]).encode()
    except Exception:  # noqa: BLE001  whatever the arguments are: they may be anything
        # Celery has asked its own serializer, which may be pickle, whether they can be kept.
        meta = {**meta, "exc_message": ensure_serializable(error.args, _encode_json)}
        return str(serialization.dumps(meta, "json")[2]).encode()


def _encode_json(value: object) -> object:
    return serialization.dumps(value, "json")


def _digest(result: bytes | None) -> str | None:
    return None if result is None else f"sha256:{hashlib.sha256(result).hexdigest()}"


def is_signal_exit(error: BaseException) -> bool:
    """Tell a SystemExit that a stop signal raised from one that the body asked for.

    billiard's handler exits with ``-(256 - signum)`` (billiard 4.2 to 4.3, ``common.py``);
    Celery's own, in a solo or threads worker, raises its ``WorkerShutdown`` kinds.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, SystemExit):
        return False
    if type(error) is not SystemExit:
        return True
    return isinstance(error.code, int) and -256 < error.code < -128  # noqa: PLR2004


def shielded(call: Callable[[], Any]) -> Any:
    """Run a call with the soft time limit's signal held back, and dropped afterwards.

    Delivered during the commit it would split the books: succeeded here, FAILURE in Celery
    (celery-facts, section 6). The body is over, so there is nothing left to limit.
    """
    with _limits_held_back():
        return call()


@contextmanager
def _limits_held_back() -> Iterator[Callable[[], None]]:
    """Hold the soft time limit's signal back, and drop it, until the function given is called.

    Delivered during a claim it would end in Celery as a FAILURE, with errbacks, of a job that
    is still queued. Held back it strikes as the body begins; a refused delivery has none.
    """
    limits = {signal.SIGUSR1}
    is_held = hold(limits)

    def let_through() -> None:
        nonlocal is_held
        if is_held:
            is_held = False
            let_go(limits)

    try:
        yield let_through
    finally:
        if is_held:
            let_go(limits, dropped=limits)


def _settle(sender: Any = None, **_: Any) -> None:
    """Settle an outcome that Celery has stored, with its callbacks sent."""
    if not is_leased(sender):
        return
    request = sender.request
    outcome = request.__dict__.pop(SETTLES_MARK, None)
    # An unsent body is sent by a replay of this part, and of no other.
    if outcome is not None and bookkeeping.wait_for_chord(sender.backend, request.group):
        extension_of(sender.app).runtime.settle_later(outcome)


def send_put_off(task: Any, request: Any) -> None:
    """Send the message of a retry that was put off; a pass of the reaper is the fallback."""
    if request.__dict__.pop(_PUT_OFF, False):
        extension_of(task.app).reaper().send_now(request.id)


def _retried(sender: Any = None, request: Any = None, **_: Any) -> None:
    if is_leased(sender):
        send_put_off(sender, request)


signals.task_retry.connect(_retried, weak=False)
signals.task_success.connect(_settle, weak=False)
signals.task_failure.connect(_settle, weak=False)
