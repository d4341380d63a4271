"""The word of a claim, from the child that made it to its worker's main process.

The message of a job is in the hands of the main process; that a claim has committed is known to
the child. It says so over a local datagram socket, and the main process acknowledges the message
to the broker (``lease_ack = "claim"``) and answers. From then on visibility and consumer timeouts
of the broker mean nothing to the job, and the reaper alone owns its recovery.

Who is authoritative: the store. A word that does not arrive changes nothing: the child says it
again with its next heartbeat, and a message that was never acknowledged at the claim is at the end
of the attempt. Nobody waits for an answer.

A datagram socket with its path in an environment variable works for forked and for spawned children
(celery-facts, section 5). Its folder is private: nobody else can say anything.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

#: Where a child finds its worker's socket.
PATH_VARIABLE = "CELERY_LEASE_CLAIM_SOCKET"
#: How its folder's name begins.
PREFIX = "celery-lease-claims-"
#: A socket's path has room for 108 bytes on Linux, 104 elsewhere (unix(7)).
LONGEST_PATH = 100
#: Bytes of a datagram. Its longest part is the job's id, of 255 characters.
DATAGRAM = 16 * 1024
#: Datagrams read in one turn of the event loop.
A_TURN = 200


@dataclass(frozen=True, slots=True)
class Claim:
    """What a child says of a lease it holds.

    Attributes:
        job_id: the job.
        fencing_token: the claim's token.
        owner: the child, as the store knows it.
        pid: the child.
        lease_seconds: length of the lease.
        heartbeat_seconds: time between two renewals.
        from_worker: True when the main process is to renew it (``lease_heartbeat_from``); False
            again when it was given up.
    """

    job_id: str
    fencing_token: int
    owner: str
    pid: int
    lease_seconds: float
    heartbeat_seconds: float
    from_worker: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the main process says of a claim.

    Attributes:
        job_id: the job.
        fencing_token: the claim's token.
        acknowledged: True when the broker no longer has the message.
        sent_at: monotonic clock at the send of the last renewal by the main process that was
            accepted, None without one. The clock is the machine's: it is the same in the child.
        lost: why the store no longer knows the lease, None when it does.
        stopping: True when the main process is about to stop the body: it lost its broker.
    """

    job_id: str
    fencing_token: int
    acknowledged: bool = False
    sent_at: float | None = None
    lost: str | None = None
    stopping: bool = False


