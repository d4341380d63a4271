"""The results as JSON and as a table, with what was to be reached."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.systems import SYSTEMS

Runs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    value: str
    digits: int


_COLUMNS = (
    _Column("enqueue/s", "enqueue_per_second", 0),
    _Column("drain/s", "drain_per_second", 0),
    _Column("enqueue CPU ms/job", "enqueue_cpu_ms", 2),
    _Column("worker CPU ms/job", "worker_cpu_ms", 2),
    _Column("servers' CPU ms/job", "server_cpu_ms", 2),
    _Column("RSS MB/process", "process_rss_mb", 1),
    _Column("PSS MB/process", "process_pss_mb", 1),
)
_COUNTS = (
    _Column("SQL to submit", "enqueue_statements", 2),
    _Column("SQL to run", "run_statements", 2),
    _Column("all SQL in the drain", "run_statements_all", 2),
    _Column("round trips to submit", "enqueue_round_trips", 2),
    _Column("round trips to run", "run_round_trips", 2),
    _Column("Redis commands to submit", "enqueue_redis_commands", 1),
    _Column("Redis commands to run", "run_redis_commands", 1),
    _Column("WAL bytes to run", "run_wal_bytes", 0),
    _Column("worker's start s", "worker_start_seconds", 2),
)


_COUNTS_TEXT = (
    "*To submit* and *to run* count the statements that every job has; *all* has the reaper's, "
    "the settling and the start of the connections in it. "
)
_IDLE_TEXT = (
    "*start*: enqueue call → body has run; *done*: → the result is stored. 50th / 99th percentile "
    "of all repetitions."
)


def write(results: dict[str, Any], folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``NAME.json`` and ``NAME.md``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_text = folder / f"{name}.json", folder / f"{name}.md"
    as_json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    as_text.write_text(text_of(results))
    return as_json, as_text


def text_of(results: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    parts = [f"# {results['title']}", _facts(results)]
    if results["runs"]:
        runs = results["runs"]
        parts += [
            "## Throughput, CPU, memory",
            "Median (least to most) of the repetitions.",
            _table(runs, _COLUMNS),
            "## Statements and round trips a job",
            _COUNTS_TEXT + results["counted_by"],
            _table(runs, _COUNTS),
            "## One job on an idle worker, milliseconds",
            _IDLE_TEXT,
            _idle(runs),
        ]
    if results.get("bulk"):
        parts += ["## Many jobs of one call", _bulk(results["bulk"])]
    if results.get("beat"):
        parts += ["## Heartbeat", _beat(results["beat"])]
    if results.get("past"):
        parts += ["## A long history", _past(results["past"])]
    if results.get("recovery"):
        parts += ["## Recovery, seconds from the signal to the next body", _recovery(results)]
    parts += ["## What was to be reached", _goals(goals(results))]
    return "\n\n".join(parts) + "\n"


# --- what was to be reached ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """One number that was to be reached.

    Attributes:
        text: what.
        wanted: in words.
        found: in words.
        is_reached: whether.
    """

    text: str
    wanted: str
    found: str
    is_reached: bool


def goals(results: dict[str, Any]) -> list[Goal]:
    """Return every goal that these results can say something about."""
    runs = results["runs"]
    found = [*_ratio_goals(runs), *_count_goals(runs), *_memory_goals(runs)]
    for way in results.get("bulk", {}).get("ways", ()):
        if way["title"] in ("leased, a group", "leased, submit_many"):
            text, ratio = f"{way['title']} / a group of plain tasks", way["ratio"]
            found.append(Goal(text, "≤ 1.5", f"{ratio:.2f}", ratio <= 1.5))  # noqa: PLR2004
    if results.get("beat"):
        beat = results["beat"][-1]
        statements, hot = beat["statements_per_beat"], beat["hot_share"]
        found += [
            Goal("statements a beat", "1", f"{statements:.2f}", round(statements, 2) <= 1),
            Goal("HOT share of renewals", "≥ 90 %", f"{hot:.1%}", hot >= 0.9),  # noqa: PLR2004
        ]
    if results.get("past"):
        for name in ("claim", "complete", "pass", "list newest", "list next page"):
            ratio = results["past"]["operations"][name]["ratio"]
            text = f"{name}, long history / short"
            found.append(Goal(text, "≤ 1.5", f"{ratio:.2f}", ratio <= 1.5))  # noqa: PLR2004
    for way in results.get("recovery", ()):
        most, bound = way["seconds"][-1], way["bound"]
        text = f"{way['title']}: the next body, at most"
        found.append(Goal(text, f"< {bound:g} s", f"{most:.2f} s", most < bound))
    return found


def _ratio_goals(runs: Runs) -> Iterable[Goal]:
    for metric, other, wanted in (
        ("drain_per_second", "late-redis", 0.6),
        ("drain_per_second", "late-sql", 1.3),
        ("enqueue_per_second", "late-redis", 0.45),
    ):
        ratios = ratios_of(runs, metric, "lease", other)
        if ratios:
            middle = statistics.median(ratios)
            yield Goal(
                f"{metric.split('_')[0]}, celery-lease / {SYSTEMS[other].title}",
                f"≥ {wanted}",
                f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                middle >= wanted,
            )


def _count_goals(runs: Runs) -> Iterable[Goal]:
    for value, text, wanted in (
        ("enqueue_statements", "statements to submit", 1),
        ("run_statements", "statements to run", 2),
    ):
        numbers = [run[value] for run in runs if run["system"] == "lease"]
        if numbers:
            middle = statistics.median(numbers)
            yield Goal(text, str(wanted), f"{middle:.2f}", round(middle, 2) <= wanted)


def _memory_goals(runs: Runs) -> Iterable[Goal]:
    for kind in ("rss", "pss"):
        value = f"process_{kind}_mb"
        more = _both(runs, value, "lease", "late-redis", lambda mine, other: mine - other)
        if more:
            middle = statistics.median(more)
            yield Goal(
                f"{kind.upper()} a process over late ack + Redis results",
                "≤ 20 MB",
                f"{middle:.1f} MB",
                middle <= 20,  # noqa: PLR2004
            )


def ratios_of(runs: Runs, metric: str, system: str, other: str) -> list[float]:
    """Return the ratio of two systems within each repetition."""
    return _both(runs, metric, system, other, lambda mine, theirs: mine / theirs)


def _both(
    runs: Runs, metric: str, system: str, other: str, compare: Callable[[float, float], float]
) -> list[float]:
    by_repetition: dict[int, dict[str, float]] = {}
    for run in runs:
        by_repetition.setdefault(run["repetition"], {})[run["system"]] = run[metric]
    return [
        compare(both[system], both[other])
        for both in by_repetition.values()
        if system in both and other in both
    ]


# --- tables -------------------------------------------------------------------------------------


def _facts(results: dict[str, Any]) -> str:
    facts = results["facts"]
    lines = [f"* {name}: {value}" for name, value in facts.items()]
    runs = results["runs"]
    if runs:
        others = [run["others_cores"] for run in runs]
        lines.append(
            f"* other load during the drains: median {statistics.median(others):.2f} cores, "
            f"at most {max(others):.2f}; stolen at most "
            f"{max(run['stolen_cores'] for run in runs):.2f}"
        )
        lines.append(
            f"* {results['jobs']} jobs a run, prefork with 2 children, "
            f"{results['repetitions']} repetitions in shuffled order (seed {results['seed']})"
        )
    return "\n".join(lines)


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(runs: Runs, columns: Iterable[_Column]) -> str:
    columns = list(columns)
    rows = []
    for name, system in SYSTEMS.items():
        of_system = [run for run in runs if run["system"] == name]
        if of_system:
            cells = [
                _spread([run[column.value] for run in of_system], column.digits)
                for column in columns
            ]
            rows.append([system.title, *cells])
    return _rows(["system", *(column.title for column in columns)], rows)


def _spread(numbers: list[float], digits: int) -> str:
    middle = f"{statistics.median(numbers):.{digits}f}"
    least, most = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return middle if least == most else f"{middle} ({least} to {most})"


def _idle(runs: Runs) -> str:
    rows = []
    for name, system in SYSTEMS.items():
        of_system = [run for run in runs if run["system"] == name]
        if of_system:
            starts = [ms for run in of_system for ms in run["idle_start_ms"]]
            dones = [ms for run in of_system for ms in run["idle_done_ms"]]
            rows.append([system.title, str(len(starts)), _percentiles(starts), _percentiles(dones)])
    return _rows(["system", "jobs", "start", "done"], rows)


def _percentiles(numbers: list[float]) -> str:
    if not numbers:
        return "-"
    ordered = sorted(numbers)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{statistics.median(ordered):.1f} / {last:.1f}"


def _bulk(found: dict[str, Any]) -> str:
    lines = [
        f"{found['jobs']} jobs a call, {found['rounds']} rounds; medians.",
        "",
        "| published as | ms/job | ratio |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {way['title']} | {way['ms']:.2f} | {way['ratio']:.2f} |" for way in found["ways"]]
    return "\n".join(lines)


def _beat(beats: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(beat["leases"]),
            f"{beat['statements_per_beat']:.2f}",
            f"{beat['round_trips_per_beat']:.2f}",
            f"{beat['beat_ms']:.1f}",
            f"{beat['wal_bytes_per_lease']:.0f}",
            f"{beat['hot_share']:.1%}",
        ]
        for beat in beats
    ]
    header = ("leases of a process", "statements", "round trips", "ms", "WAL bytes/lease", "HOT")
    return _rows(header, rows)


def _past(past: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['short_ms']:.2f}", f"{row['long_ms']:.2f}", f"{row['ratio']:.2f}"]
        for name, row in past["operations"].items()
    ]
    header = ("operation", "short, ms", f"with {past['history']:,} finished jobs more, ms", "ratio")
    return _rows(header, rows)


def _recovery(results: dict[str, Any]) -> str:
    rows = []
    for way in results["recovery"]:
        found = way["seconds"]
        late = found[math.ceil(0.95 * len(found)) - 1]
        rows.append(
            [
                way["title"],
                str(way["kills"]),
                f"{found[0]:.2f}",
                f"{statistics.median(found):.2f}",
                f"{late:.2f}",
                f"{found[-1]:.2f}",
                f"{way['bound']:g}",
            ]
        )
    return _rows(
        ("what ended", "times", "least", "median", "95th percentile", "most", "bound"), rows
    )


def _goals(found: list[Goal]) -> str:
    rows = [[goal.text, goal.wanted, goal.found, "yes" if goal.is_reached else "**no**"]
            for goal in found]  # fmt: skip
    return _rows(("what", "wanted", "found", "reached"), rows)
