"""A clock, leases and answers for tests of the floor that runs threads and knows no Celery."""

from __future__ import annotations

from collections.abc import Callable

from celery_lease.lease import Lease
from celery_lease.records import Claimed, Held, Renewed


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def make_lease(
    clock: Callable[[], float],
    job_id: str = "job",
    token: int = 1,
    *,
    seconds: float = 30.0,
    stall_timeout_seconds: float | None = None,
    from_worker: bool = False,
    max_checkpoint_bytes: int | None = None,
) -> Lease:
    """Return a lease that was claimed just now."""
    surrenders: list[Lease] = []
    lease = Lease(
        Claimed(Held(job_id, token, "owner"), message_version=1, lost_count=0),
        lease_seconds=seconds,
        heartbeat_seconds=seconds / 3,
        sent_at=clock(),
        on_surrender=surrenders.append,
        on_checkpoint=lambda: None,
        stall_timeout_seconds=stall_timeout_seconds,
        from_worker=from_worker,
        max_checkpoint_bytes=max_checkpoint_bytes,
        monotonic=clock,
    )
    lease.surrenders = surrenders  # type: ignore[attr-defined]
    return lease


def renewed(*keys: tuple[str, int]) -> Renewed:
    """Return an answer that renews these."""
    return Renewed(frozenset(keys), {}, frozenset())
