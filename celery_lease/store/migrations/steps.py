"""Alembic at work: this folder is its script location, and there is no ini file.

Loaded only where tables are to be changed (see the package).
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection

from celery_lease.store.engine import Store

_FOLDER = Path(__file__).parent


def upgrade(store: Store, connection: Connection, revision: str) -> None:
    """Take the steps to a revision, over a connection whose transaction is the caller's."""
    command.upgrade(_config(store, connection), revision)


def _config(store: Store, connection: Connection) -> Config:
    """Return what Alembic needs to work on this store over this connection (see ``env.py``)."""
    config = Config(attributes={"store": store, "connection": connection})
    # It goes through configparser, to which a % in the path would be special.
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config
