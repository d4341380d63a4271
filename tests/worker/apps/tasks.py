"""The tasks that the workers of these tests run, and how their app is made.

The test process makes the same app to publish with. What happens is written into a ledger: a
Redis list a tag, one entry a fact, in the order in which it happened.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import redis
from celery import Celery, Task, chain, chord, group
from celery.exceptions import Ignore, Reject, Retry

from celery_lease import HandOver, LeasedTask, current_lease
from tests.worker.apps.breakable import add_breakable_tasks
from tests.worker.apps.enqueued import add_enqueued_tasks
from tests.worker.apps.keyed import add_keyed_tasks
from tests.worker.apps.twins import add_twins

try:
    from pydantic import BaseModel
except ImportError:
    BaseModel = None  # type: ignore[assignment,misc]
else:

    class Thing(BaseModel):
        """What the pydantic task takes and gives."""

        name: str
        size: int


class Ledger:
    """What happened, by tag."""

    def __init__(self, url: str) -> None:
        self._url = url

    def note(self, tag: str, fact: object) -> None:
        """Add a fact."""
        with redis.Redis.from_url(self._url) as client:
            client.rpush(f"ledger:{tag}", str(fact))

    def read(self, tag: str) -> list[str]:
        """Return the facts of a tag in their order."""
        with redis.Redis.from_url(self._url) as client:
            return [fact.decode() for fact in client.lrange(f"ledger:{tag}", 0, -1)]

    def wait(self, tag: str, fact: str, *, seconds: float = 15.0) -> None:
        """Wait for a fact, as a body does for what the test does."""
        deadline = time.monotonic() + seconds
        while fact not in self.read(tag):
            if time.monotonic() > deadline:
                message = f"nobody wrote {fact!r} for {tag!r}"
                raise TimeoutError(message)
            time.sleep(0.02)


def make_app(*, broker: str, backend: str | None, store: str, ledger: str, **conf: Any) -> Celery:
    """Make the app with all its tasks."""
    app = Celery("leased", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(
        lease_store_url=store,
        accept_content=["json", "pickle"],
        result_accept_content=["json", "pickle"],
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=True,
    )
    app.conf.update(conf)
    # Shared, as Celery's default is, they would turn up in every other app of the test process.
    app.task = functools.partial(app.task, shared=False)
    book = Ledger(ledger)
    _plain_tasks(app, book)
    _bodies(app, book)
    _retrying_tasks(app, book)
    _replacing_tasks(app, book)
    _outcome_tasks(app, book)
    _forms(app, book)
    add_breakable_tasks(app, book)
    add_keyed_tasks(app, book)
    add_twins(app, book)
    add_enqueued_tasks(app, book)
    return app


def _plain_tasks(app: Celery, book: Ledger) -> None:
    @app.task(name="plain.mark")
    def plain_mark(tag: str) -> str:
        book.note(tag, "plain")
        return "plain"

    @app.task(name="plain.calls")
    def plain_calls(tag: str) -> str:
        """Call a leased task as a function."""
        return str(app.tasks["t.mark"](tag))

    @app.task(name="plain.replaced", bind=True)
    def plain_replaced(self: Task, tag: str) -> None:
        book.note(tag, "plain")
        raise self.replace(app.tasks["t.mark"].si(tag))


def _bodies(app: Celery, book: Ledger) -> None:  # noqa: C901 - a list of tasks
    @app.task(name="t.add", base=LeasedTask)
    def add(first: int, second: int) -> int:
        return first + second

    @app.task(name="t.total", base=LeasedTask)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(name="t.mark", base=LeasedTask, bind=True)
    def mark(self: LeasedTask, tag: str) -> str:
        book.note(tag, f"mark {self.lease.fencing_token}")
        return "marked"

    # One argument: Celery sends it as a task of its own, with its id.
    @app.task(name="t.errback", base=LeasedTask)
    def errback(tag: str) -> None:
        book.note(tag, "errback")

    @app.task(name="t.other_errback", base=LeasedTask)
    def other_errback(tag: str) -> None:
        book.note(tag, "other errback")

    @app.task(name="t.ids", base=LeasedTask, bind=True)
    def ids(self: LeasedTask, *args: Any, **kwargs: Any) -> list[Any]:
        request = self.request
        return [request.id, self.lease.job_id, self.lease.fencing_token, request.root_id]

    @app.task(name="t.headers", base=LeasedTask, bind=True)
    def headers(self: LeasedTask, tag: str, tries: int) -> None:
        stamps = self.request.stamps or {}
        book.note(tag, f"tenant={self.request.get('tenant')} stamps={sorted(stamps)}")
        if self.request.retries < tries:
            raise self.retry(countdown=0)

    @app.task(name="t.says_twice", base=LeasedTask, bind=True)
    def says_twice(self: LeasedTask, tag: str, thing: Any) -> None:
        """Say what it was given, in two attempts."""
        book.note(tag, repr(thing))
        if self.lease.fencing_token == 1:
            self.lease.release()

    @app.task(name="t.wait", base=LeasedTask, bind=True, lease_duration=3, lease_interrupt=False)
    def wait(self: LeasedTask, tag: str) -> str:
        """Run until the test says so."""
        token = self.lease.fencing_token
        book.note(tag, f"began {token}")
        book.wait(tag, f"go {token}")
        return f"by {token}"

    @app.task(name="t.nested", base=LeasedTask, bind=True)
    def nested(self: LeasedTask, depth: int) -> list[bool]:
        held = [current_lease().is_held]
        if depth > 0:
            held += self(depth - 1)
        else:
            lease = current_lease()
            lease.check()
            lease.progress(1, 2)
            lease.checkpoint({"page": 1})
        return [*held, current_lease().is_held] if depth == 2 else held

    @app.task(name="t.calls_other", base=LeasedTask, bind=True)
    def calls_other(self: LeasedTask, tag: str) -> bool:
        app.tasks["t.mark"](tag)
        app.tasks["t.mark"].apply(args=(tag,))
        return bool(current_lease().is_held)

    @app.task(name="t.submits_many", base=LeasedTask)
    def submits_many(tag: str, count: int) -> list[str]:
        return [result.id for result in app.tasks["t.mark"].submit_many([(tag,)] * count)]

    @app.task(name="t.pid", base=LeasedTask)
    def pid() -> int:
        return os.getpid()


def _retrying_tasks(app: Celery, book: Ledger) -> None:  # noqa: C901 - same
    @app.task(name="r.retry", base=LeasedTask, bind=True, max_retries=3)
    def retry(
        self: LeasedTask, tag: str, tries: int, countdown: float = 0, queue: str | None = None
    ) -> str:
        book.note(tag, f"try {self.request.retries} token {self.lease.fencing_token}")
        if self.request.retries < tries:
            raise self.retry(exc=ValueError("again"), countdown=countdown, queue=queue)
        return f"done {self.request.retries}"

    @app.task(name="r.positional", base=LeasedTask, bind=True)
    def positional(self: LeasedTask, tag: str) -> str:
        if self.request.retries == 0:
            # As Celery's own signature has them: exc, throw, eta, countdown.
            self.retry((tag,), {}, ValueError("again"), True, None, 0)  # noqa: FBT003
        return "done"

    class Temporary(Exception):
        pass

    @app.task(
        name="r.auto",
        base=LeasedTask,
        bind=True,
        autoretry_for=(Temporary,),
        max_retries=2,
        default_retry_delay=0,
    )
    def auto(self: LeasedTask, tag: str, tries: int) -> str:
        book.note(tag, f"try {self.request.retries}")
        if self.request.retries < tries:
            raise Temporary("not yet")
        return "done"

    @app.task(name="r.no_throw", base=LeasedTask, bind=True)
    def no_throw(self: LeasedTask, tag: str) -> str:
        book.note(tag, f"try {self.request.retries}")
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            return "of the first"
        return "of the second"

    @app.task(name="r.retry_when", base=LeasedTask, bind=True, lease_interrupt=False)
    def retry_when(self: LeasedTask, tag: str) -> str:
        if self.request.retries == 0:
            book.note(tag, "began")
            book.wait(tag, "retry")
            raise self.retry(countdown=0)
        return "done"

    @app.task(name="r.bare", base=LeasedTask, bind=True)
    def bare(self: LeasedTask, tag: str) -> str:
        book.note(tag, f"token {self.lease.fencing_token}")
        if self.lease.fencing_token == 1:
            raise Retry(when=0)
        return "done"

    @app.task(name="r.gives_back", base=LeasedTask, bind=True)
    def gives_back(self: LeasedTask, at: int, how: str) -> str:
        """Give the job back at one attempt by a word of Celery's."""
        hour = timedelta(hours=1)
        ways = {
            "retry": Retry,
            "rejected": lambda: Reject("the machine is busy", requeue=True),
            "aware": lambda: Retry(when=datetime.now(timezone(-hour)) + hour),
            # Celery takes a naive one for UTC.
            "naive": lambda: Retry(when=datetime.now(timezone.utc).replace(tzinfo=None) + hour),
            "seconds": lambda: Retry(when=3600),
            "odd": lambda: Retry(when="soon"),
            "past": lambda: Retry(when=datetime.now(timezone.utc) - hour),
        }
        if self.lease.fencing_token == at:
            error = ways[how]()
            raise error
        return "done"

    @app.task(name="r.swallowed", base=LeasedTask, bind=True)
    def swallowed(self: LeasedTask, tag: str) -> str:
        book.note(tag, f"try {self.request.retries}")
        if self.request.retries == 0:
            try:
                raise self.retry(countdown=0)
            except Retry:
                raise ValueError("after the retry") from None
        return "done"


