"""Is every guard of the transitions there for a reason? Remove each, and see a test fail.

    python -m tests.mutation.check_guards [NAME ...] [--list]

For each entry of ``GUARDS`` the package and its tests are copied to a temporary folder, that one
guard is taken out of the copy, and the tests that should notice are run there. A guard whose loss
no test notices *survives*; a snippet that is no longer in the source is *gone*. Either makes the
exit code 1, so that this table cannot rot.

Some guards are doubled on purpose: the sub-select's keeps an UPDATE from waiting for rows that
are none of its business, the UPDATE's own is the one that counts. Removing either alone changes
no answer, so they are removed together, and the entry says so.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import MariaDB, PostgreSQL

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path("celery_lease/store/transitions")
#: The text of each module, by its path below the root.
Sources = dict[Path, str]


@dataclass(frozen=True)
class Guard:
    """One mutant.

    Attributes:
        name: what is removed.
        where: the function, or functions, in whose source the snippets are.
        snippet: the source to replace, once in each function; white space does not count.
        replacement: what to put there.
        tests: file under tests/store, and words for ``-k``.
        kinds: databases on which the loss shows.
        note: why it is removed together with another, or replaced by something else.
    """

    name: str
    where: str
    snippet: str
    replacement: str
    tests: str
    words: str = ""
    kinds: tuple[str, ...] = ("sqlite",)
    note: str = ""


PG = ("postgresql",)
BOTH = ("sqlite", "postgresql")

GUARDS = (
    # submit
    Guard(
        "submit: own body",
        "is_own_submit",
        "bytes(body) == new.message.body",
        "True",
        "test_submit.py",
        kinds=BOTH,
    ),
    Guard(
        "submit: own version",
        "is_own_submit",
        "message.c.version == new.message.version",
        "message.c.version == 1",
        "test_submit.py",
    ),
    Guard("submit: only after a first try", "submit", "tries > 1 and", "", "test_submit.py"),
    Guard(
        "submit_many: own rows",
        "submit_many",
        "is_own_submit(store, job)",
        "True",
        "test_submit_many.py",
    ),
    # the result backend's tables
    Guard(
        "results: a success is final",
        "keep_result",
        "table.c.status.not_in([SUCCESS, FORGOTTEN])",
        "table.c.status.not_in([FORGOTTEN])",
        "test_results.py",
    ),
    Guard(
        "results: what was forgotten stays so",
        "keep_result",
        "table.c.status.not_in([SUCCESS, FORGOTTEN])",
        "table.c.status.not_in([SUCCESS])",
        "test_results.py",
    ),
    Guard(
        "results: a stale attempt's are refused",
        "keep_result",
        "table.c.task_id == task_id, may",
        "table.c.task_id == task_id, table.c.status != SUCCESS",
        "test_results.py",
    ),
    Guard(
        "results: a later attempt's go over a success",
        "keep_result",
        "table.c.fencing_token < fencing_token,",
        "sa.false(),",
        "test_results.py",
    ),
    Guard(
        "results: an unsettled job keeps its own",
        "forget_result",
        ", job.c.settled_at.is_not(None)",
        "",
        "test_results.py",
    ),
    Guard(
        "results: only a final job's are forgotten",
        "forget_result",
        "job.c.id == task_id, final)",
        "job.c.id == task_id)",
        "test_results.py",
    ),
    Guard(
        "chord: a part counts once",
        "count_part",
        ", table.c.status.is_(None)",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: fired is fired",
        "claim_chord",
        "table.c.fired_at.is_(None),",
        "",
        "test_results.py",
        note="the claim of who fired it may be repeated by its holder",
    ),
    Guard(
        "chord: a claim is respected",
        "claim_chord",
        "table.c.claimed_at < Later(clock(), -claim_seconds),",
        "sa.true(),",
        "test_results.py",
    ),
    Guard(
        "chord: a dead one's runs out",
        "claim_chord",
        "table.c.claimed_at < Later(clock(), -claim_seconds),",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: a lost reply is recognised",
        "claim_chord",
        "table.c.claim_nonce == nonce,",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: nobody gives up another's claim",
        "yield_chord",
        "table.c.claim_nonce == nonce, ",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: a fired one's claim stays",
        "yield_chord",
        ", table.c.fired_at.is_(None)",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: one that counts is not pruned",
        "_given_up",
        "~fresh, ",
        "",
        "test_results.py",
    ),
    Guard(
        "forgotten: goes with its job",
        "prune_results",
        "seconds, limit, said",
        "seconds, limit",
        "test_results.py",
    ),
    Guard(
        "forgotten: only that goes with a job",
        "_remove_batch",
        ".in_(ids), forgotten",
        ".in_(ids)",
        "test_results.py",
    ),
    Guard(
        "chord: one that has a part to come is not pruned",
        "_given_up",
        ", chord.c.id.not_in(coming)",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: one that waits is not pruned like a fired one",
        "prune_results",
        "seconds, limit, fired",
        "seconds, limit",
        "test_results.py",
    ),
    Guard(
        "chord: other jobs have nothing to do with it",
        "_given_up",
        "job.c.settled_at.is_(None), ",
        "",
        "test_results.py",
    ),
    Guard(
        "chord: parts of one that waits are not pruned",
        "prune_results",
        "seconds, limit, ~waits",
        "seconds, limit",
        "test_results.py",
    ),
    # idempotency keys
    Guard("key: only after a first try", "submit_keyed", "tries > 1 and", "", "test_keys.py"),
    Guard(
        "key: the id comes first",
        "submit_keyed",
        'found["id"] == job.job_id',
        "False",
        "test_keys.py",
    ),
    Guard(
        "key: another's is not mine to insert under",
        "submit_keyed",
        "job.follows and not",
        "not",
        "test_keys.py",
    ),
    Guard("key: arguments", "is_same", "one == other", "True", "test_keys.py"),
    Guard(
        "key: of this task",
        "_held_key",
        'job.c.task == bindparam("p_task")',
        "sa.true()",
        "test_keys.py",
    ),
    Guard(
        "key: this key",
        "_held_key",
        'job.c.active_key == bindparam("p_key")',
        "job.c.active_key.is_not(None)",
        "test_keys.py",
    ),
    Guard(
        "key: until final",
        "_is_over",
        "job.c.state == JobState.SUCCEEDED.value",
        "sa.true()",
        "test_keys.py",
        words="-",
        note="of the jobs that hold a key only a succeeded one has finished_at: equivalent",
    ),
    Guard(
        "key: retention",
        "_is_over",
        'job.c.finished_at <= Later(clock(), seconds("p_retention"))',
        "job.c.finished_at.is_not(None)",
        "test_keys.py",
    ),
    Guard(
        "key: for ever",
        "_is_over",
        'bindparam("p_lets_go", type_=sa.Integer) == 1',
        "sa.true()",
        "test_keys.py",
    ),
    Guard(
        "key: given up by its own UPDATE",
        "giving_up_statement",
        ", *_held_key(job), _is_over(job)",
        "",
        "test_keys.py",
    ),
    Guard(
        "key: given up by the holder alone",
        "giving_up_statement",
        'job.c.id == bindparam("p_holder")',
        "sa.true()",
        "test_keys.py",
        words="-",
        note="one job of a task holds a key (index), and both are asked: equivalent",
    ),
    Guard(
        "key: claimed only by its holder",
        "_claimable",
        "sa.or_(job.c.idempotency_key.is_(None), job.c.active_key.is_not(None)),",
        "",
        "test_keys.py",
        kinds=BOTH,
    ),
    Guard(
        "key: a claim asks the holder",
        "_refused_waiting",
        "is_following(seen)",
        "False",
        "test_keys.py",
    ),
    Guard(
        "key: who follows waits",
        "_change",
        "if has_succeeded:",
        "if True:",
        "test_keys.py",
    ),
    Guard(
        "key: a replaced holder's result is not known",
        "_change",
        "has_succeeded and is_replaced",
        "False",
        "test_keys.py",
    ),
    Guard(
        "key: who follows a conflict fails",
        "_change",
        'not is_same(row["arguments_digest"], holder["arguments_digest"]) or',
        "",
        "test_keys.py",
    ),
    Guard(
        "key: who waits gives its message up",
        "_change",
        '"dispatched_at": None,',
        "",
        "test_keys.py",
    ),
    Guard(
        "key: a locked row is not decided on",
        "follow",
        "row is None or not _may_follow(row, seen)",
        "row is not None and not _may_follow(row, seen)",
        "test_keys.py",
        kinds=PG,
        words="locked_row_of_a_job_that_follows",
    ),
    Guard(
        "key: decided on the row as it is",
        "_may_follow",
        'JobState(row["state"]) in WAITING_STATES and is_following(row) and is_as_seen',
        "True",
        "test_keys.py",
    ),
    Guard(
        "key: held again after resume",
        "resume",
        '"active_key": job.c.idempotency_key,',
        "",
        "test_keys.py",
    ),
    Guard(
        "key: another task's is given up",
        "replace_values",
        "case((keeps, column), else_=sa.null())",
        "column",
        "test_keys.py",
    ),
    # claim
    Guard(
        "claim: state",
        "_claimable",
        "job.c.state == JobState.QUEUED.value",
        "sa.true()",
        "test_claim.py",
        kinds=BOTH,
    ),
    Guard(
        "claim: waiting states",
        "_claimable",
        "sa.or_(job.c.state == JobState.SCHEDULED.value, "
        "job.c.state == JobState.RETRY_WAIT.value,)",
        "sa.true()",
        "test_claim.py test_take_over.py",
        kinds=BOTH,
    ),
    Guard("claim: due", "_claimable", "job.c.available_at <= due", "sa.true()", "test_claim.py"),
    Guard(
        "claim: message version",
        "_claimable",
        'job.c.message_version == bindparam("p_version")',
        "sa.true()",
        "test_claim.py",
    ),
    Guard(
        "claim: deadline", "_claimable", "job.c.deadline_at > clock()", "sa.true()", "test_claim.py"
    ),
    Guard(
        "claim: expires", "_claimable", "job.c.expires_at > clock()", "sa.true()", "test_claim.py"
    ),
    Guard(
        "claim: token grows",
        "_running_values",
        "job.c.fencing_token + 1",
        "job.c.fencing_token",
        "test_claim.py",
    ),
    Guard(
        "claim: nonce", "_why_not", 'seen["claim_nonce"] == delivery.nonce', "True", "test_claim.py"
    ),
    Guard(
        "claim: nonce while running",
        "_why_not",
        'state is JobState.RUNNING and seen["claim_nonce"] == delivery.nonce',
        "False",
        "test_claim.py",
    ),
    Guard(
        "claim: superseded",
        "_why_not",
        'seen["message_version"] != delivery.message_version',
        "False",
        "test_claim.py",
    ),
    Guard(
        "claim: this job's row (one statement)",
        "claim_statement",
        "job.c.id == select(locked.c.id).scalar_subquery()",
        "sa.true()",
        "test_claim.py",
        kinds=PG,
    ),
    Guard(
        "claim: this job's row",
        "claim_job_statement",
        'job.c.id == bindparam("p_id")',
        "sa.true()",
        "test_claim.py",
    ),
    Guard("claim: row count", "_try_claim", "moved != 1", "False", "test_claim.py"),
    Guard(
        "claim: lease over",
        "_refused_running",
        'not seen["lease_over"] or',
        "",
        "test_claim.py",
        note="take_over would still refuse, by its own UPDATE: the loss shows as BUSY on a lock",
        words="row_is_locked or another_delivery",
        kinds=PG,
    ),
    Guard(
        "claim: overdue is not taken over",
        "_refused_running",
        'or seen["is_overdue"]',
        "",
        "test_take_over.py",
    ),
    Guard(
        "claim: not due goes back to the reaper",
        "_refused_waiting",
        'undispatch(store, delivery.job_id, dispatch_count=seen["dispatch_count"])',
        "pass",
        "test_claim.py",
    ),
    Guard(
        "claim: checkpoint of this job",
        "_last_checkpoint",
        'earlier.c.job_id == bindparam("p_id")',
        "sa.true()",
        "test_claim.py",
    ),
    Guard(
        "claim: newest checkpoint",
        "_last_checkpoint",
        "earlier.c.fencing_token.desc()",
        "earlier.c.fencing_token",
        "test_claim.py",
    ),
    # replay
    Guard(
        "replay: settled", "_final_answer", 'seen["settled_at"] is not None or', "", "test_claim.py"
    ),
    Guard(
        "replay: fresh",
        "_final_answer",
        "(fresh and not delivery.replay)",
        "False",
        "test_claim.py",
    ),
    Guard(
        "replay: asked for",
        "_final_answer",
        "fresh and not delivery.replay",
        "fresh",
        "test_claim.py",
    ),
    Guard(
        "replay: cancelled",
        "_final_answer",
        "state is JobState.CANCELLED and not delivery.replay",
        "False",
        "test_claim.py",
    ),
    Guard(
        "replay: message version",
        "_final_answer",
        'if seen["message_version"] != delivery.message_version',
        "if False",
        "test_claim.py",
    ),
    # take over
    Guard(
        "take over: state and token as seen",
        "take_over",
        'row["state"] != JobState.RUNNING.value or row["fencing_token"] != ended_token',
        "False",
        "test_take_over.py",
    ),
    Guard(
        "take over: the attempt's count decides",
        "take_over",
        'not end_lost(store, connection, lease, cause=LossCause.EXPIRED, reason="taken over")',
        'end_lost(store, connection, lease, cause=LossCause.EXPIRED, reason="taken over") '
        "and False",
        "test_take_over.py",
        kinds=BOTH,
    ),
    Guard(
        "take over: policy",
        "take_over",
        "decision.state is not JobState.QUEUED",
        "False",
        "test_take_over.py",
    ),
    Guard(
        "take over: counts a loss",
        "take_over_statement",
        'job.c.lost_count + bindparam("p_losses", type_=sa.Integer)',
        "job.c.lost_count",
        "test_take_over.py",
    ),
    Guard(
        "take over: a locked row is refused",
        "take_over",
        "return Refused(Refusal.BUSY, JobState.RUNNING)",
        'raise RowBusy("locked")',
        "test_take_over.py",
        kinds=PG,
    ),
    # renew
    Guard(
        "renew: token",
        "_renew_rows",
        ".where(*guard, exactly)",
        ".where(*guard)",
        "test_renew.py",
        kinds=BOTH,
    ),
    Guard(
        "renew: job",
        "_live_rows_of",
        "attempt.c.job_id.in_([lease.job_id for lease in leases])",
        "sa.true()",
        "test_renew.py",
        words="-",
        note="the pair says the same; this one is for the index: equivalent",
    ),
    Guard(
        "renew: owner",
        "_live_rows_of",
        "attempt.c.owner.in_(sorted({lease.owner for lease in leases}))",
        "sa.true()",
        "test_renew.py",
        kinds=BOTH,
        note="the list of guards serves both the sub-select and the UPDATE",
    ),
    Guard(
        "renew: live",
        "_live_rows_of",
        "attempt.c.ended_at.is_(None), attempt.c.state.in_([state.value for state in LIVE_STATES])",
        "sa.true()",
        "test_renew.py",
        kinds=BOTH,
        note="a CHECK makes state and ended_at agree, so either alone is enough: both go",
    ),
    Guard(
        "renew: the UPDATE's own guards",
        "_renew_rows",
        "change.where(unindexed(pairs.in_(free)), *guard)",
        "change.where(pairs.in_(select(attempt.c.job_id, attempt.c.fencing_token)"
        ".where(*guard, exactly)))",
        "test_renew.py",
        words="ends_while_its_renewal_waits",
        kinds=PG,
        note="with the guards only in the sub-select and no lock there: the classic",
    ),
    Guard(
        "renew: locked rows are skipped",
        "_renew_rows",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_renew.py",
        kinds=("postgresql", "mariadb"),
        words="is_unanswered",
    ),
    Guard(
        "renew: by the primary key",
        "_renew_rows",
        "change = by_primary_key(",
        "change = (lambda statement, table: statement)(",
        "test_dialects.py test_renew.py",
        kinds=("mariadb",),
        words="is_unanswered or primary_key_on_mariadb",
    ),
    Guard(
        "renew: texts by token",
        "_renewal_values",
        "_pair_key(lease): || value=_pair_text(attempt)",
        "lease.job_id: || value=attempt.c.job_id",
        "test_renew.py",
    ),
    Guard(
        "renew: lost is not unanswered",
        "renew",
        "state is not None and state.is_live",
        "True",
        "test_renew.py",
    ),
    # the ends of a runner
    Guard(
        "mine: state",
        "mine",
        "job.c.state == JobState.RUNNING.value,",
        "",
        "test_finish.py",
        words="-",
        note="only a running job has an owner (CHECK), and the owner is asked for: equivalent",
    ),
    Guard(
        "mine: token",
        "mine",
        'job.c.fencing_token == bindparam("p_token"),',
        "",
        "test_finish.py",
        kinds=BOTH,
    ),
    Guard(
        "mine: owner",
        "mine",
        'job.c.lease_owner == bindparam("p_owner"),',
        "",
        "test_finish.py",
        kinds=BOTH,
    ),
    Guard(
        "end: this job's row (one statement)",
        "end_statement",
        "job.c.id == select(locked.c.id).scalar_subquery()",
        "sa.true()",
        "test_finish.py test_vanished.py",
        kinds=PG,
    ),
    Guard(
        "end: this job's row",
        "end_job_statement",
        'job.c.id == bindparam("p_id")',
        "sa.true()",
        "test_finish.py test_vanished.py",
    ),
    Guard(
        "end: live attempt",
        "live_attempt",
        'attempt.c.fencing_token == bindparam("p_token"), || '
        "unindexed(attempt.c.ended_at.is_(None)),",
        " || ",
        "test_finish.py",
        kinds=BOTH,
        note="a job has one live attempt, the one with its token (invariant): both go",
    ),
    Guard(
        "end: attempt not ended, owner",
        "live_attempt",
        'attempt.c.owner == bindparam("p_owner"), unindexed(attempt.c.ended_at.is_(None)),',
        "attempt.c.state == AttemptState.ACTIVE.value,",
        "test_finish.py",
        note="by the invariants the token implies both; replaced by a guard that is too strict",
    ),
    Guard(
        "end: job row count",
        "_try_finish",
        "connection.execute(job_statement, parameters).rowcount != 1",
        "False",
        "test_finish.py",
    ),
    Guard(
        "end: the job row is locked first",
        "_try_finish",
        'lock_job(store, connection, parameters["p_id"]) is None',
        "False",
        "test_finish.py",
        words="held_for_long",
        kinds=PG,
    ),
    Guard("own end: state", "_own_end", "state is end.attempt_state and", "", "test_finish.py"),
    Guard(
        "own end: reason",
        "_own_end",
        'and row["stop_reason"] == parameters["p_reason"]',
        "",
        "test_finish.py",
    ),
    Guard(
        "own end: token",
        "_own_end",
        "attempt.c.fencing_token == lease.fencing_token",
        "sa.true()",
        "test_finish.py",
    ),
    Guard(
        "own end: owner",
        "_own_end",
        "attempt.c.owner == lease.owner",
        "sa.true()",
        "test_finish.py",
        words="another_process",
    ),
    Guard(
        "own end: locked is not stale",
        "_own_end",
        "state.is_live",
        "False",
        "test_finish.py",
        kinds=PG,
        words="held_for_long",
    ),
    Guard(
        "late: expiry",
        "_accepted_late",
        "attempt.c.lease_expires_at < clock()",
        "sa.false()",
        "test_finish.py",
    ),
    Guard(
        "late: token",
        "_accepted_late",
        'attempt.c.fencing_token == bindparam("p_token")',
        "attempt.c.fencing_token == 1",
        "test_finish.py",
        note="the subquery would give several rows; pinned to the first attempt instead",
    ),
    Guard(
        "again: clears dispatched_at",
        "_again_values",
        "else_=sa.null()",
        "else_=job.c.dispatched_at",
        "test_finish.py",
    ),
    # reopen
    Guard(
        "reopen: state",
        "reopen",
        "job.c.state == JobState.SUCCEEDED.value, job.c.state_reason == AttemptState",
        "job.c.state_reason == AttemptState",
        "test_finish.py",
        words="-",
        note="only replace_away writes this reason, with this state: equivalent",
    ),
    Guard(
        "reopen: reason",
        "reopen",
        "job.c.state_reason == AttemptState.REPLACED.value,",
        "",
        "test_finish.py",
    ),
    Guard(
        "reopen: version",
        "reopen",
        'job.c.message_version == bindparam("p_before"),',
        "",
        "test_finish.py",
    ),
    Guard("reopen: job", "reopen", 'job.c.id == bindparam("p_id"),', "", "test_finish.py"),
    # reject
    Guard(
        "reject: token",
        "reject",
        "attempt.c.fencing_token == lease.fencing_token",
        "sa.true()",
        "test_reject.py",
    ),
    Guard(
        "reject: job", "reject", "attempt.c.job_id == lease.job_id", "sa.true()", "test_reject.py"
    ),
    Guard(
        "reject: owner", "reject", "attempt.c.owner == lease.owner", "sa.true()", "test_reject.py"
    ),
    Guard(
        "reject: ended", "reject", "attempt.c.ended_at.is_not(None)", "sa.true()", "test_reject.py"
    ),
    Guard(
        "reject: once", "reject", "attempt.c.rejected_at.is_(None)", "sa.true()", "test_reject.py"
    ),
    Guard(
        "reject: no outcome of its own",
        "reject",
        "attempt.c.state.not_in([state.value for state in _OWN_ENDS])",
        "sa.true()",
        "test_reject.py",
    ),
    # vanished runners
    Guard(
        "lost: token",
        "end_lost",
        "attempt.c.fencing_token == lease.fencing_token",
        "sa.true()",
        "test_vanished.py",
    ),
    Guard(
        "lost: job",
        "end_lost",
        "attempt.c.job_id == lease.job_id",
        "sa.true()",
        "test_vanished.py",
    ),
    Guard(
        "lost: owner",
        "end_lost",
        "attempt.c.owner == lease.owner",
        "sa.true()",
        "test_vanished.py",
    ),
    Guard(
        "lost: not ended",
        "end_lost",
        "attempt.c.ended_at.is_(None)",
        "sa.true()",
        "test_vanished.py",
    ),
    Guard(
        "lost: expiry",
        "end_lost",
        "attempt.c.lease_expires_at < clock()",
        "sa.true()",
        "test_vanished.py test_take_over.py",
        kinds=BOTH,
    ),
    Guard(
        "lost: job row",
        "apply_loss",
        "sa.update(job).where(job.c.id == lease.job_id,",
        "sa.update(job).where(",
        "test_vanished.py",
        note="state, token and owner follow from the attempt's row, by the invariants",
    ),
    Guard(
        "lost: counts",
        "apply_loss",
        'row["lost_count"] + decision.is_counted',
        'row["lost_count"]',
        "test_vanished.py",
    ),
    Guard(
        "stopping: a loss that is not counted does not grow the count",
        "apply_loss",
        'row["lost_count"] + decision.is_counted',
        'row["lost_count"] + 1',
        "test_stopping.py",
    ),
    Guard(
        "stopping: the policy is told whether it counts",
        "decide",
        "is_counted=is_counted,",
        "",
        "test_stopping.py",
    ),
    Guard(
        "stopping: the caller is told whether it counted",
        "apply_loss",
        "is_counted=decision.is_counted,",
        "",
        "test_stopping.py",
    ),
    Guard(
        "stopping: a stall counts",
        "decide",
        "cause=cause,\n        stop_requested",
        "cause=LossCause.LOST,\n        stop_requested",
        "test_stopping.py",
        words="stall",
    ),
    Guard(
        "stopping: this attempt was asked",
        "_stops_statement",
        "stopping = sa.and_(this, attempt.c.stop_requested_at.is_not(None))",
        "stopping = attempt.c.stop_requested_at.is_not(None)",
        "test_stopping.py",
    ),
    Guard(
        "stopping: this attempt's own end is not an earlier one",
        "_stops_statement",
        "sa.not_(this), ",
        "",
        "test_stopping.py",
        words="ten_ends",
    ),
    Guard(
        "stopping: ends of this job",
        "_stops_statement",
        '.where(attempt.c.job_id == bindparam("p_id"))',
        "",
        "test_stopping.py",
        words="other_jobs",
    ),
    Guard(
        "stopping: asked after the attempt's end",
        "lost",
        "return None\n            decision = decide(store, connection, lease, row, cause=cause, "
        "lost_backoff=lost_backoff) || if not end_lost(",
        "return None || decision = decide(store, connection, lease, row, cause=cause, "
        "lost_backoff=lost_backoff)\n            if not end_lost(",
        "test_stopping.py",
        words="waits_for_the_row",
        kinds=PG,
        note="a renewal may say so until then, since it does not ask for the job's row",
    ),
    Guard(
        "stopping: hand-overs use up the cap",
        "is_uncounted_end",
        "attempt.c.state == AttemptState.RELEASED.value",
        "sa.false()",
        "test_stopping.py",
        words="ten_ends",
    ),
    Guard(
        "stopping: lost ones use up the cap",
        "is_uncounted_end",
        ", AttemptState.LOST.value",
        "",
        "test_stopping.py",
        words="ten_ends",
    ),
    Guard(
        "stopping: expired ones use up the cap",
        "is_uncounted_end",
        "AttemptState.EXPIRED.value,",
        "",
        "test_stopping.py",
        words="ten_ends",
    ),
    Guard(
        "stopping: only those that were asked use up the cap",
        "is_uncounted_end",
        "attempt.c.stop_requested_at.is_not(None)",
        "sa.true()",
        "test_stopping.py",
        words="do_not_use_up",
    ),
    Guard(
        "stopping: what the caller knows is written",
        "end_lost",
        "if stopping:",
        "if False:",
        "test_stopping.py",
    ),
    Guard(
        "stopping: the first request is kept",
        "end_lost",
        "sa.func.coalesce(attempt.c.stop_requested_at, clock())",
        "clock()",
        "test_stopping.py",
        words="first_is_kept",
    ),
    Guard(
        "stopping: a take-over counts by the policy",
        "take_over",
        "int(decision.is_counted)",
        "1",
        "test_stopping.py",
        words="taken_over",
    ),
    Guard(
        "renew: said of its own lease",
        "_renewal_values",
        "(said, sa.func.coalesce(column, clock()))",
        "(sa.true(), sa.func.coalesce(column, clock()))",
        "test_renew.py",
    ),
    Guard(
        "renew: said once, written once",
        "_renewal_values",
        "sa.func.coalesce(column, clock())",
        "clock()",
        "test_renew.py",
    ),
    Guard(
        "renew: nothing said, nothing written",
        "_renewal_values",
        "if leases:",
        "if True:",
        "test_renew.py",
        words="costs_nothing",
    ),
    Guard(
        "lost: clears dispatched_at",
        "apply_loss",
        '"dispatched_at": None,',
        "",
        "test_vanished.py",
    ),
    Guard(
        "lost: the attempt's count decides",
        "lost",
        "return None\n            decision",
        "pass\n            decision",
        "test_vanished.py",
    ),
    Guard(
        "lost: a job that is gone",
        "lost",
        "state_or_busy(store, connection, lease.job_id)",
        'raise RowBusy("gone")',
        "test_vanished.py",
    ),
    Guard(
        "expire: expiry in the sub-select",
        "expire",
        "attempt.c.lease_expires_at < clock(),",
        "",
        "test_vanished.py",
        note="the UPDATE's own still decides: what shows is a batch full of live leases",
    ),
    Guard(
        "expire: no lock, expiry only in the sub-select",
        "expire end_lost",
        ".with_for_update(skip_locked=True) || attempt.c.lease_expires_at < clock()",
        " || sa.true()",
        "test_vanished.py",
        words="renewed_while_expire",
        kinds=PG,
        note="three live leases were expired this way (design, section 4)",
    ),
    Guard(
        "expire: count decides, without the lock",
        "expire",
        ".with_for_update(skip_locked=True) || "
        'if end_lost(store, connection, lease, cause=LossCause.EXPIRED, reason="lease ended"):',
        ' || if end_lost(store, connection, lease, cause=LossCause.EXPIRED, reason="lease ended") '
        "or True:",
        "test_vanished.py",
        kinds=PG,
        words="renewed_while_expire",
    ),
    Guard(
        "expire: the present attempt, in both",
        "expire expire end_lost",
        "attempt.c.job_id == job.c.id, attempt.c.fencing_token == job.c.fencing_token || "
        "attempt.c.ended_at.is_(None), || attempt.c.lease_expires_at < clock()",
        "attempt.c.job_id == job.c.id ||  || sa.true()",
        "test_vanished.py",
        words="left_alone",
        note="running implies one live attempt, with the job's token, and the UPDATE says both "
        "again: token, liveness and the UPDATE's expiry go together",
    ),
    Guard(
        "lost: started in time",
        "apply_loss",
        '"expires_at": None,',
        "",
        "test_time.py",
        words="started_in_time",
    ),
    Guard("expire: limit", "expire", ".limit(limit)", "", "test_vanished.py"),
    Guard("expire: skip", "expire", "if skip:", "if False:", "test_vanished.py"),
    Guard(
        "expire: locked rows are skipped",
        "expire",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_vanished.py",
        kinds=PG,
        words="is_skipped",
    ),
    # extend
    Guard("extend: live", "extend", "attempt.c.ended_at.is_(None),", "", "test_extend.py"),
    Guard(
        "extend: expired", "extend", "attempt.c.lease_expires_at < clock(),", "", "test_extend.py"
    ),
    Guard(
        "extend: once between renewals",
        "extend",
        "attempt.c.extended_at < attempt.c.last_renewed_at",
        "sa.true()",
        "test_extend.py",
    ),
    Guard(
        "extend: again after a renewal",
        "extend",
        "attempt.c.extended_at < attempt.c.last_renewed_at",
        "sa.false()",
        "test_extend.py",
    ),
    Guard(
        "extend: ended since",
        "extend",
        "if ended_since is not None:",
        "if False:",
        "test_extend.py",
    ),
    Guard(
        "extend: locked rows are skipped",
        "extend",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_extend.py",
        kinds=PG,
        words="is_skipped or at_once",
    ),
    # time
    Guard(
        "wake: state",
        "wake",
        "job.c.state.in_([JobState.SCHEDULED.value, JobState.RETRY_WAIT.value]),",
        "",
        "test_time.py",
    ),
    Guard("wake: due", "wake", "job.c.available_at <= clock(),", "", "test_time.py"),
    Guard(
        "wake: its message is on its way",
        "wake",
        "job.c.dispatched_at.is_(None)",
        "sa.true()",
        "test_time.py",
    ),
    Guard(
        "wake: only for a while",
        "wake",
        "job.c.available_at <= Later(clock(), -dispatched_grace_seconds)",
        "sa.false()",
        "test_time.py",
    ),
    Guard("wake: clears dispatched_at", "wake", ', "dispatched_at": None', "", "test_time.py"),
    Guard("batch: limit", "_move_batch", ".limit(limit)", "", "test_time.py"),
    Guard(
        "batch: guard in both",
        "_move_batch",
        "select(job.c.id).where(*guard) || "
        "sa.update(job).where(job.c.id == job_id, unindexed(*guard))",
        "select(job.c.id) || sa.update(job).where(job.c.id == job_id)",
        "test_time.py",
        note="doubled: the rows are locked between the two",
    ),
    Guard("batch: this job", "_move_batch", "job.c.id == job_id,", "", "test_time.py"),
    Guard(
        "batch: locked rows are skipped",
        "_move_batch",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_time.py",
        kinds=PG,
        words="is_locked",
    ),
    Guard("expires: state", "expire_unstarted", "job.c.state.in_(WAITING),", "", "test_time.py"),
    Guard(
        "expires: due",
        "expire_unstarted",
        "job.c.expires_at <= clock()",
        "sa.true()",
        "test_time.py",
    ),
    Guard(
        "deadline: due",
        "pass_deadline",
        "job.c.deadline_at <= clock()",
        "sa.true()",
        "test_time.py",
    ),
    Guard(
        "deadline: waiting",
        "pass_deadline",
        "[job.c.state.in_(WAITING), over]",
        "[over]",
        "test_time.py",
    ),
    Guard(
        "deadline: running",
        "pass_deadline",
        "[job.c.state == JobState.RUNNING.value, over]",
        "[over]",
        "test_time.py",
    ),
    Guard(
        "deadline: held", "pass_deadline", "job.c.state == JobState.HELD.value,", "", "test_time.py"
    ),
    Guard(
        "deadline: marked once",
        "pass_deadline",
        'job.c.state_reason.is_distinct_from("overdue")',
        "sa.true()",
        "test_time.py",
        note="a second mark changes nothing: equivalent but for the write",
        words="-",
    ),
    Guard(
        "deadline: locked rows are skipped",
        "pass_deadline",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_time.py",
        kinds=PG,
        words="is_locked",
    ),
    Guard(
        "stop: attempt's token",
        "stop_running",
        'attempt.c.fencing_token == row["fencing_token"], unindexed(attempt.c.ended_at.is_(None)),',
        "",
        "test_time.py test_operators.py",
        note="the live attempt is the one with the token (invariant): both go",
    ),
    Guard(
        "stop: attempt's job",
        "stop_running",
        'attempt.c.job_id == row["id"],',
        "",
        "test_operators.py test_time.py",
    ),
    Guard(
        "stop: this job",
        "stop_running",
        'job.c.id == row["id"],',
        "",
        "test_operators.py test_time.py",
    ),
    # dispatch, settle
    Guard(
        "dispatch: count",
        "dispatch",
        "job.c.dispatch_count == candidate.dispatch_count,",
        "",
        "test_dispatch.py",
    ),
    Guard(
        "dispatch: what was not on the broker begins anew",
        "dispatch",
        "case((is_sent_again, first_at))",
        "first_at",
        "test_suspects.py",
        "sent_late",
    ),
    Guard(
        "dispatch: the first one is kept",
        "dispatch",
        "sa.func.coalesce(job.c.first_dispatched_at, job.c.dispatched_at)",
        "job.c.dispatched_at",
        "test_suspects.py",
        "double",
    ),
    Guard(
        "again: a new wait",
        "_again_values",
        "job.c.first_dispatched_at: sa.null(),",
        "",
        "test_suspects.py",
        "sent_late",
    ),
    Guard(
        "dispatch: version",
        "dispatch",
        "job.c.message_version == candidate.message_version,",
        "",
        "test_dispatch.py",
    ),
    Guard(
        "dispatch: state",
        "dispatch",
        "[job.c.state.in_([JobState.QUEUED.value, JobState.SCHEDULED.value])]",
        "[]",
        "test_dispatch.py",
    ),
    Guard(
        "dispatch: a countdown's first message",
        "dispatch",
        ", JobState.SCHEDULED.value",
        "",
        "test_enqueue.py",
    ),
    Guard(
        "enqueue: the message of its own job alone",
        "_take_back",
        '.where(message.c.job_id == bindparam("p_id"))',
        "",
        "test_enqueue.py",
    ),
    Guard(
        "enqueue: no message without its job",
        "_insert_for",
        'caller.write(built(place, "take_message_back", _take_back), {"p_id": job.job_id})',
        "pass",
        "test_enqueue.py",
    ),
    Guard(
        "enqueue: no lock on the holder",
        "enqueue",
        "_committed_in_the_way(store, job) if store.dialect.refusals_lock else None",
        "None",
        "test_enqueue.py",
        words="locked",
        kinds=("mariadb",),
    ),
    Guard("dispatch: job", "dispatch", "job.c.id == candidate.job_id,", "", "test_dispatch.py"),
    Guard(
        "dispatch: replay of what is final",
        "dispatch",
        "job.c.finished_at.is_not(None),",
        "",
        "test_dispatch.py",
    ),
    Guard(
        "dispatch: replay of what is unsettled",
        "dispatch",
        "job.c.settled_at.is_(None)",
        "sa.true()",
        "test_dispatch.py",
    ),
    Guard(
        "undispatch: count",
        "undispatch",
        "job.c.dispatch_count == dispatch_count",
        "sa.true()",
        "test_dispatch.py",
    ),
    Guard(
        "undispatch: version",
        "undispatch",
        "job.c.message_version == message_version",
        "sa.true()",
        "test_dispatch.py",
    ),
    Guard(
        "undispatch: state",
        "undispatch",
        "job.c.state.in_(WAITING)",
        "sa.true()",
        "test_dispatch.py",
    ),
    Guard(
        "undispatch: job", "undispatch", "job.c.id == job_id,", "", "test_dispatch.py test_claim.py"
    ),
    Guard(
        "put_last: behind",
        "put_last",
        ", job.c.available_at <= last_at",
        "",
        "test_dispatch.py",
    ),
    Guard(
        "put_last: waits",
        "put_last",
        "unindexed(*waits, job",
        "unindexed(job",
        "test_dispatch.py",
    ),
    Guard(
        "undispatch_many: first dispatch",
        "undispatch_many",
        "job.c.dispatch_count == 1,",
        "",
        "test_submit_many.py",
    ),
    Guard(
        "undispatch_many: waiting",
        "undispatch_many",
        "job.c.state.in_(WAITING), ",
        "",
        "test_submit_many.py",
    ),
    Guard(
        "undispatch_many: first message",
        "undispatch_many",
        ", job.c.message_version == 1",
        "",
        "test_submit_many.py",
    ),
    Guard(
        "settle: token",
        "settle",
        "tuple_(job.c.id, job.c.fencing_token, job.c.finished_at)",
        "tuple_(job.c.id, sa.literal(1), job.c.finished_at)",
        "test_dispatch.py",
    ),
    Guard(
        "settle: finished_at",
        "settle",
        "published.in_(sorted(outcomes))",
        "tuple_(job.c.id, job.c.fencing_token).in_([(o[0], o[1]) for o in outcomes])",
        "test_dispatch.py",
    ),
    Guard(
        "settle: final",
        "settle",
        "job.c.state.in_(FINAL),",
        "",
        "test_dispatch.py",
        note="finished_at is set if and only if final (CHECK): equivalent",
        words="-",
    ),
    Guard("settle: once", "settle", "job.c.settled_at.is_(None),", "", "test_dispatch.py"),
    # operators
    Guard(
        "cancel: final",
        "cancel_now",
        'JobState(row["state"]).is_final',
        "False",
        "test_operators.py",
        note="the UPDATE's guard still names what it left: see the next",
    ),
    Guard(
        "cancel: final, in both",
        "cancel_now",
        'JobState(row["state"]).is_final || '
        'guard=[job.c.state == row["state"], job.c.finished_at.is_(None)]',
        "False || guard=[]",
        "test_operators.py",
    ),
    Guard(
        "cancel of many: not final, in each",
        "_cancel_batch",
        "sa.or_(job.c.finished_at.is_(None), is_replaced) || "
        ".where(job.c.id.in_(job_ids), job.c.finished_at.is_(None)) || "
        'guard=_still(job, row["state"])',
        "sa.true() || .where(job.c.id.in_(job_ids)) || guard=[]",
        "test_revoking.py",
    ),
    Guard(
        "cancel of a delivery: its dispatch, in both",
        "cancel_dispatched",
        "            job.c.dispatch_count == dispatch_count,\n || "
        ", job.c.dispatch_count == dispatch_count]",
        " || ]",
        "test_revoking.py",
    ),
    Guard(
        "cancel of a delivery: dispatched",
        "cancel_dispatched",
        "            job.c.dispatched_at.is_not(None),\n",
        "",
        "test_revoking.py",
    ),
    Guard(
        "cancel: of a locked final job",
        "state_or_busy",
        "JobState(state).is_final",
        "False",
        "test_operators.py",
        kinds=PG,
    ),
    Guard(
        "cancel: of a locked job",
        "state_or_busy",
        'raise RowBusy(f"the row of job {job_id} is locked by another transaction")',
        "return JobState(state)",
        "test_operators.py",
        kinds=PG,
    ),
    Guard(
        "operate: guard",
        "_operate",
        "job.c.id == job_id, *guard",
        "job.c.id == job_id",
        "test_operators.py",
    ),
    Guard("operate: job", "_operate", "job.c.id == job_id, *guard", "*guard", "test_operators.py"),
    Guard(
        "hold: clears dispatched_at",
        "hold_waiting",
        '"dispatched_at": None,',
        "",
        "test_operators.py",
    ),
    Guard(
        "resume: held",
        "resume",
        "job.c.state == JobState.HELD.value, sa.and_(job.c.state.in_(FINAL)",
        "sa.true(), sa.and_(job.c.state.in_(FINAL)",
        "test_operators.py",
    ),
    Guard(
        "resume: final",
        "resume",
        "job.c.state.in_(FINAL),",
        "",
        "test_operators.py",
        note="settled implies final by every arrow: equivalent",
        words="-",
    ),
    Guard(
        "resume: settled",
        "resume",
        "job.c.settled_at.is_not(None)",
        "sa.true()",
        "test_operators.py",
    ),
    Guard(
        "resume: clears dispatched_at", "resume", '"dispatched_at": None,', "", "test_operators.py"
    ),
    Guard(
        "resume: the cap begins anew",
        "resume",
        '"resumed_token": job.c.fencing_token,',
        "",
        "test_stopping.py",
        "resumed",
    ),
    Guard("resume: clears the losses", "resume", '"lost_count": 0,', "", "test_operators.py"),
    Guard(
        "resume: what was never sent",
        "resume",
        "job.c.state_reason.is_distinct_from(NEVER_SENT),",
        "",
        "test_submit.py",
        "never_sent",
    ),
    Guard(
        "resume: bounds still to come",
        "_anew",
        "instant > clock()",
        "sa.false()",
        "test_operators.py",
    ),
    Guard(
        "resume: bounds that have passed",
        "_anew",
        "instant > clock()",
        "sa.true()",
        "test_operators.py",
    ),
    # prune
    Guard(
        "prune: settled",
        "_remove_batch",
        "job.c.settled_at.is_not(None),",
        "",
        "test_retention.py",
    ),
    Guard("prune: state", "prune", "job.c.state == state,", "", "test_retention.py"),
    Guard(
        "prune: age",
        "prune",
        "job.c.finished_at < Later(clock(), -seconds)",
        "sa.true()",
        "test_retention.py",
    ),
    Guard(
        "prune: kept for ever",
        "prune",
        "seconds is not None and",
        "seconds is None or",
        "test_retention.py",
    ),
    Guard("prune: limit", "_remove_batch", ".limit(limit)", "", "test_retention.py"),
    Guard("prune: limit over all", "prune", "limit - removed", "limit", "test_retention.py"),
    Guard(
        "prune: locked rows are skipped",
        "_remove_batch",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        "test_retention.py",
        kinds=PG,
        words="is_locked",
    ),
    Guard(
        "prune: messages of these jobs",
        "_remove_batch",
        "sa.delete(message).where(message.c.job_id.in_(ids))",
        "sa.delete(message)",
        "test_retention.py",
    ),
    Guard(
        "prune: attempts of these jobs",
        "_remove_batch",
        "sa.delete(attempt).where(attempt.c.job_id.in_(ids))",
        "sa.delete(attempt)",
        "test_retention.py",
    ),
)


def main() -> int:
    """Run the mutants that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all without one")
    parser.add_argument("--list", action="store_true", help="only check that each still applies")
    options = parser.parse_args()
    chosen = [g for g in GUARDS if not options.names or any(n in g.name for n in options.names)]
    if not chosen:
        parser.error("no entry has that in its name")
    sources = {
        path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / SOURCE).glob("*.py"))
    }
    bad = [guard.name for guard in chosen if mutated(sources, guard) is None]
    for name in bad:
        print(f"gone      {name}: its snippet is not in the source once")
    if options.list or bad:
        return int(bool(bad))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-mutants-")))
        return run_all(chosen, sources, folder, environment(stack))


