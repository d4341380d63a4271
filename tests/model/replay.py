"""Plays a trace of the model against a real store and compares the rows after every step.

What it is not: no Celery and no thread; each step of the model is the call of
``store.transitions`` or ``store.queries`` that the library makes there, with the arguments it
would have then, also when they are out of date. Time passes by moving one instant of a row.
Both the answer of the call and every row must be what the model says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_lease.records import (
    Absent,
    Accepted,
    Claimed,
    Delivery,
    Dispatchable,
    Held,
    Late,
    NewJob,
    Outcome,
    Refused,
    Renewal,
    Replay,
    Stale,
)
from celery_lease.states import JobState, LateOutcome, LossCause, OnExpiry, Refusal
from celery_lease.store import queries, transitions
from celery_lease.store.dialects import Later, clock
from celery_lease.store.engine import RowBusy, Store
from tests.model.bounds import Bounds
from tests.model.explore import Played
from tests.model.state import FINAL, LEASE_OVER, REPLAY, SEND, WAITING, State
from tests.store.builders import FAILURE, JSON, WORKER_NOW, new_message, parting

JOB = "job"
HOUR = 3600.0
BACKOFF = (0.0, HOUR)
REFUSALS = {
    "superseded": {Refusal.SUPERSEDED},
    "running": {Refusal.RUNNING},
    "renewed": {Refusal.RUNNING},
    "held": {Refusal.HELD},
    "too late": {Refusal.DEADLINE, Refusal.EXPIRES},
    "not due": {Refusal.NOT_DUE},
    "final": {Refusal.FINAL},
    "policy": {Refusal.POLICY},
    "busy": {Refusal.BUSY},
}


@dataclass(slots=True)
class Runner:
    """What a worker process has in its memory."""

    owner: str
    nonce: str = ""
    lease: Held | None = None
    tells: Outcome | tuple[str, int, Any] | None = None


@dataclass(slots=True)
class Pass:
    """What a reaper has read."""

    lease: Held | None = None
    candidate: Dispatchable | None = None
    outcome: Outcome | None = None


@dataclass(slots=True)
class Replayer:
    """The actors of one trace, on one store."""

    store: Store
    bounds: Bounds
    runners: dict[str, Runner] = field(default_factory=dict)
    passes: dict[str, Pass] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    numbers: int = 0

    def take(self, played: Played) -> None:
        """Take one step, and assert its answer and all rows."""
        getattr(self, f"_{played.step.actor}")(played)
        self.compare(played.after)

    # -- the app, the broker, time, a person ---------------------------------------------------

    def _app(self, played: Played) -> None:
        step = played.step
        if step.verb == "submit":
            assert transitions.submit(self.store, self._new_job())
        elif step.answer == "refused":
            transitions.undispatch(self.store, JOB, dispatch_count=None, message_version=1)

    def _new_job(self, *, delayed: bool | None = None) -> NewJob:
        delayed = self.bounds.start == "delay" if delayed is None else delayed
        return NewJob(
            job_id=JOB,
            task="app.work",
            message=new_message(1),
            delay_seconds=HOUR if delayed else 0.0,
            max_attempts=self.bounds.max_attempts,
            on_expiry=OnExpiry(self.bounds.on_expiry),
        )

    def _broker(self, played: Played) -> None:
        """Messages are the model's own."""

    def _time(self, played: Played) -> None:
        job, attempt = self.store.tables.job, self.store.tables.attempt
        verb = played.step.verb
        past = Later(clock(), -1.0)
        if verb == "lease ends":
            live = sa.update(attempt).where(attempt.c.ended_at.is_(None))
            self._write(live.values(lease_expires_at=past))
            if played.after.job.extended:
                assert transitions.extend(self.store, ended_since=None) == 0
        elif verb == "due":
            self._write(sa.update(job).values(available_at=past))
        elif verb.endswith("passes"):
            self._write(sa.update(job).values({f"{verb.split()[0]}_at": past}))

    def _write(self, statement: Any) -> None:
        with self.store.engine.begin() as connection:
            connection.execute(statement)

    def _operator(self, played: Played) -> None:
        verb, store = played.step.verb, self.store
        if verb == "prune":
            removed = transitions.prune(
                store, succeeded_seconds=-10.0, failed_seconds=-10.0, limit=10
            )
            assert removed == 1
            return
        act = {
            "cancel": lambda: transitions.cancel(store, JOB),
            "hold": lambda: transitions.hold_waiting(store, JOB, reason="a person"),
            "resume": lambda: transitions.resume(store, JOB, reason="a person"),
            "refuse": lambda: transitions.refuse(store, JOB, reason="a person"),
            "accept": lambda: transitions.accept(
                store, JOB, reason="a person", result=b"1", result_type=JSON
            ),
        }[verb]
        assert act() == JobState(played.after.job.state)

    def _world(self, played: Played) -> None:
        """The fail-over: the last commit, a claim, is gone."""
        job, attempt = self.store.tables.job, self.store.tables.attempt
        token = played.before.job.token
        self._write(sa.delete(attempt).where(attempt.c.fencing_token == token))
        self._write(
            sa.update(job).values(
                state="queued", fencing_token=token - 1, lease_owner=None, dispatched_at=clock()
            )
        )

    # -- a worker ------------------------------------------------------------------------------

    def _worker(self, played: Played) -> None:
        runner = self._runner(played.who)
        before = played.before.workers[played.step.place]
        method = {
            "receive": self._receive,
            "adopt": self._adopt,
            "claim": self._claim,
            "take over": self._take_over,
            "renew": self._renew,
            "surrender": self._surrender,
            "reject": self._reject,
            "settle": self._settle,
            "resend": self._resend,
            "report death": self._report,
        }.get(played.step.verb)
        if method is not None:
            method(played, runner)
        elif played.step.verb == before.outcome:
            self._finish(played, runner)
        if played.step.verb in {"die", "report death", "restart"}:
            now = played.after.workers[played.step.place]
            if now.phase == "idle":
                del self.runners[played.who]

    def _runner(self, who: str) -> Runner:
        if who not in self.runners:
            self.numbers += 1
            owner = "the-process" if self.bounds.one_process else f"{who}-{self.numbers}"
            self.runners[who] = Runner(owner)
        return self.runners[who]

    def _receive(self, played: Played, runner: Runner) -> None:
        self.numbers += 1
        runner.nonce = f"nonce-{self.numbers}"

    def _adopt(self, played: Played, runner: Runner) -> None:
        assert transitions.submit(self.store, self._new_job(delayed=False))

    def _delivery(self, played: Played, runner: Runner, *, grace: float = HOUR) -> Delivery:
        worker = played.before.workers[played.step.place]
        return Delivery(
            job_id=JOB,
            message_version=worker.version or 1,
            owner=runner.owner,
            worker=f"celery@{played.who}",
            nonce=runner.nonce,
            lease_seconds=HOUR,
            worker_now=WORKER_NOW,
            replay=bool(worker.replay),
            settle_grace_seconds=grace,
        )

    def _claim(self, played: Played, runner: Runner) -> None:
        said = played.step.answer
        if said == "lease over":
            return  # the read before a take-over, which is the next step
        grace = -HOUR if said == "aged: replay" else HOUR
        answer = transitions.claim(
            self.store, self._delivery(played, runner, grace=grace), lost_backoff=BACKOFF
        )
        self._take_claim(played, runner, answer)

    def _take_over(self, played: Played, runner: Runner) -> None:
        seen = played.before.workers[played.step.place].seen
        delivery = self._delivery(played, runner)

        def act() -> Any:
            return transitions.take_over(
                self.store, delivery, ended_token=seen, lost_backoff=BACKOFF
            )

        if played.step.answer == "changed":
            try:
                answer = act()
            except RowBusy:
                return  # ``claim`` starts again
            raise AssertionError(f"taken for unchanged: {answer}")
        self._take_claim(played, runner, act())

    def _take_claim(self, played: Played, runner: Runner, answer: Any) -> None:
        said, token = played.step.answer, played.after.job.token
        if said.startswith("won"):
            assert isinstance(answer, Claimed), answer
            assert answer.lease == Held(JOB, token, runner.owner)
            assert answer.message_version == played.after.job.version
            self.owners[token] = runner.owner
            runner.lease = answer.lease
        elif said.endswith("replay"):
            assert isinstance(answer, Replay), answer
            runner.tells = answer.outcome
        elif said == "pruned":
            assert isinstance(answer, Absent), answer
        else:
            assert isinstance(answer, Refused), answer
            assert answer.refusal in REFUSALS[said]

    def _renew(self, played: Played, runner: Runner) -> None:
        lease = self._lease(runner)
        stopping = bool(played.before.workers[played.step.place].stopping)
        answer = transitions.renew(self.store, [Renewal(lease, stop_requested=stopping)])
        key = (JOB, lease.fencing_token)
        assert key in (answer.renewed if played.step.answer == "renewed" else answer.lost), answer

    def _surrender(self, played: Played, runner: Runner) -> None:
        hit = played.step.answer.startswith("lost")
        self._lose(played, self._lease(runner), LossCause.LOST, hit=hit)

    def _report(self, played: Played, runner: Runner) -> None:
        stopping = bool(played.before.workers[played.step.place].stopping)
        hit = played.step.answer == "lost"
        self._lose(played, self._lease(runner), LossCause.LOST, hit=hit, stopping=stopping)

    def _lose(
        self, played: Played, lease: Held, cause: LossCause, *, hit: bool, stopping: bool = False
    ) -> None:
        answer = transitions.lost(
            self.store,
            lease,
            cause=cause,
            reason="said so",
            lost_backoff=BACKOFF,
            stopping=stopping,
        )
        assert (answer is not None) is hit, answer
        if answer is not None:
            assert answer.is_counted is (played.after.job.lost > played.before.job.lost), answer

    def _finish(self, played: Played, runner: Runner) -> None:
        said = played.step.answer
        if said == "request lost":
            return
        lease, outcome = self._lease(runner), played.step.verb
        answer = self._end(played, lease, outcome)
        if said == "stale":
            assert isinstance(answer, Stale), answer
            return
        assert isinstance(answer, Accepted), answer
        if said == "accepted, reply lost":
            return
        publishes = played.after.workers[played.step.place].phase == "publishing"
        if outcome in {"ok", "error"}:
            assert (answer.finished_at is not None) is publishes, answer
        runner.tells = (JOB, lease.fencing_token, answer.finished_at)

    def _end(self, played: Played, lease: Held, outcome: str) -> Any:
        store = self.store
        says = parting(outcome, failure=FAILURE)
        if outcome == "ok":
            return transitions.complete(store, lease, says, result=b"1", result_type=JSON)
        if outcome == "error":
            return transitions.fail(store, lease, says, error=b"{}", error_content_type=JSON)
        if outcome == "hold":
            return transitions.hold(store, lease, says)
        if outcome == "release":
            return transitions.release(store, lease, says)
        version = played.before.workers[played.step.place].version + 1
        again = transitions.Again(message=new_message(version), delay_seconds=HOUR)
        return transitions.retry_later(store, lease, says, again)

    def _reject(self, played: Played, runner: Runner) -> None:
        recorded = transitions.reject(self.store, self._lease(runner), Late(LateOutcome.SUCCEEDED))
        assert recorded is (played.before.attempts != played.after.attempts)

    def _settle(self, played: Played, runner: Runner) -> None:
        tells = runner.tells
        if isinstance(tells, Outcome):
            tells = (JOB, tells.fencing_token, tells.finished_at)
        assert tells is not None
        settled = transitions.settle(self.store, [tells])
        assert settled == int(played.step.answer == "settled")

    def _resend(self, played: Played, runner: Runner) -> None:
        if played.step.answer == "refused":
            version = played.before.workers[played.step.place].version
            transitions.undispatch(self.store, JOB, dispatch_count=None, message_version=version)

    @staticmethod
    def _lease(runner: Runner) -> Held:
        assert runner.lease is not None
        return runner.lease

    # -- a reaper ------------------------------------------------------------------------------

    def _reaper(self, played: Played) -> None:  # noqa: C901  one branch a step
        reaper = self.passes.setdefault(played.who, Pass())
        before = played.before.reapers[played.step.place]
        verb = played.step.verb
        if verb == "see expired":
            token = played.before.job.token
            reaper.lease = Held(JOB, token, self.owners[token])
        elif verb.startswith("see "):
            self._look(verb, reaper, played)
        elif verb == "expire":
            self._expire(played, reaper)
        elif verb == "extend":
            assert transitions.extend(self.store, ended_since=None) == 1
        elif verb == "wake":
            grace = -10.0 if played.step.answer else HOUR
            woken = transitions.wake(self.store, limit=10, dispatched_grace_seconds=grace)
            assert woken == [JOB]
        elif verb == "pass deadline":
            assert transitions.pass_deadline(self.store, limit=10) == [JOB]
        elif verb == "expire unstarted":
            assert transitions.expire_unstarted(self.store, limit=10) == [JOB]
        elif verb.startswith("dispatch"):
            assert reaper.candidate is not None
            done = transitions.dispatch(self.store, reaper.candidate, replay=before.kind != SEND)
            assert done is (played.step.answer == "done")
        elif verb == "send" and played.step.answer == "refused":
            assert reaper.candidate is not None
            transitions.undispatch(
                self.store, JOB, dispatch_count=reaper.candidate.dispatch_count + 1
            )
        elif verb == "settle":
            told = reaper.outcome
            assert told is not None
            settled = transitions.settle(self.store, [(JOB, told.fencing_token, told.finished_at)])
            assert settled == int(played.step.answer == "settled")

    def _look(self, verb: str, reaper: Pass, played: Played) -> None:
        if verb == "see undispatched":
            found = queries.undispatched(self.store, limit=10)
        elif verb == "see unclaimed":
            found = queries.unclaimed(self.store, queued_timeout=-0.1, limit=10)
        else:
            ((outcome, candidate),) = queries.unsettled(
                self.store, grace_seconds=-10.0, again_seconds=-10.0, limit=10
            )
            kind = played.after.reapers[played.step.place].kind
            # The reaper replays what an attempt's word made, and closes the books of the rest.
            assert outcome.by_attempt is (kind == REPLAY)
            reaper.outcome, found = outcome, [candidate]
        (reaper.candidate,) = found

    def _expire(self, played: Played, reaper: Pass) -> None:
        if played.step.answer == "expired":
            (vanished,) = transitions.expire(self.store, limit=10, lost_backoff=BACKOFF)
            assert vanished.state == played.after.job.state
            assert vanished.is_counted is (played.after.job.lost > played.before.job.lost)
            return
        assert reaper.lease is not None
        self._lose(played, reaper.lease, LossCause.EXPIRED, hit=False)

    # -- what must be equal --------------------------------------------------------------------

    def compare(self, state: State) -> None:
        """Assert that the rows are what the model says."""
        real, model = self._read(), self._expected(state)
        assert real == model

    def _expected(self, state: State) -> dict[str, Any]:
        job = state.job
        if job.state == "absent":
            return {"job": None, "attempts": [], "versions": []}
        running = job.state == "running"
        return {
            "job": {
                "state": job.state,
                "token": job.token,
                "owner": self.owners[job.token] if running else None,
                "version": job.version,
                "dispatched": bool(job.dispatched) if job.state in WAITING else None,
                "lost": job.lost,
                "accepted": job.accepted or None,
                "late": bool(job.late),
                "settled": bool(job.settled),
                "finished": job.state in FINAL,
                "lease over": running and job.lease == LEASE_OVER,
            },
            "attempts": [
                (
                    at,
                    attempt.state,
                    attempt.version,
                    bool(attempt.late),
                    bool(attempt.asked),
                    self.owners[at],
                )
                for at, attempt in enumerate(state.attempts, 1)
            ],
            "versions": list(range(1, job.version + 1)),
        }

    def _read(self) -> dict[str, Any]:
        tables = self.store.tables
        job, attempt, message = tables.job, tables.attempt, tables.message
        over = sa.case((attempt.c.lease_expires_at < clock(), 1), else_=0).label("over")
        with self.store.single() as connection:
            row = connection.execute(sa.select(job)).mappings().first()
            by_token = sa.select(attempt, over).order_by(attempt.c.fencing_token)
            attempts = connection.execute(by_token).mappings().all()
            ordered = sa.select(message.c.version).order_by(message.c.version)
            versions = list(connection.execute(ordered).scalars())
        if row is None:
            return {"job": None, "attempts": list(attempts), "versions": versions}
        live = [one for one in attempts if one["ended_at"] is None]
        return {
            "job": {
                "state": row["state"],
                "token": row["fencing_token"],
                "owner": row["lease_owner"],
                "version": row["message_version"],
                "dispatched": (
                    row["dispatched_at"] is not None if row["state"] in WAITING else None
                ),
                "lost": row["lost_count"],
                "accepted": row["accepted_attempt"],
                "late": bool(row["accepted_late"]),
                "settled": row["settled_at"] is not None,
                "finished": row["finished_at"] is not None,
                "lease over": any(one["over"] for one in live),
            },
            "attempts": [
                (
                    one["fencing_token"],
                    one["state"],
                    one["message_version"],
                    one["rejected_at"] is not None,
                    one["stop_requested_at"] is not None,
                    one["owner"],
                )
                for one in attempts
            ],
            "versions": versions,
        }
