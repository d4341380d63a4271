"""The steps of a reaper: what it read stands between its read and its guarded write.

A pass is not one step: other passes, workers and time go between any two of its statements.
Dispatching at once by whoever made a job queued is the same steps, taken by a worker; the model
leaves them to the reapers, which also covers that nobody does it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import table
from tests.model.bounds import Bounds
from tests.model.rules import Rules
from tests.model.state import (
    CLOSE,
    DELAYED,
    FINAL,
    LEASE_OVER,
    REPLAY,
    SEND,
    WAITING,
    Message,
    Reaper,
    State,
    Step,
    in_flight,
)
from tests.model.workers import settled

Steps = Iterator[tuple[Step, State]]
_NAMES = ("send", "replay", "close")


def steps(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """Yield what each reaper may do next."""
    before: Reaper | None = None
    for index, reaper in enumerate(state.reapers):
        if reaper == before:
            continue
        before = reaper
        yield from _PHASES[reaper.phase](state, index, bounds, rules)
        if reaper.phase in {"sending", "closing", "settling"}:
            if state.left.crash:
                yield _dies(state, index)
        elif reaper.phase != "idle":
            # Between a read and its write a death is a pass that ends: nothing was changed.
            yield _step(index, "give up"), _with(state, index, Reaper())


def _with(state: State, index: int, reaper: Reaper) -> State:
    reapers = list(state.reapers)
    reapers[index] = reaper
    return state._replace(reapers=tuple(reapers))


def _step(index: int, verb: str, answer: str = "", *, fault: bool = False) -> Step:
    return Step("reaper", index, verb, answer, fault)


def _idle(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    job = state.job
    if job.state == "running" and job.lease == LEASE_OVER:
        found = Reaper("expiring", token=job.token)
        yield _step(index, "see expired"), _with(state, index, found)
        most = 1 if rules.amnesty_once else 2
        if state.left.amnesty and job.extended < most:
            extended = job._replace(lease=0, extended=job.extended + 1)
            left = state.left._replace(amnesty=state.left.amnesty - 1)
            yield _step(index, "extend"), state._replace(job=extended, left=left)
    if job.state in DELAYED and job.due:
        yield from _wakes(state, index, rules)
    if job.bound:
        yield from _ends_late(state, index)
    if job.state == "queued":
        yield from _reads_queued(state, index)
    if job.state in FINAL and not job.settled:
        yield from _reads_unsettled(state, index, rules)


def _wakes(state: State, index: int, rules: Rules) -> Steps:
    job = state.job
    woken = state._replace(job=table.to_waiting(job._replace(state="queued", due=0), rules))
    if not job.dispatched:
        yield _step(index, "wake"), woken
    elif not in_flight(state, job.version):
        yield _step(index, "wake", "after the grace"), woken
    elif state.left.slow:
        left = state.left._replace(slow=state.left.slow - 1)
        yield _step(index, "wake", "after the grace", fault=True), woken._replace(left=left)


def _ends_late(state: State, index: int) -> Steps:
    """pass_deadline, expire_unstarted."""
    job = state.job
    if job.bound == "expires" and job.state in WAITING:
        yield _step(index, "expire unstarted"), table.stopped(state, "cancelled")
    elif job.bound == "deadline" and job.state in WAITING | {"running"}:
        yield _step(index, "pass deadline"), table.stopped(state, "failed")


def _view(state: State, kind: int) -> Reaper:
    job = state.job
    return Reaper("dispatching", job.token, job.version, kind, 1, job.life)


def _reads_queued(state: State, index: int) -> Steps:
    job = state.job
    seen = _with(state, index, _view(state, SEND))
    if not job.dispatched:
        yield _step(index, "see undispatched"), seen
    elif not in_flight(state, job.version):
        yield _step(index, "see unclaimed"), seen
    elif state.left.slow:
        left = state.left._replace(slow=state.left.slow - 1)
        yield _step(index, "see unclaimed", fault=True), seen._replace(left=left)


def _reads_unsettled(state: State, index: int, rules: Rules) -> Steps:
    job = state.job
    unattended = not job.accepted and job.state != "succeeded"
    if unattended and not rules.reaper_closes_books:
        return
    if not unattended and not rules.reaper_replays:
        return
    seen = _with(state, index, _view(state, CLOSE if unattended else REPLAY))
    if not _being_told(state):
        yield _step(index, "see unsettled"), seen
    elif state.left.slow:
        left = state.left._replace(slow=state.left.slow - 1)
        yield _step(index, "see unsettled", fault=True), seen._replace(left=left)


def _being_told(state: State) -> bool:
    """Tell whether somebody is at it, who is given a grace first."""
    return (
        any(
            w.phase in {"publishing", "settling"} and w.life == state.job.life
            for w in state.workers
        )
        or any(w.phase == "finishing" and w.unsure for w in state.workers)
        or any(w.phase == "asking" and w.replay for w in state.workers)
        or any(message.replay for message in state.broker)
        or any(r.phase in {"closing", "settling"} for r in state.reapers)
        or any(r.phase == "sending" and r.kind == REPLAY for r in state.reapers)
    )


def _expiring(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    reaper, job = state.reapers[index], state.job
    holds = job.state == "running" and job.token == reaper.token
    over = job.lease == LEASE_OVER or not rules.expire_expiry
    if holds and over:
        after, answer = table.lost(state, "expired", bounds, rules), "expired"
    else:
        after, answer = state, "nothing"
    yield _step(index, "expire", answer), _with(after, index, Reaper())


def _dispatching(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """dispatch: recorded first, with the count as read; then the message leaves."""
    reaper, job = state.reapers[index], state.job
    fits = job.state == "queued" if reaper.kind == SEND else job.state in FINAL and not job.settled
    fresh = reaper.fresh or not rules.dispatch_count
    verb = f"dispatch {_NAMES[reaper.kind]}"
    if not (fits and fresh and job.version == reaper.version):
        yield _step(index, verb, "taken"), _with(state, index, Reaper())
        return
    phase = "closing" if reaper.kind == CLOSE else "sending"
    after = reaper._replace(phase=phase, fresh=1)
    yield _step(index, verb, "done"), _with(table.dispatched(state), index, after)


def _sending(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    reaper, job = state.reapers[index], state.job
    message = Message(reaper.version, int(reaper.kind == REPLAY))
    sent = state._replace(broker=(*state.broker, message))
    yield _step(index, "send", "sent"), _with(sent, index, Reaper())
    if state.left.loss:
        failed = state._replace(left=state.left._replace(loss=state.left.loss - 1))
        if job.state in WAITING and reaper.fresh and rules.publish_error_undispatches:
            failed = failed._replace(job=job._replace(dispatched=0, excused=0))
        yield _step(index, "send", "refused", fault=True), _with(failed, index, Reaper())


def _closing(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """Closing the books: FAILURE or REVOKED, errbacks and chord error, by the reaper itself."""
    reaper, job = state.reapers[index], state.job
    after = state
    if reaper.life == job.life:
        after = state._replace(job=job._replace(told=min(2, job.told + 1)))
    yield _step(index, "close books"), _with(after, index, reaper._replace(phase="settling"))


def _settling(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    reaper = state.reapers[index]
    after = settled(state, reaper.token, reaper.life, rules)
    answer = "settled" if after is not state else "nothing"
    yield _step(index, "settle", answer), _with(after, index, Reaper())


def _dies(state: State, index: int) -> tuple[Step, State]:
    reaper, job = state.reapers[index], state.job
    left = state.left._replace(crash=state.left.crash - 1)
    if reaper.phase == "sending" and job.dispatched:
        job = job._replace(excused=1)
    after = state._replace(left=left, job=job)
    return _step(index, "die", reaper.phase, fault=True), _with(after, index, Reaper())


_PHASES = {
    "idle": _idle,
    "expiring": _expiring,
    "dispatching": _dispatching,
    "sending": _sending,
    "closing": _closing,
    "settling": _settling,
}
