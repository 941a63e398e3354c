"""What a tracker must be able to do, the threads in which trackers write, and which a run has.

The training waits for none of them.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its own end is registered before ours, so that it comes after
import importlib
import importlib.util
import math
import os
import queue
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nanguard.errors import MissingDependencyError, UsageError
from nanguard.findings import name_of
from nanguard.masking import hidden_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PREFIX = "nanguard/"
STEP = PREFIX + "step"
SKIPPED = PREFIX + "skipped"
NON_FINITE = PREFIX + "nonfinite_steps"
EVENT = PREFIX + "event"
# What a line of the run record calls a number, and what it is called in a tracker.
_NUMBERS = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr", "scale": "loss_scale"}
# The actions after which a batch counts; every other one dropped it.
_KEPT = ("step", "overflow")
# Seconds in which one title raises one alert.
_QUIET = 60.0
# Characters of the title and the text of an event.
_LONGEST_TITLE = 63
_LONGEST_TEXT = 2000
# Lines that wait for a slow tracker; then they are dropped and counted.
_MOST_QUEUED = 100_000
_BATCH_SECONDS = 0.25
# How long the end of a run waits for trackers at most.
_END_SECONDS = 30.0
# Names of trackers with commas between them, and their folder: for the processes below
# `nanguard run`, and for whoever cannot change the code.
TRACK = "NANGUARD_TRACK"
TRACK_DIR = "NANGUARD_TRACK_DIR"
# The module and the class of each tracker, and the package it cannot do without.
_KNOWN = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("WandB", "wandb"),
    "trackio": ("Trackio", "trackio"),
    "mlflow": ("MLflow", "mlflow"),
}

# Whether this process only replays what another one has done.
_replays = False


@dataclass(frozen=True, slots=True)
class TrackedPlace:
    """Where a tracker writes if the user has no run of their own.

    Attributes:
        folder: A folder for files.
        name: How the run is called.
    """

    folder: Path
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        step: Its number.
        numbers: Its numbers by name, those that are not finite included.
        bad: Those that are not finite.
    """

    step: int
    numbers: dict[str, float]
    bad: dict[str, float]

    def in_words(self) -> str:
        """Returns what is not finite: ``7: loss=nan``."""
        values = ", ".join(
            f"{name.removeprefix(PREFIX)}={name_of(value)}" for name, value in self.bad.items()
        )
        return f"{self.step}: {values}"


@dataclass(frozen=True, slots=True)
class TrackedEvent:
    """Something that happened.

    Attributes:
        step: The step it is about; None if it is about none.
        title: What it is, in a few words.
        text: The same with everything that is known.
        level: How loud it is.
    """

    step: int | None
    title: str
    text: str
    level: Literal["info", "warn", "error"]


class Counting:
    """Makes steps of the lines of a run record, and counts those that were bad."""

    def __init__(self) -> None:
        self._skipped = 0
        self._non_finite = 0

    def step(self, line: dict[str, Any]) -> Step:
        """Returns the step that a line is about."""
        numbers = {
            name: float(line[key]) for key, name in _NUMBERS.items() if line.get(key) is not None
        }
        numbers |= {f"terms/{name}": float(v) for name, v in (line.get("terms") or {}).items()}
        lane = f"optimizer-{line['optimizer']}/" if line.get("optimizer") else ""
        numbers = {f"{PREFIX}{lane}{name}": value for name, value in numbers.items()}
        bad = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        self._skipped += line.get("action", "step") not in _KEPT
        self._non_finite += bool(bad)
        numbers[SKIPPED] = float(self._skipped)
        numbers[NON_FINITE] = float(self._non_finite)
        return Step(int(line["step"]), numbers, bad)


def event_of(line: dict[str, Any]) -> TrackedEvent:
    """Returns the event that a line is about."""
    action = line.get("action", "step")
    step = line.get("step")
    done = "" if action == "step" else f" -> {action}"
    reason = f" ({line['reason']})" if line.get("reason") else ""
    where = f" [{line['where']}]" if line.get("where") else ""
    path = f"\n{line['path']}" if line.get("path") else ""
    text = f"{'' if step is None else f'step {step}: '}{line['message']}{where}{done}{reason}"
    level: Literal["info", "warn", "error"] = "warn"
    if action in ("rollback", "stop"):
        level = "error"
    elif line.get("severity") == "info":
        level = "info"
    title = f"nanguard: {line['name']}{done}"
    return TrackedEvent(step, title[:_LONGEST_TITLE], text[:_LONGEST_TEXT] + path, level)


def incident_line(step: int, folder: Path) -> dict[str, Any]:
    """Returns the event of an incident that was written."""
    return {
        "name": "incident",
        "severity": "info",
        "step": step,
        "message": f"incident written; nanguard explain {folder}",
        "path": str(folder),
    }


