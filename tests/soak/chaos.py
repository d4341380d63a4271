"""The chaos loop: one fault after the other, chosen by one seed, each put right after a while.

A fault has a target; a target that is being harmed is left alone until it is put right, and faults
of different targets overlap. What a seed gives is the order of the faults and their lengths; which
child dies under which job is the machine's doing.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kombu.exceptions import OperationalError

from tests.soak.place import LEASE, Place
from tests.soak.witness import engine_of
from tests.support import processes

if TYPE_CHECKING:
    from tests.support.workers import CeleryWorker

#: seconds that a worker gets after SIGTERM or SIGQUIT before it is killed
GRACE = 3.0


@dataclass(order=True)
class _Repair:
    at: float
    number: int
    target: str = field(compare=False)
    run: Callable[[], object] = field(compare=False)


@dataclass(frozen=True)
class Harm:
    """What a fault did.

    Args:
        lasts: seconds until it is put right.
        repair: puts it right.
        detail: for the log.
    """

    lasts: float
    repair: Callable[[], object] = lambda: None
    detail: str = ""


class Chaos:
    """Does harm to a place.

    Args:
        place: the place.
        seed: of what is done.
        pause: seconds between two faults, on average.
        only: names of the faults to choose from, empty for all.
    """

    def __init__(
        self, place: Place, *, seed: int, pause: float = 2.0, only: Sequence[str] = ()
    ) -> None:
        self._place = place
        self._random = random.Random(f"chaos {seed}")
        self._pause = pause
        self._repairs: list[_Repair] = []
        self._numbers = itertools.count()
        self._harmed: set[str] = set()
        self._started = time.monotonic()
        self._next = self._started + self._random.expovariate(1 / pause)
        self.counts: Counter[str] = Counter()
        #: what was done when: (seconds, text)
        self.log: list[tuple[float, str]] = []
        #: ends of workers that nobody here caused
        self.unplanned: list[str] = []
        self._faults = [
            fault for fault in FAULTS if fault.target != "store" or place.store_cable is not None
        ]
        if place.store is None:
            self._faults += SQLITE_FAULTS
        if only:
            self._faults = [fault for fault in self._faults if fault.name in only]
            assert self._faults, only

    def step(self) -> None:
        """Put right what is due, then do the next harm if it is due."""
        now = time.monotonic()
        while self._repairs and self._repairs[0].at <= now:
            self._put_right(heapq.heappop(self._repairs))
        self._raise_the_dead()
        if now >= self._next:
            self._next = now + self._random.expovariate(1 / self._pause)
            self._harm()

    def end(self) -> None:
        """Put everything right; what workers are left run, and the others are started."""
        while self._repairs:
            self._put_right(heapq.heappop(self._repairs))
        self._raise_the_dead()
        for process in (*self._place.workers, self._place.beat):
            process.wait_ready(60)

    def _harm(self) -> None:
        weights = [fault.weight for fault in self._faults]
        (fault,) = self._random.choices(self._faults, weights=weights)
        target = fault.target
        if target == "worker":
            target = f"worker{self._random.randrange(len(self._place.workers))}"
        # The dice are thrown whether or not the target is there: a seed stays a seed.
        dice = random.Random(self._random.random())
        if target in self._harmed:
            return
        subject = (
            self._place.workers[int(target.removeprefix("worker"))]
            if target.startswith("worker")
            else None
        )
        harm = fault.run(self._place, subject, dice)
        if harm is None:
            return
        self.counts[fault.name] += 1
        self._note(f"{fault.name} {target} for {harm.lasts:.1f} s {harm.detail}")
        self._harmed.add(target)
        repair = _Repair(time.monotonic() + harm.lasts, next(self._numbers), target, harm.repair)
        heapq.heappush(self._repairs, repair)

    def _put_right(self, repair: _Repair) -> None:
        repair.run()
        self._harmed.discard(repair.target)
        self._note(f"put right {repair.target}")

    def _raise_the_dead(self) -> None:
        """Start what has ended by itself, as an init system would."""
        for process in (*self._place.workers, self._place.beat):
            if process.name not in self._harmed and not process.is_running:
                self.unplanned.append(
                    f"{process.name} ended with {process.exit_code} "
                    f"{time.monotonic() - self._started:.1f} s after the start"
                )
                self._note(self.unplanned[-1])
                process.start()

    def _note(self, text: str) -> None:
        self.log.append((round(time.monotonic() - self._started, 3), text))


# --- the faults ---------------------------------------------------------------------------------

Run = Callable[[Place, Any, random.Random], "Harm | None"]


@dataclass(frozen=True)
class Fault:
    """One way to do harm.

    Args:
        name: for the report.
        target: ``worker`` (any), or what it is done to.
        weight: how often, against the others.
        run: does it; None when there was nothing to harm.
    """

    name: str
    target: str
    weight: float
    run: Run


def _a_child(place: Place, worker: CeleryWorker, dice: random.Random) -> int | None:
    """Choose a child, mostly one that runs something: an idle one is little loss."""
    children = worker.children()
    running = sorted(place.running_pids() & set(children)) if dice.random() < 0.8 else []
    return dice.choice(running or children) if children else None


def _kill_child(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm | None:
    child = _a_child(place, worker, dice)
    if child is None:
        return None
    processes.send(child, signal.SIGKILL)
    return Harm(0.0, detail=str(child))


def _freeze_child(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm | None:
    child = _a_child(place, worker, dice)
    if child is None:
        return None
    processes.send(child, signal.SIGSTOP)
    lasts = LEASE * dice.uniform(1.0, 2.6)
    return Harm(lasts, lambda: processes.send(child, signal.SIGCONT), str(child))


def _kill_worker(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm:
    worker.kill_group()
    return Harm(dice.uniform(0, 3), worker.start)


def _kill_main(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm:
    family = processes.tree(worker.pid)
    processes.send(worker.pid, signal.SIGKILL)
    worker.wait()

    def again() -> None:
        # Its children die by themselves (PDEATHSIG), but for those that are frozen.
        for one in family:
            processes.kill_tree(one)
        worker.start()

    return Harm(dice.uniform(0, 3), again)


def _freeze_worker(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm:
    worker.freeze()
    return Harm(LEASE * dice.uniform(0.5, 2.6), worker.thaw)


def _stop(number: int, *, is_group: bool = False) -> Run:
    def run(place: Place, worker: CeleryWorker, dice: random.Random) -> Harm:
        if is_group:
            worker.kill_group(number)
        else:
            worker.send(number)

        def again() -> None:
            if worker.is_running:
                worker.kill_group()
            worker.start()

        return Harm(GRACE, again)

    return run


def _cut(cable: str, longest: float) -> Run:
    def run(place: Place, _: None, dice: random.Random) -> Harm:
        proxy = getattr(place, cable)
        proxy.cut()
        return Harm(dice.uniform(0, longest), proxy.heal)

    return run


def _stall(cable: str, longest: float) -> Run:
    def run(place: Place, _: None, dice: random.Random) -> Harm:
        proxy = getattr(place, cable)
        proxy.stall()
        return Harm(dice.uniform(0.5, longest), proxy.heal)

    return run


def _restart(server: str, *, kill: bool) -> Run:
    def run(place: Place, _: None, dice: random.Random) -> Harm:
        subject = getattr(place, server)
        if kill:
            subject.kill()
        else:
            subject.stop()
        return Harm(dice.uniform(0, 2), subject.start)

    return run


def _freeze_server(server: str, longest: float) -> Run:
    def run(place: Place, _: None, dice: random.Random) -> Harm:
        subject = getattr(place, server)
        subject.freeze()
        return Harm(dice.uniform(0.5, longest), subject.thaw)

    return run


def _lose_messages(place: Place, _: None, dice: random.Random) -> Harm:
    place.lose_messages()
    return Harm(0.0)


def _double_messages(place: Place, _: None, dice: random.Random) -> Harm | None:
    sent = 0
    # A broker that was restarted a moment ago may still hang up.
    with suppress(OSError, OperationalError):
        sent = place.publish_again(dice.randint(1, 20))
    return Harm(0.0, detail=f"{sent} messages") if sent else None


def _stop_beat(place: Place, _: None, dice: random.Random) -> Harm:
    place.beat.kill_group()
    return Harm(dice.uniform(1, 8), place.beat.start)


def _hold_sqlite(place: Place, _: None, dice: random.Random) -> Harm:
    engine = engine_of(place.store_url, isolation_level="AUTOCOMMIT")
    connection = engine.connect()
    connection.exec_driver_sql("BEGIN IMMEDIATE")

    def let_go() -> None:
        connection.exec_driver_sql("ROLLBACK")
        connection.close()
        engine.dispose()

    return Harm(dice.uniform(0.2, LEASE * 0.8), let_go)


FAULTS: Final = (
    Fault("kill child", "worker", 20, _kill_child),
    Fault("freeze child", "worker", 16, _freeze_child),
    Fault("kill worker", "worker", 6, _kill_worker),
    Fault("kill main process", "worker", 4, _kill_main),
    Fault("freeze worker", "worker", 6, _freeze_worker),
    Fault("SIGTERM, SIGKILL", "worker", 6, _stop(signal.SIGTERM)),
    Fault("SIGQUIT, SIGKILL", "worker", 4, _stop(signal.SIGQUIT)),
    Fault("SIGTERM to group, SIGKILL", "worker", 3, _stop(signal.SIGTERM, is_group=True)),
    Fault("cut broker", "broker", 5, _cut("broker_cable", 3)),
    Fault("stall broker", "broker", 3, _stall("broker_cable", 5)),
    Fault("restart broker", "broker", 2, _restart("broker", kill=False)),
    Fault("kill broker", "broker", 2, _restart("broker", kill=True)),
    Fault("lose messages", "broker", 4, _lose_messages),
    Fault("double messages", "broker", 8, _double_messages),
    Fault("cut store", "store", 5, _cut("store_cable", LEASE)),
    Fault("stall store", "store", 3, _stall("store_cable", LEASE * 1.5)),
    Fault("restart store", "store", 2, _restart("store", kill=False)),
    Fault("kill store", "store", 2, _restart("store", kill=True)),
    Fault("freeze store", "store", 3, _freeze_server("store", LEASE * 1.5)),
    Fault("kill beat", "beat", 3, _stop_beat),
)
SQLITE_FAULTS: Final = [Fault("hold the writer's lock", "lock", 8, _hold_sqlite)]
