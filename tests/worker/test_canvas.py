"""The same canvas with and without leases: the same results, the same bodies, the same errbacks."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError
from celery.result import GroupResult

from celery_lease.extension import extension_of
from celery_lease.store import transitions
from tests.conftest import _numbers
from tests.support.databases import new_database
from tests.support.servers import External
from tests.support.waiting import eventually
from tests.support.workers import CeleryWorker
from tests.worker.apps.twins import KINDS
from tests.worker.site import WORKER_APP, Site, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Celery 5.7 stores results by what redis-py 8 calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),
    pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header"),
]


SETTINGS = {
    # Long: an errback that Celery calls itself is called again by a replay.
    "lease_settle_grace": 5.0,
    # Else a message of a plain task is gone while its body still runs.
    "task_acks_late": True,
    # Two losses are the end of a job, and the second attempt comes at once.
    "lease_max_attempts": 2,
    "lease_lost_backoff": (0.0,),
}


@pytest.fixture(scope="module", params=["redis", "lease"])
def place(
    request: pytest.FixtureRequest,
    valkey: Any,
    postgresql: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A site with this result backend, and one worker with four children."""
    redis_url = valkey.url if isinstance(valkey, External) else valkey.url_for(next(_numbers))
    backend = {"redis": "", "lease": "lease://"}[request.param]
    with (
        new_database(postgresql.url) as store_url,
        open_site(redis_url, store_url, backend=backend, **SETTINGS) as site,
        CeleryWorker(
            WORKER_APP,
            name=f"canvas-{request.param}",
            concurrency=4,
            env=site.worker_env(),
            folder=tmp_path_factory.mktemp("canvas"),
            arguments=("--prefetch-multiplier", "1"),
        ),
    ):
        yield site


class Making:
    """Makes the signatures of one run of a canvas.

    Args:
        site: where it runs.
        kind: ``plain`` or ``leased``.
    """

    def __init__(self, site: Site, kind: str) -> None:
        self._site = site
        self.kind = kind
        self.tag = site.tag()

    def __call__(self, name: str, **kwargs: Any) -> Any:
        return self._site.task(f"{self.kind}.work").s(tag=self.tag, name=name, **kwargs)

    def many(self, names: str, **kwargs: Any) -> list[Any]:
        return [self(name, **kwargs) for name in names]

    def on_error(self, name: str, *, told: bool = False) -> Any:
        task = f"{self.kind}.on_error{'_told' if told else ''}"
        return self._site.task(task).s(tag=self.tag, name=name)

    def named(self, name: str) -> Any:
        return self._site.task(name)


#: What a canvas came to: the outcomes of its result, its bodies, and their states by name.
Sum = tuple[Any, "Counter[str]", dict[str, str]]


def run_both(site: Site, canvases: dict[str, Callable[[Making], Any]]) -> dict[str, list[Sum]]:
    """Run each canvas with plain tasks and with leased ones, all at once; return what they came to.

    Asserted here is that each leased job is settled, and that nothing is left on the broker.
    """
    makings = {name: [Making(site, kind) for kind in KINDS] for name in canvases}
    results = {
        name: [canvases[name](one).apply_async() for one in both] for name, both in makings.items()
    }
    wait_quiet(site)
    outcomes = {name: [outcome_of(one) for one in both] for name, both in results.items()}
    return {
        name: [
            sum_of(site, making, outcome)
            for making, outcome in zip(both, outcomes[name], strict=True)
        ]
        for name, both in makings.items()
    }


def assert_same(
    site: Site, canvases: dict[str, Callable[[Making], Any]], expected: dict[str, tuple[Any, Any]]
) -> None:
    """Assert that each canvas does the same with and without leases, and what it should."""
    problems = []
    for name, (plain, leased) in run_both(site, canvases).items():
        value, ran = expected[name]
        found = (values_of(leased[0]), leased[1])
        wanted = (found[0] if value is None else value, found[1] if ran is None else ran)
        if plain != leased:
            problems.append(f"{name}: not the same:\n  plain  {plain}\n  leased {leased}")
        elif found != wanted:
            problems.append(f"{name}: not as expected:\n  {found}\n  {wanted}")
    assert not problems, "\n".join(problems)


