"""How much of the world one exploration has: the scenarios.

Each is explored completely. Together they hold every fault and every arrow; none holds all at
once, which no machine would finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.state import Job, Left, Message, Reaper, State, Worker


@dataclass(frozen=True, slots=True)
class Bounds:
    """One scenario.

    Attributes:
        workers: processes that run bodies.
        reapers: reapers, each a pass that reads and writes in separate steps.
        left: faults and wishes.
        max_attempts: the loss that ends the job.
        on_expiry: the policy for a vanished runner.
        start: ``publish`` (an app records and publishes), ``delay`` (the same with a delay) or
            ``unrecorded`` (two copies of a message that nobody recorded).
        one_process: the workers are threads of one process, so they have one owner.
        bodies: how a body may end.
        cap: ends that are spared (``UNCOUNTED_ENDS``); in life there are ten.
    """

    workers: int
    reapers: int
    left: Left
    max_attempts: int = 2
    on_expiry: str = "retry"
    start: str = "publish"
    one_process: bool = False
    bodies: tuple[str, ...] = ("ok", "error")
    cap: int = 10


def first_state(bounds: Bounds) -> State:
    """Return the state before anything has happened."""
    unrecorded = bounds.start == "unrecorded"
    return State(
        job=Job(),
        attempts=(),
        broker=(Message(0), Message(0)) if unrecorded else (),
        workers=(Worker(),) * bounds.workers,
        reapers=(Reaper(),) * bounds.reapers,
        publisher="done" if unrecorded else "new",
        left=bounds.left,
    )


SCENARIOS = {
    "a crash, a lost message": Bounds(2, 1, Left(crash=1, loss=1), bodies=("ok",)),
    "a doubled message, a lost reply": Bounds(2, 1, Left(double=1, reply=1), bodies=("ok",)),
    "three workers": Bounds(3, 1, Left(double=1), bodies=("ok",)),
    "two reapers": Bounds(1, 2, Left(crash=1, loss=1), bodies=("ok",)),
    "two closers": Bounds(1, 2, Left(operator=1, crash=1), max_attempts=1, bodies=("ok",)),
    "what bodies do": Bounds(
        1, 1, Left(loss=1, reply=1, give_back=1), start="delay",
        bodies=("ok", "error", "unserialisable", "retry", "release", "hold"),
    ),
    "retries": Bounds(2, 1, Left(double=1, reply=1, give_back=1), bodies=("ok", "retry"),
                      max_attempts=1),
    "operators": Bounds(1, 1, Left(operator=2, give_back=1), max_attempts=1,
                        bodies=("ok", "hold")),
    "a slow runner": Bounds(2, 1, Left(reply=1, slow=1), max_attempts=1,
                            bodies=("ok",)),
    "hold": Bounds(2, 1, Left(operator=1), on_expiry="hold", bodies=("ok",)),
    "fail": Bounds(2, 1, Left(crash=1, reply=1, double=1), on_expiry="fail", bodies=("ok",)),
    "time": Bounds(1, 1, Left(bound=1, give_back=1, reply=1), bodies=("ok", "retry"),
                   start="delay"),
    "amnesty": Bounds(1, 2, Left(amnesty=2), bodies=("ok",)),
    "threads": Bounds(2, 1, Left(double=1), one_process=True, bodies=("ok",)),
    "unrecorded": Bounds(2, 1, Left(), start="unrecorded", bodies=("ok",)),
    "prune": Bounds(2, 1, Left(prune=1, double=1), bodies=("ok",), max_attempts=1),
    "fail-over": Bounds(2, 1, Left(failover=1), bodies=("ok",)),
    "rolling restarts": Bounds(2, 1, Left(stop=2), max_attempts=1, bodies=("ok",), cap=1),
    "restarts and a crash": Bounds(1, 1, Left(stop=1, crash=1), bodies=("ok",), cap=2),
    "restarts and hand-overs": Bounds(1, 1, Left(stop=2, give_back=1), max_attempts=1,
                                      bodies=("ok", "release"), cap=2),
    "restarts, hold": Bounds(1, 1, Left(stop=1, reply=1), on_expiry="hold", bodies=("ok",)),
}  # fmt: skip
"""Explored in every run."""

WIDE = {
    "bodies that give back twice": Bounds(
        1, 1, Left(loss=1, reply=1, give_back=2), start="delay",
        bodies=("ok", "error", "unserialisable", "retry", "release", "hold"),
    ),
    "crash, loss, double": Bounds(2, 1, Left(crash=1, loss=1, double=1), bodies=("ok",)),
    "crash, double, reply": Bounds(2, 1, Left(crash=1, double=1, reply=1)),
    "three attempts": Bounds(2, 1, Left(crash=1), bodies=("ok",), max_attempts=3),
    "three workers, a crash": Bounds(3, 1, Left(double=1, crash=1), bodies=("ok",)),
    "two restarts and a crash": Bounds(1, 1, Left(stop=2, crash=1), bodies=("ok",), cap=1),
    "two of each": Bounds(2, 2, Left(crash=1), bodies=("ok",)),
    "two of each, amnesty": Bounds(2, 2, Left(amnesty=1), bodies=("ok",)),
    "a doubled message, a lost reply, errors": Bounds(2, 1, Left(double=1, reply=1)),
    "threads that give back": Bounds(
        2, 1, Left(double=1, give_back=1), one_process=True, bodies=("ok", "release")
    ),
    "time for two": Bounds(2, 1, Left(bound=1, give_back=1), bodies=("ok", "retry"),
                           start="delay"),
}  # fmt: skip
"""Explored by ``make long``."""

TOO_WIDE = {
    "a slow runner, two words": Bounds(
        2, 1, Left(operator=2, reply=1, slow=1), max_attempts=1, bodies=("ok",)
    ),
}  # fmt: skip
"""Not explored to the end: where the shortest counter-example of a switch is near enough."""
