"""Which messages are taken for lost: overtaken ones, and a few probes of a silent queue."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.backoff import MOST_PROBES, redispatch_gap_seconds
from celery_lease.records import Dispatchable
from celery_lease.store import queries, transitions
from celery_lease.store.dialects import Later
from tests.store.builders import (
    FAILURE,
    again,
    claimed,
    finished,
    job_row,
    move_back,
    parting,
    rows,
    set_job,
    store_now,
    submitted,
)

if TYPE_CHECKING:
    from celery_lease.store.engine import Store

#: seconds; what a test itself takes is nothing beside it
TIMEOUT = 1000.0


def unclaimed(store: Store, limit: int = 1000) -> list[str]:
    """Return the ids of the jobs that a pass would send again now."""
    return [one.job_id for one in queries.unclaimed(store, queued_timeout=TIMEOUT, limit=limit)]


def send(store: Store, limit: int = 1000) -> list[str]:
    """Send again what a pass would."""
    found = queries.unclaimed(store, queued_timeout=TIMEOUT, limit=limit)
    for one in found:
        assert transitions.dispatch(store, one)
    return [one.job_id for one in found]


def sent_ago(store: Store, job_id: str, seconds: float, **options: Any) -> str:
    """Record a job whose message was sent so long ago."""
    submitted(store, job_id, **({"queue": "q"} | options))
    move_back(store, job_id, seconds)
    return job_id


def pass_time(store: Store, seconds: float) -> None:
    for job_id in rows(store)["job"]:
        move_back(store, job_id, seconds)


def silent(store: Store, job_id: str, **options: Any) -> None:
    """Have the queue's probe sent just now: what is found from here on is found by evidence."""
    sent_ago(store, job_id, 2 * TIMEOUT, **options)
    assert job_id in send(store)


# --- overtaken ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["running", "succeeded", "failed"])
def test_what_a_claimed_message_has_overtaken_is_sent_again(store: Store, state: str) -> None:
    sent_ago(store, "lost", 3 * TIMEOUT)
    sent_ago(store, "too", 2 * TIMEOUT)
    silent(store, "probe")
    sent_ago(store, "later", TIMEOUT / 2)
    lease = claimed(store, "later")
    if state == "succeeded":
        finished(store, lease)
    elif state == "failed":
        transitions.fail(
            store, lease, parting(failure=FAILURE), error=None, error_content_type=None
        )

    assert unclaimed(store) == ["lost", "too"]


def test_what_was_sent_after_the_claimed_message_waits_its_turn(store: Store) -> None:
    """A backlog of a queue that is served: late is not lost."""
    for number in range(5):
        sent_ago(store, f"job{number}", (9 - number) * TIMEOUT)
    finished(store, claimed(store, "job0"))
    claimed(store, "job1")
    assert send(store) == ["job4"]

    pass_time(store, TIMEOUT / 2)

    assert unclaimed(store) == []


def test_what_was_sent_a_moment_ago_is_not_suspected(store: Store) -> None:
    sent_ago(store, "late", TIMEOUT - 20)
    claimed(store, sent_ago(store, "later", 10))

    assert unclaimed(store) == []


@pytest.mark.parametrize(
    "options",
    [{"queue": "other"}, {"priority": 3}, {"queue": None}],
    ids=["queue", "priority", "-"],
)
def test_a_claim_elsewhere_is_no_evidence(store: Store, options: dict[str, Any]) -> None:
    """A lower priority is overtaken by right; an empty queue name is no name of a queue."""
    silent(store, "probe")
    sent_ago(store, "waits", 2 * TIMEOUT)
    claimed(store, sent_ago(store, "later", 0, **options))

    assert unclaimed(store) == []


def test_the_same_priority_is_compared(store: Store) -> None:
    silent(store, "probe", priority=3)
    sent_ago(store, "waits", 2 * TIMEOUT, priority=3)
    claimed(store, sent_ago(store, "later", 0, priority=3))

    assert unclaimed(store) == ["waits"]


