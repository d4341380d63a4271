"""The real input of the demo: the Python standard library of this machine, package by package.

Left out is what is no library to import (tests, bundled wheels, the editor and its demos) and
what is installed beside it. Modules that are in no package go by the dozen, named for the
first and the last of them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: A few hundred files are work enough for a few seconds; what is beyond is left out.
MOST_FILES = 450
#: Modules outside of packages that make one job.
MODULES_A_JOB = 24
_LEADING_ROLES = 2
_FILES_TO_LEAD = 4
_LEFT_OUT = frozenset(
    {
        "__phello__",
        "__pycache__",
        "_bundled",
        "dist-packages",
        "idle_test",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class NoLibrary(Exception):
    """Raised when this Python has no standard library in source form on disk."""


@dataclass(frozen=True, slots=True)
class Package:
    """One job's worth of the standard library.

    Attributes:
        name: the package, or ``first … last`` of some modules that are in none.
        files: paths below the library's folder, sorted.
        size: bytes of all of them.
        is_package: False for modules that are in none.
    """

    name: str
    files: tuple[str, ...]
    size: int
    is_package: bool = True


def library_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def packages(root: Path, *, most_files: int = MOST_FILES) -> list[Package]:
    """Return the library's packages, the largest first, then its modules as far as there is room.

    Args:
        root: ``library_root()``.
        most_files: files in all, at most; what would go beyond is left out whole.

    Raises:
        NoLibrary: there is nothing like a standard library there.
    """
    found = sorted(_all(root), key=lambda one: (not one.is_package, -one.size, one.name))
    taken: list[Package] = []
    files = 0
    for package in found:
        if files + len(package.files) <= most_files:
            taken.append(package)
            files += len(package.files)
    if sum(map(_can_lead, taken)) < _LEADING_ROLES:
        raise NoLibrary(f"no Python sources of the standard library in {root}")
    return taken


def leading_roles(chosen: list[Package]) -> tuple[Package, Package]:
    """Return the two largest real packages: one is to be killed, the other to be frozen."""
    first, second = [package for package in chosen if _can_lead(package)][:_LEADING_ROLES]
    return first, second


def _can_lead(package: Package) -> bool:
    # Enough files for a middle to be killed in.
    return package.is_package and len(package.files) >= _FILES_TO_LEAD


def _all(root: Path) -> Iterator[Package]:
    if not root.is_dir():
        return
    modules = sorted(entry for entry in root.glob("*.py") if entry.is_file())
    for start in range(0, len(modules), MODULES_A_JOB):
        some = modules[start : start + MODULES_A_JOB]
        name = f"{some[0].stem} … {some[-1].stem}"
        yield _package(name, some, root, is_package=False)
    for folder in sorted(root.iterdir()):
        if folder.name not in _LEFT_OUT and (folder / "__init__.py").is_file():
            yield _package(folder.name, sorted(_sources(folder)), root)


def _sources(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name in _LEFT_OUT:
            continue
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.suffix == ".py":
            yield entry


def _package(name: str, files: list[Path], root: Path, *, is_package: bool = True) -> Package:
    return Package(
        name=name,
        files=tuple(str(file.relative_to(root)) for file in files),
        size=sum(file.stat().st_size for file in files),
        is_package=is_package,
    )
