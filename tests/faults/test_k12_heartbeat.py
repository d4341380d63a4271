"""K12: lease and heartbeat (B091, B092, B094 to B096, B102), and what a healthy body can rely on.

B098 (a renewal that comes late) is in ``test_k7_stale_outcomes.py``, B099 (the time in the queue)
in ``tests/store/test_claim.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.faults.brokers import RedisBroker
from tests.faults.stage import INTERVAL, LEASE, SLACK, Stage
from tests.support.proxy import Proxy
from tests.support.servers import Valkey
from tests.support.waiting import eventually

FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"


def test_a_body_of_five_leases_is_never_taken_over(
    make_stage: Callable[..., Stage], enter: Callable[[AbstractContextManager[Any]], Any]
) -> None:
    """With two more reapers at work, and a second worker that would take it."""
    stage = make_stage(lease_duration=2.0)
    enter(stage.passes(every=0.2))
    enter(stage.passes(every=0.3))
    stage.workers(2, concurrency=1)
    sent = stage.send({"wait": {"*": "go"}, "check": True})
    stage.wait_begun(sent.id)

    # A renewal comes each third of a lease, ±10 %.
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= 15, timeout=30)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    (attempt,) = stage.attempts(sent.id)
    assert (attempt["ended_at"] - attempt["claimed_at"]).total_seconds() > 4 * 2.0
    assert stage.job(sent.id)["lost_count"] == 0
    assert len(stage.ledger.read("begin")) == 1


def test_a_body_that_holds_the_interpreter_is_never_accepted_beside_another(
    make_stage: Callable[..., Stage], enter: Callable[[AbstractContextManager[Any]], Any]
) -> None:
    """B095: the documented limit: nobody renews, it is taken over, and what it says is rejected."""
    stage = make_stage()
    enter(stage.passes(every=0.2))
    stage.worker(concurrency=1)
    held = stage.send({"then": {"1": f"hold the GIL {int(2 * LEASE)}"}}, link=stage.note("link"))
    stage.wait_begun(held.id)
    stage.worker(concurrency=1)

    stage.assert_accepted_once(held.id, 2)
    eventually(lambda: stage.attempts(held.id)[0]["rejected_at"], timeout=20)

    stage.assert_accepted_once(held.id, 2)
    assert stage.attempts(held.id)[0]["late_outcome"] == "succeeded"
    assert [one["value"] for one in stage.ledger.read("link")] == [2]


def test_of_twenty_greenlets_one_that_never_yields_costs_no_lease(
    make_stage: Callable[..., Stage], enter: Callable[[AbstractContextManager[Any]], Any]
) -> None:
    """B096: the heartbeat is a thread of the operating system."""
    stage = make_stage()
    passes = enter(stage.passes(every=0.2))
    stage.worker(pool="gevent", concurrency=20)
    idle = [stage.send({"wait": {"*": "go"}}).id for _ in range(19)]
    for one in idle:
        stage.wait_begun(one)
    busy = stage.send({"then": {"*": f"spin {2 * LEASE}"}}).id
    stage.wait_begun(busy)
    stage.worker(pool="gevent", concurrency=20)

    (end,) = eventually(lambda: stage.ledger.read("end", job=busy), timeout=6 * LEASE)
    # The others could do nothing in that time, which was longer than their leases.
    (begin,) = stage.ledger.read("begin", job=busy)
    assert end["monotonic"] - begin["monotonic"] >= 2 * LEASE
    assert end["pid"] == begin["pid"]
    stage.ledger.open_gate("go")

    for one in (*idle, busy):
        stage.assert_accepted_once(one, 1)
        assert len(stage.attempts(one)) == 1
    assert len(stage.ledger.read("begin")) == 20
    assert sum(one.get("expired", 0) for one in passes) == 0


def test_a_job_comes_back_by_its_own_lease_and_not_by_the_longest(
    make_stage: Callable[..., Stage], folders: Callable[[], str]
) -> None:
    """B094: of two that were killed together, one has a lease of ten minutes."""
    stage = make_stage()
    killed = stage.worker(concurrency=2, settings={"lease_run_dir": folders()})
    short = stage.send({"wait": {"1": "never"}})
    long = stage.signature({"wait": {"1": "never"}}, task="long_lease").apply_async()
    for one in (short, long):
        stage.wait_begun(one.id)
    stage.worker(concurrency=2, settings={"lease_run_dir": folders()})

    killed.kill_group()

    stage.assert_accepted_once(short.id, 2)
    first, second = stage.attempts(short.id)
    waited = (second["claimed_at"] - first["last_renewed_at"]).total_seconds()
    assert waited <= LEASE + 2.5 * INTERVAL + SLACK
    (kept,) = stage.attempts(long.id)
    assert (kept["ended_at"], stage.job(long.id)["state"]) == (None, "running")
    left = kept["lease_expires_at"] - kept["last_renewed_at"]
    assert left.total_seconds() == pytest.approx(600, abs=1)


# --- the main process renews ----------------------------------------------------------------------

FROM_WORKER = {"lease_heartbeat_from": "worker"}


def test_a_body_that_computes_in_one_call_into_c_is_renewed_by_its_main_process(
    make_stage: Callable[..., Stage], enter: Callable[[AbstractContextManager[Any]], Any]
) -> None:
    """B095: for three leases nothing else in its process runs; the other child is renewed too."""
    stage = make_stage(**FROM_WORKER)
    passes = enter(stage.passes(every=0.2))
    stage.worker(concurrency=2)
    computing = stage.send({"then": {"*": f"compute {3 * LEASE}"}}, link=stage.note("link")).id
    waiting = stage.send({"wait": {"*": "go"}, "check": True}).id
    for one in (computing, waiting):
        stage.wait_begun(one)
    stage.worker(concurrency=2)

    stage.assert_accepted_once(computing, 1)
    stage.ledger.open_gate("go")
    stage.assert_accepted_once(waiting, 1)
    for one in (computing, waiting):
        (attempt,) = stage.attempts(one)
        assert (attempt["ended_at"] - attempt["claimed_at"]).total_seconds() > 3 * LEASE
        # A renewal comes each third of a lease.
        assert attempt["renewal_count"] >= 6
        assert not stage.job(one)["accepted_late"]
    assert sum(one.get("expired", 0) for one in passes) == 0
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [1]


@pytest.mark.parametrize("how", ["waits with the lock in its hands", "is stopped"])
def test_a_body_that_does_nothing_is_not_renewed_for_ever_by_its_main_process(
    how: str, make_stage: Callable[..., Stage]
) -> None:
    """B046, B095: its process lives, and gives no sign of life."""
    stage = make_stage(**FROM_WORKER)
    worker = stage.worker(concurrency=1)
    if how == "is stopped":
        plan: dict[str, Any] = {"wait": {"1": "late"}}
    else:
        plan = {"wait": {"1": "holds"}, "then": {"1": f"hold the GIL {int(4 * LEASE)}"}}
    sent = stage.send(plan, link=stage.note("link"))
    child = stage.wait_begun(sent.id)["pid"]
    # The main process has taken over.
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= 3, timeout=3 * LEASE)
    other = stage.worker(concurrency=1)

    if how == "is stopped":
        os.kill(child, signal.SIGSTOP)
    else:
        stage.ledger.open_gate("holds")
    harmed_at = stage.scalar("SELECT clock_timestamp()")

    stage.assert_accepted_once(sent.id, 2)
    first, second = stage.attempts(sent.id)
    assert (first["state"], second["worker"]) == ("expired", other.nodename)
    # Its last word is news for one and a half heartbeats; of one that is stopped it is none.
    news = 0.0 if how == "is stopped" else 1.5 * LEASE / 3
    # When it starts again is another matter: the hung worker may have fetched the message, too.
    waited = (first["ended_at"] - harmed_at).total_seconds()
    assert waited < news + LEASE + 2.5 * INTERVAL + SLACK
    stage.ledger.open_gate("late")
    os.kill(child, signal.SIGCONT)
    eventually(lambda: stage.attempts(sent.id)[0]["rejected_at"], timeout=5 * LEASE)
    stage.wait_quiet()
    assert stage.attempts(sent.id)[0]["late_outcome"] == "succeeded"
    stage.assert_accepted_once(sent.id, 2)
    assert [one["value"] for one in stage.ledger.read("link")] == [2]
    assert worker.is_running


def test_the_main_process_renews_for_no_child_that_is_gone(
    make_stage: Callable[..., Stage],
) -> None:
    """Its sibling goes on, and its job is given on at once."""
    stage = make_stage(**FROM_WORKER)
    stage.worker(concurrency=2)
    sent = [stage.send({"wait": {"1": "go"}}).id for _ in range(2)]
    children = [stage.wait_begun(one)["pid"] for one in sent]
    for one in sent:
        eventually(lambda one=one: stage.attempts(one)[0]["renewal_count"] >= 3, timeout=3 * LEASE)  # type: ignore[misc]

    killed_at = stage.scalar("SELECT clock_timestamp()")
    os.kill(children[0], signal.SIGKILL)

    stage.assert_accepted_once(sent[0], 2)
    first, second = stage.attempts(sent[0])
    assert first["state"] == "lost"
    assert first["last_renewed_at"] <= first["ended_at"]
    assert (second["claimed_at"] - killed_at).total_seconds() < 1.0 + SLACK
    stage.ledger.open_gate("go")
    stage.assert_accepted_once(sent[1], 1)


# --- the worker's way to the database is cut ----------------------------------------------------


@pytest.fixture
def proxy(postgresql: Any, start_proxy: Callable[[int], Proxy]) -> Proxy:
    """The cable between the worker and PostgreSQL."""
    return start_proxy(postgresql.port)


@pytest.fixture
def stage(make_stage: Callable[..., Stage], postgresql_url: str, proxy: Proxy) -> Stage:
    """A stage whose workers reach the store through the cable; the test does not."""
    return make_stage(
        store_url=postgresql_url, worker_settings={"lease_store_url": proxy.url(postgresql_url)}
    )


@pytest.mark.parametrize("harm", ["cut", "stall"])
def test_an_outage_shorter_than_the_lease_is_invisible_to_the_body(
    harm: str, stage: Stage, proxy: Proxy, enter: Callable[[AbstractContextManager[Any]], Any]
) -> None:
    """B092: a renewal fails, the next one does not; same token, one warning."""
    enter(stage.passes(every=0.2))
    worker = stage.worker(concurrency=1, settings={"lease_duration": 6.0})
    sent = stage.send({"wait": {"*": "go"}, "check": True})
    stage.wait_begun(sent.id)

    getattr(proxy, harm)()
    last = stage.attempts(sent.id)[0]["last_renewed_at"]
    # 2 s between renewals, and at least one of them was missed.
    eventually(
        lambda: (stage.scalar("SELECT clock_timestamp()") - last).total_seconds() > 3.0, timeout=6
    )
    assert stage.attempts(sent.id)[0]["last_renewed_at"] == last
    proxy.heal()
    eventually(lambda: stage.attempts(sent.id)[0]["last_renewed_at"] > last)
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.attempts(sent.id)) == 1
    assert stage.job(sent.id)["lost_count"] == 0
    assert len(stage.ledger.read("begin")) == 1
    assert worker.log().count("lease.store.unavailable") <= 2


@pytest.mark.parametrize("harm", ["cut", "stall"])
def test_an_outage_longer_than_the_lease_stops_the_body_before_anybody_else_starts(
    harm: str,
    stage: Stage,
    proxy: Proxy,
    enter: Callable[[AbstractContextManager[Any]], Any],
    record_property: Callable[[str, object], None],
) -> None:
    """B091: ``check`` raises by the runner's own clock, before the lease is over for the store."""
    enter(stage.passes(every=0.2))
    worker = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "never"}, "check": True}, link=stage.note("link"))
    stage.wait_begun(sent.id)

    getattr(proxy, harm)()
    (stopped,) = eventually(
        lambda: stage.ledger.read("interrupted", job=sent.id), timeout=LEASE + SLACK
    )
    first = stage.attempts(sent.id)[0]
    left = first["lease_expires_at"] - datetime.fromtimestamp(stopped["wall"], timezone.utc)
    record_property("seconds_left", left.total_seconds())
    assert left.total_seconds() > 0
    stage.wait_state(sent.id, "queued")
    proxy.heal()

    stage.assert_accepted_once(sent.id, 2)
    first, second = stage.attempts(sent.id)
    assert first["state"] in {"expired", "lost"}
    assert second["claimed_at"] > first["lease_expires_at"]
    assert [e["token"] for e in stage.ledger.read("begin")] == [1, 2]
    assert [e["value"] for e in eventually(lambda: stage.ledger.read("link"))] == [2]
    assert worker.is_running


