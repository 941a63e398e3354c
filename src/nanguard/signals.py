"""What is usual for a series of numbers: spikes, which its past does not explain, and slow drift.

Pure Python, so that the log rules can use the same code without torch. One principle holds: a value
that was rejected or is not finite never enters a statistic, and every limit is written so that NaN
fails it.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# 1.4826 times the median absolute deviation estimates a normal distribution's sigma.
SIGMA = 1.4826
# How rare, per step, a value must be under the run's own tail before it counts as outside it.
_WARN_ODDS = 1e-5
_ACT_ODDS = 1e-7
# How many times the largest accepted deviation a value must reach. Logarithms have light tails.
_WARN_RECORDS = 2.5
_WARN_RECORDS_OF_LOGS = 2.0
_ACT_RECORDS = 4.0
# A young record means little: it counts double when it is the largest of this many deviations.
_YOUNG = 32
# Accepted values between two looks at the window: its numbers change slowly.
_RELEARN = 8
# A size of spike that came back so often is a kind of batch this run has, not an accident.
_RECURS = 3
# Unusual values with no more than this many usual ones between them are one event: it is news once,
# and again when it gets that many times larger (its logarithm, where that is what is watched).
_EVENT = 16
_NEWS = 2.0
_NEWS_OF_LOGS = 1.25
# Blocks in a row that have to rise before a loss is said to drift; cycles rise for fewer.
_RISING = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest value that passes without a warning, and without action."""

    warn: float
    act: float


# Even before anything is known, a value has to be finite.
LARGEST = sys.float_info.max
OPEN = Limits(LARGEST, LARGEST)


