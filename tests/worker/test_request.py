"""A delivery as the main process sees it: what it says to the broker, and what to the store.

What the store makes of that is in ``tests/faults``; here nothing but the request is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.worker import state
from kombu.message import Message

from celery_lease import LeasedTask, endings, revocation
from celery_lease.claims import Answer, Claim
from celery_lease.extension import Extension, extension_of
from celery_lease.messages import DISPATCH_HEADER, RECORDED_HEADER
from celery_lease.records import Held
from celery_lease.request import LeaseRequest
from celery_lease.stopping import StopFlag
from celery_lease.worker import EARLY_SECONDS, MOST_EARLY, MOST_OWNERS, WorkerClaims

PID = 4711
CLAIM = Claim("job", 3, f"host:{PID}:x", PID, 30.0, 10.0)
HELD = Held("job", 3, f"host:{PID}:x")


class Broker:
    """What a message's acknowledgement goes to."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_ack(self, *_: Any) -> None:
        """Take it."""
        self.told.append("ack")

    def on_reject(self, _logger: Any, _errors: Any, requeue: bool) -> None:  # noqa: FBT001
        """Take it back."""
        self.told.append("requeue" if requeue else "reject")


class Pool:
    """A pool that can stop a body, or cannot."""

    def __init__(self, error: Exception | None = None) -> None:
        self.terminated: list[int] = []
        self._error = error

    def terminate_job(self, pid: int, _signal: int) -> None:
        """Stop it."""
        if self._error is not None:
            raise self._error
        self.terminated.append(pid)


@pytest.fixture
def app(sqlite_url: str) -> Iterator[Celery]:
    """An app in a worker whose thread only collects what it is told."""
    app = Celery("requests", broker="memory://", set_as_current=False)
    app.conf.update(lease_store_url=sqlite_url, task_acks_on_timeout=False)

    @app.task(base=LeasedTask, name="work", shared=False)
    def work() -> None: ...

    @app.task(base=LeasedTask, name="late", shared=False, lease_ack="late")
    def late() -> None: ...

    extension = extension_of(app)
    extension.claims = WorkerClaims()
    extension.stop_flag = StopFlag()
    extension.worker_thread = SimpleNamespace(words=[])  # type: ignore[assignment]
    extension.worker_thread.tell = extension.worker_thread.words.append  # type: ignore[union-attr, method-assign]
    yield app
    extension.stop_flag.close()
    extension.worker_thread = None
    state.reset_state()


@pytest.fixture
def extension(app: Celery) -> Extension:
    """Its extension."""
    return extension_of(app)


@pytest.fixture
def broker() -> Broker:
    """The broker that the message came from."""
    return Broker()


@pytest.fixture
def make_request(app: Celery, broker: Broker) -> Callable[..., LeaseRequest]:
    """Make a delivery: ``make_request("work")``; ``is_recorded=False`` for a stranger's."""

    def make(name: str = "work", *, is_recorded: bool = True) -> LeaseRequest:
        made = app.amqp.as_task_v2("job", name, (), {})
        headers = {**made.headers, DISPATCH_HEADER: "job:1:2"}
        if is_recorded:
            headers[RECORDED_HEADER] = True
        message = Message(
            body=json.dumps(made.body),
            content_type="application/json",
            content_encoding="utf-8",
            headers=headers,
            properties=made.properties,
            delivery_info={},
        )
        return LeaseRequest(
            message,
            on_ack=broker.on_ack,
            on_reject=broker.on_reject,
            hostname="worker@test",
            app=app,
            task=app.tasks[name],
            connection_errors=(),
        )

    return make


def accept(request: LeaseRequest) -> LeaseRequest:
    """Have the pool say that a child has begun with it."""
    request.on_accepted(PID, time.monotonic())
    return request


def words(extension: Extension) -> list[str]:
    """Return what the store is to be told: a function's name each."""
    return [word.func.__name__ for word in _words(extension)]


