"""``python -m bench``: run the measurements and write what they say into ``bench/results/``."""

from __future__ import annotations

import argparse
import random
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import beat, bulk, machine, past, recovery, report, throughput
from bench.place import Place
from bench.systems import SYSTEMS
from tests.support.folders import remove_abandoned
from tests.support.servers import PostgreSQL, Valkey

PARTS = ("throughput", "bulk", "beat", "past", "recovery")


def main() -> int:
    """Run; return the exit code."""
    wanted = _arguments().parse_args()
    for server in (PostgreSQL, Valkey):
        reason = server.unavailable_reason()
        if reason is not None:
            print(reason, file=sys.stderr)
            return 2
    remove_abandoned()
    with Place() as place:
        results = _measure(place, wanted)
    paths = report.write(results, wanted.folder, wanted.name)
    print(report.text_of(results))
    print("written: " + ", ".join(path.name for path in paths), file=sys.stderr)
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of them (default: all)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, help="no-op jobs in a run (default: 5000)")
    parser.add_argument("--repetitions", type=int, help="of the throughput runs (default: 3)")
    parser.add_argument("--history", type=int, help="finished jobs (default: 1000000)")
    parser.add_argument("--kills", type=int, help="of each kind of recovery (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="of the shuffled order")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="latest", help="of the two files written")
    return parser


def _measure(place: Place, wanted: argparse.Namespace) -> dict[str, Any]:
    parts = wanted.parts.split(",")
    quick = wanted.quick
    sizes = throughput.Sizes(
        jobs=wanted.jobs or (200 if quick else 5000),
        singles=5 if quick else 70,
        repetitions=wanted.repetitions or (1 if quick else 3),
    )
    results: dict[str, Any] = {
        "title": "celery-lease beside plain Celery",
        "facts": {
            "date": datetime.now(timezone.utc).date().isoformat(),
            **machine.facts(place.folder),
            **place.settings(),
        },
        "counted_by": (
            "Counted by pg_stat_statements."
            if place.has_statements
            else "Counted by SQLAlchemy's events: this PostgreSQL lacks pg_stat_statements."
        ),
        "jobs": sizes.jobs,
        "repetitions": sizes.repetitions,
        "seed": wanted.seed,
        "runs": [],
    }
    if "throughput" in parts:
        results["runs"] = _throughput(place, wanted, sizes)
    if "bulk" in parts:
        results["bulk"] = bulk.run(
            place, jobs=50 if quick else 5000, rounds=1 if quick else sizes.repetitions
        )
    if "beat" in parts:
        results["beat"] = [
            beat.run(place, leases=leases, beats=5)
            for leases in ((1, 20) if quick else (1, 50, 500))
        ]
    if "past" in parts:
        results["past"] = past.run(
            place,
            history=wanted.history or (2000 if quick else 1_000_000),
            operations=10 if quick else 100,
            rounds=2 if quick else 4,
        )
    if "recovery" in parts:
        results["recovery"] = recovery.run(place, kills=wanted.kills or (2 if quick else 50))
    return results


def _throughput(
    place: Place, wanted: argparse.Namespace, sizes: throughput.Sizes
) -> list[dict[str, Any]]:
    order = random.Random(wanted.seed)
    runs = []
    for repetition in range(sizes.repetitions):
        names = wanted.systems.split(",")
        order.shuffle(names)
        for name in names:
            found = throughput.run(place, SYSTEMS[name], sizes)
            found |= {"system": name, "repetition": repetition}
            print(
                f"{repetition + 1}/{sizes.repetitions} {name}: "
                f"enqueue {found['enqueue_per_second']:.0f}/s, "
                f"drain {found['drain_per_second']:.0f}/s",
                file=sys.stderr,
                flush=True,
            )
            runs.append(found)
    return runs


if __name__ == "__main__":
    sys.exit(main())
