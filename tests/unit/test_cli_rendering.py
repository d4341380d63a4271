"""What the CLI makes of jobs and attempts: JSON documents, tables, the timeline of one job."""

from __future__ import annotations

import io
import json
import sys
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

from celery_lease.cli import documents, output, tables, timeline
from celery_lease.cli.output import Table, plain_lines, print_json, print_table, printable
from celery_lease.settings import as_rows
from celery_lease.states import AttemptState, JobState, LateOutcome, OnExpiry
from celery_lease.store.models import Attempt, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT = "its result of 2 bytes kept on the attempt"
START = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def new_job(**values: Any) -> Job:
    return _made(
        Job(),
        {
            "id": "job-1",
            "task": "app.work",
            "state": JobState.QUEUED,
            "on_expiry": OnExpiry.RETRY,
            "fencing_token": 0,
            "lost_count": 0,
            "failure_count": 0,
            "max_attempts": 3,
            "message_version": 1,
            "dispatch_count": 1,
            "created_at": START,
            "available_at": START,
            "attempts": [],
        }
        | values,
    )


def new_attempt(token: int = 1, **values: Any) -> Attempt:
    return _made(
        Attempt(),
        {
            "job_id": "job-1",
            "fencing_token": token,
            "state": AttemptState.ACTIVE,
            "worker": f"celery@w{token}",
            "owner": f"host-{token}-abc",
            "message_version": 1,
            "lease_seconds": 30.0,
            "lease_expires_at": after(31),
            "last_renewed_at": after(1),
            "renewal_count": 0,
            "claimed_at": after(1),
        }
        | values,
    )


def _made(row: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        setattr(row, name, value)
    return row


# -- documents -------------------------------------------------------------------------------


def test_every_attribute_of_a_job_is_shown_or_kept_back_on_purpose():
    shown = set(documents.job_with_attempts(new_job(), now=START))

    assert set(get_type_hints(Job)) - shown == set()
    assert shown - set(get_type_hints(Job)) == {"store_time"}


def test_every_attribute_of_an_attempt_is_shown_or_kept_back_on_purpose():
    shown = set(documents.attempt(new_attempt(), now=START))

    assert set(get_type_hints(Attempt)) - shown == {
        "claim_nonce",  # names a delivery, and tells nobody anything
        "job",
        "late_result",  # only its size and digest: it is nobody's result
        "traceback",  # with the whole job
    }


def test_a_document_is_json_with_iso_instants_and_plain_words():
    job = new_job(state=JobState.SUCCEEDED, finished_at=START.replace(microsecond=0))

    document = json.loads(json.dumps(documents.job(job)))

    assert document["state"] == "succeeded"
    assert document["on_expiry"] == "retry"
    assert document["created_at"] == "2026-01-02T03:04:05.678901+00:00"
    assert document["finished_at"] == "2026-01-02T03:04:05.000000+00:00"
    assert document["settled_at"] is None


def test_progress_is_the_value_it_stands_for():
    document = documents.attempt(
        new_attempt(progress='{"done": 3}', checkpoint="no json"), now=START
    )

    assert document["progress"] == {"done": 3}
    assert document["checkpoint"] == "no json"


def test_what_follows_from_an_attempt_is_told():
    attempt = new_attempt(worker_claimed_at=after(1.5))

    document = documents.attempt(attempt, now=after(41))

    assert document["held_seconds"] == 40
    assert document["is_live"] is True
    assert document["is_expired"] is True
    assert document["worker_ahead_seconds"] == 0.5


@pytest.mark.parametrize(
    ("result", "content_type", "value"),
    [
        (b'{"a": [1]}', "application/json", {"a": [1]}),
        (b"null", "application/json", None),
        (b"NaN", "application/json", None),
        (b"\xff", "application/json", None),
        (b"[" * 100_000, "application/json", None),
        (b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.", "application/x-python-serialize", None),
        (b"a: 1", "application/x-yaml", None),
        (None, None, None),
    ],
)
def test_only_json_is_decoded(result: bytes | None, content_type: str | None, value: object):
    assert documents.json_value(result, content_type) == value


# -- tables ----------------------------------------------------------------------------------


def test_plain_text_is_aligned_and_not_cut():
    table = Table(
        columns=("job", "n"), rows=[("a" * 50, "1"), ("b", "1000")], right=frozenset({"n"})
    )

    assert plain_lines(table) == [
        "JOB" + " " * 47 + "     N",
        "a" * 50 + "     1",
        "b" + " " * 49 + "  1000",
    ]


def test_an_empty_cell_is_a_dash_so_that_columns_can_be_counted():
    assert plain_lines(Table(columns=("a", "b"), rows=[("", "x")])) == ["A  B", "-  x"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("two\nlines\t", "two\\nlines\\t"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
    ],
)
def test_no_control_character_reaches_a_terminal(text: str, shown: str):
    assert printable(text) == shown


def test_an_empty_table_says_so_beside_the_output(capsys: pytest.CaptureFixture[str]):
    print_table(Table(columns=("a",), rows=[], empty="no jobs"))

    assert capsys.readouterr() == ("", "no jobs\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_rich_table_in_which_nothing_is_markup(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("rich")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    print_table(Table(columns=("job",), rows=[("[bold]x[/bold]",)]))

    assert "\x1b[1m" in terminal.getvalue()
    assert "[bold]x[/bold]" in terminal.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch):
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)

    print_table(Table(columns=("job",), rows=[("x",)]))

    assert terminal.getvalue() == "JOB\nx\n"


def test_without_color_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch):
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)

    print_table(Table(columns=("job",), rows=[("x",)]), is_plain=True)

    assert terminal.getvalue() == "JOB\nx\n"


