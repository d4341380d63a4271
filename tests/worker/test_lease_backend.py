"""``result_backend = "lease://"``: what Celery expects of a result backend, on each database.

The list of what must hold is that of Celery's own suite (``t/unit/backends``, ``test_base.py`` and
``test_database.py``); here no worker runs. With workers: ``test_lease_backend_worker.py``.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group
from celery.app.task import Context
from celery.contrib.abortable import AbortableAsyncResult
from celery.exceptions import ChordError, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import AsyncResult, GroupResult

from celery_lease import JobInterrupted, LeasedTask, SettingError
from celery_lease import backend as backend_module
from celery_lease.backend import (
    CHORD_CLAIM_SECONDS,
    CHORD_WAIT_SECONDS,
    FIRST_PAUSE_SECONDS,
    LeaseBackend,
)
from celery_lease.extension import extension_of
from celery_lease.lease import Lease, in_force
from celery_lease.reaper import PublishFailed
from celery_lease.records import Claimed, Failure
from celery_lease.states import LossCause
from celery_lease.store import queries, results, transitions
from celery_lease.store.transitions.results import FORGOTTEN
from celery_lease.task import encode_error
from tests.store.builders import again, claimed, parting, submitted
from tests.support.databases import new_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_lease.records import Held
    from celery_lease.store.engine import Store

_numbers = itertools.count(1)


class Trouble(Exception):
    """An error of the user's, with arguments that JSON can hold."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of each kind for all tests of this module: each has ids of its own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('backend') / 'lease.db'}"
        return
    with new_database(request.getfixturevalue(request.param).url) as found:
        yield found


@pytest.fixture
def make_app(url: str) -> Iterator[Callable[..., Celery]]:
    """Make apps on that database."""
    made = []

    def make(**conf: Any) -> Celery:
        app = Celery("backend", broker="memory://", backend="lease://", set_as_current=False)
        # A queue of its own, which kombu's memory:// has for all apps: what is published is read.
        app.conf.update(lease_store_url=url, task_default_queue=f"queue{next(_numbers)}", **conf)

        @app.task(name="plain", shared=False)
        def plain(*_: Any) -> None: ...

        @app.task(name="leased", base=LeasedTask, shared=False)
        def leased(*_: Any) -> None: ...

        @app.task(name="errback", shared=False)
        def errback(task_id: str) -> None: ...

        made.append(app)
        return app

    yield make
    for app in made:
        extension_of(app).raw_store.close()
        app.close()


@pytest.fixture
def app(make_app: Callable[..., Celery]) -> Celery:
    return make_app()


@pytest.fixture
def backend(app: Celery) -> LeaseBackend:
    return app.backend


@pytest.fixture
def store(app: Celery) -> Store:
    return extension_of(app).store


@pytest.fixture
def tid() -> str:
    return str(uuid.uuid4())


def request_of(task_id: str, task: str = "plain", **more: Any) -> Context:
    return Context({"id": task_id, "task": task, "delivery_info": {}, **more})


def held(store: Store, job_id: str) -> Held:
    """Record a job of the leased task and claim it."""
    submitted(store, job_id, task="leased")
    return claimed(store, job_id)


def succeed(store: Store, lease: Held, result: bytes | None = b"42", **more: Any) -> None:
    kind = None if result is None else "application/json"
    said = parting(more.pop("reason", None))
    transitions.complete(store, lease, said, result=result, result_type=kind, **more)


def fail(app: Celery, store: Store, lease: Held, error: Exception) -> None:
    failure = Failure("builtins.ValueError", str(error), traceback="Traceback of the body")
    meta = encode_error(app.tasks["leased"], error)
    said = parting("error", failure=failure)
    transitions.fail(store, lease, said, error=meta, error_content_type="application/json")


