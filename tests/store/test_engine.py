"""The connection: forks, deadlocks, dropped connections, an unreachable store, a full pool."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool, QueuePool, SingletonThreadPool, StaticPool

import celery_lease
from celery_lease.exceptions import SchemaMismatch, SettingError, StoreUnavailable
from celery_lease.records import Accepted, Claimed, Renewed
from celery_lease.states import JobState, LossCause
from celery_lease.store import queries, reads, transitions
from celery_lease.store.dialects import Later, clock
from celery_lease.store.engine import TRIES, RowBusy, Store, _Again, _stores
from tests.store.builders import (
    JSON,
    NO_BACKOFF,
    again,
    at_once,
    attempt_row,
    claimed,
    errors_of,
    expired,
    finished,
    holding,
    in_background,
    job_row,
    lock_attempt,
    lock_job,
    new_delivery,
    new_job,
    nothing_changes,
    parting,
    renewal,
    rows,
    running,
    set_job,
    statements_of,
    store_now,
    submitted,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.pool import Pool

ROOT = Path(celery_lease.__file__).parent.parent

# --- one engine a process -----------------------------------------------------------------------

FORKING = """
import os, sys, gc
from tests.store.builders import *
from celery_lease.store.engine import Store

store = Store(url=sys.argv[1])
engine = store.engine
parents = running(store, "parents")          # the pool now has a connection of the parent's
held = engine.connect()                      # and one is checked out
children = []
for number in range(2):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert store.engine is not engine
            del engine
            gc.collect()
            for turn in range(5):
                name = f"job{number}-{turn}"
                finished(store, running(store, name))
                assert job_row(store, name)["state"] == "succeeded"
            store.close()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(pid)
for turn in range(5):
    finished(store, running(store, f"parent-{turn}"))
    assert transitions.renew(store, [renewal(parents)]).renewed
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 2
assert store.engine is engine
held.close()
finished(store, parents)
assert len(rows(store)["job"]) == 16
store.close()
"""


def test_a_forked_child_has_an_engine_of_its_own_and_leaves_the_parents_alone(
    store: Store,
) -> None:
    """B103. In a process without threads: forking one that has them is another matter."""
    url = store._url.render_as_string(hide_password=False)

    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORKING, url],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()
    assert len(rows(store)["job"]) == 16
    assert {job["state"] for job in rows(store)["job"].values()} == {"succeeded"}


def test_nothing_is_connected_before_the_first_use(store: Store) -> None:
    fresh = Store(url=store._url.render_as_string(hide_password=False))

    assert fresh._engine is None
    fresh.close()
    assert fresh._engine is None


def test_the_engine_is_made_once(store: Store) -> None:
    assert store.engine is store.engine


def test_a_store_apart_shares_tables_and_no_connection(store: Store) -> None:
    store_now(store)
    other = store.apart()
    assert other._engine is None

    store_now(other)

    assert other.tables is store.tables
    assert other.base_engine is not store.base_engine
    assert other.base_engine.pool is not store.base_engine.pool
    # A forked child leaves its connections alone, too.
    assert other in _stores
    other.close()
    assert store_now(store)


def test_a_closed_store_can_be_used_again(kind: str, open_store: Callable[..., Store]) -> None:
    store = open_store(kind)
    store_now(store)

    store.close()

    assert store_now(store) is not None


def test_a_forgotten_engine_is_not_disposed(kind: str, open_store: Callable[..., Store]) -> None:
    """In a forked child its sockets are the parent's."""
    store = open_store(kind)
    store_now(store)
    engine = store.engine
    with engine.connect() as connection:
        store.forget_engine()
        gc.collect()

        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
    engine.dispose()


def test_engine_options_of_the_user_are_used(kind: str, open_store: Callable[..., Store]) -> None:
    """B104."""
    store = open_store(kind, pool_size=3, max_overflow=0)

    assert store.engine.pool.size() == 3  # type: ignore[attr-defined]


