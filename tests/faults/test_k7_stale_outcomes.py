"""K7: stale or contradictory outcomes (B055, B058, B059, B060)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest
from celery import chain, chord

from tests.faults.stage import LEASE, Stage, counts
from tests.support.proxy import Proxy
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker

T = TypeVar("T")

#: what a stale attempt does when it wakes: the plan's word, and what is kept of it
LATE = {
    "success": (None, "succeeded"),
    "failure": ("fail", "failed"),
    "retry": ("retry", "retried"),
    "progress": ("progress", "succeeded"),
    "checkpoint": ("checkpoint", "succeeded"),
}
#: all that it may write, in its own row
OWN_COLUMNS = {
    "rejected_at",
    "late_outcome",
    "late_result",
    "late_result_digest",
    "error_type",
    "error_message",
    "traceback",
}
#: what the current attempt's renewals write meanwhile
RENEWED_COLUMNS = {
    "state",
    "lease_expires_at",
    "last_renewed_at",
    "renewal_count",
    "acknowledged_at",
}


@pytest.mark.parametrize("current", ["running", "finished"])
@counts(1, 20)
def test_whatever_a_frozen_worker_says_when_it_wakes_changes_nothing(
    current: str,
    count: int,
    make_stage: Callable[..., Stage],
    enter: Callable[[AbstractContextManager[T]], T],
) -> None:
    """Each outcome as the first step of a chain and as a part of a chord, both with a link."""
    # The body is not interrupted: what it says in the end is what is looked at.
    stage = make_stage(lease_interrupt=False, lease_reaper_in_worker=False)
    # As beat would have them made: without a gap after which an amnesty is due.
    enter(stage.passes(every=0.5))

    for number in range(count):
        frozen = stage.worker(concurrency=2 * len(LATE))
        ids = send_with_followers(stage, number)
        for one in ids.values():
            stage.wait_begun(one)

        frozen.freeze()
        other = stage.worker(concurrency=2 * len(LATE))
        for one in ids.values():
            stage.wait_begun(one, token=2)
        if current == "finished":
            finish_second(stage, number, ids)
        before = stage.snapshot()
        frozen.thaw()
        stage.ledger.open_gate(f"first{number}")
        for one in ids.values():
            wait_rejected(stage, one)
        # It has done all it could when it has stopped of itself.
        assert frozen.stop() == 0

        assert_only_own_rows(before, stage.snapshot(), set(ids.values()))
        if current == "running":
            finish_second(stage, number, ids)
        stage.wait_quiet()
        for name, one in ids.items():
            first, _ = stage.attempts(one)
            assert first["late_outcome"] == LATE[name.split()[1]][1]
            assert (first["progress"], first["checkpoint"]) == (None, None)
            stage.assert_accepted_once(one, 2)
        for what, value in callbacks(number, ids).items():
            assert [e["value"] for e in stage.ledger.read(what)] == [value], what
        assert stage.ledger.read("errback") == []
        other.kill_group()


def send_with_followers(stage: Stage, number: int) -> dict[str, str]:
    """Send a chain and a part of one chord for each late outcome; return ids by name."""
    steps, parts = {}, {}
    for late, (action, _) in LATE.items():
        plan = {"wait": {"1": f"first{number}", "2": f"second{number}"}, "then": {"1": action}}
        step, part = stage.signature(plan), stage.signature(plan)
        step.link(stage.note(f"link {number} step {late}"))
        part.link(stage.note(f"link {number} part {late}"))
        for one in (step, part):
            one.link_error(stage.on_error())
        chained = chain(step, stage.note(f"next {number} step {late}")).apply_async()
        steps[f"step {late}"] = chained.parent.id
        parts[f"part {late}"] = part
    joined = chord(list(parts.values()), stage.note(f"next {number} chord")).apply_async()
    return steps | dict(zip(parts, (one.id for one in joined.parent.results), strict=True))


def finish_second(stage: Stage, number: int, ids: dict[str, str]) -> None:
    """Let the current attempts finish, and wait for all that follows."""
    stage.ledger.open_gate(f"second{number}")
    for one in ids.values():
        stage.wait_settled(one)
    for what in callbacks(number, ids):
        eventually(lambda what=what: stage.ledger.read(what), timeout=20, what=what)


def callbacks(number: int, ids: dict[str, str]) -> dict[str, object]:
    """Return what must be called once, and the value with which."""
    links: dict[str, object] = {f"link {number} {name}": 2 for name in ids}
    steps = {f"next {number} {name}": 2 for name in ids if name.startswith("step")}
    return links | steps | {f"next {number} chord": [2] * len(LATE)}


def wait_rejected(stage: Stage, job_id: str) -> None:
    eventually(
        lambda: stage.attempts(job_id)[0]["rejected_at"],
        timeout=20,
        what=lambda: f"rejected: {stage.attempts(job_id)}",
    )


def assert_only_own_rows(before: Any, after: Any, ids: set[str]) -> None:
    """Assert that of all rows only the stale attempts' own have changed, and how."""
    for table in before:
        assert len(before[table]) == len(after[table]), table
        for old, new in zip(before[table], after[table], strict=True):
            changed = {column for column in old if old[column] != new[column]}
            if table == "attempt" and old["job_id"] in ids and old["fencing_token"] == 1:
                assert "rejected_at" in changed
                assert changed <= OWN_COLUMNS, changed
            elif table == "attempt" and old["ended_at"] is None:
                assert changed <= RENEWED_COLUMNS, changed
            else:
                assert not changed, (table, changed, old, new)


