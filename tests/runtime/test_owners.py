"""Owner files: who is dead on this host, told by the kernel. Real processes, really killed."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_lease import owners
from celery_lease.exceptions import StoreUnavailable
from celery_lease.owners import (
    LEFTOVER_SECONDS,
    REFRESH_SECONDS,
    SPARE_SECONDS,
    OwnerFile,
    OwnerFolder,
    OwnerWatch,
    default_folder,
    report_dead_owners,
)
from celery_lease.records import Renewal, Vanished
from celery_lease.runtime import Runtime
from celery_lease.settings import for_task, load
from celery_lease.states import JobState, LossCause
from celery_lease.store import queries, transitions
from celery_lease.store.engine import Store
from tests.runtime.fakes import Clock
from tests.store.builders import NO_BACKOFF, claimed, running, submitted
from tests.support import processes
from tests.support.waiting import eventually, never

#: A process that holds owner files as a worker's child does. What it does is its second argument.
HOLDER = """
import os, subprocess, sys, threading, time
from pathlib import Path
from celery_lease.owners import OwnerFile, OwnerFolder
from celery_lease.store.engine import Store

path, url, what = sys.argv[1:4]
folder = OwnerFolder(path, store=Store(url=url))
name = f"host:{os.getpid()}:abc"
mine = OwnerFile(folder, name)
if what != "never claims":
    mine.create()
other = 0
if what == "forks":
    other = os.fork()
    if other == 0:
        time.sleep(600)
elif what == "starts a program":
    other = subprocess.Popen(["sleep", "600"], close_fds=False).pid
elif what == "has a child that ends":
    for leave in (os._exit, sys.exit):
        child = os.fork()
        if child == 0:
            mine.remove()
            leave(0)
        os.waitpid(child, 0)
elif what == "ends in good order":
    mine.remove()
elif what == "forks all the time":
    def churn():
        while True:
            one = OwnerFile(folder, name + "x")
            one.create()
            one.remove()
    threading.Thread(target=churn, daemon=True).start()
    for _ in range(200):
        child = os.fork()
        if child == 0:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.lexists(f"/proc/self/fd/{fd}")]
            # The folder itself may be open: it has no lock.
            os._exit(any(path + "/" in link for link in links))
        other += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(name, other, flush=True)
