"""Every arrow of the protocol: no state is written anywhere else (a test looks).

One arrow, one function. Each is a guarded UPDATE that names the state left, the token *and
the owner* held (*mine*) and the state reached, with the attempt row in the same transaction;
locks are taken in one order: job, then attempt. Zero rows is a normal answer with one
documented meaning. Every condition of a guard stands in the UPDATE's own WHERE: PostgreSQL
re-checks only that one after waiting for a row (design, section 4). ``SKIP LOCKED`` avoids
waiting; it is not a guard.

Where a database can feed one writing statement into another, the hot arrows (submit, claim,
complete) are one statement in autocommit, 1.6 times as fast as a transaction of two; the
others run the same steps in a transaction. One module a role; this package is the one place
to check.
"""

from celery_lease.store.transitions.claim_statements import DUE_SLACK_SECONDS
from celery_lease.store.transitions.claiming import claim, outcome_of, take_over
from celery_lease.store.transitions.dispatching import (
    dispatch,
    put_last,
    settle,
    undispatch,
    undispatch_many,
)
from celery_lease.store.transitions.ending import (
    Again,
    Parting,
    complete,
    fail,
    hold,
    reject,
    release,
    reopen,
    replace,
    replace_away,
    retry_later,
)
from celery_lease.store.transitions.enqueuing import enqueue
from celery_lease.store.transitions.keys import submit_keyed
from celery_lease.store.transitions.operating import (
    accept,
    cancel,
    cancel_now,
    hold_waiting,
    refuse,
    resume,
)
from celery_lease.store.transitions.renewal import extend, renew
from celery_lease.store.transitions.results import (
    claim_chord,
    close_chord,
    count_part,
    drop_group,
    expect_part,
    forget_result,
    keep_group,
    keep_result,
    prune_results,
    size_chord,
    yield_chord,
)
from celery_lease.store.transitions.retention import prune, record_pass
from celery_lease.store.transitions.revoking import cancel_all, cancel_dispatched
from celery_lease.store.transitions.submission import submit, submit_failed, submit_many
from celery_lease.store.transitions.timing import expire_unstarted, pass_deadline, wake
from celery_lease.store.transitions.vanishing import expire, lost

__all__ = [
    "DUE_SLACK_SECONDS",
    "Again",
    "Parting",
    "accept",
    "cancel",
    "cancel_all",
    "cancel_dispatched",
    "cancel_now",
    "claim",
    "claim_chord",
    "close_chord",
    "complete",
    "count_part",
    "dispatch",
    "drop_group",
    "enqueue",
    "expect_part",
    "expire",
    "expire_unstarted",
    "extend",
    "fail",
    "forget_result",
    "hold",
    "hold_waiting",
    "keep_group",
    "keep_result",
    "lost",
    "outcome_of",
    "pass_deadline",
    "prune",
    "prune_results",
    "put_last",
    "record_pass",
    "refuse",
    "reject",
    "release",
    "renew",
    "reopen",
    "replace",
    "replace_away",
    "resume",
    "retry_later",
    "settle",
    "size_chord",
    "submit",
    "submit_failed",
    "submit_keyed",
    "submit_many",
    "take_over",
    "undispatch",
    "undispatch_many",
    "wake",
    "yield_chord",
]
