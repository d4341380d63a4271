"""``examples/deploys``: a worker that is stopped as a deploy does it, and what its README says."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "deploys"
ROWS = 60


def test_a_stopped_worker_s_job_goes_on_with_the_next_row(
    project: Path,
    env: dict[str, str],
    run: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    options = {"cwd": project, "env": env, "concurrency": 1, "lean": False, "loglevel": "WARNING"}
    old = start_worker("tasks", name="old", ready=False, **options)
    job_id = run("submit.py").strip()
    old.wait_log("row 5,", timeout=30)
    new = start_worker("tasks", name="new", ready=False, **options)

    old.send(signal.SIGTERM)
    # 1 where it read a message that this broker, which is a folder, had half written.
    assert old.wait(30) in {0, 1}
    new.wait_log(f"row {ROWS - 1},", timeout=60)

    eventually(
        lambda: f"succeeded {job_id} lost 0" in run("look.py"),
        timeout=20,
        interval=0.5,
    )
    seen = run("look.py")
    assert re.search(r"token 1: old@test released hand-over", seen), seen
    assert re.search(r"token 2: new@test completed", seen), seen
    rows = [int(row) for row in re.findall(r"row (\d+), by", old.log() + new.log())]
    assert rows == list(range(ROWS))


def test_its_readme_names_the_files_and_the_task_that_there_are() -> None:
    text = (EXAMPLE / "README.md").read_text()

    for script in re.findall(r"python (\w+\.py)", text):
        assert (EXAMPLE / script).is_file()
    assert set(re.findall(r"-A (\w+)", text)) == {"tasks"}
