"""The protocol holds in every state of every scenario; without one of its rules it does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.model.bounds import SCENARIOS, WIDE
from tests.model.explore import explore, spelled
from tests.model.rules import ALL, NAMES
from tests.model.switches import SWITCHES

ALL_SCENARIOS = {**SCENARIOS, **WIDE}


def holds(name: str) -> None:
    """Assert that a scenario has no counter-example, and say how large it was."""
    started = time.process_time()

    graph = explore(ALL_SCENARIOS[name])

    spent = time.process_time() - started
    print(f"{name}: {len(graph.states)} states, {graph.edges} steps, {spent:.1f} s")
    assert graph.broken is None, f"in {name!r}:\n{spelled(graph)}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_invariant_holds_and_an_end_is_reachable(name: str) -> None:
    holds(name)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WIDE, ids=str)
def test_the_same_within_wider_bounds(name: str) -> None:
    holds(name)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_without_one_rule_there_is_a_counter_example(name: str) -> None:
    switch = SWITCHES[name]

    graph = explore(switch.bounds, ALL.without(name))

    print(f"{name} off ({switch.sentence}), in {switch.scenario!r}:\n{spelled(graph)}")
    assert graph.broken is not None, f"{name} off changes nothing in {switch.scenario!r}"
    assert graph.broken.invariant == switch.breaks, spelled(graph)


def test_the_readme_lists_every_switch() -> None:
    text = (Path(__file__).parent / "README.md").read_text()

    assert [name for name in NAMES if f"`{name}`" not in text] == []
    assert [name for name in SWITCHES if SWITCHES[name].story not in text] == []
