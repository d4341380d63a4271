"""Celery's bookkeeping after a body: what must not be torn, and when a job may be settled.

Between the accepted outcome and ``task_postrun`` Celery sends callbacks, stores the result and
counts a part of a chord. What breaks off in it is done again by a replay, with one exception: the
body of a chord. Celery's Redis backend (5.7, ``celery/backends/redis.py``) marks a chord as done
when anything is raised where it sends the body, a ``SystemExit`` from a stop signal and a soft time
limit included; no later part sends it again. So these signals wait here until the books are closed.

A process that is killed at that point leaves a claim on the chord that runs out after a while.
Until then a replay sends nothing, so the job is not settled yet, and is replayed again.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from celery import signals

from celery_lease.held_signals import hold, let_go

#: What would be raised in the middle: stop signals of a child (billiard 4.2 to 4.3, ``common.py``)
#: and the soft time limit.
_HELD = (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)
#: What Celery leaves in a chord's claim when its body was sent.
_DONE = b"done"

#: How long a part of a chord waits for another part that sends the body: it has to join the
#: results and to publish one message.
CLAIM_SECONDS = 1.0
CLAIM_POLL_SECONDS = 0.02

_is_open = False


def begin() -> None:
    """Hold stop signals and the soft time limit back, until Celery's ``task_postrun``.

    For a child: in a worker's main process a stop signal raises nothing.
    """
    global _is_open  # noqa: PLW0603  a process has one main thread, and one task in it
    # Begun again without an end, it is still one hold: there will be one end.
    _is_open = _is_open or hold(_HELD)


def _end(**_: Any) -> None:
    global _is_open  # noqa: PLW0603  see above
    if _is_open:
        _is_open = False
        # The body is over: a limit that has come meanwhile limits nothing.
        let_go(_HELD, dropped={signal.SIGUSR1})


def wait_for_chord(backend: Any, group_id: str | None) -> bool:
    """Wait a moment for whoever has claimed to send the body of a chord; False: it is unsent.

    Of parts that end together one has the claim, and which one is not told: another one that did
    not wait would be left unsettled, and be replayed for nothing.
    """
    if not is_chord_unsent(backend, group_id):
        return True
    until = time.monotonic() + CLAIM_SECONDS
    while time.monotonic() < until:
        time.sleep(CLAIM_POLL_SECONDS)
        if not is_chord_unsent(backend, group_id):
            # A claim that ran out while this was waited for was of one that is dead.
            return not _is_unclaimed(backend, group_id)
    return False


def _is_unclaimed(backend: Any, group_id: str | None) -> bool:
    """Tell whether a chord still counts and nobody has claimed to send its body."""
    try:
        claim = backend.client.get(backend.get_key_for_group(str(group_id), ".c"))
        size = backend.client.exists(backend.get_key_for_group(str(group_id), ".s"))
    except Exception:  # noqa: BLE001  in doubt it is told once more
        return True
    return claim is None and bool(size)


def is_chord_unsent(backend: Any, group_id: str | None) -> bool:
    """Tell whether somebody has claimed to send the body of a chord, and has not.

    Args:
        backend: the task's result backend; others than Celery's Redis backend make no claims.
        group_id: the chord's group, None for a job that is no part of one.
    """
    if not group_id or not hasattr(backend, "_chord_claim_extend_script"):
        return False
    try:
        claim = backend.client.get(backend.get_key_for_group(str(group_id), ".c"))
        if claim is None or claim == _DONE:
            return False
        # A chord that has failed keeps its claim, and no longer its size.
        return bool(backend.client.exists(backend.get_key_for_group(str(group_id), ".s")))
    except Exception:  # noqa: BLE001  in doubt it is told once more
        return True


signals.task_postrun.connect(_end, weak=False)
