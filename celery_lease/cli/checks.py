"""What ``doctor`` thinks of the facts: one pure function a subject, each yields findings.

A remedy names the settings to change. Numbers of Celery and kombu are of 5.7, with their place.

Longer than the house wants, since the sentences of a finding belong beside its condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from celery_lease.cli.facts import (
    LONG_SECONDS,
    Facts,
    StoreFacts,
    TaskFacts,
    Unanswered,
    WorkerFacts,
    sqlite_path,
)
from celery_lease.cli.findings import Finding, Severity
from celery_lease.exceptions import SettingError
from celery_lease.masking import mask_url
from celery_lease.reaper import LATE_PASS_INTERVALS
from celery_lease.store.migrations import HEAD, REVISIONS

Found = Iterator[Finding]

#: A clock that is off by more than that misleads who reads ``worker_…`` columns.
CLOCK_SECONDS: Final = 1.0
#: Seconds; kombu/transport/redis.py and SQS.py, ``visibility_timeout``.
VISIBILITY_TIMEOUTS: Final = {"redis": 3600.0, "sqs": 1800.0}
#: What Kubernetes gives a pod (terminationGracePeriodSeconds); Docker and ECS give less.
USUAL_GRACE_SECONDS: Final = 30.0
#: Names that one sentence lists.
LISTED: Final = 5


def findings(facts: Facts) -> list[Finding]:
    """Return every finding about these facts."""
    return [finding for check in CHECKS for finding in check(facts)]


def bad_settings(error: SettingError) -> list[Finding]:
    """Return the findings about settings that cannot work: nothing else can be looked at then."""
    remedy = "change the setting in app.conf, or the option of the task, that the sentence names"
    return [Finding(Severity.ERROR, "settings", problem, remedy) for problem in error.problems]


# --- settings and store -------------------------------------------------------------------------


def _settings(facts: Facts) -> Found:
    count = len(facts.app.tasks)
    if count == 0:
        yield Finding(
            Severity.WARNING,
            "settings",
            "the app has no leased task",
            "declare tasks with base=LeasedTask, and let -A name the app that has them",
        )
        return
    yield Finding(
        Severity.OK, "settings", f"checked, with {count} leased tasks", facts={"tasks": count}
    )


def _store(facts: Facts) -> Found:
    url, store = mask_url(facts.settings.store_url), facts.store
    if isinstance(store, Unanswered):
        yield Finding(
            Severity.ERROR,
            "store",
            f"{url} does not answer: {store.problem}",
            "start the database, or correct lease_store_url",
            {"url": url},
        )
        return
    said = "answers" if store.is_there else "is a file that is not there yet"
    yield Finding(Severity.OK, "store", f"{url} {said}", facts={"url": url})
    yield from _schema(facts, store)
    if store.is_current:
        yield from _clock(store)
        yield from _isolation(facts, store)


def _schema(facts: Facts, store: StoreFacts) -> Found:
    name, told = "schema", {"found": store.revision, "expected": HEAD}
    if store.is_current:
        yield Finding(Severity.OK, name, f"revision {HEAD}", facts=told)
    elif store.revision is None and facts.settings.store_auto_migrate:
        yield Finding(
            Severity.WARNING,
            name,
            "the store has no tables yet; the first use makes them",
            "run: celery -A yourapp lease migrate",
            told,
        )
    elif store.revision is None or store.revision in REVISIONS:
        yield Finding(
            Severity.ERROR,
            name,
            f"revision {store.revision or 'none'}, and this code needs {HEAD}",
            "run: celery -A yourapp lease migrate",
            told,
        )
    else:
        yield Finding(
            Severity.ERROR,
            name,
            f"revision {store.revision} was made by a newer release; this code needs {HEAD}",
            "upgrade celery-lease on this host",
            told,
        )


def _clock(store: StoreFacts) -> Found:
    offset = store.clock_offset_seconds
    told = {"store_ahead_seconds": round(offset, 3)}
    if abs(offset) <= CLOCK_SECONDS:
        yield Finding(Severity.OK, "clock", f"the store's is {offset:+.3f} s from ours", facts=told)
        return
    yield Finding(
        Severity.WARNING,
        "clock",
        f"the store's is {offset:+.1f} s from this host's: leases use the store's alone, but the "
        "worker_… columns and the logs of this host cannot be compared with it",
        "let NTP set the clocks of this host and of the database",
        told,
    )


def _isolation(facts: Facts, store: StoreFacts) -> Found:
    told = {"isolation": store.isolation}
    # SQLite knows no other, and has one writer at a time anyway.
    wanted = "SERIALIZABLE" if sqlite_path(facts.settings.store_url) else "READ COMMITTED"
    if store.isolation == wanted:
        yield Finding(Severity.OK, "isolation", wanted, facts=told)
        return
    yield Finding(
        Severity.WARNING,
        "isolation",
        f"{store.isolation}, and the statements are made for {wanted}: under load they are "
        "refused and repeated, or wait for each other",
        "take isolation_level out of lease_store_engine_options",
        told,
    )


def _one_host(facts: Facts) -> Found:
    path = sqlite_path(facts.settings.store_url)
    if path is None:
        return
    told = {"path": str(path)}
    if not path.is_absolute():
        yield Finding(
            Severity.WARNING,
            "sqlite",
            f"{path} is relative: a process in another working directory has another store",
            "give lease_store_url an absolute path (four slashes)",
            told,
        )
    kind = facts.app.network_file_system
    if kind is not None:
        yield Finding(
            Severity.ERROR,
            "sqlite",
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "the file will be corrupted",
            "put the file on a local disk, or name PostgreSQL, MariaDB or MySQL in lease_store_url",
            {**told, "file_system": kind},
        )
    yield Finding(
        Severity.INFO,
        "sqlite",
        "a file serves the processes of one host, and not over a network file system",
        "name PostgreSQL, MariaDB or MySQL in lease_store_url before a second host takes part",
        told,
    )


def _owner_files(facts: Facts) -> Found:
    folder, problem = facts.app.owner_folder, facts.app.owner_folder_problem
    if problem is None:
        yield Finding(Severity.OK, "owner files", folder, facts={"folder": folder})
        return
    yield Finding(
        Severity.WARNING,
        "owner files",
        f"{folder} cannot be used ({problem}): a worker that is killed on this host is noticed "
        "when its leases end, and not within a second",
        "name a private local folder in lease_run_dir",
        {"folder": folder, "problem": problem},
    )


# --- broker and Celery's settings ---------------------------------------------------------------


def _broker(facts: Facts) -> Found:
    url = facts.app.broker
    if isinstance(facts.workers, Unanswered):
        yield Finding(
            Severity.ERROR,
            "broker",
            f"{url} does not answer: {facts.workers.problem}",
            "start the broker, or correct broker_url",
            {"url": url},
        )
        return
    yield Finding(Severity.OK, "broker", f"{url} answers", facts={"url": url})


def _redelivery_timeout(facts: Facts) -> Found:
    app = facts.app
    late = [task for task in app.tasks if task.is_late]
    if app.transport == "amqp":
        yield from _consumer_timeout(late)
        return
    default = VISIBILITY_TIMEOUTS.get(app.transport)
    if default is None:
        return
    timeout = default if app.visibility_timeout is None else float(app.visibility_timeout)
    name, told = "visibility timeout", {"seconds": timeout, "late_tasks": _names(late)}
    yield from _waiting_retries(app.tasks, timeout)
    if not late:
        yield Finding(
            Severity.OK,
            name,
            f"{timeout:g} s, and no body is bound by it: messages are acknowledged at the claim",
            facts=told,
        )
        return
    long = [
        task
        for task in late
        if (task.longest_seconds or 0) > timeout or task.lease_seconds > timeout
    ]
    if long:
        yield Finding(
            Severity.WARNING,
            name,
            f"{timeout:g} s, and {_listed(long)} may run longer and acknowledge late: each such "
            "message is delivered again and refused, over and over",
            "set lease_ack to 'claim', or raise visibility_timeout in broker_transport_options "
            "above the longest body",
            told,
        )
        return
    yield Finding(
        Severity.INFO,
        name,
        f"{timeout:g} s, and {_listed(late)} acknowledge late: a body that is longer is delivered "
        "again while it runs, and that delivery refused",
        "set lease_ack to 'claim', or keep visibility_timeout in broker_transport_options above "
        "the longest body",
        told,
    )


def _waiting_retries(tasks: tuple[TaskFacts, ...], timeout: float) -> Found:
    """B014: a retry that waits in a worker as long as the timeout is handed out again and again."""
    waiting = [
        task
        for task in tasks
        if task.retry_delay_seconds >= timeout and not task.keeps_in_store(task.retry_delay_seconds)
    ]
    if waiting:
        yield Finding(
            Severity.WARNING,
            "retry delay",
            f"{_listed(waiting)} wait for a retry at least as long as the broker's "
            f"visibility_timeout of {timeout:g} s: the message that waits is delivered again",
            "set lease_defer_after below it, so that the store keeps the retry until it is due, or "
            "raise visibility_timeout in broker_transport_options",
            {"seconds": timeout, "tasks": _names(waiting)},
        )


def _consumer_timeout(late: list[TaskFacts]) -> Found:
    name, told = "consumer timeout", {"late_tasks": _names(late)}
    if late:
        yield Finding(
            Severity.INFO,
            name,
            f"RabbitMQ does not tell its consumer_timeout (30 min by default), and {_listed(late)} "
            "acknowledge late: a longer body has the channel closed, and its worker may end",
            "set lease_ack to 'claim', or raise consumer_timeout in rabbitmq.conf above the "
            "longest body",
            told,
        )
        return
    yield Finding(
        Severity.INFO,
        name,
        "RabbitMQ does not tell its consumer_timeout (30 min by default); messages are "
        "acknowledged at the claim, so that it only bounds how long one waits in a worker, "
        "for its ETA or behind others",
        "keep lease_defer_after shorter than consumer_timeout in rabbitmq.conf",
        told,
    )


def _prefetch(facts: Facts) -> Found:
    multiplier = facts.app.prefetch_multiplier
    told = {"worker_prefetch_multiplier": multiplier}
    if multiplier == 1:
        yield Finding(Severity.OK, "prefetch", "one message a process", facts=told)
        return
    many = f"{multiplier} messages a process" if multiplier else "messages without a limit"
    yield Finding(
        Severity.INFO,
        "prefetch",
        f"a worker takes {many}: behind long bodies they wait in a busy worker while another one "
        "is idle",
        "set worker_prefetch_multiplier to 1 (on Redis also worker_disable_prefetch) where bodies "
        "are long",
        told,
    )


def _redelivery(facts: Facts) -> Found:
    of_tasks = [
        f"{option} of {task.name}" for task in facts.app.tasks for option in task.redelivers
    ]
    named = [*facts.app.redelivers, *of_tasks]
    if not named:
        return
    yield Finding(
        Severity.INFO,
        "redelivery",
        f"{', '.join(named[:LISTED])}: has no use for leased tasks, whose lost runs are given on "
        "by the store; a second message for the same run is refused",
        "leave task_reject_on_worker_lost and task_retry_on_worker_lost off, unless tasks without "
        "a lease need them",
        {"settings": named},
    )


def _soft_shutdown(facts: Facts) -> Found:
    seconds = facts.app.soft_shutdown_seconds
    if not seconds:
        return
    is_long = seconds >= USUAL_GRACE_SECONDS
    yield Finding(
        Severity.WARNING if is_long else Severity.INFO,
        "soft shutdown",
        f"worker_soft_shutdown_timeout is {seconds:g} s: a supervisor that sends SIGKILL before "
        f"then (Kubernetes: {USUAL_GRACE_SECONDS:g} s unless told otherwise) ends bodies that "
        "could have handed over",
        "keep worker_soft_shutdown_timeout some seconds below the grace of the supervisor "
        "(terminationGracePeriodSeconds, TimeoutStopSec)",
        {"seconds": seconds},
    )


def _result_backend(facts: Facts) -> Found:
    if facts.app.has_results:
        return
    yield Finding(
        Severity.INFO,
        "result backend",
        "there is none: AsyncResult knows nothing, chords cannot run, and a replay tells nobody; "
        "the store still records every result",
        "set result_backend where callers ask for results",
    )


def _serializer(facts: Facts) -> Found:
    if not facts.app.pickles:
        return
    yield Finding(
        Severity.INFO,
        "serializer",
        f"pickle is allowed by {', '.join(facts.app.pickles)}: recorded messages are sent again "
        "as they are, so that who can write to the store can run code in the workers",
        "use json in task_serializer, result_serializer and accept_content, or guard the store as "
        "the broker",
        {"settings": list(facts.app.pickles)},
    )


# --- who is there, and what waits ---------------------------------------------------------------


def _workers(facts: Facts) -> Found:
    workers = facts.workers
    if isinstance(workers, Unanswered):
        return
    if not workers.answers_possible:
        yield Finding(
            Severity.INFO,
            "workers",
            f"the transport {facts.app.transport} carries no questions to workers: nothing is "
            "known of them",
        )
    elif not workers.queues:
        yield Finding(
            Severity.WARNING,
            "workers",
            "no worker answered",
            "start a worker: celery -A yourapp worker",
            {"online": []},
        )
    else:
        online = sorted(workers.queues)
        yield Finding(
            Severity.OK,
            "workers",
            f"{len(online)} online: {', '.join(online[:LISTED])}",
            facts={"online": online},
        )


def _reaper(facts: Facts) -> Found:
    store = facts.store
    if isinstance(store, Unanswered) or not store.is_current:
        return
    late = LATE_PASS_INTERVALS * facts.settings.reaper_interval
    last = store.last_pass
    if last is not None and last.age_seconds <= late:
        yield Finding(
            Severity.OK,
            "reaper",
            f"the last pass was {last.age_seconds:.0f} s ago, by {last.worker or 'somebody'}",
            facts={"age_seconds": round(last.age_seconds, 1), "worker": last.worker},
        )
    else:
        ago = (
            "no pass was ever made"
            if last is None
            else f"the last pass was {last.age_seconds:.0f} s ago, by {last.worker or 'somebody'}"
        )
        yield Finding(
            Severity.ERROR if _online(facts) else Severity.WARNING,
            "reaper",
            f"{ago}: jobs of vanished runners wait (lease_reaper_interval is "
            f"{facts.settings.reaper_interval:g} s)",
            "start celery beat, leave lease_reaper_in_worker on, or have cron run: "
            "celery -A yourapp lease reap",
            {
                "age_seconds": None if last is None else round(last.age_seconds, 1),
                "worker": None if last is None else last.worker,
            },
        )
    yield from _reaper_queue(facts)


def _reaper_queue(facts: Facts) -> Found:
    queue = facts.settings.reaper_queue or facts.app.default_queue
    workers = facts.workers
    if not isinstance(workers, WorkerFacts) or not workers.queues or queue in workers.consumed:
        return
    in_worker = facts.settings.reaper_in_worker
    yield Finding(
        Severity.INFO if in_worker else Severity.ERROR,
        "reaper queue",
        f"no worker consumes {queue}, where beat sends the reaper's messages"
        + ("; workers make the passes themselves" if in_worker else ""),
        f"start a worker with -Q {queue}, or set lease_reaper_queue to a queue that is consumed",
        {"queue": queue},
    )


def _waiting(facts: Facts) -> Found:
    store = facts.store
    if isinstance(store, Unanswered) or not store.is_current:
        return
    backlog = store.backlog
    if backlog.queued_count:
        yield from _unconsumed(facts, store)
        yield from _unclaimed(facts, store)
    if backlog.overdue_running_count:
        yield Finding(
            Severity.ERROR,
            "overdue",
            f"{backlog.overdue_running_count} running jobs whose lease ended more than "
            f"{LONG_SECONDS:g} s ago",
            "see the finding about the reaper, or run: celery -A yourapp lease reap",
            {"count": backlog.overdue_running_count},
        )
    if backlog.overdue_waiting_count:
        yield Finding(
            Severity.ERROR,
            "due",
            f"{backlog.overdue_waiting_count} jobs that the store keeps until they are due were "
            f"due more than {LONG_SECONDS:g} s ago, and nobody has sent them",
            "see the findings about the reaper and the broker, or run: "
            "celery -A yourapp lease reap",
            {"count": backlog.overdue_waiting_count},
        )
    if backlog.unsettled_count:
        yield Finding(
            Severity.WARNING,
            "unsettled",
            f"{backlog.unsettled_count} jobs ended more than {LONG_SECONDS:g} s ago, and Celery "
            "does not know: their results and callbacks are missing",
            "see that workers and result_backend work; the reaper then replays them "
            "(lease_settle_grace)",
            {"count": backlog.unsettled_count},
        )


def _unconsumed(facts: Facts, store: StoreFacts) -> Found:
    workers = facts.workers
    if not isinstance(workers, WorkerFacts) or not workers.queues:
        return
    for queue, count in sorted(store.waiting.items()):
        if queue not in workers.consumed:
            yield Finding(
                Severity.ERROR,
                "queue",
                f"{count} jobs wait in {queue}, which no online worker consumes",
                f"start a worker with -Q {queue}, or correct task_routes",
                {"queue": queue, "count": count},
            )


def _unclaimed(facts: Facts, store: StoreFacts) -> Found:
    """B022: workers are online and take nothing. Busy ones are a backlog, which is no fault."""
    backlog, workers = store.backlog, facts.workers
    told = {
        "queued": backlog.queued_count,
        "unclaimed": backlog.unclaimed_count,
        "oldest_seconds": round(backlog.oldest_queued_seconds, 1),
    }
    said = (
        f"{backlog.queued_count} jobs are queued, the oldest for "
        f"{backlog.oldest_queued_seconds:.0f} s; {backlog.unclaimed_count} were sent more than "
        f"{LONG_SECONDS:g} s ago and not claimed"
    )
    if not backlog.unclaimed_count:
        yield Finding(Severity.OK, "queued", said, facts=told)
        return
    if not isinstance(workers, WorkerFacts) or not workers.queues:
        yield Finding(
            Severity.WARNING, "unclaimed", said, "start a worker: celery -A yourapp worker", told
        )
        return
    if any(workers.is_idle_on(queue) for queue in store.waiting):
        yield Finding(
            Severity.ERROR,
            "unclaimed",
            f"{said}, while a worker that consumes their queue is online and idle",
            "restart the workers, and see that they consume the queue (-Q); the reaper sends the "
            "messages again after lease_queued_timeout",
            told,
        )
        return
    yield Finding(
        Severity.WARNING,
        "unclaimed",
        f"{said}; the workers of their queue are busy",
        "start more workers if this goes on, or raise lease_queued_timeout",
        told,
    )


# --- words --------------------------------------------------------------------------------------


def _online(facts: Facts) -> bool:
    return isinstance(facts.workers, WorkerFacts) and bool(facts.workers.queues)


def _names(tasks: list[TaskFacts]) -> list[str]:
    return [task.name for task in tasks]


def _listed(tasks: list[TaskFacts]) -> str:
    names = _names(tasks)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


CHECKS: Final[tuple[Callable[[Facts], Found], ...]] = (
    _settings,
    _store,
    _one_host,
    _owner_files,
    _broker,
    _redelivery_timeout,
    _prefetch,
    _redelivery,
    _soft_shutdown,
    _result_backend,
    _serializer,
    _workers,
    _reaper,
    _waiting,
)