def raised_by(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


# --- the way to it ------------------------------------------------------------------------------


def test_its_url_finds_it(app: Celery) -> None:
    assert type(app.backend) is LeaseBackend
    assert app.backend.as_uri() == app.backend.as_uri(include_password=True) == "lease://"


def test_its_class_finds_it_where_the_package_is_not_installed(
    make_app: Callable[..., Celery],
) -> None:
    app = make_app(result_backend="celery_lease.backend:LeaseBackend+lease://")

    assert type(app.backend) is LeaseBackend
    assert AsyncResult("nobody", app=app).state == "PENDING"


def test_a_database_in_its_url_is_refused_and_not_repeated(app: Celery) -> None:
    with pytest.raises(SettingError, match="lease_store_url") as caught:
        LeaseBackend(app, url="lease://user:secret@host/name")

    assert "secret" not in str(caught.value)


def test_it_is_pickled_by_its_url(backend: LeaseBackend) -> None:
    made, (kind, args, kwargs) = backend.__reduce__()

    assert (kind, args, kwargs) == (LeaseBackend, (), {"url": "lease://"})
    assert callable(made)


# --- states and results of tasks without a lease ------------------------------------------------


def test_what_nobody_has_told_of_is_pending(backend: LeaseBackend, tid: str) -> None:
    meta = backend.get_task_meta(tid)

    assert (meta["status"], meta["result"]) == ("PENDING", None)
    assert not backend.task_result_exists(tid)
    assert AsyncResult(tid, backend=backend, app=backend.app).date_done is None


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_result_is_given_back_as_it_was(
    make_app: Callable[..., Celery], tid: str, serializer: str, compression: str | None
) -> None:
    app = make_app(
        result_serializer=serializer,
        result_compression=compression,
        result_accept_content=[serializer],
    )
    value = {"numbers": [1, 2.5, None], "text": "ü\U0001f600" * 300}

    app.backend.mark_as_done(tid, value)

    result = app.AsyncResult(tid)
    assert (result.state, result.get(timeout=5)) == ("SUCCESS", value)
    assert abs(result.date_done - datetime.now(timezone.utc)) < timedelta(minutes=5)
    assert result.successful()
    assert result.exists()


def test_a_result_in_a_serializer_that_is_not_accepted_is_not_decoded(
    make_app: Callable[..., Celery], tid: str
) -> None:
    writer = make_app(result_serializer="pickle", result_accept_content=["pickle"])
    writer.backend.mark_as_done(tid, {1, 2})
    assert writer.AsyncResult(tid).result == {1, 2}

    reader = make_app(result_accept_content=["json"])

    assert isinstance(raised_by(lambda: reader.AsyncResult(tid).state), Exception)


def test_a_failure_has_its_error_and_its_traceback(backend: LeaseBackend, tid: str) -> None:
    backend.mark_as_failure(tid, Trouble("no", {"code": 7}), traceback="Traceback (of the body)")

    result = backend.app.AsyncResult(tid)
    error = raised_by(lambda: result.get(timeout=5))
    assert (type(error).__name__, error.args) == ("Trouble", ("no", {"code": 7}))
    assert type(error) is Trouble
    assert (result.state, result.traceback) == ("FAILURE", "Traceback (of the body)")
    assert result.failed()


def test_a_pickled_failure_is_the_same_error(make_app: Callable[..., Celery], tid: str) -> None:
    app = make_app(result_serializer="pickle", result_accept_content=["pickle"])

    app.backend.mark_as_failure(tid, KeyError("foo"), traceback="here")

    assert repr(app.AsyncResult(tid).result) == "KeyError('foo')"


def test_each_state_on_the_way_is_kept(backend: LeaseBackend, tid: str) -> None:
    result = backend.app.AsyncResult(tid)

    backend.mark_as_started(tid, pid=7, hostname="w")
    assert (result.state, result.info) == ("STARTED", {"pid": 7, "hostname": "w"})
    backend.store_result(tid, {"done": 1}, "PROGRESS")
    assert (result.state, result.info) == ("PROGRESS", {"done": 1})
    backend.mark_as_retry(tid, ValueError("again"), traceback="here")
    assert (result.state, repr(result.result)) == ("RETRY", "ValueError('again')")
    assert result.traceback == "here"
    backend.mark_as_revoked(tid, "enough")
    assert result.state == "REVOKED"
    assert isinstance(raised_by(lambda: result.get(timeout=5)), TaskRevokedError)


def test_the_first_success_is_final(backend: LeaseBackend, tid: str) -> None:
    backend.mark_as_done(tid, "first")

    backend.mark_as_failure(tid, ValueError("late"))
    backend.mark_as_done(tid, "second")

    assert backend.app.AsyncResult(tid).get(timeout=5) == "first"


def test_a_forgotten_result_is_pending_again(backend: LeaseBackend, tid: str) -> None:
    backend.mark_as_done(tid, 1)
    result = backend.app.AsyncResult(tid)
    assert result.state == "SUCCESS"

    result.forget()

    assert backend.app.AsyncResult(tid).state == "PENDING"
    assert not backend.task_result_exists(tid)


def test_its_place_in_the_canvas_and_its_children_are_kept(backend: LeaseBackend, tid: str) -> None:
    child, many = AsyncResult("child", app=backend.app), GroupResult("g", [], app=backend.app)
    request = request_of(tid, group="gid", parent_id="pid", _children=[child, many])

    backend.mark_as_done(tid, 1, request=request)

    meta = backend.get_task_meta(tid)
    assert (meta["group_id"], meta["parent_id"]) == ("gid", "pid")
    kept = backend.app.AsyncResult(tid).children
    assert kept == [child, many]
    assert isinstance(kept[1], GroupResult)
    assert backend.get_children(tid)[0][0][0] == "child"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_an_extended_result_says_how_it_was_called(
    make_app: Callable[..., Celery], tid: str, serializer: str
) -> None:
    app = make_app(
        result_extended=True, result_serializer=serializer, result_accept_content=[serializer]
    )
    request = request_of(
        tid,
        args=["a", 1],
        kwargs={"b": {"c": None}},
        hostname="w@host",
        retries=2,
        delivery_info={"routing_key": "fast"},
        stamps={"tenant": ["7"]},
        stamped_headers=["tenant"],
    )

    app.backend.mark_as_done(tid, None, request=request)

    result = app.AsyncResult(tid)
    assert result.get(timeout=5) is None
    assert (result.name, result.args, result.kwargs) == ("plain", ["a", 1], {"b": {"c": None}})
    assert (result.worker, result.retries, result.queue) == ("w@host", 2, "fast")
    assert app.backend.get_task_meta(tid)["tenant"] == ["7"]


def test_a_result_object_is_stored_as_what_it_names(backend: LeaseBackend, tid: str) -> None:
    backend.mark_as_done(tid, AsyncResult("other", app=backend.app))

    assert backend.app.AsyncResult(tid).get(timeout=5) == [["other", None], None]


def test_a_result_that_is_ignored_is_not_stored(backend: LeaseBackend, tid: str) -> None:
    backend.mark_as_done(tid, 1, request=request_of(tid, ignore_result=True))

    assert not backend.task_result_exists(tid)


def test_a_success_is_read_once_and_reloaded_when_asked(
    make_app: Callable[..., Celery], tid: str
) -> None:
    backend = make_app(result_cache_max=10).backend
    backend.mark_as_done(tid, 1)
    backend.get_task_meta(tid)
    assert backend.is_cached(tid)
    transitions.forget_result(extension_of(backend.app).store, tid)
    assert backend.get_state(tid) == "SUCCESS"

    backend.reload_task_result(tid)

    assert backend.get_state(tid) == "PENDING"


def test_an_error_of_no_class_is_no_code_to_run(backend: LeaseBackend, tid: str) -> None:
    """The same guard as Celery's: what is stored names a class, and may name a function."""
    bad = {"exc_type": "system", "exc_module": "os", "exc_message": "true"}
    backend.store_result(tid, bad, "FAILURE")

    assert "Expected an exception class" in str(raised_by(lambda: backend.get_result(tid)))


def test_what_is_older_than_result_expires_is_cleaned_up(
    make_app: Callable[..., Celery], store: Store, tid: str
) -> None:
    app = make_app(result_expires=timedelta(hours=1))
    app.backend.mark_as_done(tid, 1)
    app.GroupResult(tid, [app.AsyncResult(tid)]).save()
    app.backend.cleanup()
    assert app.backend.task_result_exists(tid)

    for table, key in ((store.tables.result, "task_id"), (store.tables.group, "id")):
        _move_back(store, table, key, tid, "stored_at", seconds=3601)
    make_app(result_expires=None).backend.cleanup()
    assert app.backend.task_result_exists(tid)
    app.tasks["celery.backend_cleanup"]()

    assert not app.backend.task_result_exists(tid)
    assert app.GroupResult.restore(tid) is None


def _move_back(
    store: Store, table: sa.Table, key: str, value: str, column: str, *, seconds: float
) -> None:
    where = table.c[key] == value
    with store.single() as connection:
        was = connection.execute(sa.select(table.c[column]).where(where)).scalar_one()
        change = sa.update(table).where(where)
        connection.execute(change.values({column: was - timedelta(seconds=seconds)}))


# --- waiting ------------------------------------------------------------------------------------


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between two looks; they pass at once, on a clock of their own."""
    taken: list[float] = []
    start = time.monotonic()

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            taken.append(seconds)

        @staticmethod
        def monotonic() -> float:
            return start + sum(taken)

    monkeypatch.setattr(backend_module, "time", Clock)
    return taken


def test_looks_are_close_at_first_and_no_further_apart_than_asked(
    backend: LeaseBackend, tid: str, naps: list[float]
) -> None:
    asked = []

    with pytest.raises(CeleryTimeout):
        backend.wait_for(tid, timeout=5, on_interval=lambda: asked.append(1))

    assert naps[0] == FIRST_PAUSE_SECONDS
    assert max(naps) == 0.5
    assert naps[:-1] == sorted(naps[:-1])
    assert sum(naps) == pytest.approx(5)
    assert len(asked) == len(naps) + 1
    naps.clear()
    with pytest.raises(CeleryTimeout):
        backend.app.AsyncResult(tid).get(timeout=1, interval=0.02)
    assert max(naps) == 0.02


def test_a_timeout_of_zero_looks_once(backend: LeaseBackend, tid: str, naps: list[float]) -> None:
    with pytest.raises(CeleryTimeout):
        backend.app.AsyncResult(tid).get(timeout=0)
    backend.mark_as_done(tid, 1)

    assert backend.app.AsyncResult(tid).get(timeout=0) == 1
    assert naps == []


def test_many_are_given_as_they_come(backend: LeaseBackend, naps: list[float]) -> None:
    ids = [str(uuid.uuid4()) for _ in range(4)]
    backend.mark_as_done(ids[2], 2)
    seen: list[dict[str, Any]] = []
    more = iter([(ids[0], 0), (ids[3], 3)])

    def next_one() -> None:
        found = next(more, None)
        if found is None:
            backend.mark_as_failure(ids[1], ValueError("no"))
        else:
            backend.mark_as_done(*found)

    given = list(backend.get_many(ids, on_message=seen.append, on_interval=next_one))

    assert [task_id for task_id, _ in given] == [ids[2], ids[0], ids[3], ids[1]]
    assert [meta["status"] for _, meta in given] == ["SUCCESS"] * 3 + ["FAILURE"]
    assert seen == [meta for _, meta in given]
    assert len(naps) == 3
    assert [task_id for task_id, _ in backend.get_many(ids[:1])] == ids[:1]


def test_many_are_waited_for_no_longer_than_asked(backend: LeaseBackend, tid: str) -> None:
    with pytest.raises(CeleryTimeout):
        list(backend.get_many([tid], timeout=0.05))
    assert list(backend.get_many([tid], interval=0.001, max_iterations=2)) == []
    assert list(backend.get_many([])) == []


def test_a_group_is_joined_in_its_order(backend: LeaseBackend) -> None:
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for number in (2, 0, 1):
        backend.mark_as_done(ids[number], number)

    members = [backend.app.AsyncResult(task_id) for task_id in ids]
    assert backend.app.GroupResult("g", members).get(timeout=5) == [0, 1, 2]


def test_an_eager_app_is_warned_that_nothing_is_stored(
    make_app: Callable[..., Celery], tid: str
) -> None:
    app = make_app(task_always_eager=True)

    with pytest.warns(RuntimeWarning, match="task_always_eager"):
        app.AsyncResult(tid).state  # noqa: B018


@pytest.mark.parametrize("task", ["plain", "leased"])
def test_an_eager_result_is_stored_where_that_is_asked_for(
    make_app: Callable[..., Celery], task: str
) -> None:
    app = make_app(task_always_eager=True, task_store_eager_result=True)

    done = app.tasks[task].delay()

    assert app.backend.get_state(done.id) == "SUCCESS"


# --- groups -------------------------------------------------------------------------------------


def test_a_group_is_saved_restored_and_deleted(make_app: Callable[..., Celery], tid: str) -> None:
    app = make_app(result_cache_max=10)
    backend = app.backend
    members = [app.AsyncResult(f"{tid}a"), app.GroupResult(f"{tid}g", [app.AsyncResult("x")])]

    app.GroupResult(tid, members).save()

    found = app.GroupResult.restore(tid)
    assert (found.id, found.results) == (tid, members)
    assert backend.restore_group(tid) == found
    backend.reload_group_result(tid)
    assert backend.is_cached(tid)
    found.delete()
    assert app.GroupResult.restore(tid) is None
    backend.reload_group_result(tid)
    assert backend.restore_group("nobody") is None


# --- leased jobs: the job row is the result -----------------------------------------------------


def test_a_job_that_waits_is_pending_and_known(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    submitted(store, tid, task="leased")

    assert backend.get_task_meta(tid)["status"] == "PENDING"
    assert backend.task_result_exists(tid)


def test_a_job_that_runs_is_started_by_its_process(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    submitted(store, tid, task="leased")
    claimed(store, tid, owner="host:471:ab12", worker="w@host")

    result = backend.app.AsyncResult(tid)

    assert (result.state, result.info) == ("STARTED", {"pid": 471, "hostname": "w@host"})
    assert (result.name, result.worker) == ("leased", "w@host")
    backend.mark_as_started(tid, pid=1, hostname="another")
    assert results.find(store, [tid])[tid].kept is None


def test_a_completed_job_is_a_success_without_another_write(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    succeed(store, held(store, tid))

    result = backend.app.AsyncResult(tid)

    assert (result.get(timeout=5), result.state, result.children) == (42, "SUCCESS", [])
    standing = results.standing(store, tid)
    assert standing is not None
    assert standing.outcome is not None
    assert result.date_done == standing.outcome.finished_at
    assert results.find(store, [tid])[tid].kept is None


def test_a_job_without_a_result_gave_none(backend: LeaseBackend, store: Store, tid: str) -> None:
    succeed(store, held(store, tid), result=None)

    assert backend.app.AsyncResult(tid).get(timeout=5) is None


def test_a_failed_job_has_its_error_and_its_traceback(app: Celery, store: Store, tid: str) -> None:
    fail(app, store, held(store, tid), Trouble("no", 7))

    result = app.AsyncResult(tid)

    error = raised_by(lambda: result.get(timeout=5))
    assert (type(error), error.args) == (Trouble, ("no", 7))
    assert (result.state, result.traceback) == ("FAILURE", "Traceback of the body")


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_of_a_failed_jobs_error_only_what_json_cannot_say_is_a_text(
    make_app: Callable[..., Celery], tid: str, serializer: str
) -> None:
    app = make_app(result_serializer=serializer, accept_content=["json", "pickle"])
    store = extension_of(app).store

    fail(app, store, held(store, tid), ValueError("no", 7, {1}))

    assert app.AsyncResult(tid).result.args == ("no", 7, "{1}")


def test_ends_that_no_body_returned_have_their_errors(app: Celery, store: Store, tid: str) -> None:
    submitted(store, tid, task="leased", max_attempts=1)
    lease = claimed(store, tid)
    transitions.lost(store, lease, cause=LossCause.LOST, reason="killed", lost_backoff=(0.0,))
    submitted(store, f"{tid}c", task="leased")
    transitions.cancel(store, f"{tid}c", reason="not needed")

    interrupted, cancelled = app.AsyncResult(tid), app.AsyncResult(f"{tid}c")

    assert interrupted.state == "FAILURE"
    assert isinstance(raised_by(lambda: interrupted.get(timeout=5)), JobInterrupted)
    assert cancelled.state == "REVOKED"
    error = raised_by(lambda: cancelled.get(timeout=5))
    assert isinstance(error, TaskRevokedError)
    assert "not needed" in str(error)


def test_a_job_that_waits_after_an_attempt_is_a_retry_with_its_error(
    app: Celery, store: Store, tid: str
) -> None:
    lease = held(store, tid)
    said = parting("retried", failure=Failure("builtins.ValueError", "again", traceback="here"))
    transitions.retry_later(store, lease, said, again(delay_seconds=60))
    transitions.hold_waiting(store, submitted(store, f"{tid}h", task="leased"), reason="wait")

    result = app.AsyncResult(tid)

    assert (result.state, repr(result.result)) == ("RETRY", "ValueError('again')")
    assert result.traceback == "here"
    assert app.AsyncResult(f"{tid}h").state == "HELD"


def test_what_celery_says_of_a_final_job_changes_nothing(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    """A child that died after its commit, say, of which stock Celery makes a FAILURE."""
    succeed(store, held(store, tid))

    backend.mark_as_failure(tid, ValueError("lost"), request=request_of(tid, "leased"))
    backend.mark_as_retry(tid, ValueError("lost"), request=request_of(tid, "leased"))
    backend.mark_as_revoked(tid, "revoked", request=request_of(tid, "leased"))

    assert backend.app.AsyncResult(tid).get(timeout=5) == 42


def test_what_celery_says_of_a_job_that_will_run_again_is_not_believed(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    held(store, tid)

    backend.mark_as_done(tid, "stale", request=request_of(tid, "leased"))

    assert backend.get_task_meta(tid)["status"] == "STARTED"


def test_children_and_extended_values_of_a_job_are_kept_beside_it(
    make_app: Callable[..., Celery], store: Store, tid: str
) -> None:
    app = make_app(result_extended=True)
    succeed(store, held(store, tid))
    request = request_of(tid, "leased", args=[1], _children=[app.AsyncResult("child")])

    app.backend.mark_as_done(tid, "not this", request=request)

    result = app.AsyncResult(tid)
    assert (result.get(timeout=5), result.args, result.children[0].id) == (42, [1], "child")


def test_a_state_of_the_body_s_own_is_seen_while_it_runs(
    app: Celery, store: Store, tid: str
) -> None:
    lease = held(store, tid)
    update_state(app, lease, tid, "PROGRESS", {"done": 1})
    assert (app.AsyncResult(tid).state, app.AsyncResult(tid).info) == ("PROGRESS", {"done": 1})

    transitions.retry_later(store, lease, parting("retried"), again(version=2))
    assert app.AsyncResult(tid).state == "RETRY"
    second = claimed(store, tid, message_version=2)
    assert app.AsyncResult(tid).state == "STARTED"

    update_state(app, second, tid, "PROGRESS", {"done": 2})
    update_state(app, lease, tid, "PROGRESS", {"done": "of the stale attempt"})
    assert app.AsyncResult(tid).info == {"done": 2}


def test_an_abort_before_the_claim_is_seen_by_the_body(app: Celery, store: Store, tid: str) -> None:
    submitted(store, tid, task="leased")

    AbortableAsyncResult(tid, app=app).abort()
    assert app.AsyncResult(tid).state == "ABORTED"
    lease = claimed(store, tid)
    assert AbortableAsyncResult(tid, app=app).is_aborted()

    update_state(app, lease, tid, "PROGRESS", {"done": 1})
    assert app.AsyncResult(tid).state == "PROGRESS"
    succeed(store, lease)
    assert app.AsyncResult(tid).get(timeout=5) == 42


def test_a_final_state_that_a_body_tells_itself_counts_if_it_is_ignored_then(
    app: Celery, store: Store, tid: str
) -> None:
    """``update_state(state="FAILURE")`` and ``raise Ignore``, as Celery's manual has it."""
    lease = held(store, tid)
    update_state(app, lease, tid, "SUCCESS", "by hand")
    assert app.AsyncResult(tid).state == "STARTED"

    succeed(store, lease, None, reason="ignored", settled=True)

    assert app.AsyncResult(tid).get(timeout=5) == "by hand"
    other = held(store, f"{tid}o")
    succeed(store, other, None, reason="ignored", settled=True)
    assert app.AsyncResult(f"{tid}o").state == "PENDING"


def update_state(app: Celery, lease: Held, task_id: str, state: str, meta: Any) -> None:
    """Tell a state from within a body that holds a lease."""
    running = Lease(
        Claimed(lease=lease, message_version=1, lost_count=0, checkpoint=None, took_over=None),
        lease_seconds=30.0,
        heartbeat_seconds=10.0,
        sent_at=time.monotonic(),
        on_surrender=lambda _: None,
        on_checkpoint=lambda: None,
    )
    with in_force(running):
        request = request_of(task_id, "leased", _lease_entered=True)
        app.backend.store_result(task_id, meta, state, request=request)


def test_a_job_replaced_by_a_task_without_a_lease_has_that_one_s_result(
    app: Celery, store: Store, tid: str
) -> None:
    lease = held(store, tid)
    update_state(app, lease, tid, "PROGRESS", 1)
    transitions.replace_away(store, lease, parting("replaced"))
    request = request_of(tid, "plain", replaced_task_nesting=1)

    app.backend.mark_as_done(tid, "of the other", request=request)

    assert app.AsyncResult(tid).get(timeout=5) == "of the other"


def test_a_revoked_job_is_cancelled_and_an_expired_one_is_left_to_the_store(
    backend: LeaseBackend, store: Store, tid: str
) -> None:
    submitted(store, tid, task="leased")
    request = request_of(tid, "leased")

    backend.mark_as_revoked(tid, "expired", request=request)
    assert backend.get_task_meta(tid)["status"] == "PENDING"
    backend.mark_as_revoked(tid, "terminated", request=request, store_result=False)

    standing = results.standing(store, tid)
    assert standing is not None
    assert standing.state == "cancelled"
    assert backend.get_task_meta(tid)["status"] == "REVOKED"


@pytest.mark.parametrize("who", ["a worker that hears it", "a replay"])
def test_what_celery_says_of_a_revocation_ends_no_job_that_was_resumed(
    backend: LeaseBackend, store: Store, tid: str, who: str
) -> None:
    submitted(store, tid, task="leased")
    transitions.cancel(store, tid)
    ended = queries.outcome(store, tid)
    assert ended is not None
    transitions.settle(store, [(tid, ended[0].fencing_token, ended[0].finished_at)])
    transitions.resume(store, tid, reason="wanted after all")
    candidate = queries.dispatchable(store, tid)
    assert candidate is not None
    assert transitions.dispatch(store, candidate)

    request = None if who == "a worker that hears it" else request_of(tid, "leased")
    backend.mark_as_revoked(tid, "revoked", request=request)

    standing = results.standing(store, tid)
    assert standing is not None
    assert standing.state == "queued"
    assert backend.get_task_meta(tid)["status"] == "PENDING"


def test_forgetting_a_job_keeps_its_record(backend: LeaseBackend, store: Store, tid: str) -> None:
    succeed(store, held(store, tid), settled=True)
    running = held(store, f"{tid}r")

    backend.forget(tid)
    backend.forget(f"{tid}r")

    assert backend.get_task_meta(tid) == {"task_id": tid, "status": "PENDING", "result": None}
    assert not backend.task_result_exists(tid)
    standing = results.standing(store, tid)
    assert standing is not None
    assert standing.state == "succeeded"
    found = results.find(store, [tid])[tid].kept
    assert found is not None
    assert found.status == FORGOTTEN
    # It was the result of nothing yet, and what comes of it is to be had.
    succeed(store, running)
    assert backend.app.AsyncResult(f"{tid}r").get(timeout=5) == 42


# --- chords -------------------------------------------------------------------------------------


def header_of(app: Celery, tid: str, size: int, *, task: str = "plain") -> list[Context]:
    """Say that a chord was published, and return the requests of its parts."""
    body = app.tasks["plain"].s().set(task_id=f"{tid}body")
    app.backend.set_chord_size(tid, size)
    return [
        request_of(f"{tid}{n}", task, group=tid, group_index=n, chord=dict(body))
        for n in range(size)
    ]


def published(app: Celery) -> list[tuple[str, Any]]:
    """Take what was published: (task id, its first argument) each."""
    found = []
    with (
        app.connection_for_read() as connection,
        connection.SimpleQueue(app.conf.task_default_queue) as queue,
    ):
        while len(queue):
            message = queue.get_nowait()
            message.ack()
            found.append((message.headers["id"], (message.payload[0] or [None])[0]))
    return found


def test_the_last_part_publishes_the_body_with_all_results(app: Celery, tid: str) -> None:
    first, second, third = header_of(app, tid, 3)
    app.backend.mark_as_done(third.id, "c", request=third)
    app.backend.mark_as_done(first.id, "a", request=first)
    assert published(app) == []

    app.backend.mark_as_done(second.id, "b", request=second)

    assert published(app) == [(f"{tid}body", ["a", "b", "c"])]


def test_a_part_that_is_told_again_counts_once_and_fires_nothing_twice(
    app: Celery, tid: str
) -> None:
    first, second = header_of(app, tid, 2)
    for _ in range(3):
        app.backend.mark_as_done(first.id, "a", request=first)
    assert published(app) == []

    for _ in range(3):
        app.backend.mark_as_done(second.id, "b", request=second)

    assert published(app) == [(f"{tid}body", ["a", "b"])]
    # What was told after that is not kept either.
    assert results.parts(extension_of(app).store, tid) == []


def test_a_part_whose_result_is_ignored_counts(app: Celery, tid: str) -> None:
    (only,) = header_of(app, tid, 1)
    only.ignore_result = True

    app.backend.mark_as_done(only.id, "a", request=only)

    assert published(app) == [(f"{tid}body", ["a"])]


def test_a_nested_header_keeps_its_form(app: Celery, tid: str) -> None:
    first, second, third = header_of(app, tid, 3)
    members = [
        app.AsyncResult(first.id),
        app.GroupResult(f"{tid}g", [app.AsyncResult(one.id) for one in (second, third)]),
    ]
    app.backend.apply_chord((tid, members), None)

    for request, value in ((first, 1), (third, 3), (second, 2)):
        app.backend.mark_as_done(request.id, value, request=request)

    assert published(app) == [(f"{tid}body", [1, [2, 3]])]


@pytest.mark.parametrize("how", ["failure", "revoked"])
def test_a_part_that_failed_fails_the_chord_when_all_are_there(
    app: Celery, tid: str, how: str
) -> None:
    first, second = header_of(app, tid, 2)
    if how == "failure":
        app.backend.mark_as_failure(first.id, Trouble("no"), request=first)
    else:
        app.backend.mark_as_revoked(first.id, "no", request=first)
    assert app.AsyncResult(f"{tid}body").state == "PENDING"

    app.backend.mark_as_done(second.id, "b", request=second)

    assert published(app) == []
    error = raised_by(lambda: app.AsyncResult(f"{tid}body").get(timeout=5))
    assert isinstance(error, ChordError)
    assert f"Dependency {first.id} raised" in str(error)


def test_the_error_path_of_a_chord_is_taken_once(app: Celery, tid: str) -> None:
    (only,) = header_of(app, tid, 1)
    errback = app.tasks["errback"].si("errback").set(task_id=f"{tid}errback")
    only.chord["options"]["link_error"] = [dict(errback)]

    for _ in range(2):
        app.backend.mark_as_failure(only.id, Trouble("no"), request=only)

    assert published(app) == [(f"{tid}errback", "errback")]


def test_a_pickled_failure_is_read_without_unpickling(
    make_app: Callable[..., Celery], tid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper may be the one that tells the last part."""
    app = make_app(result_serializer="pickle", result_accept_content=["pickle", "json"])
    first, second = header_of(app, tid, 2)
    app.backend.mark_as_done(first.id, {1, 2}, request=first)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(app.backend, "decode", None)

    app.backend.on_chord_part_return(second, "FAILURE", Trouble("no"))

    assert results.chord(extension_of(app).store, tid).is_fired  # type: ignore[union-attr]


def test_a_body_that_cannot_be_published_is_an_error_of_the_chord(
    app: Celery, tid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = header_of(app, tid, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no route")

    monkeypatch.setattr(app.tasks["plain"], "apply_async", refuse)
    app.backend.mark_as_done(only.id, "a", request=only)

    error = raised_by(lambda: app.AsyncResult(f"{tid}body").get(timeout=5))
    assert "Callback error: ValueError('no route')" in str(error)


def test_a_leased_body_that_is_recorded_is_sent_by_the_reaper(
    app: Celery, store: Store, tid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``lease_publish_on_error = "raise"`` the publish of a recorded job raises."""
    (only,) = header_of(app, tid, 1)
    only.chord["task"] = "leased"

    def recorded_only(*_: Any, **__: Any) -> None:
        submitted(store, f"{tid}body", task="leased")
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(app.tasks["leased"], "apply_async", recorded_only)
    app.backend.mark_as_done(only.id, "a", request=only)

    assert results.find(store, [f"{tid}body"])[f"{tid}body"].kept is None
    chord_row = results.chord(store, tid)
    assert chord_row is not None
    assert chord_row.is_fired


def test_who_was_about_to_fire_and_died_is_followed_by_the_next_word(
    app: Celery, store: Store, tid: str
) -> None:
    """A replay of a leased part waits for the claim of the dead to run out."""
    (only,) = header_of(app, tid, 1, task="leased")
    succeed(store, held(store, only.id))
    transitions.claim_chord(store, tid, "of the dead", claim_seconds=CHORD_CLAIM_SECONDS)
    seconds = CHORD_CLAIM_SECONDS - 0.5
    _move_back(store, store.tables.chord, "id", tid, "claimed_at", seconds=seconds)

    app.backend.mark_as_done(only.id, 42, request=only)

    assert published(app) == [(f"{tid}body", [42])]


def test_who_revokes_does_not_wait_for_who_is_about_to_fire(
    app: Celery, store: Store, tid: str
) -> None:
    """It waits a moment and no longer; a later pass tells the part again, and fires."""
    parts = [app.tasks["leased"].s().set(task_id=f"{tid}{n}") for n in range(2)]
    body = app.tasks["plain"].s().set(task_id=f"{tid}body")
    chord_id = chord(parts, body).apply_async().parent.id
    app.control.revoke(f"{tid}0")
    transitions.claim_chord(store, chord_id, "frozen", claim_seconds=CHORD_CLAIM_SECONDS)
    began = time.monotonic()

    app.control.revoke(f"{tid}1")

    assert CHORD_WAIT_SECONDS <= time.monotonic() - began < CHORD_CLAIM_SECONDS / 2
    found = queries.outcome(store, f"{tid}1")
    assert found is not None
    assert found[0].state == "cancelled"
    reaper = extension_of(app).reaper()
    with pytest.raises(PublishFailed, match="ChordClaimed") as caught:
        reaper.settle(*found)
    assert not caught.value.is_away
    _move_back(store, store.tables.chord, "id", chord_id, "claimed_at", seconds=31)
    found = queries.outcome(store, f"{tid}1")
    assert found is not None
    assert reaper.settle(*found) == "closed"
    chord_row = results.chord(store, chord_id)
    assert chord_row is not None
    assert chord_row.is_fired
    assert queries.outcome(store, f"{tid}1") is None
    # Their parts, and no body.
    assert {task_id for task_id, _ in published(app)} == {f"{tid}0", f"{tid}1"}


def test_who_is_about_to_fire_is_waited_for_a_moment(app: Celery, store: Store, tid: str) -> None:
    """Most take milliseconds: it would be told again for nothing."""
    (only,) = header_of(app, tid, 1, task="leased")
    succeed(store, held(store, only.id))
    transitions.claim_chord(store, tid, "at work", claim_seconds=CHORD_CLAIM_SECONDS)
    fires = threading.Timer(0.2, lambda: transitions.close_chord(store, tid))
    fires.start()

    app.backend.mark_as_done(only.id, 42, request=only)

    fires.join()
    assert published(app) == []


def test_a_delivery_waits_until_the_claim_runs_out(
    app: Celery, store: Store, tid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay has nothing else to do, and an error would be taken for one of Celery's."""
    monkeypatch.setattr(backend_module, "CHORD_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(backend_module, "is_under_lease", lambda _: True)
    (only,) = header_of(app, tid, 1, task="leased")
    succeed(store, held(store, only.id))
    transitions.claim_chord(store, tid, "of the dead", claim_seconds=CHORD_CLAIM_SECONDS)
    seconds = CHORD_CLAIM_SECONDS - 0.5
    _move_back(store, store.tables.chord, "id", tid, "claimed_at", seconds=seconds)

    app.backend.mark_as_done(only.id, 42, request=only)

    assert published(app) == [(f"{tid}body", [42])]


def test_a_chord_is_free_at_once_when_the_store_refused_its_body(
    app: Celery, store: Store, tid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = header_of(app, tid, 1)
    monkeypatch.setattr(app.backend, "_values", _away)
    with pytest.raises(SettingError):
        app.backend.mark_as_done(only.id, "a", request=only)
    monkeypatch.undo()

    app.backend.mark_as_done(only.id, "a", request=only)

    assert published(app) == [(f"{tid}body", ["a"])]


def _away(*_: Any) -> None:
    raise SettingError(["anything that is no error of a chord"])


def test_a_leased_part_counts_with_what_its_job_says(app: Celery, store: Store, tid: str) -> None:
    first, second = header_of(app, tid, 2, task="leased")
    for part, result in ((first, b'"one"'), (second, b'"two"')):
        succeed(store, held(store, part.id), result)

    # What stock Celery makes of an error in its own bookkeeping.
    app.backend.mark_as_failure(first.id, ValueError("of Celery"), request=first)
    app.backend.mark_as_done(second.id, "of nobody", request=second)

    assert published(app) == [(f"{tid}body", ["one", "two"])]


def test_a_stale_word_of_a_leased_part_is_not_counted(app: Celery, store: Store, tid: str) -> None:
    (only,) = header_of(app, tid, 1, task="leased")
    lease = held(store, only.id)

    app.backend.mark_as_failure(only.id, ValueError("lost"), request=only)
    app.backend.mark_as_done(only.id, "stale", request=only)

    assert published(app) == []
    assert app.AsyncResult(f"{tid}body").state == "PENDING"
    succeed(store, lease)
    app.backend.mark_as_done(only.id, 42, request=only)
    assert published(app) == [(f"{tid}body", [42])]


def test_a_revoked_leased_part_ends_its_chord(app: Celery, store: Store, tid: str) -> None:
    first, second = header_of(app, tid, 2, task="leased")
    succeed(store, held(store, first.id))
    submitted(store, second.id, task="leased")
    app.backend.mark_as_done(first.id, 42, request=first)

    app.backend.mark_as_revoked(second.id, "revoked", request=second)

    assert isinstance(raised_by(lambda: app.AsyncResult(f"{tid}body").get(timeout=5)), ChordError)


def test_a_chain_that_fails_early_in_a_header_fails_its_chord(app: Celery, tid: str) -> None:
    """Told again where its process died after storing the step's failure, before counting it."""
    body = app.tasks["plain"].s().set(task_id=f"{tid}body")
    app.backend.set_chord_size(tid, 1)
    last = app.tasks["plain"].s().set(task_id=f"{tid}last", group_id=tid, chord=dict(body))
    request = request_of(f"{tid}first", chain=[dict(last)])
    app.backend.store_result(f"{tid}last", Trouble("no"), "FAILURE")

    app.backend.mark_as_failure(f"{tid}first", Trouble("no"), request=request)

    assert app.AsyncResult(f"{tid}body").state == "FAILURE"
    assert app.AsyncResult(f"{tid}last").state == "FAILURE"


def test_a_part_of_no_group_is_no_part(app: Celery, tid: str) -> None:
    request = request_of(tid, chord=dict(app.tasks["plain"].s()))

    app.backend.mark_as_done(tid, 1, request=request)

    assert published(app) == []


def test_an_added_task_is_waited_for(app: Celery, tid: str) -> None:
    (only,) = header_of(app, tid, 1)
    added = request_of(f"{tid}added", group=tid, group_index=None, chord=only.chord)
    for _ in range(2):
        app.backend.add_to_chord(tid, app.AsyncResult(added.id))
    app.backend.mark_as_done(only.id, "a", request=only)
    assert published(app) == []

    app.backend.mark_as_done(added.id, "b", request=added)

    assert published(app) == [(f"{tid}body", ["a", "b"])]


def test_canvas_that_needs_a_backend_is_published(app: Celery) -> None:
    plain = app.tasks["plain"]

    chord([plain.si(1), plain.si(2)], plain.s()).delay()
    chain(group(plain.si(3), plain.si(4)), plain.s()).delay()

    assert len(published(app)) == 4
