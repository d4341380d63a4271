"""``examples/idempotency_keys``: asked for three times, done once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.waiting import eventually
from tests.support.workers import ROOT, CeleryWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "idempotency_keys"


def test_it_does_what_its_readme_shows(
    tmp_path: Path, start_worker: Callable[..., CeleryWorker]
) -> None:
    project = shutil.copytree(EXAMPLE, tmp_path / "idempotency_keys")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def submit() -> str:
        done = subprocess.run(
            [sys.executable, "submit.py"],
            cwd=project,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = re.findall(r"python submit.py\n(.*?)\$", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert [submit()] == shown
    start_worker("tasks", cwd=project, env=env, concurrency=1, lean=False)
    charged = project / "charged.txt"
    eventually(charged.exists, timeout=30)

    assert submit() == shown[0]
    assert list((project / "queue").glob("*.msg")) == []
    assert charged.read_text() == "order 7: 500 cents\n"
