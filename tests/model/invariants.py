"""What must hold in every state, and over every step (design, sections 1 and 3).

Each is one short function that says what is wrong, or nothing. None of them looks at a rule: a
rule that is off shows itself only by what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.model.bounds import Bounds
from tests.model.state import (
    FINAL,
    LEASE_OVER,
    LIVE,
    LOST_ENDS,
    OWN_ENDS,
    WAITING,
    Attempt,
    State,
    Step,
    Worker,
    in_flight,
)

HOLDING = frozenset({"asking", "running", "surrendering", "finishing", "dead"})


# -- in every state ------------------------------------------------------------------------------


def final_is_finished(state: State, bounds: Bounds) -> str:
    """Accepted or settled only if final; accepted only what ended as succeeded or failed."""
    job = state.job
    if job.settled and job.state not in FINAL:
        return "settled, but not final"
    if job.accepted and job.state not in {"succeeded", "failed"}:
        return "an accepted attempt, but the job has not ended by one"
    return ""


def live_is_running(state: State, bounds: Bounds) -> str:
    """A live attempt if and only if the job is running with that token."""
    live = [at + 1 for at, attempt in enumerate(state.attempts) if attempt.state in LIVE]
    expected = [state.job.token] if state.job.state == "running" else []
    return "" if live == expected else f"live attempts {live}, expected {expected}"


def one_token_an_attempt(state: State, bounds: Bounds) -> str:
    """The token counts the claims: it was never lowered and never used twice."""
    if state.job.state == "absent" or state.job.token == len(state.attempts):
        return ""
    return f"token {state.job.token} after {len(state.attempts)} claims"


def losses_are_counted(state: State, bounds: Bounds) -> str:
    """``lost_count`` is the number of this life's losses, and the limit ends it."""
    job = state.job
    vanished = [at for at, a in enumerate(state.attempts) if a.state in LOST_ENDS]
    this_life = [at for at in vanished if state.attempts[at].life == job.life]
    lost = sum(not _is_spared(state, at, bounds) for at in this_life)
    if job.lost != lost:
        return f"lost_count {job.lost}, losses {lost}"
    if job.lost >= bounds.max_attempts and job.state != "interrupted":
        return f"{job.lost} losses, and the job is {job.state}"
    if bounds.on_expiry == "hold" and this_life and job.state == "running":
        return "the policy is to hold, and the job runs again"
    return ""


def _is_spared(state: State, at: int, bounds: Bounds) -> bool:
    """Tell whether this attempt vanished when it had been asked to stop, within the cap."""
    this = state.attempts[at]
    earlier = [a for a in state.attempts[:at] if a.life == this.life]
    given_back = [a for a in earlier if a.state == "released" or _stopped(a)]
    return _stopped(this) and len(given_back) < bounds.cap


def _stopped(attempt: Attempt) -> bool:
    return attempt.state in LOST_ENDS and bool(attempt.asked)


def restarts_end_no_job(state: State, bounds: Bounds) -> str:
    """A job is interrupted only if a runner vanished that nobody had asked to stop, or the cap."""
    if state.job.state != "interrupted":
        return ""
    given_back = [a for a in state.attempts if a.state == "released" or _stopped(a)]
    crashed = any(a.state in LOST_ENDS and not a.asked for a in state.attempts)
    if crashed or len(given_back) > bounds.cap:
        return ""
    return "interrupted by restarts alone"


def vanishing_is_bounded(state: State, bounds: Bounds) -> str:
    """However its runners vanish, the job ends at some time: asked to stop is no way around."""
    job = state.job
    vanished = sum(a.state in LOST_ENDS and a.life == job.life for a in state.attempts)
    if vanished < bounds.cap + bounds.max_attempts or job.state in FINAL:
        return ""
    return f"{vanished} runners have vanished, and the job is {job.state}"


def newest_version(state: State, bounds: Bounds) -> str:
    """Each retry is one new version; a live attempt runs the newest."""
    job = state.job
    if job.state == "absent":
        return ""
    retried = sum(attempt.state == "retried" for attempt in state.attempts)
    if job.version != 1 + retried:
        return f"version {job.version} after {retried} retries"
    if job.state == "running" and state.attempts[-1].version != job.version:
        return f"version {state.attempts[-1].version} runs, {job.version} is the newest"
    return ""


