"""K8: a child is killed on the way from the end of a body to the end of Celery's bookkeeping.

At each point of that way, in each shape of a canvas, on each result backend that supports the
shape: all values are right, each leased body runs once, every job is settled, and nothing is left
on the broker. One worker has all shapes of a backend at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from tests.conftest import _numbers
from tests.faults.dying import ERRED, POINTS, condemn, pending
from tests.support.servers import External
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker
from tests.worker.site import Site, open_site

# Celery 5.7 stores results by what redis-py 8 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

WORKER_APP = "tests.faults.dying_worker"
#: A job that is killed at one point after the other: each replay dies a step further.
EACH = "each in turn"


@dataclass
class Cell:
    """One canvas, and what must come of it.

    Attributes:
        tag: of its jobs and its ledger.
        canvas: what is sent.
        values: what each job returns, by name; None for one that fails.
        unnamed: jobs whose id Celery makes: links and errbacks.
        never: bodies that do not run.
        last: jobs that nothing follows.
        points: where its victims are killed.
        victims: jobs that are killed there.
        result: what its caller holds, for RPC.
    """

    tag: str
    canvas: Any
    values: dict[str, Any]
    unnamed: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    result: Any = None

    def job_id(self, name: str) -> str:
        return f"{self.tag}-{name}"

    @property
    def named(self) -> list[str]:
        return [name for name in self.values if name not in self.unnamed]

    def __str__(self) -> str:
        return f"{self.tag}: {self.victims} killed at {self.points}"


class Steps:
    """Makes the signatures of one cell."""

    def __init__(self, site: Site, tag: str) -> None:
        self._site = site
        self.tag = tag

    def __call__(self, name: str, **kwargs: Any) -> Any:
        return self.unnamed(name, **kwargs).set(task_id=f"{self.tag}-{name}")

    def unnamed(self, name: str, task: str = "leased.work", **kwargs: Any) -> Any:
        return self._site.task(task).s(tag=self.tag, name=name, **kwargs)

    def on_error(self, name: str) -> Any:
        return self.unnamed(name, "leased.on_error")


# --- shapes -------------------------------------------------------------------------------------


def link(step: Steps) -> Cell:
    canvas = step("a")
    canvas.link(step.unnamed("b"))
    canvas.link(step.unnamed("c"))
    values = {"a": ["a"], "b": ["b", ["a"]], "c": ["c", ["a"]]}
    return Cell(step.tag, canvas, values, unnamed=("b", "c"))


def link_error(step: Steps) -> Cell:
    canvas = step("a", then="fail a").on_error(step.on_error("e"))
    return Cell(step.tag, canvas, {"a": None, "e": ["e", f"{step.tag}-a"]}, unnamed=("e",))


def link_of_canvas(step: Steps) -> Cell:
    """A chain, a group and a chord as callbacks."""
    new = step.unnamed
    canvas = step("a")
    canvas.link(chain(new("b"), new("c")))
    canvas.link(group(new("d"), new("e")))
    canvas.link(chord([new("f"), chain(new("g"), new("h"))], new("i")))
    values: dict[str, Any] = {name: [name, ["a"]] for name in "abdefg"} | {"a": ["a"]}
    values |= {name: [name, values[before]] for name, before in (("c", "b"), ("h", "g"))}
    values["i"] = ["i", [values["f"], values["h"]]]
    return Cell(step.tag, canvas, values, unnamed=tuple("bcdefghi"))


def in_a_chain(step: Steps) -> Cell:
    canvas = chain(step("a"), step("b"), step("c"))
    return Cell(
        step.tag, canvas, {"a": ["a"], "b": ["b", ["a"]], "c": ["c", ["b", ["a"]]]}, last=("c",)
    )


def in_a_group(step: Steps) -> Cell:
    canvas = group(step(name) for name in "abc")
    return Cell(step.tag, canvas, {name: [name] for name in "abc"}, last=tuple("abc"))


def in_a_chord(step: Steps) -> Cell:
    parts = [[name] for name in "abc"]
    canvas = chord([step(name) for name in "abc"], step("d"))
    return Cell(
        step.tag, canvas, {**{name: [name] for name in "abc"}, "d": ["d", parts]}, last=("d",)
    )


def nested(step: Steps) -> Cell:
    """A chain with a chord in it, that has a chain in it."""
    canvas = chain(step("a"), chord([chain(step("b"), step("c")), step("d")], step("e")), step("f"))
    values: dict[str, Any] = {"a": ["a"], "b": ["b", ["a"]], "d": ["d", ["a"]]}
    values["c"] = ["c", values["b"]]
    values["e"] = ["e", [values["c"], values["d"]]]
    values["f"] = ["f", values["e"]]
    return Cell(step.tag, canvas, values, last=("f",))


def failing_chord(step: Steps) -> Cell:
    body = step("d").on_error(step.on_error("e"))
    canvas = chord([step("a"), step("b", then="fail b")], body)
    values = {"a": ["a"], "b": None, "e": ["e", f"{step.tag}-d"]}
    return Cell(step.tag, canvas, values, unnamed=("e",), never=("d",))


#: Each shape, whom of it the short form kills, and whom the long one: a letter is a job, a word are
#: those of one canvas. Of a chord all parts are killed: one of them is the last one.
SHAPES: Mapping[str, tuple[Callable[[Steps], Cell], tuple[str, ...], tuple[str, ...]]] = {
    "link": (link, ("a",), ()),
    "link of canvas": (link_of_canvas, ("a",), ()),
    "link_error": (link_error, ("a",), ()),
    "chain": (in_a_chain, ("b",), ("a", "c", "abc")),
    "group": (in_a_group, ("b",), ("abc",)),
    "chord": (in_a_chord, ("abc",), ("a", "d", "abcd")),
    "nested": (nested, ("c",), ("a", "b", "d", "e", "abcdef")),
    "failing chord": (failing_chord, ("b",), ("a", "ab")),
}
CHORDS = ("link of canvas", "chord", "nested", "failing chord")

#: A reaper that tells again soon and often, beside what a worker tells when it sees a child die.
PROMPT = {
    "lease_reaper_interval": 1.0,
    "lease_settle_grace": 1.0,
    # Between two replays, and how soon a job that nobody took is sent again.
    "lease_queued_timeout": 5.0,
}

#: More cells than these would wait so long for a child that the reaper sends them again.
AT_ONCE = 24

BACKENDS = ("redis", "database", "lease", "rpc")


@contextmanager
def site_of(
    backend: str, valkey: Any, database: str, folder: Path, **settings: Any
) -> Iterator[Site]:
    """A site with this kind of result backend, and a worker whose children die when told to."""
    redis_url = valkey.url if isinstance(valkey, External) else valkey.url_for(next(_numbers))
    urls = {"redis": "", "database": f"db+{database}", "lease": "lease://", "rpc": "rpc://"}
    with (
        open_site(redis_url, database, backend=urls[backend], **settings) as site,
        CeleryWorker(
            WORKER_APP,
            name=f"dying-{backend}",
            concurrency=4,
            env=site.worker_env(),
            folder=folder,
            arguments=("--prefetch-multiplier", "1"),
        ),
    ):
        yield site


@pytest.mark.parametrize(
    "form",
    ["short", pytest.param("long", marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_killed_after_its_commit_costs_no_result_and_no_second_body(
    backend: str, form: str, valkey: Any, postgresql_url: str, tmp_path: Path
) -> None:
    """Nor a loss: killed between its result's store and its own end it has succeeded (B056)."""
    with (
        site_of(backend, valkey, postgresql_url, tmp_path, **PROMPT) as site,
        site.redis() as client,
    ):
        cells: list[Cell] = []
        wanted = list(cells_of(backend, form))
        for first in range(0, len(wanted), AT_ONCE):
            cells += [send(site, client, *one) for one in wanted[first : first + AT_ONCE]]
            wait_told(site, cells)
        problems = [f"{cell}: {why}" for cell in cells if (why := problem_of(site, cell, backend))]
        assert not problems, "\n".join(problems)
        assert_nothing_more(site, cells)
        assert pending(client) == unreachable(site, cells, backend)