def outcome_of(result: Any) -> Any:
    """Return the outcome of a result and of what came before it; an error as its class and text."""
    if result is None:
        return None
    if isinstance(result, GroupResult):
        return ([outcome_of(one) for one in result.results], outcome_of(result.parent))
    value = result.result
    if isinstance(value, BaseException):
        # Of a chord that failed Celery names the part, whose id is another one each time.
        value = re.sub(r"[0-9a-f-]{36}", "<id>", repr(value))
    return (result.state, value, outcome_of(result.parent))


def wait_quiet(site: Site) -> None:
    """Wait until all messages are taken and acknowledged, and every job is settled."""
    quiet_looks = 0

    def quiet() -> bool:
        nonlocal quiet_looks
        # Of two parts of a chord that end together, Redis has one settled by a replay.
        site.run_pass()
        with site.redis() as client:
            left = client.llen("celery") or client.hlen("unacked")
        open_jobs = any(job["settled_at"] is None for job in site.jobs())
        # Twice: a message that is just being taken is in neither place.
        quiet_looks = 0 if left or open_jobs else quiet_looks + 1
        return quiet_looks == 2

    eventually(
        quiet,
        timeout=40,
        interval=0.1,
        what=lambda: "\n".join(site.told(j["id"]) for j in site.jobs() if not j["settled_at"]),
    )


def sum_of(site: Site, making: Making, outcome: Any) -> Sum:
    ids = [fact.split() for fact in site.facts(f"{making.tag} ids")]
    states = {name: site.app.backend.get_state(task_id) for name, task_id in ids}
    return outcome, Counter(site.facts(making.tag)), states


def bodies(names: str, **more: int) -> Counter[str]:
    return Counter({**Counter(names), **more})


# --- shapes -------------------------------------------------------------------------------------

#: a canvas, the value of its end (of a group: those of its members), and which bodies it runs
Shape = tuple["Callable[[Making], Any]", Any, "Counter[str]"]


def levels(make: Making, number: int, members: int) -> Any:
    """B069: groups in a chain; each member runs when all of the level before it have ended."""
    groups = [
        group([make(f"level{level}", then="short") for _ in range(members)])
        for level in range(number)
    ]
    return chain(*groups)


def linked(make: Making, sig: Any, *names: str) -> Any:
    for name in names:
        sig.link(make(name))
    return sig


AB, ABC = [["a"], ["b"]], [["a"], ["b"], ["c"]]

