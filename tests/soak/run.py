"""One soak from its start to its verdict."""

from __future__ import annotations

import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.soak import checker, evidence
from tests.soak.chaos import Chaos
from tests.soak.checker import VANISHED, Violation
from tests.soak.evidence import Evidence
from tests.soak.load import Load
from tests.soak.place import Place
from tests.support.waiting import eventually

#: violations that a report shows in full
SHOWN = 50
#: jobs that may wait before the load pauses
BACKLOG = 150


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Args:
        broker: ``redis`` or ``rabbitmq``.
        store: ``postgresql``, ``mariadb`` or ``sqlite``.
        minutes: of chaos.
        seed: of load and chaos.
        rate: jobs a second.
        pause: seconds between two faults, on average.
        drain: seconds that the last jobs get once all is well again.
        only: names of the faults to choose from, empty for all.
    """

    broker: str = "redis"
    store: str = "postgresql"
    minutes: float = 15.0
    seed: int = 1
    rate: float = 6.0
    pause: float = 2.0
    drain: float = 180.0
    only: tuple[str, ...] = ()


def soak(
    plan: Plan, *, say: Callable[[str], object] = print
) -> tuple[dict[str, Any], Evidence, list[Violation]]:
    """Run a soak; return its report, what it saw, and the violations.

    Logs stay where they are if there is a violation, and are removed if there is none.
    """
    started = datetime.now(timezone.utc)
    with Place(broker=plan.broker, store=plan.store) as place:
        say(f"{plan}: logs in {place.folder}")
        load, chaos = _rage(place, plan, say)
        say(f"all is well again; {len(load.promises.job_ids)} jobs promised; waiting for the last")
        took = _drain(place, load, plan.drain)
        # What still runs is a zombie, and may yet do wrong.
        place.stop_processes()
        seen = evidence.read(
            place.store_url,
            promised=load.promises.job_ids,
            follows=load.promises.follows,
            app=place.app,
        )
    found = checker.violations(seen)
    report = _report(plan, seen, found, chaos, started=started)
    report["refused_submissions"] = load.promises.refused
    report["drain_seconds"] = round(took, 1)
    if found:
        _keep(seen, found, chaos, place.folder)
    else:
        shutil.rmtree(place.folder, ignore_errors=True)
    return report, seen, found


def _rage(place: Place, plan: Plan, say: Callable[[str], object]) -> tuple[Load, Chaos]:
    """Send jobs and do harm for as long as planned; return when all has been put right."""
    place.start()
    load = Load(place.new_app(), seed=plan.seed, rate=plan.rate, is_full=_fullness(place.store_url))
    chaos = Chaos(place, seed=plan.seed, pause=plan.pause, only=plan.only)
    load.start()
    _let_it_rage(chaos, plan.minutes * 60, say)
    load.stop()
    chaos.end()
    load.join()
    return load, chaos


def _let_it_rage(chaos: Chaos, seconds: float, say: Callable[[str], object]) -> None:
    """Step until the time is over. A tick of the loop, not a wait for anything."""
    end = time.monotonic() + seconds
    said = time.monotonic()
    while time.monotonic() < end:
        chaos.step()
        time.sleep(0.05)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            say(f"{(end - said) / 60:.0f} minutes left; {sum(chaos.counts.values())} faults")


def _drain(place: Place, load: Load, seconds: float) -> float:
    """Wait until everything is final and settled, or the time is over; return how long it took."""
    began = time.monotonic()
    promises = load.promises

    def is_done() -> bool:
        if evidence.unfinished(place.store_url):
            return False
        seen = evidence.read(
            place.store_url, promised=promises.job_ids, follows=promises.follows, app=None
        )
        return not any(one.rule in {"canvas", "live"} for one in checker.violations(seen))

    try:
        eventually(is_done, timeout=seconds, interval=0.5)
    except AssertionError:
        # The checker says what is missing.
        return time.monotonic() - began
    return time.monotonic() - began


def _fullness(store_url: str) -> Callable[[], bool]:
    """Return a question that is put to the store once in a second at most."""
    known = {"at": 0.0, "waiting": 0}

    def is_full() -> bool:
        if time.monotonic() - known["at"] > 1:
            try:
                known["waiting"] = len(evidence.unfinished(store_url))
            except Exception:
                # The store is away, which is what chaos does; publishing will tell.
                known["waiting"] = 0
            known["at"] = time.monotonic()
        return known["waiting"] > BACKLOG

    return is_full


def _report(
    plan: Plan, seen: Evidence, found: list[Violation], chaos: Chaos, *, started: datetime
) -> dict[str, Any]:
    attempts = [attempt for rows in seen.attempts.values() for attempt in rows]
    return {
        "broker": plan.broker,
        "store": plan.store,
        "minutes": plan.minutes,
        "seed": plan.seed,
        "started_at": started.isoformat(timespec="seconds"),
        "versions": {
            "celery": version("celery"),
            "celery-lease": version("celery-lease"),
            "python": platform.python_version(),
        },
        "jobs": len(seen.jobs),
        "attempts": len(attempts),
        "effects": sum(line.kind == "effect" for lines in seen.witness.values() for line in lines),
        "job_states": _counted(job.state for job in seen.jobs.values()),
        "attempt_states": _counted(attempt.state for attempt in attempts),
        "recovered": sum(
            job.state == "succeeded" and any(a.state in VANISHED for a in seen.attempts[job.id])
            for job in seen.jobs.values()
        ),
        # What a stale attempt brought back too late, and nobody took.
        "rejected": sum(attempt.rejected_at is not None for attempt in attempts),
        "faults": dict(sorted(chaos.counts.items())),
        "unplanned_ends": chaos.unplanned,
        "violations": len(found),
        "violations_by_rule": _counted(one.rule for one in found),
        "violation_list": [asdict(one) for one in found[:SHOWN]],
    }


def _keep(seen: Evidence, found: list[Violation], chaos: Chaos, folder: Path) -> None:
    """Write what was done when, and all that was seen of jobs with violations, beside the logs."""
    done = "".join(f"{at:8.3f} {text}\n" for at, text in chaos.log)
    (folder / "chaos.log").write_text(done, encoding="utf-8")
    with (folder / "violations.txt").open("w", encoding="utf-8") as file:
        for job_id in dict.fromkeys(one.job_id for one in found):
            rows = [
                *(one for one in found if one.job_id == job_id),
                seen.jobs.get(job_id),
                *seen.attempts.get(job_id, ()),
                *seen.witness.get(job_id, ()),
                seen.results.get(job_id),
            ]
            file.writelines(f"{row}\n" for row in rows)
            file.write("\n")


def _counted(words: Any) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))
