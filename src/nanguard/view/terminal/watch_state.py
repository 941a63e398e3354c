"""What is known about one run that is watched: its series, and what happened in them."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.quantities import Quantity
from nanguard.check.log.series import Log, MetricSeries
from nanguard.findings import Severity
from nanguard.view.report.verdict import judge_log
from nanguard.view.report.words import literal
from nanguard.view.terminal.plot import PlotTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.report.verdict import MarkedPlace
    from nanguard.view.terminal.tail import News

# Series of a run and happenings that are kept.
_MOST_CHANNELS = 64
_MOST_HAPPENINGS = 500
# Seconds over which the pace is taken, and how many of its points are kept.
_PACE = 60.0
_TEXT = 300
# Seconds for which an alarm stands in the line of state after it was raised.
_FRESH = 60.0
# Numbers after which a spike is a new one.
_WAKE = 20
_MOST_RESTARTS = 5
# What the guard does about a step; anything else is only reported.
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
    seen: float = 0.0


@dataclass(slots=True)
class Channel:
    """One series.

    Attributes:
        series: What it is; its numbers are not kept.
        name: How it is called, safe to be shown.
        trace: Its curve.
        last: Its last number.
        step: The step of that; None if the log has none.
        epoch: The epoch of that.
        lowest: Its lowest number.
        lowest_step: The step of that.
        count: How many numbers it has.
    """

    series: MetricSeries
    name: str
    trace: PlotTrace = field(default_factory=PlotTrace)
    last: float = 0.0
    step: int | None = None
    epoch: float | None = None
    lowest: float = math.inf
    lowest_step: int | None = None
    count: int = 0

    def extend(
        self, values: Sequence[float], steps: Sequence[int] | None, *, begins: bool = False
    ) -> None:
        """Takes in numbers, and whether a new run begins with them."""
        self.trace.extend(values, steps, begins=begins)
        self.count += len(values)
        self.last = values[-1]
        self.step = steps[-1] if steps else self.step
        if math.isfinite(sum(values)):
            low = min(values)
        else:
            low = min((value for value in values if math.isfinite(value)), default=math.inf)
        if low < self.lowest:
            self.lowest = low
            self.lowest_step = steps[list(values).index(low)] if steps else None

    def restarts(self, series: MetricSeries) -> list[int]:
        """Returns where in new numbers steps begin anew; those of an epoch that is new do not."""
        count = len(series)
        if len(series.steps) != count:
            return []
        epochs = series.epochs if len(series.epochs) == count else None
        found = [
            index
            for index in series.steps.restarts()
            if not (epochs and epochs[index] > epochs[index - 1])
        ]
        on = epochs is not None and self.epoch is not None and epochs[0] > self.epoch
        if self.step is not None and series.steps[0] < self.step / 2 and not on:
            found.insert(0, 0)
        self.epoch = epochs[-1] if epochs else self.epoch
        return found


@dataclass(slots=True)
class _Shown:
    """A fault of a series that was reported.

    Attributes:
        happening: What was reported.
        start: Where in the series it begins.
        last: Where the last of its numbers that were counted stands.
        over: Whether its end was reported.
    """

    happening: Happening
    start: int
    last: int
    over: bool = False


class RunState:
    """What is known about one run.

    Attributes:
        name: How it is called.
        logs: What its logs say, by their paths.
        channels: Its series.
        step: The last step; None if the log has none.
        epoch: The last epoch.
        total: How many steps there will be, if somebody says it.
        lines: How many lines were read.
        ended: Whether the log says that the run has ended.
        happenings: What happened, the last one last.
        grown: When the log last grew.
        alarms: How many alarms there were.
        unjudged: Whether there are numbers that were not judged yet.
        urgent: Whether one of these is the first of its series that is not finite.
    """

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name = name
        self.logs: dict[str, Log] = {}
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
        self.unjudged = self.urgent = False
        self._bad_loss = ""
        self._shown: dict[tuple[object, ...], _Shown] = {}
        self._restarts = 0
        self._pace: deque[tuple[float, int]] = deque(maxlen=600)

    def take(self, news: News, *, old: bool) -> list[Happening]:
        """Takes in what is new in a log; returns what is to be reported at once.

        Args:
            news: What was read.
            old: Whether it stood there before the watch began.
        """
        self.lines += news.lines
        self.ended = news.ended
        self.count_to(news.done, news.total)
        happenings = self._take_numbers(news.log, old=old)
        self.logs.setdefault(news.log.path, Log(news.log.path)).extend(news.log)
        for event in news.events:
            happenings += self._report_event(event, old=old)
        return happenings

    def take_whole(self, log: Log, *, old: bool) -> list[Happening]:
        """Takes in a log that was read from its beginning; returns what to report at once."""
        before = self.logs.get(log.path, Log(log.path))
        known = {(s.metric.key, s.label, s.rank): len(s) for s in before.series}
        later = Log(log.path, sparse=log.sparse)
        for series in log.series:
            start = known.get((series.metric.key, series.label, series.rank), 0)
            if start < len(series):
                new = MetricSeries(series.metric, series.label, series.rank)
                new.extend_by(series, start)
                later.series.append(new)
        happenings = self._take_numbers(later, old=old)
        happenings += self._report_problem(log, old=old)
        self.logs[log.path] = log
        self.unjudged = True
        lines = [one.lines[len(one.lines) - 1] for one in log.series if len(one.lines)]
        self.lines = max(self.lines, *lines) if lines else self.lines
        return happenings

    def count_to(self, done: int | None, total: int | None) -> None:
        """Takes note of how many steps a log says there are, and were made."""
        if total and not self._fixed_total:
            self.total = total
        if self._counted_by_bar:
            self.step = done if done is not None else self.step

    def judge(self, *, old: bool) -> list[Happening]:
        """Judges all that was read; returns what is new.

        Args:
            old: Whether it stood there before the watch began.
        """
        self.unjudged = self.urgent = False
        self._bad_loss = ""
        happenings: list[Happening] = []
        for log in list(self.logs.values()):
            for place in judge_log(log).places():
                happenings += self._report_place(log, place, old=old)
                if place.finding.name == "non-finite-loss" and not place.over:
                    self._bad_loss = f"{literal(str(place.finding.where), 80)} is not finite"
        return happenings

    def report(
        self, kind: str, text: str, *, alarm: bool = False, old: bool = False
    ) -> list[Happening]:
        """Adds something that is not in the log; returns it as something to be reported."""
        return [self._add(kind, text, self.step, alarm=alarm, old=old)]

    def reached_total(self) -> bool:
        """Returns whether the last step was made.

        A log that names epochs may count the steps of each of them.
        """
        if self.total is None or self.step is None or self._counted_by_bar:
            return False
        return self.step >= self.total and (self.epoch is None or self._fixed_total)

    @property
    def _counted_by_bar(self) -> bool:
        """Whether no number of the log has a step, so that a progress bar has to tell it."""
        return all(channel.step is None for channel in self.channels.values())

    def _take_numbers(self, log: Log, *, old: bool) -> list[Happening]:
        happenings: list[Happening] = []
        for series in log.series:
            happenings += self._take_series(series, old=old)
        self.unjudged = self.unjudged or bool(log.series or log.notes)
        self.step = _last_step(log, self.step)
        if self.total is not None and self.step is not None and self.step > self.total:
            self.total = self.total if self._fixed_total else None
        if not old and self.step is not None and log.series:
            self._pace.append((time.monotonic(), self.step))
        return happenings

    def _take_series(self, series: MetricSeries, *, old: bool) -> list[Happening]:
        channel = self._channel(series)
        if channel is None or not len(series):
            return []
        count = len(series)
        steps = list(series.steps) if len(series.steps) == count else None
        if len(series.epochs) == count and not series.metric.evaluation:
            self.epoch = series.epochs[-1]
        if math.isfinite(channel.last) and not math.isfinite(sum(series.values)):
            self.urgent = True
        return self._extend(channel, series.values, steps, channel.restarts(series), old=old)

    def _extend(
        self,
        channel: Channel,
        values: Sequence[float],
        steps: list[int] | None,
        restarts: list[int],
        *,
        old: bool,
    ) -> list[Happening]:
        """Adds numbers to a series; returns what is to be reported about restarts in them."""
        happenings: list[Happening] = []
        # More of them are epochs that count their batches from the start.
        restarts = restarts if len(restarts) <= _MOST_RESTARTS else []
        cuts = [at for at in restarts if at]
        for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
            begins = begin in restarts
            if begins and steps and channel is self.main(Quantity.LOSS):
                happenings += self._report_restart(channel.step, steps[begin], old=old)
            channel.extend(values[begin:end], steps[begin:end] if steps else None, begins=begins)
        return happenings

    def _channel(self, series: MetricSeries) -> Channel | None:
        key = (series.metric.key, series.label, series.rank)
        channel = self.channels.get(key)
        if channel is None and len(self.channels) < _MOST_CHANNELS:
            meta = MetricSeries(series.metric, series.label, series.rank)
            rank = "" if series.rank is None else f" of rank {series.rank}"
            name = literal(f"{series.name}{rank}", 80)
            channel = self.channels[key] = Channel(meta, name)
        return channel

    def _report_restart(self, before: int | None, after: int, *, old: bool) -> list[Happening]:
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            return []
        said = f"after step {before} the log goes on with step {after}"
        return [self._add("restart", said, after, alarm=False, old=old)]

    def _report_problem(self, log: Log, *, old: bool) -> list[Happening]:
        key = (log.path, "unreadable")
        if log.problem is None or key in self._shown:
            return []
        said = f"{log.problem.what} {log.problem.do}"
        happening = self._add("unreadable", said, self.step, alarm=False, old=old)
        self._shown[key] = _Shown(happening, 0, 0)
        return [happening]

    def _report_place(self, log: Log, place: MarkedPlace, *, old: bool) -> list[Happening]:
        """Reports a place that is new, or adds to what was reported about it."""
        finding = place.finding
        kind = "log-says" if place.in_words else finding.name
        key = (log.path, kind, finding.name, finding.where, finding.rank)
        shown = self._shown.get(key)
        is_spike = place.value is not None and math.isfinite(place.value)
        if shown is None or place.index > shown.last + (_WAKE if is_spike else 0):
            alarm = finding.severity is not Severity.INFO
            said = self._add(kind, place.text, place.step, alarm=alarm, old=old, value=place.value)
            said.count, said.last = place.count, place.last
            self._shown[key] = _Shown(said, place.index, place.index)
            return [said, *self._report_end(self._shown[key], place, old=old)]
        if place.index == shown.start:
            if shown.last == shown.start:
                shown.happening.count, shown.happening.last = place.count, place.last
            return self._report_end(shown, place, old=old)
        if place.index > shown.last:
            # So close to the one before that it is part of it.
            shown.last = place.index
            shown.happening.count += place.count
            shown.happening.last = place.last if place.last is not None else place.step
            shown.happening.seen = time.time()
        return []

    def _report_end(self, shown: _Shown, place: MarkedPlace, *, old: bool) -> list[Happening]:
        """Tells that numbers are finite again, once."""
        bad = place.value is not None and not math.isfinite(place.value)
        if shown.over or not place.over or not bad:
            return []
        shown.over = True
        many = "one value that was" if place.count == 1 else f"{place.count} values that were"
        said = f"{place.finding.where} is finite again after {many} not"
        return [self._add("finite-again", said, place.last, alarm=False, old=old)]

    def _report_event(self, record: dict[str, Any], *, old: bool) -> list[Happening]:
        """Tells what the guard wrote down; a flood of the same is one."""
        kind = f"guard:{literal(str(record.get('name') or 'event'), 40)}"
        step, action = record.get("step"), str(record.get("action", ""))
        step = step if isinstance(step, int) and 0 <= step < 2**53 else None
        alarm = record.get("severity") in ("error", "warning") or action in _ACTIONS
        last = next((one for one in reversed(self.happenings) if one.kind == kind), None)
        if last is not None and time.time() - last.seen < _FRESH:
            last.count, last.last, last.seen = last.count + 1, step, time.time()
            if not alarm or last.alarm:
                return []
            last.alarm = True  # what began as a warning
            self.alarms += not old
            return [last]
        said = str(record.get("message") or record.get("name") or "an event")
        done = f" ({action})" if action in _ACTIONS else ""
        return [self._add(kind, f"guard: {said}{done}", step, alarm=alarm, old=old)]

    def _add(
        self,
        kind: str,
        text: str,
        step: int | None,
        *,
        alarm: bool,
        old: bool,
        value: float | None = None,
    ) -> Happening:
        now = time.time()
        said = literal(text, _TEXT)
        happening = Happening(kind, said, step, alarm, now, value=value, old=old, seen=now)
        self.alarms += alarm and not old
        self.happenings.append(happening)
        return happening

    def main(self, role: Quantity) -> Channel | None:
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
        """Returns which loss was not finite when it was last judged, in words; nothing if none."""
        return self._bad_loss

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


def _last_step(log: Log, before: int | None) -> int | None:
    """Returns the step of the last line of training."""
    places = [
        (series.lines[len(series) - 1] if len(series.lines) else 0, series.steps[len(series) - 1])
        for series in log.series
        if len(series) == len(series.steps) and not series.metric.evaluation
    ]
    return max(places)[1] if places else before