def lease_is_in_hands(state: State, bounds: Bounds) -> str:
    """A lease that is not over is known to its process, or that process is dead."""
    job = state.job
    if job.state != "running" or job.lease == LEASE_OVER:
        return ""
    if any(w.token == job.token and w.phase in HOLDING and not w.undone for w in state.workers):
        return ""
    if any(w.phase == "resending" and w.token == job.token for w in state.workers):
        return ""
    return "a good lease, and nobody knows of it" if not _restarted(state, bounds) else ""


def _restarted(state: State, bounds: Bounds) -> bool:
    # A dead process that nobody reported, with a new one in its place: the lease decides.
    return state.left.crash < bounds.left.crash or state.left.stop < bounds.left.stop


def message_is_somewhere(state: State, bounds: Bounds) -> str:
    """A job that says its message is out has one, unless a fault has just taken it."""
    job = state.job
    if job.state not in WAITING or job.bound or not job.dispatched or job.excused:
        return ""
    return "" if in_flight(state, job.version) else "dispatched, and no message anywhere"


def settled_is_told(state: State, bounds: Bounds) -> str:
    """A job is settled only after Celery was told this life's outcome."""
    return "settled, and Celery was never told" if state.job.settled > state.job.told else ""


def told_once(state: State, bounds: Bounds) -> str:
    """Celery is told twice only around a death, a lost message or a timeout that was too short."""
    full, left = bounds.left, state.left
    excused = (left.crash, left.slow, left.loss, left.double, left.stop) != (
        full.crash, full.slow, full.loss, full.double, full.stop
    )  # fmt: skip
    return "told twice, and nobody died" if state.job.told > 1 and not excused else ""


def accepted_is_its_own(state: State, bounds: Bounds) -> str:
    """The accepted attempt ended by its own word, in this life."""
    job = state.job
    if not job.accepted:
        return ""
    attempt = state.attempts[job.accepted - 1]
    by_person = bounds.left.operator > state.left.operator
    if attempt.state in {"completed", "failed"} or by_person:
        return ""
    return f"accepted attempt {job.accepted}, which is {attempt.state}"


def extended_once(state: State, bounds: Bounds) -> str:
    """The amnesty is granted at most once between two renewals."""
    return "extended twice" if state.job.extended > 1 else ""


def told_of_true_losses(state: State, bounds: Bounds) -> str:
    """A runner is told of a loss only if its own attempt was ended by somebody else."""
    for worker in state.workers:
        if worker.told and not worker.undone and worker.token <= len(state.attempts):
            end = state.attempts[worker.token - 1].state
            if end in LIVE or end in OWN_ENDS:
                return f"told that lease {worker.token} is lost, and it is {end}"
    return ""


STATE_INVARIANTS: tuple[Callable[[State, Bounds], str], ...] = (
    final_is_finished,
    live_is_running,
    one_token_an_attempt,
    restarts_end_no_job,
    vanishing_is_bounded,
    losses_are_counted,
    newest_version,
    lease_is_in_hands,
    message_is_somewhere,
    settled_is_told,
    told_once,
    accepted_is_its_own,
    extended_once,
    told_of_true_losses,
)


# -- over every step -----------------------------------------------------------------------------


def history_only_grows(before: State, step: Step, after: State) -> str:
    """Attempts are added; an ended one changes only by its late outcome; tokens never fall."""
    if step.verb in {"prune", "forget claim"}:
        return ""
    if after.job.token < before.job.token or len(after.attempts) < len(before.attempts):
        return "the token fell or an attempt is gone"
    for old, new in zip(before.attempts, after.attempts, strict=False):
        if old.state not in LIVE and (old.state, old.version) != (new.state, new.version):
            return f"an attempt that was {old.state} is {new.state}"
        if old.late > new.late or old.life != new.life:
            return "a late outcome is gone"
        if old.asked > new.asked or (old.state not in LIVE and old.asked != new.asked):
            return "that it was asked to stop is gone, or was written after its end"
    return ""


