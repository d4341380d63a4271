"""Owner files: a worker on the same host sees within a second that a process is gone.

Each process that claims holds the lock of a file of its own; the kernel frees it with the
process, however that dies, within a millisecond (design, section 5). A worker tries the locks of
its own store's files: got one = its owner is dead, and its leases need not run out.

Authoritative is the store: a dead owner's attempts end by token and owner, like any other loss.
No verdict, so that the lease decides, where there is no file, for another boot, another user, an
error, or a network file system, whose locks are another host's business. A process that was
stopped keeps its lock. ``flock`` and not POSIX ``lockf``, which any ``close`` of the file frees.

What it is not: it asks nothing of ``/proc`` about a process: ids come back.

One file, although it is long: who makes a file, who tries its lock and who sweeps it must agree on
every step, and are read against each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from celery_lease.records import Held, Vanished
from celery_lease.states import LossCause
from celery_lease.store import queries, transitions
from celery_lease.store.engine import Store

logger = logging.getLogger(__name__)

#: What the attempt of a dead owner gets as its reason.
REASON = "its process is gone (owner file)"
#: Programs that clean temporary folders go by the age (systemd-tmpfiles: ten days), so a watch
#: touches what is in use this often.
REFRESH_SECONDS = 3600.0
#: What nobody holds and nobody looks at is removed at this age: no lease is longer than a day.
LEFTOVER_SECONDS = 86400.0
#: How long a dead child of our own is left to who knows how it died. The pool looks every quarter
#: of a second; one without an event loop says it after eleven (celery-facts, section 4).
SPARE_SECONDS = 1.0
#: A fork waits this long for a file that is being made, then happens anyway.
FORK_WAIT_SECONDS = 5.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_NEW = ".new."
# Locks of these are the server's, or nobody's. FUSE may be anything, so it is no local fact.
_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|fuse.*|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs"
    "|panfs|smb.*|vboxsf|virtiofs|vmhgfs"
)


class OwnerFolder:
    """The private folder of owner files, seen from one boot and one store.

    Made before a worker forks, so that its children know what it found: an unusable folder is
    one warning a worker, and the end of the feature there.

    Args:
        path: ``lease_run_dir``; None for ``$XDG_RUNTIME_DIR/celery-lease``, else a folder in the
            temporary one.
        store: whose owners are looked for.
        boot_id: of this boot; None where the system has no such thing: off.
    """

    def __init__(self, path: str | None, *, store: Store, boot_id: str | None = None) -> None:
        boot_id = boot_id or _boot_id()
        self.path = Path(path) if path else default_folder()
        self._is_usable: bool | None = None if boot_id else False
        # A dash and not a dot: what is between the dots must hold none.
        self._prefix = f"{(boot_id or '').replace('-', '')}.{_digest(store)}."

    @property
    def is_usable(self) -> bool:
        """True where owner files work; the first look makes the folder, or warns once."""
        if self._is_usable is None:
            problem = self.problem()
            self._is_usable = problem is None
            if problem:
                self.give_up(problem)
        return self._is_usable

    def problem(self) -> str | None:
        """Make the folder and say why it cannot be used; None when it can.

        .. versionadded:: 0.1
        """
        try:
            with suppress(FileExistsError):
                self.path.mkdir(0o700)
            kind = network_file_system(self.path)
            if kind is not None:
                return f"it is on a file system whose locks may be another host's: {kind}"
            with self.opened() as folder:
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
                    return "it cannot be written to"
        except OSError as error:
            return error.strerror or str(error)
        return None

    def give_up(self, problem: str) -> None:
        """Do without from now on, and say so once."""
        self._is_usable = False
        logger.warning(
            "lease.owner.unwatched folder=%s problem=%r: a worker killed on this host is noticed "
            "when its leases end; name a private folder in lease_run_dir",
            self.path,
            problem,
        )

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor of the folder, checked: all is done relative to it.

        Raises:
            OSError: it is not there, or not a private folder of ours.
        """
        # Nobody else may put a link in our way, nor give us a folder that he can write to.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid():
                raise PermissionError(0, f"it belongs to user {found.st_uid}")
            if found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise PermissionError(0, f"others may use it: its mode is {mode:o}, not 700")
            yield folder
        finally:
            os.close(folder)

    def name_of(self, owner: str) -> str:
        """Return the file name of an owner."""
        return self._prefix + quote(owner, safe=":")

    def owner_of(self, name: str) -> str | None:
        """Return whose file it is; None for a file of another boot, another store, or unfinished.

        The prefix is compared whole: what another store's owner calls itself does not matter.
        """
        if not name.startswith(self._prefix):
            return None
        return unquote(name[len(self._prefix) :]) or None


