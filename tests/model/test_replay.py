"""The real store does what the model says, step by step, on every database.

A difference is a drift between the design's table, the model and the code; the trace up to it
is printed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from celery_lease import backoff
from tests.model.bounds import SCENARIOS, TOO_WIDE, WIDE, Bounds
from tests.model.explore import explore, line, play
from tests.model.replay import Replayer
from tests.model.rules import ALL
from tests.model.sample import Trace, cover, kept, walks
from tests.model.state import canonical
from tests.model.steps import steps
from tests.model.switches import SWITCHES
from tests.store.builders import LONG

if TYPE_CHECKING:
    from celery_lease.store.engine import Store

ALL_SCENARIOS = {**SCENARIOS, **WIDE}
EVERY = {**ALL_SCENARIOS, **TOO_WIDE}
PARTS = 3


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """The traces of this run."""
    return kept() + (walks(ALL_SCENARIOS, count=200) if LONG else [])


@pytest.mark.timeout(3000 if LONG else 240)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_store_does_what_the_model_says(store: Store, traces: list[Trace], part: int) -> None:
    _replay_all(store, traces[part::PARTS])


def _replay_all(store: Store, traces: list[Trace], real: Bounds | None = None) -> None:
    for trace in traces:
        empty(store)
        _replay(store, trace, real or ALL_SCENARIOS[trace.scenario])


def _replay(store: Store, trace: Trace, real: Bounds) -> None:
    """Play one trace; a difference is raised with the steps that led to it."""
    replayer = Replayer(store, real)
    taken: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        # Ten ends are too many to explore.
        patch.setattr(backoff, "UNCOUNTED_ENDS", real.cap)
        for played in play(EVERY[trace.scenario], ALL, trace.steps):
            taken.append(line(len(taken) + 1, played))
            try:
                replayer.take(played)
            except Exception as error:
                told = "\n".join([f"scenario {trace.scenario!r}, drift at the last step:", *taken])
                raise AssertionError(f"{told}\n{error!r}") from error


def empty(store: Store) -> None:
    """Remove all rows."""
    with store.engine.begin() as connection:
        for table in reversed(store.tables.metadata.sorted_tables):
            connection.execute(sa.delete(table))


@pytest.mark.parametrize(
    ("scenario", "difference"),
    [("hold", {"on_expiry": "retry"}), ("rolling restarts", {"cap": 10})],
)
def test_a_store_that_differs_is_seen(
    store: Store, scenario: str, difference: dict[str, Any]
) -> None:
    traces = [trace for trace in kept() if trace.scenario == scenario]

    other = replace(SCENARIOS[scenario], **difference)
    with pytest.raises(AssertionError, match="drift at the last step"):
        _replay_all(store, traces, other)


@pytest.mark.parametrize("switch", ["own_row_still_accepted", "settle_outcome"])
def test_the_store_refuses_the_counter_example(store: Store, switch: str) -> None:
    """The shortest way to what only a rule prevents: the store must do as the rule says."""
    bounds = SWITCHES[switch].bounds
    broken = explore(bounds, ALL.without(switch)).broken
    assert broken is not None
    empty(store)

    # The last step's answer is the broken model's: the sound one may say something else.
    *way, last = broken.trace
    state = canonical(list(play(bounds, ALL, way))[-1].after)
    sound = next(
        step
        for step, _ in steps(state, bounds, ALL)
        if (step.actor, step.place, step.verb) == (last.actor, last.place, last.verb)
    )

    _replay(store, Trace(SWITCHES[switch].scenario, [*way, sound]), bounds)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_kept_traces_are_those_of_the_model() -> None:
    assert kept() == cover(SCENARIOS), "write them anew: python -m tests.model.sample"
