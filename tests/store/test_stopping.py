"""A runner that was asked to stop and then vanished is no loss of its job's, up to a cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_lease.backoff import UNCOUNTED_ENDS
from celery_lease.records import Claimed, Refused
from celery_lease.states import AttemptState, JobState, LossCause, OnExpiry, Refusal
from celery_lease.store import queries, transitions
from celery_lease.store.dialects import clock
from tests.store.builders import (
    NO_BACKOFF,
    OTHER,
    about,
    attempt_row,
    changes_of,
    claimed,
    holding,
    in_background,
    job_row,
    lock_attempt,
    move_back,
    new_delivery,
    parting,
    renewal,
    running,
    store_now,
    submitted,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from typing import Any

    from celery_lease.records import Held, Vanished
    from celery_lease.store.engine import Store

WAYS = ["lost", "lost, told by the caller", "expired", "released"]
"""How an attempt may end without being counted."""
LATER = (0.0, 60.0)
"""A back-off in which a counted loss waits from the second on."""


def asked_to_stop(store: Store, lease: Held) -> Held:
    answer = transitions.renew(store, [renewal(lease, stop_requested=True)])
    assert answer.renewed == {(lease.job_id, lease.fencing_token)}
    return lease


def lost(store: Store, lease: Held, **changes: Any) -> Vanished:
    said = {"cause": LossCause.LOST, "reason": "exit code -9", "lost_backoff": NO_BACKOFF}
    answer = transitions.lost(store, lease, **(said | changes))
    assert answer is not None
    return answer


def expire(store: Store) -> Vanished:
    (answer,) = transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    return answer


def end_uncounted(store: Store, lease: Held, way: str) -> None:
    if way == "released":
        transitions.release(store, lease, parting())
    elif way == "lost, told by the caller":
        lost(store, lease, stopping=True)
    elif way == "lost":
        lost(store, asked_to_stop(store, lease))
    else:
        asked_to_stop(store, lease)
        move_back(store, lease.job_id, seconds=31)
        expire(store)


def running_after(store: Store, count: int, *ways: str, **job: Any) -> Held:
    """Record a job, have so many attempts of it end uncounted, and claim it again."""
    submitted(store, **job)
    for number in range(count):
        end_uncounted(store, claimed(store), ways[number % len(ways)])
    return claimed(store)


# --- not counted --------------------------------------------------------------------------------


def test_a_job_whose_runner_was_asked_to_stop_is_queued_at_once_and_not_counted(
    store: Store,
) -> None:
    lease = asked_to_stop(store, running(store))
    now = store_now(store)

    with changes_of(store) as changes:
        answer = lost(store, lease, lost_backoff=(60.0,))

    assert (answer.state, answer.delay_seconds, answer.is_counted) == (JobState.QUEUED, 0.0, False)
    assert about(changes.pop("job job.available_at"), now)
    assert about(changes.pop("attempt job 1.ended_at"), now)
    assert changes == {
        "job job.state": "queued",
        "job job.state_reason": "stopped",
        "job job.lease_owner": None,
        "job job.dispatched_at": None,
        "attempt job 1.state": "lost",
        "attempt job 1.stop_reason": "exit code -9",
    }
    assert queries.dispatchable(store, "job") is not None


def test_a_caller_that_knows_of_the_stop_says_so_for_a_runner_that_could_not(store: Store) -> None:
    lease = running(store, max_attempts=1)
    now = store_now(store)

    answer = lost(store, lease, stopping=True)

    assert (answer.state, answer.is_counted) == (JobState.QUEUED, False)
    assert about(attempt_row(store, lease)["stop_requested_at"], now)
    assert job_row(store)["lost_count"] == 0


def test_when_it_was_asked_first_is_kept(store: Store) -> None:
    lease = asked_to_stop(store, running(store))
    move_back(store, "job", seconds=10)
    asked_at = attempt_row(store, lease)["stop_requested_at"]

    lost(store, lease, stopping=True)

    assert attempt_row(store, lease)["stop_requested_at"] == asked_at


def test_an_ended_lease_of_a_stopping_runner_is_given_on_without_being_counted(
    store: Store,
) -> None:
    lease = asked_to_stop(store, running(store, max_attempts=1))
    move_back(store, "job", seconds=31)

    answer = expire(store)

    assert (answer.state, answer.is_counted) == (JobState.QUEUED, False)
    assert (job_row(store)["state_reason"], job_row(store)["lost_count"]) == ("stopped", 0)
    assert attempt_row(store, lease)["state"] == AttemptState.EXPIRED


def test_each_job_of_a_batch_is_counted_by_its_own_runner(store: Store) -> None:
    for name in ("asked", "crashed", "asked too"):
        lease = running(store, name)
        if name.startswith("asked"):
            asked_to_stop(store, lease)
        move_back(store, name, seconds=31)

    answers = transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)

    counted = {one.job_id: one.is_counted for one in answers}
    assert counted == {"asked": False, "crashed": True, "asked too": False}
    assert {name: job_row(store, name)["lost_count"] for name in counted} == counted


def test_a_job_is_taken_over_from_a_stopping_runner_without_being_counted(store: Store) -> None:
    lease = asked_to_stop(store, running(store, max_attempts=1))
    move_back(store, "job", seconds=31)

    answer = transitions.claim(store, new_delivery(owner=OTHER), lost_backoff=(60.0,))

    assert isinstance(answer, Claimed), answer
    assert (answer.lost_count, answer.took_over) == (0, 1)
    assert (job_row(store)["state"], job_row(store)["lost_count"]) == (JobState.RUNNING, 0)
    assert attempt_row(store, lease)["state"] == AttemptState.EXPIRED


def test_earlier_losses_stay_and_neither_grow_nor_have_it_wait(store: Store) -> None:
    lost(store, running(store))

    answer = lost(store, asked_to_stop(store, claimed(store)), lost_backoff=LATER)

    assert (answer.state, answer.delay_seconds) == (JobState.QUEUED, 0.0)
    assert job_row(store)["lost_count"] == 1


@pytest.mark.parametrize(
    ("policy", "state"), [(OnExpiry.HOLD, JobState.HELD), (OnExpiry.FAIL, JobState.FAILED)]
)
@pytest.mark.parametrize("how", ["lost", "expire", "take over"])
def test_what_its_runner_had_done_is_not_known_either_so_hold_and_fail_apply(
    store: Store, policy: OnExpiry, state: JobState, how: str
) -> None:
    lease = asked_to_stop(store, running(store, on_expiry=policy))
    if how == "lost":
        vanished = lost(store, lease)
    else:
        move_back(store, "job", seconds=31)
        if how == "expire":
            vanished = expire(store)
        else:
            answer = transitions.claim(store, new_delivery(owner=OTHER))
            assert isinstance(answer, Refused)
            assert answer.refusal is Refusal.POLICY
            assert answer.vanished is not None
            vanished = answer.vanished

    assert (vanished.state, vanished.is_counted) == (state, False)
    job = job_row(store)
    assert (job["state"], job["state_reason"], job["lost_count"]) == (state, "runner_lost", 0)


def test_a_stop_that_is_told_while_the_loss_waits_for_the_row_is_heard(store: Store) -> None:
    """A renewal does not ask for the job's row: what it says is read after the attempt's end."""
    lease = running(store)
    attempt = store.tables.attempt

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(lambda: lost(store, lease)) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.3)
            holder.execute(attempt.update().values(stop_requested_at=clock()))
            holder.commit()
            vanished = answer()

    assert not vanished.is_counted
    assert job_row(store)["lost_count"] == 0


# --- counted all the same -----------------------------------------------------------------------


def test_the_next_runner_is_not_spared_by_what_the_one_before_was_asked(store: Store) -> None:
    lost(store, asked_to_stop(store, running(store)))

    answer = lost(store, claimed(store))

    assert answer.is_counted
    assert (job_row(store)["lost_count"], job_row(store)["state_reason"]) == (1, "runner_lost")


@pytest.mark.parametrize("stopping", [False, True])
def test_a_stall_is_counted_whatever_was_asked(store: Store, *, stopping: bool) -> None:
    lease = asked_to_stop(store, running(store, max_attempts=1))

    answer = lost(store, lease, cause=LossCause.STALLED, trace="File …", stopping=stopping)

    assert (answer.state, answer.is_counted) == (JobState.INTERRUPTED, True)
    assert job_row(store)["lost_count"] == 1
    assert attempt_row(store, lease)["state"] == AttemptState.STALLED
    assert attempt_row(store, lease)["traceback"] == "File …"


@pytest.mark.parametrize("way", WAYS)
def test_ten_ends_are_spared_and_the_next_vanished_runner_counts(store: Store, way: str) -> None:
    """Else a body that always outlives the grace would start again for ever."""
    assert UNCOUNTED_ENDS == 10
    ninth = running_after(store, UNCOUNTED_ENDS - 1, way, max_attempts=1)
    assert job_row(store)["lost_count"] == 0
    end_uncounted(store, ninth, way)
    assert (job_row(store)["state"], job_row(store)["lost_count"]) == (JobState.QUEUED, 0)
    assert queries.uncounted_ends(store, "job") == UNCOUNTED_ENDS

    answer = lost(store, asked_to_stop(store, claimed(store)))

    assert (answer.state, answer.is_counted) == (JobState.INTERRUPTED, True)
    job = job_row(store)
    assert (job["state_reason"], job["lost_count"]) == ("max_attempts", 1)


def test_hand_overs_and_vanished_runners_have_one_cap_together(store: Store) -> None:
    lease = running_after(store, UNCOUNTED_ENDS, *WAYS, max_attempts=9)

    answer = lost(store, asked_to_stop(store, lease), lost_backoff=(60.0,))

    assert (answer.state, answer.is_counted) == (JobState.RETRY_WAIT, True)


def test_past_the_cap_an_ended_lease_counts(store: Store) -> None:
    lease = running_after(store, UNCOUNTED_ENDS, "released", max_attempts=1)
    asked_to_stop(store, lease)
    move_back(store, "job", seconds=31)

    assert expire(store).state is JobState.INTERRUPTED


def test_past_the_cap_a_take_over_counts_and_follows_the_policy(store: Store) -> None:
    lease = running_after(store, UNCOUNTED_ENDS, "released", max_attempts=2)
    asked_to_stop(store, lease)
    move_back(store, "job", seconds=31)

    answer = transitions.claim(store, new_delivery(owner=OTHER), lost_backoff=LATER)

    assert isinstance(answer, Claimed)
    assert answer.lost_count == 1
    asked_to_stop(store, answer.lease)
    move_back(store, "job", seconds=31)
    refused = transitions.claim(store, new_delivery(), lost_backoff=LATER)
    assert isinstance(refused, Refused)
    assert (refused.refusal, refused.state) == (Refusal.POLICY, JobState.INTERRUPTED)


def test_ends_that_were_counted_do_not_use_up_the_cap(store: Store) -> None:
    submitted(store, max_attempts=99)
    for _ in range(UNCOUNTED_ENDS // 2):
        lost(store, claimed(store))
        stalled = asked_to_stop(store, claimed(store))
        lost(store, stalled, cause=LossCause.STALLED)

    answer = lost(store, asked_to_stop(store, claimed(store)))

    assert not answer.is_counted
    assert job_row(store)["lost_count"] == UNCOUNTED_ENDS
    assert queries.uncounted_ends(store, "job") == 1


def test_the_cap_of_a_resumed_job_begins_anew(store: Store) -> None:
    lease = running_after(store, UNCOUNTED_ENDS, *WAYS, max_attempts=1)
    transitions.release(store, lease, parting())
    transitions.hold_waiting(store, "job", reason="look")

    transitions.resume(store, "job", reason="again")

    assert queries.uncounted_ends(store, "job") == 0
    for count in range(UNCOUNTED_ENDS):
        assert queries.uncounted_ends(store, "job") == count
        assert not lost(store, asked_to_stop(store, claimed(store))).is_counted
    assert lost(store, asked_to_stop(store, claimed(store))).is_counted


def test_what_a_body_gave_back_by_retry_does_not_use_up_the_cap(store: Store) -> None:
    submitted(store, max_attempts=1)
    for _ in range(UNCOUNTED_ENDS):
        transitions.release(store, claimed(store), parting(reason="retry"))
    transitions.release(store, claimed(store), parting(reason=None))

    assert queries.uncounted_ends(store, "job") == 1
    assert not lost(store, asked_to_stop(store, claimed(store))).is_counted


def test_other_jobs_do_not_use_up_the_cap(store: Store) -> None:
    submitted(store, "other")
    for _ in range(UNCOUNTED_ENDS + 1):
        transitions.release(store, claimed(store, "other"), parting())

    answer = lost(store, asked_to_stop(store, running(store)))

    assert not answer.is_counted
    assert queries.uncounted_ends(store, "job") == 1
    assert queries.uncounted_ends(store, "other") == UNCOUNTED_ENDS + 1
