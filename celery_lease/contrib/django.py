"""Django: ``task.enqueue(using=…)``, and the ``delay_on_commit`` of Celery's own Django task.

The statements run through Django's own cursor, so that its transactions, wrappers and logging see
them. The messages leave by ``transaction.on_commit``.

.. versionadded:: 0.1
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from celery.utils import uuid
from django.db import DEFAULT_DB_ALIAS, IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError

from celery_lease.enqueue import enqueue
from celery_lease.exceptions import SettingError
from celery_lease.extension import extension_of
from celery_lease.store.callers import Formatted, Send, place_of, send_all
from celery_lease.store.engine import Store
from celery_lease.task import LeasedTask

__all__ = ["DjangoCaller", "DjangoLeasedTask", "DjangoTaskMixin"]


class DjangoCaller:
    """One of Django's databases, as it is in this thread.

    Args:
        using: its name in ``DATABASES``.
        store: the store, in whose dialect statements are written.

    Raises:
        django.utils.connection.ConnectionDoesNotExist: there is no such name.
    """

    def __init__(self, using: str, store: Store) -> None:
        self._using = using
        self._connection = connections[using]
        self._store = store

    @property
    def family(self) -> str:
        """The dialect name of its database."""
        return str(self._connection.vendor)

    @property
    def identity(self) -> Hashable:
        """What its settings say: a test runner changes them."""
        said = self._connection.settings_dict
        return ("django", self._using, *(str(said[name]) for name in ("NAME", "HOST", "PORT")))

    @property
    def description(self) -> str:
        """Its name in ``DATABASES`` and what that is."""
        said = self._connection.settings_dict
        return f"DATABASES[{self._using!r}] ({self._connection.vendor}, {said['NAME']!s})"

    def fetch(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a statement and return its rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(*self._written(statement, parameters))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def write(self, statement: Any, parameters: Mapping[str, Any]) -> int:
        """Run a statement and return how many rows it has changed."""
        with self._connection.cursor() as cursor:
            cursor.execute(*self._written(statement, parameters))
            return int(cursor.rowcount)

    def insert(self, statement: Any, parameters: Mapping[str, Any]) -> BaseException | None:
        """Run an INSERT; returns the error if there is such a row."""
        try:
            self.write(statement, parameters)
        except IntegrityError as error:
            found: BaseException = error
            return found
        return None

    def after_commit(self, job_id: str, send: Send) -> None:
        """Have a job sent once this transaction is committed; at once where there is none."""
        batch = _batches.get(self._connection)
        committed = None if batch is None else batch()
        if committed is None:
            committed = _Batch()
            _batches[self._connection] = weakref.ref(committed)
        committed.jobs.append((send, job_id))
        try:
            # Robust: the callbacks of others run whatever becomes of ours.
            transaction.on_commit(committed.send, using=self._using, robust=True)
        except TransactionManagementError:
            # Autocommit is off, and the transaction is the user's own to end: a pass sends it.
            return

    def _written(self, statement: Any, parameters: Mapping[str, Any]) -> tuple[str, list[Any]]:
        write = _writers.get(self._store)
        if write is None:
            write = _writers[self._store] = Formatted(self._store)
        return write(statement, parameters)


_writers: weakref.WeakKeyDictionary[Store, Formatted] = weakref.WeakKeyDictionary()


class _Batch:
    """The jobs of one transaction: asked for together, by the first callback that runs.

    Only Django's callbacks keep it alive, and Django drops them with a rollback.
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[Send, str]] = []

    def send(self) -> None:
        """Send all that are there."""
        jobs, self.jobs = self.jobs, []
        send_all(jobs)


#: The batch of the transaction that a connection is in, if it has one.
_batches: weakref.WeakKeyDictionary[Any, weakref.ref[_Batch]] = weakref.WeakKeyDictionary()


class DjangoTaskMixin:
    """Gives a leased task the two methods of Celery's ``DjangoTask``, which return a result.

    If the store is in the database, the job joins its transaction (``enqueue``): nothing that was
    committed is forgotten. Else the call is made after the commit, as Celery does, under an id
    that is known before; what a process that dies in between was to call is then lost.

    .. versionadded:: 0.1
    """

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task with these arguments once the transaction is committed.

        Returns:
            The ``AsyncResult`` of the job, whose id is known before the commit.
        """
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(  # noqa: PLR0917  that of ``apply_async``
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        using: str = DEFAULT_DB_ALIAS,
        **options: Any,
    ) -> Any:
        """Call the task, as ``apply_async`` does, once the transaction is committed.

        Args:
            args: positional arguments of the task.
            kwargs: keyword arguments of the task.
            task_id: as of ``apply_async``, and so are the next four.
            producer: see there.
            link: see there.
            link_error: see there.
            shadow: see there.
            using: the name of a database of Django's.
            **options: all that ``apply_async`` takes.

        Returns:
            The ``AsyncResult`` of the job, whose id is known before the commit.
        """
        named = {
            "task_id": task_id,
            "producer": producer,
            "link": link,
            "link_error": link_error,
            "shadow": shadow,
        }
        options |= {name: value for name, value in named.items() if value is not None}
        task: Any = self
        if not task.app.conf.task_always_eager:
            extension = extension_of(task.app)
            caller = DjangoCaller(using, extension.raw_store)
            try:
                place_of(extension.raw_store, caller, prepare=lambda: extension.store)
            except SettingError:
                # The store is elsewhere.
                pass
            else:
                return enqueue(task, caller, args, kwargs, options)
        options.setdefault("task_id", str(uuid()))
        call = functools.partial(task.apply_async, args, kwargs, **options)
        transaction.on_commit(call, using=using)
        return task.AsyncResult(options["task_id"])


class DjangoLeasedTask(DjangoTaskMixin, LeasedTask):
    """``LeasedTask`` with ``delay_on_commit`` and ``apply_async_on_commit``: ``base=`` of a task.

    .. versionadded:: 0.1
    """

    abstract = True
