"""Passes of the reaper over a real store, with a publisher that only writes down."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
import sqlalchemy as sa

from celery_lease import events
from celery_lease.reaper import PublishFailed, Reaper
from celery_lease.records import (
    Claimed,
    Delivery,
    Dispatchable,
    Message,
    NewJob,
    Outcome,
    Renewal,
)
from celery_lease.settings import Settings, load
from celery_lease.store import queries, transitions
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema

INTERVAL = 5.0
LEASE = 30.0


class FakePublisher:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bool]] = []
        self.closed: list[str] = []
        self.error: PublishFailed | None = None
        self.never_leave: set[str] = set()
        self.can_close = True

    def publish(self, candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        if self.error is not None:
            raise self.error
        if candidate.job_id in self.never_leave:
            raise PublishFailed("the broker is away, it seems")
        self.sent.append((candidate.job_id, replay))

    def close_books(self, outcome: Outcome, message: Message) -> bool:
        if self.error is not None:
            raise self.error
        if self.can_close:
            self.closed.append(outcome.job_id)
        return self.can_close


class World:
    """A store, a reaper, and time that passes by moving every instant into the past."""

    def __init__(self, url: str, **conf: Any) -> None:
        self.store = Store(url=url)
        ensure_schema(self.store, auto_migrate=True)
        values: dict[str, Any] = {"lease_reaper_interval": INTERVAL, **conf}
        self.settings: Settings = load(values.get)
        self.publisher = FakePublisher()
        self.reaper = Reaper(
            store=self.store,
            settings=self.settings,
            publisher=self.publisher,
            worker="reaper",
        )

    def submit(self, job_id: str, **options: Any) -> None:
        message = Message(1, "{}", "{}", b"[]", "application/json", "utf-8", "", "celery")
        assert transitions.submit(
            self.store, NewJob(job_id=job_id, task="t", message=message, **options)
        )

    def claim(self, job_id: str, owner: str = "one") -> Claimed:
        answer = transitions.claim(
            self.store,
            Delivery(
                job_id=job_id,
                message_version=1,
                owner=owner,
                worker=owner,
                nonce=uuid.uuid4().hex,
                lease_seconds=LEASE,
                worker_now=datetime.now(timezone.utc),
            ),
        )
        assert isinstance(answer, Claimed), answer
        return answer

    def run(self, job_id: str, owner: str = "one") -> Claimed:
        self.submit(job_id)
        return self.claim(job_id, owner)

    def renew(self, claimed: Claimed) -> bool:
        answer = transitions.renew(self.store, [Renewal(claimed.lease)])
        return bool(answer.renewed)

    def pass_time(self, seconds: float) -> None:
        """Move all rows into the past, which is the same to the store's clock."""
        tables = self.store.tables
        with self.store.transaction() as connection:
            for table in (tables.job, tables.attempt, tables.completed_pass):
                columns = [c for c in table.c if type(c.type).__name__ == "Instant"]
                keys = list(table.primary_key.columns)
                for row in connection.execute(sa.select(table)).mappings().all():
                    moved = {
                        c: row[c.name] - _seconds(seconds)
                        for c in columns
                        if row[c.name] is not None
                    }
                    where = [key == row[key.name] for key in keys]
                    connection.execute(sa.update(table).where(*where).values(moved))

    def job(self, job_id: str) -> dict[str, Any]:
        table = self.store.tables.job
        with self.store.single() as connection:
            statement = sa.select(table).where(table.c.id == job_id)
            return dict(connection.execute(statement).mappings().one())

    def set_all(self, **values: Any) -> None:
        with self.store.transaction() as connection:
            connection.execute(sa.update(self.store.tables.job).values(values))


def _seconds(number: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=number)


@pytest.fixture
def make_world(sqlite_url: str) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**conf: Any) -> World:
        worlds.append(World(sqlite_url, **conf))
        return worlds[-1]

    yield make
    for world in worlds:
        world.store.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


# --- what a pass does ---------------------------------------------------------------------------


def test_a_pass_with_nothing_to_do_is_recorded(world: World) -> None:
    assert world.reaper.is_due()

    result = world.reaper.run_pass()

    assert result.counts == {}
    last = queries.last_pass(world.store)
    assert last is not None
    assert last.worker == "reaper"
    assert not world.reaper.is_due()
    world.pass_time(2 * INTERVAL)
    assert world.reaper.is_due()


def test_an_expired_lease_is_given_on_in_the_same_pass(world: World) -> None:
    world.reaper.run_pass()
    world.run("dead")
    for _ in range(7):
        world.pass_time(INTERVAL)
        world.reaper.run_pass()

    assert world.job("dead")["lost_count"] == 1
    assert world.job("dead")["state"] == "queued"
    assert world.publisher.sent == [("dead", False)]