@pytest.mark.parametrize("settings", [{}, FROM_WORKER], ids=["child", "worker"])
def test_after_an_outage_of_two_leases_each_job_has_one_outcome_and_the_log_a_few_lines(
    settings: dict[str, str],
    stage: Stage,
    proxy: Proxy,
    enter: Callable[[AbstractContextManager[Any]], Any],
) -> None:
    """B091, B092: bodies that do not ask; the amnesty keeps them, or they are lost."""
    enter(stage.passes(every=0.2))
    worker = stage.worker(concurrency=4, settings=settings)
    ids = [stage.send({"wait": {"1": "go"}}, link=stage.note("link")).id for _ in range(4)]
    for one in ids:
        stage.wait_begun(one)
    eventually(lambda: all(stage.attempts(one)[0]["renewal_count"] for one in ids))

    proxy.cut()
    cut_at = stage.scalar("SELECT clock_timestamp()")
    # Every half second a try of each of five processes, and each has failed.
    eventually(
        lambda: (stage.scalar("SELECT clock_timestamp()") - cut_at).total_seconds() > 2 * LEASE,
        timeout=3 * LEASE,
    )
    lines = worker.log().count("lease.store.unavailable")
    proxy.heal()
    stage.ledger.open_gate("go")

    for one in ids:
        token = stage.wait_settled(one)["accepted_attempt"]
        stage.assert_accepted_once(one, token)
        assert token == len(stage.attempts(one))
        assert len(stage.ledger.read("begin", job=one)) == token
    stage.wait_quiet()
    assert len(eventually(lambda: stage.ledger.read("link"))) == len(ids)
    # One in ten seconds for each process: the main one and its four children.
    assert 1 <= lines <= 5, worker.log()
    assert worker.is_running


