"""``examples/canvas``: a worker is killed in the middle of a chord, and what its README shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "canvas"


def test_a_chord_whose_worker_is_killed_has_its_total_all_the_same(
    project: Path,
    env: dict[str, str],
    run: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    options = {"cwd": project, "env": env, "concurrency": 3, "lean": False, "loglevel": "WARNING"}
    first = start_worker("tasks", name="first", ready=False, **options)
    run("submit.py")
    for number in (1, 301, 601):
        first.wait_log(f"counting from {number}", timeout=30)

    first.kill_group()
    second = start_worker("tasks", name="second", ready=False, **options)

    eventually(lambda: "tasks.total succeeded" in run("look.py"), timeout=60, interval=1.0)
    seen = run("look.py").replace("@test", "@here")
    shown = re.search(r"look\.py\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    # Of parts that were recorded in the same moment any may come first.
    assert jobs_of(seen) == jobs_of(shown[1])
    assert "no total" not in first.log() + second.log()


def jobs_of(text: str) -> list[str]:
    return sorted(re.split(r"^(?=tasks)", text, flags=re.MULTILINE))


def test_its_readme_names_the_files_and_the_task_that_there_are() -> None:
    text = (EXAMPLE / "README.md").read_text()

    for script in re.findall(r"python (\w+\.py)", text):
        assert (EXAMPLE / script).is_file()
    assert set(re.findall(r"-A (\w+)", text)) == {"tasks"}
