"""The checker: which of the guarantees does this evidence break? Pure, and unforgiving.

Each rule is one function that yields violations; ``test_checker`` plants one of every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.soak.evidence import AttemptRow, Evidence, JobRow

#: Ends of a job that are spared: hand-overs, and runners that vanished after a request to stop
#: (design §7). Written down again: the code is what is judged.
SPARED_ENDS = 10
#: States of attempts whose runner vanished.
VANISHED = frozenset({"expired", "lost", "stalled"})
#: What Celery must say of a final job.
RESULTS = {
    "succeeded": "SUCCESS",
    "failed": "FAILURE",
    "interrupted": "FAILURE",
    "cancelled": "REVOKED",
}


@dataclass(frozen=True)
class Violation:
    """One broken guarantee.

    Args:
        rule: its name.
        job_id: whose.
        detail: what was found.
    """

    rule: str
    job_id: str
    detail: str


def violations(evidence: Evidence) -> list[Violation]:
    """Return every violation; empty is what a soak is to prove."""
    return [
        Violation(rule.__name__.removeprefix("_"), job_id, detail)
        for rule in RULES
        for job_id, detail in rule(evidence)
    ]


Found = Iterator[tuple[str, str]]


def _lost(evidence: Evidence) -> Found:
    """What was promised, or recorded, is final."""
    for job_id in evidence.promised:
        if job_id not in evidence.jobs:
            yield job_id, "promised, and not in the store"
    for job in evidence.jobs.values():
        if not job.is_final:
            yield job.id, f"{job.task} is {job.state} at the end"


def _unsettled(evidence: Evidence) -> Found:
    """Celery has been told of each end."""
    for job in evidence.jobs.values():
        if job.is_final and job.settled_at is None:
            yield job.id, f"{job.task} is {job.state} and not settled"


def _accepted(evidence: Evidence) -> Found:
    """A succeeded job has exactly one accepted attempt, any other none."""
    for job in evidence.jobs.values():
        accepted = [
            attempt.fencing_token
            for attempt in evidence.attempts.get(job.id, ())
            if attempt.state == "completed"
        ]
        wanted = [job.accepted_attempt] if job.state == "succeeded" else []
        if accepted != wanted:
            yield job.id, f"{job.state}, accepts {job.accepted_attempt}, completed: {accepted}"


def _tokens(evidence: Evidence) -> Found:
    """Tokens are 1 to n without a gap, and were claimed in that order, each once."""
    for job in evidence.jobs.values():
        wanted = list(range(1, job.fencing_token + 1))
        rows = [attempt.fencing_token for attempt in evidence.attempts.get(job.id, ())]
        seen = [line.token for line in evidence.witness.get(job.id, ()) if line.kind == "claimed"]
        if rows != wanted:
            yield job.id, f"token {job.fencing_token}, attempts {rows}"
        if seen != wanted:
            yield job.id, f"token {job.fencing_token}, claimed in the order {seen}"


def _live(evidence: Evidence) -> Found:
    """No attempt lives on."""
    for attempts in evidence.attempts.values():
        for attempt in attempts:
            if attempt.ended_at is None:
                yield attempt.job_id, f"attempt {attempt.fencing_token} is {attempt.state}"


def _rewritten(evidence: Evidence) -> Found:
    """What had ended was never changed."""
    for lines in evidence.witness.values():
        for line in lines:
            if line.kind in {"rewritten", "reopened", "jumped"}:
                yield line.job_id, f"{line.kind}: token {line.token}, now {line.detail}"


def _stale(evidence: Evidence) -> Found:
    """No effect came after a claim by a larger token, nor after the job's end."""
    for job_id, lines in evidence.witness.items():
        newest, finished = 0, None
        for line in lines:
            if line.kind == "claimed":
                newest = max(newest, line.token)
            elif line.kind == "finished":
                finished = line
            elif line.kind == "effect":
                said = f"effect {line.step!r} of token {line.token}, line {line.seq},"
                if line.token < newest:
                    yield job_id, f"{said} came after the claim by {newest}"
                if line.token > newest:
                    yield job_id, f"{said} came before its claim"
                if finished is not None:
                    yield job_id, f"{said} came after the job's end in line {finished.seq}"


def _effects(evidence: Evidence) -> Found:
    """A succeeded job has exactly one accepted final effect, and no step of an attempt twice."""
    for job in evidence.jobs.values():
        lines = [line for line in evidence.witness.get(job.id, ()) if line.kind == "effect"]
        if job.state == "succeeded":
            accepted = [
                line
                for line in lines
                if line.step == "final" and line.token == job.accepted_attempt
            ]
            if len(accepted) != 1:
                yield job.id, f"{len(accepted)} final effects of token {job.accepted_attempt}"
        done = [(line.step, line.token) for line in lines]
        for step in sorted({one for one in done if done.count(one) > 1}):
            yield job.id, f"effect {step} {done.count(step)} times"


def _lost_count(evidence: Evidence) -> Found:
    """The count of losses is that of the attempts, and the limit ended the job when it was met."""
    for job in evidence.jobs.values():
        attempts = evidence.attempts.get(job.id, ())
        wanted = _losses(attempts)
        if job.lost_count != wanted:
            ends = [
                (attempt.state, attempt.stop_reason, attempt.stop_requested_at is not None)
                for attempt in attempts
            ]
            yield job.id, f"lost_count is {job.lost_count}, attempts say {wanted}: {ends}"
        if (job.state == "interrupted") != (job.lost_count >= job.max_attempts):
            yield job.id, f"{job.state} after {job.lost_count} losses of {job.max_attempts}"


def _losses(attempts: Sequence[AttemptRow]) -> int:
    losses = spared = 0
    for attempt in attempts:
        was_asked = attempt.stop_requested_at is not None and attempt.state != "stalled"
        if attempt.state in VANISHED and not (was_asked and spared < SPARED_ENDS):
            losses += 1
        spared += attempt.state == "released" or (attempt.state in VANISHED and was_asked)
    return losses


def _canvas(evidence: Evidence) -> Found:
    """What follows others ran if, and only if, all of them succeeded."""
    for follower in evidence.follows:
        before = [evidence.jobs.get(job_id) for job_id in follower.after]
        succeeded = all(job is not None and job.state == "succeeded" for job in before)
        job = evidence.jobs.get(follower.job_id)
        if succeeded and job is None:
            yield follower.job_id, f"never sent, though {follower.after} succeeded"
        if not succeeded and job is not None:
            yield follower.job_id, f"was sent after {[_state(one) for one in before]}"


def _results(evidence: Evidence) -> Found:
    """Celery's result backend says of each job what the store says."""
    for job_id, result in evidence.results.items():
        job = evidence.jobs[job_id]
        if not job.is_final:
            continue
        if result is None:
            yield job_id, f"{job.state}, and the result backend has nothing"
        elif result[0] != RESULTS[job.state]:
            yield job_id, f"{job.task} {job.state}, and Celery says {result[0]}: {result[1]!r}"
        elif job.state == "succeeded" and result[1] != job.accepted_attempt:
            yield job_id, f"accepts {job.accepted_attempt}, and Celery has {result[1]!r}"


def _state(job: JobRow | None) -> str:
    return "none" if job is None else job.state


RULES: tuple[Callable[[Evidence], Found], ...] = (
    _lost,
    _unsettled,
    _accepted,
    _tokens,
    _live,
    _rewritten,
    _stale,
    _effects,
    _lost_count,
    _canvas,
    _results,
)