LEVELS = [
    {"isolation_level": "SERIALIZABLE"},
    {"execution_options": {"isolation_level": "SERIALIZABLE"}},
    {"execution_options": {"isolation_level": "serializable", "logging_token": "ours"}},
]


@pytest.mark.parametrize("options", LEVELS)
def test_an_isolation_level_is_that_of_transactions_and_no_record_is_lost_by_it(
    kind: str, open_store: Callable[..., Store], store: Store, options: dict[str, Any]
) -> None:
    """As an execution option it took the single statements out of autocommit: all rolled back."""
    mine = open_store(kind, **options)

    lease = running(mine)

    assert job_row(store)["state"] == JobState.RUNNING
    assert transitions.renew(mine, [renewal(lease)]).renewed
    finished(mine, lease)
    assert job_row(store)["state"] == JobState.SUCCEEDED
    assert reads.isolation(mine) == "SERIALIZABLE"
    assert transitions.submit(mine, new_job("second"))
    assert job_row(store, "second")["state"] == JobState.QUEUED


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "READ COMMITED", 7])
@pytest.mark.parametrize("within", ["isolation_level", "execution_options"])
def test_an_isolation_level_without_transactions_or_unknown_is_refused_with_the_remedy(
    kind: str, open_store: Callable[..., Store], level: object, within: str
) -> None:
    given = {within: level if within == "isolation_level" else {"isolation_level": level}}
    mine = open_store(kind, **given)

    with pytest.raises(SettingError, match="isolation_level is") as caught:
        mine.engine  # noqa: B018

    assert "lease_store_engine_options" in str(caught.value)
    assert "SERIALIZABLE" in str(caught.value)


@pytest.mark.parametrize("pool", [NullPool, StaticPool, QueuePool, SingletonThreadPool])
def test_a_pool_class_that_has_no_timeout_takes_the_place_of_ours(
    kind: str, open_store: Callable[..., Store], store: Store, pool: type[Pool]
) -> None:
    mine = open_store(kind, poolclass=pool)

    finished(mine, running(mine))

    assert job_row(store)["state"] == JobState.SUCCEEDED


def test_a_pool_that_others_would_share_is_refused_with_the_remedy(tmp_path: Path) -> None:
    pool = QueuePool(lambda: None)  # type: ignore[arg-type, return-value]

    with pytest.raises(SettingError, match="poolclass"):
        Store(url=f"sqlite:///{tmp_path}/x.db", engine_options={"pool": pool})


# --- errors that pass ---------------------------------------------------------------------------


def test_a_transient_error_is_tried_again_a_bounded_number_of_times(store: Store) -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise _Again("in the way")

    with pytest.raises(StoreUnavailable, match="in the way"):
        store.retrying(work)

    assert len(calls) == TRIES


def test_a_call_that_succeeds_later_returns_its_answer(store: Store) -> None:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise RowBusy("locked")
        return len(calls)

    assert store.retrying(work) == 3


def test_an_error_of_the_programs_own_is_not_tried_again(store: Store) -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.retrying(work)

    assert len(calls) == 1


def test_a_real_deadlock_ends_for_both_without_an_error(row_store: Store) -> None:
    """B107. Two transactions lock two rows in opposite orders, each after the other's first."""
    for name in ("one", "two"):
        submitted(row_store, name)
    locked = {"one": False, "two": False}

    def work(first: str, second: str) -> Callable[[], None]:
        def transaction() -> None:
            with row_store.transaction() as connection:
                connection.execute(lock_job(row_store, first))
                locked[first] = True
                eventually(lambda: locked[second], timeout=5)
                connection.execute(lock_job(row_store, second))
                connection.execute(
                    sa.update(row_store.tables.job)
                    .where(row_store.tables.job.c.id.in_([first, second]))
                    .values(failure_count=row_store.tables.job.c.failure_count + 1)
                )

        return transaction

    with errors_of(row_store) as errors:
        at_once(
            lambda: row_store.retrying(work("one", "two")),
            lambda: row_store.retrying(work("two", "one")),
        )

    assert any("eadlock" in error for error in errors)
    assert job_row(row_store, "one")["failure_count"] == 2
    assert job_row(row_store, "two")["failure_count"] == 2


