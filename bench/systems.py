"""What is measured beside what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class System:
    """One way to run a no-op job.

    Attributes:
        name: what the command line and the JSON call it.
        title: what a person calls it.
        is_leased: whether its task is a ``LeasedTask``.
        acks_late: whether a delivery is acknowledged after the body.
        results: where results go: ``"redis"``, ``"sql"`` or None.
        prepares: whether the server keeps the plans of repeated statements. Off by default:
            poolers in transaction mode may not know them.
    """

    name: str
    title: str
    is_leased: bool
    acks_late: bool
    results: str | None
    prepares: bool = False


SYSTEMS = {
    system.name: system
    for system in (
        System(
            "early",
            "Celery, early ack, no results",
            is_leased=False,
            acks_late=False,
            results=None,
        ),
        System(
            "late-redis",
            "Celery, late ack, Redis results",
            is_leased=False,
            acks_late=True,
            results="redis",
        ),
        System(
            "late-sql",
            "Celery, late ack, SQLAlchemy results",
            is_leased=False,
            acks_late=True,
            results="sql",
        ),
        System(
            "lease",
            "celery-lease, Redis results",
            is_leased=True,
            acks_late=True,
            results="redis",
        ),
        System(
            "lease-prepared",
            "celery-lease, Redis results, prepared statements",
            is_leased=True,
            acks_late=True,
            results="redis",
            prepares=True,
        ),
        System(
            "lease-bare",
            "celery-lease, no results",
            is_leased=True,
            acks_late=True,
            results=None,
        ),
    )
}
