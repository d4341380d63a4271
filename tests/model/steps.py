"""Every step that anybody may take from a state."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import reapers, workers, world
from tests.model.bounds import Bounds
from tests.model.rules import Rules
from tests.model.state import State, Step


def steps(state: State, bounds: Bounds, rules: Rules) -> Iterator[tuple[Step, State]]:
    """Yield each next step with the state after it, whose actors keep their places."""
    yield from workers.steps(state, bounds, rules)
    yield from reapers.steps(state, bounds, rules)
    yield from world.steps(state, bounds, rules)