class ClaimSocket:
    """The main process's end. Made before the pool forks, closed in every child.

    Args:
        heard: called with each claim; gives what to answer, None for nothing.

    Raises:
        OSError: no private folder, or no socket in it.
    """

    def __init__(self, heard: Callable[[Claim], Answer | None]) -> None:
        self._heard = heard
        self._pid = os.getpid()
        self._folder = _short_folder()
        _remove_left_behind(self._folder.parent)
        self.path = str(self._folder / "main")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(self.path)
        except OSError:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._socket.settimeout(0)
        self._thread: threading.Thread | None = None
        _open_ends.add(self)

    def fileno(self) -> int:
        """The descriptor, for an event loop to watch."""
        return self._socket.fileno()

    def read(self) -> None:
        """Take what has arrived, and answer; never blocks."""
        for _ in range(A_TURN):
            try:
                datagram = self._socket.recv(DATAGRAM)
            except OSError:
                # Nothing more, or closed meanwhile.
                return
            try:
                self._take(datagram)
            except Exception:
                # Raised on, it would end the worker's event loop.
                logger.exception("lease.claim.unheard")

    def answer(self, answer: Answer, pid: int) -> None:
        """Say something of a claim to the child that made it."""
        with suppress(OSError):
            # Full or gone: it will ask again, or never.
            self._socket.sendto(json.dumps(asdict(answer)).encode(), str(self._folder / str(pid)))

    def start_thread(self) -> None:
        """Read in a thread of its own, where there is no event loop to watch the socket."""
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._run, name="celery-lease-claims", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; in the process that made it the folder goes, too."""
        if self._thread is not None and self._pid == os.getpid():
            with suppress(OSError):
                # Wakes the thread, which a close would not.
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._pid == os.getpid():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(DATAGRAM)
            except OSError:
                return
            if not datagram:
                return
            try:
                self._take(datagram)
            except Exception:
                # The thread's outer edge: no message would be acknowledged at its claim again.
                logger.exception("lease.claim.unheard")

    def _take(self, datagram: bytes) -> None:
        try:
            claim = Claim(**json.loads(datagram))
        except (ValueError, TypeError):
            logger.warning("lease.claim.malformed bytes=%s", len(datagram))
            return
        answer = self._heard(claim)
        if answer is not None:
            self.answer(answer, claim.pid)


class Teller(Protocol):
    """How a runner's word reaches its worker's main process.

    Attributes:
        is_apart: True when that is another process.
    """

    is_apart: bool

    def tell(self, claim: Claim) -> bool:
        """Say that a claim was won; False when it could not be taken just now."""

    def answers(self, *, wait_seconds: float = 0.0) -> Iterator[Answer]:
        """Give the answers that have arrived, waiting so long at most for another one."""

    def close(self) -> None:
        """End it."""


class LocalTeller:
    """The way in a pool whose bodies run in the main process itself: a call.

    Args:
        heard: what the main process makes of a claim.
    """

    is_apart = False

    def __init__(self, heard: Callable[[Claim], Answer | None]) -> None:
        self._heard = heard
        self._answers: deque[Answer] = deque()

    def tell(self, claim: Claim) -> bool:
        """Say that a claim was won."""
        answer = self._heard(claim)
        if answer is not None:
            self._answers.append(answer)
        return True

    def answers(self, *, wait_seconds: float = 0.0) -> Iterator[Answer]:
        """Give the answers; they are there as soon as something was told."""
        del wait_seconds
        while self._answers:
            yield self._answers.popleft()

    def close(self) -> None:
        """Nothing is open."""


class ClaimTeller:
    """A child's end.

    Args:
        path: of the main process's socket.

    Raises:
        OSError: no socket can be made beside it.
    """

    is_apart = True

    def __init__(self, path: str) -> None:
        self._main = path
        self._pid = os.getpid()
        self.path = f"{os.path.dirname(path)}/{self._pid}"  # noqa: PTH120  one string a child
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            # Of an earlier process with this pid.
            Path(self.path).unlink()
        try:
            self._socket.bind(self.path)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(0)
        _open_ends.add(self)

    def tell(self, claim: Claim) -> bool:
        """Say that a claim was won; False when the main process could not take it just now."""
        try:
            self._socket.sendto(json.dumps(asdict(claim)).encode(), self._main)
        except OSError:
            return False
        return True

    def answers(self, *, wait_seconds: float = 0.0) -> Iterator[Answer]:
        """Give the answers that have arrived, waiting so long at most for another one."""
        until = time.monotonic() + wait_seconds
        while True:
            try:
                if wait_seconds and not self._is_readable(until - time.monotonic()):
                    return
                datagram = self._socket.recv(DATAGRAM)
            except OSError:
                return
            with suppress(ValueError, TypeError):
                yield Answer(**json.loads(datagram))

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        if self._pid == os.getpid():
            with suppress(OSError):
                Path(self.path).unlink()


def _short_folder() -> Path:
    """Return a new private folder whose name leaves room for a socket's."""
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(made)) + len("/main") + len(str(2**22)) <= LONGEST_PATH:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders of main processes that were killed: nobody answers at their sockets."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            main = folder / "main"
            if folder.stat().st_uid != os.getuid() or not main.is_socket():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(str(main))
                except ConnectionRefusedError:
                    shutil.rmtree(folder, ignore_errors=True)


_open_ends: weakref.WeakSet[ClaimSocket | ClaimTeller] = weakref.WeakSet()


def _close_in_child() -> None:
    for end in list(_open_ends):
        end.close()
    _open_ends.clear()


os.register_at_fork(after_in_child=_close_in_child)
