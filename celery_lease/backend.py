"""``result_backend = "lease://"``: a result backend that is the store.

Of a leased task the job row *is* the result: completing the job and storing the result are one
transaction, so that there is no moment between the two. What Celery stores afterwards is taken
as word of mouth: of a job that is final nothing of it is believed. The states on the way are
derived from the job (running is STARTED, waiting after an attempt is RETRY); a body's own ones
(``update_state``) are kept under its fencing token, so that a stale attempt's are not seen.

Tasks without a lease have their results in a table of their own, as in Celery's own backends.
Chords are counted in the store: each part once, whoever repeats it, and one caller fires the
body. What happens at each failure:

* a process dies before its part is counted: a leased part is replayed, an unleased one is lost
  with its task, as everywhere in Celery;
* it dies between the claim of the chord and the body's publish: another word of a leased part,
  a replay above all, waits for the claim to run out, and publishes;
* it dies after the publish: the body may be published a second time, under the same id. A
  leased body runs once.

It is long because what Celery asks of a result backend is one class, in the order of its own:
storing, reading, waiting, groups, chords.

What it is not: no SQL is here (``store.results``, ``store.transitions.results``). Read: celery
5.5 to 5.7, ``celery/backends/base.py``, ``celery/backends/redis.py``.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from celery import maybe_signature, states
from celery.app.task import Context
from celery.backends.base import BaseBackend
from celery.exceptions import ChordError, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import GroupResult, ResultBase, result_from_tuple
from kombu import serialization
from kombu.utils.encoding import bytes_to_str, ensure_bytes

from celery_lease.dispatch import ending_error
from celery_lease.exceptions import ChordClaimed, SettingError, StoreError, StoreUnavailable
from celery_lease.extension import extension_of, is_leased
from celery_lease.lease import Lease, current_lease
from celery_lease.records import Outcome
from celery_lease.states import REPLACED_REASONS, JobState
from celery_lease.store import results, transitions
from celery_lease.store.engine import Store
from celery_lease.store.transitions.results import FORGOTTEN
from celery_lease.task import is_under_lease

logger = logging.getLogger(__name__)

#: First pause of somebody who waits for a result, seconds; it grows up to Celery's ``interval``.
FIRST_PAUSE_SECONDS = 0.01
PAUSE_GROWTH = 1.5
#: How long the claim of a process that was about to fire a chord is respected.
CHORD_CLAIM_SECONDS = 30.0
CHORD_POLL_SECONDS = 0.05
#: How long somebody waits for such a claim who is not a worker's child with nothing else to do:
#: the one who has it joins the results and publishes one message.
CHORD_WAIT_SECONDS = 1.0

#: What a held job is called: it waits for a person. No state of Celery's says so.
HELD = "HELD"
#: Ends of a job that say nothing of the task's result: what was stored under its id does.
_SAYS_NOTHING = ("ignored", *REPLACED_REASONS)
#: Celery's states that the job row tells better.
_DERIVED = frozenset({states.PENDING, states.RECEIVED, states.STARTED, states.RETRY})
_JSON = "application/json"


class LeaseBackend(BaseBackend):  # type: ignore[misc]  # Celery has no types
    """Celery's result backend in the store of celery-lease.

    Args:
        app: the Celery app.
        url: ``lease://``; where the store is says ``lease_store_url``.

    Raises:
        SettingError: something stands after ``lease://``.

    .. versionadded:: 0.1
    """

    supports_native_join = True
    supports_result_compression = True
    #: Asked by ``task``: an outcome in the job row is told already.
    is_lease_store = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        if url and url.rstrip("/") != "lease:":
            # Not repeated here: it may hold a password.
            problem = (
                "result_backend has something after lease://: write lease:// and nothing more; "
                "where the store is says lease_store_url"
            )
            raise SettingError([problem])
        super().__init__(app, url=url or "lease://", **kwargs)
        self._extension = extension_of(app)

    @property
    def _store(self) -> Store:
        return self._extension.store

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})

    def as_uri(self, include_password: bool = False) -> str:  # noqa: FBT001, FBT002  Celery's
        """Return the backend's URL, which holds no secret."""
        del include_password
        return str(self.url)

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Tell whether ``result_backend_always_retry`` may repeat after an error."""
        return isinstance(exc, StoreUnavailable)

    # -- storing -------------------------------------------------------------------------------

    def _store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **_: Any,
    ) -> Any:
        """Keep what Celery says of a task, unless its job says more.

        The name and the signature are those of Celery's own backends, which is what calls it.
        """
        if self._is_told_by_job(task_id, state, request):
            return result
        token = 0
        job = self._job(task_id, request)
        if job is not None:
            if state in _DERIVED:
                return result
            token = self._token(task_id, job)
            if job.outcome is not None and job.state_reason not in _SAYS_NOTHING:
                # Its children, and what ``result_extended`` asks for, have no place in the job.
                result = traceback = None
        meta = self._get_result_meta(
            result=result, state=state, traceback=traceback, request=request
        )
        meta["task_id"] = bytes_to_str(task_id)
        transitions.keep_result(
            self._store,
            task_id,
            status=state,
            meta=ensure_bytes(self.encode(meta)),
            fencing_token=token,
        )
        return result

    def _is_told_by_job(self, task_id: str, state: str, request: Any) -> bool:
        """Tell whether the job row has said all of this already: most deliveries write nothing."""
        if request is None or request.id != task_id or not self._is_leased(request):
            return False
        if state in _DERIVED:
            return True
        if not is_under_lease(request) or state not in self.READY_STATES:
            return False
        if isinstance(current_lease(), Lease):
            # The body itself, by ``update_state``: its job has not ended.
            return False
        extended = self.app.conf.find_value_for_key("extended", "result")
        return not extended and not getattr(request, "children", None)

    def _is_leased(self, request: Any) -> bool:
        task = self.app.tasks.get(getattr(request, "task", None))
        return task is not None and is_leased(task)

    def _may_be_job(self, task_id: str, request: Any) -> bool:
        """Tell whether an id may be a job's: only then is the store asked for one."""
        if request is None or request.id != task_id or self._is_leased(request):
            return True
        # A task without a lease that stands in for a leased one has that one's id.
        return bool(getattr(request, "replaced_task_nesting", 0))

    def _job(self, task_id: str, request: Any) -> results.Standing | None:
        if not self._may_be_job(task_id, request):
            return None
        return results.standing(self._store, task_id)

    @staticmethod
    def _token(task_id: str, job: results.Standing) -> int:
        lease = current_lease()
        if isinstance(lease, Lease) and lease.job_id == task_id:
            return lease.fencing_token
        return job.fencing_token

    def mark_as_revoked(
        self,
        task_id: str,
        reason: str = "",
        request: Any = None,
        store_result: bool = True,  # noqa: FBT001, FBT002  Celery's own signature
        state: str = states.REVOKED,
    ) -> None:
        """Store a revocation; a leased job is cancelled, or its part of a chord would wait.

        What Celery found expired is ended by the reaper, by the store's clock.
        """
        if reason != "expired" and self._may_be_job(task_id, request):
            # Whoever revoked it has ended it; Celery may say so long after, when it was resumed.
            transitions.cancel_dispatched(self._store, task_id, dispatch_count=1, reason="revoked")
        super().mark_as_revoked(
            task_id, reason, request=request, store_result=store_result, state=state
        )

    def _forget(self, task_id: str) -> None:
        transitions.forget_result(self._store, task_id)

    def cleanup(self) -> None:
        """Remove what is older than ``result_expires``; jobs have a retention of their own.

        A chord that waits is taken for abandoned no sooner than ``lease_keep_failed``.
        """
        if not self.expires:
            return
        seconds, settings = float(self.expires), self._extension.settings
        kept = settings.keep_failed
        waiting = None if kept is None else max(seconds, kept)
        while transitions.prune_results(
            self._store, seconds=seconds, waiting_seconds=waiting, limit=settings.reaper_batch
        ):
            pass

    # -- reading -------------------------------------------------------------------------------

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        task_id = bytes_to_str(task_id)
        return self._meta(task_id, results.find(self._store, [task_id])[task_id])

    def task_result_exists(self, task_id: str) -> bool:
        """Tell whether a task is known: a job that waits is, one that was forgotten is not."""
        task_id = bytes_to_str(task_id)
        found = results.find(self._store, [task_id])[task_id]
        if found.kept is not None and found.kept.status == FORGOTTEN:
            return found.job is not None and found.job.outcome is None
        return found.job is not None or found.kept is not None

    def _meta(self, task_id: str, found: results.Found) -> dict[str, Any]:
        if found.job is not None:
            return self._meta_of_job(task_id, found.job, found.kept)
        return self._meta_of_kept(task_id, found.kept)

    def _meta_of_kept(self, task_id: str, kept: results.Kept | None) -> dict[str, Any]:
        if kept is None or kept.meta is None:
            return _pending(task_id)
        meta: dict[str, Any] = self.decode_result(kept.meta)
        if kept.status in self.READY_STATES:
            meta["date_done"] = kept.stored_at
        return meta

    def _meta_of_job(
        self, task_id: str, job: results.Standing, kept: results.Kept | None
    ) -> dict[str, Any]:
        said = kept if kept is not None and kept.fencing_token == job.fencing_token else None
        if job.outcome is None:
            # What was said before the first claim (``abort()``) is of no attempt, and stands.
            early = kept if kept is not None and kept.fencing_token == 0 else None
            word = said or early
            # Not a final word: the body's own, before an ``Ignore`` that has not come.
            own = word is not None and word.status not in {*self.READY_STATES, FORGOTTEN}
            if own and (job.state is JobState.RUNNING or job.fencing_token == 0):
                return self._meta_of_kept(task_id, word)
            status, result = self._unfinished(job)
            meta: dict[str, Any] = {"date_done": None}
        elif job.state is JobState.SUCCEEDED and job.state_reason in _SAYS_NOTHING:
            return self._meta_of_kept(task_id, kept)
        elif said is not None and said.status == FORGOTTEN:
            return _pending(task_id)
        else:
            status, result = self._final(job.task, job.outcome)
            meta = dict(self.decode(said.meta)) if said is not None and said.meta else {}
            meta["date_done"] = job.outcome.finished_at
        known = {"name": job.task, "queue": job.queue, "worker": job.worker}
        of_canvas = {"group_id": job.group_id, "parent_id": job.parent_id}
        return {
            "children": [],
            **known,
            **{name: value for name, value in of_canvas.items() if value is not None},
            **meta,
            "task_id": task_id,
            "status": status,
            "result": result,
            "traceback": job.traceback if status in self.EXCEPTION_STATES else None,
        }

    def _unfinished(self, job: results.Standing) -> tuple[str, Any]:
        if job.state is JobState.RUNNING:
            pid = (job.owner or "").split(":")[-2:-1]
            return states.STARTED, {
                "pid": int(pid[0]) if pid and pid[0].isdecimal() else None,
                "hostname": job.worker,
            }
        if job.state is JobState.HELD:
            return HELD, None
        if job.fencing_token == 0:
            return states.PENDING, None
        if job.error_type is None:
            return states.RETRY, None
        module, _, name = job.error_type.rpartition(".")
        return states.RETRY, self.exception_to_python(
            {"exc_type": name, "exc_module": module, "exc_message": [job.error_message or ""]}
        )

    def _final(self, task: str, outcome: Outcome) -> tuple[str, Any]:
        if outcome.state is JobState.SUCCEEDED:
            return states.SUCCESS, self._returned(outcome)
        if outcome.state is JobState.CANCELLED:
            return states.REVOKED, TaskRevokedError(str(ending_error(outcome, task=task)))
        if outcome.by_attempt and outcome.result is not None:
            # Written by ``encode_error``, always JSON.
            return states.FAILURE, self.exception_to_python(_plain(outcome.result))
        return states.FAILURE, ending_error(outcome, task=task)

    def _returned(self, outcome: Outcome) -> Any:
        if outcome.result is None:
            return None
        return serialization.loads(outcome.result, outcome.result_type, "utf-8", accept=self.accept)

    # -- waiting -------------------------------------------------------------------------------

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,  # noqa: FBT001, FBT002  Celery's own signature
        on_interval: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Wait for a task's result.

        Args:
            task_id: the task.
            timeout: seconds, None for ever.
            interval: the longest pause between two looks, seconds; the first ones are shorter.
            no_ack: not used.
            on_interval: called before each pause.

        Returns:
            Its meta.

        Raises:
            celery.exceptions.TimeoutError: it was not there in time.
        """
        del no_ack
        self._ensure_not_eager()
        pauses = _pauses(timeout, interval)
        while True:
            meta: dict[str, Any] = self.get_task_meta(task_id)
            if meta["status"] in self.READY_STATES:
                return meta
            if on_interval is not None:
                on_interval()
            _pause(pauses, "The operation timed out.")

    def get_many(  # noqa: PLR0917  Celery's own signature
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,  # noqa: FBT001, FBT002  Celery's own signature
        on_message: Callable[[dict[str, Any]], object] | None = None,
        on_interval: Callable[[], object] | None = None,
        max_iterations: int | None = None,
        READY_STATES: frozenset[str] = states.READY_STATES,  # noqa: N803  Celery's own name
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Give (task id, meta) of each task as its result comes; see ``wait_for``."""
        del no_ack
        waiting = dict.fromkeys(bytes_to_str(task_id) for task_id in task_ids)
        pauses = _pauses(timeout, interval)
        looks = 0
        while waiting:
            ready = self._ready_among(list(waiting), READY_STATES)
            for task_id, meta in ready.items():
                del waiting[task_id]
                if on_message is not None:
                    on_message(meta)
                yield task_id, meta
            looks += 1
            if not waiting or (max_iterations and looks >= max_iterations):
                return
            if on_interval is not None:
                on_interval()
            _pause(pauses, f"Operation timed out ({timeout})")

    def _ready_among(
        self, task_ids: list[str], ready_states: frozenset[str]
    ) -> dict[str, dict[str, Any]]:
        ready = {}
        for task_id in task_ids:
            with suppress(KeyError):
                if self._cache[task_id]["status"] in ready_states:
                    ready[task_id] = self._cache[task_id]
        rest = [task_id for task_id in task_ids if task_id not in ready]
        for task_id, found in results.find(self._store, rest).items() if rest else ():
            meta = self._meta(task_id, found)
            if meta["status"] in ready_states:
                ready[task_id] = meta
                if meta["status"] == states.SUCCESS:
                    self._cache[task_id] = meta
        return ready

    # -- groups --------------------------------------------------------------------------------

    def _save_group(self, group_id: str, result: Any) -> Any:
        members = ensure_bytes(self.encode(result.as_tuple()))
        transitions.keep_group(self._store, group_id, result=members)
        return result

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        found = results.group(self._store, group_id)
        if found is None:
            return None
        members, stored_at = found
        return {
            "task_id": group_id,
            "result": result_from_tuple(self.decode(members), self.app),
            "date_done": stored_at,
        }

    def _delete_group(self, group_id: str) -> None:
        transitions.drop_group(self._store, group_id)

    # -- chords --------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Note how the results of a chord are nested, before its header is published."""
        del body
        self.ensure_chords_allowed()
        group_id, members = header_result_args[:2]
        # A header that is made while it is published is flat.
        if isinstance(members, list | tuple) and any(isinstance(m, GroupResult) for m in members):
            header = self.app.GroupResult(group_id, members).as_tuple()
            transitions.size_chord(self._store, group_id, header=ensure_bytes(self.encode(header)))

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Note how many parts a chord has; Celery says it before it publishes the last one."""
        transitions.size_chord(self._store, group_id, size=chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Have a chord wait for one more task."""
        transitions.expect_part(self._store, chord_id, result.id)

    def _fail_chain(self, chain: Any, exc: Any, traceback: Any = None, **options: Any) -> None:
        """Fail the rest of a chain; a chord that it is a part of hears of it even at a replay.

        Celery (5.7) leaves a step that is stored as failed already alone, whether or not its part
        was counted: its process may have died between the two.
        """
        super()._fail_chain(chain, exc, traceback, **options)
        state = options.get("state", states.FAILURE)
        for step in chain or ():
            request = Context(step)
            request.update(request.options or {})
            request.id = (request.options or {}).get("task_id")
            request.group = (request.options or {}).get("group_id")
            if request.chord:
                self.on_chord_part_return(request, state, exc)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a part of a chord, once, and publish what follows if it was the last.

        Raises:
            StoreUnavailable: nothing was published; a leased part is replayed.
            ChordClaimed: another process has the claim, and this one, which is no delivery of the
                part, does not wait until it runs out; a leased part is told again.
        """
        chord_id, task_id = request.group, request.id
        if not chord_id or not task_id or not request.chord:
            return
        chord = results.chord(self._store, chord_id)
        if chord is not None and chord.is_fired:
            return
        job = self._job(task_id, request)
        if job is not None:
            if job.outcome is None:
                # A stale word: the job runs, or will run, and its end is what counts.
                return
            if job.state_reason not in _SAYS_NOTHING:
                state, result = self._final(job.task, job.outcome)
        transitions.count_part(
            self._store,
            chord_id,
            task_id,
            status=state,
            result=self._encode_part(result, state),
            position=request.group_index,
        )
        self._complete_chord(request, chord_id, is_replayed=job is not None)

    def _complete_chord(self, request: Any, chord_id: str, *, is_replayed: bool) -> None:
        """Publish what follows a chord if all its parts are there and nobody else does.

        A leased part that finds another's claim waits for what comes of it: once this word of it
        has been taken it is settled, and there is no other. A delivery waits until the claim runs
        out; a pass of the reaper, or who revokes, does not, and tells it again later.
        """
        nonce = uuid.uuid4().hex
        until = None if is_under_lease(request) else time.monotonic() + CHORD_WAIT_SECONDS
        while True:
            chord = results.chord(self._store, chord_id)
            if chord is None or not chord.is_complete:
                return
            if transitions.claim_chord(
                self._store, chord_id, nonce, claim_seconds=CHORD_CLAIM_SECONDS
            ):
                break
            if not is_replayed:
                return
            if until is not None and time.monotonic() >= until:
                raise ChordClaimed(chord_id, request.id)
            time.sleep(CHORD_POLL_SECONDS)
        try:
            self._fire(request, chord_id, chord)
        except BaseException:
            with suppress(StoreError):
                transitions.yield_chord(self._store, chord_id, nonce)
            raise
        transitions.close_chord(self._store, chord_id)

    def _fire(self, request: Any, chord_id: str, chord: results.Chord) -> None:
        body = maybe_signature(request.chord, app=self.app)
        try:
            values = self._values(chord_id, chord)
        except ChordError as error:
            self._fail_chord(chord_id, body, error)
            return
        try:
            # Celery 5.7 repeats a publish that a broken connection refused.
            again = getattr(self.app.amqp, "_retry_publish", None)
            if again is None:
                body.delay(values)
            else:
                again(body.delay, values)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it was, the chord must end
            if body.id and results.standing(self._store, body.id) is not None:
                # It is recorded, and the reaper sends it.
                return
            failure = ChordError(f"Callback error: {error!r}")
            failure.__cause__ = error
            self._fail_chord(chord_id, body, failure)

    def _fail_chord(self, chord_id: str, body: Any, failure: ChordError) -> None:
        logger.warning("lease.chord.failed chord_id=%s reason=%r", chord_id, str(failure))
        try:
            raise failure
        except ChordError as error:
            # It stores the error with the traceback that is being handled.
            self.chord_error_from_stack(body, error)

    def _values(self, chord_id: str, chord: results.Chord) -> list[Any]:
        """Return the results of a chord's parts as its body gets them.

        Raises:
            ChordError: one of them failed. No other is decoded then, and that one is JSON.
        """
        parts = results.parts(self._store, chord_id)
        for part in parts:
            if part.status in states.PROPAGATE_STATES:
                cause = self.exception_to_python(_plain(part.result))
                failure = ChordError(f"Dependency {part.task_id} raised {cause!r}")
                failure.__cause__ = cause
                raise failure
        try:
            values = {part.task_id: self.decode(part.result) for part in parts}
            if chord.header is None:
                return list(values.values())
            header = result_from_tuple(self.decode(chord.header), self.app)
            return [self._value(member, values) for member in header.results]
        except Exception as error:
            raise ChordError(f"Join error: {error!r}") from error

    def _value(self, member: ResultBase, values: dict[str, Any]) -> Any:
        if isinstance(member, GroupResult):
            return [self._value(inner, values) for inner in member.results]
        return values[member.id] if member.id in values else self.get_result(member.id)

    def _encode_part(self, result: Any, state: str) -> bytes:
        if state in states.PROPAGATE_STATES:
            # JSON, whatever the serializer: the reaper reads it, and unpickles nothing.
            plain = self.prepare_exception(result, serializer="json")
            return bytes(ensure_bytes(serialization.dumps(plain, "json")[2]))
        return bytes(ensure_bytes(self.encode(self.encode_result(result, state))))


def _pending(task_id: str) -> dict[str, Any]:
    return {"task_id": task_id, "status": states.PENDING, "result": None}


def _plain(encoded: bytes) -> Any:
    return serialization.loads(encoded, _JSON, "utf-8", accept=[_JSON])


def _pauses(timeout: float | None, interval: float | None) -> Iterator[float]:
    """Give the pauses between two looks, growing up to ``interval``; ends with the timeout."""
    longest = 0.5 if interval is None else interval
    until = None if timeout is None else time.monotonic() + timeout
    pause = min(FIRST_PAUSE_SECONDS, longest)
    while True:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return
        yield pause if left is None else min(pause, left)
        pause = min(pause * PAUSE_GROWTH, longest)


def _pause(pauses: Iterator[float], problem: str) -> None:
    pause = next(pauses, None)
    if pause is None:
        raise CeleryTimeout(problem)
    time.sleep(pause)
