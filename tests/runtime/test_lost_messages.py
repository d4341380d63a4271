"""Hours of passes over a queue that is a list: what is sent again, and how much beside it.

The broker is the simplest one that keeps order; the store and the reaper are real, and time passes
by moving rows. One step is half a minute.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
import sqlalchemy as sa

from celery_lease.reaper import Reaper
from celery_lease.records import Claimed, Delivery, Dispatchable, Message, NewJob, Outcome
from celery_lease.settings import load
from celery_lease.states import JobState
from celery_lease.store import transitions
from celery_lease.store.dialects import Instant, Later
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema
from celery_lease.store.transitions import Parting

STEP = 30.0
#: ``lease_queued_timeout``, its default
TIMEOUT = 300.0
HOUR = int(3600 / STEP)


class Queue:
    """A queue that keeps order, its publishers, its worker and its reaper."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.messages: deque[tuple[str, int]] = deque()
        self.sent: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        values = {"lease_queued_timeout": TIMEOUT, "lease_reaper_interval": STEP}
        self.reaper = Reaper(store=store, settings=load(values.get), publisher=self, worker="r")

    def publish(self, candidate: Dispatchable, message: Message, *, replay: bool) -> None:
        assert not replay
        self._put(candidate.job_id, candidate.dispatch_count + 1)

    def close_books(self, outcome: Outcome, message: Message) -> bool:
        raise AssertionError("every job is settled as it ends")

    def _put(self, job_id: str, count: int) -> None:
        self.messages.append((job_id, count))
        self.sent[job_id] += 1

    def submit(self, number: int = 1) -> None:
        for _ in range(number):
            job_id = f"job{len(self.sent):04}"
            message = Message(1, "{}", "{}", b"[]", "application/json", "utf-8", "", "q")
            assert transitions.submit(
                self.store, NewJob(job_id=job_id, task="t", message=message, queue="q")
            )
            self._put(job_id, 1)

    def work(self, number: int = 1) -> None:
        """Take messages until so many bodies have run, or none is left."""
        while number and self.messages:
            job_id, count = self.messages.popleft()
            answer = transitions.claim(
                self.store,
                Delivery(
                    job_id=job_id,
                    message_version=1,
                    owner="one",
                    worker="one",
                    nonce=uuid.uuid4().hex,
                    lease_seconds=30.0,
                    worker_now=datetime.now(timezone.utc),
                    dispatch_count=count,
                ),
            )
            if isinstance(answer, Claimed):
                self.ran[job_id] += 1
                number -= 1
                transitions.complete(
                    self.store,
                    answer.lease,
                    Parting("done"),
                    result=None,
                    result_type=None,
                    settled=True,
                )

    def step(self) -> None:
        """Let time pass, and the reaper."""
        tables = self.store.tables
        with self.store.transaction() as connection:
            for table in (tables.job, tables.attempt, tables.completed_pass):
                moved = {c: Later(c, -STEP) for c in table.c if isinstance(c.type, Instant)}
                connection.execute(sa.update(table).values(moved))
        self.reaper.run_pass()

    @property
    def waiting(self) -> int:
        job = self.store.tables.job
        with self.store.single() as connection:
            which = job.c.state == JobState.QUEUED.value
            return int(
                connection.scalar(sa.select(sa.func.count()).select_from(job).where(which)) or 0
            )

    @property
    def surplus(self) -> float:
        """Messages that were sent, as a part of the jobs."""
        return self.sent.total() / len(self.sent)


@pytest.fixture
def queue(sqlite_url: str) -> Iterator[Queue]:
    store = Store(url=sqlite_url)
    ensure_schema(store, auto_migrate=True)
    yield Queue(store)
    store.close()


def assert_all_ran_once(queue: Queue) -> None:
    assert queue.ran == dict.fromkeys(queue.sent, 1)


def test_a_backlog_that_grows_for_an_hour_is_not_multiplied(queue: Queue) -> None:
    for _ in range(HOUR):
        queue.submit()
        queue.step()

    assert 1 < queue.surplus <= 1.1


def test_a_queue_that_is_always_late_and_always_served_is_not_multiplied(queue: Queue) -> None:
    """Each job waits three timeouts, and each is overtaken by nobody."""
    queue.submit(30)
    for _ in range(HOUR):
        queue.submit()
        queue.work()
        queue.step()
    assert queue.surplus <= 1.1

    queue.work(1000)

    assert_all_ran_once(queue)
    assert not queue.messages


@pytest.mark.parametrize("inflow", [0, 1], ids=["nothing comes", "more comes"])
def test_a_worker_that_comes_back_to_its_backlog_has_nothing_sent_again(
    queue: Queue, inflow: int
) -> None:
    """Old copies of what was probed come first."""
    queue.submit(100)
    for _ in range(HOUR):
        queue.submit(inflow)
        queue.step()
    before = queue.sent.total()

    for _ in range(HOUR // 2):
        queue.submit(inflow)
        queue.work(3)
        queue.step()

    jobs = len(queue.sent)
    # What came meanwhile, and a few probes of it.
    assert queue.sent.total() - before <= inflow * HOUR // 2 + 0.1 * jobs
    queue.work(1000)
    assert_all_ran_once(queue)


@pytest.mark.parametrize("inflow", [0, 1], ids=["nothing comes", "more comes"])
def test_what_is_lost_is_all_sent_again_after_one_timeout(queue: Queue, inflow: int) -> None:
    queue.submit(110)
    queue.step()
    queue.messages.clear()

    steps = 0
    while queue.waiting:
        queue.submit(inflow)
        queue.work(1000)
        queue.step()
        steps += 1
        assert steps < 100

    # Suspected, a probe, its evidence.
    assert steps * STEP <= TIMEOUT + 3 * STEP
    assert_all_ran_once(queue)
    assert max(queue.sent.values()) == 2


def test_a_backlog_that_was_silent_for_an_hour_and_is_then_lost_waits_for_one_more_gap(
    queue: Queue,
) -> None:
    """The gap between probes has grown to the length of the silence; what comes ends it."""
    queue.submit(100)
    for _ in range(HOUR):
        queue.step()
    queue.messages.clear()
    queue.submit()

    queue.work()
    queue.step()
    queue.work(1000)

    assert queue.waiting <= 1
    while queue.waiting:
        queue.step()
        queue.work(1000)
    assert_all_ran_once(queue)


def test_jobs_that_no_worker_knows_do_not_hide_that_others_are_lost(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B116: their probes are discarded, and the next ones are other jobs."""
    queue.submit(20)
    unknown = {"job0019"}
    queue.messages.clear()
    put = queue._put

    def discarded(job_id: str, count: int) -> None:
        if job_id not in unknown:
            put(job_id, count)

    monkeypatch.setattr(queue, "_put", discarded)
    steps = 0
    while queue.waiting > len(unknown):
        queue.work(1000)
        queue.step()
        steps += 1
        assert steps < HOUR

    # The second probe comes two timeouts after the first.
    assert steps * STEP <= 3 * TIMEOUT + 4 * STEP
    assert set(queue.sent) - set(queue.ran) == unknown
    unknown.clear()
    while queue.waiting:
        queue.step()
        queue.work(1000)
    assert set(queue.ran.values()) == {1}
    assert set(queue.ran) == set(queue.sent)
