"""Breadth-first through all states of a scenario: invariants, shortest traces, ends.

Breadth-first, so that a counter-example is a shortest one. A state is kept once, whatever the
names of its actors; a trace gives the names back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model.bounds import Bounds, first_state
from tests.model.invariants import STATE_INVARIANTS, STEP_INVARIANTS
from tests.model.rules import ALL, Rules
from tests.model.state import State, Step, canonical, order
from tests.model.steps import steps


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant that does not hold, and the shortest way there."""

    invariant: str
    words: str
    trace: list[Step]


@dataclass(slots=True)
class Graph:
    """What an exploration has seen.

    Attributes:
        states: each state once, in the order found.
        parents: for each state the one it was found from, and by which step.
        edges: number of steps.
        back: for each state, those that lead to it without a fault.
        broken: the first invariant that does not hold, None if all do.
    """

    bounds: Bounds
    rules: Rules
    states: list[State] = field(default_factory=list)
    parents: list[tuple[int, Step | None]] = field(default_factory=list)
    edges: int = 0
    back: list[list[int]] = field(default_factory=list)
    broken: Broken | None = None

    def trace(self, number: int) -> list[Step]:
        """Return the shortest way to a state."""
        found: list[Step] = []
        while True:
            number, step = self.parents[number]
            if step is None:
                return found[::-1]
            found.append(step)


def explore(bounds: Bounds, rules: Rules = ALL, *, most: int = 1_000_000) -> Graph:
    """Explore until the first broken invariant, or to the end.

    Raises:
        MemoryError: there are more than ``most`` states: the bounds are too wide.
    """
    graph = Graph(bounds, rules)
    first = canonical(first_state(bounds))
    numbers = {first: 0}
    graph.states.append(first)
    graph.parents.append((0, None))
    graph.back.append([])
    queue = deque([0])
    while queue:
        number = queue.popleft()
        state = graph.states[number]
        for step, raw in steps(state, bounds, rules):
            graph.edges += 1
            after = canonical(raw)
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(graph.states)
                if known >= most:
                    raise MemoryError(f"more than {most} states")
                graph.states.append(after)
                graph.parents.append((number, step))
                graph.back.append([])
                queue.append(known)
                for invariant in STATE_INVARIANTS:
                    words = invariant(after, bounds)
                    if words:
                        graph.broken = Broken(invariant.__name__, words, graph.trace(known))
                        return graph
            for step_invariant in STEP_INVARIANTS:
                words = step_invariant(state, step, raw)
                if words:
                    trace = [*graph.trace(number), step]
                    graph.broken = Broken(step_invariant.__name__, words, trace)
                    return graph
            if not step.fault:
                graph.back[known].append(number)
    graph.broken = _without_end(graph)
    return graph


def is_end(state: State) -> bool:
    """Tell whether the job has ended and Celery knows, or its history was removed."""
    return bool(state.job.settled) or bool(state.job.pruned)


def _without_end(graph: Graph) -> Broken | None:
    """Return a state from which no end can be reached, though nothing more goes wrong."""
    reached = [is_end(state) for state in graph.states]
    queue = deque(number for number, end in enumerate(reached) if end)
    while queue:
        for number in graph.back[queue.popleft()]:
            if not reached[number]:
                reached[number] = True
                queue.append(number)
    if all(reached):
        return None
    trace = graph.trace(reached.index(False))
    return Broken("an_end_is_reachable", "no end can be reached from here", trace)


@dataclass(frozen=True, slots=True)
class Played:
    """One step of a trace, with the names of the actors."""

    who: str
    step: Step
    before: State
    after: State


def play(bounds: Bounds, rules: Rules, trace: list[Step]) -> Iterator[Played]:
    """Yield a trace with lasting names: workers A, B, C; reapers R, S."""
    state = canonical(first_state(bounds))
    workers = list("ABCDEF"[: bounds.workers])
    reapers = list("RSTU"[: bounds.reapers])
    for step in trace:
        raw = next(after for said, after in steps(state, bounds, rules) if said == step)
        names = {"worker": workers, "reaper": reapers}.get(step.actor)
        who = names[step.place] if names else step.actor
        yield Played(who, step, state, raw)
        workers = [workers[at] for at in order(raw.workers)]
        reapers = [reapers[at] for at in order(raw.reapers)]
        state = canonical(raw)


def spelled(graph: Graph) -> str:
    """Return the counter-example as a person reads it."""
    if graph.broken is None:
        return "no counter-example"
    lines = []
    for number, played in enumerate(play(graph.bounds, graph.rules, graph.broken.trace), 1):
        lines.append(line(number, played))
    lines.append(f"  => {graph.broken.invariant}: {graph.broken.words}")
    return "\n".join(lines)


def line(number: int, played: Played) -> str:
    """Return one step as a person reads it."""
    step, job = played.step, played.after.job
    what = f"{played.who} {step.verb}" + (f": {step.answer}" if step.answer else "")
    return f"{number:3}. {what:<44} job {job.state}, token {job.token}"