def test_a_lock_that_is_held_too_long_is_an_answer_and_no_hang(row_store: Store) -> None:
    """B106. An operator's word on a job that a user's transaction holds."""
    submitted(row_store)

    def hold() -> None:
        with row_store.transaction() as connection:
            connection.execute(lock_job(row_store))

    with holding(row_store, lock_job(row_store)), errors_of(row_store) as errors:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"(?i)lock"):
            row_store.retrying(hold, tries=1)
        took = time.monotonic() - started

    assert len(errors) == 1
    assert took < 4
    row_store.retrying(hold, tries=1)


def test_an_end_waits_for_a_lock_of_the_attempt_row_and_is_accepted(store: Store) -> None:
    lease = running(store)

    with holding(store, lock_attempt(store, lease)) as holder:
        started = store_now(store)
        with in_background(
            lambda: transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
        ) as answer:
            eventually(lambda: (store_now(store) - started).total_seconds() > 0.1)
            holder.rollback()
            assert isinstance(answer(), Accepted)

    assert job_row(store)["state"] == JobState.SUCCEEDED


# --- connections that break ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrow", ["submit", "claim", "renew", "complete", "retry_later", "expire", "cancel"]
)
def test_a_connection_that_the_server_has_dropped_is_replaced(
    row_store: Store, arrow: str, drop_connections: Callable[[Store], int]
) -> None:
    lease = None if arrow in ("submit", "claim") else expired(row_store)
    if arrow == "claim":
        submitted(row_store)
    dropped = drop_connections(row_store)

    answer = _call(row_store, arrow, lease)

    assert dropped >= 1
    assert answer
    reached = {
        "submit": "queued",
        "claim": "running",
        "renew": "running",
        "complete": "succeeded",
        "retry_later": "queued",
        "expire": "queued",
        "cancel": "cancelled",
    }
    assert job_row(row_store)["state"] == reached[arrow]


def _call(store: Store, arrow: str, lease: Any) -> Any:
    """Make a transition; what is returned is true when it was won."""
    calls: dict[str, Callable[[], Any]] = {
        "submit": lambda: transitions.submit(store, new_job()),
        "claim": lambda: isinstance(transitions.claim(store, new_delivery()), Claimed),
        "renew": lambda: transitions.renew(store, [renewal(lease)]).renewed,
        "complete": lambda: isinstance(_complete(store, lease), Accepted),
        "retry_later": lambda: isinstance(_retry(store, lease), Accepted),
        "expire": lambda: transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF),
        "cancel": lambda: transitions.cancel(store, "job"),
    }
    return calls[arrow]()


def _complete(store: Store, lease: Any) -> Any:
    return transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)


def _retry(store: Store, lease: Any) -> Any:
    return transitions.retry_later(store, lease, parting(), again())


def test_a_connection_that_is_dropped_in_the_middle_of_a_transition_leaves_nothing_half_done(
    row_store: Store, drop_connections: Callable[[Store], int]
) -> None:
    """The first transaction is killed between its two writes; the second does all of it."""
    expired(row_store)
    dropped: list[int] = []

    def kill_before_the_job(_: Any, __: Any, statement: str, *___: Any) -> None:
        if not dropped and statement.startswith(f"UPDATE {row_store.tables.job.name}"):
            dropped.append(0)
            dropped.append(drop_connections(row_store))

    sa.event.listen(row_store.engine, "before_cursor_execute", kill_before_the_job)
    try:
        given_on = transitions.expire(row_store, limit=9, lost_backoff=NO_BACKOFF)
    finally:
        sa.event.remove(row_store.engine, "before_cursor_execute", kill_before_the_job)

    assert dropped[1] >= 1
    assert [one.job_id for one in given_on] == ["job"]
    assert job_row(row_store)["state"] == JobState.QUEUED
    assert job_row(row_store)["lost_count"] == 1
    assert rows(row_store)["attempt"]["job", 1]["state"] == "expired"