def test_a_job_whose_queue_is_not_known_is_sent_again_by_time_alone(store: Store) -> None:
    for number in range(3):
        sent_ago(store, f"job{number}", (9 - number) * TIMEOUT, queue=None)

    assert send(store) == ["job0", "job1", "job2"]
    assert unclaimed(store) == []


def test_the_message_that_was_claimed_counts_and_not_its_later_copy(store: Store) -> None:
    """A worker comes back to its backlog, and the first thing it claims has been probed."""
    for number in range(5):
        sent_ago(store, f"job{number}", (9 - number) * TIMEOUT)
    silent(store, "last")

    claimed(store, "last", dispatch_count=1)

    assert job_row(store, "last")["dispatched_at"] is None
    # The probe is gone with it, so another is sent; and the backlog is not.
    assert unclaimed(store) == ["job4"]


def test_a_probe_that_is_claimed_tells_of_all_that_was_sent_before_it(store: Store) -> None:
    for number in range(5):
        sent_ago(store, f"job{number}", (9 - number) * TIMEOUT)
    silent(store, "last")

    finished(store, claimed(store, "last", dispatch_count=2))

    assert send(store) == [f"job{number}" for number in range(5)]
    # And each once.
    claimed(store, sent_ago(store, "later", 0))
    assert unclaimed(store) == []


@pytest.mark.parametrize("count", [None, 3])
def test_a_message_that_does_not_say_which_it_is_tells_nothing(
    store: Store, count: int | None
) -> None:
    """An adopted job was not sent when it was recorded."""
    silent(store, "probe")
    sent_ago(store, "waits", 2 * TIMEOUT)
    claimed(store, sent_ago(store, "adopted", 0), dispatch_count=count)

    assert unclaimed(store) == []


def test_a_replay_is_no_later_message(store: Store) -> None:
    """Its job was claimed long before the replay was sent."""
    sent_ago(store, "done", 9 * TIMEOUT)
    finished(store, claimed(store, "done"), settled=False)
    move_back(store, "done", 60)
    silent(store, "probe")
    sent_ago(store, "waits", 2 * TIMEOUT)
    found = queries.outcome(store, "done")
    assert found is not None
    assert transitions.dispatch(store, found[1], replay=True)

    assert unclaimed(store) == []


def test_an_end_without_a_claim_is_no_evidence(store: Store) -> None:
    silent(store, "probe")
    sent_ago(store, "waits", 2 * TIMEOUT)
    submitted(store, "overdue", queue="q", deadline_seconds=5.0)
    set_job(store, "overdue", deadline_at=store_now(store) - timedelta(seconds=1))
    transitions.pass_deadline(store, limit=9)
    assert job_row(store, "overdue")["state"] == "failed"

    assert unclaimed(store) == []


def test_one_that_keeps_being_overtaken_is_sent_again_after_gaps_that_double(store: Store) -> None:
    """Its messages sit in the hands of a hung worker, while others go on."""
    sent_ago(store, "held", 0)
    sent, waited = [], 0.0
    for count in range(60):
        later = submitted(store, f"later{count}", queue="q")
        finished(store, claimed(store, later))
        if send(store):
            sent.append(waited)
        move_back(store, "held", TIMEOUT / 4)
        waited += TIMEOUT / 4

    assert sent == pytest.approx([TIMEOUT, 3 * TIMEOUT, 7 * TIMEOUT], abs=TIMEOUT)


