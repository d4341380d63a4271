"""Fixtures of the faults: a stage, and pytest-celery's clusters with leased workers in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import CeleryTestSetup

from tests.conftest import _numbers
from tests.faults.brokers import BROKERS, Broker, RabbitBroker, RedisBroker
from tests.faults.stage import APP, SETTINGS, Stage
from tests.support.servers import External
from tests.support.workers import Beat, CeleryWorker
from tests.worker.conftest import *  # noqa: F403  # pytest-celery's clusters, as tests/worker has them

HERE = Path(__file__).parent


#: What takes ten seconds and more, and has a sibling on another broker, pool or database.
LONG = (
    "test_a_child_that_is_replaced_for_its_memory_is_no_loss",
    "test_with_late_acknowledgement_a_message_given_out_again_is_refused",
    "test_an_eta_beyond_the_consumer_timeout_ends_workers",
    "test_a_retry_that_waits_longer_than_the_brokers_patience",
    "test_a_broker_that_is_away_for_three_leases_costs_no_lease[rabbitmq]",
    "test_a_broker_restarted_twice_leaves_no_worker_deaf[rabbitmq]",
    "test_a_way_to_the_broker_that_swallows_everything_costs_no_second_run[rabbitmq-late]",
    "test_a_way_to_the_broker_that_swallows_everything_costs_no_second_run[redis-late]",
    "test_waiting_jobs_survive_stops_under_load[rabbitmq]",
    "test_a_body_renews_and_completes_during_a_warm_shutdown[rabbitmq]",
    "test_a_job_is_handed_over_at_once_though_its_worker_has_another_to_end[rabbitmq-soft]",
    "test_a_body_that_waits_in_a_driver_is_renewed[threads]",
    "test_whatever_a_frozen_worker_says_when_it_wakes_changes_nothing[1-finished]",
    "test_a_broker_that_is_away_for_three_leases_costs_a_thread_no_lease",
    "test_a_lease_that_was_given_up_is_renewed_by_nobody[child]",
    "test_after_an_outage_of_two_leases_each_job_has_one_outcome_and_the_log_a_few_lines[worker]",
    "test_eight_processes_that_renew_all_the_time_fail_no_job",
    "test_a_job_that_is_locked_longer_than_its_lease_costs_an_attempt_and_no_worker[mariadb]",
    "test_what_is_revoked_while_no_worker_is_up_never_runs[terminate]",
    "test_what_is_revoked_while_no_worker_is_up_never_runs[list]",
    "test_a_revoked_eta_job_stays_revoked_over_a_restart[rabbitmq]",
    "test_a_running_body_stops_within_a_heartbeat[control]",
    "test_a_running_body_stops_within_a_heartbeat[terminate]",
    "test_a_running_body_stops_within_a_heartbeat[list]",
    "test_a_terminated_body_is_not_run_again[we-KILL-late]",
    "test_a_terminated_body_is_not_run_again[stranger-TERM-late]",
    "test_a_pool_without_processes_stops_it_too[gevent]",
    "test_a_revoked_job_that_is_resumed_runs_where_its_revocation_is_remembered[terminate]",
    "test_a_hard_limit_that_is_not_acknowledged_is_one_failure[rabbitmq]",
    "test_a_delay_beyond_the_brokers_patience_is_not_the_brokers[redis]",
    "test_a_job_that_is_due_while_all_workers_are_stopped_runs_when_one_is_back[rabbitmq]",
    "test_a_retry_under_late_acknowledgement_frees_its_worker[rabbitmq]",
    # Frozen, and frozen before the first publish.
    "test_a_caller_waits_so_long_at_most_and_the_job_is_sent_when_the_broker_is_back[rabbitmq-f",
    "test_a_caller_waits_so_long_at_most_and_the_job_is_sent_when_the_broker_is_back[redis-cut]",
    "test_a_port_that_accepts_and_says_nothing_is_waited_for_so_long_at_most[rabbitmq]",
    "test_a_worker_sends_what_was_stored_within_one_interval_of_the_brokers_return[rabbitmq]",
    "test_a_caller_may_want_the_error_and_the_job_is_sent_all_the_same[rabbitmq]",
    "test_after_the_pause_one_publish_finds_the_broker_back[rabbitmq]",
    "test_the_event_of_a_sent_task_waits_no_longer_either[rabbitmq]",
    "test_a_pass_that_finds_a_frozen_broker_gives_its_batch_up[rabbitmq]",
    "test_what_a_long_outage_has_left_is_sent_in_batches_each_once[rabbitmq]",
    "test_what_the_broker_has_lost_is_sent_again_and_all_run_once[rabbitmq-purge]",
    "test_what_the_broker_has_lost_is_sent_again_and_all_run_once[redis-restart]",
    "test_a_refused_delivery_is_no_success_of_its_job[rabbitmq]",
    "test_a_worker_without_the_task_does_not_end_its_job[rabbitmq]",
    "test_after_a_restart_of_the_whole_platform_every_running_job_is_recovered[database]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Celery's result backend warn where a pass of ours, in this process, stores a failure."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Call to deprecated setex"))
            if item.name.startswith(LONG):
                item.add_marker(pytest.mark.long)


@pytest.fixture
def make_stage(
    redis_url: str,
    fresh_database: Callable[[str], str],
    start_worker: Callable[..., CeleryWorker],
    start_beat: Callable[..., Beat],
    tmp_path: Path,
) -> Iterator[Callable[..., Stage]]:
    """Make a stage: ``make_stage("postgresql", lease_max_attempts=2)``."""
    with ExitStack() as stack:

        def make(
            database: str = "postgresql",
            *,
            broker: Broker | None = None,
            store_url: str = "",
            worker_settings: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Stage:
            stage = Stage(
                broker=broker or RedisBroker(redis_url),
                backend_url=redis_url,
                store_url=store_url or fresh_database(database),
                settings=settings,
                worker_settings=worker_settings,
                folder=tmp_path,
                start_worker=start_worker,
                start_beat=start_beat,
            )
            stack.callback(stage.close)
            return stage

        yield make


@pytest.fixture
def enter() -> Iterator[Callable[[AbstractContextManager[Any]], Any]]:
    """Enter a context that ends with the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    """A broker that no other test uses, once for each kind."""
    if request.param == "redis":
        server = request.getfixturevalue("valkey")
        if isinstance(server, External):
            return RedisBroker(server.url)
        # Not the result backend's database.
        return RedisBroker(server.url_for(next(_numbers) % server.databases))
    url = request.getfixturevalue("amqp_url")
    return RabbitBroker(url, request.getfixturevalue("rabbitmq"))


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Make an owner folder: each worker with one of its own is on a host of its own."""

    def make() -> str:
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        return str(folder)

    return make


# --- pytest-celery --------------------------------------------------------------------------------


@pytest.fixture
def worker_app() -> str:
    """The module of the app that the workers run."""
    return APP


@pytest.fixture
def worker_options(postgresql_url: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Two workers on one store; broker and backend come from pytest-celery's clusters."""
    conf = {**SETTINGS, "lease_store_url": postgresql_url}
    env = {"FAULTS_CONF": json.dumps(conf), "FAULTS_FOLDER": str(tmp_path)}
    return [{"name": f"worker{n}", "concurrency": 4, "env": env} for n in (1, 2)]


@pytest.fixture
def cluster_stage(
    celery_setup: CeleryTestSetup,
    worker_options: list[dict[str, Any]],
    start_worker: Callable[..., CeleryWorker],
    start_beat: Callable[..., Beat],
    tmp_path: Path,
) -> Iterator[Stage]:
    """The stage of ``celery_setup``'s own servers and workers."""
    conf = json.loads(worker_options[0]["env"]["FAULTS_CONF"])
    stage = Stage(
        broker=RedisBroker(celery_setup.broker.config()["host_url"]),
        backend_url=celery_setup.backend.config()["host_url"],
        store_url=conf["lease_store_url"],
        settings=conf,
        folder=tmp_path,
        start_worker=start_worker,
        start_beat=start_beat,
    )
    yield stage
    stage.close()
