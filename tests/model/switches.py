"""Each switch: which sentence it is, where it shows, what it breaks, and how.

Not expressible here, and tested elsewhere or later:

=========================================  ====================================================
sentence of the design                      why not here
=========================================  ====================================================
the clock is the statement's (§3)           instants are abstract: ``tests/store/test_clock.py``
the lease lives on the attempt row (§3)     locks and HOT updates: ``tests/store/test_renew.py``
a renewal skips locked rows (§4)            a step is one commit: ``tests/store/test_renew.py``
lock order, READ COMMITTED, FOUND_ROWS      one commit is atomic: ``tests/store``
the deadline counts from the send (§5)      a renewal and its reply are one step: ``tests/runtime``
the key is held while not final (§9)        a unique index, not a step: ``tests/store/test_keys.py``
``replace`` and ``reopen`` (§4)             as ``retry`` and ``submit``; canvas: ``tests/worker``
an ack at the claim (§8)                    a lost message is a step of the broker here
an interrupted body (§5)                    bodies that go on are here: ``tests/worker``
=========================================  ====================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.bounds import SCENARIOS, TOO_WIDE, WIDE, Bounds


@dataclass(frozen=True, slots=True)
class Switch:
    """One rule and the counter-example without it.

    Attributes:
        sentence: of the design, shortened, with its section.
        scenario: the bounds in which it shows.
        breaks: the invariant that does not hold.
        story: the counter-example in one line.
    """

    sentence: str
    scenario: str
    breaks: str
    story: str

    @property
    def bounds(self) -> Bounds:
        """The bounds in which it shows."""
        return {**SCENARIOS, **WIDE, **TOO_WIDE}[self.scenario]


SWITCHES = {
    "claim_version": Switch(
        "§4 a claim by an older message version is refused", "retries", "newest_version",
        "a doubled first message claims the job after its retry and runs the old arguments",
    ),
    "claim_nonce": Switch(
        "§4 a claim carries a nonce: its repetition gets the same token",
        "a doubled message, a lost reply", "lease_is_in_hands",
        "the reply to a claim is lost; the repetition is refused by its own lease",
    ),
    "take_over_expiry": Switch(
        "§4 take-over: the expiry in the attempt's own UPDATE", "unrecorded", "ends_are_just",
        "seen over, renewed meanwhile, taken over all the same",
    ),
    "take_over_policy": Switch(
        "§4 one policy for every vanished runner, the take-over too",
        "a crash, a lost message", "losses_are_counted",
        "the last loss allowed is taken over instead of ending the job",
    ),
    "expire_expiry": Switch(
        "§4 every condition stands in the UPDATE's own WHERE", "fail-over", "ends_are_just",
        "a reaper sees it over, the runner renews, the reaper expires it",
    ),
    "loss_token_owner": Switch(
        "§4 lost: by token and owner", "a crash, a lost message", "ends_are_just",
        "a late report of a death ends the attempt of the next runner",
    ),
    "mine_token": Switch(
        "§4 mine: the token", "threads", "live_is_running",
        "a stale thread completes the job that another thread of its process holds",
    ),
    "mine_owner": Switch(
        "§4 mine: the owner", "fail-over", "stale_changes_its_own_row",
        "a fail-over forgets a claim; its runner ends the next attempt, of the same token",
    ),
    "own_row_asked": Switch(
        "§4 did my commit happen? the own row is asked", "a doubled message, a lost reply",
        "publishes_what_is_accepted",
        "zero rows after a lost request are taken for an own commit: a stale result is published",
    ),
    "own_row_same_outcome": Switch(
        "§4 won only if the row holds the outcome that this call asked for", "what bodies do",
        "publishes_what_is_accepted",
        "retry(throw=False), then a return: the value of a retried attempt is published",
    ),
    "own_row_still_accepted": Switch(
        "§1.2 the same, and it is still what the job accepted", "a slow runner, two words",
        "publishes_what_is_accepted",
        "reply lost; replayed, settled, resumed, cancelled: the runner publishes its success",
    ),
    "loss_heard_by_token": Switch(
        "§4 a loss is matched by (job, token)", "a crash, a lost message", "told_of_true_losses",
        "the heartbeat's late answer «lost» stops the next attempt of the same process",
    ),
    "leave_before_finish": Switch(
        "§4 out of the heartbeat's set before finish", "a crash, a lost message",
        "told_of_true_losses", "a runner is told «lost» for the attempt it has just completed",
    ),
    "surrender_leaves_heartbeat": Switch(
        "§5 once check() has raised the lease leaves the heartbeat", "a crash, a lost message",
        "given_up_is_given_up", "check() raises, the heartbeat renews",
    ),
    "surrender_ends_attempt": Switch(
        "§5 then the attempt ends as lost", "a crash, a lost message", "given_up_is_given_up",
        "check() raises, the body goes on and its result is accepted",
    ),
    "queued_clears_dispatched": Switch(
        "§4 every arrow to queued clears dispatched_at", "two reapers", "message_is_somewhere",
        "given on after a loss, it says that its message is out: nobody sends one",
    ),
    "not_due_undispatches": Switch(
        "§4 claim, not due: clears dispatched_at", "what bodies do", "message_is_somewhere",
        "a message that came early is refused and gone",
    ),
    "publish_error_undispatches": Switch(
        "§8, §9 a publish error clears dispatched_at", "two reapers", "message_is_somewhere",
        "the broker refuses the message, the job says it is out",
    ),
    "retry_commits_first": Switch(
        "§9 retry: commit, then publish", "retries", "message_is_somewhere",
        "the retry's message is refused by the lease that is still held",
    ),
    "retry_version_in_transition": Switch(
        "§3 a new version in the transition's own transaction", "retries", "newest_version",
        "retried, and its new message not written yet: a death here runs the old one",
    ),
    "dispatch_count": Switch(
        "§4 dispatch: the count as read", "two reapers", "one_dispatch_a_count",
        "two reapers read one job and both send it",
    ),
    "settle_outcome": Switch(
        "§4 settle: the outcome that was published is still the job's",
        "a slow runner, two words", "settled_is_told",
        "resumed and cancelled meanwhile: a late settle hides the new end from Celery",
    ),
    "serialise_first": Switch(
        "§6 the result is serialised before complete", "what bodies do", "an_end_is_reachable",
        "accepted, and never tellable: no replay can settle it",
    ),
    "reaper_closes_books": Switch(
        "§6 closing the books, else by the reaper", "hold", "an_end_is_reachable",
        "cancelled before a start: nobody tells Celery",
    ),
    "reaper_replays": Switch(
        "§6 a final job unsettled for a while is replayed", "a crash, a lost message",
        "an_end_is_reachable", "a runner dies between accepted and published",
    ),
    "amnesty_once": Switch(
        "§5 extended at most once between two renewals", "amnesty", "extended_once",
        "passes that are always late keep a dead runner's lease for ever",
    ),
    "recorded_header": Switch(
        "§4, §12 a late message of a pruned job is refused", "prune", "pruned_stays_away",
        "a doubled message that waited runs a job whose history was removed",
    ),
    "stops_are_spared": Switch(
        "§7 asked to stop and then vanished: not counted", "rolling restarts",
        "restarts_end_no_job", "a rolling restart interrupts a job that did nothing wrong",
    ),
    "stops_are_capped": Switch(
        "§7 from a cap on it counts as lost", "rolling restarts", "vanishing_is_bounded",
        "a body that always outlives the grace is started again for ever",
    ),
    "stop_of_this_attempt": Switch(
        "§7 an attempt that was asked to stop", "restarts and a crash", "losses_are_counted",
        "asked to stop once, and no crash of a later runner is counted any more",
    ),
    "stop_keeps_policy": Switch(
        "§4 one policy for every vanished runner, one that was asked to stop too",
        "restarts, hold", "losses_are_counted",
        "a restart runs a job again that is to be held when its runner vanishes",
    ),
    "nothing_from_stale": Switch(
        "§1.2 a stale attempt publishes nothing", "prune", "publishes_what_is_accepted",
        "the result of an attempt that was given on reaches callbacks",
    ),
}  # fmt: skip