def cells_of(backend: str, form: str) -> Iterator[tuple[str, str, str]]:
    """Give the shape, the point and the victims of each cell."""
    if form == "short":
        yield "link_error", ERRED, "a"
        if backend in {"redis", "lease"}:
            # Of the database backend it is a task of Celery's, without a lease, that sends them.
            yield "failing chord", ERRED, "d"
    for shape, (_, few, more) in SHAPES.items():
        if backend == "rpc" and shape in CHORDS:
            continue
        if form == "short":
            yield from ((shape, point, victims) for point in POINTS for victims in few)
        else:
            yield from ((shape, point, victims) for point in POINTS for victims in more)
            yield from ((shape, EACH, victims) for victims in few)


def test_a_callback_without_a_lease_runs_again_if_it_had_been_sent(
    valkey: Any, postgresql_url: str, tmp_path: Path
) -> None:
    """It is at-least-once, and told once more by one replay; a leased one beside it runs once."""
    with site_of("redis", valkey, postgresql_url, tmp_path) as site, site.redis() as client:
        tags = {point: f"{point}-{site.tag()}" for point in POINTS}
        for point, tag in tags.items():
            step = Steps(site, tag)
            canvas = step("a")
            canvas.link(step.unnamed("b", "plain.work"))
            canvas.link(step.unnamed("c"))
            condemn(client, point, [f"{tag}-a"])
            canvas.apply_async()

        for point, tag in tags.items():
            times = 1 if point == "committed" else 2
            site.until(f"{tag}-a", "succeeded", settled=True)
            eventually(lambda tag=tag, times=times: site.facts(tag).count("b") == times, timeout=15)
        eventually(lambda: not client.llen("celery") and not client.hlen("unacked"))
        for point, tag in tags.items():
            expected = {"a": 1, "b": 1 if point == "committed" else 2, "c": 1}
            eventually(lambda tag=tag: "c" in site.facts(tag))
            assert Counter(site.facts(tag)) == expected, point


