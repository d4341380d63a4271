"""The load: jobs of mixed kinds, sent by a thread of the soak's own process, from a seed.

What was promised to the caller, ``apply_async`` having returned, is what must not get lost.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, chain, chord
from kombu.exceptions import OperationalError

from celery_lease.exceptions import StoreUnavailable


@dataclass(frozen=True)
class Follows:
    """A job that Celery sends when others have succeeded, and not otherwise."""

    job_id: str
    after: tuple[str, ...]


@dataclass
class Promises:
    """What callers were told."""

    job_ids: list[str] = field(default_factory=list)
    follows: list[Follows] = field(default_factory=list)
    refused: int = 0


class Load:
    """Sends jobs until it is stopped.

    Args:
        app: with broker and store as a producer reaches them.
        seed: of what is sent.
        rate: jobs a second.
        is_full: tells whether so many jobs wait that no more should be sent.
    """

    def __init__(self, app: Celery, *, seed: int, rate: float, is_full: Callable[[], bool]) -> None:
        self._app = app
        self._random = random.Random(f"load {seed}")
        self._rate = rate
        self._is_full = is_full
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-load", daemon=True)
        self.promises = Promises()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more; the last call may still be held up by a frozen server."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the last call; what is wrong with the servers has been put right."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "a call of apply_async does not return"
        # Results of canvases are in cycles: collected once the backend is gone, they ask for it.
        gc.collect()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            # Nobody waits for results here: without it each id is subscribed to for ever.
            self._app.backend.on_task_call = lambda *_, **__: None
            while not self._stopping.wait(self._random.expovariate(self._rate)):
                if self._is_full():
                    self._stopping.wait(0.5)
                    continue
                self._send_one()
        except BaseException as error:
            self.error = error

    def _send_one(self) -> None:
        (send,) = self._random.choices(_KINDS, weights=_WEIGHTS)
        try:
            send(self._app, self._random, self.promises)
        except (StoreUnavailable, OperationalError):
            # The caller knows that it was not taken, and would try again.
            self.promises.refused += 1


def _call(app: Celery, name: str, **arguments: Any) -> Any:
    return app.signature(f"soak.{name}", kwargs=arguments, app=app)


def _send(signature: Any, promises: Promises, **options: Any) -> None:
    promises.job_ids.append(signature.apply_async(**options).id)


def _short(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "short"), promises)


def _slow(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "slow", pages=rng.randint(3, 20)), promises)


def _careless(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "careless", pages=rng.randint(3, 20)), promises)


def _retrying(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "retrying", times=rng.randint(1, 3)), promises)


def _flaky(app: Celery, rng: random.Random, promises: Promises) -> None:
    """Fail for a time that Celery retries, or for longer: then for good."""
    _send(_call(app, "flaky", times=rng.choice((1, 1, 2, 9))), promises)


def _delayed(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "short"), promises, countdown=rng.uniform(0.5, 6))


def _expiring(app: Celery, rng: random.Random, promises: Promises) -> None:
    _send(_call(app, "short"), promises, expires=rng.choice((0.2, 1, 5)))


def _poison(app: Celery, rng: random.Random, promises: Promises) -> None:
    how = rng.choice(("kill", "exit", "term"))
    _send(_call(app, "poison", how=how, at=rng.choice((None, 1, 1, 1))), promises)


def _chain(app: Celery, rng: random.Random, promises: Promises) -> None:
    result = chain(
        _call(app, "short"), _call(app, "slow", pages=rng.randint(1, 4)), _call(app, "short")
    ).apply_async()
    while result.parent is not None:
        promises.follows.append(Follows(result.id, (result.parent.id,)))
        result = result.parent
    promises.job_ids.append(result.id)


def _chord(app: Celery, rng: random.Random, promises: Promises) -> None:
    header = [
        _call(app, "short"),
        _call(app, "slow", pages=rng.randint(1, 6)),
        _call(app, "retrying", times=1),
    ]
    result = chord(header, _call(app, "short")).apply_async()
    parts = tuple(part.id for part in result.parent.results)
    promises.job_ids.extend(parts)
    promises.follows.append(Follows(result.id, parts))


_SHARES: dict[Callable[[Celery, random.Random, Promises], None], float] = {
    _short: 40,
    _slow: 10,
    _careless: 10,
    _retrying: 10,
    _flaky: 8,
    _delayed: 10,
    _expiring: 3,
    _poison: 3,
    _chain: 6,
    _chord: 6,
}
_KINDS = list(_SHARES)
_WEIGHTS = list(_SHARES.values())
