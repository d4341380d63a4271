"""What the result backend keeps: results, groups, and chords that count each part once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from celery_lease.records import Failure
from celery_lease.store import results, transitions
from celery_lease.store.engine import Store
from celery_lease.store.transitions.results import FORGOTTEN
from tests.store.builders import (
    at_once,
    claimed,
    finished,
    parting,
    running,
    set_job,
    store_now,
    submitted,
)

LoseReplies = Callable[[Store, int], AbstractContextManager[None]]


def kept(store: Store, task_id: str = "t") -> tuple[str, bytes | None, int] | None:
    found = results.find(store, [task_id])[task_id].kept
    return None if found is None else (found.status, found.meta, found.fencing_token)


def ended(store: Store, *, settled: bool) -> str:
    lease = running(store)
    transitions.complete(
        store,
        lease,
        parting(None),
        result=b"1",
        result_type="application/json",
        settled=settled,
    )
    return lease.job_id


def rows(store: Store, table: sa.Table) -> list[dict[str, Any]]:
    with store.single() as connection:
        return [dict(row) for row in connection.execute(sa.select(table)).mappings()]


def age(store: Store, table: sa.Table, column: str, seconds: float) -> None:
    """Make the rows of a table older, each by the same."""
    (key, *_) = table.primary_key.columns
    for row in rows(store, table):
        older = row[column] - timedelta(seconds=seconds)
        with store.single() as connection:
            connection.execute(sa.update(table).where(key == row[key.name]).values({column: older}))


# -- results ---------------------------------------------------------------------------------


def test_the_newest_state_is_kept_until_a_success(store: Store):
    assert transitions.keep_result(store, "t", status="STARTED", meta=b"1")
    assert transitions.keep_result(store, "t", status="FAILURE", meta=b"2")
    assert kept(store) == ("FAILURE", b"2", 0)

    assert transitions.keep_result(store, "t", status="SUCCESS", meta=b"3")
    assert not transitions.keep_result(store, "t", status="FAILURE", meta=b"4")
    assert not transitions.keep_result(store, "t", status="SUCCESS", meta=b"5")

    assert kept(store) == ("SUCCESS", b"3", 0)


def test_a_stale_attempt_writes_over_nothing_of_its_successor(store: Store):
    transitions.keep_result(store, "t", status="HALF", meta=b"of 2", fencing_token=2)

    assert not transitions.keep_result(store, "t", status="SUCCESS", meta=b"of 1", fencing_token=1)
    assert kept(store) == ("HALF", b"of 2", 2)

    transitions.keep_result(store, "t", status="SUCCESS", meta=b"of 2", fencing_token=2)
    assert transitions.keep_result(store, "t", status="HALF", meta=b"of 3", fencing_token=3)
    assert kept(store) == ("HALF", b"of 3", 3)


def test_many_writers_of_one_success_leave_the_first(store: Store, other_store: Store):
    """Whoever is told that it was kept is the one whose result is there."""
    told: list[bytes] = []

    def write(one: Store, meta: bytes) -> None:
        if transitions.keep_result(one, "t", status="SUCCESS", meta=meta):
            told.append(meta)

    at_once(*[partial(write, (store, other_store)[n % 2], b"%d" % n) for n in range(8)])

    assert told == [kept(store)[1]]  # type: ignore[index]


def test_a_result_whose_reply_was_lost_is_kept_once(store: Store, lose_replies: LoseReplies):
    with lose_replies(store, 1):
        transitions.keep_result(store, "t", status="SUCCESS", meta=b"1")

    assert kept(store) == ("SUCCESS", b"1", 0)


def test_a_forgotten_result_of_a_task_is_gone(store: Store):
    transitions.keep_result(store, "t", status="SUCCESS", meta=b"1")

    transitions.forget_result(store, "t")

    assert kept(store) is None


def test_forgetting_a_job_drops_its_result_and_keeps_its_record(store: Store):
    job_id = ended(store, settled=True)

    transitions.forget_result(store, job_id)

    found = results.find(store, [job_id])[job_id]
    assert found.job is not None
    assert found.job.outcome is not None
    assert found.job.outcome.result is None
    assert kept(store, job_id) == (FORGOTTEN, None, 1)
    # What Celery stores of it afterwards, its children, does not bring it back.
    assert not transitions.keep_result(
        store, job_id, status="SUCCESS", meta=b"late", fencing_token=1
    )


def test_forgetting_an_unsettled_job_keeps_what_a_replay_needs(store: Store):
    job_id = ended(store, settled=False)

    transitions.forget_result(store, job_id)

    found = results.standing(store, job_id)
    assert found is not None
    assert found.outcome is not None
    assert found.outcome.result is not None
    assert kept(store, job_id) == (FORGOTTEN, None, 1)


def test_forgetting_a_running_job_forgets_only_what_it_has_said(store: Store):
    lease = running(store)
    transitions.keep_result(store, lease.job_id, status="HALF", meta=b"1", fencing_token=1)

    transitions.forget_result(store, lease.job_id)

    assert kept(store, lease.job_id) is None


def test_a_job_is_told_with_the_attempt_that_its_outcome_is_of(store: Store):
    lease = running(store)
    failure = Failure(error_type="builtins.ValueError", error_message="no", traceback="line 1")
    transitions.fail(
        store, lease, parting(failure=failure), error=b"{}", error_content_type="application/json"
    )

    found = results.standing(store, lease.job_id)

    assert found is not None
    assert (found.error_type, found.error_message) == ("builtins.ValueError", "no")
    assert (found.traceback, found.owner) == ("line 1", lease.owner)
    assert results.standing(store, "nobody") is None


def test_more_ids_than_one_statement_takes_are_all_found(store: Store):
    ids = [f"t{number}" for number in range(results.BATCH + 2)]
    for task_id in (ids[0], ids[-1]):
        transitions.keep_result(store, task_id, status="SUCCESS", meta=b"1")

    found = results.find(store, ids)

    assert list(found) == ids
    assert [task_id for task_id in ids if found[task_id].kept] == [ids[0], ids[-1]]


# -- groups ----------------------------------------------------------------------------------


def test_a_group_is_kept_written_over_and_dropped(store: Store):
    assert results.group(store, "g") is None
    transitions.keep_group(store, "g", result=b"1")
    transitions.keep_group(store, "g", result=b"2")
    assert results.group(store, "g")[0] == b"2"  # type: ignore[index]

    transitions.drop_group(store, "g")

    assert results.group(store, "g") is None


# -- chords ----------------------------------------------------------------------------------


def count(store: Store, task_id: str, position: int | None = 0) -> bool:
    return transitions.count_part(
        store, "c", task_id, status="SUCCESS", result=task_id.encode(), position=position
    )


def claim(store: Store, nonce: str) -> bool:
    return transitions.claim_chord(store, "c", nonce, claim_seconds=30.0)


def is_complete(store: Store) -> bool:
    found = results.chord(store, "c")
    return found is not None and found.is_complete


def test_a_part_is_counted_once_however_often_it_is_told(store: Store, other_store: Store):
    transitions.size_chord(store, "c", size=2)

    assert count(store, "a")
    assert not count(other_store, "a")
    assert not is_complete(store)

    assert count(other_store, "b")
    assert is_complete(store)


def test_parts_may_return_before_the_size_is_known(store: Store):
    transitions.size_chord(store, "c", header=b"nested")
    count(store, "a")
    assert not is_complete(store)

    transitions.size_chord(store, "c", size=1)

    found = results.chord(store, "c")
    assert found == results.Chord(1, 0, 1, b"nested", is_fired=False)
    assert is_complete(store)


def test_an_added_part_is_waited_for_and_added_once(store: Store):
    transitions.size_chord(store, "c", size=1)
    transitions.expect_part(store, "c", "added")
    transitions.expect_part(store, "c", "added")
    count(store, "a")
    assert not is_complete(store)

    assert count(store, "added")
    assert not count(store, "added")

    assert is_complete(store)


def test_parts_come_in_the_order_of_the_header(store: Store):
    for task_id, position in (("late", None), ("b", 1), ("a", 0)):
        count(store, task_id, position)

    assert [part.task_id for part in results.parts(store, "c")] == ["a", "b", "late"]
    assert results.parts(store, "c")[0] == results.Part("a", "SUCCESS", b"a")


def test_one_of_many_last_parts_fires(store: Store, other_store: Store):
    transitions.size_chord(store, "c", size=8)
    fired: list[str] = []

    def come_back(one: Store, name: str) -> None:
        count(one, name)
        found = results.chord(one, "c")
        if found is not None and found.is_complete and claim(one, name):
            fired.append(name)

    at_once(*[partial(come_back, (store, other_store)[n % 2], f"part{n}") for n in range(8)])

    assert len(fired) == 1


def test_the_claim_of_a_dead_process_runs_out(store: Store):
    transitions.size_chord(store, "c", size=1)
    assert claim(store, "one")
    assert not claim(store, "two")

    age(store, store.tables.chord, "claimed_at", 31)

    assert claim(store, "two")
    assert not claim(store, "one")


def test_a_claim_whose_reply_was_lost_is_the_same_claim(store: Store, lose_replies: LoseReplies):
    transitions.size_chord(store, "c", size=1)

    with lose_replies(store, 1):
        assert claim(store, "one")


def test_a_claim_that_was_given_up_is_free_at_once(store: Store):
    transitions.size_chord(store, "c", size=1)
    claim(store, "one")

    transitions.yield_chord(store, "c", "two")
    assert not claim(store, "two")
    transitions.yield_chord(store, "c", "one")

    assert claim(store, "two")


def test_a_fired_chord_is_claimed_by_nobody_and_its_parts_are_gone(store: Store):
    transitions.size_chord(store, "c", size=1)
    count(store, "a")
    claim(store, "one")

    transitions.close_chord(store, "c")

    assert not claim(store, "one")
    assert rows(store, store.tables.chord_part) == []
    # Its size comes late, or a part is told again: it stays fired.
    transitions.size_chord(store, "c", size=1)
    count(store, "a")
    assert not is_complete(store)
    transitions.yield_chord(store, "c", "one")
    assert rows(store, store.tables.chord)[0]["claim_nonce"] == "one"


# -- the end of it ---------------------------------------------------------------------------


def prune(store: Store, limit: int = 10) -> int:
    return transitions.prune_results(store, seconds=100, waiting_seconds=200, limit=limit)


def test_what_is_old_is_removed_and_what_is_not_is_left(store: Store):
    tables = store.tables
    transitions.keep_result(store, "old", status="SUCCESS", meta=b"1")
    transitions.keep_group(store, "old", result=b"1")
    age(store, tables.result, "stored_at", 101)
    age(store, tables.group, "stored_at", 101)
    transitions.keep_result(store, "new", status="SUCCESS", meta=b"1")
    transitions.keep_group(store, "new", result=b"1")

    assert prune(store) == 2

    assert [row["task_id"] for row in rows(store, tables.result)] == ["new"]
    assert [row["id"] for row in rows(store, tables.group)] == ["new"]
    assert prune(store) == 0


@pytest.mark.parametrize("settled", [True, False])
def test_a_job_that_was_forgotten_stays_so_until_it_goes(store: Store, *, settled: bool):
    job_id = ended(store, settled=settled)
    transitions.forget_result(store, job_id)
    transitions.keep_result(store, "other", status="SUCCESS", meta=b"1")
    age(store, store.tables.result, "stored_at", 101)

    assert prune(store) == 1

    assert kept(store, job_id) == (FORGOTTEN, None, 1)
    set_job(store, settled_at=store_now(store))
    age(store, store.tables.job, "finished_at", 101)
    assert prune_jobs(store) == 1
    assert rows(store, store.tables.result) == []


def test_what_a_task_without_a_lease_gave_does_not_go_with_a_job(store: Store):
    """It stands in for the job, under the same id, and may be younger."""
    job_id = ended(store, settled=True)
    transitions.keep_result(store, job_id, status="SUCCESS", meta=b"1", fencing_token=1)
    age(store, store.tables.job, "finished_at", 101)

    assert prune_jobs(store) == 1

    assert kept(store, job_id) == ("SUCCESS", b"1", 1)


def test_the_word_that_a_job_was_forgotten_does_not_outlive_it(store: Store):
    """One that somebody removed by hand."""
    job_id = ended(store, settled=True)
    transitions.forget_result(store, job_id)
    age(store, store.tables.result, "stored_at", 101)
    with store.engine.begin() as connection:
        connection.execute(sa.delete(store.tables.job))

    assert prune(store) == 1


def prune_jobs(store: Store) -> int:
    return transitions.prune(store, succeeded_seconds=100, failed_seconds=100, limit=10)


def test_a_batch_has_a_limit(store: Store):
    for number in range(3):
        transitions.keep_result(store, f"t{number}", status="SUCCESS", meta=b"1")
    age(store, store.tables.result, "stored_at", 101)

    assert [prune(store, limit=2), prune(store, limit=2), prune(store, limit=2)] == [2, 1, 0]


def test_a_chord_that_still_counts_is_left(store: Store):
    """Its first parts are older than the limit, and are needed when the last one returns."""
    chord, part = store.tables.chord, store.tables.chord_part
    transitions.size_chord(store, "c", size=3)
    count(store, "a")
    age(store, chord, "created_at", 201)
    age(store, part, "stored_at", 201)
    count(store, "b")

    assert prune(store) == 0
    age(store, part, "stored_at", 201)
    assert prune(store) >= 1

    while prune(store):
        pass
    assert (rows(store, chord), rows(store, part)) == ([], [])


def test_a_chord_of_which_nothing_was_heard_is_left_for_longer_than_a_result(store: Store):
    """Its one part may be the last step of a chain whose first one takes days."""
    transitions.size_chord(store, "c", size=1)
    age(store, store.tables.chord, "created_at", 101)

    assert prune(store) == 0
    assert transitions.prune_results(store, seconds=100, waiting_seconds=None, limit=10) == 0
    age(store, store.tables.chord, "created_at", 100)
    assert transitions.prune_results(store, seconds=100, waiting_seconds=None, limit=10) == 0
    assert prune(store) == 1


@pytest.mark.parametrize("state", ["queued", "running", "unsettled"])
def test_a_chord_is_left_while_a_leased_part_of_it_is_to_come(store: Store, state: str):
    chord, part = store.tables.chord, store.tables.chord_part
    transitions.size_chord(store, "c", size=2)
    count(store, "a")
    submitted(store, "other", group_id="another chord")
    submitted(store, group_id="c")
    lease = None if state == "queued" else claimed(store)
    if lease is not None and state == "unsettled":
        finished(store, lease, settled=False)
    age(store, chord, "created_at", 9999)
    age(store, part, "stored_at", 9999)

    assert prune(store) == 0

    assert len(rows(store, part)) == 1
    if state == "unsettled":
        set_job(store, settled_at=store_now(store))
    else:
        finished(store, claimed(store) if lease is None else lease)
    assert prune(store) == 2


def test_what_a_fired_chord_leaves_is_removed_with_the_results(store: Store):
    submitted(store, group_id="c")
    transitions.size_chord(store, "c", size=1)
    transitions.close_chord(store, "c")
    age(store, store.tables.chord, "created_at", 101)

    assert prune(store) == 1


def test_what_a_replay_left_of_a_fired_chord_is_removed(store: Store):
    transitions.size_chord(store, "c", size=1)
    transitions.close_chord(store, "c")
    count(store, "a")
    age(store, store.tables.chord_part, "stored_at", 101)

    assert prune(store) == 1

    assert rows(store, store.tables.chord_part) == []
    assert len(rows(store, store.tables.chord)) == 1
