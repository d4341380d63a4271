"""``python -m tests.soak``: one soak, from options or the variables of ``make soak``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.soak import report
from tests.soak.place import BROKERS, STORES
from tests.soak.run import Plan, soak
from tests.support.folders import remove_abandoned


def main() -> int:
    """Run; return the exit code: 1 with a violation."""
    given = _arguments().parse_args()
    remove_abandoned()
    plan = Plan(
        broker=given.broker,
        store=given.store,
        minutes=given.minutes,
        seed=given.seed,
        rate=given.rate,
        pause=given.pause,
        only=tuple(given.only.split(",")) if given.only else (),
    )
    done, _, found = soak(plan, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(done, indent=2))
    if given.folder:
        print(f"written: {report.write(done, given.folder)}", file=sys.stderr)
    return 1 if found else 0


def _arguments() -> argparse.ArgumentParser:
    env = os.environ
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--broker", choices=BROKERS, default=env.get("BROKER") or "redis")
    parser.add_argument("--store", choices=STORES, default=env.get("STORE") or "postgresql")
    parser.add_argument("--minutes", type=float, default=float(env.get("MINUTES") or 15))
    parser.add_argument("--seed", type=int, default=int(env.get("SEED") or 1))
    parser.add_argument("--rate", type=float, default=6.0, help="jobs a second")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--only", default="", help="faults, comma-separated (default: all)")
    parser.add_argument(
        "--folder", type=Path, default=report.FOLDER, help="for the report (default: docs/soak)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
