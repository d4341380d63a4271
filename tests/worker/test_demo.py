"""The demo as a user runs it, and its verdict, which must be able to fail."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from celery_lease.demo import command, library, verdict
from celery_lease.demo.closing import as_json, closing_of
from celery_lease.demo.evidence import AttemptSeen, Evidence, JobSeen
from celery_lease.demo.gates import Gate, Reached
from celery_lease.demo.indexing import Totals, grand_total, index_plainly
from celery_lease.demo.rich_screen import RichScreen
from celery_lease.demo.screen import (
    Happened,
    Kind,
    PlainScreen,
    Screen,
    Snapshot,
    WorkerView,
    screen_for,
)
from celery_lease.demo.stage import DemoFailed
from celery_lease.states import AttemptState, JobState, LateOutcome
from tests.support import processes
from tests.support.waiting import eventually
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# --- the whole of it --------------------------------------------------------------------------


class Run:
    """One demo as a process; it and all that it starts carry a mark in their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._mark = f"DEMO_TEST_MARK={uuid.uuid4()}"
        self.folder = folder
        self.output = folder.parent / "output"
        name, value = self._mark.split("=")
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            name: value,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONIOENCODING": "utf-8",
            "TMPDIR": str(folder),
            # A variable of the caller's that must not reach the demo.
            "CELERY_BROKER_URL": "redis://nowhere.invalid/0",
        }
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery_lease.demo", *arguments],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def running(self) -> list[int]:
        """The processes of this run that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                is_ours = self._mark.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_ours and processes.is_alive(int(entry.name)):
                found.append(int(entry.name))
        return found

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still at it after {timeout} s:\n{self.text()}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.running():
            processes.send(pid, signal.SIGKILL)


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start the demo, with a folder for temporary files of its own."""
    runs = []

    def start(*arguments: str) -> Run:
        folder = tmp_path / "temporary"
        folder.mkdir()
        runs.append(Run(folder, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.timeout(240)
def test_every_check_holds_and_nothing_is_left_behind(start_demo: Callable[..., Run]) -> None:
    run = start_demo()

    code = run.wait(timeout=180)

    text = run.text()
    assert code == 0, text
    assert len(re.findall(r"^  ✓ ", text, re.MULTILINE)) == 7, text
    assert "✗" not in text
    assert re.search(r"worker w\d SIGKILLed while it indexes \w+ \(attempt 1, token 1", text), text
    assert re.search(r"worker w\d frozen \(SIGSTOP\)", text), text
    assert re.search(r"succeeded, rejected \d+\.\d s", text), text
    eventually(lambda: not run.running())
    assert list(run.folder.iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_demo_leaves_no_worker_behind(
    number: signal.Signals, start_demo: Callable[..., Run]
) -> None:
    run = start_demo()
    if number == signal.SIGKILL:
        # The hardest: nobody cleans up, and one worker stands still.
        eventually(
            lambda: "frozen (SIGSTOP)" in run.text(), timeout=90, interval=0.1, what=run.text
        )
    else:
        # Two workers with two children each, beat, and the demo.
        eventually(lambda: len(run.running()) >= 8, timeout=60, interval=0.1, what=run.text)

    run.process.send_signal(number)

    code = run.wait(timeout=30)
    assert code != 0
    eventually(lambda: not run.running(), timeout=20, what=lambda: str(run.running()))
    if number != signal.SIGKILL:
        assert list(run.folder.iterdir()) == []


def test_a_broker_that_cannot_be_reached_is_said_so(start_demo: Callable[..., Run]) -> None:
    run = start_demo("--broker", "redis://127.0.0.1:1/0")

    code = run.wait(timeout=60)

    assert code == 2
    assert "the broker cannot be reached" in run.text()
    assert list(run.folder.iterdir()) == []


# --- the verdict ------------------------------------------------------------------------------

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
TOTALS = {name: index_plainly(ROOT, [name]).as_json() for name in ("Makefile", "pyproject.toml")}
KILLED, FROZEN = TOTALS
LATE = json.dumps(TOTALS[FROZEN]).encode()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def attempt(job_id: str, token: int, **fields: Any) -> AttemptSeen:
    base: dict[str, Any] = {
        "state": AttemptState.COMPLETED,
        "worker": "w3@demo",
        "claimed_at": at(10 * token),
        "ended_at": at(10 * token + 5),
    }
    return AttemptSeen(job_id=job_id, token=token, **{**base, **fields})


def job(job_id: str, name: str, *attempts: AttemptSeen, **fields: Any) -> JobSeen:
    base: dict[str, Any] = {
        "state": JobState.SUCCEEDED,
        "accepted_attempt": attempts[-1].token,
        "settled": True,
        "result": TOTALS[name],
        "celery": ("SUCCESS", TOTALS[name]),
    }
    return JobSeen(id=job_id, attempts=attempts, **{**base, **fields})


LOST = attempt(
    "k",
    1,
    state=AttemptState.LOST,
    worker="w1@demo",
    progress='{"done":3,"total":9}',
)
ZOMBIE = attempt(
    "f",
    1,
    state=AttemptState.EXPIRED,
    worker="w2@demo",
    rejected_at=at(30),
    late_outcome=LateOutcome.SUCCEEDED,
    late_result=LATE,
    late_digest=f"sha256:{hashlib.sha256(LATE).hexdigest()}",
)
KILLED_JOB = job("k", KILLED, LOST, attempt("k", 2))
FROZEN_JOB = job("f", FROZEN, ZOMBIE, attempt("f", 2))
GOOD = Evidence(
    names={"k": KILLED, "f": FROZEN},
    jobs=(KILLED_JOB, FROZEN_JOB),
    plain=TOTALS,
    killed_worker="w1@demo",
    killed=(("k", 1),),
    frozen_worker="w2@demo",
    zombie=("f", 1),
    started_at=START,
    seconds=20.0,
)


def changed(target: JobSeen, **fields: Any) -> Evidence:
    jobs = [dataclasses.replace(one, **fields) if one is target else one for one in GOOD.jobs]
    return dataclasses.replace(GOOD, jobs=tuple(jobs))


def changed_attempt(target: AttemptSeen, **fields: Any) -> Evidence:
    owner = KILLED_JOB if target in KILLED_JOB.attempts else FROZEN_JOB
    attempts = tuple(
        dataclasses.replace(one, **fields) if one is target else one for one in owner.attempts
    )
    return changed(owner, attempts=attempts)


def test_good_evidence_passes_every_check() -> None:
    checks = verdict.verdict(GOOD)

    assert [check.problems for check in checks] == [()] * 7
    assert all(check.found for check in checks)


BAD: list[tuple[str, Callable[[Evidence], verdict.Check], Evidence]] = [
    ("a job failed", verdict.succeeded_exactly_once, changed(KILLED_JOB, state=JobState.FAILED)),
    (
        "a job is gone",
        verdict.succeeded_exactly_once,
        dataclasses.replace(GOOD, jobs=GOOD.jobs[1:]),
    ),
    (
        "a job nobody submitted",
        verdict.succeeded_exactly_once,
        dataclasses.replace(GOOD, names={"k": KILLED}),
    ),
    (
        "two attempts completed",
        verdict.succeeded_exactly_once,
        changed_attempt(LOST, state=AttemptState.COMPLETED),
    ),
    (
        "another attempt was accepted",
        verdict.succeeded_exactly_once,
        changed(KILLED_JOB, accepted_attempt=1),
    ),
    ("no jobs", verdict.succeeded_exactly_once, dataclasses.replace(GOOD, names={}, jobs=())),
    (
        "a result differs",
        verdict.totals_are_those_of_a_plain_run,
        changed(KILLED_JOB, result={**TOTALS[KILLED], "lines": 0}),
    ),
    (
        "there is no result",
        verdict.totals_are_those_of_a_plain_run,
        changed(KILLED_JOB, result=None),
    ),
    (
        "the plain run counted more packages",
        verdict.totals_are_those_of_a_plain_run,
        dataclasses.replace(GOOD, plain={**TOTALS, "more": TOTALS[KILLED]}),
    ),
    (
        "Celery has another result",
        verdict.celery_was_told,
        changed(KILLED_JOB, celery=("SUCCESS", TOTALS[FROZEN])),
    ),
    ("Celery has none", verdict.celery_was_told, changed(KILLED_JOB, celery=("PENDING", None))),
    ("not settled", verdict.celery_was_told, changed(KILLED_JOB, settled=False)),
    (
        "the leases overlap",
        verdict.leases_never_overlap,
        changed_attempt(LOST, ended_at=at(21)),
    ),
    (
        "the killed attempt never ended",
        verdict.leases_never_overlap,
        changed_attempt(LOST, ended_at=None),
    ),
    (
        "nothing was given on",
        verdict.leases_never_overlap,
        dataclasses.replace(GOOD, jobs=()),
    ),
    (
        "the killed attempt failed",
        verdict.killed_attempts_ended,
        changed_attempt(LOST, state=AttemptState.FAILED),
    ),
    ("nobody was killed", verdict.killed_attempts_ended, dataclasses.replace(GOOD, killed=())),
    (
        "the killed attempt has no row",
        verdict.killed_attempts_ended,
        dataclasses.replace(GOOD, killed=(("k", 7),)),
    ),
    (
        "it was killed at its end",
        verdict.killed_attempts_ended,
        changed_attempt(LOST, progress='{"done":9,"total":9}'),
    ),
    (
        "the dead worker completed it",
        verdict.killed_attempts_ended,
        changed_attempt(KILLED_JOB.attempts[1], worker="w1@demo"),
    ),
    ("it never came", verdict.zombie_was_rejected, changed_attempt(ZOMBIE, rejected_at=None)),
    (
        "it came too early",
        verdict.zombie_was_rejected,
        changed_attempt(ZOMBIE, rejected_at=at(21)),
    ),
    (
        "it failed",
        verdict.zombie_was_rejected,
        changed_attempt(ZOMBIE, late_outcome=LateOutcome.FAILED),
    ),
    ("it is not kept", verdict.zombie_was_rejected, changed_attempt(ZOMBIE, late_result=None)),
    (
        "its digest is another one",
        verdict.zombie_was_rejected,
        changed_attempt(ZOMBIE, late_digest="sha256:0"),
    ),
    (
        "it is of another job",
        verdict.zombie_was_rejected,
        changed(FROZEN_JOB, result=TOTALS[KILLED]),
    ),
    (
        "the zombie was accepted",
        verdict.zombie_was_rejected,
        changed(FROZEN_JOB, accepted_attempt=1),
    ),
    (
        "its attempt completed",
        verdict.zombie_was_rejected,
        changed_attempt(ZOMBIE, state=AttemptState.COMPLETED),
    ),
    (
        "nobody took over",
        verdict.zombie_was_rejected,
        changed(FROZEN_JOB, accepted_attempt=None),
    ),
    (
        "the frozen worker took over",
        verdict.zombie_was_rejected,
        changed_attempt(FROZEN_JOB.attempts[1], worker="w2@demo"),
    ),
    ("it took too long", verdict.in_time, dataclasses.replace(GOOD, seconds=90.0)),
]


@pytest.mark.parametrize(
    ("check", "evidence"), [pytest.param(*rest, id=name) for name, *rest in BAD]
)
def test_bad_evidence_fails_its_check_and_the_demo(
    check: Callable[[Evidence], verdict.Check], evidence: Evidence
) -> None:
    found = check(evidence)

    assert not found.holds
    assert all(found.problems)
    ending = closing_of(evidence)
    assert not ending.holds
    assert "do not hold" in ending.summary
    assert as_json(evidence, ending)["holds"] is False


def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "play", lambda _: GOOD)
    assert command.main(json=True) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True

    bad = changed(KILLED_JOB, settled=False)
    monkeypatch.setattr(command, "play", lambda _: bad)
    assert command.main() == 1
    assert "✗ Celery knows each result" in capsys.readouterr().out

    def fail(stage: object) -> Evidence:
        raise DemoFailed("waited in vain for a worker")

    monkeypatch.setattr(command, "play", fail)
    assert command.main() == 2
    assert "could not be shown: waited in vain for a worker" in capsys.readouterr().err


def test_its_folder_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "play", lambda _: GOOD)

    command.main(keep=True)

    (kept,) = tmp_path.iterdir()
    assert str(kept) in capsys.readouterr().err


# --- its parts --------------------------------------------------------------------------------


def test_the_library_is_a_few_hundred_files_and_no_tests() -> None:
    root = library.library_root()
    found = library.packages(root)

    files = [name for package in found for name in package.files]
    assert 100 < len(files) <= library.MOST_FILES
    assert len(files) == len(set(files))
    assert not [name for name in files if {"test", "site-packages"} & set(Path(name).parts)]
    first, second = library.leading_roles(found)
    assert first.size >= second.size
    assert first.is_package
    assert second.is_package


def test_a_python_without_sources_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "only.py").touch()

    with pytest.raises(library.NoLibrary, match="no Python sources"):
        library.packages(tmp_path)


