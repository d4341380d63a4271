"""The event bus, and the log lines made from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from celery_lease import events
from celery_lease.events import Event, EventBus, LogSubscriber
from celery_lease.states import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "celery_lease.events"


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        yield


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(caplog: pytest.LogCaptureFixture, name: str, **fields: object) -> list[str]:
    LogSubscriber()(Event(name, fields))
    return caplog.messages


# --- the bus ------------------------------------------------------------------------------------


def test_every_subscriber_gets_the_event_in_order_of_subscription(bus: EventBus) -> None:
    seen: list[tuple[str, Event]] = []
    bus.subscribe(lambda event: seen.append(("first", event)))
    bus.subscribe(lambda event: seen.append(("second", event)))

    bus.emit(events.CLAIM_WON, job_id="j", attempt=1)

    assert [who for who, _ in seen] == ["first", "second"]
    assert seen[0][1].name == "lease.claim.won"
    assert seen[0][1].fields == {"job_id": "j", "attempt": 1}


def test_a_field_may_be_called_name(bus: EventBus) -> None:
    seen: list[Event] = []
    bus.subscribe(seen.append)

    bus.emit(events.CLAIM_WON, name="rebuild")

    assert seen[0].fields == {"name": "rebuild"}


def test_a_subscriber_cannot_change_what_the_next_one_sees(bus: EventBus) -> None:
    seen: list[Event] = []
    bus.subscribe(seen.append)

    bus.emit(events.CLAIM_WON, job_id="j")

    with pytest.raises(TypeError):
        seen[0].fields["job_id"] = "other"  # type: ignore[index]


def test_a_subscriber_subscribed_twice_gets_the_event_once(bus: EventBus) -> None:
    seen: list[Event] = []
    bus.subscribe(seen.append)
    bus.subscribe(seen.append)

    bus.emit(events.CLAIM_WON)

    assert len(seen) == 1


def test_nothing_reaches_a_subscriber_after_it_has_unsubscribed(bus: EventBus) -> None:
    seen: list[Event] = []
    bus.subscribe(seen.append)

    bus.unsubscribe(seen.append)
    bus.unsubscribe(seen.append)
    bus.emit(events.CLAIM_WON)

    assert seen == []


def test_a_subscriber_may_unsubscribe_itself_while_it_gets_an_event(bus: EventBus) -> None:
    seen: list[Event] = []

    def once(event: Event) -> None:
        seen.append(event)
        bus.unsubscribe(once)

    bus.subscribe(once)
    bus.subscribe(seen.append)
    bus.emit(events.CLAIM_WON)
    bus.emit(events.CLAIM_WON)

    assert len(seen) == 3


def test_a_broken_subscriber_stops_neither_the_emitter_nor_the_others(bus: EventBus) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no")

    bus.subscribe(broken)
    bus.subscribe(seen.append)

    bus.emit(events.CLAIM_WON)

    assert len(seen) == 1


def test_each_broken_subscriber_is_reported_once_with_its_traceback(
    bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no")

    def broken_too(event: Event) -> None:
        raise ValueError("no")

    bus.subscribe(broken)
    bus.subscribe(broken_too)
    bus.emit(events.CLAIM_WON)
    bus.emit(events.CLAIM_WON)

    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert kinds == [RuntimeError, ValueError]
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_what_interrupts_a_body_passes_through_the_bus(bus: EventBus) -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted)

    with pytest.raises(KeyboardInterrupt):
        bus.emit(events.CLAIM_WON)


# --- the log lines ------------------------------------------------------------------------------


def test_events_are_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    events.emit(events.LEASE_LOST, job_id="j")

    assert caplog.messages == ["lease.lease.lost job_id=j"]


def test_the_lines_end_when_the_log_subscriber_is_unsubscribed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events.unsubscribe(events.LOG_SUBSCRIBER)
    try:
        events.emit(events.LEASE_LOST, job_id="j")
    finally:
        events.subscribe(events.LOG_SUBSCRIBER)

    assert caplog.messages == []


def test_a_line_begins_with_the_fields_that_say_which_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = lines_of(
        caplog,
        events.CLAIM_REFUSED,
        reason=Refusal.NOT_DUE,
        worker="w@h",
        fencing_token=7,
        attempt=2,
        job_id="j",
        queue="q",
    )

    assert lines == [
        "lease.claim.refused job_id=j attempt=2 fencing_token=7 worker=w@h reason=not_due queue=q"
    ]


def test_a_field_without_a_value_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, events.LEASE_LOST, job_id="j", worker=None) == [
        "lease.lease.lost job_id=j"
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two words", '"two words"'),
        ("two\nlines", '"two\\nlines"'),
        ("a=b", '"a=b"'),
        ('"', '"\\""'),
        ("", '""'),
        ("\x1b[31m", '"\\u001b[31m"'),
        (["a", "b"], "\"['a', 'b']\""),
        (0.1 + 0.2, "0.3"),
        (0, "0"),
        ("100%s", "100%s"),
    ],
)
def test_a_value_stays_one_value_on_one_line(
    caplog: pytest.LogCaptureFixture, value: object, text: str
) -> None:
    assert lines_of(caplog, events.LEASE_LOST, x=value) == [f"lease.lease.lost x={text}"]


def test_what_a_users_task_was_given_or_gave_is_never_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = lines_of(
        caplog, events.OUTCOME_REJECTED, job_id="j", args=("s",), kwargs={"k": "s"}, result="s"
    )

    assert lines == ["lease.outcome.rejected job_id=j"]


def test_every_event_has_a_level_and_a_name_of_the_houses_form() -> None:
    constants = [value for name, value in vars(events).items() if name.isupper()]
    names = {value for value in constants if isinstance(value, str)}

    assert names == set(events.LEVELS)
    assert all(name.startswith("lease.") and name.count(".") == 2 for name in names)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (events.LEASE_RENEWED, logging.DEBUG),
        (events.LEASE_EXPIRED, logging.INFO),
        (events.LEASE_LOST, logging.WARNING),
        ("lease.from.later", logging.INFO),
    ],
)
def test_an_event_is_logged_on_its_level(
    caplog: pytest.LogCaptureFixture, name: str, level: int
) -> None:
    lines_of(caplog, name, job_id="j")

    assert [record.levelno for record in caplog.records] == [level]
    assert caplog.records[0].name == LOGGER


def test_a_pass_that_found_nothing_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, events.PASS_COMPLETED, worker="w", expired=0, took_seconds=0.2) == []


def test_a_pass_that_found_something_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, events.PASS_COMPLETED, expired=0, dispatched=2) == [
        "lease.pass.completed expired=0 dispatched=2"
    ]


def test_an_unreachable_store_is_logged_once_in_ten_seconds_with_the_count_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = LogSubscriber(clock=clock)

    for seconds in (0.0, 3.0, 3.0, 3.9, 0.1, 10.0):
        clock.now += seconds
        log(Event(events.STORE_UNAVAILABLE, {"reason": "refused"}))

    assert caplog.messages == [
        "lease.store.unavailable reason=refused",
        "lease.store.unavailable reason=refused suppressed_count=3",
        "lease.store.unavailable reason=refused",
    ]


def test_other_events_are_not_held_back_by_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    log = LogSubscriber(clock=Clock())

    log(Event(events.STORE_UNAVAILABLE, {}))
    log(Event(events.LEASE_LOST, {}))
    log(Event(events.LEASE_LOST, {}))

    assert caplog.messages == ["lease.store.unavailable", "lease.lease.lost", "lease.lease.lost"]


def test_an_event_whose_level_is_off_costs_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("formatted for nobody")

    with caplog.at_level(logging.INFO, logger=LOGGER):
        lines = lines_of(caplog, events.LEASE_RENEWED, x=Unprintable())

    assert lines == []