@pytest.mark.parametrize("settings", [{}, FROM_WORKER], ids=["child", "worker"])
def test_a_lease_that_was_given_up_is_renewed_by_nobody(
    settings: dict[str, str], stage: Stage, proxy: Proxy
) -> None:
    """The body has caught ``LeaseLost`` and goes on computing, when the store is back."""
    worker = stage.worker(concurrency=1, settings=settings)
    sent = stage.send(
        {"wait": {"1": "never"}, "check": True, "linger": {"1": f"compute {2 * LEASE}"}}
    )
    stage.wait_begun(sent.id)
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] >= 2, timeout=3 * LEASE)

    proxy.cut()
    eventually(lambda: stage.ledger.read("interrupted", job=sent.id), timeout=LEASE + SLACK)
    last = stage.attempts(sent.id)[0]["last_renewed_at"]
    proxy.heal()
    stage.worker(concurrency=1, settings={"lease_store_url": stage.store_url})

    stage.assert_accepted_once(sent.id, 2)
    first = stage.attempts(sent.id)[0]
    assert first["last_renewed_at"] == last
    assert first["state"] in {"expired", "lost"}
    assert worker.is_running


# --- the broker is away ---------------------------------------------------------------------------


def test_a_broker_that_is_away_for_three_leases_costs_a_thread_no_lease(
    own_server: Callable[..., Any], make_stage: Callable[..., Stage]
) -> None:
    """B025, in the process that has the connection to the broker. Of prefork: ``test_k3``."""
    server = own_server(Valkey)
    stage = make_stage(broker=RedisBroker(server.url))
    workers = stage.workers(2, pool="threads", concurrency=2)
    ids = [stage.send({"wait": {"*": "go"}, "check": True}).id for _ in range(4)]
    for one in ids:
        stage.wait_begun(one)

    server.kill()
    before = {one: stage.attempts(one)[0]["renewal_count"] for one in ids}
    # A renewal comes each third of a lease, ±10 %.
    eventually(
        lambda: all(stage.attempts(one)[0]["renewal_count"] >= before[one] + 9 for one in ids),
        timeout=5 * LEASE,
    )
    server.start()
    stage.ledger.open_gate("go")

    for one in ids:
        stage.assert_accepted_once(one, 1)
        assert len(stage.attempts(one)) == 1
        assert len(stage.ledger.read("begin", job=one)) == 1
        assert stage.job(one)["lost_count"] == 0
    for _ in range(4):
        stage.assert_accepted_once(stage.send({}).id, 1)
    for worker in workers:
        assert worker.is_running, worker.log()[-6000:]