def _words(extension: Extension) -> list[Any]:
    return extension.worker_thread.words  # type: ignore[union-attr, no-any-return]


def said(error: BaseException) -> ExceptionInfo:
    """Return an exception as the pool hands it over."""
    try:
        raise error  # noqa: TRY301  it needs a traceback
    except BaseException:
        return ExceptionInfo()


LOST = WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL) Job: 1.")


# --- the claim ------------------------------------------------------------------------------------


def test_a_claim_acknowledges_once_and_looks_unacknowledged_to_celery(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """``acknowledged`` would have a cold shutdown wait for the body (celery-facts, section 5)."""
    request = accept(make_request())
    assert broker.told == []
    assert extension.claims is not None

    answers = [extension.claims.heard(CLAIM) for _ in range(2)]

    assert answers == [Answer("job", 3, acknowledged=True)] * 2
    assert (broker.told, request.acknowledged) == (["ack"], False)
    request.acknowledge()
    request.acknowledge()
    assert (broker.told, request.acknowledged) == (["ack"], True)


def test_a_claim_that_is_heard_before_the_delivery_is_accepted_waits_for_it(
    make_request: Callable[..., LeaseRequest],
    broker: Broker,
    extension: Extension,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ways from the child, and either may be the faster."""
    request = make_request()
    monkeypatch.setattr(state, "requests", {"job": request})
    answered: list[Any] = []
    assert extension.claims is not None
    extension.claims.socket = SimpleNamespace(answer=lambda *said: answered.append(said))  # type: ignore[assignment]

    assert extension.claims.heard(CLAIM) is None
    assert broker.told == []
    accept(request)

    assert broker.told == ["ack"]
    assert answered == [(Answer("job", 3, acknowledged=True), PID)]


def test_a_claim_that_was_heard_long_before_is_of_an_earlier_delivery(
    make_request: Callable[..., LeaseRequest],
    broker: Broker,
    extension: Extension,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = make_request()
    monkeypatch.setattr(state, "requests", {"job": request})
    assert extension.claims is not None
    extension.claims.heard(CLAIM)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + EARLY_SECONDS + 1)

    accept(request)

    assert broker.told == []


def test_the_claim_of_another_child_is_not_this_deliverys(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """The same job may be delivered twice to one worker: one of the two was refused."""
    accept(make_request())
    other = Claim("job", 3, "host:1:x", PID + 1, 30.0, 10.0)
    assert extension.claims is not None

    assert extension.claims.heard(other) is None

    assert broker.told == []


def test_claims_that_no_delivery_takes_are_not_kept_for_ever(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.claims is not None
    names = [f"job{number}" for number in range(MOST_EARLY + 10)]
    monkeypatch.setattr(state, "requests", dict.fromkeys(names))
    for name in names:
        extension.claims.heard(Claim(name, 1, "o", PID, 30.0, 10.0))

    assert len(extension.claims._early) == MOST_EARLY


def test_the_claim_of_an_attempt_that_has_ended_is_not_taken_for_the_jobs_next_one(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """A short attempt may be over when the word of its claim is read."""
    assert extension.claims is not None
    assert extension.claims.heard(CLAIM) is None

    accept(make_request())

    assert broker.told == []


def test_with_late_acknowledgement_a_claim_says_nothing_to_the_broker(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    request = accept(make_request("late"))
    assert extension.claims is not None

    assert extension.claims.heard(CLAIM) == Answer("job", 3, acknowledged=False)

    assert broker.told == []
    request.acknowledge()
    assert broker.told == ["ack"]


def test_what_was_acknowledged_cannot_be_given_back(
    make_request: Callable[..., LeaseRequest], broker: Broker
) -> None:
    request = accept(make_request())
    request.on_claimed(CLAIM)

    request.reject(requeue=True)

    assert (broker.told, request.acknowledged) == (["ack"], True)


def test_the_latest_children_are_known_by_their_names(extension: Extension) -> None:
    """Their deaths are left to the pool for a moment, which knows how they died."""
    claims = extension.claims
    assert claims is not None
    for number in range(MOST_OWNERS + 10):
        claims.heard(Claim("job", 1, f"host:{number}:x", PID, 30.0, 10.0))

    assert not claims.has_heard_of("host:0:x")
    assert claims.has_heard_of(f"host:{MOST_OWNERS}:x")


# --- a child that is gone -------------------------------------------------------------------------


def test_a_dead_child_is_told_to_the_store_once_and_not_to_celery(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    request = accept(make_request())
    request.on_claimed(CLAIM)

    for _ in range(2):
        request.on_failure(said(LOST))

    assert broker.told == ["ack"]
    assert words(extension) == ["runner_lost"]
    gone = _words(extension)[0].keywords["gone"]
    assert (gone.lease, gone.pid, gone.dispatch_count) == (HELD, PID, 2)
    assert gone.reason == "Worker exited prematurely: signal 9 (SIGKILL)"
    assert not gone.is_stopping
    assert request not in state.active_requests


def test_a_hard_time_limit_that_is_said_twice_is_one(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """Celery 5.7: ``on_failure``, then ``on_timeout`` (celery-facts, section 4)."""
    request = accept(make_request())
    request.on_claimed(CLAIM)

    request.on_failure(said(TimeLimitExceeded(7)))
    request.on_timeout(soft=False, timeout=7)

    assert (broker.told, words(extension)) == (["ack"], ["limit_exceeded"])


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_child_that_dies_before_its_claim_leaves_the_job_to_the_store_if_it_knows_it(
    is_recorded: bool,  # noqa: FBT001
    make_request: Callable[..., LeaseRequest],
    broker: Broker,
    extension: Extension,
) -> None:
    request = accept(make_request(is_recorded=is_recorded))

    request.on_failure(said(LOST))

    assert broker.told == (["ack"] if is_recorded else ["requeue"])
    assert words(extension) == ["runner_lost"]


def test_what_a_child_had_told_before_it_died_is_settled_first(
    make_request: Callable[..., LeaseRequest], extension: Extension
) -> None:
    """It settles what it told within a second: the main process does it for the dead."""
    first = accept(make_request())
    first.on_claimed(CLAIM)
    first.acknowledge()
    state.task_ready(first)
    second = accept(make_request())

    second.on_failure(said(LOST))

    assert words(extension) == ["settle_told", "runner_lost"]


def test_what_a_child_had_told_is_settled_though_its_last_job_was_revoked(
    make_request: Callable[..., LeaseRequest], extension: Extension
) -> None:
    """Told once more, an unleased callback of the job before would run twice."""
    first = accept(make_request())
    first.on_claimed(CLAIM)
    first.acknowledge()
    state.task_ready(first)
    second = accept(make_request())
    second._already_revoked = True

    second.on_failure(said(LOST))

    assert words(extension) == ["settle_told"]


def test_a_child_that_was_revoked_is_told_by_the_revocation(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    request = accept(make_request())
    request._already_revoked = True

    request.on_failure(said(LOST))

    assert (broker.told, words(extension)) == (["ack"], [])


def test_a_terminated_body_is_ended_as_revoked_only_if_the_store_has_not_moved_on(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """A worker that hears it late may have killed the body of a resumed job: that one goes on."""
    request = accept(make_request())
    request.on_claimed(CLAIM)
    pool = Pool()

    request.terminate(pool)
    request.on_failure(said(LOST))

    assert pool.terminated == [PID]
    first, lost = _words(extension)
    assert (first.func, first.keywords) == (revocation.end_first, {"job_id": "job"})
    assert lost.func is endings.runner_lost
    assert (lost.keywords["gone"].lease, lost.keywords["gone"].dispatch_count) == (HELD, 2)


def test_an_exit_of_a_child_that_was_cancelled_is_left_unacknowledged(
    make_request: Callable[..., LeaseRequest], broker: Broker, extension: Extension
) -> None:
    """Celery's own way with a late acknowledgement: the broker gives it out again."""
    request = accept(make_request("late"))
    request._already_cancelled = True

    request.on_failure(said(SystemExit(-241)))

    assert (broker.told, words(extension)) == ([], [])


def test_an_exit_of_a_child_that_was_cancelled_ends_the_renewals_of_its_lease(
    make_request: Callable[..., LeaseRequest], extension: Extension
) -> None:
    forgotten: list[object] = []
    extension.worker_heartbeat = SimpleNamespace(  # type: ignore[assignment]
        watch=lambda _: None, forget=lambda *key: forgotten.append(key)
    )
    request = accept(make_request("late"))
    request.on_claimed(replace(CLAIM, from_worker=True))
    request._already_cancelled = True

    request.on_failure(said(SystemExit(-241)))

    assert forgotten == [("job", 3)]
    extension.worker_heartbeat = None


def test_a_worker_begins_anew_in_a_process_that_had_one(extension: Extension) -> None:
    """An embedded worker that is started again must not hear the stop of the first."""
    extension.begin_worker()
    first, flag, claims = extension.runtime, extension.stop_flag, extension.claims
    assert flag is not None
    flag.set()
    assert first.is_stopping

    extension.begin_worker()

    assert extension.runtime is not first
    assert not extension.runtime.is_stopping
    assert extension.claims is not claims
    flag.close()


def test_a_loss_during_a_stop_says_so(
    make_request: Callable[..., LeaseRequest], extension: Extension
) -> None:
    request = accept(make_request())
    request.on_claimed(CLAIM)
    assert extension.stop_flag is not None
    extension.stop_flag.set()

    assert request._gone(LOST).is_stopping


@pytest.mark.parametrize("error", [MemoryError("much"), TimeLimitExceeded(7), LOST], ids=repr)
def test_an_error_that_a_living_child_told_is_one_like_any_other(
    error: BaseException,
    make_request: Callable[..., LeaseRequest],
    broker: Broker,
    extension: Extension,
) -> None:
    """Celery ends the main process, or redelivers for ever: ``task_acks_on_timeout`` is False."""
    request = accept(make_request("late"))

    request.on_failure(said(error), return_ok=True)

    assert (broker.told, words(extension)) == (["ack"], [])


# --- a stop ---------------------------------------------------------------------------------------


def test_a_lost_connection_cancels_no_body_that_was_acknowledged(
    make_request: Callable[..., LeaseRequest], extension: Extension
) -> None:
    """B021; the stop of a worker does."""
    request, pool = accept(make_request()), Pool()
    request.on_claimed(CLAIM)

    request.cancel(pool)
    assert pool.terminated == []
    assert extension.stop_flag is not None
    extension.stop_flag.set()
    request.cancel(pool)

    assert pool.terminated == [PID]


def test_a_pool_that_cannot_stop_a_body_has_it_go_on(
    make_request: Callable[..., LeaseRequest],
) -> None:
    """Solo: raised in the signal's handler it would be the body's failure."""
    request = accept(make_request("late"))

    request.cancel(Pool(NotImplementedError("solo")))

    assert not request._already_cancelled


def test_a_lease_that_its_child_has_given_up_is_renewed_no_more(
    extension: Extension, make_request: Callable[..., LeaseRequest]
) -> None:
    said: list[object] = []
    extension.worker_heartbeat = SimpleNamespace(  # type: ignore[assignment]
        watch=said.append, forget=lambda *key: said.append(key)
    )
    request = make_request()
    held = replace(CLAIM, from_worker=True)

    request.on_claimed(held)
    request.on_claimed(CLAIM)

    assert said == [held, ("job", 3)]
    extension.worker_heartbeat = None