time.sleep(600)
"""


class Holder:
    """A running ``HOLDER``."""

    def __init__(self, folder: Path, url: str, what: str) -> None:
        guard = processes.setpriv(as_nobody=False, death_signal=signal.SIGKILL)
        command = [*guard, sys.executable, "-c", HOLDER, str(folder), url, what]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.owner, other = self.process.stdout.readline().split()
        self.other = int(other)
        self.pid = self.process.pid

    def kill(self) -> None:
        processes.send(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with tables."""
    made = Store(url=f"sqlite:///{tmp_path}/lease.db")
    made.tables.metadata.create_all(made.engine)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the owner files are: not there yet."""
    return tmp_path / "run"


@pytest.fixture
def folder(path: Path, store: Store) -> OwnerFolder:
    return OwnerFolder(str(path), store=store)


@pytest.fixture
def watch(folder: OwnerFolder, monkeypatch: pytest.MonkeyPatch) -> OwnerWatch:
    """A watch that leaves nothing to others, though the processes here are its children."""
    monkeypatch.setattr(owners, "SPARE_SECONDS", 0.0)
    return OwnerWatch(folder)


@pytest.fixture
def hold(path: Path, store: Store) -> Iterator[Callable[..., Holder]]:
    """Start a process with an owner file: ``hold("forks")``."""
    with ExitStack() as stack:

        def start(what: str = "lives") -> Holder:
            holder = Holder(path, store.masked_url, what)
            stack.callback(holder.close)
            return holder

        yield start


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def dead_file(folder: OwnerFolder, owner: str) -> Path:
    """Leave the file of an owner that is gone."""
    assert folder.is_usable
    path = folder.path / folder.name_of(owner)
    path.touch(0o600)
    return path


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


# --- who is dead --------------------------------------------------------------------------------


def test_a_killed_process_is_seen_at_once_before_anybody_has_asked_for_its_exit_code(
    hold: Callable[..., Holder], watch: OwnerWatch
) -> None:
    holder = hold()
    assert watch.look() == []

    holder.kill()
    processes.wait_gone(holder.pid)

    eventually(lambda: watch.look() == [holder.owner], timeout=1)
    assert processes.state(holder.pid) == "Z"


def test_a_stopped_process_is_not_dead(hold: Callable[..., Holder], watch: OwnerWatch) -> None:
    holder = hold()
    processes.freeze_tree(holder.pid)

    never(watch.look, during=0.5)

    holder.kill()
    eventually(lambda: watch.look() == [holder.owner], timeout=1)


@pytest.mark.parametrize("what", ["forks", "starts a program"])
def test_what_a_process_has_started_and_outlives_it_does_not_keep_its_lock(
    what: str, hold: Callable[..., Holder], watch: OwnerWatch
) -> None:
    holder = hold(what)
    try:
        assert processes.is_alive(holder.other)
        assert watch.look() == []

        holder.kill()

        eventually(lambda: watch.look() == [holder.owner], timeout=1)
        assert processes.is_alive(holder.other)
    finally:
        processes.send(holder.other, signal.SIGKILL)


def test_the_end_of_a_child_frees_nothing_of_its_parents(
    hold: Callable[..., Holder], watch: OwnerWatch, path: Path
) -> None:
    hold("has a child that ends")

    assert watch.look() == []
    assert len(names(path)) == 1


def test_a_fork_never_meets_a_file_that_is_being_made(hold: Callable[..., Holder]) -> None:
    holder = hold("forks all the time")

    assert holder.other == 0


def test_an_orderly_end_leaves_nothing(
    hold: Callable[..., Holder], watch: OwnerWatch, path: Path
) -> None:
    holder = hold("ends in good order")
    holder.kill()
    processes.wait_gone(holder.pid)

    assert watch.look() == []
    assert names(path) == []


def test_this_process_is_not_dead_to_itself(folder: OwnerFolder, watch: OwnerWatch) -> None:
    mine = OwnerFile(folder, "host:1:a")
    mine.create()
    mine.create()

    assert watch.look() == []

    mine.remove()
    mine.remove()
    assert names(folder.path) == []

    mine.create()
    assert len(names(folder.path)) == 1
    mine.remove()


# --- no verdict ---------------------------------------------------------------------------------


def test_files_of_another_boot_another_store_or_a_start_are_left_alone(
    folder: OwnerFolder, watch: OwnerWatch, path: Path, tmp_path: Path
) -> None:
    other = Store(url=f"sqlite:///{tmp_path}/other.db")
    dead_file(OwnerFolder(str(path), store=other), "host:1:a")
    dead_file(OwnerFolder(str(path), store=other, boot_id="another"), "host:1:b")
    dead_file(OwnerFolder(str(path), store=Store(url=other.masked_url, table_prefix="x_")), "c")
    (path / ".new.0123").touch(0o600)
    before = names(path)
    mine = dead_file(folder, "host:1:d")

    assert watch.look() == ["host:1:d"]
    assert names(path) == sorted([*before, mine.name])


def test_a_store_named_from_the_working_directory_is_another_one_elsewhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url="sqlite:///lease.db")
    here = OwnerFolder(str(path), store=store)
    monkeypatch.chdir(tmp_path)

    assert OwnerFolder(str(path), store=store).name_of("a") != here.name_of("a")


def test_an_owner_that_goes_in_good_order_during_a_look_is_not_dead(
    folder: OwnerFolder, watch: OwnerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is open here when it removes it and ends: the lock can be had."""
    file = dead_file(folder, "host:1:a")
    real = fcntl.flock

    def removed_first(descriptor: int, how: int) -> None:
        file.unlink(missing_ok=True)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)

    assert watch.look() == []


def test_a_file_that_goes_between_the_listing_and_the_look_is_no_error(
    folder: OwnerFolder, watch: OwnerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = dead_file(folder, "a")
    dead_file(folder, "b")
    real = os.listdir

    def listed(where: Any) -> list[str]:
        found = real(where)
        gone.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "listdir", listed)

    assert watch.look() == ["b"]


def test_what_is_no_plain_file_is_not_an_owner(
    folder: OwnerFolder, watch: OwnerWatch, path: Path, tmp_path: Path
) -> None:
    assert folder.is_usable
    (tmp_path / "elsewhere").touch()
    (path / folder.name_of("a")).symlink_to(tmp_path / "elsewhere")
    (path / folder.name_of("b")).mkdir()
    os.mkfifo(path / folder.name_of("c"))

    assert watch.look() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_an_owner(folder: OwnerFolder, watch: OwnerWatch) -> None:
    os.chown(dead_file(folder, "a"), 65534, 65534)

    assert watch.look() == []


