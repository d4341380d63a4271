"""Which messages are taken for lost: by evidence, and not by time alone.

A message that nobody claimed for ``lease_queued_timeout`` is *suspected*. In a backlog every
message is, and sending each one again would multiply the backlog. What tells is order: a broker
gives out the messages of one queue and priority in the order in which they came.

- *Overtaken*: a message of the same queue and priority that was sent later has been claimed. Ours
  is lost, or in the hands of a busy or hung worker, which has few: it is sent again.
- *Silent*: nothing that was sent later has been claimed. The worker is away, or all messages are
  lost and none came after them. A few are sent again as *probes*. If somebody is there, a probe is
  claimed, and all that was sent before it is overtaken. If nobody is, the probes are all that was
  added.

Which message a claim was made by is known: the claim keeps ``dispatched_at`` only if it is when
that very message was sent (``transitions.claim``). Else a backlog's old copy of a probe, claimed
when a worker comes back, would say that the whole backlog has been overtaken.

A job whose queue is not known (its exchange alone decides) has nothing to be compared with: time
decides, as does the growing gap between two messages of one job everywhere. The gap grows with what
was sent again, and not with how long a job waited for its first message: while the broker was away
there was none to be lost.

What it is not: these are statements and one decision; ``queries.unclaimed`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import case, func, select
from sqlalchemy.sql.elements import ColumnElement

from celery_lease.backoff import LARGEST_GAP, probe_count, redispatch_gap_seconds
from celery_lease.states import JobState
from celery_lease.store.dialects import Later, SecondsBetween, clock_once
from celery_lease.store.engine import Store

#: Of the jobs that have ended, so many of each outcome are asked, beside all that run. A claim
#: that is missed for the crowd of other queues costs its queue another probe.
ENDED_ROWS = 2000


@dataclass(frozen=True, slots=True)
class SilentQueue:
    """What is waiting under one queue and priority, some of it suspected.

    Attributes:
        queue: its name.
        priority: as the messages have it, None without one.
        waiting_count: jobs whose message should be in it.
        probed_seconds: since the last probe of a job that waits still, None without one.
        waited_seconds: how long the message that was sent first had waited by then, None
            without one.
        news_seconds: from that probe to when the newest of the suspected jobs was first sent: more
            than 0 says that messages came after it. None without a probe.
    """

    queue: str
    priority: int | None
    waiting_count: int
    probed_seconds: float | None
    waited_seconds: float | None
    news_seconds: float | None

    def is_due(self, queued_timeout_seconds: float) -> bool:
        """Tell whether probes are to be sent now.

        Without one, at once. Otherwise after a gap that doubles, as it does for one job; yet what
        was sent after the last probe would learn nothing from it, and does not wait for it.
        """
        if self.probed_seconds is None or (self.news_seconds or 0.0) > 0.0:
            return True
        gap = redispatch_gap_seconds(queued_timeout_seconds, self.waited_seconds or 0.0)
        return self.probed_seconds >= gap

    @property
    def probe_count(self) -> int:
        """How many probes are sent at a time."""
        return probe_count(self.waiting_count)


def first(store: Store, queued_timeout: float) -> Any:
    """Return the read of one suspected job: in most passes there is none, and all is said."""
    job = store.tables.job
    return select(job.c.id).where(*_suspected(job, queued_timeout)).limit(1)


def overtaken(store: Store, candidates: Any, queued_timeout: float) -> Any:
    """Return the read of suspected jobs that later messages have overtaken, the oldest first."""
    job = store.tables.job
    newest = _claimed(store)
    waited = SecondsBetween(_first_at(job), job.c.dispatched_at)
    since = SecondsBetween(job.c.dispatched_at, clock_once())
    return (
        candidates.outerjoin_from(
            job,
            newest,
            sa.and_(
                newest.c.queue == job.c.queue,
                job.c.priority.is_not_distinct_from(newest.c.priority),
            ),
        )
        .where(
            *_suspected(job, queued_timeout),
            sa.or_(since - waited >= queued_timeout, since >= LARGEST_GAP * queued_timeout),
            sa.or_(job.c.dispatched_at < newest.c.dispatched_at, job.c.queue.is_(None)),
        )
        .order_by(job.c.dispatched_at, job.c.id)
    )


def silent_queues(store: Store, queued_timeout: float) -> Any:
    """Return the read of what waits, by queue and priority: the rows of ``SilentQueue``."""
    job = store.tables.job
    probed_at = func.max(case((_is_probed(job), job.c.dispatched_at)))
    is_suspected = sa.and_(*_suspected(job, queued_timeout))
    newest_at = func.max(case((is_suspected, _first_at(job))))
    return (
        select(
            job.c.queue,
            job.c.priority,
            func.count().label("waiting_count"),
            SecondsBetween(probed_at, clock_once()).label("probed_seconds"),
            SecondsBetween(func.min(_first_at(job)), probed_at).label("waited_seconds"),
            SecondsBetween(probed_at, newest_at).label("news_seconds"),
        )
        .where(
            job.c.state == JobState.QUEUED.value,
            job.c.dispatched_at.is_not(None),
            job.c.queue.is_not(None),
        )
        .group_by(job.c.queue, job.c.priority)
        .having(newest_at.is_not(None))
    )


def probes(queue: SilentQueue, candidates: Any, job: Any, queued_timeout: float) -> Any:
    """Return the read of the jobs of a queue that make the best probes, the best one first.

    The last ones that came, and each once: they are not about to be claimed by a worker that is
    merely slow, and one that no worker knows is not tried again and again. When all have been
    probed, the one that was longest ago.
    """
    is_probed = _is_probed(job)
    return candidates.where(
        *_suspected(job, queued_timeout),
        job.c.queue == queue.queue,
        job.c.priority.is_not_distinct_from(queue.priority),
    ).order_by(
        case((is_probed, 1), else_=0),
        case((is_probed, job.c.dispatched_at)),
        job.c.dispatched_at.desc(),
        job.c.id,
    )


def _suspected(job: Any, queued_timeout: float) -> list[ColumnElement[bool]]:
    return [
        job.c.state == JobState.QUEUED.value,
        job.c.dispatched_at <= Later(clock_once(), -queued_timeout),
    ]


def _is_probed(job: Any) -> ColumnElement[bool]:
    """Tell that a job's last message was not its first one since it was queued."""
    is_sent_again: ColumnElement[bool] = job.c.first_dispatched_at.is_not(None)
    return is_sent_again


