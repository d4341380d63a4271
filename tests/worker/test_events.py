"""What Celery's event stream says of attempts that ended without an outcome: seen by its receiver.

Flower and every other monitor believe Celery's own ``State``, so these tests ask that.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease import celery_events, events
from celery_lease.celery_events import WAIT_SECONDS, EventStream, told
from celery_lease.events import Event
from celery_lease.states import JobState, LossCause
from celery_lease.worker import ForkGate
from tests.support.waiting import eventually, never
from tests.worker.apps.tasks import make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

    from tests.support.proxy import Proxy
    from tests.support.servers import Valkey
    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

WORKER_APP = "tests.worker.apps.leased"


class Watcher:
    """Receives every event of an app's broker, and shows them to a ``State`` one by one."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._state = app.events.State()
        self._receiver: Any = None
        #: every event as it came
        self.seen: list[dict[str, Any]] = []
        #: by task: the states that it has been shown in
        self.states: dict[str, list[str]] = {}

    def _on_event(self, event: dict[str, Any]) -> None:
        self.seen.append(dict(event))
        self._state.event(dict(event))
        uuid = event.get("uuid", "")
        if uuid in self._state.tasks:
            shown = self.states.setdefault(uuid, [])
            state = self._state.tasks[uuid].state
            if shown[-1:] != [state]:
                shown.append(state)

    def run(self) -> None:
        with self._app.connection_for_read() as connection:
            self._receiver = self._app.events.Receiver(connection, handlers={"*": self._on_event})
            self._receiver.capture(wakeup=False)

    def stop(self) -> None:
        self._receiver.should_stop = True

    def of(self, uuid: str, kind: str = "lease-") -> list[dict[str, Any]]:
        """Return the events of a kind about a task."""
        return [e for e in self.seen if e.get("uuid") == uuid and e["type"].startswith(kind)]

    def kinds(self, uuid: str) -> list[str]:
        return [event["type"] for event in self.of(uuid, "")]

    def until(self, uuid: str, kind: str) -> dict[str, Any]:
        """Wait for an event about a task."""
        what = lambda: f"{kind}: {self.kinds(uuid)}"  # noqa: E731
        return eventually(lambda: self.of(uuid, kind), timeout=15, what=what)[0]

    def until_shown(self, uuid: str, state: str) -> list[str]:
        """Wait until a task is shown in a state, and return all that it was shown in."""
        what = lambda: f"{state}: {self.states.get(uuid)} {self.kinds(uuid)}"  # noqa: E731
        eventually(lambda: self.states.get(uuid, [])[-1:] == [state], timeout=15, what=what)
        return self.states[uuid]


@contextmanager
def watching(app: Celery) -> Iterator[Watcher]:
    watcher = Watcher(app)
    thread = threading.Thread(target=watcher.run, name="watcher")
    thread.start()
    try:

        def is_heard() -> bool:
            with app.events.default_dispatcher() as dispatcher:
                dispatcher.send("probe-sent")
            return bool(watcher.seen)

        eventually(is_heard, interval=0.1)
        yield watcher
    finally:
        watcher.stop()
        thread.join(5)


@pytest.fixture
def watch() -> Iterator[Callable[[Site], Watcher]]:
    """Receive the events of a site's workers."""
    with ExitStack() as stack:

        def start(site: Site) -> Watcher:
            return stack.enter_context(watching(site.app))

        yield start


@pytest.fixture
def site(make_site: Callable[..., Site], sqlite_url: str) -> Site:
    """A site whose workers make passes."""
    return make_site(
        sqlite_url,
        lease_reaper_in_worker=True,
        lease_reaper_interval=0.5,
        lease_lost_backoff=[0.0],
        # A frozen worker's connection may be given the next message.
        lease_queued_timeout=2.0,
    )


@pytest.fixture
def start(start_worker: Callable[..., CeleryWorker], site: Site) -> Callable[..., CeleryWorker]:
    """Start a worker that sends events."""

    def one(*, sends: bool = True, **options: Any) -> CeleryWorker:
        arguments = ("-E",) if sends else ()
        env = site.worker_env()
        return start_worker(WORKER_APP, arguments=arguments, env=env, **options)

    return one


# --- from a worker to a monitor -----------------------------------------------------------------


