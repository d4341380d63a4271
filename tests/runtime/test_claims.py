"""The claim socket: from a child to its worker's main process, and back."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from celery_lease.claims import (
    LONGEST_PATH,
    PREFIX,
    Answer,
    Claim,
    ClaimSocket,
    ClaimTeller,
    LocalTeller,
)

Heard = Callable[[Claim], Answer | None]


def claim(job_id: str = "job", token: int = 1, pid: int | None = None) -> Claim:
    """Return the word of a claim."""
    return Claim(job_id, token, "owner", pid or os.getpid(), 30.0, 10.0)


def acknowledged(one: Claim) -> Answer:
    """Answer that the broker has been told."""
    return Answer(one.job_id, one.fencing_token, acknowledged=True)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, of this test alone; short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def make_socket(temporary: Path) -> Iterator[Callable[[Heard], ClaimSocket]]:
    """Make a main process's end."""
    with ExitStack() as stack:

        def make(heard: Heard) -> ClaimSocket:
            ear = ClaimSocket(heard)
            stack.callback(ear.close)
            return ear

        yield make


@pytest.fixture
def make_teller() -> Iterator[Callable[[str], ClaimTeller]]:
    """Make a child's end."""
    with ExitStack() as stack:

        def make(path: str) -> ClaimTeller:
            teller = ClaimTeller(path)
            stack.callback(teller.close)
            return teller

        yield make


