"""What a heartbeat costs: N leases of one process, renewed by its own ``Heartbeat``.

In this process, since only the statements and the table matter here, with the code that a worker
runs. The claims come before; every renewal after them should stay on its page (HOT): no index has
to be touched.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from bench.jobs import Jobs
from bench.place import Place
from celery_lease.store import queries
from celery_lease.store.engine import Store

_TABLE = (
    "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
    " WHERE relname = 'celery_lease_attempt'"
)


def run(place: Place, *, leases: int, beats: int) -> dict[str, Any]:
    """Renew ``leases`` leases ``beats`` times; return costs a beat and the HOT share."""
    store = Store(url=place.fresh())
    jobs = Jobs(store)
    runtime = jobs.runtime
    for job_id in jobs.submit(leases):
        jobs.hold(job_id)
    updated, hot = _updates(place, store)
    # Connect again before the counting begins.
    queries.last_pass(store)
    place.reset_counts()
    seconds = []
    for _ in range(beats):
        started = time.monotonic()
        runtime.heartbeat.beat_once()
        seconds.append(time.monotonic() - started)
    sql = place.sql_counts()
    updated_after, hot_after = _updates(place, store)
    renewals = updated_after - updated
    runtime.stop()
    store.close()
    if renewals != leases * beats:
        raise RuntimeError(f"{renewals} rows were renewed and not {leases * beats}")
    return {
        "leases": leases,
        "beats": beats,
        "statements_per_beat": sql.statements / beats,
        "round_trips_per_beat": sql.round_trips / beats,
        "wal_bytes_per_lease": sql.wal_bytes / renewals,
        "hot_share": (hot_after - hot) / renewals,
        "beat_ms": statistics.median(seconds) * 1000,
    }


def _updates(place: Place, store: Store) -> tuple[int, int]:
    """Return updates and HOT updates of the attempts so far."""
    # A server process reports its numbers when it ends, at the latest.
    store.close()
    with place.connect(place.database) as connection:
        _wait_alone(connection)
        row = connection.execute(_TABLE).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def _wait_alone(connection: Any) -> None:
    others = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'bench'"
    while connection.execute(others).fetchone()[0]:
        time.sleep(0.01)