def test_a_renewed_lease_is_left_alone(world: World) -> None:
    world.reaper.run_pass()
    claimed = world.run("alive")
    for _ in range(12):
        world.pass_time(INTERVAL)
        assert world.renew(claimed)
        world.reaper.run_pass()

    assert world.job("alive")["state"] == "running"
    assert world.publisher.sent == []


def test_a_due_job_is_woken_and_sent_in_one_pass(world: World) -> None:
    world.submit("later", delay_seconds=60.0, dispatched=False)
    assert world.reaper.run_pass().counts == {}

    world.pass_time(61)

    assert world.reaper.run_pass().counts == {"woken": 1, "dispatched": 1}
    assert world.publisher.sent == [("later", False)]


def test_an_unclaimed_message_is_sent_again_at_growing_distances(world: World) -> None:
    world.submit("waiting")
    sent_after = []
    for minute in range(0, 60, 5):
        if world.reaper.run_pass().counts.get("dispatched"):
            sent_after.append(minute)
        # And a little: what the steps themselves take counts as waiting, too.
        world.pass_time(5 * 60 + 2)

    # lease_queued_timeout is 5 minutes: then 10, 20 … after the one before.
    assert sent_after == [5, 15, 35]


def test_a_failed_publish_keeps_the_job_dispatchable_and_the_pass_complete(world: World) -> None:
    # B124
    for number in range(3):
        world.submit(f"job{number}", dispatched=False)
    world.publisher.error = PublishFailed("no broker")

    result = world.reaper.run_pass()

    assert result.counts == {"unpublished": 1}
    assert queries.last_pass(world.store) is not None
    assert [world.job(f"job{n}")["dispatched_at"] for n in range(3)] == [None] * 3
    world.publisher.error = None
    assert world.reaper.run_pass().counts == {"dispatched": 3}


def test_jobs_that_never_leave_are_not_in_the_way_of_the_others(
    make_world: Callable[..., World],
) -> None:
    world = make_world(lease_reaper_batch=2)
    names = [f"job{number}" for number in range(6)]
    for name in names:
        world.submit(name, dispatched=False)
    # Due at the same instant, or long before the others: more of them than a batch has.
    world.publisher.never_leave = set(names[:3])
    world.set_all(available_at=world.job(names[0])["available_at"])

    # Each pass ends at the first of them, as where the broker is away.
    for _ in range(4):
        assert world.reaper.run_pass().counts["unpublished"] == 1

    assert {job for job, _ in world.publisher.sent} == set(names[3:])
    world.submit("late", dispatched=False)
    for _ in range(4):
        world.reaper.run_pass()
    assert {job for job, _ in world.publisher.sent} == {*names[3:], "late"}
    world.publisher.never_leave = set()
    assert world.reaper.run_pass().counts == {"dispatched": 3}


def test_a_job_that_waits_alone_keeps_its_time_while_the_broker_is_away(world: World) -> None:
    world.submit("job", dispatched=False)
    since = world.job("job")["available_at"]
    world.publisher.error = PublishFailed("no broker")

    world.reaper.run_pass()

    assert world.job("job")["available_at"] == since


def test_a_backlog_is_sent_in_batches_up_to_a_limit(make_world: Callable[..., World]) -> None:
    world = make_world(lease_reaper_batch=5, lease_reaper_limit=20)
    for number in range(30):
        world.submit(f"job{number:02}", dispatched=False)

    assert world.reaper.run_pass().counts == {"dispatched": 20}
    assert world.reaper.run_pass().counts == {"dispatched": 10}
    assert len({job for job, _ in world.publisher.sent}) == 30


