"""K14: what a broker or a worker cannot take (B116, B119)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from celery import chord, group
from celery.exceptions import NotRegistered

from celery_lease.exceptions import PayloadTooLarge
from celery_lease.records import Message, NewJob
from celery_lease.store import transitions
from tests.faults.brokers import Broker
from tests.faults.stage import Stage
from tests.support.waiting import eventually


def test_a_worker_without_the_task_does_not_end_its_job(
    broker: Broker, make_stage: Callable[..., Stage]
) -> None:
    """B116: an old worker during a deploy discards the message; the job is dispatched again."""
    stage = make_stage(broker=broker)
    old = stage.worker(concurrency=1, settings={"faults_without": ["faults.work"]})
    sent = stage.send({}, link=stage.note("link"), link_error=stage.on_error())
    old.wait_log(f"lease.task.unknown job_id={sent.id} task=faults.work")
    assert stage.job(sent.id)["state"] == "queued"
    assert stage.result(sent.id).state == "PENDING"

    old.stop()
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 1)
    assert stage.job(sent.id)["dispatch_count"] >= 2
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert stage.published(sent.id) == [("SUCCESS", 1)]
    assert stage.ledger.read("errback") == []
    stage.wait_quiet()


def test_nor_does_it_fail_the_chord_that_waits_for_it(make_stage: Callable[..., Stage]) -> None:
    """B116: no part has failed that nobody has tried."""
    stage = make_stage()
    old = stage.worker(concurrency=1, settings={"faults_without": ["faults.work"]})
    body = stage.note("body").on_error(stage.on_error())
    chord(group(stage.signature({}) for _ in range(2)), body, app=stage.app).apply_async()
    for row in stage.rows("job"):
        old.wait_log(f"lease.task.unknown job_id={row['id']}")

    old.stop()
    stage.worker(concurrency=1)

    assert [one["value"] for one in eventually(lambda: stage.ledger.read("body"))] == [[1, 1]]
    assert stage.ledger.read("errback") == []


def test_what_no_lease_protects_is_celerys(make_stage: Callable[..., Stage]) -> None:
    """An unknown task without a lease fails, as ever."""
    stage = make_stage()
    stage.worker(concurrency=1)

    sent = stage.app.send_task("faults.unheard_of")

    status, error = stage.wait_result(sent.id)
    assert (status, type(error)) == ("FAILURE", NotRegistered)


MEBIBYTE = 1 << 20
LARGE, MANY = 2 * MEBIBYTE, 40
#: Sends one job, then all of them by a pass, and says how much more memory that took at its height.
PASS = """
import json, resource, sys
from celery_lease.extension import extension_of
from tests.faults.worker import app

def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

extension = extension_of(app)
extension.reaper().send_now(sys.argv[1])
before = highest()
counts = extension.run_pass()
print(json.dumps({"counts": counts, "bytes": highest() - before}))
"""


def test_a_message_that_is_too_large_is_refused_where_it_is_sent(
    make_stage: Callable[..., Stage],
) -> None:
    """B119: a clear error for the caller, and nothing recorded; the limit itself is carried."""
    stage = make_stage(lease_max_message_bytes=LARGE)
    with pytest.raises(PayloadTooLarge, match=r"faults\.work .*lease_max_message_bytes") as raised:
        stage.send({"data": "x" * LARGE})
    assert raised.value.size > LARGE
    assert stage.rows("job") == []

    sent = stage.send({"data": "x" * (LARGE - 1024)})
    stage.worker(concurrency=1)

    stage.assert_accepted_once(sent.id, 1)


def test_many_large_jobs_are_sent_again_one_by_one(
    make_stage: Callable[..., Stage], record_property: Callable[[str, object], None]
) -> None:
    """B119: a pass over them has one or two in its memory, and not the sum."""
    # One that was sent a moment ago is not sent again meanwhile.
    stage = make_stage(lease_queued_timeout=300.0)
    ids = [f"large-{number}" for number in range(MANY)]
    for job_id in ids:
        submit_large(stage, job_id)

    said = subprocess.run(
        [sys.executable, "-c", PASS, ids[0]],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**{k: v for k, v in os.environ.items() if "PYTEST" not in k}, **stage.env()},
    )

    told = json.loads(said.stdout)
    record_property("bytes", told["bytes"])
    assert told["counts"] == {"dispatched": MANY - 1}
    assert stage.broker.waiting() == MANY
    # A message is there as bytes, in base64 and in Redis's envelope; the sum is eight times this.
    assert told["bytes"] <= 5 * LARGE
    with stage.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("celery")


def submit_large(stage: Stage, job_id: str) -> None:
    """Record a job whose message has not been sent."""
    headers = {"lang": "py", "task": "faults.work", "id": job_id, "lease_message": 1}
    message = Message(
        version=1,
        headers=json.dumps({**headers, "lease_recorded": True}),
        properties=json.dumps({"correlation_id": job_id, "delivery_mode": 2}),
        body=json.dumps([[], {"plan": {"data": "x" * LARGE}}, {}]).encode(),
        content_type="application/json",
        content_encoding="utf-8",
        exchange="",
        routing_key="celery",
    )
    job = NewJob(
        job_id=job_id, task="faults.work", message=message, dispatched=False, queue="celery"
    )
    transitions.submit(stage.extension.store, job)
