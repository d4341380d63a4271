"""Text as users have it: NUL, lone surrogates, emoji, names as long as they may be."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Absent, Accepted, Claimed, Failure, Held, Late
from celery_lease.states import JobState, LateOutcome, LossCause
from celery_lease.store import queries, transitions
from celery_lease.store.transitions.submission import message_parameters
from tests.store.builders import (
    NO_BACKOFF,
    attempt_row,
    job_row,
    new_delivery,
    new_job,
    new_message,
    parting,
    renewal,
    rows,
    running,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_lease.store.engine import Store

NASTY = "a\x00b \ud800 \U0001f600 ü 'quoted' %s %(x)s :x \\"
CLEAN = "a\\x00b \\ud800 \U0001f600 ü 'quoted' %s %(x)s :x \\"
LONG = "ü" * 254 + "\U0001f600"
LONGER = LONG + "x" * 1000


def failure(text: str) -> Failure:
    return Failure(text, text, text, "error", retryable=True)


def test_what_a_body_raised_is_kept_whatever_its_text(store: Store) -> None:
    lease = running(store)

    said = parting(NASTY, failure=failure(NASTY), progress=NASTY, checkpoint=NASTY)
    transitions.fail(store, lease, said, error=b"1", error_content_type="x")

    job, attempt = job_row(store), attempt_row(store, lease)
    assert (job["error_type"], job["error_message"], job["state_reason"]) == (CLEAN,) * 3
    names = ("error_type", "error_message", "traceback", "stop_reason", "progress", "checkpoint")
    assert {attempt[name] for name in names} == {CLEAN}


def test_a_heartbeats_texts_are_kept_whatever_they_are(store: Store) -> None:
    lease = running(store)

    answer = transitions.renew(store, [renewal(lease, progress=NASTY, checkpoint=NASTY)])

    assert answer.renewed == {("job", 1)}
    assert attempt_row(store, lease)["progress"] == CLEAN
    assert attempt_row(store, lease)["checkpoint"] == CLEAN


def test_a_late_outcome_is_kept_whatever_its_text(store: Store) -> None:
    lease = running(store)
    lost = {"cause": LossCause.STALLED, "lost_backoff": NO_BACKOFF}
    transitions.lost(store, lease, reason=NASTY, trace=NASTY, **lost)  # type: ignore[arg-type]
    assert attempt_row(store, lease)["traceback"] == CLEAN

    transitions.reject(store, lease, Late(LateOutcome.FAILED, failure=failure(NASTY)))

    attempt = attempt_row(store, lease)
    assert {attempt[name] for name in ("error_type", "error_message", "traceback")} == {CLEAN}
    assert attempt["stop_reason"] == CLEAN


def test_an_operators_reason_is_kept_whatever_its_text(store: Store) -> None:
    submitted(store)

    transitions.hold_waiting(store, "job", reason=NASTY)
    assert job_row(store)["state_reason"] == CLEAN
    transitions.resume(store, "job", reason=NASTY * 100)
    assert job_row(store)["state_reason"] == (CLEAN * 100)[:255]
    transitions.cancel(store, "job", reason=NASTY)
    assert job_row(store)["state_reason"] == CLEAN


def test_names_that_say_who_and_where_are_cut_and_never_refused(store: Store) -> None:
    submitted(
        store,
        submitter=LONGER,
        root_id=LONGER,
        parent_id=LONGER,
        group_id=LONGER,
    )
    transitions.claim(store, new_delivery(worker=LONGER))
    transitions.record_pass(store, counts="{}", worker=LONGER)

    job = job_row(store)
    assert {job[name] for name in ("submitter", "root_id", "parent_id", "group_id")} == {LONG}
    assert rows(store)["attempt"]["job", 1]["worker"] == LONG
    assert rows(store)["pass"][1]["worker"] == LONG


def test_reasons_and_error_types_are_cut_and_messages_are_not(store: Store) -> None:
    lease = running(store)

    said = parting(LONGER, failure=failure(LONGER))
    transitions.fail(store, lease, said, error=None, error_content_type=None)

    job, attempt = job_row(store), attempt_row(store, lease)
    assert (job["state_reason"], job["error_type"]) == (LONG, LONG)
    assert (attempt["stop_reason"], attempt["error_type"]) == (LONG, LONG)
    assert job["error_message"] == attempt["error_message"] == attempt["traceback"] == LONGER


def test_an_end_with_a_reason_that_was_cut_is_recognised_when_it_is_repeated(
    store: Store,
) -> None:
    lease = running(store)
    said = parting(NASTY + LONGER)

    first = transitions.release(store, lease, said)
    second = transitions.release(store, lease, said)

    assert second == first


def test_names_may_have_255_characters_of_any_kind(store: Store) -> None:
    submitted(store, LONG, task=LONG, queue=LONG)
    delivery = new_delivery(LONG, owner=LONG)

    answer = transitions.claim(store, delivery)
    repeated = transitions.claim(store, delivery)

    assert isinstance(answer, Claimed)
    assert answer == repeated
    assert answer.lease == Held(LONG, 1, LONG)
    assert transitions.renew(store, [renewal(answer.lease)]).renewed == {(LONG, 1)}
    done = transitions.complete(store, answer.lease, parting(), result=b"1", result_type="x")
    assert isinstance(done, Accepted)
    found = queries.outcome(store, LONG)
    assert found is not None
    assert (found[1].task, found[1].queue) == (LONG, LONG)


def test_a_megabyte_of_text_and_of_bytes_is_kept(store: Store) -> None:
    text = "ü" * 500_000
    lease = running(store)

    transitions.renew(store, [renewal(lease, checkpoint=text)])
    said = parting(failure=Failure("E", "m", text))
    transitions.fail(store, lease, said, error=text.encode(), error_content_type="x")

    attempt = attempt_row(store, lease)
    assert attempt["checkpoint"] == attempt["traceback"] == text
    assert job_row(store)["result"] == text.encode()


def outcome_of(call: Callable[[], Any]) -> Any:
    """Return what a call returns or raises, which must not take long."""
    started = time.monotonic()
    try:
        answer = call()
    except Exception as error:
        answer = error
    assert time.monotonic() - started < 2
    return answer


@pytest.mark.parametrize("text", ["a\ud800b", "a\x00b"], ids=["surrogate", "NUL"])
@pytest.mark.parametrize("what", ["job_id", "task", "queue"])
def test_a_name_that_cannot_be_kept_is_no_outage(store: Store, what: str, text: str) -> None:
    """Tried again for ever it would block whoever publishes: it fails at once, or is kept."""
    new = new_job(**{what: text})

    answer = outcome_of(lambda: transitions.submit(store, new))

    assert not isinstance(answer, StoreUnavailable)
    jobs = list(rows(store)["job"].values())
    if answer is True:
        assert [job["id" if what == "job_id" else what] for job in jobs] == [text]
    else:
        assert isinstance(answer, Exception)
        assert jobs == []


@pytest.mark.parametrize("job_id", ["a\x00b", "a\ud800b", "x" * 5000], ids=["NUL", "sur", "long"])
def test_a_delivery_with_an_impossible_id_is_no_outage(store: Store, job_id: str) -> None:
    """A poison message must not keep a worker waiting for a store that is there."""
    submitted(store)

    answer = outcome_of(lambda: transitions.claim(store, new_delivery(job_id)))

    assert answer == Absent() or isinstance(answer, Exception)
    assert not isinstance(answer, StoreUnavailable)
    assert job_row(store)["state"] == JobState.QUEUED


def test_every_bounded_text_of_a_message_is_checked_before_it_is_written(store: Store) -> None:
    bounded = {
        column.name
        for column in store.tables.message.columns
        if isinstance(column.type, sa.String) and column.type.length
    }

    for name in sorted(bounded - {"job_id"}):
        with pytest.raises(ValueError, match=f"{name} has at most 255"):
            message_parameters("job", replace(new_message(), **{name: "x" * 256}))


def test_what_a_database_refuses_is_said_without_the_arguments_of_the_task(store: Store) -> None:
    with store.single() as connection, pytest.raises(sa.exc.DBAPIError) as caught:
        connection.execute(
            sa.insert(store.tables.message).values(job_id="x", version=1, body=b"hunter2")
        )

    assert "hunter2" not in str(caught.value)
