"""The read models and the listings made with them."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, get_type_hints

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import selectinload

from celery_lease.records import Late
from celery_lease.states import AttemptState, JobState, LateOutcome, LossCause, OnExpiry
from celery_lease.store import reads, transitions
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema
from celery_lease.store.models import Attempt, Job, models_for
from celery_lease.store.schema import build_tables
from tests.store.builders import (
    JSON,
    ONE,
    OTHER,
    WORKER_NOW,
    claimed,
    finished,
    holding,
    lock_job,
    move_back,
    running,
    statements_of,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# -- the classes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "table", "more"),
    [
        (Job, build_tables().job, {"attempts", "result_size"}),
        (Attempt, build_tables().attempt, {"job", "late_result_size"}),
    ],
)
def test_every_column_is_a_typed_attribute(model: type, table: sa.Table, more: set[str]):
    assert set(get_type_hints(model)) == {column.name for column in table.c} | more


def test_a_job_is_read_with_its_words_and_instants(store: Store):
    lease = running(store, submitter="web1", queue="celery")
    finished(store, lease)

    with reads.session(store) as session:
        job = session.scalars(sa.select(Job)).one()

    assert (job.id, job.task, job.state, job.on_expiry) == (
        "job",
        "app.work",
        JobState.SUCCEEDED,
        OnExpiry.RETRY,
    )
    assert job.is_final
    assert job.is_settled
    assert job.created_at.utcoffset() == timedelta(0)
    assert (job.submitter, job.queue, job.accepted_attempt) == ("web1", "celery", 1)
    assert (job.result_size, job.result_type) == (1, JSON)
    assert repr(job) == "<Job job app.work succeeded>"


def test_a_word_is_compared_as_a_member_or_as_text(store: Store):
    running(store)

    with reads.session(store) as session:
        for word in (JobState.RUNNING, "running"):
            assert session.scalars(sa.select(Job).where(Job.state == word)).one().id == "job"
            assert session.scalars(sa.select(Job).where(Job.state != word)).all() == []


def test_attempts_are_loaded_in_order_when_they_are_asked_for(store: Store):
    first = running(store)
    assert transitions.lost(store, first, cause=LossCause.LOST, reason="gone", lost_backoff=(0.0,))
    claimed(store)

    with reads.session(store) as session:
        job = session.scalars(sa.select(Job).options(selectinload(Job.attempts))).one()

    assert [attempt.fencing_token for attempt in job.attempts] == [1, 2]
    assert [attempt.state for attempt in job.attempts] == [AttemptState.LOST, AttemptState.CLAIMED]
    assert [attempt.is_live for attempt in job.attempts] == [False, True]
    assert repr(job.attempts[0]) == "<Attempt 1 of job lost>"


def test_attempts_are_not_loaded_by_accident(store: Store):
    running(store)

    with reads.session(store) as session:
        job = session.scalars(sa.select(Job)).one()

        with pytest.raises(InvalidRequestError, match="attempts"):
            _ = job.attempts


def test_what_is_large_is_loaded_at_its_first_use(store: Store):
    finished(store, running(store))

    with reads.session(store) as session, statements_of(store) as statements:
        job = session.scalars(sa.select(Job)).one()
        assert "celery_lease_job.result," not in statements[0][0]

        assert job.result == b"1"


def test_attempts_can_be_joined_with_their_jobs(store: Store):
    running(store, "one")
    running(store, "other", owner=OTHER)

    with reads.session(store) as session:
        found = session.scalars(sa.select(Attempt).join(Attempt.job).where(Job.id == "other"))

        assert [attempt.owner for attempt in found] == [OTHER]


def test_another_prefix_has_classes_of_its_own_that_are_still_jobs(database_url: str):
    store = Store(url=database_url, table_prefix="other_")
    ensure_schema(store, auto_migrate=True)
    finished(store, running(store))

    job = reads.job(store, "job")

    assert isinstance(job, Job)
    assert type(job) is models_for("other_")[0]
    assert type(job) is not Job
    assert [type(attempt) for attempt in job.attempts] == [models_for("other_")[1]]
    assert reads.jobs(store)[0].id == "job"
    store.close()


def test_the_default_prefix_has_the_classes_one_imports():
    assert models_for("celery_lease_") == (Job, Attempt)
    assert models_for("celery_lease_", "leases") == models_for("celery_lease_", "leases")
    assert models_for("celery_lease_", "leases") != (Job, Attempt)


def test_a_schema_of_its_own(postgresql_url: str):
    store = Store(url=postgresql_url, schema="leases")
    ensure_schema(store, auto_migrate=True)
    running(store)

    assert [job.id for job in reads.jobs(store)] == ["job"]
    store.close()


# -- the listings ----------------------------------------------------------------------------


@pytest.fixture
def three(store: Store) -> Store:
    """A store with three jobs: ``old`` (1000 s), ``middle`` (100 s, running), ``new``."""
    submitted(store, "old", task="app.old")
    running(store, "middle")
    submitted(store, "new")
    move_back(store, "old", 1000)
    move_back(store, "middle", 100)
    return store


def _ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


def test_jobs_are_listed_from_the_newest_on(three: Store):
    assert _ids(reads.jobs(three)) == ["new", "middle", "old"]


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({"states": [JobState.QUEUED]}, ["new", "old"]),
        ({"states": [JobState.RUNNING, JobState.HELD]}, ["middle"]),
        ({"states": []}, []),
        ({"task": "app.old"}, ["old"]),
        ({"older_than": 50}, ["middle", "old"]),
        ({"newer_than": 500}, ["new", "middle"]),
        ({"older_than": 50, "newer_than": 500}, ["middle"]),
        ({"limit": 2}, ["new", "middle"]),
    ],
)
def test_a_listing_can_be_narrowed(three: Store, asked: dict[str, Any], ids: list[str]):
    assert _ids(reads.jobs(three, **asked)) == ids


def test_pages_follow_each_other_without_gap_or_overlap(store: Store):
    for number in range(7):
        submitted(store, f"job{number}")
    instant = store_now(store)
    with store.transaction() as connection:
        job = store.tables.job
        # Jobs of one instant: the id decides.
        connection.execute(sa.update(job).where(job.c.id != "job0").values(created_at=instant))

    pages: list[list[str]] = []
    last = None
    while page := reads.jobs(store, limit=3, after=last):
        pages.append(_ids(page))
        last = page[-1]

    assert [len(page) for page in pages] == [3, 3, 1]
    assert sorted(itertools.chain(*pages)) == [f"job{number}" for number in range(7)]


def test_a_listing_does_not_load_results(store: Store):
    finished(store, running(store))

    with statements_of(store) as statements:
        reads.jobs(store)

    assert "celery_lease_job.result," not in statements[0][0]


def test_a_listing_does_not_wait_for_a_writer(store: Store):
    running(store)

    with holding(store, lock_job(store)):
        assert _ids(reads.jobs(store)) == ["job"]


def test_a_job_is_read_with_all_there_is(store: Store):
    lease = running(store)
    move_back(store, "job", 31)
    assert transitions.expire(store, limit=10, lost_backoff=(0.0,))
    assert transitions.reject(
        store, lease, Late(LateOutcome.SUCCEEDED, result=b"42", digest="sha256:1")
    )
    finished(store, claimed(store, owner=OTHER))

    job = reads.job(store, "job")

    assert job is not None
    assert job.result == b"1"
    first, second = job.attempts
    assert (first.state, first.late_outcome, first.late_result, first.late_result_size) == (
        AttemptState.EXPIRED,
        LateOutcome.SUCCEEDED,
        b"42",
        2,
    )
    assert (second.owner, second.worker_claimed_at) == (OTHER, WORKER_NOW)
    assert second.traceback is None
    assert reads.job(store, "none") is None


def test_attempts_are_listed_from_the_newest_claim_on(store: Store):
    finished(store, running(store, "ended"))
    running(store, "live")
    move_back(store, "ended", 10)

    assert [a.job_id for a in reads.attempts(store)] == ["live", "ended"]
    assert [a.job_id for a in reads.attempts(store, live=True)] == ["live"]
    assert [a.job_id for a in reads.attempts(store, live=False)] == ["ended"]
    assert [a.job_id for a in reads.attempts(store, job_id="ended")] == ["ended"]
    assert [a.owner for a in reads.attempts(store, worker="celery@one", limit=1)] == [ONE]
    assert reads.attempts(store, worker="celery@none") == []


def test_every_state_is_counted(store: Store):
    assert reads.counts(store) == dict.fromkeys(JobState, 0)

    running(store, "one")
    finished(store, running(store, "two"))

    found = reads.counts(store)
    assert (found[JobState.RUNNING], found[JobState.SUCCEEDED]) == (1, 1)
    assert sum(found.values()) == 2


def test_the_clock_is_the_store_s(store: Store):
    assert abs(reads.now(store) - store_now(store)) < timedelta(seconds=5)


def test_a_long_history_is_listed_through_the_index(
    postgresql_url: str, explain: Callable[[Store, str, Any], str]
):
    """The plan, with so many rows that reading them all would cost more."""
    store = Store(url=postgresql_url)
    ensure_schema(store, auto_migrate=True)
    with store.transaction() as connection:
        connection.exec_driver_sql(
            "INSERT INTO celery_lease_job (id, task, state, fencing_token, lost_count, "
            "failure_count, max_attempts, on_expiry, available_at, message_version, "
            "dispatch_count, created_at) SELECT n::text, 'app.work', 'queued', 0, 0, 0, 3, "
            "'retry', t, 1, 1, t FROM generate_series(1, 20000) AS g(n), "
            "LATERAL (SELECT clock_timestamp() - n * interval '1 second' AS t) AS i"
        )
        connection.exec_driver_sql("ANALYZE celery_lease_job")

    last = reads.jobs(store, limit=1000)[-1]
    for asked in ({}, {"after": last}, {"older_than": 9000.0}, {"newer_than": 60.0}):
        with statements_of(store) as statements:
            assert reads.jobs(store, limit=50, **asked)
        plan = explain(store, *statements[-1])
        assert "Index Scan Backward using celery_lease_job_created" in plan, (asked, plan)
        assert "Sort" not in plan, (asked, plan)
        if asked:
            assert "Index Cond" in plan, (asked, plan)
    store.close()


@pytest.fixture
def explain() -> Callable[[Store, str, Any], str]:
    """Return PostgreSQL's plan of a statement."""

    def explained(store: Store, statement: str, parameters: Any) -> str:
        with store.single() as connection:
            rows = connection.exec_driver_sql("EXPLAIN " + statement, parameters)
            return "\n".join(row[0] for row in rows)

    return explained