def _first_at(job: Any) -> Any:
    """Return when a job that has been sent was first sent since it was queued."""
    return func.coalesce(job.c.first_dispatched_at, job.c.dispatched_at)


def _claimed(store: Store) -> Any:
    """Return when the newest message that was claimed had been sent, by queue and priority."""
    job, attempt = store.tables.job, store.tables.attempt
    columns = (job.c.queue, job.c.priority, job.c.dispatched_at)
    # The few live attempts have an index; running jobs have none.
    live = select(attempt.c.job_id).where(attempt.c.ended_at.is_(None))
    running = select(*columns).where(job.c.id.in_(live))
    ended = [_ended(job, columns, state) for state in (JobState.SUCCEEDED, JobState.FAILED)]
    seen = sa.union_all(running, *ended).subquery("seen")
    return (
        select(seen.c.queue, seen.c.priority, func.max(seen.c.dispatched_at).label("dispatched_at"))
        .group_by(seen.c.queue, seen.c.priority)
        .subquery("claimed")
    )


def _ended(job: Any, columns: Any, state: JobState) -> Any:
    """Return the last that ended so: of those that were claimed, and not sent again as a replay."""
    last = (
        select(*columns, job.c.fencing_token, job.c.finished_at)
        .where(job.c.state == state.value, job.c.finished_at.is_not(None))
        .order_by(job.c.finished_at.desc())
        .limit(ENDED_ROWS)
        .subquery(f"last_{state.value}")
    )
    return select(last.c.queue, last.c.priority, last.c.dispatched_at).where(
        last.c.fencing_token > 0, last.c.dispatched_at <= last.c.finished_at
    )
