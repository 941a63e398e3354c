"""Judges numbers as they come, with the guard's own windows; most of them in bulk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.check.log.quantities import Quantity
from nanguard.findings import name_of
from nanguard.settings import Settings
from nanguard.signals.drift import DriftWatch, ScaleWatch
from nanguard.signals.spikes import SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SETTINGS = Settings()
# A window learns slowly: of many numbers that come at once, so many tell as much as all.
_TAUGHT, _AT_ONCE = 64, 1024
# Numbers after which a spike is a new one, and good ones after which bad ones are over.
_WAKE = 20
_CALM = 3
# Bad norms in a row before they are more than a loss scale that looks for its level.
_OVERFLOWS = 4
# NaN in a row before it is more than a hole in a table.
_HOLES = 3
# Values in a block of a loss that is seldom written, and how often the first of them it may grow.
_SHORT, _GROWTH = 8, 3.0
# A scale of 1 scales nothing: a scaler that fell to it from here has found no level.
_ONCE = 256.0


@dataclass(frozen=True, slots=True)
class Told:
    """Something about a number that is worth telling.

    Attributes:
        kind: The name of what it is.
        text: The same in words.
        step: Its step, if the log has steps.
        value: The number.
        alarm: Whether it is bad enough for an alarm.
        again: Whether it only goes on with what was told before.
    """

    kind: str
    text: str
    step: int | None = None
    value: float | None = None
    alarm: bool = True
    again: bool = False


class Judge:
    """Watches one series.

    Attributes:
        name: How the series is called.
        role: What its numbers are.
        game: Whether the loss is one of several that play against each other.
        sparse: Whether NaN may stand for what was not measured.
        scaled: Whether a loss scale is at work, so that some norms overflow.
        held_out: Whether it was measured on held-out data, of which only NaN and Inf tell.
        bad: How many numbers in a row were not finite up to now.
    """

    def __init__(self, name: str, role: Quantity) -> None:
        self.name = name
        self.role = role
        self.game = self.sparse = self.scaled = self.held_out = False
        self.bad = 0
        # Bad numbers since the last calm, and good ones since the last bad one.
        self._in_all = 0
        self._told_bad = False
        self._good = 0
        self._since_spike = _WAKE
        self._spikes = SpikeWindow(
            size=_SETTINGS.spike_window,
            warmup=_SETTINGS.spike_warmup,
            warn=_SETTINGS.spike_warn,
            act=_SETTINGS.spike_act,
            positive=role is Quantity.GRAD_NORM,
        )
        # The long one for every step, the short one for a loss that is written once an epoch.
        blocks = (_SETTINGS.spike_window // 2, _SHORT)
        self._drifts = [DriftWatch(block=block, growth=_GROWTH) for block in blocks]
        self._scale = ScaleWatch()
        self._highest = 0.0
        self._last = math.nan

    def look(self, values: Sequence[float], steps: Sequence[int] | None) -> Iterator[Told]:
        """Yields what is to be told about new numbers."""
        if self.role is Quantity.SCALE:
            yield from self._look_at_scales(values, steps)
            return
        at = 0
        while at < len(values):
            # A window that has no opinion yet is not to be taught past the first that counts.
            room = self._spikes.warmup - len(self._spikes)
            end = at + (room if room > 0 else _AT_ONCE)
            yield from self._look_at(values[at:end], steps[at:end] if steps else None)
            at = end

    def _look_at(self, values: Sequence[float], steps: Sequence[int] | None) -> Iterator[Told]:
        if (
            not self._in_all
            and math.isfinite(sum(values))
            and max(values) <= self._spikes.limits().warn
        ):
            yield from self._teach(values, steps)
            return
        for index, value in enumerate(values):
            step = steps[index] if steps else None
            if math.isfinite(value):
                yield from self._good_one(value, step)
            else:
                yield from self._bad_one(value, step)

    def _teach(self, values: Sequence[float], steps: Sequence[int] | None) -> Iterator[Told]:
        """Learns from numbers none of which is a spike."""
        self._since_spike = min(_WAKE, self._since_spike + len(values))
        stride = -(-len(values) // _TAUGHT)
        for index in range(0, len(values), stride):
            self._spikes.accept(values[index])
            yield from self._see_drift(values[index], steps[index] if steps else None)

    def _good_one(self, value: float, step: int | None) -> Iterator[Told]:
        self.bad = 0
        self._good += 1
        if self._in_all and self._good >= _CALM:
            if self._told_bad:
                count = "one value" if self._in_all == 1 else f"{self._in_all} values"
                said = f"{self.name} is finite again after {count} that {_were(self._in_all)} not"
                yield Told("finite-again", said, step, value, alarm=False)
            self._in_all, self._told_bad = 0, False
        if self.held_out:
            return
        limits = self._spikes.limits()
        self._since_spike = min(_WAKE, self._since_spike + 1)
        if not value <= limits.warn:
            again = self._since_spike < _WAKE
            self._since_spike = 0
            bold = not value <= limits.act
            usual = limits.act if bold else limits.warn
            if bold or not self.game:
                yield self._spike(value, step, usual, bold=bold, again=again)
        if value <= limits.act:
            self._spikes.accept(value)
            yield from self._see_drift(value, step)
        else:
            self._spikes.reject(value)

    def _spike(
        self, value: float, step: int | None, usual: float, *, bold: bool, again: bool
    ) -> Told:
        kind = "grad-norm-spike" if self.role is Quantity.GRAD_NORM else "loss-spike"
        said = f"{self.name} jumped to {name_of(value)}; up to {name_of(usual)} would be usual"
        return Told(kind, said, step, value, alarm=bold, again=again)

    def _bad_one(self, value: float, step: int | None) -> Iterator[Told]:
        self.bad += 1
        self._in_all += 1
        self._good = 0
        # A number that is good for a moment in between does not make it a new fault.
        again = self._told_bad
        patience = _HOLES if self.sparse and math.isnan(value) else 1
        if self.role is Quantity.GRAD_NORM:
            kind = "non-finite-grad-norm"
            if self.scaled and self.bad < _OVERFLOWS:
                said = f"{self.name} is {name_of(value)}: the loss scale may be too high"
                yield Told("overflow", said, step, value, alarm=False, again=self._in_all > 1)
                return
        else:
            kind = "non-finite-loss"
        if self.bad < patience:
            return
        self._told_bad = True
        yield Told(kind, f"{self.name} is {name_of(value)}", step, value, again=again)

    def _see_drift(self, value: float, step: int | None) -> Iterator[Told]:
        if self.role is not Quantity.LOSS or self.game or self.held_out:
            return
        for watch in self._drifts:
            said = watch.accept(value)
            if said:
                yield Told("diverging-loss", said, step, value)

    def hold(self, count: int, first: float) -> None:
        """Takes the last loss scale for that of so many steps, where only its falls are written.

        Args:
            count: How many steps.
            first: The scale to take if there was none before.
        """
        for _ in range(min(count, self._scale.calm)):
            self._scale.accept(first if math.isnan(self._last) else self._last)

    def _look_at_scales(
        self, values: Sequence[float], steps: Sequence[int] | None
    ) -> Iterator[Told]:
        if min(values) == max(values) == self._last:
            values = values[: self._scale.calm]
        for index, value in enumerate(values):
            said = self._scale.accept(value)
            if not said and 0.0 < value <= 1.0 and self._highest >= _ONCE:
                said = f"the loss scale fell from {name_of(self._highest)} to {name_of(value)}"
            if said:
                yield Told("falling-loss-scale", said, steps[index] if steps else None, value)
                self._highest = 0.0
            self._highest = max(self._highest, value) if math.isfinite(value) else self._highest
        self._last = values[-1]


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