@pytest.mark.parametrize("way", ["undispatched", "enqueued", "woken", "sent twice", "retried"])
def test_what_was_sent_late_for_the_first_time_is_sent_again_as_soon_as_any(
    store: Store, way: str
) -> None:
    """The broker was away for hours: in that time no message of the job was lost."""
    silent(store, "probe")
    if way == "enqueued":
        submitted(store, "late", queue="q", dispatched=False)
    elif way == "woken":
        submitted(store, "late", queue="q", delay_seconds=5.0)
        move_back(store, "late", 100)
        assert transitions.wake(store, limit=9, dispatched_grace_seconds=1.0) == ["late"]
    else:
        submitted(store, "late", queue="q")
        if way == "sent twice":
            sent_again_at_once(store, "late")
        transitions.undispatch(
            store, "late", dispatch_count=job_row(store, "late")["dispatch_count"]
        )
    move_back(store, "late", 20 * TIMEOUT)
    [found] = queries.undispatched(store, limit=9)
    assert transitions.dispatch(store, found)
    if way == "retried":
        # Its body ran long after that, and its next message is the first one of a new wait.
        move_back(store, "late", 2 * TIMEOUT)
        sent_again_at_once(store, "late")
        lease = claimed(store, "late", dispatch_count=job_row(store, "late")["dispatch_count"])
        next_run = again(queue="q", delay_seconds=0.0)
        transitions.retry_later(store, lease, parting(failure=FAILURE), next_run)

    move_back(store, "late", TIMEOUT - 20)
    finished(store, claimed(store, submitted(store, "later", queue="q")))
    assert unclaimed(store) == []
    move_back(store, "late", 40)

    assert send(store) == ["late"]
    # And from then on the gap doubles, as everywhere.
    move_back(store, "late", TIMEOUT + 20)
    finished(store, claimed(store, submitted(store, "last", queue="q")))
    assert unclaimed(store) == []
    move_back(store, "late", TIMEOUT + 100)
    assert send(store) == ["late"]


def sent_again_at_once(store: Store, job_id: str) -> None:
    """Send a job again, as the pass does, whether or not it is suspected."""
    row = job_row(store, job_id)
    assert transitions.dispatch(
        store,
        Dispatchable(job_id, row["task"], row["dispatch_count"], row["message_version"], "q"),
    )


# --- probes -------------------------------------------------------------------------------------


def test_what_was_sent_late_for_the_first_time_is_no_probe(store: Store) -> None:
    """The broker was away for hours: the first messages after that have told nothing yet."""
    for number in range(3):
        submitted(store, f"job{number}", queue="q", dispatched=False)
        move_back(store, f"job{number}", (30 - number) * TIMEOUT)
    for found in queries.undispatched(store, limit=9):
        assert transitions.dispatch(store, found)
    assert unclaimed(store) == []

    pass_time(store, TIMEOUT + 20)

    [probed] = send(store)
    pass_time(store, TIMEOUT + 20)
    assert unclaimed(store) == []
    pass_time(store, TIMEOUT + 100)
    [second] = send(store)
    assert probed != second


def test_a_silent_queue_gets_few_probes_and_they_are_the_last_that_came(store: Store) -> None:
    backlog(store, 650)

    assert send(store) == ["job0649", "job0648", "job0647"]
    assert unclaimed(store) == []


def test_never_more_probes_than_that(store: Store) -> None:
    backlog(store, 2200)

    assert len(send(store)) == MOST_PROBES


def test_an_hour_of_silence_adds_some_per_cent(store: Store) -> None:
    """The probes follow each other after gaps that double, each time other jobs."""
    backlog(store, 400)
    sent, times = [], []
    for number in range(12 * 4):
        found = send(store)
        if found:
            sent += found
            times.append(number * TIMEOUT / 4)
        shift(store, TIMEOUT / 4)

    # lease_queued_timeout is 300 s by default: an hour is 12 of it.
    assert times == pytest.approx([0.0, 2 * TIMEOUT, 6 * TIMEOUT], abs=TIMEOUT)
    assert len(sent) == len(set(sent)) == 6


