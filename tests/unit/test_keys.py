"""Which idempotency key a call has."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

from celery_lease import keys
from celery_lease.messages import canonical


def run(order_id: int, note: str = "", *, priority: int = 0) -> None:
    del order_id, note, priority


class Order:
    id = 7


# --- a key as it is given -----------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "order-7", "ключ", "a b", "\t-", "k" * 255])
def test_a_key_is_kept_as_it_is(key: str) -> None:
    assert keys.checked_key(key) == key


@pytest.mark.parametrize("key", ["k" * 256, "k ", "k\t", "a\x00b", "\ud800", " "])
def test_a_key_that_not_every_database_keeps_as_it_is_is_kept_by_its_digest(key: str) -> None:
    kept = keys.checked_key(key)

    assert kept.startswith("sha256:")
    assert len(kept) == 71
    assert keys.checked_key(key) == kept != keys.checked_key(f"{key}x")


@pytest.mark.parametrize("key", [7, b"key", True, ["key"], None])
def test_what_is_no_text_is_no_key(key: Any) -> None:
    with pytest.raises(TypeError, match="an idempotency key is a str, not"):
        keys.checked_key(key)


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ValueError, match="is not empty"):
        keys.checked_key("")


# --- the arguments of a call --------------------------------------------------------------------


def test_by_position_or_by_name_it_is_the_same_call() -> None:
    by_name = keys.bound_arguments(run, (), {"note": "n", "order_id": 1})

    assert keys.bound_arguments(run, (1, "n"), {}) == by_name == {"order_id": 1, "note": "n"}


def test_an_argument_left_to_its_default_is_not_among_them() -> None:
    assert keys.bound_arguments(run, (1,), {}) == {"order_id": 1}


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3, 4), {}), ((1,), {"no": 1})])
def test_arguments_that_do_not_fit_are_kept_as_they_are(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = keys.bound_arguments(run, args, kwargs)

    assert found == {"args": list(args), "kwargs": kwargs}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_equal_arguments_are_the_same_bytes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one, "json") == canonical(other, "json")


@pytest.mark.parametrize("other", [{"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1, "b": None}, {}])
def test_other_arguments_are_other_bytes(other: dict[str, Any]) -> None:
    assert canonical({"a": 1}, "json") != canonical(other, "json")


def test_what_json_cannot_say_is_serialised_as_the_task_does() -> None:
    assert canonical({"a": object}, "pickle") != canonical({"a": type}, "pickle")


# --- a key that is derived ----------------------------------------------------------------------


def test_a_rule_that_is_true_takes_the_digest_and_false_takes_none() -> None:
    digest = keys.digest_of(b"[1]")

    assert keys.derived_key({"order_id": 1}, digest, rule=True) == digest
    assert keys.derived_key({"order_id": 1}, digest, rule=False) is None
    assert digest != keys.digest_of(b"[2]")


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("order-{order_id}", "order-7"),
        ("{order_id:03}", "007"),
        ("{order.id}-{names[0]}", "7-n"),
        ("only", "only"),
        ("{{}}", "{}"),
    ],
)
def test_a_template_is_filled_from_the_arguments_by_name(template: str, key: str) -> None:
    arguments = {"order_id": 7, "order": Order(), "names": ["n"], "template": "t", "rule": "r"}

    assert keys.template_problem(template) is None
    assert keys.derived_key(arguments, "sha256:", rule=template) == key


@pytest.mark.parametrize("template", ["{note}", "{order_id.no}", "{order_id[0]}", "{order_id:x!}"])
def test_a_template_that_cannot_be_filled_says_so(template: str) -> None:
    with pytest.raises(keys.Underivable, match="no key can be made of"):
        keys.derived_key({"order_id": 7}, "sha256:", rule=template)


def report(report_id: int, region: str = "eu", *, size: str = "a4", **more: Any) -> None:
    del report_id, region, size, more


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        ((1,), {}, "1-eu-a4"),
        ((1, "us"), {"size": "a5"}, "1-us-a5"),
        ((), {"report_id": 1, "region": "eu"}, "1-eu-a4"),
    ],
)
def test_a_template_finds_the_default_of_an_argument_that_a_call_leaves_out(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: str
) -> None:
    arguments = keys.bound_arguments(report, args, kwargs)

    assert keys.derived_key(arguments, "", rule="{report_id}-{region}-{size}") == key
    assert "size" not in keys.bound_arguments(report, (1,), {})


def test_a_template_finds_what_a_call_gives_beside_the_named_arguments() -> None:
    arguments = keys.bound_arguments(report, (1,), {"page": 3})

    assert keys.derived_key(arguments, "", rule="{report_id}-{page}") == "1-3"


@pytest.mark.parametrize(("args", "rule"), [((1,), "{page}"), ((), "{report_id}")])
def test_an_argument_that_a_call_does_not_have_is_named_with_the_remedy(
    args: tuple[Any, ...], rule: str
) -> None:
    arguments = keys.bound_arguments(report, args, {})

    with pytest.raises(keys.Underivable, match=f"no argument '{rule[1:-1]}'.*give it"):
        keys.derived_key(arguments, "", rule=rule)


@pytest.mark.parametrize("template", ["{", "}", "{}", "{0}", "{1.a}", ""])
def test_a_template_names_its_fields(template: str) -> None:
    assert keys.template_problem(template)


def test_a_template_names_arguments_that_there_are() -> None:
    def any_name(**values: int) -> None:
        del values

    assert keys.unknown_fields("{order_id}-{note[0]}-{priority.real}", run) == []
    assert keys.unknown_fields("{order}-{order_id}", run) == ["order"]
    assert keys.unknown_fields("{order}", any_name) == []


def test_sets_have_the_same_digest_in_every_process() -> None:
    code = (
        "from celery_lease.messages import canonical\n"
        "tags = {'red', 'green', 'blue', 'black'}\n"
        "said = [tags, {frozenset(tags): 1, 2: {'of': tags}}, (tags, None)]\n"
        "print(canonical({'said': said}, 'pickle'))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "1234"
    }

    assert len(told) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1, 2}, {1, 3}),
        ({1}, [1]),
        ({"1"}, {1}),
        ({(1, 2): {3}}, {(1, 3): {3}}),
        ({1: {2}}, {2: {1}}),
    ],
)
def test_sets_that_differ_have_different_digests(one: Any, other: Any) -> None:
    assert canonical({"a": one}, "pickle") != canonical({"a": other}, "pickle")
    assert canonical({"a": one}, "pickle") == canonical({"a": copy.deepcopy(one)}, "pickle")
