"""A stranger's copy of an example, and its scripts run as a stranger runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.workers import ROOT


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the example that the test's module names as ``EXAMPLE``."""
    example: Path = request.module.EXAMPLE
    return shutil.copytree(example, tmp_path / example.name)


@pytest.fixture
def env() -> dict[str, str]:
    """Finds the package where it is not installed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def run(project: Path, env: dict[str, str]) -> Callable[..., str]:
    """Run Python in it, or in a folder of it, with these arguments; returns what it printed."""

    def run_it(*arguments: str, folder: str = ".") -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=project / folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_it
