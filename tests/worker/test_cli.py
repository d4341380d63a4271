"""``celery -A proj lease ...`` as a person runs it: a process, an app, a store with history."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_lease import JobNotFound, LeasedTask
from celery_lease import history as reading
from celery_lease.cli import lease as command_group
from celery_lease.records import Failure, Late
from celery_lease.states import JobState, LateOutcome
from celery_lease.store import transitions
from celery_lease.store.engine import Store
from celery_lease.store.migrations import HEAD, current_revision, ensure_schema
from tests.store.builders import (
    JSON,
    OTHER,
    claimed,
    finished,
    move_back,
    new_message,
    parting,
    running,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_APP = """
from celery import Celery
from celery_lease import LeasedTask

app = Celery("proj", broker="memory://", set_as_current=False)
app.conf.update({settings!r})


@app.task(base=LeasedTask, name="app.work")
def work():
    pass
"""
_SECRET = b'[["the-user-s-argument"], {}, {}]'

Run = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    names = {point.name for point in entry_points(group="celery.commands")}
    assert "lease" in names, "install the checkout first: pip install -e ."


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    store = Store(url=sqlite_url)
    yield store
    store.close()


@pytest.fixture
def celery(tmp_path: Path, store: Store) -> Callable[..., Run]:
    """Run ``celery`` in a folder with an app ``proj`` on ``store``; settings by keyword."""

    def run(*arguments: str, environment: dict[str, str] | None = None, **settings: Any) -> Run:
        url = store._url.render_as_string(hide_password=False)
        (tmp_path / "proj.py").write_text(_APP.format(settings={"lease_store_url": url} | settings))
        paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-m", "celery", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "error"}
            | (environment or {}),
        )

    return run


@pytest.fixture
def lease(celery: Callable[..., Run]) -> Callable[..., Run]:
    """Run ``celery -A proj lease``."""

    def run(*arguments: str, **options: Any) -> Run:
        return celery("-A", "proj", "lease", *arguments, **options)

    return run


@pytest.fixture
def document(lease: Callable[..., Run]) -> Callable[..., Any]:
    """Run a command with ``--json`` and return what it wrote."""

    def run(*arguments: str, **options: Any) -> Any:
        said = lease(*arguments, "--json", **options)
        assert (said.returncode, said.stderr) == (0, "")
        return json.loads(said.stdout)

    return run


@pytest.fixture
def in_process(store: Store) -> Callable[..., Any]:
    """Run a command with ``--json`` in this process, which is faster by a second each."""
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.lease_store_url = store._url.render_as_string(hide_password=False)

    @app.task(base=LeasedTask, name="app.work", shared=False)
    def work() -> None:
        """Never run."""

    def run(*arguments: str) -> Any:
        context = CLIContext(app=app, no_color=True, workdir=None)
        said = CliRunner().invoke(command_group, [*arguments, "--json"], obj=context)
        assert said.exit_code == 0, said.output
        return json.loads(said.stdout)

    return run


@pytest.fixture
def history(store: Store) -> Store:
    """A store with three jobs: taken over and succeeded, failed, and running."""
    ensure_schema(store, auto_migrate=True)
    message = new_message(body=_SECRET)
    stale = running(store, "taken-over", message=message, submitter="web1")
    move_back(store, "taken-over", 40)
    finished(store, claimed(store, "taken-over", owner=OTHER, worker="celery@two"))
    late = Late(LateOutcome.SUCCEEDED, result=b"[1, 2]", digest="sha256:12")
    assert transitions.reject(store, stale, late)
    failing = running(store, "failed", message=message, task="app.other")
    failure = Failure("builtins.ValueError", "wrong \x1b[31m", "Traceback: wrong", "error")
    transitions.fail(
        store,
        failing,
        parting("raised", failure=failure),
        error=b"\x80\x04N.",
        error_content_type="application/x-python-serialize",
    )
    running(store, "running", message=message)
    move_back(store, "taken-over", 7200)
    move_back(store, "failed", 60)
    return store


# -- jobs, attempts, show --------------------------------------------------------------------


def test_jobs_are_listed_for_people(history: Store, lease: Callable[..., Run]):
    said = lease("jobs")

    assert (said.returncode, said.stderr) == (0, "")
    head, *rows = said.stdout.splitlines()
    assert head.split() == ["JOB", "TASK", "STATE", "ATTEMPTS", "LOST", "FAILED", "AGE", "WHY"]
    assert [row.split()[:4] for row in rows] == [
        ["running", "app.work", "running", "1"],
        ["failed", "app.other", "failed", "1"],
        ["taken-over", "app.work", "succeeded", "2"],
    ]
    assert "builtins.ValueError: wrong \\x1b[31m" in rows[1]


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ((), ["running", "failed", "taken-over"]),
        (("--state", "failed", "--state", "running"), ["running", "failed"]),
        (("--state", "held"), []),
        (("--task", "app.other"), ["failed"]),
        (("--older-than", "1h"), ["taken-over"]),
        (("--newer-than", "30m", "--older-than", "30s"), ["failed"]),
        (("--limit", "1"), ["running"]),
    ],
)
def test_jobs_can_be_narrowed(
    history: Store, in_process: Callable[..., Any], arguments: tuple[str, ...], ids: list[str]
):
    assert [job["id"] for job in in_process("jobs", *arguments)["jobs"]] == ids


def test_a_job_is_shown_as_a_timeline(history: Store, lease: Callable[..., Run]):
    said = lease("show", "taken-over")

    assert (said.returncode, said.stderr) == (0, "")
    for line in (
        r"state +succeeded \(said so\)",
        r"accepted +attempt 2$",
        r"result +1$",
        r"recorded by web1$",
        r" 1 +claimed by celery@one \(host-1-one\), lease of 30s",
        r" 1 +lease ended without a renewal",
        r" 1 +expired after 40s: taken over",
        r" 2 +claimed by celery@two \(host-2-other\), lease of 30s",
        r" 2 +completed after .*: said so; accepted as the job's outcome",
        r" 1 +came back with succeeded: rejected, its result of 6 bytes kept .*\(sha256:12\)",
    ):
        assert re.search(line, said.stdout, re.MULTILINE), (line, said.stdout)


def test_a_job_is_shown_as_a_document(history: Store, document: Callable[..., Any]):
    job = document("show", "taken-over")

    assert (job["state"], job["result"], job["accepted_attempt"]) == ("succeeded", 1, 2)
    first, second = job["attempts"]
    assert (first["state"], first["late_outcome"], first["late_result_size"]) == (
        "expired",
        "succeeded",
        6,
    )
    assert first["worker_claimed_at"] == "2001-02-03T04:05:06.000000+00:00"
    assert 40 <= first["held_seconds"] < 60
    assert second["state"] == "completed"
    age = datetime.fromisoformat(job["store_time"]) - datetime.fromisoformat(job["created_at"])
    assert timedelta(hours=2) < age < timedelta(hours=2, minutes=5)


def test_a_pickled_outcome_is_measured_and_never_decoded(
    history: Store, lease: Callable[..., Run], document: Callable[..., Any]
):
    with history.transaction() as connection:
        job = history.tables.job
        values = {
            "result": b"cos\nsystem\n(S'touch pwned'\ntR.",
            "result_type": "application/x-python-serialize",
        }
        connection.execute(sa.update(job).where(job.c.id == "taken-over").values(values))

    shown = document("show", "taken-over")

    assert (shown["result"], shown["result_size"]) == (None, 30)
    assert "<application/x-python-serialize, 30 bytes>" in lease("show", "taken-over").stdout
    assert not Path("pwned").exists()


def test_a_traceback_is_shown_when_asked_for(history: Store, lease: Callable[..., Run]):
    assert "Traceback: wrong" not in lease("show", "failed").stdout

    assert "Traceback: wrong" in lease("show", "failed", "--traceback").stdout


@pytest.mark.parametrize("arguments", [("jobs",), ("attempts",), ("show", "taken-over")])
def test_the_user_s_arguments_are_never_shown(
    history: Store, lease: Callable[..., Run], arguments: tuple[str, ...]
):
    for more in ((), ("--json",)):
        said = lease(*arguments, *more)
        assert said.returncode == 0
        assert "the-user-s-argument" not in said.stdout + said.stderr


def test_an_unknown_job_is_said_to_be_that(history: Store, lease: Callable[..., Run]):
    said = lease("show", "unknown")

    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == "Error: no job unknown in the lease store\n"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), [("running", 1), ("failed", 1), ("taken-over", 2), ("taken-over", 1)]),
        (("--job", "taken-over"), [("taken-over", 2), ("taken-over", 1)]),
        (("--worker", "celery@two"), [("taken-over", 2)]),
        (("--live",), [("running", 1)]),
        (("--ended", "--limit", "1"), [("failed", 1)]),
    ],
)
def test_attempts_can_be_narrowed(
    history: Store,
    in_process: Callable[..., Any],
    arguments: tuple[str, ...],
    found: list[tuple[str, int]],
):
    attempts = in_process("attempts", *arguments)["attempts"]

    assert [(a["job_id"], a["fencing_token"]) for a in attempts] == found


def test_attempts_are_listed_for_people(history: Store, lease: Callable[..., Run]):
    said = lease("attempts", "--live")

    assert said.stdout.splitlines()[0].split()[:4] == ["JOB", "ATTEMPT", "STATE", "WORKER"]
    assert re.search(
        r"^running +1 +claimed +celery@one .* lease ends in \d+s$", said.stdout, re.MULTILINE
    )


def test_an_empty_store_has_no_jobs(store: Store, lease: Callable[..., Run]):
    said = lease("jobs")

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "no jobs\n")
    assert current_revision(store) == HEAD


# -- cancel, resume --------------------------------------------------------------------------


def test_a_job_is_cancelled_with_its_reason_and_resumed_as_the_same_job(
    history: Store, in_process: Callable[..., Any], lease: Callable[..., Run]
):
    cancelled = in_process("cancel", "running", "--reason", "wrong data, says Ada")
    shown = in_process("show", "running")
    resumed = in_process("resume", "running", "--reason", "data mended")

    assert cancelled == {"jobs": [{"job": "running", "state": "cancelled", "ended_now": True}]}
    assert (shown["state_reason"], shown["attempts"][0]["state"]) == (
        "wrong data, says Ada",
        "cancelled",
    )
    assert resumed == {"job": "running", "state": "queued"}
    assert len(in_process("show", "running")["attempts"]) == 1


def test_what_cannot_be_cancelled_or_resumed_is_left_alone_and_said(
    history: Store, lease: Callable[..., Run]
):
    over = lease("cancel", "taken-over", "--reason", "x")
    going_on = lease("resume", "running", "--reason", "x")
    untold = lease("resume", "failed", "--reason", "x")
    unknown = lease("cancel", "nobody", "--reason", "x")

    assert (over.returncode, going_on.returncode) == (1, 1)
    assert "taken-over is succeeded: nothing was changed; it has ended already" in over.stderr
    assert "running is running: nothing was changed" in going_on.stderr
    assert "to begin anew, cancel it first" in going_on.stderr
    assert (untold.returncode, "Celery has not been told of its end" in untold.stderr) == (1, True)
    assert (unknown.returncode, "no job nobody" in unknown.stderr) == (1, True)


def test_several_jobs_are_cancelled_and_of_each_is_said_what_became_of_it(
    history: Store, lease: Callable[..., Run]
):
    some = ("cancel", "nobody", "running", "taken-over", "running", "--reason", "x")

    said = lease(*some)
    again = lease(*some, "--json")
    once_more = lease("cancel", "running", "--reason", "x")

    assert (said.returncode, said.stdout) == (1, "running is cancelled\n")
    assert said.stderr.splitlines() == [
        "Error: no job nobody in the lease store",
        "Error: job taken-over is succeeded: nothing was changed; it has ended already",
    ]
    assert (again.returncode, again.stderr) == (1, "")
    assert json.loads(again.stdout)["jobs"] == [
        {"job": "nobody", "state": None, "ended_now": False},
        {"job": "running", "state": "cancelled", "ended_now": False},
        {"job": "taken-over", "state": "succeeded", "ended_now": False},
    ]
    assert (once_more.returncode, once_more.stdout) == (1, "")
    assert "job running is cancelled: nothing was changed" in once_more.stderr


# -- reap, migrate, settings -----------------------------------------------------------------


def test_a_pass_gives_the_jobs_of_vanished_runners_on(
    history: Store, document: Callable[..., Any], lease: Callable[..., Run]
):
    lease("reap")
    move_back(history, "running", 60)

    done = document("reap")

    assert done["counts"]["expired"] == 1
    assert done["seconds"] > 0
    assert document("show", "running")["attempts"][0]["state"] == "expired"


def test_a_pass_with_nothing_to_do_succeeds(store: Store, lease: Callable[..., Run]):
    said = lease("reap")

    assert (said.returncode, said.stdout) == (0, "nothing to do\n")


def test_migrate_makes_the_tables_and_says_from_where_to_where(
    store: Store, lease: Callable[..., Run]
):
    first, second = lease("migrate"), lease("migrate")

    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == f"{store.masked_url}: no tables -> {HEAD}\n"
    assert second.stdout == f"{store.masked_url} is at revision {HEAD}: nothing to do\n"


def test_migrate_as_a_document(document: Callable[..., Any]):
    assert document("migrate") == {"from": None, "to": HEAD}
    assert document("migrate") == {"from": HEAD, "to": HEAD}


def test_settings_are_shown_with_passwords_masked(
    lease: Callable[..., Run], document: Callable[..., Any]
):
    changed = {"lease_store_url": "postgresql://me:hunter2@db/x", "lease_duration": 60}

    rows = {row["name"]: row for row in document("settings", **changed)["settings"]}
    said = lease("settings", **changed)

    assert rows["lease_store_url"]["value"] == "postgresql://me:***@db/x"
    assert (rows["lease_duration"]["value"], rows["lease_duration"]["default"]) == (60, 30)
    assert "hunter2" not in said.stdout
    assert re.search(r"^lease_duration +60.0 +30.0 +seconds +yes ", said.stdout, re.MULTILINE)


# -- what goes wrong -------------------------------------------------------------------------


def _is_one_line(said: Run, text: str) -> None:
    assert said.returncode == 1, said.stderr
    assert said.stdout == ""
    (line,) = said.stderr.splitlines()
    assert text in line


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lease_store_url": "nonsense"}, "it must be a database URL"),
        ({"lease_store_url": "oracle://x/y"}, "not one of postgresql, mysql, mariadb, sqlite"),
        ({"lease_store_url": "sqlite:////nonexistent/x.db"}, "cannot be used"),
        ({"lease_store_url": "postgresql://me:hunter2@127.0.0.1:1/x"}, "cannot be used"),
        ({"lease_store_url": "mysql://me:hunter2@127.0.0.1:1/x"}, "cannot be used"),
        ({"lease_duration": -1}, "lease_duration is -1"),
        ({"lease_durration": 5}, "did you mean lease_duration?"),
        ({"lease_store_auto_migrate": False}, "celery -A yourapp lease migrate"),
    ],
)
def test_what_goes_wrong_is_one_line(
    lease: Callable[..., Run], settings: dict[str, Any], text: str
):
    said = lease("show", "x", "--json", **settings)

    _is_one_line(said, text)
    assert "hunter2" not in said.stderr


def test_missing_tables_are_made_by_migrate_alone(store: Store, lease: Callable[..., Run]):
    _is_one_line(lease("jobs", lease_store_auto_migrate=False), "lease migrate")
    assert current_revision(store) is None

    assert lease("migrate", lease_store_auto_migrate=False).returncode == 0

    assert lease("jobs", lease_store_auto_migrate=False).returncode == 0


def test_a_newer_schema_asks_for_a_newer_release(store: Store, lease: Callable[..., Run]):
    ensure_schema(store, auto_migrate=True)
    with store.transaction() as connection:
        connection.execute(sa.text("UPDATE celery_lease_version SET version_num = '9999'"))

    for command in ("jobs", "migrate"):
        _is_one_line(lease(command), "upgrade celery-lease on this host")


def test_without_an_app_it_says_how_to_name_one(celery: Callable[..., Run]):
    said = celery("lease", "jobs")

    assert said.returncode == 2
    assert "celery -A yourapp lease jobs" in said.stderr


def test_an_app_with_options_for_all_commands_still_works(
    store: Store, lease: Callable[..., Run], tmp_path: Path
):
    (tmp_path / "more.py").write_text(
        "from proj import app\n"
        "from click import Option\n"
        "app.user_options['preload'].add(Option(['--where'], default='here'))\n"
    )
    lease("migrate")

    said = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "more", "lease", "--where", "there", "jobs"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            )
        },
    )

    assert (said.returncode, said.stderr) == (0, "no jobs\n")


def test_history_is_read_by_a_program(history: Store):
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.lease_store_url = history._url.render_as_string(hide_password=False)

    assert [job.id for job in reading.jobs(app, state="failed")] == ["failed"]
    assert [job.id for job in reading.jobs(app, state={JobState.RUNNING})] == ["running"]
    assert [a.job_id for a in reading.attempts(app, live=True)] == ["running"]
    assert reading.job(app, "taken-over").result == b"1"
    assert reading.counts(app)[JobState.SUCCEEDED] == 1
    assert reading.models(app) == (reading.Job, reading.Attempt)
    assert abs(reading.now(app) - datetime.now(tz=reading.now(app).tzinfo)).total_seconds() < 5
    with reading.session(app) as session:
        assert len(session.scalars(sa.select(reading.Job)).all()) == 3
    with pytest.raises(JobNotFound):
        reading.job(app, "unknown")
    for wrong in ({"limit": 0}, {"state": "done"}):
        with pytest.raises(ValueError, match=r"limit|done"):
            reading.jobs(app, **wrong)


def test_a_listing_of_queued_jobs_does_not_show_their_message(
    store: Store, document: Callable[..., Any]
):
    ensure_schema(store, auto_migrate=True)
    submitted(store, message=new_message(body=_SECRET))

    (job,) = document("jobs")["jobs"]

    assert job["message_version"] == 1
    assert JSON not in json.dumps(job)