@dataclass(slots=True)
class Alarm:
    """Lets one alert of a kind through at a time, and counts the others."""

    _last: dict[str, float] = field(default_factory=dict)
    _held: Counter[str] = field(default_factory=Counter)

    def text(self, event: TrackedEvent) -> str | None:
        """Returns what an alert says; None if there is to be none now."""
        if event.level == "info":
            return None
        now = time.monotonic()
        last = self._last.get(event.title, -math.inf)
        if event.level == "warn" and now - last < _QUIET:
            self._held[event.title] += 1
            return None
        self._last[event.title] = now
        held = self._held.pop(event.title, 0)
        return f"{event.text}\n({held} more since the last alert)" if held else event.text

    @property
    def held(self) -> int:
        """How many alerts were not sent."""
        return sum(self._held.values())


class Tracker(ABC):
    """Writes a run to one place. All but ``adopt`` is called in a thread of the tracker's own.

    Attributes:
        name: How users call it.
        modules: What has to be imported for it, in the training thread.
        held: How many lines are held back to be written together.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    def __init__(self, place: TrackedPlace) -> None:
        self.place = place
        self.held = 0

    def adopt(self) -> None:  # noqa: B027 - not every library knows an active run
        """Notes the run that the user has started; called in the thread that trains."""

    @abstractmethod
    def start(self) -> None:
        """Begins a run where the user has none."""

    @abstractmethod
    def step(self, step: Step) -> None:
        """Writes a step."""

    @abstractmethod
    def event(self, event: TrackedEvent) -> None:
        """Writes an event."""

    def flush(self) -> None:  # noqa: B027 - most write at once
        """Writes what was held back to be written together."""

    @abstractmethod
    def finish(self) -> None:
        """Ends what was begun; a run of the user's goes on."""


class Trackers:
    """Hands the lines of a run on to trackers; never waits, never fails.

    Nothing is started before the first line, so that a run of the user's own is found.

    Args:
        trackers: Who writes.
        on_failure: Called once for each tracker that fails, from its thread.
        at_exit: Called when the main thread has ended, before the libraries end their runs.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        on_failure: Callable[[str], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._writers = [Writer(tracker, on_failure) for tracker in trackers]
        self._before_exit = at_exit
        self._counting = Counting()
        self._pid = os.getpid()
        self._open = True
        _unfinished.add(self)
        _finish_at_exit()

    @property
    def lost(self) -> dict[str, int]:
        """How many lines could not be written, by tracker."""
        return {writer.tracker.name: writer.lost for writer in self._writers if writer.lost}

    def metric(self, line: dict[str, Any]) -> None:
        """Hands on a step."""
        if self._is_mine():
            self._put(self._counting.step(line))

    def event(self, line: dict[str, Any]) -> None:
        """Hands on an event."""
        if self._is_mine():
            self._put(event_of(hidden_tree(line)))

    def close(self) -> None:
        """Writes what is still queued and ends the threads, waiting for a bounded time."""
        if not self._is_mine():
            return
        self._open = False
        _unfinished.discard(self)
        end = time.monotonic() + _END_SECONDS
        for writer in self._writers:
            writer.end()
        for writer in self._writers:
            writer.wait(end - time.monotonic())

    def _is_mine(self) -> bool:
        # A copy of the process, made to replay a step, writes nothing.
        return self._open and os.getpid() == self._pid

    def _put(self, item: Step | TrackedEvent) -> None:
        for writer in self._writers:
            writer.put(item)

    def at_exit(self) -> None:
        """Does what ``close`` does, as nobody else has."""
        if self._before_exit is not None and self._is_mine():
            self._before_exit()
        self.close()


class Writer:
    """One tracker in its thread.

    Attributes:
        tracker: The tracker.
        lost: How many lines could not be written.
    """

    def __init__(self, tracker: Tracker, on_failure: Callable[[str], None]) -> None:
        self.tracker = tracker
        self.lost = 0
        self._on_failure = on_failure
        self._failed = False
        self._items: queue.Queue[Step | TrackedEvent | None] = queue.Queue(_MOST_QUEUED)
        self._thread: threading.Thread | None = None

    def put(self, item: Step | TrackedEvent) -> None:
        """Adds an item; never waits."""
        if self._thread is None and not self._failed:
            self._begin()
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.lost += 1

    def end(self) -> None:
        """Asks the thread to end."""
        if self._thread is not None:
            try:
                self._items.put_nowait(None)
            except queue.Full:
                self._fail("it is too far behind")

    def wait(self, seconds: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
        if self._thread is None or self._thread.is_alive():
            self.lost += self._items.qsize()
        if self._thread is not None and self._thread.is_alive():
            self._fail(f"it has not answered for {_END_SECONDS:.0f} s")
        if self.lost:
            self._on_failure(f"{self.lost} lines to {self.tracker.name}")

    def _begin(self) -> None:
        try:
            self.tracker.adopt()
        except Exception as error:  # noqa: BLE001 - a library's own, and no reason to stop
            self._fail(error)
        name = f"nanguard-{self.tracker.name}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or there are too many
            self._fail(error)
            return
        self._thread = thread

    def _work(self) -> None:
        try:
            self.tracker.start()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            self._drain()
            return
        ended = False
        while not ended:
            ended = self._write_batch()
        self._try(self.tracker.finish)

    def _write_batch(self) -> bool:
        """Writes what comes within a moment; returns whether it was the last."""
        item = self._items.get()
        deadline = time.monotonic() + _BATCH_SECONDS
        while item is not None:
            self._write(item)
            try:
                item = self._items.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
        self._try(self.tracker.flush)
        return item is None

    def _write(self, item: Step | TrackedEvent) -> None:
        write: Any = self.tracker.step if isinstance(item, Step) else self.tracker.event
        self._try(write, item)

    def _drain(self) -> None:
        """Counts what comes for a tracker that could not be started."""
        while self._items.get() is not None:
            self.lost += 1

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        held = self.tracker.held
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - a library's own, and no reason to stop
            # The line itself, and with it what was held back.
            self.lost += max(1, held - self.tracker.held + len(args))
            self._fail(error)

    def _fail(self, why: Exception | str) -> None:
        if not self._failed:
            self._failed = True
            said = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            self._on_failure(f"to {self.tracker.name} ({said[:500]})")


_unfinished: set[Trackers] = set()


@cache
def _finish_at_exit() -> None:
    """Has what is unfinished at the end of the process finished, once for all.

    It has to be before the libraries end what they have begun, and before Python refuses to
    start anything: such hooks are those of the threads, which only Python itself uses so far.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for trackers in list(_unfinished):
        trackers.at_exit()


