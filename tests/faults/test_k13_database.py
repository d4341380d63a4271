"""K13: the lease's database (B103, B104, B106 to B109, B070), and the amnesty after its outage.

B110 (fifty claims at once) is in ``tests/store/test_claim.py``.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from celery_lease.store.dialects import LOCK_WAIT_SECONDS
from tests.faults.stage import INTERVAL, LEASE, Stage, counts
from tests.support.proxy import Proxy
from tests.support.servers import MariaDB, PostgreSQL
from tests.support.servers.postgresql import _programs
from tests.support.waiting import eventually, never


class Encrypted(PostgreSQL):
    """A server that takes TLS from who asks for it."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: the wheel's programs are built without it."""
        reason = super().unavailable_reason()
        if reason is None and shutil.which("openssl") is None:
            return "TLS: no openssl (Debian: openssl)"
        if reason is None:
            told = subprocess.check_output([_programs() / "pg_config", "--configure"], text=True)
            return None if "ssl" in told else "TLS: not in this PostgreSQL (Debian: postgresql)"
        return reason

    def prepare(self) -> None:
        """Make the cluster, and a certificate where the server looks for it."""
        super().prepare()
        data = self.folder / "data"
        make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        key, certificate = str(data / "server.key"), str(data / "server.crt")
        self.set_up(*make.split(), "-keyout", key, "-out", certificate)


class Standby(PostgreSQL):
    """A server that follows another one."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self._primary = primary

    def prepare(self) -> None:
        """Copy the other server's data."""
        copy = str(_programs() / "pg_basebackup")
        source = f"-h 127.0.0.1 -p {self._primary.port} -U postgres -R -X stream -c fast --no-sync"
        self.set_up(copy, "-D", str(self.folder / "data"), *source.split())