SHAPES: dict[str, Shape] = {
    "chain": (lambda make: chain(*make.many("abc")), ["c", ["b", ["a"]]], bodies("abc")),
    "chain in a chain": (
        lambda make: chain(make("a"), chain(*make.many("bc")), make("d")),
        ["d", ["c", ["b", ["a"]]]],
        bodies("abcd"),
    ),
    "immutable step": (
        lambda make: chain(make("a"), make("b").set(immutable=True), make("c")),
        ["c", ["b"]],
        bodies("abc"),
    ),
    "group": (lambda make: group(make.many("abc")), ABC, bodies("abc")),
    "group of one": (lambda make: group([make("a")]), [["a"]], bodies("a")),
    "group in a group": (
        lambda make: group(group(make.many("ab")), make("c")),
        ABC,
        bodies("abc"),
    ),
    "group in a chain": (
        lambda make: chain(make("a"), group(make.many("bc")), make("d"), make("e")),
        ["e", ["d", [["b", ["a"]], ["c", ["a"]]]]],
        bodies("abcde"),
    ),
    "group at the end of a chain": (
        lambda make: chain(make("a"), group(make.many("bc"))),
        [["b", ["a"]], ["c", ["a"]]],
        bodies("abc"),
    ),
    "group of one in a chain": (
        lambda make: chain(make("a"), group([make("b")]), make("c")),
        ["c", ["b", ["a"]]],
        bodies("abc"),
    ),
    "chord": (lambda make: chord(make.many("abc"), make("d")), ["d", ABC], bodies("abcd")),
    "chord of one": (lambda make: chord([make("a")], make("b")), ["b", [["a"]]], bodies("ab")),
    "chord without parts": (lambda make: chord([], make("b")), ["b", []], bodies("b")),
    "chord in a chord": (
        lambda make: chord([chord(make.many("ab"), make("c")), make("d")], make("e")),
        ["e", [["c", AB], ["d"]]],
        bodies("abcde"),
    ),
    "chord in the body of a chord": (
        lambda make: chord(make.many("ab"), chain(make("c"), group(make.many("de")), make("f"))),
        ["f", [["d", ["c", AB]], ["e", ["c", AB]]]],
        bodies("abcdef"),
    ),
    "chain in a chord": (
        lambda make: chord([chain(*make.many("ab")), make("c")], make("d")),
        ["d", [["b", ["a"]], ["c"]]],
        bodies("abcd"),
    ),
    "group in a chord": (
        lambda make: chord([group(make.many("ab")), make("c")], make("d")),
        # Celery 5.7 turns the members of an inner group round.
        ["d", [["b"], ["a"], ["c"]]],
        bodies("abcd"),
    ),
    "chords in a chain": (
        lambda make: chain(
            chord(make.many("ab"), make("c")), chord(make.many("de"), make("f")), make("g")
        ),
        ["g", ["f", [["d", ["c", AB]], ["e", ["c", AB]]]]],
        bodies("abcdefg"),
    ),
    "links": (lambda make: linked(make, make("a"), "b", "c"), ["a"], bodies("abc")),
    "link of a chain": (
        lambda make: linked(make, chain(*make.many("ab")), "c"),
        ["b", ["a"]],
        bodies("abc"),
    ),
    "link of a group": (lambda make: linked(make, group(make.many("ab")), "c"), AB, None),
    "link of a chord": (
        lambda make: linked(make, chord(make.many("ab"), make("c")), "d"),
        ["c", AB],
        bodies("abcd"),
    ),
    "retries in a chain": (
        lambda make: chain(make("a"), make("b", then="retry"), make("c")),
        ["c", ["b", ["a"]]],
        bodies("ac", b=3),
    ),
    "retries in a chord": (
        lambda make: chord([make("a", then="retry"), make("b", then="retry")], make("c")),
        ["c", AB],
        bodies("c", a=3, b=3),
    ),
}


def test_a_lease_changes_nothing_of_what_a_canvas_does(place: Site) -> None:
    """B069: it adds no run and no result; each leased job is settled in the end."""
    assert_same(
        place,
        {name: make for name, (make, _, _) in SHAPES.items()},
        {name: (value, ran) for name, (_, value, ran) in SHAPES.items()},
    )


