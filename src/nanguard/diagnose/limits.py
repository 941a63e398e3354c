"""How long an explanation may take: a multiple of what was measured, more on a busy machine.

A limit in plain seconds makes an unexplained incident of every step that is slow, and of every
machine that others use, too. Here the time the run took up to the step says how long one replay
may take, and the load of the machine stretches that. A number of seconds that the user has
chosen is kept to as it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nanguard.incident import Incident

# The environment variable with the seconds that the user allows for one explanation.
VARIABLE = "NANGUARD_EXPLAIN_SECONDS"
# The note, beside the other notes of a run, that says until when a replay may go on.
TRYING = "trying-"
# Seconds that every replay may take: the step of a small script is made at once, but importing
# what it needs from a cold disk is not.
SHORTEST = 30.0
# How much longer a replay may take than the run took: operations are watched one by one.
SLOWDOWN = 4.0
# How many replays of the longest kind an explanation may make.
REPLAYS = 6.0
# An explanation needs the traced replay, and two with something changed.
FEWEST_REPLAYS = 3.0
# Seconds up to a step from a recent copy of the process, if nobody has measured them, and how
# many steps that copy may be behind.
RECENT = 60.0
RECENT_STEPS = 3
# Processes that wait for a disk count as load; a network drive that hangs must not stretch a limit
# to hours.
MOST_LOAD = 16.0
# Seconds that may pass between two replays, while nothing tells of progress.
BETWEEN = 30.0


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """What one explanation may take, in seconds.

    Attributes:
        replay: The longest replay.
        total: All replays together.
        fixed: Whether the user has chosen the total; otherwise these are seconds of an idle
            machine.
    """

    replay: float
    total: float
    fixed: bool = False

    def allows(self, to_step: float) -> bool:
        """Returns whether the replays that any explanation needs can be made.

        Args:
            to_step: Seconds from where a replay begins to the step.
        """
        return FEWEST_REPLAYS * to_step <= self.total


def limits_for(to_step: float, total: float | None = None) -> TimeLimits:
    """Returns what an explanation may take.

    Args:
        to_step: Seconds from where a replay begins to the step, as measured in the run.
        total: Seconds for all replays that the user has chosen; None for no such choice.
    """
    replay = max(SHORTEST, SLOWDOWN * to_step)
    if total is None:
        return TimeLimits(replay, REPLAYS * replay)
    return TimeLimits(max(min(replay, total), total / 3), total, fixed=True)


def seconds_to_step(incident: Incident, method: str | None = "second-run") -> float:
    """Returns how many seconds lie between the beginning of a replay and the step.

    Args:
        incident: The incident, with what was measured in its run.
        method: How it is replayed; only a second run begins with the first line.
    """
    run = incident.get("run")
    run = run if isinstance(run, dict) else {}
    seconds, ordinal = _number(run.get("seconds")), _number(run.get("ordinal"))
    if method == "second-run":
        return seconds
    return min(seconds, max(RECENT, RECENT_STEPS * seconds / (ordinal + 1)))


def _number(value: Any) -> float:
    good = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0


def chosen_total() -> float | None:
    """Returns the seconds that the user allows for one explanation; None for no such choice."""
    try:
        seconds = float(os.environ.get(VARIABLE, ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def load_factor(load: float, cores: int) -> float:
    """Returns how much longer everything takes on a machine with this load; at least 1.

    Args:
        load: How many processes want to run.
        cores: How many of them can.
    """
    factor = load / max(cores, 1)
    return min(max(factor, 1.0), MOST_LOAD) if math.isfinite(factor) else 1.0


def load_now() -> float:
    """Returns the load factor of this machine: of the last minute, or right now if that is more."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return 1.0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as file:  # noqa: PTH123
        # The average knows nothing of a job that has just been started.
        load = max(load, float(file.read().split()[3].split("/")[0]))
    return load_factor(load, _cores())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _idle() -> float:
    return 1.0


class Budget:
    """The time of one explanation, used up replay by replay.

    A second on a machine with a load factor of 3 uses up a third of a second.
    """

    def __init__(
        self,
        limits: TimeLimits,
        *,
        load: Callable[[], float] = load_now,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[float], None] | None = None,
    ) -> None:
        """Begins with all of the time.

        Args:
            limits: What the explanation may take.
            load: Returns the load factor.
            clock: Returns the time in seconds.
            note: Called before each replay with the seconds it may take.
        """
        self._limits = limits
        self._left = limits.total
        self._load = _idle if limits.fixed else load
        self._clock = clock
        self._note = note

    @property
    def is_used_up(self) -> bool:
        """Whether there is no time for another replay."""
        return self._left <= 0

    @contextlib.contextmanager
    def replay(self) -> Iterator[float]:
        """Gives out the seconds of one replay, and counts those that it took."""
        load, began = self._load(), self._clock()
        seconds = min(self._limits.replay, self._left) * load
        if self._note is not None:
            self._note(seconds)
        try:
            yield seconds
        finally:
            self._left -= (self._clock() - began) / max(load, self._load())


def note_replay(path: Path, seconds: float) -> None:
    """Leaves word for whoever waits that a replay has begun, and how long it may take."""
    draft = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps({"until": time.monotonic() + seconds}))
        draft.replace(path)


def read_note(path: Path) -> float | None:
    """Returns until when, on the monotonic clock, a replay may go on; None if nothing says so."""
    try:
        until = json.loads(path.read_text())["until"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(until) if isinstance(until, (int, float)) else None


def deadline(since: float, seconds: float, until: float | None, load: float) -> float:
    """Returns when an explanation that somebody waits for has shown no progress for too long.

    Args:
        since: When it was first waited for.
        seconds: How long it may take to begin with its first replay, on an idle machine.
        until: When its present replay must have ended; None if it has not begun with any.
        load: The load factor of the machine.
    """
    if until is None:
        return since + seconds * load
    return until + BETWEEN * load
