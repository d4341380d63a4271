"""What the table of settings holds, refuses and shows."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import pytest

from celery_lease.exceptions import SettingError
from celery_lease.settings import (
    SETTINGS,
    Ack,
    HeartbeatFrom,
    PublishOnError,
    Settings,
    TaskSettings,
    as_rows,
    for_task,
    load,
    unknown_options,
    unknown_settings,
)
from celery_lease.states import OnExpiry

SECRET = "hunter2"


def loaded(*, visibility_timeout: float | None = None, **conf: object) -> Settings:
    return load(conf.get, visibility_timeout=visibility_timeout)


def problems_of(*, visibility_timeout: float | None = None, **conf: object) -> tuple[str, ...]:
    with pytest.raises(SettingError) as caught:
        loaded(visibility_timeout=visibility_timeout, **conf)
    return caught.value.problems


def task_problems_of(settings: Settings, **attributes: object) -> tuple[str, ...]:
    with pytest.raises(SettingError) as caught:
        for_task(settings, attributes, task="proj.rebuild")
    return caught.value.problems


# --- the table ----------------------------------------------------------------------------------


def test_every_default_passes_its_own_check_and_all_of_them_together() -> None:
    settings = loaded()

    assert settings.duration == 30.0
    assert settings.max_attempts == 3
    assert settings.lost_backoff == (0.0, 1.0, 4.0, 16.0, 60.0)
    assert settings.publish_on_error is PublishOnError.STORE


def test_the_table_and_the_typed_object_have_the_same_fields() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]

    assert fields == [setting.field for setting in SETTINGS]


def test_each_row_of_the_table_is_complete_and_its_name_is_unique() -> None:
    names = [setting.name for setting in SETTINGS]

    assert len(set(names)) == len(names)
    for setting in SETTINGS:
        assert setting.name.startswith("lease_")
        assert setting.kind.unit in {"seconds", "bytes", "count", ""}
        assert setting.kind.type
        assert setting.summary.endswith(".")


def test_a_task_overrides_what_concerns_a_single_attempt_and_nothing_else() -> None:
    overridable = {s.task_attribute for s in SETTINGS if s.task_attribute is not None}

    assert overridable == {
        "lease_duration",
        "lease_heartbeat_interval",
        "lease_heartbeat_from",
        "lease_max_attempts",
        "lease_ack",
        "lease_on_expiry",
        "lease_interrupt",
        "lease_stall_timeout",
        "lease_defer_after",
        "lease_idempotency_key",
        "lease_idempotency_retention",
        "lease_idempotency_conflict",
    }


# --- one value ----------------------------------------------------------------------------------


def test_accepted_values_become_typed() -> None:
    settings = loaded(
        lease_duration=20, lease_on_expiry="hold", lease_lost_backoff=[0, 5], lease_keep_failed=None
    )

    assert isinstance(settings.duration, float)
    assert settings.on_expiry is OnExpiry.HOLD
    assert settings.lost_backoff == (0.0, 5.0)
    assert settings.keep_failed is None


def test_a_member_of_an_enum_is_as_good_as_its_string() -> None:
    settings = loaded(lease_on_expiry=OnExpiry.FAIL)

    assert settings.on_expiry is OnExpiry.FAIL


def test_engine_options_are_copied_so_that_later_changes_of_the_users_mapping_do_not_count() -> (
    None
):
    options = {"pool_size": 2}

    settings = loaded(lease_store_engine_options=options)
    options["pool_size"] = 99

    assert settings.store_engine_options == {"pool_size": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_store_url", "celery-lease.sqlite3"),
        ("lease_store_url", None),
        ("lease_store_url", b"sqlite://"),
        ("lease_store_url", "postgres://host/name"),
        ("lease_store_schema", " "),
        ("lease_run_dir", "run/lease"),
        ("lease_run_dir", ""),
        ("lease_store_table_prefix", ""),
        ("lease_store_table_prefix", "Lease_"),
        ("lease_store_table_prefix", "1_"),
        ("lease_store_table_prefix", "a\n"),
        ("lease_store_table_prefix", "a" * 32),
        ("lease_store_table_prefix", 'x"; drop table job'),
        ("lease_store_auto_migrate", "False"),
        ("lease_store_auto_migrate", 0),
        ("lease_store_engine_options", [("echo", True)]),
        ("lease_store_engine_options", {1: True}),
        ("lease_duration", 0),
        ("lease_duration", -1),
        ("lease_duration", 86401),
        ("lease_duration", float("nan")),
        ("lease_duration", float("inf")),
        ("lease_duration", "30"),
        ("lease_duration", True),
        ("lease_duration", None),
        ("lease_heartbeat_interval", 0),
        ("lease_max_attempts", 0),
        ("lease_max_attempts", 3.0),
        ("lease_max_attempts", True),
        ("lease_max_attempts", 10**400),
        ("lease_ack", "early"),
        ("lease_heartbeat_from", "parent"),
        ("lease_on_expiry", "explode"),
        ("lease_on_expiry", ["retry"]),
        ("lease_lost_backoff", ()),
        ("lease_lost_backoff", (1, 4)),
        ("lease_lost_backoff", (0, -1)),
        ("lease_lost_backoff", (0, "1")),
        ("lease_lost_backoff", 5),
        ("lease_lost_backoff", "01"),
        ("lease_interrupt", 1),
        ("lease_reaper_interval", 0),
        ("lease_reaper_interval", 10**400),
        ("lease_reaper_batch", 0),
        ("lease_reaper_limit", 0),
        ("lease_reaper_queue", ""),
        ("lease_reaper_in_worker", None),
        ("lease_queued_timeout", 0),
        ("lease_publish_on_error", "ignore"),
        ("lease_settle_grace", 0),
        ("lease_claim_timeout", 0),
        ("lease_max_message_bytes", 0),
        ("lease_max_result_bytes", 1.5),
        ("lease_idempotency_key", None),
        ("lease_idempotency_key", 1),
        ("lease_idempotency_key", ""),
        ("lease_idempotency_key", "{"),
        ("lease_idempotency_key", "{}"),
        ("lease_idempotency_key", "{0}"),
        ("lease_idempotency_retention", -1),
        ("lease_idempotency_retention", True),
        ("lease_idempotency_retention", "60"),
        ("lease_idempotency_retention", float("nan")),
        ("lease_idempotency_conflict", "ignore"),
        ("lease_keep_succeeded", 3600),
        ("lease_keep_failed", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name_and_a_remedy(
    name: str, value: Any
) -> None:
    problems = problems_of(**{name: value})

    assert len(problems) == 1
    assert problems[0].startswith(f"{name} is ")
    assert ": it must be " in problems[0]


def test_all_problems_are_told_at_once() -> None:
    problems = problems_of(lease_duration=-1, lease_max_attempts=0, lease_ack="early")

    assert [problem.split()[0] for problem in problems] == [
        "lease_duration",
        "lease_max_attempts",
        "lease_ack",
    ]


def test_a_long_value_is_cut_in_the_message() -> None:
    (problem,) = problems_of(lease_on_expiry="x" * 10_000)

    assert len(problem) < 200


# --- values together ----------------------------------------------------------------------------


def test_the_heartbeat_is_a_third_of_the_lease_unless_it_is_set() -> None:
    assert loaded(lease_duration=60).heartbeat_interval == 20.0
    assert loaded(lease_duration=60, lease_heartbeat_interval=5).heartbeat_interval == 5.0


@pytest.mark.parametrize("interval", [10, 15])
def test_renewals_that_come_twice_a_lease_or_less_are_refused_naming_both(interval: float) -> None:
    """B061."""
    (problem,) = problems_of(lease_duration=20, lease_heartbeat_interval=interval)

    assert f"lease_heartbeat_interval is {interval}" in problem
    assert "lease_duration is 20.0" in problem


def test_a_batch_larger_than_a_step_is_refused_naming_both() -> None:
    (problem,) = problems_of(lease_reaper_batch=500, lease_reaper_limit=499)

    assert "lease_reaper_batch is 500" in problem
    assert "lease_reaper_limit is 499" in problem


def test_a_key_held_for_longer_than_its_job_is_kept_is_refused_naming_both() -> None:
    (problem,) = problems_of(lease_idempotency_retention=86401, lease_keep_succeeded=86400)

    assert "lease_idempotency_retention is 86401.0" in problem
    assert "lease_keep_succeeded is 86400.0" in problem


@pytest.mark.parametrize(("held", "kept"), [(0, 86400), (86400, 86400), (None, 86400), (1e7, None)])
def test_a_key_is_held_as_long_as_its_job_at_most(held: float | None, kept: float | None) -> None:
    settings = loaded(lease_idempotency_retention=held, lease_keep_succeeded=kept)

    assert settings.idempotency_retention == held


def test_a_task_s_key_is_not_held_for_longer_than_its_job_is_kept_either() -> None:
    (problem,) = task_problems_of(loaded(), lease_idempotency_retention=8 * 86400)

    assert problem.startswith("task proj.rebuild: lease_idempotency_retention is 691200.0")


def test_sending_again_before_two_passes_is_refused_naming_both() -> None:
    (problem,) = problems_of(lease_queued_timeout=9, lease_reaper_interval=5)

    assert "lease_queued_timeout is 9.0" in problem
    assert "lease_reaper_interval is 5.0" in problem


def test_sending_again_after_two_passes_is_accepted() -> None:
    settings = loaded(lease_queued_timeout=10, lease_reaper_interval=5)

    assert settings.queued_timeout == 10.0


def test_a_schema_is_refused_on_a_database_that_has_none() -> None:
    (problem,) = problems_of(
        lease_store_schema="jobs", lease_store_url=f"mysql+pymysql://u:{SECRET}@host/name"
    )

    assert "lease_store_schema is 'jobs'" in problem
    assert "mysql+pymysql://u:***@host/name" in problem


def test_a_schema_is_accepted_on_a_database_that_has_them() -> None:
    settings = loaded(lease_store_schema="jobs", lease_store_url="postgresql://host/name")

    assert settings.store_schema == "jobs"


def test_a_retention_shorter_than_the_brokers_redelivery_is_refused_naming_both() -> None:
    problems = problems_of(
        visibility_timeout=200_000, lease_keep_succeeded=100_000, lease_keep_failed=199_999
    )

    assert "lease_keep_succeeded is 100000.0" in problems[0]
    assert "lease_keep_failed is 199999.0" in problems[1]
    assert all("visibility_timeout is 200000" in problem for problem in problems)


def test_keeping_for_ever_satisfies_every_redelivery() -> None:
    settings = loaded(visibility_timeout=1e9, lease_keep_succeeded=None, lease_keep_failed=None)

    assert settings.keep_succeeded is None


def test_a_value_that_is_wrong_alone_is_not_also_compared_with_others() -> None:
    problems = problems_of(lease_duration=-1, lease_heartbeat_interval=50)

    assert len(problems) == 1


# --- a task -------------------------------------------------------------------------------------


def test_a_task_without_attributes_has_the_apps_settings() -> None:
    settings = loaded(lease_duration=60, lease_max_attempts=5, lease_on_expiry="hold")

    assert for_task(settings, {}, task="proj.rebuild") == TaskSettings(
        duration_seconds=60.0,
        heartbeat_seconds=20.0,
        heartbeat_from=HeartbeatFrom.CHILD,
        max_attempts=5,
        ack=Ack.CLAIM,
        on_expiry=OnExpiry.HOLD,
        interrupt=True,
    )


def test_the_attributes_of_a_task_win_over_the_app() -> None:
    attributes = {
        "lease_duration": 12,
        "lease_max_attempts": 1,
        "lease_on_expiry": "fail",
        "lease_interrupt": False,
    }

    task = for_task(loaded(lease_max_attempts=5), attributes, task="proj.rebuild")

    assert (task.duration_seconds, task.heartbeat_seconds) == (12.0, 4.0)
    assert (task.max_attempts, task.on_expiry, task.interrupt) == (1, OnExpiry.FAIL, False)


def test_none_on_a_task_means_none_where_the_setting_allows_it() -> None:
    settings = loaded(lease_stall_timeout=60, lease_defer_after=5, lease_heartbeat_interval=4)
    nothing = dict.fromkeys(
        (
            "lease_stall_timeout",
            "lease_defer_after",
            "lease_idempotency_retention",
            "lease_heartbeat_interval",
        )
    )

    task = for_task(settings, nothing, task="proj.rebuild")

    assert task.stall_timeout_seconds is None
    assert task.defer_after_seconds is None
    assert task.idempotency_retention_seconds is None
    assert task.heartbeat_seconds == 10.0


def test_none_on_a_task_is_refused_where_the_setting_is_never_none() -> None:
    optional = {
        "lease_stall_timeout",
        "lease_defer_after",
        "lease_idempotency_retention",
        "lease_heartbeat_interval",
    }
    names = {s.name for s in SETTINGS if s.is_task_option} - optional

    for name in names:
        (problem,) = task_problems_of(loaded(), **{name: None})
        assert problem.startswith(f"task proj.rebuild: {name} is None: it must be ")
        assert problem.endswith("leave it out for the app's own")


def test_attributes_that_are_not_of_a_lease_are_left_alone() -> None:
    attributes = {"name": "proj.rebuild", "max_retries": -1}

    assert for_task(loaded(), attributes, task="proj.rebuild").max_attempts == 3


def test_a_wrong_attribute_is_refused_naming_the_task() -> None:
    (problem,) = task_problems_of(loaded(), lease_max_attempts=0)

    assert problem.startswith("task proj.rebuild: lease_max_attempts is 0: it must be ")


def test_an_interval_of_the_app_that_does_not_suit_the_tasks_lease_is_refused() -> None:
    settings = loaded(lease_heartbeat_interval=10)

    (problem,) = task_problems_of(settings, lease_duration=15)

    assert problem.startswith("task proj.rebuild: lease_heartbeat_interval is 10.0")
    assert "lease_duration is 15.0" in problem


def test_a_misspelt_attribute_gets_one_error_that_says_what_was_meant() -> None:
    (problem,) = task_problems_of(loaded(), lease_max_atempts=3)

    assert problem == (
        "task proj.rebuild: lease_max_atempts is not an option of a leased task: "
        "did you mean lease_max_attempts?"
    )


def test_a_setting_of_the_app_cannot_be_set_on_a_task() -> None:
    assert unknown_options(["lease_store_url"]) == [
        "lease_store_url cannot be set on a task: set app.conf.lease_store_url instead"
    ]


def test_a_name_that_resembles_none_is_answered_with_the_options_there_are() -> None:
    (problem,) = unknown_options(["lease_zzz"])

    assert "choose from lease_ack, lease_defer_after, " in problem


def test_known_and_foreign_names_are_no_unknown_options() -> None:
    assert unknown_options(["lease_duration", "max_retries", "lease"]) == []


# --- the names in app.conf ----------------------------------------------------------------------


def test_a_misspelt_setting_is_told_with_what_was_meant() -> None:
    assert unknown_settings(["lease_duraton", "lease_duration", "broker_url"]) == [
        "lease_duraton is not a setting: did you mean lease_duration?"
    ]


def test_an_upper_case_name_which_celery_does_not_read_is_told() -> None:
    assert unknown_settings(["LEASE_DURATION", "LEASE_OF_THE_FLAT"]) == [
        "LEASE_DURATION is not read: write it lease_duration"
    ]


def test_names_under_a_namespace_are_compared_without_it() -> None:
    names = ["CELERY_LEASE_DURATION", "CELERY_LEASE_DURATON", "CELERY_BROKER_URL"]

    assert unknown_settings(names, namespace="CELERY") == [
        "CELERY_LEASE_DURATON is not a setting: did you mean lease_duration?"
    ]


# --- secrets and rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conf",
    [
        {"lease_store_url": f"postgres://u:{SECRET}@host/db"},
        {"lease_store_url": f"u:{SECRET}@host/db"},
        {"lease_store_url": ["postgresql", SECRET]},
        {"lease_store_engine_options": {1: 2, "connect_args": {"password": SECRET}}},
        {"lease_store_engine_options": f"password={SECRET}"},
        {"lease_store_engine_options": [("password", SECRET)]},
    ],
)
def test_no_message_shows_a_password(conf: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        load(conf.get)

    assert SECRET not in str(caught.value)


def settings_with_secrets() -> Settings:
    return loaded(
        lease_store_url=f"postgresql://u:{SECRET}@host/db",
        lease_store_engine_options={
            "connect_args": {"password": SECRET, "token": {"value": SECRET}, "timeout": 5},
            "creator": partial(dict, password=SECRET),
            "url": [f"postgresql://u:{SECRET}@other/db"],
        },
    )


def test_the_repr_of_the_settings_shows_no_password() -> None:
    shown = repr(settings_with_secrets())

    assert SECRET not in shown
    assert "store_url='postgresql://u:***@host/db'" in shown
    assert "duration=30.0" in shown


def test_rows_are_json_with_the_secrets_masked() -> None:
    rows = [dataclasses.asdict(row) for row in as_rows(settings_with_secrets())]

    assert SECRET not in json.dumps(rows)
    assert rows[0]["value"] == "postgresql://u:***@host/db"
    assert rows[0]["default"] == "sqlite:///celery-lease.sqlite3"


def test_rows_show_the_value_in_force_beside_the_default() -> None:
    rows = {row.name: row for row in as_rows(loaded(lease_duration=60, lease_on_expiry="hold"))}

    assert (rows["lease_duration"].value, rows["lease_duration"].default) == (60.0, 30.0)
    assert (rows["lease_on_expiry"].value, rows["lease_on_expiry"].default) == ("hold", "retry")
    assert rows["lease_duration"].unit == "seconds"
    assert rows["lease_duration"].task_attribute == "lease_duration"
    assert rows["lease_store_url"].task_attribute is None


def test_without_settings_the_rows_show_the_defaults() -> None:
    assert all(row.value == row.default for row in as_rows())
    assert [row.name for row in as_rows()] == [setting.name for setting in SETTINGS]