def test_a_claim_is_heard_and_answered(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    heard: list[Claim] = []
    ear = make_socket(lambda one: heard.append(one) or acknowledged(one))
    teller = make_teller(ear.path)

    assert teller.tell(claim("one"))
    assert teller.tell(claim("two", 7))
    ear.read()

    assert heard == [claim("one"), claim("two", 7)]
    assert list(teller.answers()) == [acknowledged(one) for one in heard]
    assert list(teller.answers()) == []


def test_nobody_waits_where_nothing_comes(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    ear = make_socket(lambda _: None)
    teller = make_teller(ear.path)

    ear.read()
    assert list(teller.answers()) == []
    assert list(teller.answers(wait_seconds=0.01)) == []


def test_a_child_that_is_not_heard_goes_on(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    """The main process is busy, then gone: it says it again, or its message is kept to the end."""
    ear = make_socket(acknowledged)
    teller = make_teller(ear.path)

    told = [teller.tell(claim(token=n)) for n in range(1, 5000)]
    assert told[0]
    assert not told[-1]
    ear.read()
    assert teller.tell(claim())
    ear.close()
    assert not teller.tell(claim())


def test_an_answer_to_a_child_that_is_gone_disturbs_nobody(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    ear = make_socket(acknowledged)
    teller = make_teller(ear.path)
    teller.tell(claim())
    teller.close()

    ear.read()
    ear.answer(Answer("job", 1), os.getpid())


@pytest.mark.parametrize(
    "datagram", [b"", b"\xff", b"[]", b'{"job_id": "x"}', b'{"unknown": 1}', b"x" * 20_000]
)
def test_what_is_no_claim_is_passed_over(
    datagram: bytes,
    make_socket: Callable[[Heard], ClaimSocket],
    make_teller: Callable[[str], ClaimTeller],
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Claim] = []
    ear = make_socket(heard.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(datagram, ear.path)
    make_teller(ear.path).tell(claim())

    with caplog.at_level(logging.WARNING):
        ear.read()

    assert heard == [claim()]
    assert "lease.claim.malformed" in caplog.text


def test_a_mistake_in_hearing_ends_neither_the_loop_nor_the_next_word(
    make_socket: Callable[[Heard], ClaimSocket],
    make_teller: Callable[[str], ClaimTeller],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Raised on, it would end the event loop of the worker."""

    def hear(one: Claim) -> Answer:
        if one.job_id == "bad":
            raise RuntimeError
        return acknowledged(one)

    ear = make_socket(hear)
    teller = make_teller(ear.path)
    teller.tell(claim("bad"))
    teller.tell(claim("good"))

    ear.read()

    assert list(teller.answers()) == [acknowledged(claim("good"))]
    assert "lease.claim.unheard" in caplog.text


def test_a_thread_reads_where_there_is_no_loop(
    make_socket: Callable[[Heard], ClaimSocket],
    make_teller: Callable[[str], ClaimTeller],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What goes wrong with one claim does not end it."""

    def hear(one: Claim) -> Answer:
        if one.job_id == "bad":
            raise RuntimeError("bad")
        return acknowledged(one)

    ear = make_socket(hear)
    ear.start_thread()
    teller = make_teller(ear.path)

    teller.tell(claim("bad"))
    teller.tell(claim("good"))

    assert list(teller.answers(wait_seconds=5))[:1] == [acknowledged(claim("good"))]
    assert "lease.claim.unheard" in caplog.text
    thread = ear._thread
    ear.close()
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


def test_a_process_that_was_not_forked_finds_it_by_its_path(
    make_socket: Callable[[Heard], ClaimSocket],
) -> None:
    heard: list[Claim] = []
    ear = make_socket(lambda one: heard.append(one) or acknowledged(one))
    ear.start_thread()
    program = (
        "import sys, os; from celery_lease.claims import *; t = ClaimTeller(sys.argv[1]);"
        "t.tell(Claim('job', 3, 'owner', os.getpid(), 30.0, 10.0));"
        "print(next(t.answers(wait_seconds=10)).acknowledged); t.close()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, ear.path], capture_output=True, text=True, check=True
    )

    assert done.stdout == "True\n"
    assert [(one.job_id, one.fencing_token) for one in heard] == [("job", 3)]


def test_a_forked_child_holds_no_end_of_its_parents(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    """It would hear claims that are none of its business; and nothing of the parent's goes."""
    ear = make_socket(acknowledged)
    teller = make_teller(ear.path)
    pid = os.fork()
    if pid == 0:
        closed = ear.fileno() == -1 and teller._socket.fileno() == -1
        ear.close()
        teller.close()
        os._exit(0 if closed else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    teller.tell(claim())
    ear.read()
    assert list(teller.answers()) == [acknowledged(claim())]


def test_the_folder_is_private_and_goes_with_it(temporary: Path) -> None:
    ear = ClaimSocket(acknowledged)
    (folder,) = temporary.iterdir()

    assert folder.stat().st_mode & 0o077 == 0
    ear.close()
    assert list(temporary.iterdir()) == []


def test_a_long_temporary_folder_has_it_in_tmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A socket's name has room for about a hundred characters."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    ear = ClaimSocket(acknowledged)

    assert len(ear.path) <= LONGEST_PATH
    assert list(deep.iterdir()) == []
    ear.close()
    assert not Path(ear.path).parent.exists()


def test_what_killed_main_processes_left_is_removed_and_nothing_else(
    temporary: Path, make_socket: Callable[[Heard], ClaimSocket]
) -> None:
    living = make_socket(acknowledged)
    left = temporary / f"{PREFIX}left"
    left.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(left / "main"))
    other = temporary / f"{PREFIX}no-socket"
    other.mkdir()

    made = make_socket(acknowledged)

    assert not left.exists()
    assert other.exists()
    assert {Path(living.path).exists(), Path(made.path).exists()} == {True}


def test_a_child_with_the_pid_of_an_earlier_one_takes_its_place(
    make_socket: Callable[[Heard], ClaimSocket], make_teller: Callable[[str], ClaimTeller]
) -> None:
    ear = make_socket(acknowledged)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as earlier:
        earlier.bind(str(Path(ear.path).with_name(str(os.getpid()))))

    teller = make_teller(ear.path)
    teller.tell(claim())
    ear.read()

    assert list(teller.answers()) == [acknowledged(claim())]


def test_where_the_body_runs_in_the_main_process_it_is_a_call() -> None:
    teller = LocalTeller(acknowledged)

    assert teller.tell(claim())

    assert list(teller.answers(wait_seconds=5)) == [acknowledged(claim())]
    assert list(teller.answers()) == []


def test_a_word_fits_a_datagram_with_the_longest_id() -> None:
    assert len(json.dumps(asdict(claim("\N{EURO SIGN}" * 255)))) < 4096
