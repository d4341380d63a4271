"""The steps of everything else: the app that publishes, the broker, time, and a person."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import table
from tests.model.bounds import Bounds
from tests.model.rules import Rules
from tests.model.state import (
    ABSENT,
    DELAYED,
    FINAL,
    LEASE_OVER,
    WAITING,
    Job,
    Message,
    State,
    Step,
)

Steps = Iterator[tuple[Step, State]]
MOST_MESSAGES = 3


def steps(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """Yield what may happen outside workers and reapers."""
    yield from _publisher(state, bounds, rules)
    yield from _broker(state)
    yield from _time(state)
    if state.left.operator:
        yield from _operator(state, rules)
    elif state.job.state == "held":
        # A held job waits for a person, who comes in the end.
        yield Step("operator", 0, "refuse"), table.stopped(state, "failed")
    if state.left.prune and state.job.settled:
        left = state.left._replace(prune=state.left.prune - 1)
        gone = state._replace(job=Job(pruned=1), attempts=(), left=left)
        yield Step("operator", 0, "prune"), gone
    if state.left.failover:
        yield from _failover(state)


def _publisher(state: State, bounds: Bounds, rules: Rules) -> Steps:
    job, left = state.job, state.left
    if state.publisher == "new":
        first = "scheduled" if bounds.start == "delay" else "queued"
        row = Job(state=first, version=1, dispatched=1)
        yield Step("app", 0, "submit"), state._replace(job=row, publisher="publishing")
    elif state.publisher == "publishing":
        done = state._replace(publisher="done")
        yield Step("app", 0, "publish", "sent"), done._replace(broker=(*state.broker, Message(1)))
        if left.crash:
            row = job._replace(excused=1) if job.dispatched else job
            died = done._replace(left=left._replace(crash=left.crash - 1), job=row)
            yield Step("app", 0, "die", fault=True), died
        if left.loss:
            row = job
            if rules.publish_error_undispatches and job.state in WAITING and job.version == 1:
                row = job._replace(dispatched=0, excused=0)
            refused = done._replace(left=left._replace(loss=left.loss - 1), job=row)
            yield Step("app", 0, "publish", "refused", fault=True), refused


def _broker(state: State) -> Steps:
    job, left = state.job, state.left
    for message in sorted(set(state.broker)):
        if left.double and len(state.broker) < MOST_MESSAGES:
            doubled = state._replace(
                broker=(*state.broker, message), left=left._replace(double=left.double - 1)
            )
            yield Step("broker", 0, "double", _name(message), fault=True), doubled
        if left.loss:
            rest = list(state.broker)
            rest.remove(message)
            row = job._replace(excused=1) if job.dispatched else job
            lost = state._replace(
                broker=tuple(rest), left=left._replace(loss=left.loss - 1), job=row
            )
            yield Step("broker", 0, "lose", _name(message), fault=True), lost


def _name(message: Message) -> str:
    return f"v{message.version}" + (" replay" if message.replay else "")


def _time(state: State) -> Steps:
    job = state.job
    if job.state == "running" and job.lease < LEASE_OVER:
        word = ("runner's deadline", "lease ends")[job.lease]
        yield Step("time", 0, word), state._replace(job=job._replace(lease=job.lease + 1))
    if job.state in DELAYED and not job.due:
        yield Step("time", 0, "due"), state._replace(job=job._replace(due=1))
    if state.left.bound and job.state not in FINAL | {ABSENT}:
        left = state.left._replace(bound=state.left.bound - 1)
        for bound in ("deadline", "expires"):
            passed = state._replace(job=job._replace(bound=bound), left=left)
            yield Step("time", 0, f"{bound} passes", fault=True), passed


def _operator(state: State, rules: Rules) -> Steps:
    job = state.job
    spent = state._replace(left=state.left._replace(operator=state.left.operator - 1))
    if job.state not in FINAL | {ABSENT}:
        yield Step("operator", 0, "cancel", fault=True), table.stopped(spent, "cancelled")
    if job.state in WAITING:
        held = job._replace(state="held", due=0, dispatched=0, excused=0)
        yield Step("operator", 0, "hold", fault=True), spent._replace(job=held)
    if job.state == "held":
        accepted = job._replace(state="succeeded", accepted=job.token)
        if job.token:
            yield Step("operator", 0, "accept", fault=True), spent._replace(job=accepted)
        yield Step("operator", 0, "refuse"), table.stopped(state, "failed")
    if job.state == "held" or (job.state in FINAL and job.settled):
        yield Step("operator", 0, "resume", fault=True), spent._replace(job=table.resumed(job))


def _failover(state: State) -> Steps:
    """The database loses the last commit, a claim: documented as beyond the promise."""
    job = state.job
    if job.state != "running" or state.attempts[-1].state != "claimed" or job.lease:
        return
    for index, worker in enumerate(state.workers):
        if worker.token != job.token or worker.undone or worker.phase != "running":
            continue
        workers = list(state.workers)
        workers[index] = worker._replace(undone=1)
        before = job._replace(state="queued", token=job.token - 1, dispatched=1, excused=1)
        yield (
            Step("world", index, "forget claim", fault=True),
            state._replace(
                job=before,
                attempts=state.attempts[:-1],
                workers=tuple(workers),
                left=state.left._replace(failover=state.left.failover - 1),
            ),
        )
