"""Every form in which Celery lets a task be written is leased the same (B114)."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group, shared_task
from celery.worker.request import Request

from celery_lease import LeasedTask, current_lease
from celery_lease.exceptions import SettingError
from celery_lease.extension import extension_of, is_leased
from celery_lease.request import LeaseRequest
from tests.support.waiting import eventually
from tests.worker.site import celery_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.workers import CeleryWorker
    from tests.worker.site import Site

WORKER_APP = "tests.worker.apps.leased"


# --- in a worker --------------------------------------------------------------------------------


def test_a_class_is_a_task_and_its_options_hold(site: Site) -> None:
    tag = site.tag()

    result = site.task("f.by_class").delay(tag)

    assert result.get(timeout=10) == "of the base"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.states(result.id) == ["retried", "completed"]
    # Constructed once, by the user: nothing of ours makes another.
    assert site.facts(tag) == ["made 1 token 1", "made 1 token 2"]
    assert job["max_attempts"] == 5


def test_a_call_takes_its_arguments_by_position(site: Site) -> None:
    tag, job_id = site.tag(), str(uuid4())
    link, link_error = site.task("t.mark").si(tag), site.task("t.errback").si(tag)
    call = site.task("t.mark")

    # As Celery's own signature has them: task_id, producer, link, link_error, shadow.
    result = call.apply_async((tag,), {}, job_id, None, link, link_error, "shadow")

    assert result.id == job_id
    assert result.get(timeout=10) == "marked"
    eventually(lambda: site.facts(tag) == ["mark 1", "mark 1"])
    assert json.loads(site.messages(job_id)[0]["headers"])["shadow"] == "shadow"


@pytest.mark.parametrize(
    "kind", ["OwnCall", "OwnCallSuper", "MixinFirst", "MixinLast", "MixinFirstRun", "Twice"]
)
def test_a_call_of_the_users_own_is_the_leased_body(
    site: Site, shared_worker: CeleryWorker, kind: str
) -> None:
    tag = site.tag()

    result = site.task(f"f.{kind}").delay(tag)

    assert result.get(timeout=10) == "done"
    job = site.until(result.id, "succeeded", settled=True)
    assert site.facts(tag) == ["enter", "body 1", "leave"]
    assert site.states(result.id) == ["completed"]

    # A delivery that is refused does not enter it.
    message = site.messages(result.id)[0]
    site.publish_again(message)
    shared_worker.wait_log(f"lease.claim.refused job_id={result.id}")
    assert site.facts(tag) == ["enter", "body 1", "leave"]
    assert site.job(result.id)["accepted_attempt"] == job["accepted_attempt"] == 1


@pytest.mark.parametrize("kind", ["Hooks", "HooksSuper"])
@pytest.mark.parametrize(
    ("how", "facts", "state"),
    [
        ("succeed", ["before_start", "body", "on_success", "after_return"], "succeeded"),
        ("fail", ["before_start", "body", "on_failure", "after_return"], "failed"),
        (
            "retry",
            [
                *("before_start", "body", "on_retry"),
                *("before_start", "body", "on_success", "after_return"),
            ],
            "succeeded",
        ),
    ],
)
def test_the_hooks_of_a_task_are_called_as_by_celery(
    site: Site, kind: str, how: str, facts: list[str], state: str
) -> None:
    tag = site.tag()

    result = site.task(f"f.{kind}").delay(tag, how)

    # Settled although on_success is the user's and calls no super().
    site.until(result.id, state, settled=True)
    # Two children: on_retry of the first attempt comes before or after the second one begins.
    eventually(lambda: sorted(site.facts(tag)) == sorted(facts))
    if how != "retry":
        assert site.facts(tag) == facts


def test_a_task_called_in_the_body_of_another_has_no_lease(site: Site) -> None:
    tag = site.tag()

    result = site.task("t.calls_other").delay(tag)

    # ``mark`` notes the token that it sees: 0 is none.
    assert result.get(timeout=10) is True
    assert site.facts(tag) == ["mark 0", "mark 0"]
    site.until(result.id, "succeeded", settled=True)
    assert site.states(result.id) == ["completed"]


def test_recursion_has_no_lease_of_its_own(site: Site) -> None:
    result = site.task("t.nested").delay(2)

    assert result.get(timeout=10) == [True, False, False, True]
    site.until(result.id, "succeeded", settled=True)
    attempt = site.attempts(result.id)[0]
    assert (attempt["state"], attempt["progress"], attempt["checkpoint"]) == (
        "completed",
        None,
        None,
    )


def test_an_unleased_task_may_call_a_leased_one(site: Site) -> None:
    tag = site.tag()

    assert site.task("plain.calls").delay(tag).get(timeout=10) == "marked"

    assert site.facts(tag) == ["mark 0"]


def test_a_body_knows_its_request_and_its_lease(site: Site) -> None:
    result = site.task("t.ids").delay(1, key="value")

    assert result.get(timeout=10) == [result.id, result.id, 1, result.id]


@pytest.mark.parametrize("name", ["celery.chunks", "celery.starmap", "celery.map"])
def test_celerys_own_loops_run_leased_tasks_as_calls(site: Site, name: str) -> None:
    add = site.task("t.add")
    before = site.ids()
    canvas = {
        "celery.chunks": lambda: add.chunks([(1, 1), (2, 2)], 1).group(),
        "celery.starmap": lambda: add.starmap([(1, 1), (2, 2)]),
        "celery.map": lambda: site.task("t.total").map([[1, 1], [2, 2]]),
    }[name]()

    result = canvas.apply_async()

    flat = result.get(timeout=10)
    assert flat in ([2, 4], [[2], [4]])
    assert site.ids() == before


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_every_pool_runs_leased_tasks(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
    pool: str,
) -> None:
    site = make_site(sqlite_url)
    start_worker(WORKER_APP, pool=pool, env=site.worker_env())
    tag = site.tag()

    results = [site.task("t.add").delay(n, n) for n in range(5)]
    retried = site.task("r.retry").delay(tag, 1)

    assert [result.get(timeout=15) for result in results] == [0, 2, 4, 6, 8]
    assert retried.get(timeout=15) == "done 1"
    for result in results:
        site.until(result.id, "succeeded", settled=True)
        assert site.states(result.id) == ["completed"]
    assert site.states(retried.id) == ["retried", "completed"]


@pytest.mark.skipif(
    celery_version < (5, 7), reason="Celery 5.5 does not evaluate annotations written as texts"
)
def test_pydantic_tasks_get_models_and_refuse_what_is_invalid(site: Site) -> None:
    # B115
    pytest.importorskip("pydantic")
    good = site.task("f.pydantic").delay({"name": "a", "size": 2})
    bad = site.task("f.pydantic").delay({"name": "a", "size": "much"})

    assert good.get(timeout=10) == {"name": "aa", "size": 4}
    with pytest.raises(Exception, match="ValidationError"):
        bad.get(timeout=10)
    site.until(good.id, "succeeded", settled=True)
    job = site.until(bad.id, "failed", settled=True)
    attempt = site.attempts(bad.id)[0]
    assert (attempt["failure_class"], attempt["retryable"]) == ("invalid", False)
    assert job["failure_count"] == 1
    assert "size" in job["error_message"]


# --- results that nobody wants ------------------------------------------------------------------


def test_the_books_are_whole_when_a_call_ignores_its_result(site: Site) -> None:
    result = site.task("t.add").apply_async((1, 2), ignore_result=True)

    job = site.until(result.id, "succeeded", settled=True)
    assert (site.result(result.id), job["result"]) == (None, None)
    assert site.states(result.id) == ["completed"]


def test_the_books_are_whole_when_a_task_ignores_its_results(site: Site) -> None:
    result = site.task("o.object_ignored").delay()

    job = site.until(result.id, "succeeded", settled=True)
    assert (site.result(result.id), job["result"]) == (None, None)


@pytest.mark.parametrize(
    ("options", "conf"),
    [
        pytest.param({}, {"task_ignore_result": True}, id="for-all"),
        pytest.param({"backend": None}, {}, id="no-backend"),
    ],
)
def test_the_books_are_whole_without_results(
    make_site: Callable[..., Site],
    sqlite_url: str,
    start_worker: Callable[..., CeleryWorker],
    options: dict[str, Any],
    conf: dict[str, Any],
) -> None:
    # B117
    site = make_site(sqlite_url, **options, **conf)
    start_worker(WORKER_APP, pool="solo", env=site.worker_env())
    tag = site.tag()

    good = site.task("t.add").delay(1, 2)
    bad = site.task("o.act").apply_async((tag, "error"), link_error=site.task("t.errback").si(tag))
    linked = site.task("t.add").apply_async((1, 2), link=site.task("t.mark").si(tag))

    site.until(good.id, "succeeded", settled=True)
    site.until(bad.id, "failed", settled=True)
    site.until(linked.id, "succeeded", settled=True)
    eventually(lambda: sorted(site.facts(tag)) == ["errback", "mark 1", "token 1 from None"])
    assert site.result(good.id) is None


# --- without a worker ---------------------------------------------------------------------------


@pytest.fixture
def lonely_app() -> Iterator[Celery]:
    """An app whose broker and store cannot be reached."""
    app = Celery("lonely", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.lease_store_url = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
    yield app
    app.close()
    gc.collect()


def test_a_leased_task_is_a_function_with_the_store_down(lonely_app: Celery) -> None:
    # B112
    @lonely_app.task(base=LeasedTask, bind=True, shared=False)
    def work(self: LeasedTask, number: int) -> list[Any]:
        lease = self.lease
        lease.check()
        lease.progress(1)
        lease.checkpoint(number)
        return [number, lease.is_held, lease.lost, lease.fencing_token, lease.last_checkpoint]

    plain = [1, False, False, 0, None]
    assert work(1) == plain
    assert work.run(1) == plain
    assert work.apply((1,)).get() == plain
    assert current_lease().is_held is False


def test_eager_canvas_touches_neither_broker_nor_store(lonely_app: Celery) -> None:
    # B113
    lonely_app.conf.update(task_always_eager=True, task_store_eager_result=False)

    @lonely_app.task(base=LeasedTask, shared=False)
    def add(first: int, second: int) -> int:
        return first + second

    @lonely_app.task(base=LeasedTask, shared=False)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    assert add.delay(1, 2).get() == 3
    assert chain(add.s(1, 2), add.s(3)).delay().get() == 6
    assert group(add.s(n, n) for n in range(3)).delay().get() == [0, 2, 4]
    assert chord([add.s(1, 1), add.s(2, 2)], total.s()).delay().get() == 6


def test_an_eager_retry_and_an_eager_error_are_celerys(lonely_app: Celery) -> None:
    lonely_app.conf.task_always_eager = True
    tries: list[int] = []

    @lonely_app.task(base=LeasedTask, bind=True, shared=False, max_retries=2)
    def work(self: LeasedTask) -> str:
        tries.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        work.delay().get()
    assert tries == [0, 1, 2]


def test_shared_tasks_are_leased_in_every_app_that_has_them(lonely_app: Celery) -> None:
    def shared_work() -> str:
        return "shared"

    proxy = shared_task(base=LeasedTask, name="forms.shared_work", lease_max_attempts=7)(
        shared_work
    )
    assert proxy is not None
    try:
        task = lonely_app.tasks["forms.shared_work"]
        assert is_leased(task)
        assert task.lease_max_attempts == 7
        assert task.acks_late is True
        assert "celery_lease.reap" in lonely_app.tasks
        assert task.apply().get() == "shared"
    finally:
        from celery import _state

        # Celery would give it to all apps of later tests.
        for announce in list(_state._on_app_finalizers):
            if "forms.shared_work" in repr(
                announce.__closure__ and [cell.cell_contents for cell in announce.__closure__]
            ):
                _state._on_app_finalizers.discard(announce)


@pytest.mark.parametrize("cls", [LeasedTask, "celery_lease:LeasedTask"])
def test_as_the_apps_task_class_it_leaves_celerys_own_tasks_alone(cls: Any) -> None:
    app = Celery("wide", broker="memory://", task_cls=cls, set_as_current=False)

    @app.task(shared=False)
    def work() -> None:
        """Do nothing."""

    @app.task(shared=False, base=Task)
    def plain() -> None:
        """Do nothing."""

    leased = {name for name, task in app.tasks.items() if is_leased(task)}
    assert work.name in leased
    assert plain.name not in leased
    assert [name for name in leased if name.startswith("celery")] == []
    assert {"celery.chord_unlock", "celery.group", "celery_lease.reap"} < set(app.tasks)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_celerys_own_tasks_are_as_they_are_without_it(*, late: bool) -> None:
    wide = Celery("wide", broker="memory://", task_cls=LeasedTask, set_as_current=False)
    without = Celery("without", broker="memory://", set_as_current=False)
    for app in (wide, without):
        app.conf.update(task_acks_late=late, task_annotations={"celery.map": {"rate_limit": "1/s"}})
    names = [name for name in without.tasks if name.startswith("celery.")]

    assert len(names) > 5
    kept = [*dict(Task.from_config), "Request", "acks_on_failure", "acks_on_timeout", "max_retries"]
    for name in names:
        ours, theirs = wide.tasks[name], without.tasks[name]
        assert [getattr(ours, o, "") for o in kept] == [getattr(theirs, o, "") for o in kept]
    # No producer of ours, no id of ours, and what we would refuse.
    options = {"producer": _NoProducer(), "lease_duration": 5, "idempotency_key": "k"}
    with pytest.raises(RuntimeError, match="the caller's"):
        wide.tasks["celery.map"].apply_async(({}, []), **options)


class _NoProducer:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the caller's")


def test_a_users_task_is_leased_whatever_its_name_begins_with(lonely_app: Celery) -> None:
    @lonely_app.task(base=LeasedTask, shared=False, name="celery.mine")
    def work() -> None:
        """Do nothing."""

    assert is_leased(work)
    assert work.acks_late is True


# --- Celery's "custom requests" -----------------------------------------------------------------


class _Stranger(Request):
    """A request that knows nothing of leases."""


class _Derived(LeaseRequest):
    """One that does."""


def test_a_request_class_that_knows_no_leases_is_refused(lonely_app: Celery) -> None:
    class Base(LeasedTask):
        abstract = True
        Request = _Stranger

    with pytest.raises(SettingError, match=r"_Stranger.*celery_lease\.request\.LeaseRequest"):

        @lonely_app.task(base=Base, shared=False, lazy=False, name="forms.work")
        def work() -> None:
            """Do nothing."""


@pytest.mark.parametrize("request_class", [_Derived, f"{__name__}:_Derived"])
def test_a_request_class_that_is_derived_from_ours_is_taken(
    lonely_app: Celery, request_class: Any
) -> None:
    @lonely_app.task(base=LeasedTask, shared=False, Request=request_class)
    def work() -> None:
        """Do nothing."""

    assert work.Request == request_class
    extension_of(lonely_app).check_at_start()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:_Stranger", r"celery_lease\.request\.LeaseRequest"),
        ("no.such:Request", "cannot be imported"),
    ],
)
def test_one_that_is_given_by_its_name_is_refused_as_a_worker_starts(
    lonely_app: Celery, name: str, said: str
) -> None:
    @lonely_app.task(base=LeasedTask, shared=False, Request=name)
    def work() -> None:
        """Do nothing."""

    assert is_leased(work)
    with pytest.raises(SettingError, match=said):
        extension_of(lonely_app).check_at_start()


def test_late_acknowledgement_cannot_be_switched_off(lonely_app: Celery) -> None:
    lonely_app.conf.update(task_acks_late=False)

    @lonely_app.task(base=LeasedTask, shared=False, acks_late=False)
    def work() -> None:
        """Do nothing."""

    assert work.acks_late is True


def test_an_unknown_option_is_refused_with_its_name_and_the_nearest(lonely_app: Celery) -> None:
    with pytest.raises(SettingError, match=r"lease_duraton.*did you mean lease_duration"):

        @lonely_app.task(base=LeasedTask, shared=False, lazy=False, lease_duraton=5)
        def work() -> None:
            """Do nothing."""


def test_a_call_takes_no_lease_options(lonely_app: Celery) -> None:
    @lonely_app.task(base=LeasedTask, shared=False, name="forms.work")
    def work() -> None:
        """Do nothing."""

    with pytest.raises(SettingError, match=r"forms\.work got lease_duration: set it on the task"):
        work.apply_async(lease_duration=5)


def test_a_call_by_name_takes_none_either(lonely_app: Celery) -> None:
    @lonely_app.task(base=LeasedTask, shared=False, lazy=False, name="forms.work")
    def work() -> None:
        """Do nothing."""

    with pytest.raises(SettingError, match=r"forms\.work got lease_duration: set it on the task"):
        lonely_app.send_task("forms.work", lease_duration=5)


@pytest.mark.parametrize(
    "options",
    [{"idempotency_key": "k"}, {"headers": {"lease_idempotency_key": "k"}}],
    ids=["option", "header"],
)
@pytest.mark.parametrize("by", ["apply_async", "send_task"])
def test_the_old_protocol_has_no_place_for_a_key(
    lonely_app: Celery, by: str, options: dict[str, Any]
) -> None:
    lonely_app.conf.task_protocol = 1

    @lonely_app.task(base=LeasedTask, shared=False, lazy=False, name="forms.work")
    def work() -> None:
        """Do nothing."""

    call = {
        "apply_async": lambda: work.apply_async(**options),
        "send_task": lambda: lonely_app.send_task("forms.work", **options),
    }[by]
    with pytest.raises(SettingError, match=r"forms\.work.*task_protocol 2"):
        call()


def test_only_what_is_recorded_is_called_without_a_producer_of_the_pool(
    lonely_app: Celery,
) -> None:
    lonely_app.conf.broker_url = "redis://127.0.0.1:1"

    @lonely_app.task(base=LeasedTask, shared=False, lazy=False, name="forms.leased")
    def leased() -> None:
        """Do nothing."""

    extension = extension_of(lonely_app)
    assert extension.stand_in("forms.leased") is not None
    assert extension.stand_in("forms.unknown") is None
    lonely_app.conf.task_protocol = 1
    assert extension.stand_in("forms.leased") is None