def test_a_document_is_never_json_that_others_cannot_read():
    with pytest.raises(ValueError, match="JSON"):
        print_json({"value": float("nan")})


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.0001, "0s"),
        (0.0123456, "0.0123s"),
        (1.5, "1.5s"),
        (9.999, "10s"),
        (42.4, "42s"),
        (59.9, "1m"),
        (90, "1m30s"),
        (3600, "1h"),
        (3725, "1h2m"),
        (86400 * 3 + 3600, "3d1h"),
        (-2, "-2s"),
    ],
)
def test_a_span_has_two_units_at_most(seconds: float, shown: str):
    assert tables.span(seconds) == shown


def _cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_a_job_is_one_row_that_says_why():
    rows = [
        new_job(state_reason="retry in 3 s", fencing_token=2, lost_count=1),
        new_job(
            state=JobState.FAILED,
            state_reason="raised",
            error_type="builtins.ValueError",
            error_message="wrong\nsecond line",
        ),
    ]

    first, second = _cells(tables.jobs(rows, now=after(90)))

    assert first == {
        "job": "job-1",
        "task": "app.work",
        "state": "queued",
        "attempts": "2",
        "lost": "1",
        "failed": "0",
        "age": "1m30s",
        "why": "retry in 3 s",
    }
    assert second["why"] == "builtins.ValueError: wrong"


@pytest.mark.parametrize("state", [JobState.SCHEDULED, JobState.RETRY_WAIT])
def test_a_job_that_waits_for_its_time_says_when_that_is(state: JobState):
    rows = [new_job(state=state, available_at=after(seconds)) for seconds in (100, 10)]

    cells = _cells(tables.jobs(rows, now=after(40)))

    assert [cell["why"] for cell in cells] == ["due in 1m", "due for 30s"]


def test_an_attempt_is_one_row_with_what_is_left_of_its_lease():
    rows = [
        new_attempt(1),
        new_attempt(2, lease_expires_at=after(5)),
        new_attempt(
            3,
            state=AttemptState.EXPIRED,
            ended_at=after(40),
            stop_reason="no renewal",
            late_outcome=LateOutcome.SUCCEEDED,
        ),
    ]

    cells = _cells(tables.attempts(rows, now=after(11)))

    assert [cell["why"] for cell in cells] == [
        "lease ends in 20s",
        "lease ended 6s ago, not given on yet",
        "no renewal; came back with succeeded: rejected",
    ]
    assert [cell["held"] for cell in cells] == ["10s", "10s", "39s"]
    assert cells[0]["claimed"] == "2026-01-02 03:04:06.678Z"


def test_settings_show_the_default_where_it_was_changed():
    cells = _cells(tables.settings(as_rows()))

    assert all(cell["default"] == "" for cell in cells)
    assert {"setting": "lease_duration", "value": "30.0"}.items() <= next(
        cell for cell in cells if cell["setting"] == "lease_duration"
    ).items()