def environment(stack: ExitStack) -> dict[str, str]:
    """Start the servers once for all mutants."""
    urls = {
        f"CELERY_LEASE_TEST_{kind.__name__.upper()}_URL": stack.enter_context(kind()).url
        for kind in (PostgreSQL, MariaDB)
    }
    return {**os.environ, **urls, "PYTHONDONTWRITEBYTECODE": "1"}


def run_all(chosen: list[Guard], sources: Sources, folder: Path, env: dict[str, str]) -> int:
    """Run the unchanged copy, which must pass, then each mutant, which must not."""
    shutil.copytree(ROOT / "celery_lease", folder / "celery_lease", ignore=_without_caches)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=_without_caches)
    shutil.copy(ROOT / "pyproject.toml", folder)
    every = Guard(
        "",
        "",
        "",
        "",
        " ".join(sorted({f for g in chosen for f in g.tests.split()})),
        kinds=("sqlite", "postgresql", "mariadb"),
    )
    passed, said = run(every, folder, env)
    if not passed:
        print("the tests fail without any mutation:\n" + said)
        return 1
    counts = {"killed": 0, "survived": 0, "same": 0}
    for guard in chosen:
        started = time.monotonic()
        _write(folder, mutated(sources, guard) or {})
        if guard.words == "-":
            verdict = "same"
        else:
            passed, said = run(guard, folder, env)
            verdict = "survived" if passed else "killed"
        counts[verdict] += 1
        print(f"{verdict:9} {guard.name} ({time.monotonic() - started:.1f} s)", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["survived"] > 0)