def test_each_queue_and_each_priority_has_its_own_probe(store: Store) -> None:
    for queue in ("a", "b"):
        for priority in (None, 0, 5):
            for number in range(3):
                name = f"{queue}{priority}{number}"
                sent_ago(store, name, (9 - number) * TIMEOUT, queue=queue, priority=priority)

    assert sorted(send(store)) == ["a02", "a52", "aNone2", "b02", "b52", "bNone2"]
    assert unclaimed(store) == []


def test_one_waiting_job_is_its_own_probe(store: Store) -> None:
    submitted(store, queue="q")
    waited = 0.0

    for _ in range(5):
        gap = redispatch_gap_seconds(TIMEOUT, waited)
        move_back(store, "job", gap - 60)
        assert unclaimed(store) == []
        # And a little: what these steps take counts as waiting, too.
        move_back(store, "job", 65)
        assert send(store) == ["job"]
        waited += gap + 5


def test_a_job_that_came_after_the_last_probe_does_not_wait_for_the_next_gap(store: Store) -> None:
    for number in range(3):
        sent_ago(store, f"job{number}", 30 * TIMEOUT)
    assert len(send(store)) == 1
    pass_time(store, 20)
    sent_ago(store, "new", 10)
    pass_time(store, TIMEOUT)

    assert send(store) == ["new"]
    assert unclaimed(store) == []


def test_when_all_have_been_probed_it_is_the_turn_of_the_longest_ago(store: Store) -> None:
    sent_ago(store, "one", 3 * TIMEOUT)
    sent_ago(store, "two", 2 * TIMEOUT)
    sent = []
    for _ in range(64):
        sent += send(store)
        pass_time(store, TIMEOUT)

    assert sent[:4] == ["two", "one", "two", "one"]


def test_what_is_lost_is_preferred_to_probes(store: Store) -> None:
    """A pass has a limit."""
    sent_ago(store, "silent", 9 * TIMEOUT, queue="other")
    silent(store, "probe")
    sent_ago(store, "lost", 2 * TIMEOUT)
    set_job(store, "silent", dispatched_at=store_now(store) - timedelta(seconds=3 * TIMEOUT))
    set_job(store, "silent", first_dispatched_at=None)
    claimed(store, sent_ago(store, "later", 0))

    assert unclaimed(store, limit=1) == ["lost"]
    assert unclaimed(store) == ["lost", "silent"]


def test_a_pass_takes_no_more_than_its_limit(store: Store) -> None:
    for queue in "abcd":
        sent_ago(store, queue, 2 * TIMEOUT, queue=queue)

    assert len(unclaimed(store, limit=3)) == 3
    assert len(send(store)) == 4


def test_two_reapers_send_one_probe(store: Store, other_store: Store) -> None:
    backlog(store, 3)
    seen = queries.unclaimed(other_store, queued_timeout=TIMEOUT, limit=9)

    assert send(store) == ["job0002"]

    assert [transitions.dispatch(other_store, one) for one in seen] == [False]
    assert unclaimed(other_store) == []


def backlog(store: Store, count: int) -> None:
    """Record jobs of one queue that have waited since before ``TIMEOUT``, the last one least."""
    table = store.tables.job
    submitted(store, "model", queue="q")
    now = store_now(store)
    model = {c: v for c, v in job_row(store, "model").items() if v is not None}
    made = []
    for number in range(count):
        sent_at = now - timedelta(seconds=TIMEOUT + 1 + (count - number) * 1e-3)
        instants = dict.fromkeys(("created_at", "available_at", "dispatched_at"), sent_at)
        made.append(model | instants | {"id": f"job{number:04}"})
    with store.engine.begin() as connection:
        connection.execute(table.delete())
        connection.execute(table.insert(), made)


def shift(store: Store, seconds: float) -> None:
    """Let time pass for all jobs of ``backlog`` at once."""
    table = store.tables.job
    columns = ("created_at", "available_at", "first_dispatched_at", "dispatched_at")
    moved = {table.c[name]: Later(table.c[name], -seconds) for name in columns}
    with store.engine.begin() as connection:
        connection.execute(table.update().values(moved))