def ask(url: str, statement: str) -> Any:
    """Execute a statement outside of any transaction; return the first value."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        answer = connection.execute(sa.text(statement))
        return answer.scalar() if answer.returns_rows else None


@contextmanager
def locked(stage: Stage, table: str, where: str, **values: Any) -> Iterator[None]:
    """Hold the lock of a row for the length of a block; the server may be gone at its end."""
    engine = sa.create_engine(stage.store_url, poolclass=NullPool)
    statement = f"SELECT 1 FROM celery_lease_{table} WHERE {where} FOR UPDATE"
    with suppress(DBAPIError), engine.connect() as connection:
        assert connection.execute(sa.text(statement), values).scalar() == 1
        yield
        connection.rollback()


def assert_each_ran_once(stage: Stage, ids: list[str]) -> None:
    """Assert that each job had one attempt, which was accepted, and that Celery was told."""
    done = "SELECT count(settled_at) FROM celery_lease_job"
    eventually(
        lambda: stage.scalar(done) == len(ids),
        timeout=90,
        interval=0.1,
        what=lambda: f"{[one for one in stage.rows('job') if one['settled_at'] is None]}",
    )
    jobs = stage.rows("job")
    assert {one["id"] for one in jobs} == set(ids)
    ends = Counter((one["state"], one["fencing_token"], one["lost_count"]) for one in jobs)
    assert ends == {("succeeded", 1, 0): len(ids)}
    begun = Counter((one["job"], one["token"]) for one in stage.ledger.read("begin"))
    assert begun == dict.fromkeys(((one, 1) for one in ids), 1)
    for one in ids:
        assert stage.wait_result(one) == ("SUCCESS", 1)


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PostgreSQL, MariaDB])
def test_a_database_restarted_in_mid_run_loses_nothing(
    kind: type[PostgreSQL | MariaDB],
    own_server: Callable[..., Any],
    make_stage: Callable[..., Stage],
) -> None:
    """B109: killed while passes and jobs are under way; workers and beat go on by themselves."""
    server = own_server(kind)
    stage = make_stage(store_url=server.url)
    worker, beat = stage.worker(concurrency=2), stage.beat()
    held = stage.send({"wait": {"*": "go"}, "check": True}, link=stage.note("link"))
    stage.wait_begun(held.id)
    eventually(lambda: stage.rows("pass"))
    sent = [stage.send({}).id for _ in range(20)]

    server.restart(kill=True)
    restarted = last_pass(stage)
    sent += [stage.send({}).id for _ in range(5)]
    eventually(lambda: (last_pass(stage) - restarted).total_seconds() > INTERVAL, timeout=20)
    stage.ledger.open_gate("go")

    for one in (held.id, *sent):
        stage.assert_accepted_once(one, 1)
        assert stage.job(one)["lost_count"] == 0
        assert len(stage.ledger.read("begin", job=one)) == 1
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [1]
    assert worker.is_running
    assert beat.is_running


def test_the_first_pass_after_an_outage_takes_no_live_job_away(
    postgresql: Any,
    postgresql_url: str,
    start_proxy: Callable[[int], Proxy],
    make_stage: Callable[..., Stage],
    folders: Callable[[], str],
) -> None:
    """The amnesty: it comes before any renewal; live runners get time to renew, dead ones once.

    On two hosts: on one the owner file would tell of the dead, as soon as the store is back.
    """
    proxy = start_proxy(postgresql.port)
    worker_settings = {
        "lease_store_url": proxy.url(postgresql_url),
        "lease_reaper_in_worker": False,
    }
    stage = make_stage(store_url=postgresql_url, worker_settings=worker_settings)
    workers = [stage.worker(concurrency=2, settings={"lease_run_dir": folders()}) for _ in range(2)]
    ids = [stage.send({"wait": {"1": "go"}}).id for _ in range(4)]
    began = {one: stage.wait_begun(one) for one in ids}
    dying, alive = workers
    doomed = [one for one in ids if began[one]["pid"] in dying.children()]
    assert len(doomed) == 2
    stage.run_pass()

    proxy.cut()
    dying.kill_group()
    eventually(lambda: expired_count(stage) == 4, timeout=3 * LEASE)
    late = timedelta(seconds=3 * INTERVAL)
    eventually(lambda: stage.scalar("SELECT clock_timestamp()") > last_pass(stage) + late)
    assert stage.run_pass()["extended"] == 4
    proxy.heal()
    eventually(lambda: expired_count(stage) == 2, timeout=3 * LEASE)
    # The two that are over for the second time are given on, however late this pass is.
    eventually(lambda: stage.scalar("SELECT clock_timestamp()") > last_pass(stage) + late)
    assert stage.run_pass()["expired"] == 2
    stage.ledger.open_gate("go")

    for one in ids:
        token = 2 if one in doomed else 1
        stage.assert_accepted_once(one, token)
        assert stage.job(one)["lost_count"] == token - 1
        assert len(stage.ledger.read("begin", job=one)) == token
    assert alive.is_running


def test_a_database_that_dies_under_a_pass_ends_no_worker(
    own_server: Callable[..., Any], make_stage: Callable[..., Stage]
) -> None:
    """B109: the pass fails, the next one works; no live job is taken away meanwhile."""
    server = own_server(PostgreSQL)
    stage = make_stage(store_url=server.url)
    worker = stage.worker(concurrency=2)
    held = stage.send({"wait": {"*": "go"}, "check": True})
    stage.wait_begun(held.id)
    eventually(lambda: stage.rows("pass"))
    waits = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND query LIKE '%celery_lease_pass%'"
    )

    with locked(stage, "pass", "1 = 1"):
        eventually(lambda: stage.scalar(waits), timeout=20)
        server.restart(kill=True)
    before = last_pass(stage)
    eventually(lambda: last_pass(stage) > before, timeout=20)
    stage.ledger.open_gate("go")

    assert_each_ran_once(stage, [held.id])
    later = stage.send({}).id
    assert_each_ran_once(stage, [held.id, later])
    assert worker.is_running
    assert "Traceback" not in worker.log()


def test_a_fail_over_to_a_synchronous_standby_loses_nothing(
    own_server: Callable[..., Any],
    start_proxy: Callable[[int], Proxy],
    make_stage: Callable[..., Stage],
) -> None:
    """In mid-run, by SIGKILL; the address moves. No token is issued twice."""
    primary = own_server(PostgreSQL)
    standby = own_server(Standby, primary)
    ask(primary.url, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    ask(primary.url, "SELECT pg_reload_conf()")
    eventually(lambda: ask(primary.url, "SELECT sync_state FROM pg_stat_replication") == "sync")
    proxy = start_proxy(primary.port)
    stage = make_stage(store_url=proxy.url(primary.url), lease_duration=20.0)
    workers = stage.workers(2, concurrency=2)
    held = [stage.send({"wait": {"*": "go"}, "check": True}).id for _ in range(2)]
    for one in held:
        stage.wait_begun(one)
    ids = [*held, *(stage.send({"wait": {"*": "flow"}}).id for _ in range(400))]
    stage.ledger.open_gate("flow")
    eventually(lambda: len(stage.ledger.read("end")) >= 5)

    primary.kill()
    known = {(one["job"], one["token"]) for one in stage.ledger.read("begin")}
    assert len(stage.ledger.read("end")) < len(ids) - len(held)
    assert ask(standby.url, "SELECT pg_promote()")
    proxy.cut()
    proxy.lead_to(standby.port)
    proxy.heal()
    # What a runner was told is known to the new server.
    rows = stage.rows("attempt")
    assert known <= {(one["job_id"], one["fencing_token"]) for one in rows}
    ids += [stage.send({}).id for _ in range(5)]
    stage.ledger.open_gate("go")

    assert_each_ran_once(stage, ids)
    assert all(one.is_running for one in workers)


# --- connections ----------------------------------------------------------------------------------


@counts(20, 200)
def test_connections_opened_before_the_fork_are_used_by_no_child(
    count: int, own_server: Callable[..., Any], make_stage: Callable[..., Stage]
) -> None:
    """B103: encrypted ones, at import and before the pool starts."""
    server = own_server(Encrypted, options={"ssl": "on"})
    stage = make_stage(store_url=f"{server.url}?sslmode=require")
    worker = stage.worker(concurrency=4, settings={"faults_store_before_fork": True})
    plain = (
        "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
        "WHERE backend_type = 'client backend' AND NOT ssl"
    )
    assert stage.scalar(plain) == 0

    ids = [stage.send({}).id for _ in range(count)]

    assert_each_ran_once(stage, ids)
    assert len({one["pid"] for one in stage.ledger.read("begin")}) > 1
    for trouble in ("Traceback", "lease.store.unavailable", "SSL"):
        assert trouble not in worker.log(), worker.log()
    # A record of a stream that two processes write is refused there; a retry here would hide it.
    assert "SSL error" not in server.log(), server.log()


def test_the_main_process_has_the_options_of_the_engine_and_makes_it_once(
    mariadb_url: str, make_stage: Callable[..., Stage]
) -> None:
    """B104: without ``connect_args`` nobody logs in; it reports each child that died."""
    stage = make_stage(
        store_url=mariadb_url,
        worker_settings={
            "lease_store_url": mariadb_url.replace("lease:lease@", "lease@"),
            "lease_store_engine_options": {"connect_args": {"password": "lease"}},
        },
    )
    worker = stage.worker(concurrency=1)
    connections = "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()"

    counted = []
    for _ in range(4):
        sent = stage.send({"then": {"1": "kill child"}})
        stage.assert_accepted_once(sent.id, 2)
        first, second = stage.attempts(sent.id)
        assert first["state"] == "lost"
        assert "SIGKILL" in first["stop_reason"]
        # Not by the lease, which is longer than that.
        assert (second["claimed_at"] - first["claimed_at"]).total_seconds() < LEASE
        counted.append(stage.scalar(connections))

    assert counted[-1] <= counted[0] + 1, counted
    assert "lease.store.unavailable" not in worker.log()
    assert worker.is_running


# --- locks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_a_job_that_is_locked_longer_than_the_lock_timeout_is_accepted_afterwards(
    database: str, make_stage: Callable[..., Stage]
) -> None:
    """B106: the end is tried again as long as the lease lives."""
    stage = make_stage(database, lease_duration=30.0)
    worker = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"*": "go"}})
    stage.wait_begun(sent.id)

    with locked(stage, "job", "id = :id", id=sent.id):
        stage.ledger.open_gate("go")
        eventually(lambda: stage.ledger.read("end"))
        never(lambda: stage.job(sent.id)["state"] != "running", during=LOCK_WAIT_SECONDS + 1.5)

    assert_each_ran_once(stage, [sent.id])
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert worker.is_running


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_a_job_that_is_locked_longer_than_its_lease_costs_an_attempt_and_no_worker(
    database: str, make_stage: Callable[..., Stage]
) -> None:
    """B106: nothing is told to Celery before the store has taken it."""
    stage = make_stage(database)
    worker = stage.worker(concurrency=1)
    sent = stage.send({"wait": {"1": "go"}}, link=stage.note("link"))
    stage.wait_begun(sent.id)

    with locked(stage, "job", "id = :id", id=sent.id):
        stage.ledger.open_gate("go")
        # What Celery says when the attempt has given up.
        worker.wait_log(f"faults.work[{sent.id}] ignored", timeout=30)
        assert [one for one in stage.published(sent.id) if one[0] != "STARTED"] == []

    stage.assert_accepted_once(sent.id, 2)
    assert stage.attempts(sent.id)[0]["state"] == "expired"
    assert stage.job(sent.id)["lost_count"] == 1
    assert [one["value"] for one in eventually(lambda: stage.ledger.read("link"))] == [2]
    stage.assert_accepted_once(stage.send({}).id, 1)
    assert worker.is_running


def test_eight_processes_that_renew_all_the_time_fail_no_job(
    mariadb_url: str,
    make_stage: Callable[..., Stage],
    enter: Callable[[AbstractContextManager[Any]], Any],
) -> None:
    """B107: on a server whose own default is REPEATABLE READ, with two reapers beside them."""
    stage = make_stage(store_url=mariadb_url, lease_duration=6.0, lease_heartbeat_interval=0.2)
    assert stage.scalar("SELECT @@global.tx_isolation") == "REPEATABLE-READ"
    for _ in range(2):
        enter(stage.passes(every=0.1))
    worker = stage.worker(concurrency=8)
    held = [stage.send({"wait": {"*": "go"}, "check": True}).id for _ in range(8)]
    for one in held:
        stage.wait_begun(one)

    eventually(lambda: all(one["renewal_count"] >= 20 for one in stage.rows("attempt")), timeout=60)
    stage.ledger.open_gate("go")
    ids = [*held, *(stage.send({"items": 2}).id for _ in range(80))]

    assert_each_ran_once(stage, ids)
    for trouble in ("Traceback", "lease.store.unavailable"):
        assert trouble not in worker.log(), worker.log()


@counts(200, 500)
def test_four_processes_on_one_sqlite_file_meet_no_error(
    count: int, make_stage: Callable[..., Stage]
) -> None:
    """B108: two bodies renew all the time, two children take short jobs."""
    stage = make_stage("sqlite", lease_duration=6.0, lease_heartbeat_interval=0.2)
    worker = stage.worker(concurrency=4)
    held = [stage.send({"wait": {"*": "go"}, "check": True}).id for _ in range(2)]
    for one in held:
        stage.wait_begun(one)

    short = [stage.send({}).id for _ in range(count)]
    eventually(lambda: len(stage.ledger.read("end")) == count, timeout=120, interval=0.1)
    # However soon the short ones were done.
    eventually(lambda: all(stage.attempts(one)[0]["renewal_count"] > 5 for one in held))
    stage.ledger.open_gate("go")

    assert_each_ran_once(stage, [*held, *short])
    for trouble in ("Traceback", "lease.store.unavailable", "locked"):
        assert trouble not in worker.log(), worker.log()


def expired_count(stage: Stage) -> int:
    query = "ended_at IS NULL AND lease_expires_at < clock_timestamp()"
    return len(stage.rows("attempt", query))


def last_pass(stage: Stage) -> Any:
    (row,) = stage.rows("pass")
    return row["finished_at"]
