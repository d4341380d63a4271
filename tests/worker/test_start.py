"""What cannot work is refused at the start, in one message that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_lease import LeasedTask, install
from celery_lease.exceptions import SettingError
from celery_lease.extension import extension_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site


@pytest.mark.parametrize(
    ("app", "conf", "says"),
    [
        pytest.param(
            "leased",
            {"lease_duration": 30, "lease_heartbeat_interval": 20},
            ["lease_heartbeat_interval is 20", "lease_duration is 30"],
            id="impossible-set",
        ),
        pytest.param(
            "leased",
            {"lease_duration": -1, "lease_max_attempts": "3"},
            ["lease_duration is -1", "lease_max_attempts is '3'"],
            id="wrong-values",
        ),
        pytest.param(
            "leased",
            {"lease_duraton": 30},
            ["lease_duraton is not a setting", "did you mean lease_duration"],
            id="unknown",
        ),
        pytest.param(
            "wrong_task",
            {},
            [
                "task wrong.values: lease_max_attempts is 0",
                "task wrong.together: lease_heartbeat_interval is 9",
                "lease_duration is 10",
            ],
            id="task-options",
        ),
        pytest.param(
            "leased",
            {"lease_store_url": "oracle://x/y"},
            ["oracle"],
            id="unknown-database",
        ),
    ],
)
def test_a_worker_refuses_to_start(  # noqa: PLR0917 - pytest passes them by name
    redis_url: str,
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
    app: str,
    conf: dict[str, Any],
    says: list[str],
) -> None:
    import json

    worker = start_worker(
        f"tests.worker.apps.{app}",
        ready=False,
        pool="solo",
        env={
            "LEASE_TEST_BROKER": redis_url,
            "LEASE_TEST_BACKEND": redis_url,
            "LEASE_TEST_STORE": sqlite_url,
            "LEASE_TEST_LEDGER": redis_url,
            "LEASE_TEST_CONF": json.dumps(conf),
        },
    )

    assert worker.wait(20) != 0
    log = worker.log()
    for text in says:
        assert text in log, log[-3000:]
    assert " ready." not in log


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("settings", broker="memory://", set_as_current=False)
    yield app
    app.close()


def nothing() -> None:
    """Do nothing."""


def test_settings_are_read_from_djangos_namespace(app: Celery) -> None:
    class Settings:
        CELERY_LEASE_DURATION = 12
        CELERY_LEASE_STORE_URL = "sqlite:////tmp/none.db"
        CELERY_TIMEZONE = "UTC"

    app.config_from_object(Settings, namespace="CELERY")
    app.task(nothing, name="settings.nothing", base=LeasedTask, shared=False)

    settings = extension_of(app).settings
    assert settings.duration == 12
    assert settings.heartbeat_interval == 4
    assert settings.store_url == "sqlite:////tmp/none.db"


def test_an_unknown_setting_of_djangos_namespace_is_named(app: Celery) -> None:
    class Settings:
        CELERY_LEASE_DURATON = 12

    app.config_from_object(Settings, namespace="CELERY")
    install(app)

    with pytest.raises(SettingError, match="did you mean lease_duration"):
        extension_of(app).settings  # noqa: B018  it is read there


def test_a_setting_after_the_install_still_counts(app: Celery) -> None:
    app.task(nothing, name="settings.nothing", base=LeasedTask, shared=False)
    app.conf.lease_duration = 17

    assert extension_of(app).settings.duration == 17


def test_install_takes_settings_by_their_full_names(app: Celery) -> None:
    extension = install(app, lease_duration=9)

    assert extension.settings.duration == 9
    assert install(app) is extension
    with pytest.raises(SettingError, match="write lease_duration"):
        install(app, duration=9)


def test_an_install_after_the_settings_were_read_takes_effect_while_nothing_has_used_them(
    app: Celery, sqlite_url: str
) -> None:
    task = app.task(nothing, name="settings.nothing", base=LeasedTask, shared=False)
    assert app.tasks["settings.nothing"].name == task.name  # the app is finalized
    extension = extension_of(app)
    assert extension.settings_for(task).duration_seconds == 30

    install(app, lease_store_url=sqlite_url, lease_duration=9, lease_reaper_interval=11)

    assert extension.settings.store_url == sqlite_url
    assert extension.settings_for(task).duration_seconds == 9
    assert app.conf.beat_schedule["celery_lease.reap"]["schedule"] == 11
    extension.raw_store.close()


def test_an_install_that_comes_too_late_is_refused_and_changes_nothing(
    app: Celery, sqlite_url: str
) -> None:
    extension = install(app, lease_store_url=sqlite_url, lease_duration=9)
    extension.raw_store.close()

    install(app)
    install(app, lease_duration=9)
    with pytest.raises(SettingError, match=r"lease_duration.*before"):
        install(app, lease_duration=12)

    assert (app.conf.lease_duration, extension.settings.duration) == (9, 9)


def test_a_call_option_beats_a_task_option_beats_a_setting(app: Celery) -> None:
    app.conf.update(lease_duration=40, lease_max_attempts=5)
    task = app.task(
        nothing, name="settings.nothing", base=LeasedTask, shared=False, lease_duration=10
    )

    settings = extension_of(app).settings_for(app.tasks["settings.nothing"])
    assert task.name == "settings.nothing"
    assert (settings.duration_seconds, settings.max_attempts) == (10, 5)


def test_none_as_an_option_of_a_task_is_not_the_same_as_no_option(app: Celery) -> None:
    app.conf.update(lease_stall_timeout=60, lease_max_attempts=5)

    class Patient(LeasedTask):
        lease_stall_timeout = None

    tasks = {
        "none": {"base": LeasedTask, "lease_defer_after": None, "lease_stall_timeout": None},
        "left": {"base": LeasedTask},
        "base": {"base": Patient},
        "again": {"base": Patient, "lease_stall_timeout": 7},
    }
    made = {
        name: app.task(nothing, name=name, shared=False, **options)
        for name, options in tasks.items()
    }

    found = {name: extension_of(app).settings_for(task) for name, task in made.items()}
    assert {name: one.stall_timeout_seconds for name, one in found.items()} == {
        "none": None,
        "left": 60,
        "base": None,
        "again": 7,
    }
    assert (found["none"].defer_after_seconds, found["left"].defer_after_seconds) == (None, 60)
    assert found["none"].max_attempts == 5


def test_an_in_memory_database_is_refused(app: Celery) -> None:
    app.conf.lease_store_url = "sqlite://"
    install(app)

    with pytest.raises(SettingError, match="in-memory"):
        extension_of(app).raw_store  # noqa: B018  it is made there


def test_a_worker_starts_while_the_store_is_away(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
) -> None:
    site = make_site(sqlite_url)
    env = site.worker_env()
    env["LEASE_TEST_STORE"] = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"

    worker = start_worker("tests.worker.apps.leased", pool="solo", env=env)

    worker.wait_log("lease.store.unavailable")
    assert worker.is_running
