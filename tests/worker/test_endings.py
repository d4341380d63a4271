"""What is told for the dead: only what Celery really has is settled."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_lease.dispatch import BrokerPublisher
from celery_lease.endings import settle_told
from celery_lease.extension import Extension, extension_of, install
from celery_lease.store import queries
from tests.store.builders import finished, new_message, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_lease.records import Held


@pytest.fixture
def extension(sqlite_url: str) -> Iterator[Extension]:
    """The extension of an app whose result backend is in memory."""
    app = Celery("endings", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.lease_store_url = sqlite_url

    @app.task(name="app.work", shared=False)
    def work() -> None:
        """Never run."""

    yield install(app)
    extension_of(app).raw_store.close()


@pytest.fixture
def told(extension: Extension) -> Held:
    """An attempt whose outcome is accepted and not settled: its child died."""
    # A new id: the result backend is one for all apps of a process.
    lease = running(extension.store, uuid.uuid4().hex)
    finished(extension.store, lease, settled=False)
    assert not settled(extension, lease)
    return lease


def settled(extension: Extension, told: Held) -> bool:
    """Tell whether the job needs no more telling."""
    return queries.outcome(extension.store, told.job_id) is None


def test_an_outcome_that_celery_has_is_settled(extension: Extension, told: Held) -> None:
    extension.app.backend.store_result(told.job_id, 3, "SUCCESS")

    settle_told(extension, extension.store, [(told, None)])

    assert settled(extension, told)


@pytest.mark.parametrize("state", [None, "STARTED", "RETRY"])
def test_one_that_celery_has_not_is_left_to_a_replay(
    state: str | None, extension: Extension, told: Held
) -> None:
    """A message may be acknowledged for other reasons than a told outcome."""
    if state is not None:
        extension.app.backend.store_result(told.job_id, None, state)

    settle_told(extension, extension.store, [(told, None)])

    assert not settled(extension, told)


def test_in_doubt_it_is_told_once_more(
    extension: Extension, told: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_job_id: str) -> str:
        raise ConnectionError

    monkeypatch.setattr(extension.app.backend, "get_state", broken)

    settle_told(extension, extension.store, [(told, None)])

    assert not settled(extension, told)


def test_the_outcome_of_another_attempt_is_its_own_to_settle(
    extension: Extension, told: Held
) -> None:
    extension.app.backend.store_result(told.job_id, 3, "SUCCESS")
    earlier = type(told)(told.job_id, told.fencing_token - 1, told.owner)

    settle_told(extension, extension.store, [(earlier, None)])

    assert not settled(extension, told)


@pytest.mark.parametrize("accepted", [["json"], ["json", "pickle"]], ids=" ".join)
def test_a_part_of_a_chord_is_closed_here_only_if_the_others_are_plain_data(
    accepted: list[str], extension: Extension, told: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last part reads what the others have stored: nothing is unpickled by the reaper."""
    done: list[str] = []
    extension.app.conf.result_accept_content = accepted
    monkeypatch.setattr(
        extension.app.backend, "mark_as_done", lambda job_id, *_, **__: done.append(job_id)
    )
    found = queries.outcome(extension.store, told.job_id)
    assert found is not None
    part = replace(
        new_message(body=b'[[], {}, {"chord": {"task": "app.body"}}]'),
        headers=json.dumps({"task": "app.work", "id": told.job_id}),
    )

    publisher = BrokerPublisher(extension.app, extension.connections)
    is_closed = publisher.close_books(found[0], part)

    assert (is_closed, done) == ((True, [told.job_id]) if accepted == ["json"] else (False, []))
