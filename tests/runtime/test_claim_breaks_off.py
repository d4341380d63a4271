"""Whatever is raised between a claim and the end of its attempt, nobody renews its lease then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_lease.exceptions import StoreUnavailable
from celery_lease.records import Claimed, Held
from celery_lease.runtime import Runtime
from celery_lease.settings import for_task, load
from celery_lease.store import transitions


@pytest.fixture
def settings() -> Any:
    return load(lambda _, default: default)


@pytest.fixture
def make_runtime(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    won = Claimed(Held("job", 1, "owner"), message_version=1, lost_count=0)
    monkeypatch.setattr(transitions, "claim", lambda *_, **__: won)
    monkeypatch.setattr(transitions, "lost", lambda *_, **__: None)

    def make(**options: Any) -> Runtime:
        # Never asked: what would ask it is replaced above.
        store: Any = object()
        return Runtime(store=store, settings=settings, worker="celery@test", **options)

    return make


class Deaf:
    """A way to the main process that fails."""

    is_apart = False

    def tell(self, claim: Any) -> bool:
        raise RuntimeError("Set changed size during iteration")

    def answers(self, *, wait_seconds: float = 0.0) -> Any:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


def claim(runtime: Runtime, settings: Any) -> Any:
    return runtime.claim(
        job_id="job", message_version=1, task_settings=for_task(settings, {}, task="app.work")
    )


def test_a_main_process_that_cannot_be_told_costs_no_claim(
    make_runtime: Callable[..., Runtime], settings: Any
) -> None:
    runtime = make_runtime(teller=Deaf())

    _, lease = claim(runtime, settings)

    assert lease is not None
    assert not runtime.heartbeat.is_empty
    runtime.heartbeat.remove(lease)


def test_a_claim_that_breaks_off_leaves_no_lease_in_the_heartbeat(
    make_runtime: Callable[..., Runtime], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailable("sqlite://", "away")

    runtime = make_runtime()
    monkeypatch.setattr(runtime, "_watch_for_stop", away)

    with pytest.raises(StoreUnavailable):
        claim(runtime, settings)

    assert runtime.heartbeat.is_empty
