"""``examples/quickstart``: a real worker, killed in mid-job, and what its README promises."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "quickstart"
PAGES = 20


def test_a_killed_worker_s_job_goes_on_from_its_checkpoint(
    project: Path,
    env: dict[str, str],
    run: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
) -> None:
    options = {"cwd": project, "env": env, "concurrency": 1, "lean": False}
    one = start_worker("tasks", name="one", **options)
    job_id = run("submit.py").strip()

    # The pages go on while the store is asked: it has a checkpoint after about a second.
    eventually(lambda: len(list((project / "pages").iterdir())) >= 5, timeout=30)
    one.kill_group()
    half_done = len(list((project / "pages").iterdir()))
    start_worker("tasks", name="two", **options)

    eventually(lambda: len(list((project / "pages").iterdir())) == PAGES, timeout=60)
    eventually(lambda: f"succeeded {job_id}" in run("look.py"), timeout=20, interval=0.5)
    assert half_done < PAGES
    seen = run("look.py")
    assert re.search(r"token 1: one@test lost", seen), seen
    assert re.search(r'token 2: two@test completed \{"done":20,"total":20\}', seen), seen
    pages = [page.read_text() for page in sorted((project / "pages").iterdir())]
    tokens = [int(re.findall(r"token (\d)", page)[0]) for page in pages]
    assert len(pages) == PAGES
    assert tokens == sorted(tokens)
    # Not from the start: that is what the checkpoint is for.
    assert tokens[0] == 1
    assert tokens[-1] == 2


def test_its_readme_names_the_files_and_the_task_that_there_are() -> None:
    text = (EXAMPLE / "README.md").read_text()

    for script in re.findall(r"python (\w+\.py)", text):
        assert (EXAMPLE / script).is_file()
    assert re.findall(r"-A (\w+)", text)
    assert set(re.findall(r"-A (\w+)", text)) == {"tasks"}