@pytest.mark.parametrize("count", [1, 3])
def test_replies_that_are_lost_again_and_again_do_no_harm(
    store: Store, lose_replies: Callable[..., Any], count: int
) -> None:
    submitted(store)
    delivery = new_delivery()

    with lose_replies(store, 1):
        answer = transitions.claim(store, delivery)
    assert isinstance(answer, Claimed)
    for _ in range(count):
        with lose_replies(store, 1):
            renewed = transitions.renew(store, [renewal(answer.lease)])
        assert renewed == Renewed(frozenset({("job", 1)}), {}, frozenset())
    with lose_replies(store, 1):
        done = transitions.complete(store, answer.lease, parting(), result=b"1", result_type=JSON)

    assert isinstance(done, Accepted)
    assert rows(store)["attempt"].keys() == {("job", 1)}
    assert attempt_row(store, answer.lease)["renewal_count"] == 2 * count


# --- a store that is not there ------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb"])
def test_a_store_that_refuses_connections_is_unavailable_quickly_and_masks_its_password(
    scheme: str,
) -> None:
    store = Store(url=f"{scheme}://lease:secret@127.0.0.1:1/lease")
    started = time.monotonic()

    with pytest.raises(StoreUnavailable) as raised:
        transitions.submit(store, new_job())

    assert time.monotonic() - started < 5
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(store)
    assert "secret" not in str(raised.value.__cause__)
    assert "***@127.0.0.1:1/lease" in str(raised.value)
    assert "lease_store_url" in str(raised.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: transitions.claim(store, new_delivery()),
        lambda store: transitions.expire(store, limit=1, lost_backoff=NO_BACKOFF),
        queries.last_pass,
        lambda store: queries.undispatched(store, limit=1),
    ],
    ids=["claim", "expire", "last_pass", "undispatched"],
)
def test_a_store_without_its_folder_is_unavailable(
    tmp_path: Path, call: Callable[[Store], Any]
) -> None:
    store = Store(url=f"sqlite:///{tmp_path}/nowhere/lease.db")

    with pytest.raises(StoreUnavailable, match="unable to open"):
        call(store)


def test_a_store_without_its_tables_says_how_to_make_them(bare_store: Store) -> None:
    with pytest.raises(SchemaMismatch, match="lease migrate"):
        transitions.submit(bare_store, new_job())


def test_a_store_with_a_column_missing_says_how_to_add_it(bare_store: Store) -> None:
    bare_store.tables.metadata.create_all(bare_store.engine)
    with bare_store.engine.begin() as connection:
        # None of its own indexes or constraints names this column.
        name = bare_store.tables.job.name
        connection.execute(sa.text(f"ALTER TABLE {name} DROP COLUMN priority"))

    with pytest.raises(SchemaMismatch, match="lease migrate"):
        transitions.submit(bare_store, new_job())


def test_a_full_pool_is_an_answer_and_no_hang(kind: str, open_store: Callable[..., Store]) -> None:
    store = open_store(kind, pool_size=1, max_overflow=0, pool_timeout=0.05)

    with store.engine.connect(), pytest.raises(StoreUnavailable, match="pool"):
        queries.last_pass(store)

    assert queries.last_pass(store) is None or store_now(store)


def test_a_connection_that_is_free_soon_is_waited_for(
    kind: str, store: Store, open_store: Callable[..., Store]
) -> None:
    small = open_store(kind, pool_size=1, max_overflow=0)
    for number in range(8):
        submitted(store, f"job{number}")

    answers = at_once(
        *[lambda n=n: transitions.claim(small, new_delivery(f"job{n}")) for n in range(8)]
    )

    assert all(isinstance(answer, Claimed) for answer in answers)


