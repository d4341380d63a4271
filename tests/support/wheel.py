"""``python -m tests.support.wheel dist``: does the built wheel work, installed beside nothing else?

A file left out of the wheel (a migration, ``py.typed``, a module) is not missed by tests that run
in the checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

_LOOK = """
import pathlib, celery_lease
where = pathlib.Path(celery_lease.__file__).parent
assert "site-packages" in str(where), where
have = {str(p.relative_to(where)) for p in where.rglob("*") if p.is_file()}
missing = set(filter(None, WANTED)) - have
assert not missing, f"not in the wheel: {sorted(missing)}"
"""


def main(folder: Path) -> None:
    """Install the wheel of a folder into a new venv and use it from elsewhere."""
    (wheel,) = folder.glob("*.whl")
    package = Path(__file__).resolve().parents[2] / "celery_lease"
    wanted = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with tempfile.TemporaryDirectory() as elsewhere:
        home = Path(elsewhere) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        pip = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
        for arguments in (
            [*pip, f"celery-lease[cli] @ {wheel.resolve().as_uri()}"],
            ["-c", f"WANTED = {sorted(wanted)!r}\n{_LOOK}"],
            ["-m", "celery", "lease", "--help"],
        ):
            subprocess.run([python, *arguments], cwd=elsewhere, check=True)
    print(f"{wheel.name}: complete, and works by itself")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
