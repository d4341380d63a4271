"""Taking a lease away from the body that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_lease.extension import extension_of
from celery_lease.records import Held
from celery_lease.states import LossCause
from celery_lease.store import transitions
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.worker.site import Site


def steal(site: Site, job_id: str, tag: str) -> None:
    """End the first attempt of ``o.act`` behind its back; the second one is under way then."""
    eventually(lambda: "ready" in site.facts(tag))
    attempt = site.attempts(job_id)[0]
    extension = extension_of(site.app)
    held = Held(job_id, attempt["fencing_token"], attempt["owner"])
    vanished = transitions.lost(
        extension.store, held, cause=LossCause.LOST, reason="stolen", lost_backoff=(0.0,)
    )
    assert vanished is not None
    extension.reaper().follow_up(vanished)
    site.until_attempts(job_id, 2)
    site.book.note(tag, "stolen")


def after_the_stale_one(site: Site, job_id: str) -> list[dict[str, Any]]:
    """Wait until the first attempt has said what it had, too late; return all attempts."""
    eventually(lambda: site.attempts(job_id)[0]["rejected_at"] is not None)
    return site.attempts(job_id)