class SpikeWindow:
    """A robust window (median and MAD) over the accepted values of one quantity.

    A value is a spike when it stands further above the median than a multiple of the spread
    *and* further than the upper tail of what this run did before makes plausible. The second
    condition keeps heavy-tailed but healthy losses (reinforcement learning, GANs) silent.

    Attributes:
        size: How many accepted values the window holds.
        warmup: How many it needs before it has an opinion.
        warn: Spreads above the median that earn a warning.
        act: Spreads above the median that make the guard act.
        positive: Whether the quantity is a size (a gradient norm), watched on a log scale.
    """

    def __init__(
        self, *, size: int, warmup: int, warn: float, act: float, positive: bool = False
    ) -> None:
        self.size = size
        self.warmup = warmup
        self.warn = warn
        self.act = act
        self.positive = positive
        self._values = _Latest(size)
        # Deviations in spreads: their tail outlives a trend, so it may be longer than the window.
        self._deviations = _Latest(4 * size)
        # Deviations beyond the limits, warned about or rejected; of each event what was news last,
        # and how many values came in since.
        self._outside: deque[float] = deque(maxlen=4 * _RECURS)
        self._events: deque[float] = deque(maxlen=4 * _RECURS)
        self._since_event = _EVENT + 1
        self._news = _NEWS_OF_LOGS if positive else _NEWS
        # How many values came in, and the largest of the latest that nobody was warned about: each
        # with its number, and only those that no later one exceeds.
        self._count = 0
        self._largest: deque[tuple[int, float]] = deque()
        self._start: float | None = None
        self._center, self._spread = 0.0, 1.0
        # The limits in spreads above the center, and as they apply to values.
        self._reach = self._limits = OPEN
        self._unlearned = 0

    def __len__(self) -> int:
        return len(self._values)

    def accept(self, value: float) -> None:
        """Takes in a value that was neither rejected nor non-finite."""
        if not math.isfinite(value):
            return
        inner = math.log(max(value, 1e-30)) if self.positive else value
        self._values.add(inner)
        if self._start is not None:
            deviation = (inner - self._center) / self._spread
            if deviation <= self._reach.warn:
                self._since_event += 1
                self._deviations.add(deviation)
                self._add_usual(inner)
            else:
                self._outside.append(deviation)
                self._add_to_event(deviation)
                self._set_limits()
            self._unlearned += 1
            if self._unlearned == _RELEARN:
                self._learn()
        elif len(self._values) == self.warmup:
            self._start = median_of(sorted([abs(v) for v in self._values]))
            self._learn_level()
            for v in self._values:
                self._deviations.add((v - self._center) / self._spread)
                self._add_usual(v)
            self._learn()

    def _add_to_event(self, deviation: float) -> None:
        if self._since_event > _EVENT:
            self._events.append(deviation)
        elif deviation > self._news * self._events[-1]:
            self._events[-1] = deviation
        self._since_event = 0

    def _add_usual(self, inner: float) -> None:
        largest, self._count = self._largest, self._count + 1
        while largest and largest[-1][1] <= inner:
            largest.pop()
        largest.append((self._count, inner))
        if largest[0][0] <= self._count - self.size:
            largest.popleft()

    def reject(self, value: float) -> None:
        """Remembers the size of a spike that was acted on; the window itself stays as it is."""
        if self._start is None or not math.isfinite(value):
            return
        inner = math.log(max(value, 1e-30)) if self.positive else value
        self._outside.append((inner - self._center) / self._spread)
        self._set_limits()

    def limits(self) -> Limits:
        """Returns the limits for the next value; open while the window is still learning."""
        return self._limits

    def state_dict(self) -> dict[str, Any]:
        """Returns what the window has learned."""
        return {
            "values": list(self._values),
            "deviations": list(self._deviations),
            "outside": list(self._outside),
            "events": list(self._events),
            "since_event": self._since_event,
            "start": self._start,
            "level": [self._center, self._spread],
            "reach": [self._reach.warn, self._reach.act],
            "unlearned": self._unlearned,
            "count": self._count,
            "largest": [list(one) for one in self._largest],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._values = _Latest(self.size, state["values"])
        self._deviations = _Latest(4 * self.size, state["deviations"])
        self._outside = deque(state["outside"], maxlen=4 * _RECURS)
        # Snapshots of earlier versions have neither of these two.
        self._events = deque(state.get("events", []), maxlen=4 * _RECURS)
        self._since_event = state.get("since_event", _EVENT + 1)
        self._start = state["start"]
        self._center, self._spread = state["level"]
        self._reach = Limits(*state["reach"])
        self._unlearned = state["unlearned"]
        self._count = state.get("count", 0)  # snapshots of earlier versions have none
        self._largest = deque((number, inner) for number, inner in state.get("largest", []))
        self._set_limits()

    def _learn(self) -> None:
        """Takes the limits from the window."""
        self._unlearned = 0
        self._learn_level()
        deviations = self._deviations.ordered
        tail = _Tail.of(deviations)
        record = deviations[-1] * (1.0 + _YOUNG / len(deviations))
        warn_records = _WARN_RECORDS_OF_LOGS if self.positive else _WARN_RECORDS
        self._reach = Limits(
            warn=max(self.warn, tail.reach(_WARN_ODDS), warn_records * record),
            act=max(self.act, tail.reach(_ACT_ODDS), _ACT_RECORDS * record),
        )
        self._set_limits()

    def _set_limits(self) -> None:
        warn, act = self._reach.warn, self._reach.act
        if len(self._outside) >= _RECURS:
            act = max(act, 1.25 * sorted(self._outside)[-_RECURS])
        if len(self._events) >= _RECURS:
            warn = max(warn, self._news * sorted(self._events)[-_RECURS])
        if self._events and self._since_event <= _EVENT:
            warn = max(warn, self._news * self._events[-1])
        # What is no larger than a value that was usual lately is not unusual, however little the
        # others spread by now.
        seen = (self._largest[0][1] - self._center) / self._spread if self._largest else 0.0
        self._limits = Limits(self._outer(max(warn, seen)), self._outer(max(act, seen)))

    def _learn_level(self) -> None:
        center = median_of(self._values.ordered)
        mad = SIGMA * _median_distance(self._values.ordered, center)
        if self.positive:
            floor = 0.1
        else:
            # A loss close to zero still moves by fractions of where it began.
            floor = max(0.02 * abs(center), 0.005 * (self._start or 0.0), 1e-12)
        self._center, self._spread = center, max(mad, floor)

    def _outer(self, deviation: float) -> float:
        inner = self._center + self._spread * deviation
        if not self.positive:
            return min(inner, LARGEST)
        return math.exp(inner) if inner < 700.0 else LARGEST


class _Latest:
    """The latest values: as they came, and by size, so that nothing has to be sorted again.

    Attributes:
        ordered: The values by size.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._values = deque(values, maxlen=size)
        self.ordered = sorted(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def add(self, value: float) -> None:
        """Takes in a value; the oldest one goes if there are many."""
        if len(self._values) == self._size:
            del self.ordered[bisect_left(self.ordered, self._values[0])]
        self._values.append(value)
        insort(self.ordered, value)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The upper tail of a sample as a generalised Pareto distribution."""

    begin: float = 0.0
    share: float = 1.0
    scale: float = 0.0
    shape: float = 0.0

    @classmethod
    def of(cls, ordered: list[float]) -> _Tail:
        """Fits the upper tenth with the moment estimator of Dekkers, Einmahl and de Haan."""
        count = max(8, len(ordered) // 10)
        begin = ordered[-count - 1]
        if begin <= 0.0:
            return cls()
        logs = [math.log(v / begin) for v in ordered[-count:]]
        first = sum(logs) / count
        second = sum(v * v for v in logs) / count
        if second <= first * first:
            return cls(begin, count / len(ordered), 0.0, 0.0)
        light = 1.0 - 0.5 / (1.0 - first * first / second)
        scale = begin * first * (1.0 - min(light, 0.0))
        return cls(begin, count / len(ordered), scale, first + light)

    def reach(self, odds: float) -> float:
        """Returns the value that this tail exceeds with the given odds."""
        rarity = math.log(self.share / odds)
        shape = min(self.shape, 2.0)
        if abs(shape) < 1e-6:
            return self.begin + self.scale * rarity
        return self.begin + self.scale * math.expm1(shape * rarity) / shape


def median_of(ordered: list[float]) -> float:
    """Returns the median of values that are in order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _median_distance(ordered: list[float], center: float) -> float:
    """Returns the median distance of values, which are in order, from a point."""
    half = len(ordered) // 2
    upper = _distance(ordered, center, half)
    return upper if len(ordered) % 2 else (_distance(ordered, center, half - 1) + upper) / 2


def _distance(ordered: list[float], center: float, rank: int) -> float:
    """Returns how far the value at a rank is from a point; the nearest one has rank 0."""
    # The nearest ones stand side by side: where they begin is looked for.
    low, high = 0, len(ordered) - rank - 1
    while low < high:
        middle = (low + high) // 2
        if center - ordered[middle] > ordered[middle + rank + 1] - center:
            low = middle + 1
        else:
            high = middle
    return max(center - ordered[low], ordered[low + rank] - center)


class DriftWatch:
    """Warns of slow divergence: a loss that gives back much of what it had gained.

    It compares the medians of whole blocks of accepted values, so single spikes do not count. A
    loss that never fell (reinforcement learning, the generator of a GAN) gained nothing, so it
    has nothing to give back and stays silent, unless mere growth is to be reported.

    Attributes:
        block: How many accepted values make one median.
        growth: How many times its first median a loss that never fell may grow; None for any.
    """

    def __init__(self, *, block: int, growth: float | None = None) -> None:
        self.block = block
        self.growth = growth
        self._current: list[float] = []
        self._medians: deque[float] = deque(maxlen=_RISING + 1)
        self._start: float | None = None
        self._best = math.inf
        self._best_spread = 0.0
        self._told = False

    def accept(self, value: float) -> str | None:
        """Takes in an accepted value; returns a message when the loss has begun to diverge."""
        if not math.isfinite(value):
            return None
        self._current.append(value)
        if len(self._current) < self.block:
            return None
        ordered = sorted(self._current)
        self._current = []
        median = median_of(ordered)
        spread = SIGMA * median_of(sorted(abs(v - median) for v in ordered))
        self._medians.append(median)
        if self._start is None:
            self._start = median
        if median < self._best:
            self._best, self._best_spread, self._told = median, spread, False
        return self._judge(median, self._start)

    @property
    def recovered(self) -> bool:
        """Whether the last median is no longer that of a loss that diverges."""
        if self._start is None:
            return True
        return self._lost(self._medians[-1], self._start) is None

    def _judge(self, median: float, start: float) -> str | None:
        recent = list(self._medians)
        rising = len(recent) > _RISING and all(a < b for a, b in pairwise(recent))
        lost = self._lost(median, start) if rising and not self._told else None
        if lost is None:
            return None
        self._told = True
        return (
            f"the loss rises: its median over {self.block} steps went from {name_of(self._best)} "
            f"at best to {name_of(median)}, {lost}"
        )

    def _lost(self, median: float, start: float) -> str | None:
        """Returns how much of its gain a loss has given back, if that is much."""
        noise = 6.0 * max(self._best_spread, 0.01 * abs(self._best))
        gained, lost = start - self._best, median - self._best
        if gained > noise:
            return (
                f"{lost / gained:.0%} of all it had gained"
                if lost > max(noise, 0.5 * gained)
                else None
            )
        if self.growth is not None and start > 0.0 and median > self.growth * start:
            return f"{median / start:.3g} times where it began"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the watch has seen."""
        return {
            "current": list(self._current),
            "medians": list(self._medians),
            "start": self._start,
            "best": self._best,
            "best_spread": self._best_spread,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._current = list(state["current"])
        self._medians = deque(state["medians"], maxlen=_RISING + 1)
        self._start = state["start"]
        self._best = state["best"]
        self._best_spread = state["best_spread"]
        self._told = state["told"]


class ScaleWatch:
    """Warns of a GradScaler whose scale keeps falling.

    The first fall from the initial scale is how the scaler finds its level. A fall after that
    says that gradients overflow whatever the scale is.

    Attributes:
        calm: Steps without a fall after which the scale counts as settled.
        factor: How far below its settled value it may fall without a warning.
        patient: Whether a scale that settles again further down is still held to where it came
            from, until it grows: for falls with long rests between them.
    """

    def __init__(self, *, calm: int = 20, factor: float = 32.0, patient: bool = False) -> None:
        self.calm = calm
        self.factor = factor
        self.patient = patient
        self._last: float | None = None
        self._quiet = 0
        self._level: float | None = None
        self._told = False

    def accept(self, scale: float) -> str | None:
        """Takes in the scale after a step; returns a message when it keeps falling."""
        if not math.isfinite(scale):
            return None
        fell = self._last is not None and scale < self._last
        grew = self._last is not None and scale > self._last
        self._last = scale
        self._quiet = 0 if fell else self._quiet + 1
        held = self.patient and not grew and self._level is not None and self._level > scale
        if self._quiet >= self.calm and not held:
            self._level, self._told = scale, False
        low = scale < 1.0 or (self._level is not None and scale <= self._level / self.factor)
        if self._told or not (fell and low):
            return None
        self._told = True
        before = "" if self._level is None else f" from {name_of(self._level)}"
        return f"the loss scale fell{before} to {name_of(scale)}: gradients overflow at any scale"

    def state_dict(self) -> dict[str, Any]:
        """Returns what the watch has seen."""
        return {
            "last": self._last,
            "quiet": self._quiet,
            "level": self._level,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned."""
        self._last = state["last"]
        self._quiet = state["quiet"]
        self._level = state["level"]
        self._told = state["told"]
