"""The verdict: what the demo claims, each claim computed from the evidence. Pure.

A check that finds nothing to look at fails: a demo in which nobody was killed proves nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from celery_lease.demo.evidence import AttemptSeen, Evidence, JobSeen
from celery_lease.demo.indexing import grand_total
from celery_lease.states import AttemptState, JobState, LateOutcome

LONGEST_SECONDS = 90.0
_VANISHED = frozenset({AttemptState.EXPIRED, AttemptState.LOST})


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and what was found.

    Attributes:
        claim: what must be so.
        problems: what is not so; empty when the claim holds.
        found: what was counted, for people.
    """

    claim: str
    problems: tuple[str, ...]
    found: str

    @property
    def holds(self) -> bool:
        """True when it is so."""
        return not self.problems


def verdict(evidence: Evidence) -> list[Check]:
    """Return every check."""
    checks: list[Callable[[Evidence], Check]] = [
        succeeded_exactly_once,
        totals_are_those_of_a_plain_run,
        celery_was_told,
        leases_never_overlap,
        killed_attempts_ended,
        zombie_was_rejected,
        in_time,
    ]
    return [check(evidence) for check in checks]


def succeeded_exactly_once(evidence: Evidence) -> Check:
    """Each submitted package has one succeeded job, accepted from its one completed attempt."""
    problems = []
    seen = [job.id for job in evidence.jobs]
    missing = evidence.names.keys() - set(seen)
    problems += [f"{evidence.names[job_id]}: its job is gone" for job_id in sorted(missing)]
    problems += [f"{job_id}: a job nobody submitted" for job_id in set(seen) - set(evidence.names)]
    for job in evidence.jobs:
        completed = [one.token for one in job.attempts if one.state is AttemptState.COMPLETED]
        if job.state is not JobState.SUCCEEDED:
            problems.append(f"{_name(evidence, job)} is {job.state}")
        elif completed != [job.accepted_attempt]:
            problems.append(
                f"{_name(evidence, job)}: attempts {completed} completed, "
                f"{job.accepted_attempt} was accepted"
            )
    again = sum(len(job.attempts) > 1 for job in evidence.jobs)
    found = (
        f"{len(seen)} jobs, {len(evidence.attempts())} attempts; "
        f"{again} jobs needed more than one, each was accepted from one"
    )
    return _check("every job succeeded exactly once", problems, found, seen=bool(seen))


def totals_are_those_of_a_plain_run(evidence: Evidence) -> Check:
    """Each job's result, and the sum of all, is what a plain sequential run counts."""
    leased = {_name(evidence, job): job.result for job in evidence.jobs}
    problems = [
        f"{name}: the leased job and the plain run differ"
        for name in sorted(leased.keys() | evidence.plain.keys())
        if leased.get(name) is None or leased.get(name) != evidence.plain.get(name)
    ]
    found = ""
    if not problems:
        total = grand_total(leased[name] for name in sorted(leased))
        plain = grand_total(evidence.plain[name] for name in sorted(evidence.plain))
        if total != plain:
            problems.append("the totals differ")
        found = (
            f"{total.files} files, {total.lines:,} lines, {total.tokens.total():,} tokens, "
            f"digest {total.digest[:12]}…"
        )
        if total.unreadable:
            found += f"; {total.unreadable} files that tokenize refuses, in both"
    return _check("totals identical to a plain run", problems, found, seen=bool(leased))


def celery_was_told(evidence: Evidence) -> Check:
    """Celery's own result of each job is the accepted one, and its bookkeeping is closed."""
    problems = []
    for job in evidence.jobs:
        state, result = job.celery
        if (state, result) != ("SUCCESS", job.result):
            problems.append(f"{_name(evidence, job)}: Celery's result is another one ({state})")
        elif not job.settled:
            problems.append(f"{_name(evidence, job)} is not settled")
    found = f"{len(evidence.jobs)} results in its backend, each the accepted one"
    return _check("Celery knows each result", problems, found, seen=bool(evidence.jobs))


def leases_never_overlap(evidence: Evidence) -> Check:
    """A later attempt has a larger token and began after the one before it had ended."""
    problems = []
    turns = 0
    for job in evidence.jobs:
        for before, after in pairwise(sorted(job.attempts, key=lambda one: one.token)):
            turns += 1
            if before.ended_at is None or before.ended_at > after.claimed_at:
                problems.append(
                    f"{_name(evidence, job)}: attempt {after.token} began "
                    f"before attempt {before.token} ended"
                )
    found = f"{turns} times a job was given on, each time under a higher token"
    return _check("no job ever had two leases", problems, found, seen=turns > 0)


