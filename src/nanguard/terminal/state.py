"""What is known about one run that is watched."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.report.fields import literal
from nanguard.rules.log.judging import is_game, main_losses, main_norms
from nanguard.sources.log.names import Role
from nanguard.sources.log.series import Log, MetricSeries
from nanguard.terminal.judging import Judge, Told
from nanguard.terminal.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.terminal.reading import News

_MOST_CHANNELS = 64
_MOST_HAPPENINGS = 500
# Seconds over which the pace is taken, and how many of its points are kept.
_PACE = 60.0
_TEXT = 300
# Seconds for which an alarm stands in the line of state after it was raised.
_FRESH = 60.0
_JUDGED = (Role.LOSS, Role.GRAD_NORM, Role.SCALE)
# What the guard does about a step; anything else is only told.
_ACTIONS = frozenset(("skip", "cut-lr", "rollback", "stop"))


@dataclass(slots=True)
class Happening:
    """Something that happened in a run.

    Attributes:
        kind: The name of what it is.
        text: The same in words, safe to be shown.
        step: Its step, if one is known.
        alarm: Whether it was an alarm.
        clock: When it was seen.
        count: How often it came in a row.
        last: The last step of the row.
        value: The number it is about.
        old: Whether it stood in the log before the watch began.
        about: The series it is about, if it is about one.
        seen: When it came last.
    """

    kind: str
    text: str
    step: int | None
    alarm: bool
    clock: float
    count: int = 1
    last: int | None = None
    value: float | None = None
    old: bool = False
    about: str = ""
    seen: float = 0.0


@dataclass(slots=True)
class Channel:
    """One series: its curve, its last number, and who judges it."""

    series: MetricSeries
    judge: Judge
    trace: Trace = field(default_factory=Trace)
    last: float = 0.0
    step: int | None = None
    lowest: float = float("inf")
    lowest_step: int | None = None
    count: int = 0


class RunState:
    """What is known about one run.

    Attributes:
        name: How it is called.
        channels: Its series.
        step: The last step; None if the log has none.
        epoch: The last epoch.
        total: How many steps there will be, if somebody says it.
        lines: How many lines were read.
        ended: Whether the log says that the run has ended.
        happenings: What happened, the last one last.
        grown: When the log last grew.
        alarms: How many alarms there were.
    """

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name = name
        self.channels: dict[tuple[str, str, int | None], Channel] = {}
        self.step: int | None = None
        self.epoch: float | None = None
        self.total = total
        self._fixed_total = total is not None
        self.lines = 0
        self.ended = False
        self.happenings: deque[Happening] = deque(maxlen=_MOST_HAPPENINGS)
        self.grown: float | None = None
        self.alarms = 0
        self._meta = Log(name)
        self._pace: deque[tuple[float, int]] = deque(maxlen=600)
        self._judged: set[tuple[str, str, int | None]] = set()

    def take(self, news: News, *, old: bool) -> list[Happening]:
        """Takes in what is new; returns what is to be told anew.

        Args:
            news: What was read.
            old: Whether it stood there before the watch began.
        """
        self.lines += news.lines
        self.ended = news.ended
        if news.total and not self._fixed_total:
            self.total = news.total
        told: list[Happening] = []
        for series in news.log.series:
            told += self._take_series(series, sparse=news.log.sparse, old=old)
        for note in news.log.notes:
            said = Told("log-says", f"the log says: {note.said}", note.step, again=True)
            told += self._tell([said], old=old)
        told += self._tell([_told_by_guard(event) for event in news.events], old=old)
        if self.total is not None and self.step is not None and self.step > self.total:
            self.total = self.total if self._fixed_total else None
        if not old and self.step is not None and news.log.series:
            self._pace.append((time.monotonic(), self.step))
        return told

    def tell(
        self, kind: str, text: str, *, alarm: bool = False, old: bool = False
    ) -> list[Happening]:
        """Adds something that is not in the log; returns it as something to be told."""
        return self._tell([Told(kind, text, self.step, alarm=alarm)], old=old)

    def _take_series(self, series: MetricSeries, *, sparse: bool, old: bool) -> list[Happening]:
        channel = self._channel(series)
        if channel is None or not len(series):
            return []
        count = len(series)
        steps = list(series.steps) if len(series.steps) == count else None
        if len(series.epochs) == count and not series.metric.evaluation:
            self.epoch = series.epochs[-1]
        told: list[Happening] = []
        begins = bool(steps and channel.step is not None and steps[0] < channel.step / 2)
        if begins and steps and self.step is not None and steps[0] < self.step / 2:
            said = f"after step {self.step} the log goes on with step {steps[0]}"
            told += self._tell([Told("restart", said, steps[0], alarm=False)], old=old)
        channel.trace.extend(series.values, steps, begins=begins)
        _note_last(channel, series.values, steps)
        if steps and not series.metric.evaluation:
            self.step = steps[-1]
        if self._is_judged(channel):
            channel.judge.sparse = sparse
            told += self._tell(channel.judge.look(series.values, steps), old=old, of=channel)
        return told

    def _channel(self, series: MetricSeries) -> Channel | None:
        key = (series.metric.key, series.label, series.rank)
        channel = self.channels.get(key)
        if channel is None and len(self.channels) < _MOST_CHANNELS:
            meta = MetricSeries(series.metric, series.label, series.rank)
            rank = "" if series.rank is None else f" of rank {series.rank}"
            judge = Judge(literal(f"{series.name}{rank}", 80), series.role)
            channel = self.channels[key] = Channel(meta, judge)
            self._meta.series.append(meta)
            self._choose()
        return channel

    def _choose(self) -> None:
        """Finds out anew which series are judged; a series that is new may change that."""
        chosen = [*main_losses(self._meta), *main_norms(self._meta), *self._meta.of(Role.SCALE)]
        game, scaled = is_game(self._meta), bool(self._meta.of(Role.SCALE))
        self._judged = {(s.metric.key, s.label, s.rank) for s in chosen}
        for channel in self.channels.values():
            channel.judge.game, channel.judge.scaled = game, scaled

    def _is_judged(self, channel: Channel) -> bool:
        series = channel.series
        key = (series.metric.key, series.label, series.rank)
        return key in self._judged and series.role in _JUDGED

    def _tell(
        self, told: Iterator[Told] | Sequence[Told], *, old: bool, of: Channel | None = None
    ) -> list[Happening]:
        new: list[Happening] = []
        for one in told:
            about = of.judge.name if of else ""
            last = self._last_of(one.kind, about) if one.again else None
            if last is not None:
                last.count, last.last, last.value = last.count + 1, one.step, one.value
                last.seen = time.time()
                if not one.alarm or last.alarm:
                    continue
                last.alarm = True  # what began as a warning
                self.alarms += not old
                new.append(last)
                continue
            happening = Happening(
                one.kind,
                literal(one.text, _TEXT),
                one.step,
                one.alarm,
                time.time(),
                value=one.value,
                old=old,
                about=about,
                seen=time.time(),
            )
            self.alarms += one.alarm and not old
            self.happenings.append(happening)
            new.append(happening)
        return new

    def _last_of(self, kind: str, about: str) -> Happening | None:
        """Returns what something goes on with; None if that was long ago."""
        for happening in reversed(self.happenings):
            if happening.kind == kind and happening.about == about:
                recent = bool(about) or time.time() - happening.seen < _FRESH
                return happening if recent else None
        return None

    def main(self, role: Role) -> Channel | None:
        """Returns the series of a role that tells most; None if there is none."""
        own = [c for c in self.channels.values() if c.series.role is role]
        training = [c for c in own if not c.series.metric.evaluation] or own
        plain = [c for c in training if c.series.metric.plain] or training
        return max(plain, key=lambda channel: channel.count, default=None)

    def pace(self) -> float | None:
        """Returns how many steps are made in a second; None if that is not known yet."""
        now = time.monotonic()
        while len(self._pace) > 2 and self._pace[0][0] < now - _PACE:
            self._pace.popleft()
        if len(self._pace) < 2:
            return None
        (began, first), (_, last) = self._pace[0], self._pace[-1]
        return (last - first) / (now - began) if now - began > 1.0 and last > first else None

    def bad_loss(self) -> str:
        """Returns which loss is not finite at this moment, in words; nothing if none is."""
        for channel in self.channels.values():
            judge = channel.judge
            if judge.bad and judge.role is Role.LOSS and self._is_judged(channel):
                return f"{judge.name} is not finite"
        return ""

    def bad_now(self) -> str:
        """Returns what is wrong at this moment, in words; nothing if nothing is."""
        return self.bad_loss() or next(
            (
                one.text
                for one in reversed(self.happenings)
                if one.alarm and not one.old and time.time() - one.clock < _FRESH
            ),
            "",
        )


def _note_last(channel: Channel, values: Sequence[float], steps: list[int] | None) -> None:
    channel.count += len(values)
    channel.last = values[-1]
    channel.step = steps[-1] if steps else channel.step
    if math.isfinite(sum(values)):
        low = min(values)
    else:
        low = min((value for value in values if math.isfinite(value)), default=math.inf)
    if low < channel.lowest:
        channel.lowest = low
        channel.lowest_step = steps[list(values).index(low)] if steps else None


def _told_by_guard(record: dict[str, Any]) -> Told:
    step, action = record.get("step"), str(record.get("action", ""))
    said = str(record.get("message") or record.get("name") or "an event")
    done = f" ({action})" if action in _ACTIONS else ""
    bad = record.get("severity") in ("error", "warning") or action in _ACTIONS
    name = literal(str(record.get("name") or "event"), 40)
    whole = step if isinstance(step, int) and 0 <= step < 2**53 else None
    return Told(f"guard:{name}", f"guard: {said}{done}", whole, alarm=bad, again=True)
