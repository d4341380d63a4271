"""Where a soak happens: private servers behind cables, workers and a beat, all restartable."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.exc import DBAPIError

from celery_lease.extension import extension_of
from celery_lease.store.schema import build_tables
from tests.soak import witness
from tests.soak.tasks import make_app
from tests.support.proxy import Proxy
from tests.support.servers import MariaDB, PostgreSQL, RabbitMQ, Server, Valkey
from tests.support.workers import Beat, CeleryWorker

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

APP = "tests.soak.worker"
BROKERS: dict[str, Callable[[], Server]] = {
    "redis": lambda: Valkey(durable=True),
    "rabbitmq": RabbitMQ,
}
STORES: dict[str, Callable[[], Server] | None] = {
    "postgresql": PostgreSQL,
    "mariadb": MariaDB,
    "sqlite": None,
}

#: seconds; the shortest at which two busy cores still renew in time
LEASE = 3.0
#: Short where a soak would otherwise only wait; a producer gives a broker up at once.
SETTINGS: dict[str, Any] = {
    "lease_duration": LEASE,
    "lease_reaper_interval": 1.0,
    # The gap doubles up to 64 times this with each dispatch of a job: within the drain.
    "lease_queued_timeout": 2.0,
    "lease_settle_grace": 5.0,
    "lease_claim_timeout": 5.0,
    "lease_lost_backoff": (0.0, 0.2, 0.5, 1.0),
    # Chaos alone should seldom end a job; the poison has a limit of its own.
    "lease_max_attempts": 12,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_connection_timeout": 2,
    "task_publish_retry_policy": {
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0.1,
        "interval_max": 0.1,
    },
    "worker_cancel_long_running_tasks_on_connection_loss": False,
}


class Place:
    """Servers, cables, workers and beat. Use it as a context.

    Args:
        broker: a key of ``BROKERS``.
        store: a key of ``STORES``.
        workers: how many.
        concurrency: children of each.
    """

    def __init__(self, *, broker: str, store: str, workers: int = 2, concurrency: int = 4) -> None:
        self._stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="soak-"))
        self.broker = self._server(BROKERS[broker]())
        self.backend = self._server(Valkey(durable=True))
        make_store = STORES[store]
        self.store = None if make_store is None else self._server(make_store())
        self.broker_cable = self._stack.enter_context(Proxy(self.broker.port))
        self.store_cable: Proxy | None = None
        self.store_url = f"sqlite:///{self.folder / 'lease.db'}"
        worker_store = self.store_url
        if self.store is not None:
            self.store_url = self.store.url
            self.store_cable = self._stack.enter_context(Proxy(self.store.port))
            worker_store = self.store_cable.url(self.store_url)
        self._conf = {**SETTINGS, "result_backend": self.backend.url}
        self.app = self.new_app()
        assert extension_of(self.app).store is not None  # makes the tables
        witness.create(self.store_url)
        conf = {
            **self._conf,
            "broker_url": self.broker_cable.url(self.broker.url),
            "lease_store_url": worker_store,
        }
        env = {"SOAK_CONF": json.dumps(conf)}
        self.workers = [
            self._process(
                CeleryWorker(
                    APP,
                    name=f"worker{number}",
                    concurrency=concurrency,
                    env=env,
                    folder=self.folder,
                    arguments=("--prefetch-multiplier", "2"),
                )
            )
            for number in range(workers)
        ]
        self.beat = self._process(Beat(APP, name="beat", env=env, folder=self.folder))

    def new_app(self) -> Celery:
        """Return an app of this process, which reaches broker and store without the cables."""
        conf = {**self._conf, "broker_url": self.broker.url, "lease_store_url": self.store_url}
        app = make_app(conf)
        self._stack.callback(_close, app)
        return app

    def start(self) -> Self:
        """Start workers and beat; returns when they are at work."""
        for process in (*self.workers, self.beat):
            process.start()
        for process in (*self.workers, self.beat):
            process.wait_ready(60)
        return self

    def running_pids(self) -> set[int]:
        """Return the processes in a long body; none when the store does not say at once."""
        tables = build_tables()
        job, attempt = tables.job, tables.attempt
        live = (
            sa.select(attempt.c.owner)
            .join(job, job.c.id == attempt.c.job_id)
            .where(attempt.c.ended_at.is_(None), job.c.task.in_(["soak.slow", "soak.careless"]))
        )
        engine = witness.engine_of(self.store_url)
        try:
            with engine.connect() as connection:
                # HOST:PID:RANDOM
                return {int(owner.split(":")[-2]) for owner in connection.scalars(live)}
        except DBAPIError:
            return set()

    def lose_messages(self) -> None:
        """Have the broker forget every message that it holds."""
        if isinstance(self.broker, Valkey):
            with redis.Redis.from_url(self.broker.url) as client:
                client.flushall()
            return
        with self.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(self.app.conf.task_default_queue)

    def publish_again(self, number: int) -> int:
        """Put recorded messages on the broker once more, behind everybody's back.

        Returns:
            How many; 0 when the store does not say at once.
        """
        query = sa.text("SELECT * FROM celery_lease_message ORDER BY created_at DESC LIMIT :number")
        try:
            with witness.engine_of(self.store_url).connect() as connection:
                rows = connection.execute(query, {"number": number}).mappings().all()
        except DBAPIError:
            return 0
        with self.app.producer_or_acquire() as producer:
            for row in rows:
                producer.publish(
                    bytes(row["body"]),
                    content_type=row["content_type"],
                    content_encoding=row["content_encoding"],
                    headers=json.loads(row["headers"]),
                    exchange=row["exchange"],
                    routing_key=row["routing_key"],
                    **json.loads(row["properties"]),
                )
        return len(rows)

    def stop_processes(self) -> None:
        """Stop beat and workers in their orderly way."""
        for process in (self.beat, *self.workers):
            if process.is_running:
                process.stop(timeout=30)

    def close(self) -> None:
        """End everything; the logs stay in ``folder``, which is the caller's to remove."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _server(self, server: Server) -> Server:
        self._stack.callback(server.close)
        return server.start()

    def _process(self, process: Any) -> Any:
        self._stack.callback(process.close)
        return process


def _close(app: Celery) -> None:
    # Else a result that is collected later asks for a server that is gone, for half a minute.
    with suppress(Exception):
        app.backend.result_consumer.stop()
        app.backend.result_consumer._pubsub = None
    extension = extension_of(app)
    extension.stop_runtime()
    extension.raw_store.close()
    app.close()
