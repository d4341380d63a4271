"""No state is written outside the transitions: read in the source, since no run can show it."""

from __future__ import annotations

import ast
from pathlib import Path

import celery_lease

PACKAGE = Path(celery_lease.__file__).parent
WRITES = {"insert", "update", "delete"}
#: The transitions themselves; the migrations make the tables.
ALLOWED = ("store/transitions/", "store/migrations/")


def _writes(path: Path) -> list[str]:
    """Return the calls in a file that look like writes: ``sa.update(…)``, ``table.update()``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in WRITES:
            on = ast.unparse(function.value)
            if on in {"sa", "sqlalchemy", "postgresql", "mysql", "sqlite"} or "table" in on:
                found.append(f"{path.name}:{node.lineno} {on}.{function.attr}")
        elif isinstance(function, ast.Name) and function.id in WRITES:
            found.append(f"{path.name}:{node.lineno} {function.id}")
    return found


def _texts(path: Path) -> list[str]:
    """Return string constants in a file that look like writing SQL."""
    starts = ("UPDATE ", "INSERT ", "DELETE FROM ", "REPLACE INTO ")
    return [
        f"{path.name}:{node.lineno} {node.value[:40]!r}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.lstrip().upper().startswith(starts)
    ]


def _elsewhere() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(ALLOWED)
    ]


def test_no_row_is_written_outside_the_transitions() -> None:
    found = [call for path in _elsewhere() for call in (*_writes(path), *_texts(path))]

    # The one word of SQL that a dialect lends to ``submit``.
    assert [call for call in found if not call.startswith("dialects.py")] == []
    assert len([call for call in found if call.startswith("dialects.py")]) <= 1


def test_the_search_sees_the_writes_that_there_are() -> None:
    """Else the test above would pass on anything."""
    inside = (PACKAGE / "store" / "transitions").glob("*.py")

    assert len([call for path in inside for call in _writes(path)]) > 15


def test_only_the_store_knows_sqlalchemy() -> None:
    outside = [path for path in _elsewhere() if path.relative_to(PACKAGE).parts[0] != "store"]

    assert [path.name for path in outside if "import sqlalchemy" in path.read_text()] == []
    assert [path.name for path in outside if "from sqlalchemy" in path.read_text()] == []