def test_a_job_whose_child_was_killed_is_shown_as_retried_then_succeeded(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    start(name="one")

    sent = site.task("o.act").delay(site.tag(), "killed")

    assert seen.until_shown(sent.id, "SUCCESS") == [
        "RECEIVED",
        "STARTED",
        "RETRY",
        "RECEIVED",
        "STARTED",
        "SUCCESS",
    ]
    (told_once,) = seen.of(sent.id)
    assert told_once["type"] == "lease-lost"
    assert told_once["fencing_token"] == 1
    assert told_once["worker"] == "one@test"
    assert told_once["hostname"] == "one@test"
    assert told_once["state"] == "queued"
    assert told_once["cause"] == "lost"
    assert "attempt 1 on one@test" in seen.of(sent.id, "task-retried")[0]["exception"]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_job_that_was_handed_over_is_not_shown_as_started_for_ever(
    pool: str, site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    start(pool=pool, name="one")

    sent = site.task("o.act").delay(site.tag(), "hand-over")

    shown = seen.until_shown(sent.id, "SUCCESS")
    released = seen.until(sent.id, "lease-")
    assert released["type"] == "lease-released"
    assert released["reason"] == "hand-over"
    assert released["fencing_token"] == 1
    # A solo worker sends events between two tasks: the order of these is Celery's own.
    assert "RETRY" in shown or pool == "solo"


def test_a_frozen_workers_attempt_expires_and_what_it_says_later_is_rejected(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    first = start(name="first")
    tag = site.tag()
    sent = site.task("t.wait").delay(tag)
    eventually(lambda: "began 1" in site.facts(tag))
    first.freeze()
    start(name="second")

    eventually(lambda: "began 2" in site.facts(tag), timeout=20)
    expired = seen.until(sent.id, "lease-expired")
    assert seen.states[sent.id][:3] == ["RECEIVED", "STARTED", "RETRY"]
    site.book.note(tag, "go 2")
    seen.until_shown(sent.id, "SUCCESS")
    site.book.note(tag, "go 1")
    first.thaw()

    rejected = seen.until(sent.id, "lease-rejected")
    assert (expired["fencing_token"], expired["cause"]) == (1, "expired")
    assert (expired["worker"], expired["hostname"]) == ("first@test", "second@test")
    assert (rejected["fencing_token"], rejected["outcome"]) == (1, "succeeded")
    assert seen.states[sent.id][-1] == "SUCCESS"


def test_the_last_attempts_loss_is_shown_as_a_failure(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    worker = start(concurrency=1)
    tag = site.tag()
    sent = site.task("o.always").delay(tag)
    eventually(lambda: site.facts(tag))

    (child,) = worker.children()
    os.kill(child, signal.SIGKILL)

    seen.until_shown(sent.id, "FAILURE")
    interrupted = seen.until(sent.id, "lease-interrupted")
    assert interrupted["fencing_token"] == 1
    assert seen.of(sent.id, "lease-lost")[0]["state"] == "interrupted"
    assert "JobInterrupted" in seen.of(sent.id, "task-failed")[0]["exception"]


def test_a_child_that_was_forked_after_the_first_event_sends_its_own(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    start(concurrency=1)
    # The second death's replacement is forked when the main process has sent of the first.
    first, second = (site.task("o.act").delay(site.tag(), "killed") for _ in range(2))
    seen.until_shown(first.id, "SUCCESS")
    seen.until_shown(second.id, "SUCCESS")

    sent = site.task("o.act").delay(site.tag(), "hand-over")

    assert "RETRY" in seen.until_shown(sent.id, "SUCCESS")
    main = seen.until(second.id, "lease-lost")["pid"]
    assert seen.until(sent.id, "lease-released")["pid"] != main


def test_a_revoked_job_is_cancelled(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    start()
    tag = site.tag()
    sent = site.task("t.wait").delay(tag)
    eventually(lambda: "began 1" in site.facts(tag))

    site.app.control.revoke(sent.id, terminate=True)

    cancelled = seen.until(sent.id, "lease-cancelled")
    assert cancelled["reason"] == "revoked"
    assert seen.until_shown(sent.id, "REVOKED")[-1] == "REVOKED"


def test_a_job_that_ended_well_has_no_event_of_ours(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    seen = watch(site)
    start()

    sent = site.task("t.add").delay(1, 2)

    seen.until_shown(sent.id, "SUCCESS")
    assert seen.of(sent.id) == []


def test_nothing_is_sent_before_somebody_asks_for_events(
    site: Site, start: Callable[..., CeleryWorker], watch: Callable[[Site], Watcher]
) -> None:
    """Flower asks by remote control, after the children have been forked."""
    seen = watch(site)
    start(sends=False)
    before = site.task("o.act").delay(site.tag(), "hand-over")
    assert before.get(timeout=15) == "done"
    never(lambda: seen.kinds(before.id), during=0.5)

    site.app.control.enable_events(reply=True)

    def is_seen() -> bool:
        sent = site.task("o.act").delay(site.tag(), "hand-over")
        assert sent.get(timeout=15) == "done"
        return bool(seen.of(sent.id, "lease-released"))

    eventually(is_seen, interval=0.5)


# --- a stream of this process -------------------------------------------------------------------

LOST: dict[str, Any] = {
    "job_id": "job",
    "fencing_token": 1,
    "worker": "w",
    "owner": "host:1:a",
    "cause": LossCause.LOST,
    "state": JobState.QUEUED,
}


@pytest.fixture
def make_stream() -> Iterator[Callable[..., tuple[EventStream, Celery]]]:
    """Make a stream to a broker: ``make_stream(url)``."""
    with ExitStack() as stack:

        def make(url: str, *, is_on: bool = True) -> tuple[EventStream, Celery]:
            app = make_app(broker=url, backend=None, store="sqlite:////tmp/none", ledger=url)
            stack.callback(app.close)
            stream = EventStream(
                app, node_name="w@test", gate=partial(ForkGate, is_last=True), is_on=is_on
            )
            stack.callback(stream.stop)
            return stream, app

        yield make


def tell_elsewhere(stream: EventStream, *, times: int = 1, name: str = "") -> None:
    """Tell of a loss in a thread: the main one, of a worker's event loop, never waits."""

    def tell() -> None:
        for _ in range(times):
            stream(Event(name or events.LEASE_EXPIRED, LOST))

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


def test_an_absent_broker_costs_the_job_a_moment_once_and_one_warning(
    make_stream: Callable[..., tuple[EventStream, Celery]], caplog: pytest.LogCaptureFixture
) -> None:
    stream, _ = make_stream("redis://127.0.0.1:1/0")
    began = time.monotonic()

    tell_elsewhere(stream, times=20)

    assert time.monotonic() - began < WAIT_SECONDS
    with caplog.at_level(logging.WARNING):
        stream.flush(5)
    warnings = [r for r in caplog.records if "lease.events.unsent" in r.message]
    assert len(warnings) == 1


def test_a_broker_that_says_nothing_costs_the_job_one_wait(
    make_stream: Callable[..., tuple[EventStream, Celery]],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        stream, _ = make_stream(f"redis://127.0.0.1:{hole.getsockname()[1]}/0")
        began = time.monotonic()

        tell_elsewhere(stream, times=5)
        first = time.monotonic() - began
        # It is given up, and for a while nothing is tried.
        stream.flush(10)
        began = time.monotonic()
        tell_elsewhere(stream, times=5)
        stream.flush(10)

        assert first < 1.5 * WAIT_SECONDS
        assert time.monotonic() - began < 0.7


def test_an_event_for_celerys_state_that_is_late_is_not_sent(
    own_server: Callable[..., Any],
    start_proxy: Callable[[int], Proxy],
    make_stream: Callable[..., tuple[EventStream, Celery]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would put a job that has succeeded meanwhile back to RETRY."""
    from tests.support.servers import Valkey as Server

    server: Valkey = own_server(Server)
    proxy = start_proxy(server.port)
    stream, _ = make_stream(proxy.url(server.url))
    direct = make_app(
        broker=server.url, backend=None, store="sqlite:////tmp/none", ledger=server.url
    )
    with watching(direct) as seen:
        stream(Event(events.LEASE_EXPIRED, {**LOST, "job_id": "in time"}))
        seen.until("in time", "task-retried")

        monkeypatch.setattr(celery_events, "WAIT_SECONDS", 0.3)
        proxy.stall()
        began = time.monotonic()
        tell_elsewhere(stream, name=events.OUTCOME_REJECTED)
        tell_elsewhere(stream, times=5)
        assert time.monotonic() - began < 3 * celery_events.WAIT_SECONDS
        time_is_up = time.monotonic() + celery_events.WAIT_SECONDS
        eventually(lambda: time.monotonic() > time_is_up)
        proxy.heal()

        eventually(lambda: len(seen.kinds("job")) >= 6)
        stream.flush(5)
        assert seen.kinds("job") == ["lease-rejected", *["lease-lost"] * 5]
    direct.close()


def test_a_fork_that_waits_for_the_emitter_does_not_keep_the_sender_waiting(
    own_server: Callable[..., Any], make_stream: Callable[..., tuple[EventStream, Celery]]
) -> None:
    """The pool replaces a killed child in the very moment its loss is told."""
    from tests.support.servers import Valkey as Server

    def is_forking() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code is ForkGate.before_fork.__code__

    stream, app = make_stream(own_server(Server).url)
    gates = [ForkGate() for _ in range(5)]
    forking = threading.Event()
    seconds: list[float] = []

    def tell() -> None:
        with ExitStack() as held:
            for gate in gates:
                held.enter_context(gate())
            forking.set()
            eventually(is_forking)
            began = time.monotonic()
            stream(Event(events.LEASE_EXPIRED, LOST))
            seconds.append(time.monotonic() - began)

    with watching(app) as seen:
        emitter = threading.Thread(target=tell)
        emitter.start()
        forking.wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        emitter.join()

        assert seconds[0] < WAIT_SECONDS
        seen.until("job", "task-retried")


def test_a_stream_that_is_off_sends_nothing_and_starts_no_thread(
    make_stream: Callable[..., tuple[EventStream, Celery]],
) -> None:
    stream, _ = make_stream("redis://127.0.0.1:1/0", is_on=False)

    events.emit(events.LEASE_EXPIRED, **LOST)

    assert stream._sender._thread is None


# --- what an event means ------------------------------------------------------------------------


def kinds_of(name: str, **fields: Any) -> list[str]:
    return [kind for kind, _ in told(Event(name, {**LOST, **fields}))]


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (JobState.QUEUED, "task-retried"),
        (JobState.SCHEDULED, "task-retried"),
        # Not running any more, and Celery has no word for it.
        (JobState.HELD, "task-retried"),
        (JobState.INTERRUPTED, "task-failed"),
        (JobState.FAILED, "task-failed"),
    ],
)
def test_what_follows_a_loss_is_said_in_celerys_words(state: JobState, after: str) -> None:
    assert kinds_of(events.LEASE_EXPIRED, state=state.value) == [after, "lease-lost"]


def test_each_way_to_end_has_its_event() -> None:
    assert kinds_of(events.LEASE_EXPIRED, cause="expired")[1] == "lease-expired"
    assert kinds_of(events.LEASE_EXPIRED, taken_over_by=2) == ["lease-expired"]
    assert kinds_of(events.ATTEMPT_STALLED) == ["task-retried", "lease-stalled"]
    assert kinds_of(events.LEASE_EXPIRED, cause="stalled") == []
    assert kinds_of(events.JOB_RELEASED) == ["task-retried", "lease-released"]
    assert kinds_of(events.JOB_HELD) == ["lease-held"]
    assert kinds_of(events.JOB_INTERRUPTED) == ["lease-interrupted"]
    assert kinds_of(events.JOB_CANCELLED) == ["task-revoked", "lease-cancelled"]
    assert kinds_of(events.OUTCOME_REJECTED) == ["lease-rejected"]
    assert kinds_of(events.CLAIM_WON) == []
    assert kinds_of(events.OUTCOME_ACCEPTED) == []
    # The runner's own discovery: who ended the attempt has said so.
    assert kinds_of(events.LEASE_LOST) == []


def test_an_event_has_the_details_and_nothing_of_the_users() -> None:
    fields = {**LOST, "reason": "gone", "result": "secret", "args": [1]}

    (_, after), (_, details) = told(Event(events.LEASE_EXPIRED, fields))

    assert details == {
        "uuid": "job",
        "fencing_token": 1,
        "worker": "w",
        "owner": "host:1:a",
        "cause": "lost",
        "state": "queued",
        "reason": "gone",
    }
    assert after == {
        "uuid": "job",
        "exception": "LeaseLost('attempt 1 on w: gone')",
        "traceback": "",
    }
