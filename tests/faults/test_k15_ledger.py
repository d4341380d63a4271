"""Business rows and accepted jobs match exactly, whoever dies in between (B121)."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from tests.faults.brokers import RedisBroker
from tests.faults.caller import ORDERS, PLACES
from tests.faults.stage import Stage, counts
from tests.support import processes
from tests.support.servers import Valkey
from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

CALLERS = 3
#: One request in so many ends its caller.
KILLS = 10


def call(stage: Stage, name: str, number: int, folder: Path) -> int:
    """Make requests in processes of their own, the next one when one is killed; return how many."""
    first, started = 0, 0
    env = {**processes_environment(), **{k: v for k, v in stage.env().items() if v}}
    while first < number:
        started += 1
        command = [sys.executable, "-m", "tests.faults.caller", name, str(first), str(number)]
        process = processes.spawn(
            [*command, str(KILLS)], folder=ROOT, log=folder / f"{name}.log", env=env
        )
        code = process.wait(120)
        if code == 0:
            break
        assert code == -signal.SIGKILL, (folder / f"{name}.log").read_text()[-4000:]
        first = 1 + max(entry["number"] for entry in stage.ledger.read("request", name=name))
    return started


def processes_environment() -> Mapping[str, str]:
    """Return the environment of a process that finds the package."""
    return CeleryWorker("none")._environment()


class Harm:
    """What is done to the broker and the workers while the callers call.

    Args:
        broker: loses its data.
        workers: are killed, and others started.
    """

    def __init__(self, broker: Valkey, workers: list[CeleryWorker]) -> None:
        self._broker = broker
        self._workers = workers
        self.done: list[str] = []

    def run(self, calling: Sequence[Future[int]]) -> None:
        """Do one harm after the other, each kind at least once, while somebody calls.

        In the test's own thread: what another one has started ends with it (PR_SET_PDEATHSIG).
        """
        kinds: list[Callable[[], None]] = [self._flush, self._restart, self._kill]
        while not all(one.done() for one in calling) or len(self.done) < len(kinds):
            left = [kind for kind in kinds if kind.__name__ not in self.done]
            kind = random.choice(left or kinds)
            kind()
            self.done.append(kind.__name__)
            wait(calling, random.uniform(1, 3))

    def _flush(self) -> None:
        with redis.Redis.from_url(self._broker.url) as client:
            client.flushall()

    def _restart(self) -> None:
        self._broker.restart(kill=True)

    def _kill(self) -> None:
        worker = random.choice(self._workers)
        worker.kill_group()
        worker.start().wait_ready()


def order_of(message: Mapping[str, Any]) -> str:
    """Return which row a message is about."""
    return str(json.loads(bytes(message["body"]))[1]["name"])


@pytest.mark.timeout(1800)
@counts(150, 2000)
def test_each_committed_row_has_one_succeeded_job_and_no_job_is_without_a_row(
    count: int,
    make_stage: Callable[..., Stage],
    own_server: Callable[..., Any],
    tmp_path: Path,
) -> None:
    valkey = own_server(Valkey)
    broker = RedisBroker(valkey.url)
    # Nobody makes passes but the workers.
    stage = make_stage("postgresql", broker=broker, lease_max_attempts=50)
    engine = sa.create_engine(stage.store_url)
    ORDERS.create(engine)
    workers = stage.workers(2)
    harm = Harm(valkey, workers)

    with ThreadPoolExecutor(CALLERS) as pool:
        share = count // CALLERS
        calling = [pool.submit(call, stage, f"caller{n}", share, tmp_path) for n in range(CALLERS)]
        harm.run(calling)
        started = [one.result() for one in calling]

    def unfinished() -> list[dict[str, Any]]:
        return stage.rows("job", "finished_at IS NULL")

    eventually(
        lambda: not unfinished(),
        # A lost message is sent again after about as long as its job has waited by then.
        timeout=600 if count > 500 else 240,
        interval=0.2,
        what=lambda: f"{unfinished()}\n{harm.done}\n{[one.is_running for one in workers]}",
    )
    with engine.connect() as connection:
        rows = Counter(connection.execute(sa.select(ORDERS.c.id)).scalars())
    engine.dispose()
    jobs = stage.rows("job")
    about = {message["job_id"]: order_of(message) for message in stage.rows("message")}
    assert {job["state"] for job in jobs} == {"succeeded"}
    assert Counter(about[job["id"]] for job in jobs) == rows
    # The effect of each: the one body whose outcome was accepted has come to its end once.
    ends = Counter((e["name"], e["job"], e["token"]) for e in stage.ledger.read("end"))
    accepted = {(about[job["id"]], job["id"], job["accepted_attempt"]) for job in jobs}
    assert {one: ends[one] for one in accepted} == dict.fromkeys(accepted, 1)
    assert set(harm.done) == {"_flush", "_restart", "_kill"}
    # It was not for nothing: callers died at each place, some requests were rolled back.
    where = {entry["where"] for entry in stage.ledger.read("caller killed")}
    assert sum(started) > CALLERS
    assert len(rows) < share * CALLERS
    if count > 500:
        assert where == set(PLACES)