def _replacing_tasks(app: Celery, book: Ledger) -> None:
    def sig(name: str, *args: Any) -> Any:
        return app.tasks[name].si(*args)

    replacements = {
        "leased": lambda tag: sig("t.mark", tag),
        "unleased": lambda tag: sig("plain.mark", tag),
        "chain": lambda tag: chain(sig("t.add", 1, 1), sig("t.mark", tag)),
        "group": lambda _: group(sig("t.add", 1, 1), sig("t.add", 2, 2)),
        "chord": lambda _: chord(
            [sig("t.add", 1, 1), sig("t.add", 2, 2)], app.tasks["t.total"].s()
        ),
        "again": lambda tag: sig("p.replace", tag, "leased"),
    }

    @app.task(name="p.replace", base=LeasedTask, bind=True)
    def replace(self: LeasedTask, tag: str, by: str) -> None:
        book.note(tag, f"replace by {by} token {self.lease.fencing_token}")
        raise self.replace(replacements[by](tag))

    @app.task(name="p.replace_when", base=LeasedTask, bind=True, lease_interrupt=False)
    def replace_when(self: LeasedTask, tag: str, by: str) -> None:
        book.note(tag, "began")
        book.wait(tag, "replace")
        raise self.replace(replacements[by](tag))

    @app.task(name="p.grow", base=LeasedTask, bind=True)
    def grow(self: LeasedTask) -> int:
        self.add_to_chord(app.tasks["t.add"].s(20, 20))
        return 2