def test_a_folder_that_has_gone_is_no_verdict(watch: OwnerWatch, path: Path) -> None:
    assert watch.look() == []
    path.rmdir()

    assert watch.look() == []


# --- the folder ---------------------------------------------------------------------------------


def test_the_folder_is_made_private_and_its_files_too(folder: OwnerFolder, path: Path) -> None:
    before = os.umask(0)
    try:
        mine = OwnerFile(folder, "a")
        mine.create()
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == 0o700
    (name,) = names(path)
    assert (path / name).stat().st_mode & 0o777 == 0o600
    mine.remove()


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def a_link(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(0o700)
    path.symlink_to(target)


def a_file(path: Path) -> None:
    path.touch()


def of_another_user(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("make", [open_to_others, a_link, a_file, of_another_user])
def test_a_folder_that_is_not_private_is_one_warning_and_no_owner_files(
    make: Callable[[Path], None],
    folder: OwnerFolder,
    watch: OwnerWatch,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(path)

    OwnerFile(folder, "a").create()
    assert watch.look() == []
    OwnerFile(folder, "b").create()

    (line,) = caplog.messages
    assert str(path) in line
    assert "lease_run_dir" in line
    assert not path.is_dir() or names(path) == []


def test_a_folder_below_one_that_is_not_there_is_one_warning(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = OwnerFolder(str(tmp_path / "not" / "there"), store=store)

    assert not folder.is_usable
    assert not folder.is_usable

    assert len(caplog.messages) == 1


@contextmanager
def as_nobody(path: Path) -> Iterator[None]:
    """Root may write everywhere: be somebody else."""
    if os.getuid() != 0:
        yield
        return
    os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_to_is_one_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    # Under /tmp, since pytest's own folder is closed to others.
    path = Path(f"/tmp/clt-owners-{os.getpid()}")
    path.mkdir(0o700)
    folder = OwnerFolder(str(path), store=store)
    try:
        path.chmod(0o500)
        with as_nobody(path):
            OwnerFile(folder, "a").create()
            OwnerFile(folder, "b").create()
    finally:
        path.rmdir()

    (line,) = caplog.messages
    assert "cannot be written to" in line


def test_a_file_that_cannot_be_made_is_one_warning_and_no_more_tries(
    folder: OwnerFolder, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert folder.is_usable
    path.rmdir()
    mine = OwnerFile(folder, "a")

    mine.create()
    mine.create()

    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4", "fuse.sshfs", "cifs"])
def test_the_locks_of_a_network_file_system_are_not_believed(
    kind: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_local = kind in {"tmpfs", "overlay"}
    mounted = tmp_path / "mounted here"
    mounted.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(mounted).replace(" ", r"\040")
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:30 / {point} rw,nosuid shared:3 - nfs4 hidden:/x rw\n"
        f"24 22 0:31 / {point} rw,nosuid shared:4 - {kind} server:/x rw\n"
        f"25 22 0:32 / {point}/run-and-more rw - nfs4 server:/y rw\n"
    )
    monkeypatch.setattr(owners, "_MOUNTS", mounts)

    folder = OwnerFolder(str(mounted / "run"), store=store)

    assert folder.is_usable is is_local
    assert len(caplog.messages) == (0 if is_local else 1)


def test_a_system_without_a_boot_id_has_no_owner_files_and_nothing_is_said(
    store: Store, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(owners, "_BOOT_ID", tmp_path / "missing")
    folder = OwnerFolder(str(path), store=store)

    OwnerFile(folder, "a").create()

    assert OwnerWatch(folder).look() == []
    assert not path.exists()
    assert caplog.messages == []


def test_without_a_setting_the_folder_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "celery-lease"

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert default_folder().name == f"celery-lease-{os.geteuid()}"


@pytest.mark.parametrize("owner", ["host.domain:12:ab", "a/b:1:c", "ü%2F:3:d"])
def test_an_owner_of_any_name_has_a_file_and_is_read_back(
    owner: str, folder: OwnerFolder, watch: OwnerWatch
) -> None:
    mine = OwnerFile(folder, owner)
    mine.create()
    assert watch.look() == []
    dead_file(folder, owner + "x")

    assert watch.look() == [owner + "x"]
    mine.remove()


# --- what time leaves behind --------------------------------------------------------------------


def test_old_leftovers_that_nobody_holds_are_removed(
    folder: OwnerFolder, watch: OwnerWatch, path: Path, store: Store
) -> None:
    elsewhere = OwnerFolder(str(path), store=store, boot_id="another")
    old = [dead_file(elsewhere, "old"), path / ".new.old"]
    young = [dead_file(elsewhere, "young"), path / ".new.young"]
    held = path / ".new.held"
    for one in (old[1], young[1], held):
        one.touch(0o600)
    for one in (*old, held):
        age(one, LEFTOVER_SECONDS + 60)
    for one in young:
        age(one, LEFTOVER_SECONDS - 60)

    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert watch.look() == []

    assert names(path) == sorted(one.name for one in (*young, held))
    assert folder.is_usable


def test_the_file_of_a_living_process_is_kept_young(
    hold: Callable[..., Holder], watch: OwnerWatch, path: Path
) -> None:
    """systemd-tmpfiles removes what is older than ten days."""
    hold()
    (file,) = path.iterdir()
    age(file, REFRESH_SECONDS - 60)
    before = file.stat().st_mtime

    watch.look()
    assert file.stat().st_mtime == before

    age(file, REFRESH_SECONDS + 60)
    watch.look()
    assert file.stat().st_mtime > before


# --- the report ---------------------------------------------------------------------------------


def report(store: Store, watch: OwnerWatch, **options: Any) -> list[Vanished]:
    seen: list[Vanished] = []
    count = report_dead_owners(
        store, watch, lost_backoff=NO_BACKOFF, on_vanished=seen.append, **options
    )
    assert count == len(seen)
    return seen


def test_the_leases_of_a_dead_owner_are_lost_and_those_of_others_are_not(
    hold: Callable[..., Holder], store: Store, watch: OwnerWatch
) -> None:
    dead, alive = hold(), hold()
    first = running(store, "first", owner=dead.owner)
    running(store, "second", owner=dead.owner)
    running(store, "theirs", owner=alive.owner)
    running(store, "elsewhere", owner="another:1:host")
    dead.kill()
    processes.wait_gone(dead.pid)

    seen = report(store, watch)

    assert [one.job_id for one in seen] == ["first", "second"]
    assert {one.cause for one in seen} == {LossCause.LOST}
    assert {one.state for one in seen} == {JobState.QUEUED}
    assert seen[0].fencing_token == first.fencing_token
    assert seen[0].owner == dead.owner
    assert queries.is_running(store, "theirs")
    assert queries.is_running(store, "elsewhere")
    assert not queries.is_running(store, "first")


def test_a_file_is_forgotten_when_a_later_look_finds_no_lease(
    folder: OwnerFolder, store: Store, watch: OwnerWatch
) -> None:
    """A claim that was under way when its process died is committed after the first look."""
    file = dead_file(folder, "host:1:a")
    assert report(store, watch) == []
    assert file.exists()
    late = running(store, "late", owner="host:1:a")

    assert [one.job_id for one in report(store, watch)] == [late.job_id]
    assert file.exists()

    assert report(store, watch) == []
    assert not file.exists()


def test_while_the_store_is_away_nothing_is_forgotten(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody listens there.
    store = Store(url="postgresql://nobody@127.0.0.1:1/none")
    folder = OwnerFolder(str(path), store=store)
    watch = OwnerWatch(folder)
    file = dead_file(folder, "host:1:a")

    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            report(store, watch)

    assert file.exists()
    store.close()


def test_a_child_of_ours_is_left_for_a_moment_to_who_knows_how_it_died(
    hold: Callable[..., Holder], folder: OwnerFolder
) -> None:
    clock = Clock()
    # setpriv becomes the holder: it is our own child.
    holder = hold()
    watch = OwnerWatch(folder, monotonic=clock)
    assert watch.look() == []
    clock.move(100)
    holder.kill()
    processes.wait_gone(holder.pid)

    assert watch.look() == []
    clock.move(SPARE_SECONDS - 0.01)
    assert watch.look() == []

    clock.move(0.02)
    assert watch.look() == [holder.owner]
    watch.forget(holder.owner)
    assert watch.look() == []
    assert watch._spared_since == {}


def test_who_is_not_our_child_is_not_spared(folder: OwnerFolder) -> None:
    watch = OwnerWatch(folder)
    file = dead_file(folder, "host:1:a")
    file.write_bytes(b"%d" % os.getppid())

    assert watch.look() == ["host:1:a"]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_two_watches_at_once_report_one_loss(
    database: str, request: pytest.FixtureRequest, path: Path
) -> None:
    url = request.getfixturevalue(f"{database}_url")
    stores = [Store(url=url), Store(url=url)]
    stores[0].tables.metadata.create_all(stores[0].engine)
    folder = OwnerFolder(str(path), store=stores[0])
    for number in range(10):
        running(stores[0], f"job{number}", owner="host:1:a")
    dead_file(folder, "host:1:a")
    barrier = threading.Barrier(2)
    seen: list[list[Vanished]] = []

    def look(store: Store) -> None:
        watch = OwnerWatch(OwnerFolder(str(path), store=store))
        barrier.wait()
        seen.append(report(store, watch))

    threads = [threading.Thread(target=look, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 2
    assert sorted(one.job_id for each in seen for one in each) == [f"job{n}" for n in range(10)]
    for store in stores:
        store.close()


# --- the runtime --------------------------------------------------------------------------------

SETTINGS = load(lambda _, default: default)
TASK = for_task(SETTINGS, {}, task="t")


@pytest.fixture
def runtime(store: Store, folder: OwnerFolder) -> Iterator[Runtime]:
    made = Runtime(store=store, settings=SETTINGS, worker="w", owner_folder=folder)
    yield made
    made.stop()
    owners._held.clear()


def test_a_runtime_has_its_file_before_its_first_claim_and_not_earlier(
    store: Store, folder: OwnerFolder, path: Path
) -> None:
    submitted(store)
    there: list[list[str]] = []
    runtime = Runtime(
        store=store,
        settings=SETTINGS,
        worker="w",
        owner_folder=folder,
        prepare=lambda: there.append(names(path)),
    )
    assert not path.exists()

    _, lease = runtime.claim(job_id="job", message_version=1, task_settings=TASK)

    assert lease is not None
    assert there == [[folder.name_of(runtime.owner)]]
    runtime.heartbeat.remove(lease)
    runtime.stop()
    assert names(path) == []


def test_a_runtime_that_stops_with_a_lease_leaves_its_file_to_the_kernel(
    runtime: Runtime, store: Store, path: Path, watch: OwnerWatch
) -> None:
    submitted(store)
    runtime.claim(job_id="job", message_version=1, task_settings=TASK)

    runtime.stop()

    assert len(names(path)) == 1
    assert watch.look() == []


def test_a_forked_child_has_nothing_of_its_parents_file(
    folder: OwnerFolder, path: Path, watch: OwnerWatch
) -> None:
    mine = OwnerFile(folder, "host:1:a")
    mine.create()

    child = os.fork()
    if child == 0:
        # Neither makes it anew nor removes it.
        mine.create()
        mine.remove()
        os._exit(len(owners._held) + 10 * len(OwnerWatch(folder).look()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watch.look() == []
    assert len(names(path)) == 1
    mine.remove()


def test_a_claim_goes_on_without_a_file(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.touch()
    folder = OwnerFolder(str(path), store=store)
    runtime = Runtime(store=store, settings=SETTINGS, worker="w", owner_folder=folder)
    submitted(store, "one")
    submitted(store, "two")

    with caplog.at_level(logging.WARNING):
        for job_id in ("one", "two"):
            _, lease = runtime.claim(job_id=job_id, message_version=1, task_settings=TASK)
            assert lease is not None
            runtime.heartbeat.remove(lease)
    runtime.stop()

    assert len(caplog.messages) == 1


def test_an_attempt_that_was_asked_to_stop_is_not_counted_when_its_process_has_gone(
    folder: OwnerFolder, store: Store, watch: OwnerWatch
) -> None:
    submitted(store)
    lease = claimed(store, owner="host:1:a")
    transitions.renew(store, [Renewal(lease, stop_requested=True)])
    dead_file(folder, "host:1:a")

    (vanished,) = report(store, watch)

    assert not vanished.is_counted
