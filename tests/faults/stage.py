"""What a test of the faults holds in its hand: the three witnesses, and the ways to do harm."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery import Celery
from celery.result import AsyncResult
from celery.states import READY_STATES
from sqlalchemy.pool import NullPool

from celery_lease.exceptions import StoreUnavailable
from celery_lease.extension import extension_of
from tests.faults.brokers import Broker
from tests.faults.ledger import Ledger
from tests.faults.tasks import make_app
from tests.support.waiting import eventually
from tests.support.workers import Beat, CeleryWorker

APP = "tests.faults.worker"
#: seconds; the shortest at which two busy cores still renew in time
LEASE = 3.0
INTERVAL = 1.0
#: what a busy machine may add to a bound of the protocol
SLACK = 1.0

SETTINGS: Mapping[str, Any] = {
    "lease_duration": LEASE,
    "lease_reaper_interval": INTERVAL,
    "lease_queued_timeout": 3.0,
    "lease_lost_backoff": (0.0,),
}

_META = "celery-task-meta-"


def counts(few: int, many: int) -> Any:
    """Parametrize by how often: few in ``make test``, many in ``make long``.

    ``CELERY_LEASE_LONG=1`` has many everywhere.
    """
    marks = [pytest.mark.timeout(1800)]
    if os.environ.get("CELERY_LEASE_LONG"):
        values = [pytest.param(many, marks=marks)]
    else:
        values = [pytest.param(few), pytest.param(many, marks=[pytest.mark.long, *marks])]
    return pytest.mark.parametrize("count", values)


class Stage:
    """One broker, one result backend, one store, one ledger.

    Args:
        broker: what carries the messages.
        backend_url: Redis protocol.
        store_url: as the test sees it.
        settings: the app's, beside ``SETTINGS``.
        worker_settings: what workers and beat have otherwise (say, a URL through a proxy).
        folder: of the ledger.
        start_worker: the fixture, None where pytest-celery starts them.
        start_beat: the fixture.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        backend_url: str,
        store_url: str,
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        worker_settings: Mapping[str, Any] | None = None,
        start_worker: Callable[..., CeleryWorker] | None = None,
        start_beat: Callable[..., Beat] | None = None,
    ) -> None:
        self.store_url = store_url
        self._folder = folder
        self._start_worker = start_worker
        self._start_beat = start_beat
        self._settings = {
            **SETTINGS,
            "broker_url": broker.url,
            "result_backend": backend_url,
            "lease_store_url": store_url,
            **(settings or {}),
        }
        self._worker_settings = dict(worker_settings or {})
        self.ledger = Ledger(folder)
        self.app = make_app(
            {k: v for k, v in self._settings.items() if not k.startswith("faults_")}, folder
        )
        self.extension = extension_of(self.app)
        self._engine = sa.create_engine(store_url, poolclass=NullPool)
        self.broker = broker
        self._backend = redis.Redis.from_url(backend_url)
        self._published = self._backend.pubsub()
        self._published.psubscribe(f"{_META}*")
        self._seen: list[tuple[str, str, Any]] = []
        self._numbers = itertools.count(1)
        assert self.extension.store is not None  # makes the tables

    # --- processes ----------------------------------------------------------------------------

    def env(self, **settings: Any) -> dict[str, str | None]:
        """Return the variables that say to a process which app it has."""
        conf = {**self._settings, **self._worker_settings, **settings}
        return {"FAULTS_CONF": json.dumps(conf), "FAULTS_FOLDER": str(self._folder)}

    def worker(
        self, *, concurrency: int = 2, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> CeleryWorker:
        """Start a worker."""
        assert self._start_worker is not None
        name = options.pop("name", f"worker{next(self._numbers)}")
        env = {**self.env(**(settings or {})), **options.pop("env", {})}
        return self._start_worker(APP, name=name, concurrency=concurrency, env=env, **options)

    def workers(self, number: int, **options: Any) -> list[CeleryWorker]:
        """Start several workers at once."""
        started = [self.worker(ready=False, **options) for _ in range(number)]
        return [one.wait_ready() for one in started]

    def beat(self) -> Beat:
        """Start a beat."""
        assert self._start_beat is not None
        return self._start_beat(APP, env=self.env())

    # --- publishing ---------------------------------------------------------------------------

    def signature(self, plan: Mapping[str, Any], *, task: str = "work", name: str = "") -> Any:
        """Return a call of a leased task."""
        return self.app.signature(
            f"faults.{task}", kwargs={"plan": dict(plan), "name": name}, app=self.app
        )

    def note(self, what: str) -> Any:
        """Return a plain callback that writes what it was given into the ledger."""
        return self.app.signature("faults.note", kwargs={"what": what}, app=self.app)

    def on_error(self) -> Any:
        """Return a plain errback that writes the failed task's id into the ledger."""
        return self.app.signature("faults.on_error", app=self.app)

    def send(self, plan: Mapping[str, Any], **options: Any) -> AsyncResult:
        """Send a job."""
        return self.signature(plan).apply_async(**options)

    def publish_again(self, job_id: str, *, queue: str = "") -> None:
        """Put a job's recorded message on the broker once more, behind everybody's back.

        Args:
            job_id: the job.
            queue: where to, its own one if empty.
        """
        row = self.rows("message", "job_id = :id", id=job_id)[-1]
        with self.app.producer_or_acquire() as producer:
            producer.publish(
                bytes(row["body"]),
                content_type=row["content_type"],
                content_encoding=row["content_encoding"],
                headers=json.loads(row["headers"]),
                exchange="" if queue else row["exchange"],
                routing_key=queue or row["routing_key"],
                # This process's own connection may have been the subject of the test.
                retry=True,
                **json.loads(row["properties"]),
            )

    def send_by_name(self, plan: Mapping[str, Any]) -> str:
        """Send a job from an app that knows neither its task nor us; return its id."""
        with Celery("stranger", broker=self.broker.url, set_as_current=False) as stranger:
            sent = stranger.send_task("faults.work", kwargs={"plan": dict(plan)})
        return str(sent.id)

    def run_pass(self) -> dict[str, int]:
        """Make one pass of the reaper, in this process."""
        return self.extension.run_pass()

    @contextmanager
    def passes(self, every: float) -> Iterator[list[dict[str, int]]]:
        """Make passes in a thread of this process; what they did is in the list."""
        done: list[dict[str, int]] = []
        ending = threading.Event()

        def run() -> None:
            while not ending.wait(every):
                # An outage of the store is the subject of some tests.
                with suppress(StoreUnavailable):
                    done.append(self.run_pass())

        thread = threading.Thread(target=run, name="faults-passes")
        thread.start()
        try:
            yield done
        finally:
            ending.set()
            thread.join()

    # --- the store ----------------------------------------------------------------------------

    def rows(self, table: str, where: str = "1 = 1", **values: Any) -> list[dict[str, Any]]:
        """Return rows as the database has them, without the package's own reading."""
        order = {"job": "id", "pass": "id", "message": "job_id, version"}
        by = order.get(table, "job_id, fencing_token")
        query = sa.text(f"SELECT * FROM celery_lease_{table} WHERE {where} ORDER BY {by}")
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query, values).mappings()]

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job's row."""
        (row,) = self.rows("job", "id = :id", id=job_id)
        return row

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """Return a job's attempts, the first one first."""
        return self.rows("attempt", "job_id = :id", id=job_id)

    def scalar(self, query: str, **values: Any) -> Any:
        """Ask the database something."""
        with self._engine.connect() as connection:
            return connection.scalar(sa.text(query), values)

    def rows_of(self, query: str, **values: Any) -> list[dict[str, Any]]:
        """Return the rows of any query."""
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(sa.text(query), values).mappings()]

    def execute(self, statement: str, **values: Any) -> None:
        """Change rows from outside."""
        with self._engine.begin() as connection:
            connection.execute(sa.text(statement), values)

    def multiply(self, job_id: str, number: int) -> None:
        """Make a job's rows many, under new ids (PostgreSQL)."""
        for table in ("job", "message", "attempt"):
            names = [
                row["column_name"]
                for row in self.rows_of(
                    "SELECT column_name FROM information_schema.columns WHERE table_name = :name",
                    name=f"celery_lease_{table}",
                )
            ]
            key = "id" if table == "job" else "job_id"
            new = f"{key} || '-' || number"
            # The message says whose it is, too.
            made = {key: new, "headers": f"replace(headers, {key}, {new})"}
            values = [made.get(name, name) for name in names]
            self.execute(
                f"INSERT INTO celery_lease_{table} ({', '.join(names)}) "
                f"SELECT {', '.join(values)} FROM celery_lease_{table}, "
                f"generate_series(1, :number) number WHERE {key} = :id",
                number=number,
                id=job_id,
            )

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Return every row of the jobs, their messages and their attempts."""
        return {table: self.rows(table) for table in ("job", "message", "attempt")}

    def wait_state(self, job_id: str, *states: str, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until a job is in one of these states, and return its row."""

        def reached() -> dict[str, Any] | None:
            row = self.job(job_id)
            return row if row["state"] in states else None

        return eventually(
            reached,
            timeout=timeout,
            interval=0.05,
            what=lambda: f"{states}: {self.job(job_id)}\n{self.attempts(job_id)}",
        )

    def wait_settled(self, job_id: str, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until a job is final and Celery has been told, and return its row."""

        def settled() -> dict[str, Any] | None:
            row = self.job(job_id)
            return row if row["settled_at"] is not None else None

        return eventually(
            settled,
            timeout=timeout,
            interval=0.05,
            what=lambda: f"settled: {self.job(job_id)}\n{self.attempts(job_id)}",
        )

    def wait_begun(self, job_id: str, token: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until an attempt's body has begun, and return its line in the ledger."""
        begun = eventually(
            lambda: self.ledger.read("begin", job=job_id, token=token),
            timeout=timeout,
            what=lambda: f"attempt {token} began: {self.job(job_id)}\n{self.attempts(job_id)}",
        )
        return begun[0]

    # --- Celery's side ------------------------------------------------------------------------

    def result(self, job_id: str) -> AsyncResult:
        """Return Celery's view of a job."""
        return AsyncResult(job_id, app=self.app)

    def wait_result(self, task_id: str, timeout: float = 30.0) -> tuple[str, Any]:
        """Wait until the result backend has an outcome, and return its status and result."""

        def ready() -> tuple[str, Any] | None:
            meta = self.app.backend.get_task_meta(task_id, cache=False)
            done = meta["status"] in READY_STATES
            return (meta["status"], meta["result"]) if done else None

        return eventually(ready, timeout=timeout, what=f"result of {task_id}")

    def published(self, job_id: str) -> list[tuple[str, Any]]:
        """Return every (status, result) that was stored in the result backend, oldest first."""
        while message := self._published.get_message():
            if message["type"] == "pmessage":
                meta = json.loads(message["data"])
                self._seen.append((meta["task_id"], meta["status"], meta["result"]))
        return [(status, value) for task_id, status, value in self._seen if task_id == job_id]

    def wait_quiet(self, timeout: float = 30.0) -> None:
        """Wait until every message has been taken and acknowledged: nobody is about to say more."""
        eventually(
            lambda: self.broker.waiting() == self.broker.unacknowledged() == 0,
            timeout=timeout,
            what="no message left",
        )

    # --- what must hold -----------------------------------------------------------------------

    def assert_accepted_once(self, job_id: str, token: int) -> None:
        """Assert that an attempt's outcome, and nothing else, became the job's: three witnesses."""
        job = self.wait_settled(job_id)
        attempts = self.attempts(job_id)
        assert job["state"] == "succeeded", (job, attempts)
        assert job["accepted_attempt"] == token, (job, attempts)
        accepted = [a["fencing_token"] for a in attempts if a["state"] == "completed"]
        assert accepted == [token], attempts
        assert all(a["ended_at"] is not None for a in attempts), attempts
        assert [a["fencing_token"] for a in attempts] == list(range(1, len(attempts) + 1))
        assert self.wait_result(job_id) == ("SUCCESS", token)
        outcomes = [one for one in self.published(job_id) if one[0] != "STARTED"]
        assert outcomes, "nothing was published"
        assert all(one == ("SUCCESS", token) for one in outcomes), outcomes
        assert self.ledger.read("end", job=job_id, token=token), self.ledger.read(job=job_id)

    def close(self) -> None:
        """Close every connection of this process."""
        self._published.close()
        self._backend.close()
        self.broker.close()
        self._engine.dispose()
        # Else a result that is collected later asks for a server that is gone, for half a minute.
        consumer = self.app.backend.result_consumer
        consumer.stop()
        consumer._pubsub = None
        self.extension.stop_runtime()
        self.extension.raw_store.close()
        self.app.close()
        # What a test made beside it (an app, an engine) is collected here, and not in another test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
