"""What a job of the demo does: count what is in some source files. Pure, and the same everywhere.

The leased jobs and the plain sequential run that they are compared with both call ``add``; a
job that goes on from a checkpoint begins with the totals so far.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Totals:
    """What was counted in some files.

    Attributes:
        files: how many.
        lines: in all of them.
        unreadable: how many of them ``tokenize`` refuses; their tokens are not counted.
        tokens: how many by kind (``NAME``, ``OP``, ``COMMENT`` …).
        digest: over all bytes, in the order of the files.
    """

    files: int = 0
    lines: int = 0
    unreadable: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    digest: str = ""

    def add(self, source: bytes) -> None:
        """Count one file."""
        self.files += 1
        self.lines += len(source.splitlines())
        try:
            self.tokens += _kinds(source)
        except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
            self.unreadable += 1
        # A chain, so that a later attempt can go on with it where an earlier one was killed.
        self.digest = hashlib.sha256(self.digest.encode() + source).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold: a job's checkpoint and its result."""
        return {
            "files": self.files,
            "lines": self.lines,
            "unreadable": self.unreadable,
            "tokens": dict(sorted(self.tokens.items())),
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Totals:
        """Return totals again; from None those of no file."""
        if value is None:
            return cls()
        return cls(**{**value, "tokens": Counter(value["tokens"])})


def index_plainly(root: Path, files: Iterable[str]) -> Totals:
    """Count some files one after the other, with no Celery anywhere."""
    totals = Totals()
    for name in files:
        totals.add((root / name).read_bytes())
    return totals


def grand_total(results: Iterable[dict[str, Any]]) -> Totals:
    """Return the sum of some jobs' results; its digest is over their digests, in that order."""
    total = Totals()
    for result in results:
        one = Totals.from_json(result)
        total.files += one.files
        total.lines += one.lines
        total.unreadable += one.unreadable
        total.tokens += one.tokens
        total.digest = hashlib.sha256((total.digest + one.digest).encode()).hexdigest()
    return total


def _kinds(source: bytes) -> Counter[str]:
    readline = io.BytesIO(source).readline
    return Counter(tokenize.tok_name[token.type] for token in tokenize.tokenize(readline))