def run(guard: Guard, folder: Path, env: dict[str, str]) -> tuple[bool, str]:
    """Run a mutant's tests in the copy until the first failure; tell whether all passed."""
    words = f"({' or '.join(guard.kinds)})"
    if guard.words:
        words += f" and ({guard.words})"
    files = [f"tests/store/{name}" for name in guard.tests.split()]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=line"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "40"),
            *("-m", "not long", "-k", words),
            *files,
        ],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-3000:] + done.stderr[-1000:]
    if done.returncode not in (0, 1):
        # No test was chosen, or pytest itself failed: neither is a verdict.
        raise SystemExit(f"{guard.name or 'all'}: pytest ended with {done.returncode}\n{said}")
    return done.returncode == 0, said


def _write(folder: Path, sources: Sources) -> None:
    for path, source in sources.items():
        (folder / path).write_text(source)


def mutated(sources: Sources, guard: Guard) -> Sources | None:
    """Return the sources with a guard removed; None when it is not there exactly once."""
    changed = dict(sources)
    pairs = list(zip(guard.snippet.split(" || "), guard.replacement.split(" || "), strict=True))
    names = guard.where.split()
    for number, (snippet, replacement) in enumerate(pairs):
        place = _place(changed, names[min(number, len(names) - 1)])
        if place is None:
            return None
        path, start, end = place
        source = changed[path]
        found = list(_flexible(snippet).finditer(source, start, end))
        if len(found) != 1:
            return None
        changed[path] = source[: found[0].start()] + replacement + source[found[0].end() :]
    return changed


def _place(sources: Sources, function: str) -> tuple[Path, int, int] | None:
    """Return where a top-level function stands: its module, and the span of its text."""
    for path, source in sources.items():
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return path, starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
    return None


def _flexible(snippet: str) -> re.Pattern[str]:
    """Return a pattern of a snippet in which white space, and a last comma, do not count."""
    tokens = re.findall(r"\w+|[^\w\s]", snippet)
    # Which of the two words for the store's time is used is a matter of speed.
    words = {"clock": "clock(?:_once)?"}
    return re.compile(r"\s*".join(words.get(token) or re.escape(token) for token in tokens))


def _without_caches(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


if __name__ == "__main__":
    sys.exit(main())
