"""submit_keyed: one job of a task holds a key; a job whose id is known to others follows it."""

# ruff: noqa: B023  (the calls of a race have ended when the next round binds its names anew)

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Claimed, Existing, IdempotencyKey, NewJob, Refused, Replay
from celery_lease.states import JobState, Refusal
from celery_lease.store import transitions
from celery_lease.store.engine import RowBusy
from celery_lease.store.transitions import keys
from celery_lease.store.transitions.claim_statements import seen_statement
from tests.store.builders import (
    JSON,
    ROUNDS,
    again,
    at_once,
    changes_of,
    claimed,
    expired,
    finished,
    holding,
    job_row,
    lock_job,
    move_back,
    new_delivery,
    new_job,
    new_message,
    nothing_changes,
    parting,
    rows,
    set_job,
    statements_of,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.records import Held
    from celery_lease.store.engine import Store
    from tests.store.conftest import LoseReplies

#: The lifetimes: until final, for a time after success, as long as the row is kept.
UNTIL_FINAL, A_MINUTE, FOR_EVER = 0.0, 60.0, None


def keyed_job(job_id: str, *, key: str = "key", **changes: Any) -> NewJob:
    retention = changes.pop("retention", A_MINUTE)
    digest = changes.pop("digest", "sha256:1")
    return new_job(job_id, key=IdempotencyKey(key, digest, retention), **changes)


def keyed(store: Store, job_id: str = "one", **changes: Any) -> str:
    """Record a job that holds its key."""
    assert transitions.submit_keyed(store, keyed_job(job_id, **changes)) is None
    return job_id


def following(store: Store, job_id: str = "two", **changes: Any) -> str:
    """Record a job under a key that another one holds."""
    assert transitions.submit_keyed(store, keyed_job(job_id, follows=True, **changes)) is None
    assert job_row(store, job_id)["active_key"] is None
    return job_id


def running_keyed(store: Store, job_id: str = "one", **changes: Any) -> Held:
    return claimed(store, keyed(store, job_id, **changes))


def succeeded_keyed(store: Store, job_id: str = "one", **changes: Any) -> str:
    finished(store, running_keyed(store, job_id, **changes))
    return job_id


def failed(store: Store, lease: Held) -> None:
    transitions.fail(store, lease, parting(), error=b"{}", error_content_type=JSON, settled=True)


def holders(store: Store) -> list[str]:
    return sorted(row["id"] for row in rows(store)["job"].values() if row["active_key"] is not None)


# --- a key is held by one job -------------------------------------------------------------------


def test_a_job_holds_its_key_from_its_submit(store: Store) -> None:
    keyed(store, "one", key="order-7", digest="sha256:abc")

    row = job_row(store, "one")
    assert (row["idempotency_key"], row["active_key"]) == ("order-7", "order-7")
    assert row["arguments_digest"] == "sha256:abc"
    assert isinstance(transitions.claim(store, new_delivery("one")), Claimed)


def test_a_second_submit_is_given_the_existing_job_and_writes_nothing(store: Store) -> None:
    keyed(store, "one")

    with nothing_changes(store):
        answer = transitions.submit_keyed(store, keyed_job("two"))

    assert answer == Existing("one")


def test_other_arguments_under_the_same_key_are_told(store: Store) -> None:
    keyed(store, "one", digest="sha256:1")

    with nothing_changes(store):
        answer = transitions.submit_keyed(store, keyed_job("two", digest="sha256:2"))

    assert answer == Existing("one", same_arguments=False)


@pytest.mark.parametrize(("first", "second"), [(None, "sha256:1"), ("sha256:1", None)])
def test_where_there_is_no_digest_nothing_is_compared(
    store: Store, first: str | None, second: str | None
) -> None:
    keyed(store, "one", digest=first)

    assert transitions.submit_keyed(store, keyed_job("two", digest=second)) == Existing("one")


def test_a_key_is_one_of_its_task(store: Store) -> None:
    keyed(store, "one", task="app.work")
    keyed(store, "two", task="app.other")

    assert holders(store) == ["one", "two"]


@pytest.mark.parametrize(("one", "other"), [("key", "KEY"), ("e", "é"), ("k1", "k2")])
def test_keys_that_differ_are_different_keys(store: Store, one: str, other: str) -> None:
    keyed(store, "one", key=one)
    keyed(store, "two", key=other)

    assert holders(store) == ["one", "two"]


def test_the_same_id_is_the_existing_job_whatever_its_key(store: Store) -> None:
    keyed(store, "one", key="key")

    with nothing_changes(store):
        answer = transitions.submit_keyed(store, keyed_job("one", key="another"))

    assert answer == Existing("one")


def test_a_job_is_recorded_under_its_key_by_as_many_statements_as_without(store: Store) -> None:
    with statements_of(store) as without:
        submitted(store, "plain")
    with statements_of(store) as under_key:
        keyed(store, "one")

    assert len(under_key) == len(without)
    if store.dialect.writing_ctes:
        assert len(without) == 1


# --- how long it is held ------------------------------------------------------------------------


@pytest.mark.parametrize("retention", [UNTIL_FINAL, A_MINUTE, FOR_EVER])
@pytest.mark.parametrize("state", ["queued", "running", "retry_wait", "held"])
def test_a_key_is_held_while_its_job_is_not_final(
    store: Store, state: str, retention: float | None
) -> None:
    lease = running_keyed(store) if state != "queued" else None
    keyed(store) if lease is None else None
    if state == "retry_wait":
        assert lease is not None
        transitions.retry_later(store, lease, parting(), again(delay_seconds=5000.0))
    if state == "held":
        assert lease is not None
        transitions.hold(store, lease, parting())
    move_back(store, "one", 4000)
    assert job_row(store, "one")["state"] == state

    assert transitions.submit_keyed(store, keyed_job("two", retention=retention)) == Existing("one")


def test_a_lost_runner_s_job_holds_its_key(store: Store) -> None:
    lease = running_keyed(store)
    move_back(store, "one", 31)
    transitions.expire(store, lost_backoff=(0.0,), limit=10)

    assert job_row(store, "one")["state"] == "queued"
    assert transitions.submit_keyed(store, keyed_job("two")) == Existing(lease.job_id)


def test_a_key_is_held_after_success_for_its_retention_and_no_longer(store: Store) -> None:
    succeeded_keyed(store, "one")
    move_back(store, "one", 59)
    within = transitions.submit_keyed(store, keyed_job("two"))
    move_back(store, "one", 2)

    after = transitions.submit_keyed(store, keyed_job("three"))

    assert (within, after) == (Existing("one"), None)
    assert holders(store) == ["three"]
    row = job_row(store, "one")
    assert (row["state"], row["idempotency_key"]) == ("succeeded", "key")


def test_without_a_retention_success_frees_the_key(store: Store) -> None:
    succeeded_keyed(store, "one")

    assert transitions.submit_keyed(store, keyed_job("two", retention=UNTIL_FINAL)) is None
    assert holders(store) == ["two"]


def test_for_ever_is_as_long_as_the_row_is_kept(store: Store) -> None:
    succeeded_keyed(store, "one")
    move_back(store, "one", 10 * 365 * 86400.0)
    while_kept = transitions.submit_keyed(store, keyed_job("two", retention=FOR_EVER))
    transitions.prune(store, succeeded_seconds=1.0, failed_seconds=1.0, limit=10)

    assert while_kept == Existing("one")
    assert transitions.submit_keyed(store, keyed_job("two", retention=FOR_EVER)) is None


@pytest.mark.parametrize("end", ["failed", "cancelled", "interrupted", "expires", "refused"])
def test_a_job_that_did_not_succeed_frees_its_key(store: Store, end: str) -> None:
    if end == "failed":
        failed(store, running_keyed(store))
    elif end == "cancelled":
        transitions.cancel(store, keyed(store))
    elif end == "interrupted":
        running_keyed(store, max_attempts=1)
        move_back(store, "one", 31)
        transitions.expire(store, lost_backoff=(0.0,), limit=10)
    elif end == "expires":
        keyed(store, expires_seconds=10.0)
        move_back(store, "one", 20)
        transitions.expire_unstarted(store, limit=10)
    else:
        transitions.hold(store, running_keyed(store), parting())
        transitions.refuse(store, "one", reason="no")
    assert JobState(job_row(store, "one")["state"]).is_final

    assert transitions.submit_keyed(store, keyed_job("two", retention=FOR_EVER)) is None
    assert holders(store) == ["two"]
    assert job_row(store, "one")["idempotency_key"] == "key"


def test_a_holder_resumed_in_this_very_moment_keeps_its_key(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded_keyed(store, "one")
    move_back(store, "one", 61)
    insert_instead = keys._insert_instead

    def resumed_before(*arguments: Any) -> bool:
        transitions.resume(store, "one", reason="again")
        return insert_instead(*arguments)

    monkeypatch.setattr(keys, "_insert_instead", resumed_before)

    assert transitions.submit_keyed(store, keyed_job("two")) == Existing("one")
    assert holders(store) == ["one"]


def test_of_the_key_and_the_job_that_takes_it_both_are_written_or_neither(store: Store) -> None:
    succeeded_keyed(store, "one")
    move_back(store, "one", 61)
    two = keyed_job("two")
    submitted(store, "two", task="app.elsewhere")
    found = keys._in_the_way(store, keyed_job("three"))
    assert found is not None
    assert found["id"] == "one"

    with nothing_changes(store):
        answer = keys._insert_instead(store, two, "one")

    assert answer is False


# --- replies that are lost, callers at once -----------------------------------------------------


def test_a_submit_whose_reply_was_lost_is_still_the_callers_to_publish(
    store: Store, lose_replies: LoseReplies
) -> None:
    with lose_replies(store, 1), changes_of(store) as changes:
        answer = transitions.submit_keyed(store, keyed_job("one"))

    assert answer is None
    assert changes == {"job one": "added", "message one 1": "added"}


def test_a_repetition_after_a_lost_request_is_not_taken_for_another_ones(
    store: Store, lose_requests: LoseReplies
) -> None:
    keyed(store, "one", message=new_message(body=b"of somebody else"))

    with nothing_changes(store), lose_requests(store, 1):
        answer = transitions.submit_keyed(store, keyed_job("one"))

    assert answer == Existing("one")


@ROUNDS
def test_of_many_callers_at_once_one_records_and_all_get_its_job(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        key = f"key{number}"
        calls = [
            lambda n=n, s=s: transitions.submit_keyed(s, keyed_job(f"{key}-{n}", key=key))
            for n, s in enumerate([store, other_store] * 25)
        ]

        answers = at_once(*calls)

        winners = [n for n, answer in enumerate(answers) if answer is None]
        assert len(winners) == 1
        existing = Existing(f"{key}-{winners[0]}")
        assert [a for a in answers if a is not None] == [existing] * 49
    assert len(rows(store)["job"]) == len(rows(store)["message"]) == rounds


@ROUNDS
def test_of_many_callers_at_once_one_takes_the_key_of_a_job_whose_time_is_over(
    store: Store, other_store: Store, rounds: int
) -> None:
    for number in range(rounds):
        key = f"key{number}"
        succeeded_keyed(store, f"old{number}", key=key)
        move_back(store, f"old{number}", 61)
        calls = [
            lambda n=n, s=s: transitions.submit_keyed(s, keyed_job(f"{key}-{n}", key=key))
            for n, s in enumerate([store, other_store] * 5)
        ]

        answers = at_once(*calls)

        winners = [n for n, answer in enumerate(answers) if answer is None]
        assert len(winners) == 1
        existing = Existing(f"{key}-{winners[0]}")
        assert [a for a in answers if a is not None] == [existing] * 9
    assert len(holders(store)) == rounds


def test_a_holder_s_locked_row_makes_no_caller_wait(row_store: Store) -> None:
    """A user's fenced transaction may hold it for as long as it likes."""
    running_keyed(row_store)

    with holding(row_store, lock_job(row_store, "one")):
        answer = transitions.submit_keyed(row_store, keyed_job("two"))

    assert answer == Existing("one")


# --- a job whose id is known to others follows --------------------------------------------------


def test_a_job_that_follows_takes_the_result_of_the_holder(store: Store) -> None:
    succeeded_keyed(store, "one")
    following(store, "two")

    answer = transitions.claim(store, new_delivery("two"))

    assert isinstance(answer, Replay)
    outcome = answer.outcome
    assert (outcome.job_id, outcome.state) == ("two", JobState.SUCCEEDED)
    assert (outcome.result, outcome.result_type) == (b"1", JSON)
    # To be replayed by its message, should this worker die: only a worker may decode a result.
    assert outcome.by_attempt
    row = job_row(store, "two")
    assert (row["state"], row["state_reason"]) == ("succeeded", "follows one")
    assert (row["fencing_token"], row["settled_at"]) == (0, None)
    assert row["finished_at"] == outcome.finished_at
    assert ("two", 1) not in rows(store)["attempt"]
    assert holders(store) == ["one"]


def test_its_outcome_is_settled_like_any_other(store: Store) -> None:
    succeeded_keyed(store, "one")
    following(store, "two")
    answer = transitions.claim(store, new_delivery("two"))
    assert isinstance(answer, Replay)

    transitions.settle(store, [("two", 0, answer.outcome.finished_at)])

    assert job_row(store, "two")["settled_at"] is not None


def test_a_job_that_follows_waits_while_the_holder_is_not_final(store: Store) -> None:
    running_keyed(store, "one")
    following(store, "two")

    answer = transitions.claim(store, new_delivery("two"))

    assert answer == Refused(Refusal.KEY_HELD, JobState.RETRY_WAIT)
    row = job_row(store, "two")
    assert (row["state"], row["state_reason"]) == ("retry_wait", "follows one")
    # Its message is gone with this refusal: the reaper sends another when it is to look again.
    assert row["dispatched_at"] is None
    assert ("two", 1) not in rows(store)["attempt"]


def test_it_looks_again_the_later_the_longer_it_has_waited(store: Store) -> None:
    running_keyed(store, "one")
    following(store, "two")
    delays = []
    for waited in (0, 40, 4000):
        move_back(store, "two", waited)
        transitions.claim(store, new_delivery("two"))
        due = job_row(store, "two")["available_at"]
        delays.append((due - store_now(store)).total_seconds())

    # 1 s, then half of the time that it has waited, a minute at most.
    assert 0 < delays[0] <= 1
    assert 11 < delays[1] < 29
    assert 51 < delays[2] <= 60


def test_it_wakes_and_takes_the_result_when_the_holder_has_succeeded(store: Store) -> None:
    lease = running_keyed(store, "one")
    following(store, "two")
    transitions.claim(store, new_delivery("two"))
    finished(store, lease)
    move_back(store, "two", 100)
    assert transitions.wake(store, dispatched_grace_seconds=30.0, limit=10)

    assert isinstance(transitions.claim(store, new_delivery("two")), Replay)


def test_it_takes_the_key_and_runs_when_the_holder_failed(store: Store) -> None:
    lease = running_keyed(store, "one")
    following(store, "two")
    failed(store, lease)

    answer = transitions.claim(store, new_delivery("two"))

    assert isinstance(answer, Claimed)
    assert holders(store) == ["two"]
    assert job_row(store, "two")["state"] == "running"


def test_it_takes_its_key_though_another_task_s_job_holds_one_of_that_name(store: Store) -> None:
    keyed(store, "other", task="app.other")
    lease = running_keyed(store, "one")
    following(store, "two")
    failed(store, lease)

    assert isinstance(transitions.claim(store, new_delivery("two")), Claimed)
    assert holders(store) == ["other", "two"]


def test_what_was_seen_of_a_job_that_has_ended_since_decides_nothing(store: Store) -> None:
    succeeded_keyed(store, "one")
    following(store, "two")
    with store.single() as connection:
        seen = connection.execute(seen_statement(store), {"p_id": "two"}).mappings().one()
    transitions.cancel(store, "two")

    with nothing_changes(store), pytest.raises(RowBusy):
        keys.follow(store, new_delivery("two"), seen)


def test_of_two_that_follow_one_runs_and_the_other_follows_it(store: Store) -> None:
    lease = running_keyed(store, "one")
    following(store, "two")
    following(store, "three")
    failed(store, lease)

    answers = at_once(
        lambda: transitions.claim(store, new_delivery("two")),
        lambda: transitions.claim(store, new_delivery("three")),
    )

    assert sorted(type(answer).__name__ for answer in answers) == ["Claimed", "Refused"]
    assert len(holders(store)) == 1


def test_with_other_arguments_it_fails_as_a_conflict(store: Store) -> None:
    running_keyed(store, "one")
    following(store, "two", digest="sha256:2")

    answer = transitions.claim(store, new_delivery("two"))

    assert isinstance(answer, Replay)
    assert answer.outcome.state is JobState.FAILED
    assert answer.outcome.error_type == "celery_lease.exceptions.IdempotencyConflict"
    assert json.loads(answer.outcome.result or b"") == {
        "exc_type": "IdempotencyConflict",
        "exc_message": ["app.work", "key", "one"],
        "exc_module": "celery_lease.exceptions",
    }
    assert answer.outcome.by_attempt
    assert holders(store) == ["one"]


def test_what_a_holder_that_went_on_as_a_canvas_gives_is_not_known(store: Store) -> None:
    transitions.replace_away(store, running_keyed(store, "one"), parting("replaced"))
    following(store, "two")
    assert job_row(store, "one")["state_reason"] == "replaced"

    answer = transitions.claim(store, new_delivery("two"))

    assert isinstance(answer, Replay)
    assert answer.outcome.state is JobState.FAILED


def test_a_job_that_follows_is_not_claimed_past_its_expires(store: Store) -> None:
    running_keyed(store, "one")
    following(store, "two", expires_seconds=10.0)
    move_back(store, "two", 20)

    assert transitions.claim(store, new_delivery("two")) == Refused(
        Refusal.EXPIRES, JobState.QUEUED
    )


def test_a_job_that_follows_and_is_cancelled_ends(store: Store) -> None:
    running_keyed(store, "one")
    following(store, "two")
    transitions.cancel(store, "two")

    assert transitions.claim(store, new_delivery("two")) == Refused(
        Refusal.FINAL, JobState.CANCELLED
    )


def test_a_job_whose_key_is_free_holds_it_though_its_id_is_known(store: Store) -> None:
    keyed(store, "one", follows=True)

    assert holders(store) == ["one"]


def test_a_submit_finds_the_holder_and_never_who_follows(store: Store) -> None:
    keyed(store, "one")
    following(store, "two")

    assert transitions.submit_keyed(store, keyed_job("three")) == Existing("one")


def test_a_job_that_follows_and_whose_submit_is_repeated_is_one_job(
    store: Store, lose_replies: LoseReplies
) -> None:
    keyed(store, "one")

    with lose_replies(store, 1):
        answer = transitions.submit_keyed(store, keyed_job("two", follows=True))

    assert answer is None
    assert set(rows(store)["job"]) == {"one", "two"}


def test_a_locked_row_of_a_job_that_follows_is_nothing_to_decide_on(row_store: Store) -> None:
    keyed(row_store, "one")
    following(row_store, "two")

    with (
        holding(row_store, lock_job(row_store, "two")),
        nothing_changes(row_store),
        pytest.raises(StoreUnavailable),
    ):
        transitions.claim(row_store, new_delivery("two"))


# --- what else moves a key ----------------------------------------------------------------------


def test_a_resumed_job_holds_its_key_again(store: Store) -> None:
    failed(store, running_keyed(store, "one"))

    assert transitions.resume(store, "one", reason="again") is JobState.QUEUED
    assert holders(store) == ["one"]
    assert isinstance(transitions.claim(store, new_delivery("one")), Claimed)


def test_a_job_whose_key_was_taken_meanwhile_is_not_resumed(store: Store) -> None:
    failed(store, running_keyed(store, "one"))
    keyed(store, "two")

    with nothing_changes(store):
        answer = transitions.resume(store, "one", reason="again")

    assert answer is JobState.FAILED


@pytest.mark.parametrize("way", ["held", "cancelled"])
def test_a_job_that_followed_does_so_again_when_it_is_resumed(store: Store, way: str) -> None:
    holder = running_keyed(store, "one")
    following(store, "two")
    if way == "held":
        transitions.hold_waiting(store, "two", reason="look")
    else:
        transitions.cancel(store, "two", reason="x")
        set_job(store, "two", settled_at=store_now(store))

    assert transitions.resume(store, "two", reason="again") is JobState.QUEUED

    assert holders(store) == ["one"]
    finished(store, holder)
    assert isinstance(transitions.claim(store, new_delivery("two")), Replay)
    row = job_row(store, "two")
    assert (row["state"], row["state_reason"]) == ("succeeded", "follows one")


def test_a_holder_whose_time_is_over_is_in_the_way_of_no_resume(store: Store) -> None:
    failed(store, running_keyed(store, "one"))
    finished(store, running_keyed(store, "two"))
    move_back(store, "two", A_MINUTE - 20)

    def resume() -> JobState | None:
        return transitions.resume(store, "one", reason="again", retention_seconds=A_MINUTE)

    assert (resume(), holders(store)) == (JobState.FAILED, ["two"])
    move_back(store, "two", 30)
    assert transitions.resume(store, "one", reason="again") is JobState.FAILED

    assert resume() is JobState.QUEUED
    assert holders(store) == ["one"]


def test_a_job_that_cannot_be_resumed_yet_keeps_its_own_key(store: Store) -> None:
    lease = running_keyed(store, "one")
    transitions.complete(store, lease, parting(), result=b"1", result_type=JSON, settled=False)
    move_back(store, "one", 2 * A_MINUTE)

    with nothing_changes(store):
        transitions.resume(store, "one", reason="again", retention_seconds=A_MINUTE)


def test_a_retry_keeps_the_key(store: Store) -> None:
    lease = running_keyed(store, "one")
    transitions.retry_later(store, lease, parting(), again())

    assert holders(store) == ["one"]
    assert isinstance(transitions.claim(store, new_delivery("one", message_version=2)), Claimed)


def test_a_replacement_by_the_same_task_keeps_the_key(store: Store) -> None:
    lease = running_keyed(store, "one")
    transitions.replace(store, lease, parting(), again(task="app.work", keeps_key=True))

    row = job_row(store, "one")
    assert (row["idempotency_key"], row["active_key"]) == ("key", "key")


def test_a_replacement_by_another_task_has_no_key_of_that_task(store: Store) -> None:
    keyed(store, "two", task="app.other")
    lease = running_keyed(store, "one")

    transitions.replace(store, lease, parting(), again(task="app.other"))

    row = job_row(store, "one")
    assert (row["idempotency_key"], row["active_key"], row["task"]) == (None, None, "app.other")
    assert isinstance(transitions.claim(store, new_delivery("one", message_version=2)), Claimed)


def test_a_job_that_a_canvas_goes_on_with_has_no_key(store: Store) -> None:
    transitions.replace_away(store, running_keyed(store, "one"), parting("replaced"))

    assert transitions.reopen(store, "one", again(task="app.other"))
    assert job_row(store, "one")["active_key"] is None
    assert isinstance(transitions.claim(store, new_delivery("one", message_version=2)), Claimed)


def test_a_running_job_under_a_key_is_taken_over_like_any_other(store: Store) -> None:
    expired(store, "one", key=IdempotencyKey("key"))

    assert isinstance(transitions.claim(store, new_delivery("one")), Claimed)
