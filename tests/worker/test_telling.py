"""Ends that no body returned are told to Celery: one that cannot be told is not in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, states

from celery_lease import LeasedTask
from celery_lease.extension import extension_of
from celery_lease.store import queries, transitions

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Looks like a value of a type that kombu has registered, and is none.
UNREADABLE = {"__type__": "event", "__value__": 1}


@pytest.fixture
def app(sqlite_url: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app with two leased tasks, whose result backend is in memory."""
    made = make_app(sqlite_url)
    yield made
    close(made)


def make_app(store_url: str, *, backend: str | None = "cache+memory://") -> Celery:
    """Make an app that has the tasks."""
    made = Celery("telling", broker="memory://", backend=backend, set_as_current=False)
    made.conf.update(
        lease_store_url=store_url,
        task_create_missing_queues=False,
        # The memory is shared by all apps of a process.
        task_default_queue="telling",
    )
    add_tasks(made)
    return made


def add_tasks(made: Celery) -> None:
    """Add what can be submitted, and what tells a failure."""

    @made.task(base=LeasedTask, name="work", shared=False)
    def work(argument: Any = None) -> None:
        """Never run."""

    @made.task(base=LeasedTask, name="errback", shared=False)
    def errback(task_id: str) -> None:
        """Never run."""


def close(made: Celery) -> None:
    """Close the app's connections."""
    extension_of(made).raw_store.close()
    made.close()


def cancelled(app: Celery, *args: Any, **options: Any) -> str:
    """Submit a job and cancel it; nobody has told Celery yet."""
    sent = app.tasks["work"].apply_async(args, **options)
    transitions.cancel(extension_of(app).store, sent.id, reason="a test")
    return str(sent.id)


def is_told(app: Celery, job_id: str) -> bool:
    """Tell whether a job needs no more telling."""
    return queries.outcome(extension_of(app).store, job_id) is None


def test_arguments_that_only_look_like_a_known_type_keep_no_end_from_being_told(
    app: Celery,
) -> None:
    bad = [cancelled(app, UNREADABLE) for _ in range(3)]
    good = cancelled(app)

    counts = extension_of(app).run_pass()

    assert counts["closed"] == 4
    assert all(is_told(app, job_id) for job_id in [*bad, good])
    assert app.backend.get_state(bad[0]) == states.REVOKED


def test_an_end_that_cannot_be_told_is_not_in_the_way_of_the_others(app: Celery) -> None:
    """Its errback goes to a queue that this process does not have."""
    task, store = app.tasks["work"], extension_of(app).store
    errback = app.tasks["errback"].s().set(queue="elsewhere")
    bad = [task.apply_async(link_error=errback).id for _ in range(3)]
    for job_id in bad:
        transitions.hold_waiting(store, job_id, reason="a test")
        transitions.refuse(store, job_id, reason="a test")
    good = cancelled(app)

    counts = extension_of(app).run_pass()

    assert (counts["closed"], counts["unpublished"]) == (1, 3)
    assert is_told(app, good)
    assert not any(is_told(app, job_id) for job_id in bad)
    assert queries.last_pass(store) is not None


def test_a_body_that_nobody_can_read_is_not_in_the_way_either(app: Celery) -> None:
    store = extension_of(app).store
    bad, good = cancelled(app), cancelled(app)
    message = store.tables.message
    with store.single() as connection:
        connection.execute(
            message.update().where(message.c.job_id == bad).values(body=b"no JSON at all")
        )

    counts = extension_of(app).run_pass()

    assert (counts["closed"], counts["unpublished"]) == (1, 1)
    assert is_told(app, good)


def test_a_program_without_the_task_leaves_the_telling_to_a_worker(
    app: Celery, sqlite_url: str
) -> None:
    """What it stored might be stored where nobody looks."""
    job_id = cancelled(app)
    other = Celery("other", broker="memory://", backend="cache+memory://", set_as_current=False)
    other.conf.update(lease_store_url=sqlite_url, task_default_queue="telling")

    counts = extension_of(other).run_pass()

    # A message goes to a worker, which has the task and its backend.
    assert counts["replayed"] == 1
    assert "closed" not in counts
    assert not is_told(app, job_id)
    close(other)


def test_without_a_result_backend_there_is_nobody_to_tell(sqlite_url: str) -> None:
    app = make_app(sqlite_url, backend=None)
    job_id = cancelled(app)

    assert extension_of(app).run_pass()["closed"] == 1

    assert is_told(app, job_id)
    close(app)
