"""What README and docs/ say of the code is so: tables, states, settings, links, code blocks."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from celery_lease import exceptions, messages
from celery_lease.lease import Lease
from celery_lease.settings import SETTINGS
from celery_lease.states import AttemptState, JobState
from celery_lease.store import transitions
from celery_lease.store.schema import build_tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TABLES = {table.name: table for table in build_tables().metadata.sorted_tables}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(page: Path, heading: str) -> str:
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text_of(page), re.DOTALL | re.MULTILINE
    )
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def table_rows(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


# --- schema.md ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_page_of_the_tables_names_each_column_in_its_order(name: str) -> None:
    columns = [f"`{column.name}`" for column in TABLES[name].columns]

    rows = table_rows(section(DOCS / "schema.md", f"`{name}`"))

    assert [row[0] for row in rows] == columns
    assert all(row[1].endswith((".", "…")) and row[2] for row in rows)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_who_writes_a_column_is_a_function_of_the_transitions(name: str) -> None:
    writers = [row[2] for row in table_rows(section(DOCS / "schema.md", f"`{name}`"))]

    named = set(chain.from_iterable(re.findall(r"`(\w+)`", writer) for writer in writers))

    assert [word for word in named if not callable(getattr(transitions, word, None))] == []


def test_the_page_of_the_tables_names_each_index() -> None:
    indexes = {f"`{index.name}`" for table in TABLES.values() for index in table.indexes}

    rows = table_rows(section(DOCS / "schema.md", "Indexes"))

    assert {row[0] for row in rows} == indexes


def test_no_index_names_what_a_heartbeat_writes() -> None:
    written = {"lease_expires_at", "last_renewed_at", "renewal_count", "progress", "checkpoint"}

    indexed = {c.name for t in TABLES.values() for index in t.indexes for c in index.columns}

    assert indexed & written == set()


# --- concepts.md --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawing", "states"), [("job-states.svg", JobState), ("attempt-states.svg", AttemptState)]
)
def test_a_diagram_shows_each_state(drawing: str, states: type[JobState | AttemptState]) -> None:
    texts = re.findall(r">([^<]+)<", text_of(DOCS / "_static" / drawing))
    words = set(re.findall(r"\w+", " ".join(texts)))

    missing = [state.value for state in states if state.value not in words]

    assert missing == []


@pytest.mark.parametrize(
    ("heading", "states"),
    [("The states of a job", JobState), ("The states of an attempt", AttemptState)],
)
def test_each_state_has_its_sentence(heading: str, states: type[JobState | AttemptState]) -> None:
    rows = table_rows(section(DOCS / "concepts.md", heading))

    assert [row[0] for row in rows] == [f"`{state.value}`" for state in states]


# --- api.md -------------------------------------------------------------------------------------


def test_what_the_lease_is_said_to_have_it_has() -> None:
    rows = table_rows(section(DOCS / "api.md", "The lease, as a body sees it"))

    members = [re.match(r"`(\w+)", row[0])[1] for row in rows]  # type: ignore[index]

    assert [name for name in members if not hasattr(Lease, name)] == []


# --- names, links, code -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_setting_that_does_not_exist(page: Path) -> None:
    known = {setting.name for setting in SETTINGS}
    known |= {column.name for table in TABLES.values() for column in table.columns}
    known |= {messages.VERSION_HEADER, messages.RECORDED_HEADER, messages.DISPATCH_HEADER}

    named = set(re.findall(r"(?<![\w./-])lease_[a-z_]+\b", text_of(page)))

    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_exception_that_does_not_exist(page: Path) -> None:
    from_celery = {"SoftTimeLimitExceeded", "ValidationError", "MemoryError", "CancelledError"}
    from_celery.add("TaskRevokedError")
    pattern = r"`(?:\w+\.)*([A-Z]\w+(?:Error|Lost|Exceeded|Interrupted|Unavailable|Mismatch))`"

    named = set(re.findall(pattern, text_of(page))) - from_celery

    assert [name for name in named if not hasattr(exceptions, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_file_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(page))
    files = [link for link in links if "://" not in link and not link.startswith("#")]

    assert [link for link in files if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_python_block_is_python(page: Path) -> None:
    for block in code_blocks(page, "python"):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "quickstart.md"], ids=lambda p: p.name)
def test_the_first_block_of_a_page_makes_an_app_whose_settings_are_right(
    page: Path, tmp_path: Path
) -> None:
    check = (
        "\nfrom celery_lease.extension import extension_of"
        "\napp.finalize()"
        "\nextension_of(app).check_at_start()"
        "\nassert rebuild._lease_protocol and rebuild.name in app.tasks"
    )
    program = code_blocks(page, "python")[0] + check

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
