"""What ``doctor`` says: findings. What they are made from is in ``facts``, how in ``checks``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Severity(str, Enum):
    """How bad a finding is; the worst first."""

    ERROR = "error"
    """Jobs are not run, or promises not kept, until somebody acts."""
    WARNING = "warning"
    """Works, and will hurt."""
    INFO = "info"
    """Good to know; nothing is wrong."""
    OK = "ok"

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        severity: how bad it is.
        name: of the check.
        found: what was found, one sentence.
        remedy: what to do, one sentence that names the settings; empty where nothing is to be done.
        facts: the same in JSON's types, for programs.
    """

    severity: Severity
    name: str
    found: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """Return it for ``--json``."""
        return {
            "severity": self.severity.value,
            "name": self.name,
            "found": self.found,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


def sorted_by_severity(findings: list[Finding]) -> list[Finding]:
    """Return findings with the worst first, otherwise in their order."""
    ranks = list(Severity)
    return sorted(findings, key=lambda finding: ranks.index(finding.severity))
