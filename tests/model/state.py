"""What the model knows: one job, its attempts, its messages, and everybody who works on it.

What it is not: the store. Only what the protocol decides by is here; instants are abstract
(``lease``, ``due``, ``bound``). All values are immutable and small, words are those of
``celery_lease.states``, and a state is *canonical* when who cannot be told apart (workers,
reapers, messages) stands in one order, so that two states that differ in names are one.
"""

from __future__ import annotations

from typing import NamedTuple

ABSENT = "absent"
"""There is no row."""
WAITING = frozenset({"scheduled", "queued", "retry_wait"})
DELAYED = frozenset({"scheduled", "retry_wait"})
FINAL = frozenset({"succeeded", "failed", "cancelled", "interrupted"})
LIVE = frozenset({"claimed", "active"})
OWN_ENDS = frozenset({"completed", "failed", "retried", "released"})
"""Ends that the attempt's own runner wrote."""
LOST_ENDS = frozenset({"expired", "lost"})

LEASE_GOOD, LEASE_ENDING, LEASE_OVER = 0, 1, 2
"""Renewed lately; past the runner's own deadline; past its end by the store's clock."""
SEND, REPLAY, CLOSE = 0, 1, 2
"""What a dispatch is for: a run, a replay of the outcome, or closing the books in Celery."""


class Job(NamedTuple):
    """The job's row, its live lease, and three ghosts that only invariants read."""

    state: str = ABSENT
    token: int = 0
    version: int = 0
    dispatched: int = 0
    due: int = 0
    lost: int = 0
    lease: int = LEASE_GOOD
    extended: int = 0
    bound: str = ""
    """``deadline`` or ``expires`` once that instant has passed."""
    accepted: int = 0
    late: int = 0
    settled: int = 0
    life: int = 0
    """Resumes so far: with the token it stands for ``finished_at``, which names an outcome."""
    told: int = 0
    """Ghost: how often Celery was told the outcome of this life (2 = twice or more)."""
    excused: int = 0
    """Ghost: since the last dispatch a message was lost, or who was to send it died."""
    pruned: int = 0


class Attempt(NamedTuple):
    """One attempt's row; its token is its place in the history."""

    state: str
    version: int
    life: int
    late: int = 0
    """A late outcome was recorded on it."""
    asked: int = 0
    """Its row says that it was asked to stop."""


class Message(NamedTuple):
    """One message on the broker. Version 0: its publisher recorded nothing and says so."""

    version: int
    replay: int = 0


class Worker(NamedTuple):
    """One process that runs bodies; in a dead one's place a new process comes.

    A frozen one is one that takes no step while the others and the time go on.
    """

    phase: str = "idle"
    """idle · asking · running · surrendering · finishing · rejecting · publishing · settling ·
    resending · dead"""
    version: int = 0
    """Of the message in its hands."""
    replay: int = 0
    token: int = 0
    """Of its attempt. Asking: of a claim that it won without hearing of it."""
    outcome: str = ""
    seen: int = 0
    """Asking: the token whose lease it saw ended."""
    unsure: int = 0
    """Finishing: the reply to its last try was lost."""
    heard: int = 0
    """An answer «lost» of the heartbeat for this token is on its way to it."""
    told: int = 0
    """It was told that its lease is lost."""
    gave_up: int = 0
    """``check()`` has raised."""
    undone: int = 0
    """A fail-over of the database has forgotten its claim."""
    life: int = 0
    stopping: int = 0
    """It was asked to stop; whoever reports its death knows that, too."""


class Reaper(NamedTuple):
    """One reaper, or a worker's own timer: between what it read and what it writes."""

    phase: str = "idle"
    """idle · expiring · dispatching · sending · closing · settling"""
    token: int = 0
    version: int = 0
    kind: int = SEND
    fresh: int = 0
    """The dispatch count that it read (or wrote) is still the job's."""
    life: int = 0


class Left(NamedTuple):
    """What may still go wrong, or be wanted, in this exploration."""

    crash: int = 0
    loss: int = 0
    """Messages lost, publishes refused."""
    double: int = 0
    reply: int = 0
    """Replies of the store that do not arrive, although it committed."""
    slow: int = 0
    """Somebody needs longer than a generous timeout (``lease_queued_timeout``, the grace)."""
    give_back: int = 0
    """Retries, releases and holds by bodies."""
    operator: int = 0
    amnesty: int = 0
    prune: int = 0
    failover: int = 0
    bound: int = 0
    stop: int = 0
    """Processes that are asked to stop, and may be gone when the grace is over."""


class State(NamedTuple):
    """Everything."""

    job: Job
    attempts: tuple[Attempt, ...]
    broker: tuple[Message, ...]
    workers: tuple[Worker, ...]
    reapers: tuple[Reaper, ...]
    publisher: str
    """new · publishing · done"""
    left: Left


class Step(NamedTuple):
    """One step: who, what, and the answer. ``place`` counts in the canonical state before it."""

    actor: str
    place: int
    verb: str
    answer: str = ""
    fault: bool = False


def canonical(state: State) -> State:
    """Return the state with everybody in one order."""
    return state._replace(
        broker=tuple(sorted(state.broker)),
        workers=tuple(sorted(state.workers)),
        reapers=tuple(sorted(state.reapers)),
    )


def order(actors: tuple[NamedTuple, ...]) -> list[int]:
    """Return the old places of actors in canonical order."""
    return sorted(range(len(actors)), key=actors.__getitem__)


def live_attempt(state: State, token: int) -> bool:
    """Tell whether this attempt holds the job's lease."""
    return 0 < token <= len(state.attempts) and state.attempts[token - 1].state in LIVE


def in_flight(state: State, version: int) -> bool:
    """Tell whether a message of this version can still reach a claim."""
    return (
        any((message.version or 1) == version for message in state.broker)
        or any(w.phase == "asking" and (w.version or 1) == version for w in state.workers)
        or any(w.phase == "resending" and w.version == version for w in state.workers)
        or any(w.outcome == "retry" and w.unsure for w in state.workers)
        or any(r.phase == "sending" and r.version == version for r in state.reapers)
        or state.publisher == "publishing"
    )