def test_the_books_of_an_interrupted_job_are_closed_once(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.reaper.run_pass()
    world.submit("dead", max_attempts=1)
    world.claim("dead")
    for _ in range(8):
        world.pass_time(INTERVAL)
        world.reaper.run_pass()

    job = world.job("dead")
    assert (job["state"], job["lost_count"]) == ("interrupted", 1)
    assert job["settled_at"] is not None
    assert world.publisher.closed == ["dead"]
    assert world.publisher.sent == []


def test_books_that_only_a_worker_can_close_are_replayed(world: World) -> None:
    world.reaper.run_pass()
    world.publisher.can_close = False
    world.submit("pickled", max_attempts=1)
    world.claim("pickled")
    for _ in range(8):
        world.pass_time(INTERVAL)
        world.reaper.run_pass()

    assert world.publisher.sent == [("pickled", True)]
    assert world.job("pickled")["settled_at"] is None


def test_books_that_could_not_be_closed_are_reported_and_closed_later(world: World) -> None:
    seen: list[events.Event] = []
    events.subscribe(seen.append)
    try:
        world.submit("gone", expires_seconds=1.0)
        world.pass_time(2)
        world.publisher.error = PublishFailed("no result backend")

        result = world.reaper.run_pass()

        assert result.counts == {"cancelled": 1, "unpublished": 1}
        failed = [event for event in seen if event.name == events.PUBLISH_FAILED]
        assert [event.fields["job_id"] for event in failed] == ["gone"]
        assert failed[0].fields["reason"] == "no result backend"
    finally:
        events.unsubscribe(seen.append)

    world.publisher.error = None
    world.pass_time(world.settings.settle_grace + 1)
    assert world.reaper.run_pass().counts == {"closed": 1}
    assert world.job("gone")["settled_at"] is not None


def test_a_job_that_was_dispatched_meanwhile_is_not_sent_twice(world: World) -> None:
    world.submit("one", dispatched=False)
    [candidate] = queries.undispatched(world.store, limit=10)

    assert world.reaper.dispatch(candidate)
    assert not world.reaper.dispatch(candidate)

    assert world.publisher.sent == [("one", False)]


def test_every_step_is_kept_apart_from_forks(make_world: Callable[..., World]) -> None:
    world = make_world()
    depth: list[int] = []

    class Around:
        def __enter__(self) -> None:
            depth.append(1)

        def __exit__(self, *_: object) -> None:
            depth.pop()

    publish = world.publisher.publish

    def inside(candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        assert depth
        publish(candidate, message, replay=replay)

    world.publisher.publish = inside  # type: ignore[method-assign]
    reaper = Reaper(
        store=world.store,
        settings=world.settings,
        publisher=world.publisher,
        worker="w",
        around=Around,
    )
    world.submit("one", dispatched=False)

    reaper.run_pass()

    assert world.publisher.sent == [("one", False)]
    assert depth == []


# --- amnesty ------------------------------------------------------------------------------------


def test_after_an_outage_the_living_renew_before_anybody_is_given_on(world: World) -> None:
    # A database outage, or a machine's sleep: the reaper starts before the workers renew.
    world.reaper.run_pass()
    living = [world.run(f"alive{n}") for n in range(3)]
    world.run("dead")
    world.pass_time(120)

    result = world.reaper.run_pass()

    assert result.counts == {"extended": 4}
    for claimed in living:
        assert world.renew(claimed)
    for _ in range(7):
        world.pass_time(INTERVAL)
        for claimed in living:
            assert world.renew(claimed)
        world.reaper.run_pass()
    assert [world.job(f"alive{n}")["state"] for n in range(3)] == ["running"] * 3
    assert world.job("dead")["lost_count"] == 1
    assert world.publisher.sent == [("dead", False)]


def test_a_take_over_respects_the_amnesty(world: World) -> None:
    from celery_lease.records import Refused

    world.reaper.run_pass()
    claimed = world.run("alive")
    world.pass_time(120)
    world.reaper.run_pass()

    answer = transitions.claim(
        world.store,
        Delivery("alive", 1, "two", "two", "nonce", LEASE, datetime.now(timezone.utc)),
    )

    assert isinstance(answer, Refused)
    assert world.renew(claimed)


def test_passes_in_time_grant_none(world: World) -> None:
    world.reaper.run_pass()
    world.run("dead")

    counts = []
    for _ in range(8):
        world.pass_time(2 * INTERVAL)
        counts.append(world.reaper.run_pass().counts.get("extended", 0))

    # Also at two intervals, which is how often a worker makes a pass by itself.
    assert counts == [0] * 8
    assert world.job("dead")["lost_count"] == 1


@pytest.mark.parametrize("gap", [20.0, 45.0, 100.0])
def test_with_passes_that_are_always_late_the_dead_are_still_given_on(
    world: World, gap: float
) -> None:
    world.reaper.run_pass()
    world.run("dead")
    died_ago = 0.0
    while world.job("dead")["state"] == "running":
        world.pass_time(gap)
        died_ago += gap
        world.reaper.run_pass()
        assert died_ago <= 2 * LEASE + 2 * gap

    assert world.job("dead")["lost_count"] == 1


def test_the_first_pass_of_a_store_grants_it_too(world: World) -> None:
    claimed = world.run("alive")
    world.pass_time(40)

    assert world.reaper.run_pass().counts == {"extended": 1}
    assert world.renew(claimed)