# --- a URL that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("not a url", "not a database URL"),
        ("oracle://u@h/d", "not one of"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "in-memory"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_remedy(url: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Store(url=url)


def test_engine_options_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    store = Store(url=f"sqlite:///{tmp_path}/x.db", engine_options={"no_such_option": 1})

    with pytest.raises(SettingError, match="lease_store_engine_options"):
        store_now(store)


# --- lock order ---------------------------------------------------------------------------------


def _locks(store: Store, statement: str) -> list[str]:
    """Return which rows a statement locks, in the order in which it does."""
    job, attempt = store.tables.job.name, store.tables.attempt.name
    found = []
    for at in range(len(statement)):
        rest = statement[at:]
        if rest.startswith((f"UPDATE {job} ", f"DELETE FROM {job} ")):
            found.append("job")
        elif rest.startswith((f"UPDATE {attempt} ", f"DELETE FROM {attempt} ")):
            found.append("attempt")
        elif rest.startswith("FOR UPDATE"):
            # The tables of the SELECT before it; a join locks both, and waits for neither.
            found.append("job" if f"FROM {job}" in statement[:at] else "attempt")
    return found


@pytest.mark.parametrize(
    "arrow", ["claim", "take over", "complete", "retry", "lost", "expire", "cancel", "deadline"]
)
def test_every_transition_locks_the_job_before_its_attempt(row_store: Store, arrow: str) -> None:
    lease: Any = None
    if arrow == "claim":
        submitted(row_store)
    else:
        lease = expired(row_store, deadline_seconds=40.0)
    if arrow == "deadline":
        set_job(row_store, deadline_at=Later(clock(), -1.0))

    with statements_of(row_store) as seen:
        _walk(row_store, arrow, lease)

    order = [row for statement, _ in seen for row in _locks(row_store, statement)]
    assert order[0] == "job", seen


def _walk(store: Store, arrow: str, lease: Any) -> None:
    if arrow in ("claim", "take over"):
        claimed(store)
    elif arrow == "complete":
        transitions.complete(store, lease, parting(), result=b"1", result_type=JSON)
    elif arrow == "retry":
        _retry(store, lease)
    elif arrow == "lost":
        transitions.lost(
            store,
            lease,
            cause=LossCause.LOST,
            reason="x",
            lost_backoff=NO_BACKOFF,
        )
    elif arrow == "expire":
        transitions.expire(store, limit=9, lost_backoff=NO_BACKOFF)
    elif arrow == "cancel":
        transitions.cancel(store, "job")
    else:
        transitions.pass_deadline(store, limit=9)


@pytest.mark.parametrize("arrow", ["complete", "retry", "lost", "expire", "cancel", "deadline"])
def test_no_transition_keeps_the_attempt_from_being_renewed_while_it_waits_for_the_job(
    row_store: Store, arrow: str
) -> None:
    """The other order deadlocks with a fenced transaction that ends its own attempt."""
    lease = expired(row_store)
    if arrow == "deadline":
        set_job(row_store, deadline_at=Later(clock(), -1.0))

    with (
        holding(row_store, lock_job(row_store, read=True)) as holder,
        in_background(lambda: _walk_or_give_up(row_store, arrow, lease)) as done,
    ):
        for _ in range(20):
            assert transitions.renew(row_store, [renewal(lease)]).renewed == {("job", 1)}
        holder.rollback()
        done()


def _walk_or_give_up(store: Store, arrow: str, lease: Any) -> None:
    try:
        _walk(store, arrow, lease)
    except StoreUnavailable:
        return


def test_a_store_that_cannot_be_reached_changes_nothing(store: Store) -> None:
    lease = running(store)
    elsewhere = Store(url="postgresql://lease:secret@127.0.0.1:1/lease")

    with nothing_changes(store), pytest.raises(StoreUnavailable):
        transitions.renew(elsewhere, [renewal(lease)])
