"""The Celery app of the recovery measurements: a body that waits and says when it began.

Its marks are lines of a file: the job, the token, the process, the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_lease import LeasedTask


def make_app(environment: Mapping[str, str]) -> Celery:
    """Return the app that some variables describe; its task is ``wait``."""
    app = Celery("recovery", set_as_current=False)
    app.conf.update(
        broker_url=environment["BENCH_BROKER"],
        result_backend=environment["BENCH_BROKER"],
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        lease_store_url=environment["BENCH_DATABASE"],
        **json.loads(environment["BENCH_CONF"]),
    )

    @app.task(base=LeasedTask, bind=True, name="wait", shared=False)
    def wait(self: Any, hands_over: bool) -> int:  # noqa: FBT001  a task's argument
        """Wait to be killed or stopped at the first attempt; return at the second."""
        lease = self.lease
        token = lease.fencing_token
        line = json.dumps([self.request.id, token, os.getpid(), time.monotonic()]) + "\n"
        descriptor = os.open(environment["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        while token == 1:
            time.sleep(0.02)
            if hands_over and lease.stop_requested:
                lease.checkpoint(token)
                lease.release()
        return int(token)

    return app


if "BENCH_CONF" in os.environ:
    app = make_app(os.environ)
