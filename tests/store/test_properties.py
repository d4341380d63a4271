"""The protocol under any order of events: several processes, reapers and operators at once.

Holders freeze and come back late, deliveries are duplicated, reordered and repeated, replies are
lost (the call was made; its caller forgets the answer and makes it again). After every step the
rows of all tables are compared with those before it. Time passes by moving rows.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_lease.backoff import UNCOUNTED_ENDS
from celery_lease.records import (
    Accepted,
    Claimed,
    Delivery,
    Dispatchable,
    Failure,
    Held,
    Late,
    Stale,
)
from celery_lease.states import JobState, LateOutcome, LossCause, OnExpiry
from celery_lease.store import queries, transitions
from tests.store.builders import (
    FAILURE,
    JSON,
    again,
    difference,
    move_back,
    new_delivery,
    new_job,
    new_message,
    parting,
    renewal,
    rows,
    store_now,
)
from tests.store.conftest import _emptied

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_lease.store.engine import Store
    from tests.store.builders import Rows

T = TypeVar("T")

LONG = bool(os.environ.get("CELERY_LEASE_LONG"))
FINAL = {state.value for state in JobState if state.is_final}
#: Two processes, so that one often holds a job again that it has lost.
OWNERS = ("host-1-one", "host-2-two")
BACKOFF = (0.0, 5.0)
VANISHED = {cause.value for cause in LossCause}
#: What a late outcome may write on an attempt that has ended.
LATE_COLUMNS = {
    "rejected_at",
    "late_outcome",
    "late_result",
    "late_result_digest",
    "error_type",
    "error_message",
    "traceback",
}

#: Which of a list, counted from its newest: what is recent is met more often, as in life.
picks = st.integers(0, 5)
ends = st.sampled_from(
    ["complete", "fail", "retry", "retry later", "replace", "away", "release", "hold"]
)


class Protocol(RuleBasedStateMachine):
    """Everybody who may call the store, in one thread: each call is one transaction anyway."""

    store: Store
    other: Store

    def __init__(self) -> None:
        super().__init__()
        self.now: Rows = {}
        self.leases: list[Held] = []
        self.messages: list[tuple[str, int]] = []
        self.deliveries: list[Delivery] = []
        self.said: list[tuple[str, Held]] = []
        self.candidates: list[Dispatchable] = []
        self.outcomes: list[tuple[str, int, Any]] = []
        self.accepted: dict[str, tuple[Any, ...]] = {}
        self.given: set[tuple[str, int]] = set()
        self.pruned: set[str] = set()

    @initialize(policies=st.lists(st.sampled_from(OnExpiry), min_size=1, max_size=2))
    def start(self, policies: list[OnExpiry]) -> None:
        """Begin with nothing but a job or two whose message is on the broker."""
        _emptied(self.store)
        self.now = rows(self.store)
        for on_expiry in policies:
            self.record(dispatched=True, twice=False, on_expiry=on_expiry)

    # -- what is called --------------------------------------------------------------------------

    @precondition(lambda self: len(self.now["job"]) < 3)
    @rule(
        on_expiry=st.sampled_from(OnExpiry),
        max_attempts=st.integers(1, 4),
        delay_seconds=st.sampled_from([0.0, 0.0, 30.0]),
        deadline_seconds=st.sampled_from([None, None, 200.0]),
        expires_seconds=st.sampled_from([None, None, 50.0]),
        dispatched=st.booleans(),
        twice=st.booleans(),
    )
    def submit(self, **job: Any) -> None:
        """Publish; perhaps the message never reaches the broker, perhaps twice."""
        self.record(**job)

    def record(self, *, dispatched: bool, twice: bool, **job: Any) -> None:
        job_id = f"job{len(self.now['job']) + len(self.pruned)}"
        new = new_job(job_id, dispatched=dispatched, **job)
        assert transitions.submit(self.store, new) is True
        if twice:
            assert transitions.submit(self.other, new) is False
        self.messages += [(job_id, 1)] * dispatched
        self.look({job_id})

    @precondition(lambda self: self.messages)
    @rule(which=picks, owner=st.sampled_from(OWNERS), gone=st.booleans())
    def deliver(self, *, which: int, owner: str, gone: bool) -> None:
        """Hand a message to a process, in any order; it may stay on the broker: a duplicate."""
        at = len(self.messages) - 1 - which % len(self.messages)
        job_id, version = self.messages[at]
        if gone:
            del self.messages[at]
        delivery = new_delivery(job_id, message_version=version, owner=owner)
        self.deliveries.append(delivery)
        self.claim(delivery)

    @precondition(lambda self: self.deliveries)
    @rule(which=picks)
    def repeat_delivery(self, which: int) -> None:
        """The reply to a claim was lost, perhaps long ago: the same call again."""
        self.claim(_newest(self.deliveries, which))

    def claim(self, delivery: Delivery) -> None:
        """Claim, and hold what the answer says to what the rows say."""
        job = self.now["job"].get(delivery.job_id)
        answer = transitions.claim(self.store, delivery, lost_backoff=BACKOFF)
        self.look({delivery.job_id})
        if not isinstance(answer, Claimed):
            return
        assert job is not None
        lease = answer.lease
        attempt = self.now["attempt"][lease.job_id, lease.fencing_token]
        assert attempt["claim_nonce"] == delivery.nonce
        assert attempt["ended_at"] is None
        assert job["state"] not in FINAL
        if lease not in self.leases:
            assert (lease.job_id, lease.fencing_token) not in self.given, "a token was given twice"
            assert job["fencing_token"] < lease.fencing_token
            assert job["message_version"] == delivery.message_version
            self.given.add((lease.job_id, lease.fencing_token))
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(
        which=st.lists(picks, min_size=1, max_size=4),
        text=st.sampled_from([None, "1", "2"]),
        stop=st.booleans(),
    )
    def renew(self, *, which: list[int], text: str | None, stop: bool) -> None:
        """One heartbeat for some leases, live, frozen or lost long ago; or asked to stop."""
        chosen = list({_newest(self.leases, one) for one in which})
        answer = transitions.renew(
            self.other,
            [
                renewal(lease, progress=text, checkpoint=text, stop_requested=stop)
                for lease in chosen
            ],
        )
        live = {self.key(lease) for lease in chosen if self.is_live(lease)}
        assert answer.renewed == live
        assert answer.lost.keys() == {self.key(lease) for lease in chosen} - live
        self.look_at_attempts(live)

    @precondition(lambda self: self.messages)
    @rule(which=picks, owner=st.sampled_from(OWNERS), repaired=st.booleans())
    def deliver_to_one_that_freezes(self, *, which: int, owner: str, repaired: bool) -> None:
        """A process claims and is not heard of for longer than its lease."""
        known = len(self.leases)
        self.deliver(which=which, owner=owner, gone=repaired)
        for lease in self.leases[known:]:
            self.pass_time(lease.job_id, 31)

    @precondition(lambda self: self.leases)
    @rule(which=picks, how=ends)
    def end(self, which: int, how: str) -> None:
        """A runner ends its attempt, in time, late, or long after it was given on."""
        lease = _newest(self.leases, which)
        self.said.append((how, lease))
        self.say(how, lease)

    @precondition(lambda self: self.said)
    @rule(which=picks)
    def repeat_end(self, which: int) -> None:
        """The reply was lost: the runner says the same again."""
        how, lease = _newest(self.said, which)
        self.say(how, lease)

    def say(self, how: str, lease: Held) -> None:
        """End an attempt, and hold the answer to the rows; publish what was recorded."""
        was_live = self.is_live(lease)
        before = self.now["attempt"].get(self.key(lease))
        version = 2
        if before is not None:
            version = before["message_version"] + 1
        answer = _end(self.store, lease, how, version)
        if was_live:
            assert isinstance(answer, Accepted)
            self.look({lease.job_id})
            if how in ("retry", "retry later", "replace"):
                self.messages.append((lease.job_id, version))
            return
        # Zero rows: won only if this very end had been written before.
        self.look(set())
        if isinstance(answer, Accepted):
            assert before is not None
            assert before["stop_reason"] == how
        else:
            assert isinstance(answer, Stale)

    @precondition(lambda self: self.leases)
    @rule(which=picks, outcome=st.sampled_from(LateOutcome))
    def reject(self, which: int, outcome: LateOutcome) -> None:
        """A stale runner leaves what it produced."""
        lease = _newest(self.leases, which)
        late = Late(outcome, result=b"late", digest="sha256:0", failure=FAILURE)
        was_live = self.is_live(lease)
        recorded = transitions.reject(self.store, lease, late)
        assert not (recorded and was_live)
        self.look_at_attempts({self.key(lease)} if recorded else set())

    @precondition(lambda self: self.leases)
    @rule(which=picks, cause=st.sampled_from(LossCause), stopping=st.booleans())
    def report(self, *, which: int, cause: LossCause, stopping: bool) -> None:
        """A parent, an owner file or a watchdog reports a vanished runner; perhaps twice."""
        lease = _newest(self.leases, which)
        was_live = self.is_live(lease)
        ends_at = self.now["attempt"][self.key(lease)]["lease_expires_at"] if was_live else None
        early = ends_at is not None and ends_at > store_now(self.store) + timedelta(seconds=5)
        answer = transitions.lost(
            self.store,
            lease,
            cause=cause,
            reason="reported",
            lost_backoff=BACKOFF,
            stopping=stopping,
        )
        assert was_live or answer is None
        assert answer is None or not (early and cause is LossCause.EXPIRED)
        self.look({lease.job_id} if answer else set())

    @rule(
        step=st.sampled_from(
            ["expire", "expire", "dispatch", "dispatch", "time", "extend", "settle", "prune"]
        ),
        oddly=st.booleans(),
    )
    def reap(self, *, step: str, oddly: bool) -> None:
        """A step of a reaper's pass; oddly: twice at once, in vain, or with a lost end."""
        if step == "expire":
            self.expire(twice=oddly)
        elif step == "dispatch":
            self.dispatch(lost=oddly)
        elif step == "time":
            self.let_time_decide(grace=30.0 * oddly)
        elif step == "settle":
            self.settle(forget=oddly)
        elif step == "extend":
            self.extend()
        else:
            self.prune()

    def expire(self, *, twice: bool) -> None:
        """One or two reapers give on what has ended."""
        given_on = transitions.expire(self.store, limit=10, lost_backoff=BACKOFF)
        if twice:
            assert transitions.expire(self.other, limit=10, lost_backoff=BACKOFF) == []
        self.look({one.job_id for one in given_on})

    def extend(self) -> None:
        """A pass grants the amnesty."""
        transitions.extend(self.store, ended_since=None)
        self.look_at_attempts(None)

    def let_time_decide(self, *, grace: float) -> None:
        """A pass wakes, and ends what has passed a bound."""
        moved = transitions.wake(self.store, limit=10, dispatched_grace_seconds=grace)
        moved += transitions.pass_deadline(self.store, limit=10)
        moved += transitions.expire_unstarted(self.store, limit=10)
        overdue = [
            job_id
            for job_id, job in rows(self.store)["job"].items()
            if job["state_reason"] == "overdue"
        ]
        self.look({*moved, *overdue})

    def dispatch(self, *, lost: bool) -> None:
        """A dispatcher sends what nobody has sent; its messages may vanish."""
        found = queries.undispatched(self.store, limit=10)
        found += queries.unclaimed(self.store, queued_timeout=60.0, limit=10)
        self.candidates += found
        for one in found:
            assert transitions.dispatch(self.store, one) is True
            assert transitions.dispatch(self.other, one) is False
            self.messages += [(one.job_id, one.message_version)] * (not lost)
        self.look({one.job_id for one in found})

    @precondition(lambda self: self.candidates)
    @rule(which=picks, failed=st.booleans())
    def dispatch_late(self, *, which: int, failed: bool) -> None:
        """A dispatcher that froze with what it had read goes on, or its publish fails now."""
        one = _newest(self.candidates, which)
        if failed:
            count = one.dispatch_count + 1
            transitions.undispatch(self.store, one.job_id, dispatch_count=count)
        else:
            assert transitions.dispatch(self.store, one) is False
        self.look({one.job_id} if failed else set())

    def settle(self, *, forget: bool) -> None:
        """Celery has been told what is final; what was told may be written down late."""
        found = queries.unsettled(self.store, grace_seconds=-1, again_seconds=0, limit=10)
        self.outcomes += [(o.job_id, o.fencing_token, o.finished_at) for o, _ in found]
        if not forget:
            transitions.settle(self.store, self.outcomes)
        self.look({o.job_id for o, _ in found})

    @precondition(lambda self: self.now["job"])
    @rule(
        which=picks,
        decision=st.sampled_from(["cancel", "hold", "resume", "resume", "accept", "refuse"]),
    )
    def operate(self, which: int, decision: str) -> None:
        """A person decides."""
        job_id = sorted(self.now["job"])[which % len(self.now["job"])]
        before = self.now["job"][job_id]
        if decision == "cancel":
            transitions.cancel(self.store, job_id)
        elif decision == "hold":
            transitions.hold_waiting(self.store, job_id, reason="look")
        elif decision == "resume":
            reached = transitions.resume(self.store, job_id, reason="again")
            if reached is JobState.QUEUED and before["state"] in FINAL:
                # A new life; its outcome may be another.
                assert before["settled_at"] is not None
                self.accepted.pop(job_id, None)
        elif decision == "accept":
            transitions.accept(self.store, job_id, reason="x", result=b"op", result_type=JSON)
        else:
            transitions.refuse(self.store, job_id, reason="x")
        self.look({job_id})

    @precondition(lambda self: self.now["job"])
    @rule(which=picks, seconds=st.sampled_from([6, 31, 31, 31, 100, 300]))
    def let_time_pass(self, which: int, seconds: int) -> None:
        """For one job; the others' rows stand still."""
        self.pass_time(sorted(self.now["job"])[which % len(self.now["job"])], seconds)

    def pass_time(self, job_id: str, seconds: float) -> None:
        move_back(self.store, job_id, seconds=seconds)
        # What was read before names instants that have moved.
        self.outcomes = [one for one in self.outcomes if one[0] != job_id]
        self.now = rows(self.store)
        if job_id in self.accepted:
            self.accepted[job_id] = _outcome(self.now["job"][job_id])

    def prune(self) -> None:
        """Old, settled jobs go, with all that belongs to them."""
        transitions.prune(self.store, succeeded_seconds=200, failed_seconds=200, limit=10)
        after = rows(self.store)
        gone = self.now["job"].keys() - after["job"].keys()
        for job_id in gone:
            assert self.now["job"][job_id]["state"] in FINAL
            assert self.now["job"][job_id]["settled_at"] is not None
        self.pruned |= gone
        self.messages = [one for one in self.messages if one[0] not in gone]
        for job_id in gone:
            self.accepted.pop(job_id, None)
        self.now = {
            table: {
                key: row
                for key, row in found.items()
                if (key[0] if isinstance(key, tuple) else key) not in gone
            }
            for table, found in self.now.items()
        }
        self.look(set())

    # -- what must hold --------------------------------------------------------------------------

    def key(self, lease: Held) -> tuple[str, int]:
        return lease.job_id, lease.fencing_token

    def is_live(self, lease: Held) -> bool:
        attempt = self.now["attempt"].get(self.key(lease))
        return attempt is not None and attempt["ended_at"] is None

    def look_at_attempts(self, keys: set[tuple[str, int]] | None) -> None:
        """Check that only these attempts changed (None: any live one), and no job."""
        before = self.now
        self.now = rows(self.store)
        assert self.now["job"] == before["job"]
        assert self.now["message"] == before["message"]
        changed = {
            key
            for key, attempt in self.now["attempt"].items()
            if before["attempt"].get(key) != attempt
        }
        if keys is None:
            assert all(before["attempt"][key]["ended_at"] is None for key in changed)
        else:
            assert changed <= keys
        self.hold_invariants(before)

    def look(self, job_ids: set[str]) -> None:
        """Check that only rows of these jobs changed."""
        before = self.now
        self.now = rows(self.store)
        for name in difference(before, self.now):
            assert name.split()[1].partition(".")[0] in job_ids, name
        self.hold_invariants(before)

    def hold_invariants(self, before: Rows) -> None:
        """Check what holds after every step."""
        for table, found in before.items():
            assert found.keys() <= self.now[table].keys(), "history vanished"
        for key, attempt in before["attempt"].items():
            if attempt["ended_at"] is not None:
                new = self.now["attempt"][key]
                changed = {name for name in new if new[name] != attempt[name]}
                assert changed <= LATE_COLUMNS, (key, changed)
        for key, message in before["message"].items():
            assert self.now["message"][key] == message
        for job_id, job in self.now["job"].items():
            self.hold_job(job_id, job, before["job"].get(job_id))
        for key, attempt in before["attempt"].items():
            if attempt["ended_at"] is None and self.now["attempt"][key]["state"] in VANISHED:
                lost_count = before["job"][key[0]]["lost_count"] + self.counts(key)
                assert self.now["job"][key[0]]["lost_count"] == lost_count, "losses"

    def counts(self, vanished: tuple[str, int]) -> bool:
        """Tell whether a vanished runner is a loss of its job's (design, section 7)."""
        attempts = self.now["attempt"]
        if not _is_spared(attempts[vanished]):
            return True
        since = self.now["job"][vanished[0]]["resumed_token"] or 0
        others = [a for key, a in attempts.items() if key[0] == vanished[0] and key[1] > since]
        spared = [a for a in others if a["state"] == "released" or _is_spared(a)]
        return len(spared) > UNCOUNTED_ENDS

    def hold_job(self, job_id: str, job: dict[str, Any], before: dict[str, Any] | None) -> None:
        """Check one job against its attempts and against itself before."""
        attempts = {k[1]: a for k, a in self.now["attempt"].items() if k[0] == job_id}
        assert sorted(attempts) == list(range(1, job["fencing_token"] + 1)), "tokens"
        live = [token for token, attempt in attempts.items() if attempt["ended_at"] is None]
        if job["state"] == "running":
            assert live == [job["fencing_token"]]
            assert attempts[live[0]]["owner"] == job["lease_owner"]
        else:
            assert live == []
            assert job["lease_owner"] is None
        assert (job["finished_at"] is not None) == (job["state"] in FINAL)
        if before is not None:
            assert job["fencing_token"] in (before["fencing_token"], before["fencing_token"] + 1)
            assert job["message_version"] >= before["message_version"]
            if before["settled_at"] is not None and job["settled_at"] is not None:
                assert job["settled_at"] == before["settled_at"], "settled twice in one life"
        assert (job_id, job["message_version"]) in self.now["message"]
        if job["state"] in FINAL:
            assert self.accepted.setdefault(job_id, _outcome(job)) == _outcome(job), (
                "a final outcome changed within one life"
            )
        if job["state"] == "succeeded" and job["state_reason"] != "x":
            done = attempts[job["accepted_attempt"]]
            assert done["state"] in ("completed", "replaced")

    def teardown(self) -> None:
        """Every job ends within the bound once nothing goes wrong any more, or is held."""
        if not self.now:
            return
        left = self.left()
        for _ in range(12):
            if not left:
                break
            self.a_quiet_pass()
            left = self.left()
        assert left == {}

    def left(self) -> dict[str, str]:
        """Return the jobs that have not ended, and are not held by a person's word."""
        return {
            job_id: job["state"]
            for job_id, job in rows(self.store)["job"].items()
            if job["state"] not in FINAL and job["state"] != "held"
        }

    def a_quiet_pass(self) -> None:
        """A minute passes, a reaper passes, and every message is delivered and runs well."""
        for job_id in self.now["job"]:
            move_back(self.store, job_id, seconds=61)
        transitions.expire(self.store, limit=99, lost_backoff=BACKOFF)
        transitions.wake(self.store, limit=99, dispatched_grace_seconds=5)
        found = queries.undispatched(self.store, limit=99)
        found += queries.unclaimed(self.store, queued_timeout=0.5, limit=99)
        for one in found:
            transitions.dispatch(self.store, one)
            delivery = new_delivery(one.job_id, message_version=one.message_version)
            answer = transitions.claim(self.store, delivery, lost_backoff=BACKOFF)
            if isinstance(answer, Claimed):
                _end(self.store, answer.lease, "complete", 0)
        transitions.expire_unstarted(self.store, limit=99)
        transitions.pass_deadline(self.store, limit=99)


