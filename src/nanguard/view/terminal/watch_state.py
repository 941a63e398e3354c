"""What is known about one run that is watched."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nanguard.check.log.log_rule import is_game, main_losses, main_norms
from nanguard.check.log.quantities import Quantity
from nanguard.check.log.series import Log, MetricSeries
from nanguard.view.report.fields import literal
from nanguard.view.terminal.channels import Channel, Happening
from nanguard.view.terminal.judging import Judge, Told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.view.terminal.reading import News

_MOST_CHANNELS = 64
_MOST_HAPPENINGS = 500
# Seconds over which the pace is taken, and how many of its points are kept.
_PACE = 60.0
_TEXT = 300
# Seconds for which an alarm stands in the line of state after it was raised.
_FRESH = 60.0
# So many times as many losses make a scale one that is written now and then.
_OFTEN = 2
_MOST_RESTARTS = 5
_JUDGED = (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE)
# What the guard does about a step; anything else is only told.
_ACTIONS = frozenset(("skip", "cut-lr", "rollback", "stop"))


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
        self._restarts = 0
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
        if self._counted_by_bar:
            self.step = news.done if news.done is not None else self.step
        for series in news.log.series:
            self._channel(series)  # which series there are decides how each of them is judged
        for series in news.log.series:
            told += self._take_series(series, sparse=news.log.sparse, old=old)
        self.step = _last_step(news.log, self.step)
        for note in news.log.notes:
            said = Told("log-says", f"the log says: {note.said}", note.step, again=True)
            told += self._tell([said], old=old)
        told += self._tell([_told_by_guard(event) for event in news.events], old=old)
        if self.total is not None and self.step is not None and self.step > self.total:
            self.total = self.total if self._fixed_total else None
        if not old and self.step is not None and news.log.series:
            self._pace.append((time.monotonic(), self.step))
        return told

    @property
    def _counted_by_bar(self) -> bool:
        """Whether no number of the log has a step, so that a progress bar has to tell it."""
        return all(channel.step is None for channel in self.channels.values())

    def reached_total(self) -> bool:
        """Returns whether the last step was made.

        A log that names epochs may count the steps of each of them.
        """
        if self.total is None or self.step is None or self._counted_by_bar:
            return False
        return self.step >= self.total and (self.epoch is None or self._fixed_total)

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
        told = self._extend(channel, series.values, steps, channel.restarts(series), old=old)
        if self._is_judged(channel):
            channel.judge.sparse = sparse
            self._hold_scale(channel, series)
            told += self._tell(channel.judge.look(series.values, steps), old=old, of=channel)
        return told

    def _extend(
        self,
        channel: Channel,
        values: Sequence[float],
        steps: list[int] | None,
        restarts: list[int],
        *,
        old: bool,
    ) -> list[Happening]:
        """Adds numbers to a series; returns what is to be told about restarts in them."""
        told: list[Happening] = []
        # More of them are epochs that count their batches from the start.
        restarts = restarts if len(restarts) <= _MOST_RESTARTS else []
        cuts = [at for at in restarts if at]
        for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
            begins = begin in restarts
            if begins and steps and channel is self.main(Quantity.LOSS):
                told += self._tell_restart(channel.step, steps[begin], old=old)
            channel.extend(values[begin:end], steps[begin:end] if steps else None, begins=begins)
        return told

    def _tell_restart(self, before: int | None, after: int, *, old: bool) -> list[Happening]:
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            return []
        said = f"after step {before} the log goes on with step {after}"
        return self._tell([Told("restart", said, after, alarm=False)], old=old)

    def _hold_scale(self, channel: Channel, series: MetricSeries) -> None:
        """Tells a loss scale that is only written when it falls how long it held."""
        loss = self.main(Quantity.LOSS)
        if series.role is not Quantity.SCALE or loss is None:
            return
        made, channel.losses = loss.count - channel.losses, loss.count
        if made > _OFTEN * len(series):
            channel.judge.hold(made, series.values[0])

    def _channel(self, series: MetricSeries) -> Channel | None:
        key = (series.metric.key, series.label, series.rank)
        channel = self.channels.get(key)
        if channel is None and len(self.channels) < _MOST_CHANNELS:
            meta = MetricSeries(series.metric, series.label, series.rank)
            rank = "" if series.rank is None else f" of rank {series.rank}"
            judge = Judge(literal(f"{series.name}{rank}", 80), series.role)
            judge.held_out = series.metric.evaluation
            channel = self.channels[key] = Channel(meta, judge)
            self._meta.series.append(meta)
            self._choose()
        return channel

    def _choose(self) -> None:
        """Finds out anew which series are judged; a series that is new may change that."""
        held_out = [one for one in self._meta.of(Quantity.LOSS) if one.metric.evaluation]
        chosen = [*main_losses(self._meta), *main_norms(self._meta), *self._meta.of(Quantity.SCALE)]
        chosen += held_out
        game, scaled = is_game(self._meta), bool(self._meta.of(Quantity.SCALE))
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
        """Returns which loss is not finite at this moment, in words; nothing if none is."""
        for channel in self.channels.values():
            judge = channel.judge
            if judge.bad and judge.role is Quantity.LOSS and self._is_judged(channel):
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


def _told_by_guard(record: dict[str, Any]) -> Told:
    step, action = record.get("step"), str(record.get("action", ""))
    said = str(record.get("message") or record.get("name") or "an event")
    done = f" ({action})" if action in _ACTIONS else ""
    bad = record.get("severity") in ("error", "warning") or action in _ACTIONS
    name = literal(str(record.get("name") or "event"), 40)
    whole = step if isinstance(step, int) and 0 <= step < 2**53 else None
    return Told(f"guard:{name}", f"guard: {said}{done}", whole, alarm=bad, again=True)


def _last_step(log: Log, before: int | None) -> int | None:
    """Returns the step of the last line of training."""
    places = [
        (series.lines[len(series) - 1], series.steps[len(series) - 1])
        for series in log.series
        if len(series) == len(series.lines) == len(series.steps) and not series.metric.evaluation
    ]
    return max(places)[1] if places else before
