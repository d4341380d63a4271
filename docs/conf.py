"""Sphinx' settings, and the pages that are made from the code at build time.

The table of settings and the reference of the commands are generated where a page says
``<!-- made from the code: NAME -->``: there is no copy that could grow old.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Any

from celery_lease import settings as lease_settings

project = "celery-lease"
author = "The celery-lease authors"
copyright = "The celery-lease authors"
release = version = version_of("celery-lease")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_mock_imports = ["django"]  # the pages are made without it
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Celery's own pages have Celery's docstrings
html_theme = "furo"
html_title = "celery-lease"
html_static_path = ["_static"]

MARK = re.compile(r"^<!-- made from the code: (\w+) -->$", re.MULTILINE)


# -- the settings --------------------------------------------------------------------------------


def settings_page() -> Iterator[str]:
    """Give the reference of the settings, one section each."""
    for row in lease_settings.as_rows():
        yield f"## `{row.name}`\n\n{row.summary}\n"
        yield f"- Default: {shown(row.default, row.unit)}"
        yield f"- Type: {row.type}" + (f", in {row.unit}" if row.unit == "seconds" else "")
        if row.task_attribute:
            yield f"- On a task: the option `{row.task_attribute}` overrides it"
        yield ""


def settings_table() -> Iterator[str]:
    """Give the settings as one table."""
    yield "| setting | default | unit | on a task |\n|---|---|---|---|"
    for row in lease_settings.as_rows():
        link = f"[`{row.name}`](#{row.name.replace('_', '-')})"
        on_task = "yes" if row.task_attribute else ""
        yield f"| {link} | {shown(row.default, '')} | {row.unit} | {on_task} |"


def shown(value: object, unit: str) -> str:
    """Give a default as one would write it, with a large number of seconds in days."""
    text = repr(value) if isinstance(value, str | bool | None) else json.dumps(value)
    days = value / 86400 if isinstance(value, float) and unit == "seconds" else 0.0
    return f"`{text}`" + (f" ({days:g} days)" if days >= 1 else "")


# -- the commands --------------------------------------------------------------------------------


def commands_page() -> Iterator[str]:
    """Give the reference of ``celery lease``, one section a command."""
    if find_spec("celery_lease.cli") is None:
        yield "This release has no commands."
        return
    for name, command in sorted(import_module("celery_lease.cli").lease.commands.items()):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        needs_app = "" if name == "demo" else "-A proj "
        words = [
            f"celery {needs_app}lease {name}",
            *(a.metavar or a.name.upper() for a in arguments),
        ]
        call = " ".join([*words, "[OPTIONS]"])
        yield f"## `{name}`\n\n```text\n{call}\n```\n\n{inspect.cleandoc(command.help or '')}\n"
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        if options:
            yield "| option | |\n|---|---|"
            yield from (option_row(option) for option in options)
        yield ""


def option_row(option: Any) -> str:
    """Give one option as a row of a table."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    choices = getattr(option.type, "choices", ())
    text = (option.help or "").strip()
    if choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    if option.show_default and option.default is not None:
        text += f" Default: `{option.default}`."
    return f"| {names} | {text} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "settings_page": settings_page,
    "settings_table": settings_table,
    "commands_page": commands_page,
}


def fill_in(app: Any, _docname: str, source: list[str]) -> None:
    """Replace the marks of a page by what the code says."""
    if MARK.search(source[0]):
        # It depends on modules that Sphinx does not watch all of: read it at each build.
        app.env.note_reread()
        source[0] = MARK.sub(lambda mark: "\n".join(PAGES[mark[1]]()), source[0])


def setup(app: Any) -> None:
    """Connect the pages that are made."""
    app.connect("source-read", fill_in)