def test_counting_goes_on_from_a_checkpoint() -> None:
    sources = [b"x = 1  # one\n", b"def f(:\n  'open", b"print('\xff')\n"]
    whole = Totals()
    for source in sources:
        whole.add(source)

    half = Totals()
    half.add(sources[0])
    again = Totals.from_json(json.loads(json.dumps(half.as_json())))
    for source in sources[1:]:
        again.add(source)

    assert again == whole
    assert whole.files == 3
    assert whole.unreadable == 2
    assert whole.tokens["COMMENT"] == 1
    assert grand_total([whole.as_json(), whole.as_json()]).tokens["COMMENT"] == 2


def test_a_gate_lets_through_when_it_is_open(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "some")
    assert gate.reached() is None

    gate.shut()
    gate.open()
    gate.pass_through(Reached("job", 3))

    assert gate.reached() == Reached("job", 3)


def play(screen: Screen) -> None:
    screen.open(["First line", "in `second`"])
    screen.show(Snapshot(1.0, 1, 9, [WorkerView("w1", "starting", "")]))
    screen.tell(Happened(2.0, Kind.KILLED, "worker `w1` SIGKILLed"))
    screen.show(Snapshot(7.0, 3, 9, [WorkerView("w1", "killed", "email 1/2")]))
    screen.settle()
    screen.close(closing_of(changed(KILLED_JOB, settled=False)))


def test_where_nothing_can_be_redrawn_there_are_plain_lines() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    screen = screen_for(out)
    assert isinstance(screen, PlainScreen)

    play(screen)

    out.seek(0)
    text = out.read()
    assert "2.0 s  ✖ worker w1 SIGKILLed" in text
    assert "3 of 9 jobs" in text
    assert "✗ Celery knows each result" in text
    assert "Makefile is not settled" in text
    assert "1 of 7 checks do not hold" in text


def test_ascii_is_enough() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    play(screen_for(out))

    out.seek(0)
    text = out.read()
    assert "FAIL Celery knows each result" in text
    assert "?" not in text


def test_on_a_terminal_it_is_shown_with_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(out, "isatty", lambda: True)
    screen = screen_for(out)
    assert isinstance(screen, RichScreen)

    play(screen)

    text = capsys.readouterr().out
    assert "✖ worker w1 SIGKILLed" in text
    assert "✗  Celery knows each result" in text
    assert "Makefile is not settled" in text


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "celery_lease.demo.rich_screen", None)

    assert isinstance(screen_for(out), PlainScreen)
