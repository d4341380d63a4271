"""Run by Alembic for every command: connects its context to one store.

Not a module to import: it acts when it is loaded. The store and its connection come in
``config.attributes``, so that nothing is read from a file; the transaction belongs to the
caller, who holds the lock.
"""

from __future__ import annotations

from alembic import context

from celery_lease.store.engine import Store

_store: Store = context.config.attributes["store"]

context.configure(
    connection=context.config.attributes["connection"],
    version_table=_store.tables.version_table,
    version_table_schema=_store.schema,
)
context.run_migrations()
