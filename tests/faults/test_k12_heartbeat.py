"""K12: lease and heartbeat (B091, B092, B095, B102), and what a healthy body can rely on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage import LEASE, SLACK, Stage
from tests.support.proxy import Proxy
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


# --- the worker's way to the database is cut ------------------------------------------------------


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


# --- clocks ---------------------------------------------------------------------------------------


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
