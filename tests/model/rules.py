"""The switches: each rule of the design that closes a counter-example, on or off.

A rule that is off leaves its function of the model without that one condition; the
exploration must then find a state or a step that breaks the invariant named here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the protocol, all of them on."""

    claim_version: bool = True
    claim_nonce: bool = True
    take_over_expiry: bool = True
    take_over_policy: bool = True
    expire_expiry: bool = True
    loss_token_owner: bool = True
    mine_token: bool = True
    mine_owner: bool = True
    own_row_asked: bool = True
    own_row_same_outcome: bool = True
    own_row_still_accepted: bool = True
    loss_heard_by_token: bool = True
    leave_before_finish: bool = True
    surrender_leaves_heartbeat: bool = True
    surrender_ends_attempt: bool = True
    queued_clears_dispatched: bool = True
    not_due_undispatches: bool = True
    publish_error_undispatches: bool = True
    retry_commits_first: bool = True
    retry_version_in_transition: bool = True
    dispatch_count: bool = True
    settle_outcome: bool = True
    serialise_first: bool = True
    reaper_closes_books: bool = True
    reaper_replays: bool = True
    amnesty_once: bool = True
    recorded_header: bool = True
    nothing_from_stale: bool = True
    stops_are_spared: bool = True
    stops_are_capped: bool = True
    stop_of_this_attempt: bool = True
    stop_keeps_policy: bool = True

    def without(self, name: str) -> Rules:
        """Return the rules with one of them off."""
        return replace(self, **{name: False})


ALL = Rules()
NAMES = tuple(field.name for field in fields(Rules))
