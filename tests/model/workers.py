"""The steps of a process that runs bodies, from a delivery to its acknowledgement.

One step is one commit of the store, one message, or one decision of the runner; between two of
them everybody else may act. The heartbeat's answer is a step of its own, since it may arrive
when the process is at something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import table
from tests.model.bounds import Bounds
from tests.model.rules import Rules
from tests.model.state import (
    DELAYED,
    FINAL,
    LEASE_ENDING,
    LEASE_GOOD,
    LEASE_OVER,
    OWN_ENDS,
    Job,
    Message,
    State,
    Step,
    Worker,
)

Steps = Iterator[tuple[Step, State]]
IDLE = Worker()


def steps(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """Yield what each worker may do next."""
    before: Worker | None = None
    for index, worker in enumerate(state.workers):
        if worker == before:
            continue  # what cannot be told apart does the same
        before = worker
        if worker.heard:
            yield _hears(state, index, rules)
        if worker.phase in _PHASES:
            yield from _PHASES[worker.phase](state, index, bounds, rules)
        if worker.phase in {"idle", "dead"} or bounds.one_process:
            continue
        if worker.stopping or state.left.crash:
            yield _dies(state, index)


def _with(state: State, index: int, worker: Worker) -> State:
    workers = list(state.workers)
    workers[index] = worker
    return state._replace(workers=tuple(workers))


def _free(state: State, index: int) -> State:
    """Return the state after the delivery was acknowledged."""
    return _with(state, index, Worker(heard=state.workers[index].heard))


def _step(index: int, verb: str, answer: str = "", *, fault: bool = False) -> Step:
    return Step("worker", index, verb, answer, fault)


def _lost_reply(state: State) -> State:
    return state._replace(left=state.left._replace(reply=state.left.reply - 1))


def owns(state: State, worker: Worker, bounds: Bounds) -> bool:
    """Tell whether this process is the job's ``lease_owner``."""
    if bounds.one_process:
        return True
    return worker.token == state.job.token and not worker.undone


def mine(state: State, worker: Worker, bounds: Bounds, rules: Rules) -> bool:
    """*Mine*: running, under this token, held by this process."""
    job = state.job
    return (
        job.state == "running"
        and (job.token == worker.token or not rules.mine_token)
        and (owns(state, worker, bounds) or not rules.mine_owner)
    )


def has_row(state: State, worker: Worker) -> bool:
    """Tell whether this attempt has a row: a fail-over or ``prune`` may have removed it."""
    return not worker.undone and worker.token <= len(state.attempts)


# -- a delivery ----------------------------------------------------------------------------------