#: a canvas that fails, and which bodies and errbacks it runs
FAILING: dict[str, tuple[Callable[[Making], Any], Counter[str] | None]] = {
    "errback": (lambda make: failing(make, "e"), bodies("ae")),
    "errback that is told the error": (
        lambda make: failing(make).on_error(make.on_error("e", told=True)),
        Counter({"a": 1, "e ValueError('a')": 1}),
    ),
    "both kinds of errbacks": (
        lambda make: failing(make, "e", "f").on_error(make.on_error("g", told=True)),
        Counter({"a": 1, "e": 1, "f": 1, "g ValueError('a')": 1}),
    ),
    "link of what fails": (lambda make: linked(make, failing(make, "e"), "b"), bodies("ae")),
    "first step": (
        lambda make: chain(failing(make), make("b")).on_error(make.on_error("e")),
        bodies("ae"),
    ),
    "middle step": (
        lambda make: chain(make("b"), failing(make, "e"), make("c")),
        bodies("bae"),
    ),
    "last step": (lambda make: chain(make("b"), failing(make, "e")), bodies("bae")),
    "member of a group": (
        lambda make: group(failing(make), make("b")).on_error(make.on_error("e")),
        bodies("abe"),
    ),
    "part of a chord": (
        lambda make: chord([failing(make), make("b")], make("c").on_error(make.on_error("e"))),
        bodies("abe"),
    ),
    "part of a chord with an errback": (
        lambda make: chord([failing(make, "f"), make("b")], make("c").on_error(make.on_error("e"))),
        bodies("abef"),
    ),
    "chord with an errback": (
        lambda make: chord([failing(make), make("b")], make("c")).on_error(make.on_error("e")),
        bodies("abe"),
    ),
    "part of a chord whose body is a group": (
        lambda make: chord(
            [failing(make), make("b")],
            group(make("c").on_error(make.on_error("e")), make("d").on_error(make.on_error("f"))),
        ),
        bodies("abef"),
    ),
    "body of a chord": (
        lambda make: chord(make.many("bc"), failing(make, "e")),
        bodies("bcae"),
    ),
    "chain in a chord": (
        lambda make: chord(
            [chain(failing(make), make("b")), make("c")], make("d").on_error(make.on_error("e"))
        ),
        bodies("ace"),
    ),
    "end of a chain in a chord": (
        lambda make: chord(
            [chain(make("b"), failing(make)), make("c")], make("d").on_error(make.on_error("e"))
        ),
        bodies("bace"),
    ),
    "chord in a chord": (
        lambda make: chord(
            [chord([failing(make), make("b")], make("c")), make("d")],
            make("f").on_error(make.on_error("e")),
        ),
        # Celery 5.7 does not tell the outer chord that the inner one has failed.
        bodies("abd"),
    ),
    "group in a chain": (
        lambda make: chain(group(failing(make), make("b")), make("c"), make("d")).on_error(
            make.on_error("e")
        ),
        None,
    ),
}


def failing(make: Making, *errbacks: str) -> Any:
    sig = make("a", then="fail a")
    for name in errbacks:
        sig.link_error(make.on_error(name))
    return sig


def test_a_lease_changes_nothing_of_how_a_canvas_fails(place: Site) -> None:
    assert_same(
        place,
        {name: make for name, (make, _) in FAILING.items()},
        {name: (None, ran) for name, (_, ran) in FAILING.items()},
    )


REPLACEMENTS = {"task": "x", "chain": "xy", "group": "xy", "chord": "xyz", "again": "xx"}


def test_a_lease_changes_nothing_of_what_replaces_a_task(place: Site) -> None:
    """B066: alone, in a chain, a group and a chord; what follows runs once, with its value."""
    canvases, expected = {}, {}
    for by, names in REPLACEMENTS.items():
        for where, (make, more) in replacing(by).items():
            canvases[f"{by} {where}"] = make
            expected[f"{by} {where}"] = (None, bodies(names + more))

    assert_same(place, canvases, expected)


def replacing(by: str) -> dict[str, tuple[Callable[[Making], Any], str]]:
    def replaced(make: Making) -> Any:
        return make("a", then=f"replace {by}")

    return {
        "alone": (replaced, "a"),
        "linked": (lambda make: linked(make, replaced(make), "b"), "ab"),
        "in a chain": (lambda make: chain(replaced(make), make("b")), "ab"),
        "in a group": (lambda make: group(replaced(make), make("b")), "ab"),
        "in a group in a chain": (
            lambda make: chain(group(replaced(make), make("b")), make("c")),
            "abc",
        ),
        "in a chord": (lambda make: chord([replaced(make), make("b")], make("c")), "abc"),
        "as a body": (lambda make: chord(make.many("bc"), replaced(make)), "abc"),
    }


def test_a_chain_of_groups_runs_each_member_once(place: Site) -> None:
    """B069: Celery 5.7 sends the third group ten times over; a job that is there is not sent."""
    results = run_both(place, {"levels": lambda make: levels(make, 4, 10)})

    plain, leased = results["levels"]
    assert values_of(leased[0]) == ["level3"] * 10
    assert leased[1] == Counter({f"level{n}": 10 for n in range(4)})
    assert leased[1] <= plain[1]
    assert (leased[0], leased[2]) == (plain[0], plain[2])


