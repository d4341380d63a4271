"""The report of a soak: a JSON document, and one table over all of them for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "soak"

_HEADING = """\
---
orphan: true
---

# Soak

Made by `make soak` from the reports in this folder; each names its seed. What is done and what is
checked is in `tests/soak/`.

| broker | store | minutes | seed | jobs | attempts | recovered | faults | violations |
|---|---|---|---|---|---|---|---|---|
"""


def write(report: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Write a report beside the others, and the table of all; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['broker']}-{report['store']}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "index.md").write_text(table(folder), encoding="utf-8")
    return path


def table(folder: Path) -> str:
    """Return the page about all reports of a folder."""
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return _HEADING + "".join(f"{line(report)}\n" for report in reports)


def line(report: Mapping[str, Any]) -> str:
    """Return a report as a row of the table."""
    cells = (
        report["broker"],
        report["store"],
        f"{report['minutes']:g}",
        report["seed"],
        report["jobs"],
        report["attempts"],
        report["recovered"],
        sum(report["faults"].values()),
        report["violations"],
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"
