"""``examples/idempotency_keys``: asked for three times, done once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "idempotency_keys"


def test_it_does_what_its_readme_shows(
    project: Path,
    env: dict[str, str],
    run: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    shown = re.findall(r"python submit.py\n(.*?)\$", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert [run("submit.py")] == shown
    start_worker("tasks", cwd=project, env=env, concurrency=1, lean=False)
    charged = project / "charged.txt"
    eventually(charged.exists, timeout=30)

    assert run("submit.py") == shown[0]
    assert list((project / "queue").glob("*.msg")) == []
    assert charged.read_text() == "order 7: 500 cents\n"
