"""What the show is played on: the app, its processes, the screen, and a way to wait.

Everything is waited for within bounds and by looking at the store; meanwhile the screen is
kept up to date, and a process that ends by itself is an error at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from celery_lease import history
from celery_lease.demo.app import HALFWAY, INDEX, create_app
from celery_lease.demo.evidence import Key
from celery_lease.demo.library import Package, leading_roles, library_root, packages
from celery_lease.demo.plain import PlainRun
from celery_lease.demo.processes import STOP_SECONDS, CeleryProcess, end_all
from celery_lease.demo.screen import Happened, Kind, Screen, Snapshot, WorkerView
from celery_lease.exceptions import LeaseError
from celery_lease.extension import store_of
from celery_lease.history import Attempt
from celery_lease.states import JobState

T = TypeVar("T")

#: Nothing is waited for longer than this, all in all: the demo says so and gives up.
LONGEST_SHOW_SECONDS = 150.0
BEAT = "beat"
LOOK_SECONDS = 0.12
#: More rows than there can be of one run.
ALL = 10_000


class DemoFailed(Exception):
    """Raised when the show cannot go on: not a verdict, a reason why there is none."""


class Stage:
    """One run's app and processes.

    Args:
        folder: its own folder.
        broker: a broker's URL, None for the embedded one.
        screen: where it is shown.

    Raises:
        NoLibrary: there is nothing to index.
    """

    def __init__(self, *, folder: Path, broker: str | None, screen: Screen) -> None:
        self.folder = folder
        self.broker = broker
        self.screen = screen
        self.root = library_root()
        self.packages = packages(self.root)
        self.to_kill, self.to_freeze = leading_roles(self.packages)
        self.app = create_app(folder, broker)
        self.names: dict[str, str] = {}
        self.told: list[Happened] = []
        self._started = time.monotonic()
        self._running: dict[str, CeleryProcess] = {}
        self._conditions: dict[str, str] = {}
        self._known: set[Key] = set()
        self._plain: PlainRun | None = None

    # -- processes -----------------------------------------------------------------------------

    def enter(self, name: str, process: CeleryProcess) -> None:
        """Take in a process that has been started."""
        self._running[name] = process
        self._conditions[name] = "starting"

    def kill(self, name: str) -> None:
        """SIGKILL a worker with all its children."""
        self._running.pop(name).kill()
        self._conditions[name] = "killed"

    def freeze(self, name: str) -> None:
        """SIGSTOP a worker with all its children."""
        self._running[name].freeze()
        self._conditions[name] = "frozen"

    def thaw(self, name: str) -> None:
        """SIGCONT a worker with all its children."""
        self._running[name].thaw()
        self._conditions[name] = "at work"

    def workers_are_ready(self) -> bool:
        """Tell whether every worker takes messages."""
        return all(one.is_ready for name, one in self._running.items() if name != BEAT)

    def ask_to_stop(self) -> None:
        """Have all processes end, each when its bodies have."""
        for name, process in self._running.items():
            process.ask_to_stop()
            self._conditions[name] = "stopping"

    def stop(self) -> None:
        """End all processes."""
        end_all(list(self._running.values()), stop_seconds=STOP_SECONDS)
        self._running.clear()

    def clear(self) -> None:
        """Leave nothing behind but files; may be called at any time, and again."""
        end_all(list(self._running.values()), stop_seconds=0)
        self._running.clear()
        if self.broker is not None:
            # What this run declared; if that fails, nothing is left to do about it.
            with suppress(Exception), self.app.connection_for_write() as connection:
                queue = self.app.amqp.queues[self.app.conf.task_default_queue]
                queue = queue(connection.default_channel)
                queue.declare()
                queue.delete()
                queue.exchange.delete()
        with suppress(LeaseError):
            store_of(self.app).close()
        self.app.close()

    # -- jobs ----------------------------------------------------------------------------------

    def submit(self, package: Package, *, task: str = INDEX) -> None:
        """Publish one package's job."""
        kwargs: dict[str, Any] = {"files": list(package.files)}
        if package is self.to_kill:
            kwargs["stop_at"] = HALFWAY
        result = self.app.tasks[task].apply_async(kwargs=kwargs)
        self.names[result.id] = package.name

    def live_attempt(self, job_id: str, fencing_token: int) -> Attempt | None:
        """Return an attempt if it holds its lease."""
        live = history.attempts(self.app, job_id=job_id, live=True)
        return next((one for one in live if one.fencing_token == fencing_token), None)

    def scene(self, attempt: Attempt) -> str:
        """Say where an attempt is."""
        done, total = progress_of(attempt)
        where = f", file {done} of {total}" if total else ""
        return f"`{self.names[attempt.job_id]}` ({_attempt(attempt)}{where})"

    def run_plainly(self) -> PlainRun:
        """Begin the plain run of all packages."""
        self._plain = PlainRun(self.root, self.packages)
        self._plain.start()
        return self._plain

    # -- time ----------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._started

    def until(self, ask: Callable[[], T | None], *, seconds: float, what: str) -> T:
        """Return the first true answer, showing meanwhile what goes on.

        Raises:
            DemoFailed: there was none in time, or a process ended by itself.
        """
        deadline = min(self.seconds() + seconds, LONGEST_SHOW_SECONDS)
        while True:
            is_last = self.seconds() >= deadline
            self._look()
            answer = ask()
            if answer:
                return answer
            if is_last:
                raise DemoFailed(self._in_vain(what))
            time.sleep(LOOK_SECONDS)

    def _in_vain(self, what: str) -> str:
        ends = "\n".join(
            f"  the end of {name}.log:\n{process.last_words()}"
            for name, process in self._running.items()
        )
        return (
            f"waited in vain for {what}, {self.seconds():.0f} s after the start\n{ends}\n"
            "  with --keep the whole folder stays"
        )

    # -- the screen ----------------------------------------------------------------------------

    def tell(self, kind: Kind, text: str) -> None:
        """Add a line to the story."""
        happened = Happened(round(self.seconds(), 1), kind, text)
        self.told.append(happened)
        self.screen.tell(happened)

    def _look(self) -> None:
        for name, process in self._running.items():
            if process.exit_code is not None and self._conditions[name] != "stopping":
                raise DemoFailed(
                    f"{name} ended by itself, with code {process.exit_code}:\n"
                    f"{process.last_words()}"
                )
        attempts = history.attempts(self.app, limit=ALL)
        self._tell_of_turns(attempts)
        views = [self._worker_view(name, attempts) for name in self._conditions]
        if self._plain is not None and (doing := self._plain.at()) is not None:
            views.append(WorkerView("this process", "at work", doing))
        done = history.counts(self.app)[JobState.SUCCEEDED]
        self.screen.show(Snapshot(self.seconds(), done, len(self.packages), views))

    def _tell_of_turns(self, attempts: list[Attempt]) -> None:
        by_key = {(one.job_id, one.fencing_token): one for one in attempts}
        for job_id, token in sorted(by_key.keys() - self._known):
            self._known.add((job_id, token))
            before = by_key.get((job_id, token - 1))
            if before is not None:
                self.tell(Kind.RECOVERED, self._turn(before, by_key[job_id, token]))

    def _turn(self, before: Attempt, after: Attempt) -> str:
        done = 0 if before.checkpoint is None else progress_of(before)[0]
        where = f" from file {done} on" if done else ""
        return (
            f"`{self.names[before.job_id]}`: the lease of `{short_name(before.worker)}` "
            f"(token {before.fencing_token}) {_ended(before)}; `{short_name(after.worker)}` "
            f"takes it up{where} ({_attempt(after)})"
        )

    def _worker_view(self, name: str, attempts: list[Attempt]) -> WorkerView:
        if self._conditions[name] == "starting" and self._running[name].is_ready:
            self._conditions[name] = "at work"
        doing = []
        for one in attempts:
            if one.is_live and short_name(one.worker) == name:
                done, total = progress_of(one)
                where = f" {done}/{total}" if total else ""
                doing.append(f"{self.names.get(one.job_id, one.job_id)}{where}")
        return WorkerView(name, self._conditions[name], ", ".join(doing))


def short_name(worker: str | None) -> str:
    """Return the part of a node name that is a worker's own."""
    return (worker or "?").partition("@")[0]


def progress_of(attempt: Attempt) -> tuple[int, int]:
    """Return how many files are done, of how many; zeros before it is known."""
    if not attempt.progress:
        return 0, 0
    progress = json.loads(attempt.progress)
    return int(progress["done"]), int(progress["total"] or 0)


def _attempt(attempt: Attempt) -> str:
    # The token counts claims, so a job's n-th attempt has token n.
    return f"attempt {attempt.fencing_token}, token {attempt.fencing_token}"


def _ended(attempt: Attempt) -> str:
    return "ended" if attempt.is_live else attempt.state.value