def _idle(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    for message in sorted(set(state.broker)):
        rest = list(state.broker)
        rest.remove(message)
        asking = worker._replace(phase="asking", version=message.version, replay=message.replay)
        yield (
            _step(index, "receive", f"v{message.version}" + (" replay" if message.replay else "")),
            _with(state._replace(broker=tuple(rest)), index, asking),
        )


def _asking(  # noqa: C901, PLR0912  the answers of a claim, in the order in which they are decided
    state: State, index: int, bounds: Bounds, rules: Rules
) -> Steps:
    worker, job = state.workers[index], state.job
    if worker.seen:
        yield from _takes_over(state, index, bounds, rules)
        return
    version = worker.version or 1
    if job.state == "absent":
        yield from _no_row(state, index, rules)
    elif table.claimable(job, version, rules):
        yield from _wins(state, index, table.claimed(state, version), "claim", rules)
    elif job.state in FINAL:
        yield from _finds_final(state, index, version)
    elif (
        rules.claim_nonce
        and worker.token
        and job.state == "running"
        and (worker.token == job.token)
    ):
        yield _step(index, "claim", "won before"), _with(state, index, _runner(worker, job))
    elif job.version != version:
        yield _step(index, "claim", "superseded"), _free(state, index)
    elif job.state == "running":
        if job.lease == LEASE_OVER and not job.bound:
            seen = worker._replace(seen=job.token)
            yield _step(index, "claim", "lease over"), _with(state, index, seen)
        else:
            yield _step(index, "claim", "running"), _free(state, index)
    elif job.state == "held":
        yield _step(index, "claim", "held"), _free(state, index)
    elif job.bound:
        yield _step(index, "claim", "too late"), _free(state, index)
    else:
        refused = _free(state, index)
        if rules.not_due_undispatches:
            refused = refused._replace(job=job._replace(dispatched=0, excused=0))
        yield _step(index, "claim", "not due"), refused


def _runner(worker: Worker, job: Job) -> Worker:
    return worker._replace(phase="running", token=job.token, seen=0, version=job.version)


def _wins(state: State, index: int, after: State, verb: str, rules: Rules) -> Steps:
    worker = state.workers[index]
    yield _step(index, verb, "won"), _with(after, index, _runner(worker, after.job))
    if state.left.reply:
        unaware = worker._replace(token=after.job.token, seen=0)
        yield (
            _step(index, verb, "won, reply lost", fault=True),
            _lost_reply(_with(after, index, unaware)),
        )


def _no_row(state: State, index: int, rules: Rules) -> Steps:
    if state.workers[index].version and rules.recorded_header:
        yield _step(index, "claim", "pruned"), _free(state, index)
        return
    job = Job(state="queued", version=1, dispatched=1, pruned=state.job.pruned)
    yield _step(index, "adopt"), state._replace(job=job)


def _finds_final(state: State, index: int, version: int) -> Steps:
    worker, job = state.workers[index], state.job
    tellable = not job.settled and job.version == version
    replayer = worker._replace(
        phase="publishing", outcome="replay", token=job.token, life=job.life, seen=0
    )
    if tellable and worker.replay:
        yield _step(index, "claim", "replay"), _with(state, index, replayer)
        return
    yield _step(index, "claim", "final"), _free(state, index)
    if tellable and job.state != "cancelled" and state.left.slow:
        slow = state._replace(left=state.left._replace(slow=state.left.slow - 1))
        yield (
            _step(index, "claim", "aged: replay", fault=True),
            _with(slow, index, replayer),
        )


def _takes_over(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker, job = state.workers[index], state.job
    if job.state == "absent":
        yield _step(index, "take over", "busy"), _free(state, index)
    elif job.state != "running" or job.token != worker.seen:
        yield _step(index, "take over", "changed"), _with(state, index, worker._replace(seen=0))
    elif rules.take_over_expiry and job.lease != LEASE_OVER:
        yield _step(index, "take over", "renewed"), _free(state, index)
    elif rules.take_over_policy and table.policy(state, bounds, rules)[0] != "queued":
        given_on = table.lost(state, "expired", bounds, rules)
        yield _step(index, "take over", "policy"), _free(given_on, index)
    else:
        version = worker.version or 1
        taken = table.taken_over(state, version, bounds, rules)
        yield from _wins(state, index, taken, "take over", rules)


# -- the body under its lease --------------------------------------------------------------------


def _running(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    yield from _renews(state, index, bounds)
    if state.left.stop and not worker.stopping:
        left = state.left._replace(stop=state.left.stop - 1)
        asked = worker._replace(stopping=1)
        yield (
            _step(index, "stop requested", fault=True),
            _with(state._replace(left=left), index, asked),
        )
    if may_check(state, worker):
        giving_up = worker._replace(phase="surrendering", gave_up=1)
        yield _step(index, "check", "raises"), _with(state, index, giving_up)
    for outcome in bounds.bodies:
        wish = outcome in {"retry", "release", "hold"}
        if wish and not state.left.give_back:
            continue
        left = state.left._replace(give_back=state.left.give_back - 1) if wish else state.left
        said = outcome
        if outcome == "unserialisable" and rules.serialise_first:
            said = "error"
            if "error" in bounds.bodies:
                continue  # the same step: the attempt fails as invalid
        ending = worker._replace(phase="finishing", outcome=said)
        yield _step(index, "body", said), _with(state._replace(left=left), index, ending)


def may_check(state: State, worker: Worker) -> bool:
    """Tell whether the runner's own deadline may have passed, or it was told of its loss."""
    holds = state.job.state == "running" and state.job.token == worker.token and not worker.undone
    return bool(worker.told) or not holds or state.job.lease >= LEASE_ENDING


def _renews(state: State, index: int, bounds: Bounds) -> Steps:
    """One beat: what changes nothing is left out."""
    worker, job = state.workers[index], state.job
    if worker.told or worker.undone:
        return
    if job.state == "running" and worker.token == job.token:
        live = state.attempts[-1]
        news = live.state == "claimed" or worker.stopping > live.asked
        if job.lease != LEASE_GOOD or job.extended or news:
            after = table.renewed(state, stopping=worker.stopping)
            yield _step(index, "renew", "renewed"), after
    elif not worker.heard:
        yield (
            _step(index, "renew", "lost"),
            _with(state, index, worker._replace(heard=worker.token)),
        )


def _hears(state: State, index: int, rules: Rules) -> tuple[Step, State]:
    """The heartbeat's answer «lost» arrives: it is for one token, or it is dropped."""
    worker = state.workers[index]
    phases = {"running"}
    if not rules.leave_before_finish:
        phases = {"running", "finishing", "publishing"}
    if not rules.surrender_leaves_heartbeat:
        phases.add("surrendering")
    fits = worker.token == worker.heard or not rules.loss_heard_by_token
    if worker.phase in phases and fits and worker.token:
        told = worker._replace(heard=0, told=1)
        return _step(index, "hear", "lost"), _with(state, index, told)
    return _step(index, "hear", "dropped"), _with(state, index, worker._replace(heard=0))


def _surrendering(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    if not rules.surrender_leaves_heartbeat:
        yield from _renews(state, index, bounds)
    if not rules.surrender_ends_attempt:
        going_on = worker._replace(phase="finishing", outcome="ok")
        yield _step(index, "body", "goes on"), _with(state, index, going_on)
        return
    after, answer = state, "too late"
    if mine(state, worker, bounds, rules):
        after, answer = table.lost(state, "lost", bounds, rules), "lost"
    yield _step(index, "surrender", answer), _free(after, index)
    went_on = worker._replace(phase="rejecting", outcome="ok")
    yield _step(index, "surrender", f"{answer}, body went on"), _with(after, index, went_on)


# -- the end of an attempt -----------------------------------------------------------------------


def _finishing(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    if not rules.leave_before_finish:
        yield from _renews(state, index, bounds)
    if worker.outcome == "retry" and not rules.retry_commits_first:
        yield from _publishes_first(state, index, bounds, rules)
        return
    if state.left.reply and not worker.unsure:
        unheard = _with(state, index, worker._replace(unsure=1))
        yield _step(index, worker.outcome, "request lost", fault=True), _lost_reply(unheard)
    if mine(state, worker, bounds, rules):
        after = table.finished(state, worker.token, worker.outcome, rules)
        yield _step(index, worker.outcome, "accepted"), _won(after, index, after.job)
        if state.left.reply:
            unsure = _with(after, index, worker._replace(unsure=1))
            yield (
                _step(index, worker.outcome, "accepted, reply lost", fault=True),
                _lost_reply(unsure),
            )
        return
    if _own_end(state, worker, rules):
        yield _step(index, worker.outcome, "accepted before"), _won_before(state, index, rules)
        return
    if not rules.nothing_from_stale:
        yield _step(index, worker.outcome, "stale"), _won(state, index, state.job)
        return
    stale = worker._replace(phase="rejecting", unsure=0)
    yield _step(index, worker.outcome, "stale"), _with(state, index, stale)


def _own_end(state: State, worker: Worker, rules: Rules) -> bool:
    """*Did my commit happen?* The attempt asks its own row."""
    if not has_row(state, worker):
        return False
    if worker.unsure and not rules.own_row_asked:
        return True
    end = state.attempts[worker.token - 1].state
    if not rules.own_row_same_outcome:
        return end in OWN_ENDS
    return end == table.ENDS[worker.outcome]


def _won(state: State, index: int, job: Job) -> State:
    """Return the state in which the runner goes on with an outcome that was accepted."""
    worker = state.workers[index]._replace(unsure=0)
    if worker.outcome in {"ok", "unserialisable", "error"}:
        return _publishes(state, index, worker, job)
    if worker.outcome == "retry":
        version = state.attempts[worker.token - 1].version + 1
        return _with(state, index, worker._replace(phase="resending", version=version))
    return _free(state, index)


def _won_before(state: State, index: int, rules: Rules) -> State:
    """Go on with an outcome whose reply was lost: is it still the job's?"""
    worker, job = state.workers[index], state.job
    asked = rules.own_row_asked and rules.own_row_same_outcome
    if worker.outcome in {"ok", "unserialisable", "error"} and asked:
        still = job.accepted == worker.token
        if not rules.own_row_still_accepted:
            still = job.token == worker.token
        if job.state not in FINAL or not still:
            # Resumed meanwhile: what was accepted in its last life is not told again.
            return _free(state, index)
    return _won(state, index, job)


def _publishes(state: State, index: int, worker: Worker, job: Job) -> State:
    telling = worker._replace(phase="publishing", life=job.life)
    return _with(state, index, telling)


def _publishes_first(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """Off: the retry's message leaves before its transition has committed."""
    worker = state.workers[index]
    if not worker.unsure:
        early = state._replace(broker=(*state.broker, Message(worker.version + 1)))
        yield _step(index, "resend", "sent"), _with(early, index, worker._replace(unsure=1))
    elif mine(state, worker, bounds, rules):
        yield (
            _step(index, "retry", "accepted"),
            _free(table.finished(state, worker.token, "retry", rules), index),
        )
    else:
        yield _step(index, "retry", "stale"), _free(state, index)


def _rejecting(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    if not has_row(state, worker):
        yield _step(index, "reject", "no row"), _free(state, index)
        return
    yield _step(index, "reject"), _free(table.rejected(state, worker.token), index)


def _publishing(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """Celery stores the result and sends the callbacks."""
    worker, job = state.workers[index], state.job
    if not rules.leave_before_finish:
        yield from _renews(state, index, bounds)
    if worker.outcome == "unserialisable" or (
        worker.outcome == "replay"
        and job.accepted
        and not rules.serialise_first
        and "unserialisable" in bounds.bodies
    ):
        yield _step(index, "publish", "cannot be serialised"), _free(state, index)
        return
    after = state
    if worker.life == job.life and job.state in FINAL:
        after = state._replace(job=job._replace(told=min(2, job.told + 1)))
    yield _step(index, "publish"), _with(after, index, worker._replace(phase="settling"))


def _settling(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    worker = state.workers[index]
    after = settled(state, worker.token, worker.life, rules)
    answer = "settled" if after is not state else "nothing"
    yield _step(index, "settle", answer), _free(after, index)


def settled(state: State, token: int, life: int, rules: Rules) -> State:
    """settle: final, unsettled, and the published outcome is still the job's."""
    job = state.job
    same = job.token == token and job.life == life
    if job.state in FINAL and not job.settled and (same or not rules.settle_outcome):
        return state._replace(job=job._replace(settled=1))
    return state


def _resending(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """The retry's message leaves, after its transition has committed."""
    worker, job = state.workers[index], state.job
    message = Message(worker.version)
    if not rules.retry_version_in_transition and job.version < worker.version:
        written = state._replace(job=job._replace(version=worker.version))
        yield _step(index, "write version"), written
        return
    sent = state._replace(broker=(*state.broker, message))
    yield _step(index, "resend", "sent"), _free(sent, index)
    # ``retry(throw=False)``: the body goes on and returns a value.
    returns = worker._replace(phase="finishing", outcome="ok", version=worker.version - 1)
    yield _step(index, "resend", "sent, body returns"), _with(sent, index, returns)
    if state.left.loss:
        left = state.left._replace(loss=state.left.loss - 1)
        failed = state._replace(left=left)
        waits = job.state in DELAYED or job.state == "queued"
        if waits and job.version == worker.version and rules.publish_error_undispatches:
            failed = failed._replace(job=job._replace(dispatched=0, excused=0))
        yield _step(index, "resend", "refused", fault=True), _free(failed, index)


# -- death ---------------------------------------------------------------------------------------


def _dies(state: State, index: int) -> tuple[Step, State]:
    """Kill a process, also one that was asked to stop and outlives the grace.

    The broker sends its message again; a resend never leaves.
    """
    worker, left = state.workers[index], state.left
    if not worker.stopping:
        left = left._replace(crash=left.crash - 1)
    returned = Message(worker.version, worker.replay)
    job = state.job
    if worker.phase == "resending":
        returned = Message(worker.version - 1)
    if worker.phase == "resending" or (worker.outcome == "retry" and worker.unsure):
        job = job._replace(excused=1) if job.dispatched else job
    dead = IDLE
    if worker.token and not worker.undone:
        dead = Worker(phase="dead", token=worker.token, stopping=worker.stopping)
    after = state._replace(left=left, broker=(*state.broker, returned), job=job)
    return _step(index, "die", worker.phase, fault=True), _with(after, index, dead)


def _dead(state: State, index: int, bounds: Bounds, rules: Rules) -> Steps:
    """Its parent reports the death, by token and owner, or nobody does."""
    worker, job = state.workers[index], state.job
    hits = job.state == "running" and (job.token == worker.token or not rules.loss_token_owner)
    after = state
    if hits:
        told = table.asked_to_stop(state, job.token) if worker.stopping else state
        after = table.lost(told, "lost", bounds, rules)
    yield (
        _step(index, "report death", "lost" if hits else "too late"),
        _with(after, index, IDLE),
    )
    yield _step(index, "restart"), _with(state, index, IDLE)


_PHASES = {
    "idle": _idle,
    "asking": _asking,
    "running": _running,
    "surrendering": _surrendering,
    "finishing": _finishing,
    "rejecting": _rejecting,
    "publishing": _publishing,
    "settling": _settling,
    "resending": _resending,
    "dead": _dead,
}
