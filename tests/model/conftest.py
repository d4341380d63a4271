"""One database of each kind a test process, emptied between traces."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from celery_lease.store.engine import Store
from tests.support.databases import new_database

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """A store with tables, on each database."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('model') / 'lease.db'}"
        else:
            server = request.getfixturevalue(request.param)
            url = stack.enter_context(new_database(server.url))
        opened = Store(url=url)
        stack.callback(opened.close)
        opened.tables.metadata.create_all(opened.engine)
        yield opened
