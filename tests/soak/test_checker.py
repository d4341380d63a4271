"""A checker that cannot fail is worth nothing: one planted violation of every kind is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from tests.soak.checker import RULES, violations
from tests.soak.evidence import AttemptRow, Evidence, JobRow, WitnessRow
from tests.soak.load import Follows

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def job(job_id: str, state: str, tokens: int, **changed: Any) -> JobRow:
    values: dict[str, Any] = {
        "id": job_id,
        "task": "soak.short",
        "state": state,
        "fencing_token": tokens,
        "lost_count": 0,
        "max_attempts": 3,
        "accepted_attempt": tokens if state == "succeeded" else None,
        "settled_at": NOW,
    }
    return JobRow(**{**values, **changed})


def attempts(job_id: str, *states: str, **changed: Any) -> list[AttemptRow]:
    return [
        AttemptRow(
            **{
                "job_id": job_id,
                "fencing_token": token,
                "state": state,
                "stop_reason": None,
                "stop_requested_at": None,
                "ended_at": NOW,
                "rejected_at": None,
                **changed,
            }
        )
        for token, state in enumerate(states, 1)
    ]


def lines(job_id: str, *told: tuple[str, int] | tuple[str, int, str]) -> list[WitnessRow]:
    return [
        WitnessRow(
            seq=seq,
            kind=one[0],
            job_id=job_id,
            token=one[1],
            step=one[2] if len(one) == 3 else "",
            detail=None,
        )
        for seq, one in enumerate(told, 1)
    ]


def clean() -> Evidence:
    """A job taken over and succeeded, a poisoned one, an expired one, and a chain of two."""
    return Evidence(
        promised=["taken", "poison", "expired", "first"],
        follows=[Follows("second", ("first",)), Follows("never", ("poison",))],
        jobs={
            "taken": job("taken", "succeeded", 2, lost_count=1),
            "poison": job("poison", "interrupted", 3, lost_count=3),
            "expired": job("expired", "cancelled", 0),
            "first": job("first", "succeeded", 1),
            "second": job("second", "succeeded", 1),
        },
        attempts={
            "taken": attempts("taken", "expired", "completed"),
            "poison": attempts("poison", "lost", "expired", "stalled"),
            "first": attempts("first", "completed"),
            "second": attempts("second", "completed"),
        },
        witness={
            "taken": lines(
                "taken",
                ("claimed", 1),
                ("effect", 1, "begin"),
                ("claimed", 2),
                ("effect", 2, "begin"),
                ("effect", 2, "final"),
                ("finished", 2),
            ),
            "poison": lines(
                "poison", ("claimed", 1), ("claimed", 2), ("claimed", 3), ("finished", 3)
            ),
            "expired": lines("expired", ("finished", 0)),
            "first": lines("first", ("claimed", 1), ("effect", 1, "final"), ("finished", 1)),
            "second": lines("second", ("claimed", 1), ("effect", 1, "final"), ("finished", 1)),
        },
        results={
            "taken": ("SUCCESS", 2),
            "poison": ("FAILURE", "3 runners vanished"),
            "expired": ("REVOKED", None),
            "first": ("SUCCESS", 1),
            "second": ("SUCCESS", 1),
        },
    )


def with_job(job_id: str, **changed: Any) -> Evidence:
    seen = clean()
    changed_job = dataclasses.replace(seen.jobs[job_id], **changed)
    return dataclasses.replace(seen, jobs={**seen.jobs, job_id: changed_job})


def with_attempts(job_id: str, *states: str, **changed: Any) -> Evidence:
    seen = clean()
    rows = attempts(job_id, *states, **changed)
    return dataclasses.replace(seen, attempts={**seen.attempts, job_id: rows})


def with_lines(job_id: str, *told: tuple[str, int] | tuple[str, int, str]) -> Evidence:
    seen = clean()
    return dataclasses.replace(seen, witness={**seen.witness, job_id: lines(job_id, *told)})


def with_result(job_id: str, result: tuple[str, object] | None) -> Evidence:
    seen = clean()
    return dataclasses.replace(seen, results={**seen.results, job_id: result})


def without_job(job_id: str) -> Evidence:
    seen = clean()
    kept = {key: row for key, row in seen.jobs.items() if key != job_id}
    told = {key: row for key, row in seen.results.items() if key != job_id}
    return dataclasses.replace(seen, jobs=kept, results=told)


def test_clean_evidence_has_no_violation() -> None:
    assert violations(clean()) == []


def asked_to_stop(*states: str, count: int) -> Evidence:
    seen = with_attempts("taken", *states, "completed", stop_requested_at=NOW)
    tokens = len(states) + 1
    told = [("claimed", token) for token in range(1, tokens + 1)]
    changed = job("taken", "succeeded", tokens, lost_count=count)
    return dataclasses.replace(
        seen,
        jobs={**seen.jobs, "taken": changed},
        witness={
            **seen.witness,
            "taken": lines("taken", *told, ("effect", tokens, "final"), ("finished", tokens)),
        },
        results={**seen.results, "taken": ("SUCCESS", tokens)},
    )


@pytest.mark.parametrize(
    ("states", "count"),
    [
        (["lost"] * 10, 0),
        (["lost"] * 10 + ["expired"], 1),
        (["released"] * 9 + ["lost"], 0),
        (["released"] * 10 + ["lost"], 1),
        (["stalled"], 1),
    ],
)
def test_losses_after_a_request_to_stop_are_spared_ten_times(states: list[str], count: int) -> None:
    assert violations(asked_to_stop(*states, count=count)) == []
    assert {one.rule for one in violations(asked_to_stop(*states, count=count + 1))} == {
        "lost_count"
    }


PLANTED: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("lost", "a promised job is not there", lambda: without_job("expired")),
    ("lost", "a job is not final", lambda: with_job("expired", state="queued", settled_at=None)),
    ("unsettled", "Celery was never told", lambda: with_job("taken", settled_at=None)),
    (
        "accepted",
        "two attempts were accepted",
        lambda: with_attempts("taken", "completed", "completed"),
    ),
    ("accepted", "another was accepted", lambda: with_job("taken", accepted_attempt=1)),
    (
        "accepted",
        "a failed job has an accepted attempt",
        lambda: with_attempts("poison", "lost", "expired", "completed"),
    ),
    ("tokens", "an attempt is missing", lambda: with_attempts("taken", "completed")),
    ("tokens", "a token was skipped", lambda: with_job("taken", fencing_token=3)),
    (
        "tokens",
        "a token was claimed twice",
        lambda: with_lines(
            "first", ("claimed", 1), ("claimed", 1), ("effect", 1, "final"), ("finished", 1)
        ),
    ),
    (
        "tokens",
        "claimed in the wrong order",
        lambda: with_lines(
            "poison", ("claimed", 2), ("claimed", 1), ("claimed", 3), ("finished", 3)
        ),
    ),
    ("live", "an attempt lives on", lambda: with_attempts("first", "completed", ended_at=None)),
    (
        "rewritten",
        "an ended attempt was changed",
        lambda: with_lines(
            "first", ("claimed", 1), ("effect", 1, "final"), ("finished", 1), ("rewritten", 1)
        ),
    ),
    (
        "rewritten",
        "a final job was changed",
        lambda: with_lines(
            "first", ("claimed", 1), ("effect", 1, "final"), ("finished", 1), ("reopened", 1)
        ),
    ),
    (
        "rewritten",
        "a token jumped",
        lambda: with_lines(
            "first", ("claimed", 1), ("jumped", 1), ("effect", 1, "final"), ("finished", 1)
        ),
    ),
    (
        "stale",
        "an effect after a larger token's claim",
        lambda: with_lines(
            "taken",
            ("claimed", 1),
            ("claimed", 2),
            ("effect", 1, "page"),
            ("effect", 2, "final"),
            ("finished", 2),
        ),
    ),
    (
        "stale",
        "an effect after the end",
        lambda: with_lines(
            "first", ("claimed", 1), ("effect", 1, "final"), ("finished", 1), ("effect", 1, "more")
        ),
    ),
    (
        "stale",
        "an effect before its claim",
        lambda: with_lines("first", ("effect", 1, "final"), ("claimed", 1), ("finished", 1)),
    ),
    (
        "effects",
        "no accepted final effect",
        lambda: with_lines("first", ("claimed", 1), ("finished", 1)),
    ),
    (
        "effects",
        "a final effect twice",
        lambda: with_lines(
            "first", ("claimed", 1), ("effect", 1, "final"), ("effect", 1, "final"), ("finished", 1)
        ),
    ),
    ("lost_count", "a loss was not counted", lambda: with_job("taken", lost_count=0)),
    ("lost_count", "a loss too many", lambda: with_job("first", lost_count=1)),
    ("lost_count", "interrupted too soon", lambda: with_job("poison", max_attempts=4)),
    (
        "lost_count",
        "not interrupted at the limit",
        lambda: with_job("taken", max_attempts=1),
    ),
    ("canvas", "the next one was never sent", lambda: without_job("second")),
    (
        "canvas",
        "the next one was sent after a failure",
        lambda: with_job("first", state="failed", accepted_attempt=None),
    ),
    ("results", "FAILURE of a succeeded job", lambda: with_result("taken", ("FAILURE", "lost"))),
    ("results", "a stale attempt's value", lambda: with_result("taken", ("SUCCESS", 1))),
    ("results", "SUCCESS of an interrupted job", lambda: with_result("poison", ("SUCCESS", 1))),
    ("results", "nothing", lambda: with_result("first", None)),
]


@pytest.mark.parametrize(("rule", "what", "plant"), PLANTED, ids=[what for _, what, _ in PLANTED])
def test_a_planted_violation_is_found(rule: str, what: str, plant: Callable[[], Evidence]) -> None:
    found = violations(plant())

    assert rule in {one.rule for one in found}, (what, found)


def test_each_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == {rule.__name__.removeprefix("_") for rule in RULES}
