"""Whether the body of a chord was sent: by the keys that Celery's Redis backend keeps."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_lease import bookkeeping

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "the group"


@pytest.fixture
def backend(redis_url: str) -> Iterator[Any]:
    """A Redis backend with a chord whose body is about to be sent by somebody."""
    app = Celery("chords", broker=redis_url, backend=redis_url, set_as_current=False)
    found = app.backend
    if not hasattr(found, "_chord_claim_extend_script"):
        pytest.skip("Celery 5.5 makes no claims on a chord's body")
    found.client.set(found.get_key_for_group(GROUP, ".s"), 2)
    found.client.set(found.get_key_for_group(GROUP, ".c"), "the claim of another part")
    yield found
    found.client.close()
    found.client.connection_pool.disconnect()
    app.close()


def test_a_part_waits_for_the_one_that_sends_the_body(backend: Any) -> None:
    key = backend.get_key_for_group(GROUP, ".c")
    sends = threading.Timer(0.2, lambda: backend.client.set(key, "done"))
    began = time.monotonic()
    sends.start()

    assert bookkeeping.wait_for_chord(backend, GROUP)

    assert 0.2 <= time.monotonic() - began < bookkeeping.CLAIM_SECONDS
    sends.join()


def test_it_does_not_wait_for_ever_and_the_body_counts_as_unsent(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeping, "CLAIM_SECONDS", 0.1)

    assert not bookkeeping.wait_for_chord(backend, GROUP)


def test_a_claim_that_runs_out_meanwhile_was_of_a_dead_one_and_the_body_is_unsent(
    backend: Any,
) -> None:
    """Settled by this part, nobody would send it."""
    key = backend.get_key_for_group(GROUP, ".c")
    backend.client.pexpire(key, 200)

    assert not bookkeeping.wait_for_chord(backend, GROUP)


def test_nobody_waits_for_a_chord_that_has_failed_or_is_none(backend: Any) -> None:
    backend.client.delete(backend.get_key_for_group(GROUP, ".s"))
    began = time.monotonic()

    assert bookkeeping.wait_for_chord(backend, GROUP)
    assert bookkeeping.wait_for_chord(backend, None)
    assert bookkeeping.wait_for_chord(object(), GROUP)

    assert time.monotonic() - began < bookkeeping.CLAIM_SECONDS