class OwnerFile:
    """The locked file that says that this process lives.

    Args:
        folder: where.
        owner: this process's name in the store.
    """

    def __init__(self, folder: OwnerFolder, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._pid = os.getpid()

    def create(self) -> None:
        """Have the file before the first claim; no cost once it is there.

        What goes wrong is one warning: claims do without it.
        """
        if self in _held or not self._folder.is_usable or self._pid != os.getpid():
            return
        # No fork while a descriptor is open that the child would not know of.
        with _forking:
            if self in _held:
                return
            try:
                with self._folder.opened() as folder:
                    _held[self] = _make(folder, self._folder.name_of(self._owner))
            except OSError as error:
                self._folder.give_up(error.strerror or str(error))

    def remove(self) -> None:
        """Take the file away: an orderly end with no lease left is nobody's loss."""
        with _forking:
            descriptor = _held.pop(self, None)
            if descriptor is None:
                return
            try:
                # Before the lock is freed: a watch that gets it sees that the file has gone.
                with suppress(OSError), self._folder.opened() as folder:
                    os.unlink(self._folder.name_of(self._owner), dir_fd=folder)
            finally:
                os.close(descriptor)


class OwnerWatch:
    """Looks for owners of this host and store that are dead.

    Args:
        folder: where.
        now: the clock that file times are compared with, seconds since 1970.
        monotonic: the clock of ``SPARE_SECONDS``.
    """

    def __init__(
        self,
        folder: OwnerFolder,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._now = now
        self._monotonic = monotonic
        self._spared_since: dict[str, float] = {}
        self._has_swept = False
        self._dead: set[str] = set()
        self._dead_before: set[str] = set()

    def look(self) -> list[str]:
        """Return the owners whose process is gone, in the order of their names.

        One listing, and one try of a lock a file: nothing is asked of the store. A child of this
        process is left for ``SPARE_SECONDS`` to whoever knows its signal or exit code.
        """
        dead: list[str] = []
        if self._folder.is_usable:
            # A folder that was removed meanwhile, or is not ours any more: no verdict.
            with suppress(OSError), self._folder.opened() as folder:
                names = sorted(os.listdir(folder))  # noqa: PTH208  by descriptor
                for gone in self._spared_since.keys() - set(names):
                    del self._spared_since[gone]
                for name in names:
                    owner = self._folder.owner_of(name)
                    if owner is None:
                        if not self._has_swept:
                            self._sweep(folder, name)
                    elif self._is_free(folder, name) and not self._is_spared(folder, name):
                        dead.append(owner)
                self._has_swept = True
        self._dead_before, self._dead = self._dead, set(dead)
        return dead

    def _is_spared(self, folder: int, name: str) -> bool:
        with suppress(OSError), _opened(folder, name) as descriptor:
            if os.read(descriptor, 32) == b"%d" % os.getpid():
                now = self._monotonic()
                return now < self._spared_since.setdefault(name, now) + SPARE_SECONDS
        return False

    def was_dead_before(self, owner: str) -> bool:
        """Tell whether the look before the last one had found this owner dead already."""
        return owner in self._dead_before

    def forget(self, owner: str) -> None:
        """Remove the file of a dead owner: the store has been told."""
        with suppress(OSError), self._folder.opened() as folder:
            os.unlink(self._folder.name_of(owner), dir_fd=folder)

    def _is_free(self, folder: int, name: str) -> bool:
        """Tell whether nobody holds a file's lock; False in every doubt."""
        with suppress(OSError), _opened(folder, name) as descriptor:
            try:
                # Shared: two watches at once both find out, and the store takes one report.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._age(descriptor) > REFRESH_SECONDS:
                    os.utime(descriptor)
                return False
            found = os.fstat(descriptor)
            # Without a name its owner has removed it, in good order, since the listing.
            return (
                stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
            )
        return False

    def _sweep(self, folder: int, name: str) -> None:
        """Remove an old leftover that no watch looks at: of a start that died, a boot, a store."""
        with suppress(OSError):
            with _opened(folder, name) as descriptor:
                is_old = self._age(descriptor) > LEFTOVER_SECONDS
            if is_old and self._is_free(folder, name):
                os.unlink(name, dir_fd=folder)

    def _age(self, descriptor: int) -> float:
        return self._now() - os.fstat(descriptor).st_mtime


def report_dead_owners(
    store: Store,
    watch: OwnerWatch,
    *,
    lost_backoff: Sequence[float],
    on_vanished: Callable[[Vanished], None],
    is_ours: Callable[[str], bool] = lambda _: False,
) -> int:
    """Look once, and report the leases of every dead owner lost; return how many this call ended.

    A file is forgotten when a second look finds no lease under its owner: the claim that a
    process sent in the instant of its death may be committed after the first. If this process
    dies between a commit and ``on_vanished``, the reaper dispatches the job.

    Args:
        store: the store.
        watch: finds the dead.
        lost_backoff: ``lease_lost_backoff``, seconds.
        on_vanished: called with each loss, after its commit: tells of it, dispatches its job.
        is_ours: tells of an owner that it is a child of this process, whose pool knows better how
            it died: it is left to it until the second look.

    Raises:
        StoreUnavailable: nothing more is reported, and nothing forgotten that the store was not
            told; the next look goes on from there.
    """
    count = 0
    for owner in watch.look():
        if is_ours(owner) and not watch.was_dead_before(owner):
            continue
        ended = _report_dead_owner(store, owner, lost_backoff=lost_backoff, on_vanished=on_vanished)
        count += ended
        if not ended and watch.was_dead_before(owner):
            watch.forget(owner)
    return count


def default_folder() -> Path:
    """Return where owner files are without ``lease_run_dir``.

    Two workers see each other only in one folder: one with a private ``/tmp``, or started
    without the other's ``XDG_RUNTIME_DIR``, waits for the lease.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime, "celery-lease")
    return Path(tempfile.gettempdir(), f"celery-lease-{os.geteuid()}")


def network_file_system(path: Path) -> str | None:
    """Return the type of a path's file system if its locks may be another host's, else None."""
    kind = _file_system(path)
    return kind if kind is not None and _NETWORK.fullmatch(kind) else None


def _report_dead_owner(
    store: Store,
    owner: str,
    *,
    lost_backoff: Sequence[float],
    on_vanished: Callable[[Vanished], None],
) -> int:
    count = 0
    for attempt in queries.live_attempts(store, owner=owner):
        vanished = transitions.lost(
            store,
            Held(attempt.job_id, attempt.fencing_token, owner),
            cause=LossCause.LOST,
            reason=REASON,
            lost_backoff=lost_backoff,
        )
        if vanished is not None:
            count += 1
            on_vanished(vanished)
    return count


def _make(folder: int, name: str) -> int:
    """Make a file, lock it, then give it the name that watches look at; return its descriptor."""
    temporary = f"{_NEW}{uuid.uuid4().hex}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whose child it is: that process may know of its death by other ways.
        os.write(descriptor, b"%d" % os.getppid())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return descriptor


@contextmanager
def _opened(folder: int, name: str) -> Iterator[int]:
    # A fifo that somebody put there must not make us wait.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def _digest(store: Store) -> str:
    """Return what two apps with one store have in common, without the password."""
    parts = [store.masked_url, store.table_prefix, store.schema or ""]
    if re.search(r":///[^/]", store.masked_url):
        # A file named from the working directory: the same words in another one mean another.
        parts.append(str(Path.cwd()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that a path is on, None where it cannot be told.

    From the table of mounts, since Python's ``statvfs`` has no type; by the longest mount point
    and not by the device, which btrfs makes up for each subvolume.
    """
    try:
        place = os.path.realpath(path)
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = "", None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = _unescaped(left.split()[4])
        # A later mount on the same point hides the earlier one.
        if len(point) >= len(best) and (place + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, right.split()[0]
    return kind


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


#: The files of this process and their descriptors, open for as long as it lives.
_held: dict[OwnerFile, int] = {}
# Of one thread or none, so that a signal handler may fork.
_forking = threading.RLock()
_has_lock = False


def _before_fork() -> None:
    global _has_lock  # noqa: PLW0603  told to the two hooks after the fork
    _has_lock = _forking.acquire(timeout=FORK_WAIT_SECONDS)


def _after_fork_in_parent() -> None:
    if _has_lock:
        _forking.release()


def _after_fork_in_child() -> None:
    global _forking  # noqa: PLW0603  its owner may be a thread that is not here
    _forking = threading.RLock()
    for descriptor in _held.values():
        # Closed, never unlocked: the lock is the parent's too, and unlocking would free it.
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