# -- the timeline ----------------------------------------------------------------------------


def _story(job: Job, *, now: datetime) -> Sequence[tuple[str, str, str]]:
    rows = timeline.events(job, now=now).rows
    return [(ahead, attempt, what) for _, ahead, attempt, what in rows]


def test_the_timeline_tells_who_held_the_lease_when_and_what_was_accepted():
    first = new_attempt(
        1,
        state=AttemptState.EXPIRED,
        last_renewed_at=after(11),
        renewal_count=2,
        lease_expires_at=after(41),
        ended_at=after(43),
        stop_reason="taken over",
        worker_claimed_at=after(3.25),
        rejected_at=after(50),
        late_outcome=LateOutcome.SUCCEEDED,
        late_result_size=2,
        late_result_digest="sha256:1",
    )
    second = new_attempt(
        2,
        state=AttemptState.COMPLETED,
        claimed_at=after(43),
        last_renewed_at=after(43),
        lease_expires_at=after(73),
        ended_at=after(45),
        worker_claimed_at=after(42.9),
        worker_ended_at=after(44.9),
    )
    job = new_job(
        state=JobState.SUCCEEDED,
        submitter="web1",
        queue="celery",
        dispatched_at=START,
        fencing_token=2,
        accepted_attempt=2,
        finished_at=after(45),
        settled_at=after(46),
        attempts=[first, second],
    )

    assert _story(job, now=after(60)) == [
        ("", "", "recorded by web1, for queue celery"),
        ("", "", "message last put on the broker"),
        ("+2.250s", "1", "claimed by celery@w1 (host-1-abc), lease of 30s"),
        ("", "1", "last renewed (2 times in all)"),
        ("", "1", "lease ended without a renewal"),
        ("", "1", "expired after 42s: taken over"),
        ("-0.100s", "2", "claimed by celery@w2 (host-2-abc), lease of 30s"),
        ("-0.100s", "2", "completed after 2s; accepted as the job's outcome"),
        ("", "", "job succeeded"),
        ("", "", "settled: Celery's own bookkeeping is done"),
        ("", "1", f"came back with succeeded: rejected, {_KEPT} (sha256:1)"),
    ]


def test_the_timeline_of_a_running_job_ends_now():
    job = new_job(state=JobState.RUNNING, fencing_token=1, attempts=[new_attempt(1)])

    assert _story(job, now=after(11))[-1] == ("", "1", "still active: lease ends in 20s")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"result": b'{"a": 1}', "result_type": "application/json"}, 'result     {"a": 1}'),
        ({"result": b"null", "result_type": "application/json"}, "result     null"),
        (
            {"result": b"\x80\x04K\x01.", "result_type": "application/x-python-serialize"},
            "result     <application/x-python-serialize, 5 bytes>",
        ),
        ({"accepted_attempt": 2}, "accepted   attempt 2"),
        ({"accepted_attempt": 0}, "accepted   no attempt's outcome"),
        (
            {"accepted_attempt": 2, "accepted_late": True},
            "accepted   attempt 2, after its lease had ended and before anybody took over",
        ),
        ({"state": JobState.CANCELLED}, "accepted   no attempt's outcome"),
        ({"state_reason": "why"}, "state      succeeded (why)"),
    ],
)
def test_the_heading_says_how_the_job_stands(values: dict[str, Any], line: str):
    job = new_job(**{"state": JobState.SUCCEEDED} | values)

    assert line in timeline.heading(job, now=START)


def test_a_long_result_is_cut_and_says_so():
    job = new_job(
        state=JobState.SUCCEEDED, result=b'"' + b"x" * 5000 + b'"', result_type="application/json"
    )

    (line,) = [line for line in timeline.heading(job, now=START) if line.startswith("result")]

    assert len(line) < 600
    assert line.endswith("... (5002 bytes: all of it with --json)")


def test_tracebacks_stand_under_their_attempt():
    job = new_job(attempts=[new_attempt(1), new_attempt(2, traceback="Traceback:\n  boom")])

    assert list(timeline.tracebacks(job)) == ["", "attempt 2:", "Traceback:", "  boom"]


def test_rich_is_loaded_by_one_function_only():
    assert "rich" not in vars(output)
