"""Which traces are replayed: together they take every kind of step that asks the store.

A *kind* is a step with what the job's row looks like before and after. To find a trace for each
needs the full exploration, so they are kept in ``traces.json``; after a change of the model
write them anew::

    python -m tests.model.sample

A trace that the model no longer has fails its replay; that a kind is missing is seen with
CELERY_LEASE_LONG=1.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.model.bounds import SCENARIOS, Bounds, first_state
from tests.model.explore import Graph, explore, play
from tests.model.rules import ALL
from tests.model.state import State, Step, canonical
from tests.model.steps import steps

Kind = tuple[str, ...]
SILENT = frozenset(
    {"receive", "hear", "check", "body", "publish", "die", "restart", "give up", "send",
     "close books", "resend", "double", "lose", "runner's deadline", "stop requested"}
)  # fmt: skip
"""Steps that ask the store nothing: one of each is enough, unless a publish was refused."""
KEPT = Path(__file__).with_name("traces.json")


@dataclass(frozen=True, slots=True)
class Trace:
    """A way through a scenario."""

    scenario: str
    steps: list[Step]


def kind(state: State, step: Step, after: State) -> Kind:
    """Return what is told apart."""
    if step.verb in SILENT and step.answer != "refused":
        return (step.actor, step.verb)
    job, then = state.job, after.job
    asked = job.state == "running" and state.attempts[-1].asked
    before = (job.state, str(job.lease), str(job.settled), job.bound, f"asked {int(asked)}")
    outcome = state.workers[step.place].outcome if step.actor == "worker" else ""
    losses = f"losses {then.lost - job.lost}"
    return (step.actor, step.verb, step.answer, *before, then.state, losses, outcome)


def kinds(graph: Graph) -> Iterator[tuple[int, Step, Kind]]:
    """Yield each step of an exploration, the nearest first, with its kind."""
    for number, state in enumerate(graph.states):
        for step, raw in steps(state, graph.bounds, ALL):
            yield number, step, kind(state, step, raw)


def cover(scenarios: dict[str, Bounds]) -> list[Trace]:
    """Return shortest ways that together take every kind of step."""
    seen: set[Kind] = set()
    found = []
    for name, bounds in scenarios.items():
        graph = explore(bounds)
        for number, step, which in kinds(graph):
            if which not in seen:
                trace = [*graph.trace(number), step]
                found.append(Trace(name, _prolonged(bounds, trace, seen)))
    return found


def _prolonged(bounds: Bounds, trace: list[Step], seen: set[Kind]) -> list[Step]:
    """Return a trace with what is new from its end on: one trace serves for several kinds."""
    state = canonical(first_state(bounds))
    for played in play(bounds, ALL, trace):
        seen.add(kind(played.before, played.step, played.after))
        state = canonical(played.after)
    while True:
        ways = ((s, raw, kind(state, s, raw)) for s, raw in steps(state, bounds, ALL))
        way = next((way for way in ways if way[2] not in seen), None)
        if way is None:
            return trace
        seen.add(way[2])
        trace = [*trace, way[0]]
        state = canonical(way[1])


def walks(scenarios: dict[str, Bounds], *, count: int, seed: int = 20) -> list[Trace]:
    """Return seeded walks through each scenario."""
    choice = random.Random(seed)
    return [
        Trace(name, _walk(bounds, choice))
        for name, bounds in scenarios.items()
        for _ in range(count)
    ]


def _walk(bounds: Bounds, choice: random.Random) -> list[Step]:
    state = canonical(first_state(bounds))
    walked: list[Step] = []
    for _ in range(40):
        ways = list(steps(state, bounds, ALL))
        if not ways:
            break
        step, raw = choice.choice(ways)
        walked.append(step)
        state = canonical(raw)
    return walked


def kept() -> list[Trace]:
    """Return the traces of ``traces.json``."""
    return [
        Trace(scenario, [Step(*step) for step in trace])
        for scenario, trace in json.loads(KEPT.read_text())
    ]


def write() -> None:
    """Write ``traces.json`` anew."""
    lines = [json.dumps([t.scenario, t.steps], separators=(",", ":")) for t in cover(SCENARIOS)]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} traces, {sum(len(t.steps) for t in kept())} steps")


if __name__ == "__main__":
    write()
