"""What the CLI takes: durations, states, an app."""

from __future__ import annotations

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_lease.cli import lease
from celery_lease.cli.command import duration
from celery_lease.states import JobState


@pytest.fixture
def option() -> tuple[click.Context, click.Option]:
    option = click.Option(["--older-than"])
    return click.Context(click.Command("jobs", params=[option])), option


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("1d", 86400),
        ("1h30m", 5400),
        ("0.5s", 0.5),
        ("15", 15),
        (" 2H ", 7200),
        ("0", 0),
    ],
)
def test_a_duration_is_read_as_seconds(
    option: tuple[click.Context, click.Option], text: str, seconds: float
):
    assert duration(*option, text) == seconds


def test_no_duration_is_none(option: tuple[click.Context, click.Option]):
    assert duration(*option, None) is None


@pytest.mark.parametrize(
    "text", ["", "soon", "-5s", "5 m", "1w", "1e3", "inf", "nan", "٣s", "5m3", "99999999d"]
)
def test_what_is_no_duration_is_refused(option: tuple[click.Context, click.Option], text: str):
    with pytest.raises(click.BadParameter, match=r"duration|century"):
        duration(*option, text)


def _run(*arguments: str, app: Celery | None = None) -> Result:
    context = CLIContext(app=app or Celery("default"), no_color=True, workdir=None)
    return CliRunner().invoke(lease, arguments, obj=context)


def test_the_commands_are_these():
    assert sorted(lease.commands) == [
        "attempts",
        "cancel",
        "demo",
        "doctor",
        "jobs",
        "migrate",
        "reap",
        "resume",
        "settings",
        "show",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs",),
        ("show", "x"),
        ("attempts",),
        ("cancel", "x", "--reason", "y"),
        ("resume", "x", "--reason", "y"),
        ("reap",),
        ("migrate",),
        ("settings",),
    ],
)
def test_without_an_app_it_says_how_to_name_one(arguments: tuple[str, ...]):
    result = _run(*arguments)

    assert result.exit_code == 2
    assert f"celery -A yourapp lease {arguments[0]}" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("jobs", "--state", "done"), "'done' is not one of"),
        (("jobs", "--older-than", "soon"), "write 90s, 5m, 2h or 1d"),
        (("jobs", "--limit", "0"), "0 is not in the range"),
        (("attempts", "--limit", "many"), "is not a valid integer"),
        (("show",), "Missing argument 'JOB'"),
        (("cancel", "x"), "Missing option '--reason'"),
        (("resume", "x"), "Missing option '--reason'"),
        (("jobs", "--stat", "held"), "--state"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments: tuple[str, ...], said: str):
    result = _run(*arguments, app=Celery("proj"))

    assert result.exit_code == 2
    assert said in result.output


def test_the_help_names_every_state():
    said = _run("jobs", "--help").output

    assert all(state.value in said for state in JobState)


def test_the_demo_needs_no_app(monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def demo(**options: object) -> int:
        seen.update(options)
        return 3

    monkeypatch.setattr("celery_lease.cli.operate._demo", lambda: demo)

    result = _run("demo", "--broker", "redis://x", "--keep")

    assert result.exit_code == 3
    assert seen == {"broker": "redis://x", "keep": True, "json": False}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "must be a database URL"),
        ("oracle://x/y", "not one of postgresql, mysql, mariadb, sqlite"),
        ("sqlite://", "in-memory database"),
        ("sqlite:////nonexistent/lease.sqlite3", "cannot be used"),
    ],
)
def test_a_wrong_store_url_is_one_line(url: str, said: str):
    app = Celery("proj")
    app.conf.lease_store_url = url

    result = _run("jobs", app=app)

    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1
