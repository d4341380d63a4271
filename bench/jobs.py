"""Jobs in a store without a broker: as many messages, claims and ends as a measurement needs."""

from __future__ import annotations

import json
from itertools import count
from uuid import uuid4

from celery_lease.lease import Lease
from celery_lease.records import Message, NewJob
from celery_lease.runtime import Runtime
from celery_lease.settings import for_task, load
from celery_lease.store import transitions
from celery_lease.store.engine import Store
from celery_lease.store.migrations import ensure_schema

TASK = "bench.app.noop"


class Jobs:
    """The jobs of one store, and a process that runs them.

    Args:
        store: a store; its tables are made.
    """

    def __init__(self, store: Store) -> None:
        ensure_schema(store, auto_migrate=True)
        self.store = store
        self.settings = load(lambda _name, default: default)
        self._task = for_task(self.settings, {}, task=TASK)
        self.runtime = Runtime(store=store, settings=self.settings, worker="celery@bench")
        self._numbers = count()

    def submit(self, jobs: int) -> list[str]:
        """Record jobs and return their ids."""
        ids = [str(uuid4()) for _ in range(jobs)]
        for job_id in ids:
            transitions.submit(self.store, self._new(job_id))
        return ids

    def hold(self, job_id: str) -> Lease:
        """Claim a job; its lease is renewed from then on."""
        answer, lease = self.runtime.claim(
            job_id=job_id, message_version=1, task_settings=self._task
        )
        if lease is None:
            raise RuntimeError(f"a claim was refused: {answer}")
        return lease

    def complete(self, lease: Lease) -> None:
        """End an attempt with a result."""
        self.runtime.heartbeat.remove(lease)
        transitions.complete(
            self.store,
            lease.held,
            transitions.Parting(None),
            result=b"1",
            result_type="application/json",
            settled=True,
        )

    def _new(self, job_id: str) -> NewJob:
        number = next(self._numbers)
        headers = {
            "lang": "py",
            "task": TASK,
            "id": job_id,
            "root_id": job_id,
            "retries": 0,
            "timelimit": [None, None],
            "argsrepr": f"({number},)",
            "kwargsrepr": "{}",
            "origin": "gen1@bench",
            "ignore_result": False,
            "lease_message": 1,
            "lease_recorded": True,
        }
        properties = {"correlation_id": job_id, "reply_to": str(uuid4()), "delivery_mode": 2}
        message = Message(
            version=1,
            headers=json.dumps(headers),
            properties=json.dumps(properties),
            body=json.dumps([[number], {}, dict.fromkeys(("callbacks", "errbacks"))]).encode(),
            content_type="application/json",
            content_encoding="utf-8",
            exchange="",
            routing_key="celery",
        )
        return NewJob(
            job_id=job_id,
            task=TASK,
            message=message,
            queue="celery",
            priority=0,
            submitter="gen1@bench",
            root_id=job_id,
        )
