"""What ``create_engine`` is given: our own options under those of the user.

Not the engine (``engine``). The user's win, but where a record would be lost by them: a single
statement of ours is its own transaction, and everything else is one of several statements, so
that an isolation level is always that of the transactions, wherever it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool

from celery_lease.exceptions import SettingError
from celery_lease.store import dialects

_NAME = "lease_store_engine_options"
_LEVEL = "isolation_level"
_EXECUTION = "execution_options"
#: How long a thread waits for a free connection, seconds.
POOL_TIMEOUT_SECONDS = 10
#: A transaction of several statements is none under it.
_NO_TRANSACTIONS = "AUTOCOMMIT"


class EngineOptions:
    """The options of one store's engines.

    Args:
        given: ``lease_store_engine_options``.
        dialect: the store's.

    Raises:
        SettingError: they cannot work with any driver.
    """

    def __init__(self, given: Mapping[str, Any], dialect: dialects.Dialect) -> None:
        self._given = dict(given)
        self._dialect = dialect
        if "pool" in self._given:
            # A forked child would use, and close, the sockets of its parent.
            raise _refused("pool is one pool for all processes: give its class as poolclass")
        execution = self._given.get(_EXECUTION, {})
        connect = self._given.get("connect_args", {})
        for name, value in ((_EXECUTION, execution), ("connect_args", connect)):
            if not isinstance(value, Mapping):
                raise _refused(f"{name} is a mapping, not {type(value).__name__}")
        self._connect_arguments: Mapping[str, Any] = connect
        # As an execution option it is set on each connection after our own autocommit, and the
        # pool rolls every single statement back.
        within = dict(execution)
        if _LEVEL in within:
            self._given[_LEVEL] = within.pop(_LEVEL)
            self._given[_EXECUTION] = within

    @property
    def transaction_level(self) -> str:
        """The isolation level of transactions."""
        level = self._given.get(_LEVEL, "READ COMMITTED")
        return level.replace("_", " ").upper() if isinstance(level, str) else repr(level)

    def create(self, url: URL, *, masked_url: str) -> Engine:
        """Make an engine; it connects to nothing.

        Raises:
            SettingError: the options cannot be used, or the driver is not installed.
        """
        # What the database refuses would be said, and logged, with the arguments of a task.
        options: dict[str, Any] = {"hide_parameters": True}
        if _has_timeout(self._given.get("poolclass", QueuePool)):
            options["pool_timeout"] = POOL_TIMEOUT_SECONDS
        options.update(self._dialect.engine_options)
        options.update(self._given)
        options["connect_args"] = {
            **dialects.connect_arguments(self._dialect, url),
            **self._connect_arguments,
        }
        if self._dialect.writing_ctes:
            options[_LEVEL] = _NO_TRANSACTIONS
        elif _LEVEL in self._given:
            options[_LEVEL] = self.transaction_level
        try:
            engine = sa.create_engine(url, **options)
        except (ModuleNotFoundError, NoSuchModuleError) as error:
            problem = (
                f"lease_store_url {masked_url} needs a driver that is not installed "
                f"({error}): pip install 'celery-lease[postgres]' or 'celery-lease[mysql]'"
            )
            raise SettingError([problem]) from error
        except (TypeError, ArgumentError) as error:
            raise _refused(f"they cannot be used: {error}") from error
        if _LEVEL in self._given:
            self._check_level(engine)
        self._dialect.prepare(engine, self._connect_arguments)
        return engine

    def _check_level(self, engine: Engine) -> None:
        # Fixed lists: no dialect of ours asks a connection for them.
        known: Any = engine.dialect.get_isolation_level_values(None)  # type: ignore[arg-type]
        levels = sorted(set(known) - {_NO_TRANSACTIONS})
        if self.transaction_level not in levels:
            raise _refused(
                f"{_LEVEL} is {self.transaction_level}, and must be one with transactions: "
                f"leave it out, or write one of {', '.join(levels)}"
            )


def _has_timeout(pool: object) -> bool:
    # What is no class is refused by SQLAlchemy.
    return isinstance(pool, type) and issubclass(pool, QueuePool)


def _refused(problem: str) -> SettingError:
    return SettingError([f"{_NAME}: {problem}"])