# --- only its way to the store is cut ---------------------------------------------------------


@pytest.fixture
def cut_off(
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    make_stage: Callable[..., Stage],
) -> tuple[Stage, CeleryWorker, Proxy]:
    """A stage without passes, and a worker that reaches the store through a proxy."""
    proxy = start_proxy(postgresql.port)
    stage = make_stage(
        store_url=postgresql_url,
        worker_settings={
            "lease_store_url": proxy.url(postgresql_url),
            "lease_reaper_in_worker": False,
        },
    )
    return stage, stage.worker(concurrency=1), proxy


def wait_expired(stage: Stage, job_id: str) -> None:
    query = (
        "SELECT lease_expires_at < clock_timestamp() FROM celery_lease_attempt WHERE job_id = :id"
    )
    eventually(lambda: stage.scalar(query, id=job_id), timeout=3 * LEASE)


def test_a_renewal_after_expiry_keeps_the_lease_if_nobody_took_it(
    cut_off: tuple[Stage, CeleryWorker, Proxy],
) -> None:
    """B098: no competitor, no pass in between: late is not lost."""
    stage, _, proxy = cut_off
    sent = stage.send({"wait": {"1": "go"}})
    stage.wait_begun(sent.id)
    proxy.cut()
    wait_expired(stage, sent.id)
    count = stage.attempts(sent.id)[0]["renewal_count"]

    proxy.heal()
    eventually(lambda: stage.attempts(sent.id)[0]["renewal_count"] > count)
    stage.run_pass()
    stage.ledger.open_gate("go")

    stage.assert_accepted_once(sent.id, 1)
    assert len(stage.attempts(sent.id)) == 1
    assert not stage.job(sent.id)["accepted_late"]


def test_an_attempt_that_comes_back_after_it_was_taken_over_is_rejected(
    cut_off: tuple[Stage, CeleryWorker, Proxy],
) -> None:
    """B060: its completion changes no row but its own, and publishes nothing."""
    stage, stale, proxy = cut_off
    sent = stage.send({"wait": {"1": "go"}}, link=stage.note("link"), link_error=stage.on_error())
    stage.wait_begun(sent.id)
    proxy.cut()
    wait_expired(stage, sent.id)
    stage.worker(
        concurrency=1, settings={"lease_store_url": stage.store_url, "lease_reaper_in_worker": True}
    )
    stage.assert_accepted_once(sent.id, 2)
    before = stage.snapshot()

    proxy.heal()
    stage.ledger.open_gate("go")
    wait_rejected(stage, sent.id)
    assert stale.stop() == 0
    stage.wait_quiet()

    assert_only_own_rows(before, stage.snapshot(), {sent.id})
    stage.assert_accepted_once(sent.id, 2)
    assert [one["value"] for one in stage.ledger.read("link")] == [2]
    assert stage.ledger.read("errback") == []


# --- reapers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
@counts(200, 1000)
def test_a_reaper_at_work_all_the_time_takes_no_short_job_away(
    database: str, count: int, make_stage: Callable[..., Stage]
) -> None:
    """B058."""
    stage = make_stage(database)
    stage.worker(concurrency=2)

    with stage.passes(every=0.05) as passes:
        ids = [stage.send({}).id for _ in range(count)]
        done = "state = 'succeeded' AND settled_at IS NOT NULL"
        eventually(lambda: len(stage.rows("job", done)) == count, timeout=count / 5, interval=0.2)

    assert len(passes) > 10
    assert not any("expired" in one or "extended" in one for one in passes), passes
    jobs, attempts = stage.rows("job"), stage.rows("attempt")
    assert {(j["fencing_token"], j["lost_count"], j["accepted_attempt"]) for j in jobs} == {
        (1, 0, 1)
    }
    assert {(a["state"], a["rejected_at"]) for a in attempts} == {("completed", None)}
    assert len(attempts) == count
    assert Counter(e["job"] for e in stage.ledger.read("begin")) == dict.fromkeys(ids, 1)
    assert all(stage.published(one) == [("SUCCESS", 1)] for one in ids)


@counts(1, 10)
def test_one_expiry_is_one_loss_and_one_dispatch_however_many_reapers_look(
    count: int, make_stage: Callable[..., Stage]
) -> None:
    """B059."""
    stage = make_stage(lease_queued_timeout=60.0, lease_reaper_in_worker=False)
    ids = []
    for number in range(count):
        lost = stage.worker(concurrency=4)
        sent = [stage.send({"wait": {"1": f"never{number}"}}).id for _ in range(4)]
        for one in sent:
            stage.wait_begun(one)
        lost.kill_group()
        ids += sent

    with stage.passes(every=0.01), stage.passes(every=0.01), stage.passes(every=0.01):
        stage.worker(concurrency=2)
        for one in ids:
            stage.assert_accepted_once(one, 2)

    for one in ids:
        job = stage.job(one)
        assert (job["lost_count"], job["dispatch_count"]) == (1, 2), job
        assert len(stage.ledger.read("begin", job=one)) == 2
