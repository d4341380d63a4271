"""What ``doctor`` thinks of given facts; whether it finds them is in ``worker/test_doctor``."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_lease.cli import checks
from celery_lease.cli.facts import AppFacts, Facts, StoreFacts, TaskFacts, Unanswered, WorkerFacts
from celery_lease.cli.findings import Finding, Severity, sorted_by_severity
from celery_lease.exceptions import SettingError
from celery_lease.records import Backlog, PassRecord
from celery_lease.settings import load
from celery_lease.store.migrations import HEAD

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
PASS = PassRecord(finished_at=NOW, age_seconds=2.0, counts={}, worker="celery@one")
TASK = TaskFacts(
    name="app.work",
    lease_seconds=30.0,
    is_late=False,
    longest_seconds=None,
    retry_delay_seconds=180.0,
)
LATE = dataclasses.replace(TASK, is_late=True)
APP = AppFacts(
    transport="redis",
    broker="redis://host",
    visibility_timeout=None,
    prefetch_multiplier=1,
    soft_shutdown_seconds=0.0,
    redelivers=(),
    has_results=True,
    pickles=(),
    default_queue="celery",
    tasks=(TASK,),
    owner_folder="/run/lease",
)
STORE = StoreFacts(revision=HEAD, isolation="READ COMMITTED", last_pass=PASS)
WORKERS = WorkerFacts(queues={"celery@one": frozenset({"celery"})})
NONE_ONLINE = WorkerFacts()


def facts(
    *,
    app: dict[str, Any] | None = None,
    store: StoreFacts | Unanswered = STORE,
    workers: WorkerFacts | Unanswered = WORKERS,
    **settings: Any,
) -> Facts:
    """Return healthy facts with these differences."""
    given = {"lease_store_url": "postgresql://user:s3cret@host/name", **settings}
    return Facts(
        settings=load(given.get),
        app=dataclasses.replace(APP, **(app or {})),
        store=store,
        workers=workers,
    )


def store(**changes: Any) -> StoreFacts:
    return dataclasses.replace(STORE, **changes)


def found(given: Facts) -> dict[str, Severity]:
    """Return what is not ok, by name."""
    return {
        one.name: one.severity for one in checks.findings(given) if one.severity is not Severity.OK
    }


def finding(given: Facts, name: str) -> Finding:
    (one,) = [one for one in checks.findings(given) if one.name == name]
    return one


def test_nothing_is_wrong_with_healthy_facts() -> None:
    assert found(facts()) == {}


def test_no_finding_holds_a_secret() -> None:
    every = checks.findings(facts()) + checks.findings(facts(store=Unanswered("refused")))

    assert "s3cret" not in str([one.document() for one in every])


QUEUED = Backlog(7, 90.0, 3, 0, 0)
BACKLOG = store(backlog=QUEUED, waiting={"celery": 7})
BUSY = dataclasses.replace(WORKERS, busy=frozenset({"celery@one"}))
LATE_PASS = store(last_pass=dataclasses.replace(PASS, age_seconds=15.1))

CASES: list[tuple[str, Facts, str, Severity]] = [
    ("no leased task", facts(app={"tasks": ()}), "settings", Severity.WARNING),
    ("store away", facts(store=Unanswered("refused")), "store", Severity.ERROR),
    (
        "no tables, made by themselves",
        facts(store=store(revision=None)),
        "schema",
        Severity.WARNING,
    ),
    (
        "no tables, made by nobody",
        facts(store=store(revision=None), lease_store_auto_migrate=False),
        "schema",
        Severity.ERROR,
    ),
    ("tables of a newer release", facts(store=store(revision="9999")), "schema", Severity.ERROR),
    ("clock ahead", facts(store=store(clock_offset_seconds=1.2)), "clock", Severity.WARNING),
    ("clock behind", facts(store=store(clock_offset_seconds=-1.2)), "clock", Severity.WARNING),
    (
        "isolation above",
        facts(store=store(isolation="REPEATABLE READ")),
        "isolation",
        Severity.WARNING,
    ),
    ("broker away", facts(workers=Unanswered("refused")), "broker", Severity.ERROR),
    (
        "late, and a body may be longer than the timeout",
        facts(app={"tasks": (dataclasses.replace(LATE, longest_seconds=4000.0),)}),
        "visibility timeout",
        Severity.WARNING,
    ),
    (
        "late, and the lease is longer than the timeout",
        facts(app={"tasks": (LATE,), "visibility_timeout": 29}),
        "visibility timeout",
        Severity.WARNING,
    ),
    ("late", facts(app={"tasks": (LATE,)}), "visibility timeout", Severity.INFO),
    (
        "a retry that waits as long as the timeout (B014)",
        facts(app={"visibility_timeout": 180}),
        "retry delay",
        Severity.WARNING,
    ),
    (
        "jobs kept until they are due, which nobody has sent",
        facts(store=store(backlog=Backlog(0, 0.0, 0, 0, 0, overdue_waiting_count=3))),
        "due",
        Severity.ERROR,
    ),
    ("RabbitMQ", facts(app={"transport": "amqp"}), "consumer timeout", Severity.INFO),
    ("prefetch", facts(app={"prefetch_multiplier": 4}), "prefetch", Severity.INFO),
    (
        "Celery redelivers",
        facts(app={"redelivers": ("task_reject_on_worker_lost",)}),
        "redelivery",
        Severity.INFO,
    ),
    (
        "Celery redelivers one task",
        facts(app={"tasks": (dataclasses.replace(TASK, redelivers=("reject_on_worker_lost",)),)}),
        "redelivery",
        Severity.INFO,
    ),
    ("soft shutdown", facts(app={"soft_shutdown_seconds": 10.0}), "soft shutdown", Severity.INFO),
    (
        "soft shutdown as long as a pod's grace",
        facts(app={"soft_shutdown_seconds": 30.0}),
        "soft shutdown",
        Severity.WARNING,
    ),
    ("no results", facts(app={"has_results": False}), "result backend", Severity.INFO),
    ("pickle", facts(app={"pickles": ("accept_content",)}), "serializer", Severity.INFO),
    (
        "no owner folder",
        facts(app={"owner_folder_problem": "its mode is 777"}),
        "owner files",
        Severity.WARNING,
    ),
    ("nobody online", facts(workers=NONE_ONLINE), "workers", Severity.WARNING),
    (
        "no remote control",
        facts(workers=WorkerFacts(answers_possible=False)),
        "workers",
        Severity.INFO,
    ),
    ("a late pass", facts(store=LATE_PASS), "reaper", Severity.ERROR),
    (
        "a late pass, nobody online",
        facts(store=LATE_PASS, workers=NONE_ONLINE),
        "reaper",
        Severity.WARNING,
    ),
    ("never a pass", facts(store=store(last_pass=None)), "reaper", Severity.ERROR),
    (
        "the reaper's queue is nobody's, and workers make passes",
        facts(lease_reaper_queue="reap"),
        "reaper queue",
        Severity.INFO,
    ),
    (
        "the reaper's queue is nobody's, and workers make none",
        facts(lease_reaper_queue="reap", lease_reaper_in_worker=False),
        "reaper queue",
        Severity.ERROR,
    ),
    ("idle workers take nothing (B022)", facts(store=BACKLOG), "unclaimed", Severity.ERROR),
    ("busy workers", facts(store=BACKLOG, workers=BUSY), "unclaimed", Severity.WARNING),
    ("no workers", facts(store=BACKLOG, workers=NONE_ONLINE), "unclaimed", Severity.WARNING),
    (
        "a queue that nobody consumes",
        facts(store=store(backlog=Backlog(1, 1.0, 0, 0, 0), waiting={"mail": 1})),
        "queue",
        Severity.ERROR,
    ),
    ("overdue", facts(store=store(backlog=Backlog(0, 0.0, 0, 2, 0))), "overdue", Severity.ERROR),
    (
        "unsettled",
        facts(store=store(backlog=Backlog(0, 0.0, 0, 0, 2))),
        "unsettled",
        Severity.WARNING,
    ),
]


@pytest.mark.parametrize(
    ("given", "name", "severity"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_fault_is_found_with_its_remedy(given: Facts, name: str, severity: Severity) -> None:
    one = finding(given, name)

    assert one.severity is severity
    if name != "workers" or severity is not Severity.INFO:
        assert one.remedy


def test_a_retry_that_the_store_keeps_is_not_the_brokers_to_give_out_again() -> None:
    """B014: longer than the visibility timeout, and longer than ``lease_defer_after``."""
    kept = dataclasses.replace(TASK, defer_after_seconds=60.0)
    at_the_bound = dataclasses.replace(TASK, defer_after_seconds=180.0)

    warned = [
        "retry delay" in found(facts(app={"visibility_timeout": 180, "tasks": (task,)}))
        for task in (kept, at_the_bound, TASK)
    ]

    assert warned == [False, True, True]


def test_each_check_has_a_fault_that_it_finds() -> None:
    for check in checks.CHECKS:
        names = {one.name for _, given, *_ in CASES for one in check(given)}
        if check is not checks._one_host:
            assert names & {name for _, _, name, _ in CASES}, check.__name__


def test_bounds_are_as_said() -> None:
    """A pass is late after three intervals, a clock off after a second: not before."""
    on_time = store(last_pass=dataclasses.replace(PASS, age_seconds=15.0), clock_offset_seconds=1.0)

    assert found(facts(store=on_time)) == {}


def test_a_store_that_is_away_leaves_its_checks_out() -> None:
    names = set(found(facts(store=Unanswered("refused"))))

    assert names == {"store"}


def test_a_wrong_schema_leaves_the_rest_of_the_store_out() -> None:
    given = facts(store=StoreFacts(revision="9999"))

    assert set(found(given)) == {"schema"}


def test_waiting_jobs_of_a_busy_queue_are_no_error_for_an_idle_worker_of_another() -> None:
    workers = WorkerFacts(
        queues={"celery@one": frozenset({"celery"}), "mail@one": frozenset({"mail"})},
        busy=frozenset({"celery@one"}),
    )

    assert found(facts(store=BACKLOG, workers=workers)) == {"unclaimed": Severity.WARNING}


def test_a_backlog_that_is_young_is_ok() -> None:
    young = store(backlog=Backlog(7, 3.0, 0, 0, 0), waiting={"celery": 7})

    assert found(facts(store=young)) == {}


def test_an_sqlite_file_serves_one_host_and_has_an_absolute_path() -> None:
    absolute = facts(store=store(isolation="SERIALIZABLE"), lease_store_url="sqlite:////var/l.db")
    relative = facts(store=store(isolation="SERIALIZABLE"), lease_store_url="sqlite:///l.db")

    assert found(absolute) == {"sqlite": Severity.INFO}
    assert [one.severity for one in checks.findings(relative) if one.name == "sqlite"] == [
        Severity.WARNING,
        Severity.INFO,
    ]


def test_an_sqlite_file_on_a_network_file_system_is_an_error() -> None:
    given = facts(
        app={"network_file_system": "nfs4"},
        store=store(isolation="SERIALIZABLE"),
        lease_store_url="sqlite:////net/l.db",
    )

    (first, _) = [one for one in checks.findings(given) if one.name == "sqlite"]
    assert first.severity is Severity.ERROR
    assert first.facts["file_system"] == "nfs4"


def test_each_problem_of_the_settings_is_a_finding() -> None:
    every = checks.bad_settings(SettingError(["lease_a is 1: …", "lease_b is 2: …"]))

    assert [(one.severity, one.found) for one in every] == [
        (Severity.ERROR, "lease_a is 1: …"),
        (Severity.ERROR, "lease_b is 2: …"),
    ]


def test_the_worst_comes_first() -> None:
    mixed = [Finding(severity, severity.value, "") for severity in (*reversed(Severity),)]

    assert [one.name for one in sorted_by_severity(mixed)] == ["error", "warning", "info", "ok"]
