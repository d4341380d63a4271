"""One broker, one store and one app to publish with: where a test publishes and looks."""

from __future__ import annotations

import gc
import itertools
import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
import sqlalchemy as sa
from celery import VERSION
from kombu.utils.encoding import bytes_to_str

from celery_lease.extension import extension_of
from celery_lease.records import Accepted, Held
from celery_lease.store import transitions
from celery_lease.store.engine import Store
from tests.support.waiting import eventually
from tests.worker.apps.tasks import Ledger, make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

WORKER_APP = "tests.worker.apps.leased"
TERMINAL = ("succeeded", "failed", "cancelled", "interrupted")

#: Short, so that a test of an outage does not wait for kombu's own patience.
PUBLISH_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.1}

#: (major, minor) of the Celery that runs.
celery_version = (VERSION.major, VERSION.minor)

_tags = itertools.count(1)


class Site:
    """See above.

    Args:
        redis_url: broker, result backend and ledger.
        store_url: the store.
        broker: another broker.
        backend: another result backend; None for none.
        has_tables: make the store's tables now.
        conf: settings of the app, for the workers too.
    """

    def __init__(
        self,
        redis_url: str,
        store_url: str,
        *,
        broker: str | None = None,
        backend: str | None = "",
        has_tables: bool = True,
        **conf: Any,
    ) -> None:
        self.redis_url = redis_url
        self.store_url = store_url
        self.broker = broker or redis_url
        self.backend = redis_url if backend == "" else backend
        self.conf = {
            "lease_reaper_in_worker": False,
            "task_publish_retry_policy": PUBLISH_RETRY,
            "result_backend_transport_options": {"retry_policy": PUBLISH_RETRY},
            **conf,
        }
        self.book = Ledger(redis_url)
        self.app: Celery = make_app(
            broker=self.broker,
            backend=self.backend,
            store=store_url,
            ledger=redis_url,
            **self.conf,
        )
        self.app.finalize()
        self._reading = Store(url=store_url)
        if has_tables:
            extension_of(self.app).store  # noqa: B018  makes them

    def close(self) -> None:
        """Close all connections."""
        # A result that is collected later would connect again, to what may be gone.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            # Celery keeps those of a chord's header until somebody has asked for them.
            self.app.backend._pending_results.concrete.clear()
            gc.collect()
        self.app.backend.on_task_call = None
        consumer = getattr(self.app.backend, "result_consumer", None)
        # That of RPC cannot be stopped if nobody has waited for a result.
        if consumer is not None and getattr(consumer, "_connection", self) is not None:
            consumer.stop()
        client = self.app.backend.__dict__.get("client")
        if client is not None:
            client.close()
            client.connection_pool.disconnect()
        extension_of(self.app).raw_store.close()
        self.app.close()
        self._reading.close()

    def worker_env(self, **conf: Any) -> dict[str, str | None]:
        """Return what a worker of this site is started with."""
        return {
            "LEASE_TEST_BROKER": self.broker,
            "LEASE_TEST_BACKEND": self.backend,
            "LEASE_TEST_STORE": self.store_url,
            "LEASE_TEST_LEDGER": self.redis_url,
            "LEASE_TEST_CONF": json.dumps({**self.conf, **conf}),
        }

    def task(self, name: str) -> Any:
        """Return a task of the app."""
        return self.app.tasks[name]

    def tag(self) -> str:
        """Return a tag of the ledger that no other test of this process uses."""
        return f"tag{next(_tags)}"

    def facts(self, tag: str) -> list[str]:
        """Return what the ledger has under a tag."""
        return self.book.read(tag)

    def run_pass(self) -> dict[str, int]:
        """Make one pass of the reaper in this process."""
        return extension_of(self.app).run_pass()

    # --- the store ----------------------------------------------------------------------------

    def select(self, statement: Any) -> list[dict[str, Any]]:
        """Return rows as dictionaries."""
        with self._reading.single() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def change(self, statement: str, **parameters: Any) -> int:
        """Change rows behind the package's back; ``{job}``, ``{attempt}`` name the tables."""
        tables = self._reading.tables
        text = statement.format(job=tables.job.name, attempt=tables.attempt.name)
        with self._reading.single() as connection:
            return int(connection.execute(sa.text(text), parameters).rowcount)

    @property
    def tables(self) -> Any:
        """The tables of the store."""
        return self._reading.tables

    def execute(self, statement: Any) -> int:
        """Change rows behind the package's back, by a statement of SQLAlchemy's."""
        with self._reading.single() as connection:
            return int(connection.execute(statement).rowcount)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Give a connection in a transaction of its own, rolled back at the end."""
        with self._reading.engine.connect() as connection:
            yield connection

    def job_or_none(self, job_id: str) -> dict[str, Any] | None:
        """Return a job's row, None without one."""
        table = self._reading.tables.job
        found = self.select(sa.select(table).where(table.c.id == job_id))
        return found[0] if found else None

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job's row."""
        row = self.job_or_none(job_id)
        assert row is not None, f"no job {job_id}"
        return row

    def ids(self) -> set[str]:
        """Return the ids of all jobs."""
        return {row["id"] for row in self.jobs()}

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs."""
        table = self._reading.tables.job
        return self.select(sa.select(table).order_by(table.c.created_at))

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """Return a job's attempts in their order."""
        table = self._reading.tables.attempt
        where = table.c.job_id == job_id
        return self.select(sa.select(table).where(where).order_by(table.c.fencing_token))

    def messages(self, job_id: str) -> list[dict[str, Any]]:
        """Return a job's message versions."""
        table = self._reading.tables.message
        where = table.c.job_id == job_id
        return self.select(sa.select(table).where(where).order_by(table.c.version))

    def ends(self, job_id: str) -> list[tuple[str, str | None]]:
        """Return how the attempts of a job stand or ended, and why."""
        return [(row["state"], row["stop_reason"]) for row in self.attempts(job_id)]

    def states(self, job_id: str) -> list[str]:
        """Return the states of a job's attempts."""
        return [row["state"] for row in self.attempts(job_id)]

    def until(
        self, job_id: str, state: str, *, settled: bool = False, passes: bool = False
    ) -> dict[str, Any]:
        """Wait until a job is in a state (and settled), with passes of the reaper if asked for."""

        def there() -> dict[str, Any] | None:
            row = self.job_or_none(job_id)
            if row and row["state"] == state and (not settled or row["settled_at"] is not None):
                return row
            if passes:
                self.run_pass()
            return None

        interval = 0.1 if passes else 0.02
        what = lambda: f"{state}:\n{self.told(job_id)}"  # noqa: E731
        return eventually(there, timeout=15, interval=interval, what=what)

    def until_attempts(self, job_id: str, number: int) -> None:
        """Wait until a job has had so many attempts."""
        what = lambda: f"{number} attempts:\n{self.told(job_id)}"  # noqa: E731
        eventually(lambda: len(self.attempts(job_id)) >= number, timeout=15, what=what)

    def told(self, job_id: str) -> str:
        """Return what the store says of a job, for a message."""
        rows = [self.job_or_none(job_id) or {}, *self.attempts(job_id)]
        return "\n".join(str({k: v for k, v in row.items() if v is not None}) for row in rows)

    def unsettle(self, job_id: str) -> None:
        """Put a final job back to where its runner died before Celery had been told."""
        table = self._reading.tables.job
        row = self.job(job_id)
        earlier = row["finished_at"].replace(year=row["finished_at"].year - 1)
        statement = (
            sa.update(table)
            .where(table.c.id == job_id)
            .values(settled_at=None, finished_at=earlier, dispatched_at=None)
        )
        with self._reading.single() as connection:
            assert connection.execute(statement).rowcount == 1

    def accept_behind(self, job_id: str, value: Any) -> None:
        """Accept a result for a running attempt, as its runner does; it was killed right after."""
        attempt = self.attempts(job_id)[-1]
        answer = transitions.complete(
            extension_of(self.app).store,
            Held(job_id, attempt["fencing_token"], attempt["owner"]),
            transitions.Parting(reason=None, worker_now=attempt["claimed_at"]),
            result=json.dumps(value).encode(),
            result_type="application/json",
        )
        assert isinstance(answer, Accepted)

    # --- the broker ---------------------------------------------------------------------------

    def redis(self) -> Any:
        """Return a client of the broker's database; close it."""
        return redis.Redis.from_url(self.broker)

    def queued(self, queue: str) -> list[dict[str, Any]]:
        """Return the messages waiting in a queue, as Redis has them."""
        with self.redis() as client:
            keys = [queue, *(f"{queue}\x06\x16{step}" for step in (3, 6, 9))]
            return [
                json.loads(bytes_to_str(raw)) for key in keys for raw in client.lrange(key, 0, -1)
            ]

    def publish_again(self, message: dict[str, Any]) -> None:
        """Put a recorded message on the broker once more, as a broker that duplicates does."""
        with self.app.producer_pool.acquire(block=True) as producer:
            producer.publish(
                bytes(message["body"]),
                content_type=message["content_type"],
                content_encoding=message["content_encoding"],
                headers=json.loads(message["headers"]),
                exchange=message["exchange"],
                routing_key=message["routing_key"],
                **json.loads(message["properties"]),
            )

    def drop(self, queue: str) -> None:
        """Lose the messages of a queue."""
        with self.redis() as client:
            client.delete(queue, *(f"{queue}\x06\x16{step}" for step in (3, 6, 9)))

    def status(self, job_id: str) -> str | None:
        """Return Celery's state of a task, None when the result backend has nothing."""
        stored = self.result(job_id)
        return None if stored is None else str(stored["status"])

    def forget(self, job_id: str) -> None:
        """Take a result out of Celery's result backend."""
        with redis.Redis.from_url(self.redis_url) as client:
            client.delete(f"celery-task-meta-{job_id}")

    def result(self, job_id: str) -> dict[str, Any] | None:
        """Return what Celery's result backend has for a task, None when it has nothing."""
        with redis.Redis.from_url(self.redis_url) as client:
            raw = client.get(f"celery-task-meta-{job_id}")
        return None if raw is None else json.loads(raw)


@contextmanager
def open_site(redis_url: str, store_url: str, **options: Any) -> Iterator[Site]:
    """Give a site, closed afterwards."""
    site = Site(redis_url, store_url, **options)
    try:
        yield site
    finally:
        site.close()