def test_a_chord_waits_for_what_its_parts_add(place: Site) -> None:
    def grown(make: Making) -> Any:
        return chord([make("a", then="grow b"), make("c")], make("d"))

    for outcome, ran, _ in run_both(place, {"grown": grown})["grown"]:
        # Celery gives it no place among the others.
        assert sorted(values_of(outcome)[1]) == ABC
        assert ran == bodies("abcd")


@pytest.mark.parametrize("how", ["map", "starmap", "chunks"])
def test_the_items_of_a_map_have_no_lease(place: Site, how: str) -> None:
    """They are function calls in one task of Celery's: nothing is recorded, nothing promised."""
    for kind in KINDS:
        tag, jobs = place.tag(), place.ids()
        item = place.task(f"{kind}.item")
        items = [(tag, number) for number in range(4)]
        if how == "chunks":
            result = item.chunks(items, 2).apply_async()
            expected: Any = [[0, 1], [2, 3]]
        elif how == "starmap":
            result, expected = item.starmap(items).apply_async(), [0, 1, 2, 3]
        else:
            noted = place.task(f"{kind}.noted")
            result, expected = noted.map(items).apply_async(), [0, 1, 2, 3]

        assert result.get(timeout=20) == expected
        assert Counter(place.facts(tag)) == Counter(f"item {n} False" for n in range(4))
        assert place.ids() == jobs


@pytest.mark.parametrize("what", ["priority", "stamps"])
def test_what_a_canvas_says_arrives_with_each_step(place: Site, what: str) -> None:
    def told(make: Making) -> Any:
        header = make.many("ab", then=f"told {what}")
        if what == "priority":
            header = [one.set(priority=3) for one in header]
        canvas = chain(chord(header, make("c", then=f"told {what}")), make("d"))
        if what == "stamps":
            canvas.stamp(customer="seven")
        return canvas

    plain, leased = run_both(place, {what: told})[what]

    assert plain == leased
    assert ("seven" if what == "stamps" else "3") in str(leased[0])


def test_each_attempt_of_a_step_has_its_stamps(place: Site) -> None:
    make = Making(place, "leased")
    canvas = chain(make("a"), make("b", then="die once"), make("c", then="told stamps"))
    canvas.stamp(customer="seven")

    result = canvas.apply_async()

    assert result.get(timeout=20)[1]["customer"] == "seven"
    assert place.states(result.parent.id) == ["lost", "completed"]
    told = [json.loads(fact) for fact in place.facts(f"{make.tag} told")]
    assert [one["customer"] for one in told] == ["seven"]
    assert Counter(place.facts(make.tag)) == bodies("ac", b=2)


def values_of(outcome: Any) -> Any:
    """Return the value of an outcome; of a group's, those of its members."""
    if isinstance(outcome[0], list):
        return [values_of(one) for one in outcome[0]]
    return outcome[1]


# --- ends that no body returned -----------------------------------------------------------------

#: a canvas with a job "a" that comes to nothing, the bodies and errbacks that run beside it, and
#: whether its end is told to an errback
Ending = tuple["Callable[[Making, Any], Any]", str, bool]