# --- clocks -------------------------------------------------------------------------------------


def test_clocks_that_differ_by_hours_change_nothing(make_stage: Callable[..., Stage]) -> None:
    """B102: the worker two hours ahead, the one that reaps two hours behind; the store is right."""
    library = next(iter(Path("/").glob(FAKETIME.removeprefix("/"))), None)
    if library is None:
        pytest.skip("libfaketime: not installed (Debian package libfaketime)")

    def clock(offset: str) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME": offset,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    stage = make_stage()
    ahead = stage.worker(
        concurrency=2, env=clock("+2h"), settings={"lease_reaper_in_worker": False}
    )
    healthy = stage.send({"wait": {"*": "go"}, "check": True})
    doomed = stage.send({"wait": {"1": "never"}})
    began = [stage.wait_begun(one.id) for one in (healthy, doomed)]
    now = stage.scalar("SELECT clock_timestamp()").timestamp()
    assert began[0]["wall"] - now > 7000
    behind = stage.worker(concurrency=2, env=clock("-2h"))

    # Passes of the one behind take nothing from the one ahead.
    eventually(lambda: stage.attempts(healthy.id)[0]["renewal_count"] >= 6, timeout=5 * LEASE)
    assert all(len(stage.attempts(one.id)) == 1 for one in (healthy, doomed))
    stage.ledger.open_gate("go")
    stage.assert_accepted_once(healthy.id, 1)
    ahead.kill_group()

    stage.assert_accepted_once(doomed.id, 2)
    first, second = stage.attempts(doomed.id)
    waited = (second["claimed_at"] - first["last_renewed_at"]).total_seconds()
    assert waited <= LEASE + 2.5 + SLACK
    assert second["worker"] == behind.nodename
    assert stage.ledger.read("begin", job=doomed.id)[1]["wall"] < began[0]["wall"] - 10000
