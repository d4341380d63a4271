"""The arrows of the design's table (section 4) as functions of the rows alone.

What it is not: it does not know who asks or when; that is ``workers``, ``reapers``, ``world``.
Each is one commit of the store. It is written from the design, not from the code: the replay
(``replay``) compares the two.
"""

from __future__ import annotations

from tests.model.bounds import Bounds
from tests.model.rules import Rules
from tests.model.state import (
    DELAYED,
    FINAL,
    LEASE_OVER,
    LIVE,
    LOST_ENDS,
    Attempt,
    Job,
    Reaper,
    State,
)


def claimable(job: Job, version: int, rules: Rules) -> bool:
    """claim: queued or due, by the newest version, no bound passed."""
    return (
        (job.state == "queued" or (job.state in DELAYED and job.due == 1))
        and (job.version == version or not rules.claim_version)
        and not job.bound
    )


def claimed(state: State, version: int) -> State:
    """claim: → running, token + 1, a new attempt."""
    job = state.job._replace(
        state="running",
        token=state.job.token + 1,
        dispatched=0,
        due=0,
        excused=0,
        lease=0,
        extended=0,
    )
    attempts = (*state.attempts, Attempt("claimed", version, job.life))
    return state._replace(job=job, attempts=attempts)


def ended(state: State, token: int, end: str) -> State:
    """Write the end of one attempt."""
    attempts = list(state.attempts)
    attempts[token - 1] = attempts[token - 1]._replace(state=end)
    return state._replace(attempts=tuple(attempts))


def is_counted(state: State, bounds: Bounds, rules: Rules) -> bool:
    """Tell whether the end of the live attempt counts: not if it was asked to stop, up to a cap."""
    *earlier, this = state.attempts
    asked = this.asked
    if not rules.stop_of_this_attempt:
        asked = any(attempt.asked for attempt in state.attempts)
    if not (asked and rules.stops_are_spared):
        return True
    spared = sum(
        attempt.state == "released" or (attempt.state in LOST_ENDS and attempt.asked)
        for attempt in earlier
        if attempt.life == state.job.life
    )
    return spared >= bounds.cap and rules.stops_are_capped


def policy(state: State, bounds: Bounds, rules: Rules) -> tuple[str, int]:
    """Return what becomes of a job whose runner has vanished, and its losses from then on."""
    counted = is_counted(state, bounds, rules)
    count = state.job.lost + counted
    if counted and count >= bounds.max_attempts:
        return "interrupted", count
    if counted or rules.stop_keeps_policy:
        if bounds.on_expiry == "hold":
            return "held", count
        if bounds.on_expiry == "fail":
            return "failed", count
    return ("retry_wait", count) if counted and count > 1 else ("queued", count)


def lost(state: State, end: str, bounds: Bounds, rules: Rules) -> State:
    """lost, expire: the one policy for every vanished runner."""
    job = state.job
    reached, count = policy(state, bounds, rules)
    moved = job._replace(state=reached, due=0, lost=count, lease=0, extended=0)
    return ended(state._replace(job=to_waiting(moved, rules)), job.token, end)


def asked_to_stop(state: State, token: int) -> State:
    """Write that an attempt was asked to stop."""
    attempts = list(state.attempts)
    attempts[token - 1] = attempts[token - 1]._replace(asked=1)
    return state._replace(attempts=tuple(attempts))


def to_waiting(job: Job, rules: Rules) -> Job:
    """Every arrow to queued clears ``dispatched_at``."""
    kept = 0 if rules.queued_clears_dispatched or job.state not in {"queued", *DELAYED} else 1
    return job._replace(dispatched=kept, excused=0)


def taken_over(state: State, version: int, bounds: Bounds, rules: Rules) -> State:
    """take_over: the ended attempt → expired, then as claim."""
    job = state.job._replace(lost=policy(state, bounds, rules)[1])
    return claimed(ended(state._replace(job=job), job.token, "expired"), version)


ENDS = {
    "ok": "completed",
    "unserialisable": "completed",
    "error": "failed",
    "hold": "failed",
    "retry": "retried",
    "release": "released",
}
"""What a runner asks for → the state of its attempt."""


def finished(state: State, token: int, outcome: str, rules: Rules) -> State:
    """complete, fail, hold, retry_later, release: from running."""
    job = state.job
    late = int(job.lease == LEASE_OVER)
    if outcome in {"ok", "unserialisable"}:
        job = job._replace(state="succeeded", accepted=token, late=late, lease=0, extended=0)
    elif outcome == "error":
        job = job._replace(state="failed", accepted=token, late=late, lease=0, extended=0)
    elif outcome == "hold":
        job = job._replace(state="held", lease=0, extended=0)
    elif outcome == "release":
        job = to_waiting(job._replace(state="queued", lease=0, extended=0), rules)
    else:
        bound = "" if job.bound == "expires" else job.bound
        version = job.version + (1 if rules.retry_version_in_transition else 0)
        job = job._replace(
            state="retry_wait", due=0, version=version, dispatched=1, excused=0, bound=bound,
            lease=0, extended=0,
        )  # fmt: skip
        state = state._replace(reapers=stale_views(state))
    return ended(state._replace(job=job), token, ENDS[outcome])


def rejected(state: State, token: int) -> State:
    """reject: the late outcome on its own row; an end of its own has nothing to add."""
    attempts = list(state.attempts)
    attempt = attempts[token - 1]
    if attempt.state in {"expired", "lost", "cancelled"}:
        attempts[token - 1] = attempt._replace(late=1)
    return state._replace(attempts=tuple(attempts))


def stopped(state: State, reached: str) -> State:
    """cancel, pass_deadline: → final; a running one's attempt → cancelled."""
    job = state.job
    if job.state == "running":
        state = ended(state, job.token, "cancelled")
    moved = job._replace(state=reached, due=0, dispatched=0, excused=0, lease=0, extended=0)
    return state._replace(job=moved)


def dispatched(state: State) -> State:
    """dispatch: whoever read the count before this is too late."""
    job = state.job
    waits = int(job.state not in FINAL)
    return state._replace(job=job._replace(dispatched=waits, excused=0), reapers=stale_views(state))


def stale_views(state: State) -> tuple[Reaper, ...]:
    """Return the reapers after the dispatch count has moved."""
    return tuple(r._replace(fresh=0) if r.fresh else r for r in state.reapers)


def resumed(job: Job) -> Job:
    """resume: → queued; keeps token and attempts, clears the rest."""
    return Job(
        state="queued", token=job.token, version=job.version, life=job.life + 1, pruned=job.pruned
    )


def renewed(state: State, *, stopping: int = 0) -> State:
    """renew: the live attempt's lease is good again; claimed → active; a stop is told."""
    job = state.job._replace(lease=0, extended=0)
    after = ended(state._replace(job=job), job.token, "active")
    return asked_to_stop(after, job.token) if stopping else after


def is_live(state: State, token: int) -> bool:
    """Tell whether the attempt under this token lives."""
    return state.attempts[token - 1].state in LIVE
