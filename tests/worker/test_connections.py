"""The connections that leased messages leave by: their breaker, a fork, what is asked before."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_lease.extension import extension_of
from celery_lease.publishing import Breaker, LeaseConnections
from tests.support.proxy import Proxy
from tests.support.servers import External
from tests.support.waiting import eventually
from tests.worker.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """Time is told by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_after_a_failure_one_of_many_threads_tries_again_when_the_pause_is_over() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=5, monotonic=clock)
    assert not breaker.is_open()
    breaker.failed()
    clock.now += 4.9
    assert breaker.is_open()
    clock.now += 0.2
    start, answers = threading.Barrier(20), []

    def ask() -> None:
        start.wait()
        answers.append(breaker.is_open())

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    assert answers.count(False) == 1


def test_a_publish_is_bounded_where_the_call_leaves_its_bounds_out() -> None:
    """Celery gives a None for each."""
    with Celery("bounded", broker="amqp://127.0.0.1:1", set_as_current=False) as app:
        connections = LeaseConnections(app, timeout_seconds=4.0)
        asked: dict[str, Any] = {}
        with connections.producer() as producer:
            producer.publish = lambda _, **options: asked.update(options)

        connections.publish(b"", timeout=None, confirm_timeout=1.5)

        assert (asked["timeout"], asked["confirm_timeout"]) == (2.0, 1.5)
        connections.close()


def test_who_tried_and_never_came_back_holds_nobody_up_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=5, monotonic=clock)
    breaker.failed()
    clock.now += 5
    assert not breaker.is_open()
    assert breaker.is_open()

    clock.now += 5

    assert not breaker.is_open()
    breaker.succeeded()
    assert not breaker.is_open()


@pytest.fixture(params=["redis", "rabbitmq"])
def cabled(
    request: pytest.FixtureRequest,
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_proxy: Callable[[int], Proxy],
) -> Iterator[tuple[Site, Proxy]]:
    """A site whose broker and result backend are behind one proxy."""
    kind = request.param
    server = request.getfixturevalue("valkey" if kind == "redis" else "rabbitmq")
    if isinstance(server, External):
        pytest.skip("needs a port to put a proxy in front of")
    url = request.getfixturevalue("redis_url" if kind == "redis" else "amqp_url")
    proxy = start_proxy(server.port)
    there = proxy.url(url)
    backend = there if kind == "redis" else "rpc://"
    site = make_site(sqlite_url, broker=there, backend=backend, lease_publish_timeout=2.0)
    yield site, proxy
    proxy.heal()
    if kind == "rabbitmq":
        # It has never listened: there is nothing that the site could stop.
        site.app.backend.result_consumer = None


@pytest.mark.parametrize("harm", ["stall", "cut"])
@pytest.mark.timeout(60)
def test_a_result_backend_that_is_the_broker_keeps_nobody_waiting_either(
    harm: str, cabled: tuple[Site, Proxy]
) -> None:
    """Celery asks it before it publishes: the job would not even be recorded."""
    site, proxy = cabled
    add = site.task("t.add")
    add.delay(1, 2)
    getattr(proxy, harm)()
    took: list[Any] = []

    def call() -> None:
        took.extend(add.delay(n, n) for n in range(3))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2.0 + 1.5)

    assert len(took) == 3
    for sent in took:
        assert site.job(sent.id)["dispatched_at"] is None


def test_connections_that_a_restarted_broker_has_closed_cost_no_publish(
    cabled: tuple[Site, Proxy],
) -> None:
    """All that are idle are dropped with the first of them, not tried one after the other."""
    site, proxy = cabled
    connections = extension_of(site.app).connections
    held = [connections.producer() for _ in range(6)]
    for one in held:
        one.__enter__().channel  # noqa: B018  connects
    for one in held:
        one.__exit__(None, None, None)
    proxy.cut()
    eventually(lambda: proxy.connection_count == 0)
    proxy.heal()

    sent = site.task("t.add").delay(1, 2)

    assert site.job(sent.id)["dispatched_at"] is not None


@pytest.mark.parametrize("kind", ["redis", "amqp"])
@pytest.mark.parametrize("frozen", [1, 2])
def test_a_host_of_a_failover_url_that_does_not_answer_is_passed_over(
    kind: str,
    frozen: int,
    request: pytest.FixtureRequest,
    make_site: Callable[..., Site],
    sqlite_url: str,
) -> None:
    """It takes all the time that a publish has: the next one begins with another host."""
    url = request.getfixturevalue(f"{kind}_url")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(frozen)
        ]
        # Connected to, they say nothing.
        urls = [f"{kind}://127.0.0.1:{one.getsockname()[1]}//" for one in silent]
        site = make_site(
            sqlite_url, broker=";".join([*urls, url]), backend=None, lease_publish_timeout=2.0
        )
        add, breaker = site.task("t.add"), extension_of(site.app).connections.breaker

        sent = add.delay(1, 2)
        for _ in range(frozen):
            assert site.job(sent.id)["dispatched_at"] is None
            site.run_pass()

        assert site.job(sent.id)["dispatched_at"]
        # It stays with the one that answers.
        assert not breaker.is_open()
        extension_of(site.app).connections.close()
        assert site.job(add.delay(3, 4).id)["dispatched_at"]
        with site.app.connection_for_read(url) as connection, connection.SimpleQueue("celery") as q:
            assert q.qsize() == 2


def test_a_fork_shares_no_connection(cabled: tuple[Site, Proxy]) -> None:
    site, proxy = cabled
    connections = extension_of(site.app).connections

    def ask(what: LeaseConnections) -> None:
        with what.producer() as producer:
            producer.channel.queue_declare("forked", passive=False)

    ask(connections)
    before = proxy.connection_count
    go_on, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ask(connections)
            os.read(go_on, 1)
            code = 0
        finally:
            os._exit(code)

    try:
        eventually(lambda: proxy.connection_count > before)
        os.write(tell, b"x")
        eventually(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    eventually(lambda: proxy.connection_count == before)
    ask(connections)
    os.close(go_on)
    os.close(tell)