@pytest.mark.parametrize("shape", ["chord", "failing chord"])
def test_rpc_refuses_chords(shape: str, make_site: Callable[..., Site], sqlite_url: str) -> None:
    """So there is nothing of theirs to lose: nothing was recorded, nothing is on the broker."""
    site = make_site(sqlite_url, backend="rpc://")

    with pytest.raises(NotImplementedError, match="does not support chords"):
        SHAPES[shape][0](Steps(site, "refused")).canvas.apply_async()

    assert site.jobs() == site.queued("celery") == []


def send(site: Site, client: Any, shape: str, point: str, victims: str) -> Cell:
    tag = f"{shape}-{site.tag()}".replace(" ", "-")
    cell = SHAPES[shape][0](Steps(site, tag))
    cell.points = POINTS if point == EACH else (point,)
    cell.victims = tuple(victims)
    for one in cell.points:
        condemn(client, one, [cell.job_id(victim) for victim in cell.victims])
    # Others than RPC's can be asked for by id. What is kept, and a canvas keeps them, would be
    # collected after the site is closed, and connect again.
    result, cell.canvas = cell.canvas.apply_async(), None
    cell.result = result if site.backend == "rpc://" else None
    return cell


# --- what must hold -----------------------------------------------------------------------------


def wait_told(site: Site, cells: list[Cell]) -> None:
    """Wait until every job is settled, every body has run, and the broker is empty."""
    expected = sum(len(cell.values) for cell in cells)

    def missing() -> list[str]:
        jobs = site.jobs()
        problems = [site.told(job["id"]) for job in jobs if job["settled_at"] is None]
        if len(jobs) < expected:
            problems.append(f"{len(jobs)} of {expected} jobs")
        with site.redis() as client:
            if client.llen("celery") or client.hlen("unacked"):
                problems.append("messages on the broker")
        return problems

    def told() -> bool:
        site.run_pass()
        return not missing()

    eventually(told, timeout=90, interval=0.5, what=lambda: "\n".join(missing()))


def problem_of(site: Site, cell: Cell, backend: str) -> str | None:
    """Return what is wrong with a cell when all has been said, None if nothing is."""
    try:
        assert_right(site, cell, backend)
    except AssertionError as error:
        return str(error)
    return None


def assert_right(site: Site, cell: Cell, backend: str) -> None:
    assert Counter(site.facts(cell.tag)) == dict.fromkeys(cell.values, 1)
    for name in cell.named:
        job = site.job(cell.job_id(name))
        state = "failed" if cell.values[name] is None else "succeeded"
        assert (job["state"], job["lost_count"], job["accepted_attempt"]) == (state, 0, 1)
        assert len(site.attempts(job["id"])) == 1, site.told(job["id"])
    for name, (status, result) in outcomes(site, cell, backend).items():
        value = cell.values[name]
        assert status == ("FAILURE" if value is None else "SUCCESS")
        assert repr(result) == repr(ValueError(name)) if value is None else result == value
    for name in cell.never:
        meta = site.app.backend.get_task_meta(cell.job_id(name), cache=False)
        assert (meta["status"], type(meta["result"])) == ("FAILURE", ChordError)


def outcomes(site: Site, cell: Cell, backend: str) -> dict[str, tuple[str, Any]]:
    """Return what Celery says to the caller: RPC what it has sent to him, others of each job."""
    if backend == "rpc":
        found = {one: one.get(timeout=10, propagate=False) for one in held(cell.result)}
        return {one.id.rpartition("-")[2]: (one.state, result) for one, result in found.items()}
    metas = {
        name: site.app.backend.get_task_meta(cell.job_id(name), cache=False) for name in cell.named
    }
    return {name: (meta["status"], meta["result"]) for name, meta in metas.items()}


def held(result: Any) -> list[Any]:
    """Return the results of a group's members, or of a chain's steps."""
    if hasattr(result, "results"):
        return list(result.results)
    return [result] if result.parent is None else [result, *held(result.parent)]


def assert_nothing_more(site: Site, cells: list[Cell]) -> None:
    """Assert that there is no job but those of the cells, each with its value."""
    jobs = site.jobs()
    assert len(jobs) == sum(len(cell.values) for cell in cells), sorted(job["id"] for job in jobs)
    values = [bytes(job["result"]).decode() for job in jobs if job["state"] == "succeeded"]
    expected = [value for cell in cells for value in cell.values.values() if value is not None]
    assert Counter(values) == Counter(json.dumps(value) for value in expected)


def unreachable(site: Site, cells: list[Cell], backend: str) -> set[str]:
    """Return the sentences that are never carried out: the point is not on the way of that job."""
    found = set()
    for cell in cells:
        for name in cell.victims:
            if "sent" in cell.points and cell.values.get(name) is None:
                # A failure is stored before anything is sent.
                found.add(f"sent {cell.job_id(name)}")
            if "told" in cell.points and backend == "lease" and name in cell.last:
                # Nothing follows it: its commit was all of its bookkeeping, and is not told again.
                job = site.job(cell.job_id(name))
                assert job["settled_at"] == job["finished_at"], site.told(job["id"])
                past = POINTS[1:] if "committed" in cell.points else ("told",)
                found |= {f"{one} {job['id']}" for one in past}
    return found