def killed_attempts_ended(evidence: Evidence) -> Check:
    """What the killed worker was in ended as expired or lost, and was completed elsewhere."""
    problems = []
    named = []
    for key in evidence.killed:
        attempt, job = evidence.attempt(key), evidence.job(key[0])
        if attempt is None or job is None:
            problems.append(f"attempt {key[1]} of {key[0]} has no row")
            continue
        name = _name(evidence, job)
        if attempt.state not in _VANISHED:
            problems.append(f"{name}: the killed attempt {attempt.token} is {attempt.state}")
        accepted = _accepted(job)
        if accepted is None or accepted.worker == evidence.killed_worker:
            problems.append(f"{name}: nobody else completed it")
        else:
            named.append(f"{name} {attempt.state}, then completed by {accepted.worker}")
    if not any(_is_half_done(evidence.attempt(key)) for key in evidence.killed):
        problems.append("none of them was in mid-job")
    claim = f"the attempts killed with {evidence.killed_worker} ended, their jobs did not"
    return _check(claim, problems, "; ".join(named), seen=bool(evidence.killed))


def zombie_was_rejected(evidence: Evidence) -> Check:
    """The frozen attempt's result came after the take-over, is kept, and changed nothing."""
    claim = "the zombie's late result was rejected, and kept"
    attempt, job = evidence.attempt(evidence.zombie), evidence.job(evidence.zombie[0])
    accepted = None if job is None else _accepted(job)
    if attempt is None or job is None or accepted is None:
        return _check(claim, ["the frozen attempt's job was never completed"], "", seen=True)
    problems = []
    if attempt.state not in _VANISHED:
        problems.append(f"its attempt is {attempt.state}")
    if accepted.token <= attempt.token:
        problems.append(f"attempt {accepted.token} was accepted, the zombie was {attempt.token}")
    if accepted.worker == evidence.frozen_worker:
        problems.append("the frozen worker took over from itself")
    if attempt.rejected_at is None or attempt.late_outcome is not LateOutcome.SUCCEEDED:
        problems.append("it never came")
    elif accepted.ended_at is None or attempt.rejected_at < accepted.ended_at:
        problems.append("it came before the take-over was completed")
    problems += _late_result_problems(attempt, job)
    size = len(attempt.late_result or b"")
    found = (
        f"token {attempt.token} came after token {accepted.token} had completed on "
        f"{accepted.worker}; {size} bytes kept, {(attempt.late_digest or '')[:19]}…"
    )
    return _check(claim, problems, found, seen=True)


def in_time(evidence: Evidence) -> Check:
    """The show was short."""
    problems = []
    if evidence.seconds >= LONGEST_SECONDS:
        problems.append(f"it took {evidence.seconds:.0f} s")
    return _check(
        f"all in less than {LONGEST_SECONDS:.0f} s",
        problems,
        f"{evidence.seconds:.1f} s",
        seen=True,
    )


def _is_half_done(attempt: AttemptSeen | None) -> bool:
    if attempt is None or attempt.progress is None:
        return False
    progress = json.loads(attempt.progress)
    return bool(0 < progress["done"] < progress["total"])


def _late_result_problems(attempt: AttemptSeen, job: JobSeen) -> list[str]:
    if attempt.late_result is None:
        return ["nothing of it was kept"]
    if attempt.late_digest != f"sha256:{hashlib.sha256(attempt.late_result).hexdigest()}":
        return ["its digest is not that of the result kept"]
    # Both did the same work: the result was right, and still is not the one accepted.
    return [] if json.loads(attempt.late_result) == job.result else ["it is of another job"]


def _accepted(job: JobSeen) -> AttemptSeen | None:
    return next((one for one in job.attempts if one.token == job.accepted_attempt), None)


def _name(evidence: Evidence, job: JobSeen) -> str:
    return evidence.names.get(job.id, job.id)


def _check(claim: str, problems: list[str], found: str, *, seen: bool) -> Check:
    if not seen:
        problems = [*problems, "there was nothing to look at"]
    return Check(claim, tuple(problems), found)