def _newest(found: list[T], which: int) -> T:
    return found[-1 - which % len(found)]


def _is_spared(attempt: dict[str, Any]) -> bool:
    return attempt["stop_requested_at"] is not None and attempt["state"] in ("expired", "lost")


def _outcome(job: dict[str, Any]) -> tuple[Any, ...]:
    names = ("state", "finished_at", "accepted_attempt", "result", "error_type", "state_reason")
    return tuple(job[name] for name in names)


def _end(store: Store, lease: Held, how: str, version: int) -> Any:
    """End an attempt; what it says is named like how it ends, so that a repetition is known."""
    said = parting(how, failure=FAILURE if how in ("fail", "hold") else Failure())
    result = f"{lease.fencing_token}".encode()
    next_run = again(
        version,
        message=new_message(version),
        delay_seconds=20.0 if how == "retry later" else 0.0,
        task="app.next",
    )
    calls: dict[str, Callable[[], Any]] = {
        "complete": lambda: transitions.complete(
            store, lease, said, result=result, result_type=JSON
        ),
        "fail": lambda: transitions.fail(store, lease, said, error=result, error_content_type=JSON),
        "away": lambda: transitions.replace_away(store, lease, said),
        "release": lambda: transitions.release(store, lease, said),
        "hold": lambda: transitions.hold(store, lease, said),
        "replace": lambda: transitions.replace(store, lease, said, next_run),
        "retry": lambda: transitions.retry_later(store, lease, said, next_run),
        "retry later": lambda: transitions.retry_later(store, lease, said, next_run),
    }
    return calls[how]()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(200 if LONG else 16, 60 if LONG else 50, id="few"),
        pytest.param(200, 60, id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_the_protocol_holds_in_any_order_of_events(
    store: Store, other_store: Store, examples: int, steps: int
) -> None:
    machine = type("Bound", (Protocol,), {"store": store, "other": other_store})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            # Explaining a failure reruns it under a tracer, for minutes.
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
