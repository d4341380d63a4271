"""Tasks whose calls have idempotency keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import chain

from celery_lease import LeasedTask, SettingError

if TYPE_CHECKING:
    from celery import Celery


def add_keyed_tasks(app: Celery, book: Any) -> None:  # noqa: C901 - a list of tasks
    """Add them to the app of these tests."""

    @app.task(name="k.once", base=LeasedTask, bind=True, lease_idempotency_key=True)
    def once(self: LeasedTask, tag: str, value: int = 0) -> int:
        book.note(tag, f"once {value}")
        return value

    @app.task(name="k.order", base=LeasedTask, lease_idempotency_key="order-{order_id}")
    def order(order_id: str, note: str = "") -> str:
        book.note(order_id, f"order {note}")
        return note

    @app.task(name="k.report", base=LeasedTask, lease_idempotency_key="report-{report[id]}")
    def report(report: Any) -> Any:
        return report["id"]

    @app.task(name="k.submits_report", base=LeasedTask)
    def submits_report(tag: str) -> str:
        try:
            app.tasks["k.report"].delay(tag)
        except SettingError as error:
            return type(error).__name__
        return "submitted"

    class CallsWhenDone(LeasedTask):
        abstract = True

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            try:
                app.tasks["k.report"].delay(retval)
            except SettingError as error:
                book.note(retval, type(error).__name__)

    @app.task(name="k.calls_when_done", base=CallsWhenDone)
    def calls_when_done(tag: str) -> str:
        return tag

    @app.task(
        name="k.lenient",
        base=LeasedTask,
        lease_idempotency_key="{tag}",
        lease_idempotency_conflict="existing",
    )
    def lenient(tag: str, value: int) -> int:
        book.note(tag, f"lenient {value}")
        return value

    @app.task(name="k.until_final", base=LeasedTask, lease_idempotency_retention=0)
    def until_final(tag: str) -> None:
        book.note(tag, "ran")

    @app.task(name="k.value", base=LeasedTask)
    def value(before: int, tag: str, number: int) -> int:
        book.note(tag, f"value {number}")
        return number

    @app.task(name="k.wait", base=LeasedTask, lease_duration=3)
    def wait(tag: str, then: str = "return") -> str:
        book.note(tag, "began")
        book.wait(tag, "go")
        if then == "fail":
            raise ValueError(then)
        return then

    @app.task(name="k.retry", base=LeasedTask, bind=True, lease_idempotency_key="{tag}")
    def retry(self: LeasedTask, tag: str, done: int = 0) -> int:
        book.note(tag, f"try {done}")
        if done < 2:
            # Other arguments, and so another digest: it is the same job all the same.
            raise self.retry(args=(tag, done + 1), countdown=0.2)
        return done

    @app.task(name="k.itself", base=LeasedTask, bind=True, lease_idempotency_key="{tag}")
    def itself(self: LeasedTask, tag: str, left: int = 1) -> str:
        book.note(tag, f"left {left}")
        if left:
            raise self.replace(self.si(tag, left - 1))
        return "replaced by itself"

    @app.task(name="k.becomes", base=LeasedTask, bind=True, lease_idempotency_key="{tag}")
    def becomes(self: LeasedTask, tag: str) -> None:
        once = app.tasks["k.once"]
        raise self.replace(chain(once.si(tag, 1), once.si(tag, 2)))

    @app.task(name="k.submits", base=LeasedTask)
    def submits(tag: str, key: str) -> list[str]:
        """Submit twice from inside a body."""
        mark = app.tasks["t.mark"]
        return [mark.apply_async((tag,), idempotency_key=key).id for _ in range(2)]