def final_stays(before: State, step: Step, after: State) -> str:
    """A final state and what was accepted change only by a resume: one acceptance a life."""
    if before.job.state not in FINAL or step.verb in {"resume", "prune"}:
        return ""
    old = (before.job.state, before.job.accepted, before.job.life)
    new = (after.job.state, after.job.accepted, after.job.life)
    return "" if old == new else f"{old} became {new}"


def stale_changes_its_own_row(before: State, step: Step, after: State) -> str:  # noqa: PLR0911  one line a case
    """What a stale attempt does changes no more than the late outcome on its own row."""
    worker = _actor(before, step)
    if worker is None or worker.phase not in {"finishing", "rejecting", "surrendering"}:
        return ""
    if step.verb in {"die", "renew", "hear"}:
        return ""
    if _holds(before, worker):
        return ""
    if before.job != after.job:
        return f"stale attempt {worker.token} changed the job"
    own = worker.token - 1
    for at, (old, new) in enumerate(zip(before.attempts, after.attempts, strict=True)):
        if old != new and (at != own or worker.undone or old.state != new.state):
            return f"stale attempt {worker.token} changed attempt {at + 1}"
    if after.broker != before.broker:
        return f"stale attempt {worker.token} published"
    return ""


def ends_are_just(before: State, step: Step, after: State) -> str:
    """Nobody ends a live attempt but its runner, its death, its lease's end, or a person."""
    if before.job.state != "running" or len(before.attempts) != before.job.token:
        return ""
    at = before.job.token - 1
    if at >= len(after.attempts):
        return ""
    end = after.attempts[at].state
    if end in LIVE:
        return ""
    worker = _actor(before, step)
    own = worker is not None and worker.token == before.job.token and not worker.undone
    if end == "expired" and before.job.lease != LEASE_OVER:
        return "expired, but its lease is good"
    if end in OWN_ENDS | {"lost"} and not own:
        return f"{end} by somebody else"
    return ""


def publishes_what_is_accepted(before: State, step: Step, after: State) -> str:
    """Celery is told, in a job's life, only what was accepted in it."""
    worker = _actor(before, step)
    if worker is None or step.verb == "die":
        return ""
    told = after.workers[step.place]
    if told.phase == "publishing" and worker.phase != "publishing":
        job = before.job if told.outcome == "replay" else after.job
        if job.state not in FINAL:
            return f"about to publish {told.outcome} of a job that is {job.state}"
        if told.outcome == "replay":
            return ""
        if job.accepted != told.token:
            return f"about to publish attempt {told.token}, accepted is {job.accepted}"
    return ""


def given_up_is_given_up(before: State, step: Step, after: State) -> str:
    """Once ``check()`` has raised the lease is never renewed and nothing of it accepted."""
    worker = _actor(before, step)
    if worker is None or not worker.gave_up:
        return ""
    if step.verb == "renew" and step.answer == "renewed":
        return "renewed after check() has raised"
    if after.job.accepted == worker.token and not before.job.accepted:
        return "accepted after check() has raised"
    return ""


def pruned_stays_away(before: State, step: Step, after: State) -> str:
    """A late message of a pruned job does not run it again."""
    if before.job.pruned and before.job.state == "absent" and after.job.state != "absent":
        return "a pruned job is back"
    return ""


def one_dispatch_a_count(before: State, step: Step, after: State) -> str:
    """Two dispatchers that read the same count do not both send."""
    if step.actor != "reaper" or not step.verb.startswith("dispatch") or step.answer != "done":
        return ""
    return "" if before.reapers[step.place].fresh else "dispatched on a count that had moved"


STEP_INVARIANTS: tuple[Callable[[State, Step, State], str], ...] = (
    history_only_grows,
    final_stays,
    stale_changes_its_own_row,
    ends_are_just,
    publishes_what_is_accepted,
    given_up_is_given_up,
    pruned_stays_away,
    one_dispatch_a_count,
)


def _actor(state: State, step: Step) -> Worker | None:
    return state.workers[step.place] if step.actor == "worker" else None


def _holds(state: State, worker: Worker) -> bool:
    job = state.job
    return job.state == "running" and job.token == worker.token and not worker.undone