def _outcome_tasks(app: Celery, book: Ledger) -> None:  # noqa: C901, PLR0915 - same
    def steal(lease: Any, tag: str) -> None:
        book.note(tag, "ready")
        book.wait(tag, "stolen")
        while not lease.lost:
            time.sleep(0.02)

    def lost(self: LeasedTask, tag: str) -> None:
        steal(self.lease, tag)
        self.lease.check()

    def swallows(self: LeasedTask, tag: str) -> str:
        steal(self.lease, tag)
        # What must not be written, and is.
        with contextlib.suppress(BaseException):
            self.lease.check()
        return "of the stale attempt"

    def late(self: LeasedTask, tag: str) -> str:
        steal(self.lease, tag)
        return "of the stale attempt"

    def late_error(self: LeasedTask, tag: str) -> str:
        steal(self.lease, tag)
        raise ValueError("of the stale attempt")

    def late_retry(self: LeasedTask, tag: str) -> str:
        steal(self.lease, tag)
        raise self.retry(countdown=0)

    def hand_over(self: LeasedTask, tag: str) -> None:
        self.lease.checkpoint({"page": 7})
        raise HandOver

    def releases(self: LeasedTask, tag: str) -> None:
        self.lease.checkpoint({"page": 7})
        self.lease.release()

    def raising(error: BaseException) -> Any:
        def act(self: LeasedTask, tag: str) -> None:
            raise error

        return act

    def leaves(self: LeasedTask, tag: str) -> None:
        sys.exit(3)

    def soft_limit(self: LeasedTask, tag: str) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.01)

    def killed(self: LeasedTask, tag: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    acts = {
        "error": raising(ValueError("wrong")),
        "ignore": raising(Ignore("not needed")),
        "reject": raising(Reject("no good", requeue=False)),
        "requeue": raising(Reject("later", requeue=True)),
        "memory": raising(MemoryError("too big")),
        "exit": leaves,
        "keyboard": raising(KeyboardInterrupt()),
        "soft limit": soft_limit,
        "lost": lost,
        "swallows": swallows,
        "late": late,
        "late error": late_error,
        "late retry": late_retry,
        "hand-over": hand_over,
        "release": releases,
        "killed": killed,
    }

    @app.task(
        name="o.act",
        base=LeasedTask,
        bind=True,
        lease_duration=3,
        # What a body says that goes on without its lease is what these are for.
        lease_interrupt=False,
        max_retries=None,
    )
    def act(self: LeasedTask, tag: str, kind: str) -> Any:
        """Do something bad at the first attempt and end well at the second."""
        token = self.lease.fencing_token
        book.note(tag, f"token {token} from {self.lease.last_checkpoint}")
        if token == 1:
            return acts[kind](self, tag)
        return "done"

    @app.task(name="o.always", base=LeasedTask, bind=True, lease_max_attempts=1)
    def always(self: LeasedTask, tag: str) -> None:
        book.note(tag, f"token {self.lease.fencing_token}")
        book.wait(tag, "never", seconds=60)

    @app.task(name="o.object", base=LeasedTask)
    def returns_object() -> object:
        return object()

    @app.task(name="o.object_ignored", base=LeasedTask, ignore_result=True)
    def returns_object_ignored() -> object:
        return object()

    @app.task(name="o.big", base=LeasedTask)
    def big(size: int) -> str:
        return "x" * size

    class Odd(Exception):
        def __init__(self, first: object, second: object) -> None:
            super().__init__("odd")
            self.first, self.second = first, second

    @app.task(name="o.odd_error", base=LeasedTask)
    def odd_error() -> None:
        raise Odd(object(), lambda: None)

    @app.task(name="o.set_error", base=LeasedTask)
    def set_error() -> None:
        raise ValueError({1})


def _forms(app: Celery, book: Ledger) -> None:  # noqa: C901 - same
    class Abstract(LeasedTask):
        abstract = True
        lease_max_attempts = 5
        kept = "of the base"

    class ByClass(Abstract):
        name = "f.by_class"
        autoretry_for = (ValueError,)
        default_retry_delay = 0
        made = 0

        def __init__(self) -> None:
            type(self).made += 1

        def run(self, tag: str) -> str:
            book.note(tag, f"made {self.made} token {self.lease.fencing_token}")
            if self.request.retries == 0:
                raise ValueError("again")
            return self.kept

    app.register_task(ByClass())

    class OwnCall(LeasedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            book.note(args[0], "enter")
            try:
                return self.run(*args, **kwargs)
            finally:
                book.note(args[0], "leave")

    class OwnCallSuper(LeasedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            book.note(args[0], "enter")
            try:
                return super().__call__(*args, **kwargs)
            finally:
                book.note(args[0], "leave")

    class FlaskTask(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            book.note(args[0], "enter")
            try:
                return self.run(*args, **kwargs)
            finally:
                book.note(args[0], "leave")

    class FlaskMixin:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            book.note(args[0], "enter")
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                book.note(args[0], "leave")

    class MixinFirst(FlaskMixin, LeasedTask):
        abstract = True

    class MixinLast(LeasedTask, FlaskTask):
        abstract = True

    class MixinFirstRun(FlaskTask, LeasedTask):
        abstract = True

    class Twice(OwnCallSuper):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    for kind in (OwnCall, OwnCallSuper, MixinFirst, MixinLast, MixinFirstRun, Twice):

        @app.task(name=f"f.{kind.__name__}", base=kind, bind=True)
        def called(self: LeasedTask, tag: str) -> str:
            book.note(tag, f"body {self.lease.fencing_token}")
            return "done"

    _hooks(app, book)
    if BaseModel is not None:

        @app.task(name="f.pydantic", base=LeasedTask, pydantic=True)
        def doubled(thing: Thing) -> Thing:
            return Thing(name=thing.name * 2, size=thing.size * 2)


def _hooks(app: Celery, book: Ledger) -> None:  # noqa: C901 - same
    class Hooks(LeasedTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            book.note(args[0], "before_start")

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            book.note(args[0], "on_success")

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            book.note(args[0], "on_failure")

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            book.note(args[0], "on_retry")

        def after_return(self, status: Any, retval: Any, task_id: str, args: Any, *_: Any) -> None:
            book.note(args[0], "after_return")

    class HooksSuper(Hooks):
        abstract = True

        def before_start(self, *args: Any) -> None:
            super(Hooks, self).before_start(*args)
            super().before_start(*args)

        def on_success(self, *args: Any) -> None:
            super(Hooks, self).on_success(*args)
            super().on_success(*args)

        def on_failure(self, *args: Any) -> None:
            super(Hooks, self).on_failure(*args)
            super().on_failure(*args)

        def on_retry(self, *args: Any) -> None:
            super(Hooks, self).on_retry(*args)
            super().on_retry(*args)

        def after_return(self, *args: Any) -> None:
            super(Hooks, self).after_return(*args)
            super().after_return(*args)

    for kind in (Hooks, HooksSuper):

        @app.task(name=f"f.{kind.__name__}", base=kind, bind=True)
        def hooked(self: LeasedTask, tag: str, how: str) -> str:
            book.note(tag, "body")
            if how == "retry" and self.request.retries == 0:
                raise self.retry(countdown=0)
            if how == "fail":
                raise ValueError("wrong")
            return "done"
