"""Trackers that hang, fail or are told too much, and what a line becomes for them."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from nanguard.trackers import tracker
from nanguard.trackers.tracker import (
    Alarm,
    Counting,
    Step,
    TrackedEvent,
    TrackedPlace,
    Tracker,
    Trackers,
    event_of,
)

if TYPE_CHECKING:
    from pathlib import Path

SKIP = {
    "action": "skip",
    "name": "non-finite-loss",
    "severity": "error",
    "message": "the loss is nan",
    "step": 3,
    "reason": "bad step 1 of at most 5 in 100",
}


class Kept(Tracker):
    """Keeps what it is told."""

    name: ClassVar[str] = "kept"
    modules: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(TrackedPlace(folder, "kept"))
        self.told: list[Any] = []
        self.threads: dict[str, int] = {}

    def adopt(self) -> None:
        self.threads["adopt"] = threading.get_ident()

    def start(self) -> None:
        self.threads["start"] = threading.get_ident()

    def step(self, step: Step) -> None:
        self.told.append(step.step)

    def event(self, event: TrackedEvent) -> None:
        self.told.append(event.title)

    def finish(self) -> None:
        self.told.append("finished")


class Hanging(Kept):
    """Waits for a network that does not answer."""

    name: ClassVar[str] = "hanging"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answer = threading.Event()

    def step(self, step: Step) -> None:
        self.answer.wait(20)


class Failing(Kept):
    """Fails at some steps."""

    name: ClassVar[str] = "failing"

    def step(self, step: Step) -> None:
        if step.step % 2:
            raise ConnectionError("no route to host")
        super().step(step)


class Batching(Kept):
    """Writes several lines at once, and fails at it."""

    name: ClassVar[str] = "batching"

    def step(self, step: Step) -> None:
        self.held += 1
        if self.held == 4:
            self.flush()

    def flush(self) -> None:
        held, self.held = self.held, 0
        if held:
            raise ConnectionError("no route to host")


def line(step: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "action": "step", **more}


def test_nothing_begins_before_the_first_line(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    trackers = Trackers([kept], on_failure=pytest.fail)
    trackers.close()
    assert not kept.threads
    assert not kept.told


def test_the_active_run_is_looked_for_in_the_thread_that_trains(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    trackers = Trackers([kept], on_failure=pytest.fail)
    trackers.metric(line(0))
    trackers.event(SKIP)
    trackers.close()
    assert kept.threads["adopt"] == threading.get_ident() != kept.threads["start"]
    assert kept.told == [0, "nanguard: non-finite-loss -> skip", "finished"]
    trackers.metric(line(1))
    assert kept.told[-1] == "finished"


def test_one_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "_END_SECONDS", 0.3)
    monkeypatch.setattr(tracker, "_MOST_QUEUED", 100)
    told: list[str] = []
    hanging, kept = Hanging(tmp_path), Kept(tmp_path)
    trackers = Trackers([hanging, kept], on_failure=told.append)
    for step in range(90):
        trackers.metric(line(step))
    trackers.close()
    hanging.answer.set()
    assert kept.told == [*range(90), "finished"]
    assert told[0].startswith("to hanging (it has not answered for")
    # The step it hangs at is under way; the note of the end is among what was left.
    assert told[1:] == ["90 lines to hanging"]


def test_a_queue_that_is_full_loses_lines_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "_END_SECONDS", 0.1)
    monkeypatch.setattr(tracker, "_MOST_QUEUED", 10)
    hanging = Hanging(tmp_path)
    told: list[str] = []
    trackers = Trackers([hanging], on_failure=told.append)
    for step in range(50):
        trackers.metric(line(step))
    trackers.close()
    hanging.answer.set()
    assert 48 <= trackers.lost["hanging"] <= 50
    assert told[0] == "to hanging (it is too far behind)"


def test_one_that_fails_goes_on_and_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    failing = Failing(tmp_path)
    trackers = Trackers([failing], on_failure=told.append)
    for step in range(6):
        trackers.metric(line(step))
    trackers.close()
    assert failing.told == [0, 2, 4, "finished"]
    assert told == ["to failing (ConnectionError: no route to host)", "3 lines to failing"]
    assert trackers.lost == {"failing": 3}


def test_lines_that_are_lost_together_are_counted_one_by_one(tmp_path: Path) -> None:
    trackers = Trackers([Batching(tmp_path)], on_failure=lambda _told: None)
    for step in range(10):
        trackers.metric(line(step))
    trackers.close()
    assert trackers.lost == {"batching": 10}


def test_a_copy_of_the_process_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    trackers = Trackers([kept], on_failure=pytest.fail)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: -1)
        trackers.metric(line(0))
        trackers.close()
    assert not kept.threads
    trackers.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_number_is_told_as_it_is(value: float) -> None:
    counting = Counting()
    good = counting.step(line(0, 2.0, lr=None, grad_norm=0.5))
    bad = counting.step(line(1, value, action="skip", terms={"text": value}, optimizer=1))
    overflow = counting.step(line(2, grad_norm=math.inf, action="overflow"))
    assert good.numbers == {
        "nanguard/loss": 2.0,
        "nanguard/grad_norm": 0.5,
        "nanguard/skipped": 0,
        "nanguard/nonfinite_steps": 0,
    }
    assert str(bad.numbers["nanguard/optimizer-1/loss"]) == str(value)
    assert bad.numbers["nanguard/skipped"] == 1
    assert bad.in_words() == f"1: optimizer-1/loss={value}, optimizer-1/terms/text={value}"
    # A scaler's overflow dropped no batch that the guard has to answer for.
    assert overflow.numbers["nanguard/skipped"] == 1
    assert overflow.numbers["nanguard/nonfinite_steps"] == 2


@pytest.mark.parametrize(
    ("action", "severity", "level"),
    [
        ("skip", "error", "warn"),
        ("cut-lr", "error", "warn"),
        ("rollback", "error", "error"),
        ("stop", "warning", "error"),
        ("step", "warning", "warn"),
        ("step", "info", "info"),
    ],
)
def test_how_loud_an_event_is(action: str, severity: str, level: str) -> None:
    assert event_of({**SKIP, "action": action, "severity": severity}).level == level


def test_alerts_of_one_kind_come_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    alarm, skip = Alarm(), event_of(SKIP)
    stop = event_of({**SKIP, "action": "stop"})
    assert alarm.text(skip) == skip.text
    assert [alarm.text(skip) for _ in range(3)] == [None] * 3
    assert alarm.held == 3
    assert alarm.text(stop) == stop.text
    assert alarm.text(stop) == stop.text
    now[0] += 61
    assert alarm.text(skip) == f"{skip.text}\n(3 more since the last alert)"
    assert alarm.held == 0
    assert alarm.text(event_of({**SKIP, "action": "step", "severity": "info"})) is None


def test_a_long_message_is_cut_but_its_path_is_not() -> None:
    event = event_of({**SKIP, "message": "x" * 9000, "name": "y" * 200, "path": "/a/b"})
    assert len(event.title) == 63
    assert len(event.text) < 2100
    assert event.text.endswith("\n/a/b")