ENDING: dict[str, Ending] = {
    "alone": (lambda make, a: linked(make, a, "b").on_error(make.on_error("e")), "", True),
    "step": (
        lambda make, a: chain(make("b"), a.on_error(make.on_error("e")), make("c")),
        "b",
        True,
    ),
    "member": (lambda make, a: group(a.on_error(make.on_error("e")), make("b")), "b", True),
    "part": (
        lambda make, a: chord([a, make("b")], make("c").on_error(make.on_error("e"))),
        "be",
        False,
    ),
    "only part": (lambda make, a: chord([a], make("c").on_error(make.on_error("e"))), "e", False),
    "chain in a chord": (
        lambda make, a: chord(
            [chain(a, make("b")), make("c")], make("d").on_error(make.on_error("e"))
        ),
        "ce",
        False,
    ),
    "end of a chain in a chord": (
        lambda make, a: chord(
            [chain(make("b"), a), make("c")], make("d").on_error(make.on_error("e"))
        ),
        "bce",
        False,
    ),
    "group in a chain": (
        lambda make, a: chain(group(a, make("b")), make("c").on_error(make.on_error("e"))),
        "be",
        False,
    ),
    "body": (
        lambda make, a: chord(make.many("bc"), a.on_error(make.on_error("e"))),
        "bc",
        True,
    ),
}


def test_a_job_that_is_given_up_ends_its_canvas_once(place: Site) -> None:
    """Its process dies at each attempt: each errback is called once, and nobody waits for ever."""
    makings = {name: Making(place, "leased") for name in ENDING}
    results = {
        name: ENDING[name][0](make, make("a", then="die always")).apply_async()
        for name, make in makings.items()
    }

    problems = problems_of_ends(place, makings, results, is_told=True, ran={"a": 2})

    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("how", ["cancel", "revoke"])
def test_a_cancelled_job_ends_its_canvas(place: Site, how: str) -> None:
    """B065: it waits in a queue that nobody consumes; Celery's errbacks are not for revocations."""
    makings = {name: Making(place, "leased") for name in ENDING}
    ids = {name: f"{make.tag}-a" for name, make in makings.items()}
    results = {
        name: ENDING[name][0](make, make("a").set(task_id=ids[name], queue="nobody")).apply_async()
        for name, make in makings.items()
    }

    for job_id in ids.values():
        eventually(lambda job_id=job_id: place.job_or_none(job_id), timeout=20)
        if how == "revoke":
            place.app.control.revoke(job_id)
        else:
            cancel(place, job_id)
    problems = problems_of_ends(place, makings, results, is_told=False, ran={})

    assert not problems, "\n".join(problems)
    place.drop("nobody")


def cancel(site: Site, job_id: str) -> None:
    """Do what ``celery lease cancel`` does."""
    extension = extension_of(site.app)
    assert transitions.cancel(extension.store, job_id, reason="no longer wanted").is_final
    extension.reaper().settle_now(job_id)


def problems_of_ends(
    site: Site,
    makings: dict[str, Making],
    results: dict[str, Any],
    *,
    is_told: bool,
    ran: dict[str, int],
) -> list[str]:
    """Wait until all is over, and return what is not as it should be."""
    wait_quiet(site)
    problems = []
    for name, make in makings.items():
        _, others, of_errback = ENDING[name]
        expected = bodies(others + ("e" if of_errback and is_told else ""), **ran)
        found = Counter(site.facts(make.tag))
        if found != expected:
            problems.append(f"{name}: ran {found}, not {expected}")
        if not results[name].ready():
            problems.append(f"{name}: somebody waits for ever: {outcome_of(results[name])}")
    return problems


def test_a_running_part_that_is_cancelled_ends_its_chord_at_once(place: Site) -> None:
    """What its body says later is kept on its attempt, and counts for nothing (B065)."""
    make = Making(place, "leased")
    part = make("a", then="wait go").set(task_id=f"{make.tag}-a")
    body = make("c").on_error(make.on_error("e"))
    result = chord([part, make("b")], body).apply_async()
    eventually(lambda: "a" in place.facts(make.tag), timeout=20)

    cancel(place, part.id)

    with pytest.raises(ChordError, match="TaskRevokedError"):
        place.app.AsyncResult(result.id).get(timeout=20)
    place.book.note(make.tag, "go")
    eventually(lambda: place.attempts(part.id)[0]["rejected_at"], timeout=20)
    wait_quiet(place)
    assert Counter(place.facts(make.tag)) == bodies("abe", go=1)
    assert place.app.backend.get_state(part.id) == "REVOKED"