def be_silent() -> None:
    """Lets nothing in this process track anything, as it replays what was tracked already."""
    global _replays
    _replays = True


def check_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the names of trackers, each of which is known and installed.

    Args:
        names: The trackers to write to.
        where: Who asked.

    Raises:
        UsageError: A name is unknown.
        MissingDependencyError: A package is not installed.
    """
    given = (names,) if isinstance(names, str) else names
    for name in given:
        if name not in _KNOWN:
            raise UsageError(
                f"there is no tracker called {name!r}.",
                where=where,
                do=f"Give one of {', '.join(_KNOWN)}.",
            )
        package = _KNOWN[name][1]
        # A package that is imported already need not be looked for.
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            missing = ModuleNotFoundError(name=package)
            raise MissingDependencyError.of(f"the tracker {name}", missing, extra="trackers")
    return tuple(dict.fromkeys(given))


def trackers_for(
    names: Sequence[str] | None,
    folder: Path | None,
    *,
    where: str,
    on_failure: Callable[[str], None],
    at_exit: Callable[[], None] | None = None,
) -> Trackers | None:
    """Returns the trackers of a run; None if it has none.

    The libraries are imported here: an import in a thread of its own could be cut in two by a
    copy of the process that is made meanwhile.

    Args:
        names: The trackers to write to; None for those that the environment names.
        folder: Where files go by default.
        where: Who asked.
        on_failure: Called once for each tracker that fails.
        at_exit: Called when the interpreter ends.

    Raises:
        UsageError: A name is unknown.
        MissingDependencyError: A package is not installed, or cannot be imported.
    """
    if _replays:
        return None
    if names is None:
        names = [name for name in os.environ.get(TRACK, "").split(",") if name]
        where = TRACK if names else where
    chosen = check_names(names, where)
    if not chosen:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    given = os.environ.get(TRACK_DIR)
    if given:
        folder = Path(given)
    elif folder is None:
        folder = Path(".nanguard/trackers") / stamp
    place = TrackedPlace(
        folder.absolute(), f"{folder.absolute().parent.name}-{stamp}-{os.getpid()}"
    )
    made = [_made(name, place) for name in chosen]
    return Trackers(made, on_failure=on_failure, at_exit=at_exit)


def _made(name: str, place: TrackedPlace) -> Tracker:
    with _same_random_numbers():
        try:
            module = importlib.import_module(f"nanguard.trackers.to_{name}")
            kind: type[Tracker] = getattr(module, _KNOWN[name][0])
            for needed in kind.modules:
                importlib.import_module(needed)
        except ModuleNotFoundError as error:
            raise MissingDependencyError.of(
                f"the tracker {name}", error, extra="trackers"
            ) from error
        except (
            Exception
        ) as error:  # what is installed and broken may raise anything; it is reported
            raise MissingDependencyError(
                f"the tracker {name} is installed, but cannot be imported: "
                f"{type(error).__name__}: {error}",
                where=f"the tracker {name}",
                do=f"See whether it works by itself: python -c 'import {_KNOWN[name][1]}'",
            ) from error
    return kind(TrackedPlace(place.folder / name, place.name))


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Puts back the stream that some libraries draw from when they are imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
