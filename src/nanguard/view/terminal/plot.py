"""Draws a curve with characters; what is not finite is a marked gap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Buckets of a curve; when there are more, each two become one.
_MOST_BUCKETS = 1024


@dataclass(slots=True)
class Bucket:
    """Neighbouring numbers.

    Attributes:
        low: The lowest finite one; infinite if there is none.
        high: The highest finite one; minus infinity if there is none.
        bad: How many are not finite.
        count: How many there are.
        begins: Whether a new run begins here, so that nothing is joined to what was before.
    """

    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    count: int = 0
    begins: bool = False

    @property
    def empty(self) -> bool:
        """Whether no number is finite."""
        return self.high < self.low

    def add(self, values: Sequence[float]) -> None:
        """Takes in numbers."""
        self.count += len(values)
        if not math.isfinite(sum(values)):
            finite = [value for value in values if math.isfinite(value)]
            self.bad += len(values) - len(finite)
            values = finite
        if values:
            self.low, self.high = min(self.low, min(values)), max(self.high, max(values))

    def merge(self, other: Bucket) -> None:
        """Takes in a neighbour."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.bad += other.bad
        self.count += other.count
        self.begins |= other.begins


class PlotTrace:
    """The numbers of one series, as far as a picture of them needs them.

    Attributes:
        buckets: The numbers in order, the same count in all but the last.
        first: The first step; None if there is none.
        last: The last step.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.first: int | None = None
        self.last: int | None = None
        self._stride = 1

    def extend(
        self, values: Sequence[float], steps: Sequence[int] | None, *, begins: bool = False
    ) -> None:
        """Adds numbers, and says whether a new run begins with them."""
        if steps:
            self.first = steps[0] if self.first is None else self.first
            self.last = steps[-1]
        at = 0
        while at < len(values):
            if not self.buckets or self.buckets[-1].count >= self._stride:
                if len(self.buckets) >= _MOST_BUCKETS:
                    self._merge()
                    continue
                self.buckets.append(Bucket())
            bucket = self.buckets[-1]
            if at == 0 and begins:
                bucket.begins = True
            room = self._stride - bucket.count
            bucket.add(values[at : at + room])
            at += room

    def _merge(self) -> None:
        kept = self.buckets[::2]
        for bucket, other in zip(kept, self.buckets[1::2], strict=False):
            bucket.merge(other)
        self.buckets = kept
        self._stride *= 2

    def columns(self, count: int) -> list[Bucket]:
        """Returns the curve in buckets of equal width, no more than the limit."""
        if len(self.buckets) <= count:
            return self.buckets
        out = [Bucket() for _ in range(count)]
        for place, bucket in enumerate(self.buckets):
            out[place * count // len(self.buckets)].merge(bucket)
        return out


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
# Characters of a number beside the curve.
_LABEL_WIDTH = 8
# From this ratio of its ends on, a curve is drawn on a log scale.
_WIDE = 10.0
# A peak is at most one column in 32, at least 4 times as high as the others.
_FEW, _PEAK = 32, 4.0
BAD = "bold red"
_CROSS = "\u00d7"


@dataclass(frozen=True, slots=True)
class Scale:
    """How values become heights.

    Attributes:
        low: The value at the bottom.
        high: The value at the top.
        log: Whether it is logarithmic.
        flat: Whether all values are the same.
        most: The highest value; above the top where a few peaks would flatten everything else.
    """

    low: float
    high: float
    log: bool
    flat: bool = False
    most: float = -math.inf

    @classmethod
    def of(cls, buckets: list[Bucket], *, log: bool | None) -> Scale:
        """Returns a scale that holds all finite values.

        Args:
            buckets: The curve.
            log: Whether it is to be logarithmic; None to choose that, and whether a few peaks are
                left out.
        """
        filled = [bucket for bucket in buckets if not bucket.empty]
        low = min((bucket.low for bucket in filled), default=0.0)
        high = max((bucket.high for bucket in filled), default=1.0)
        most = high
        if log is None:
            high = _without_peaks([bucket.high for bucket in filled], low, high)
        chosen = low > 0.0 and (high / low > _WIDE if log is None else log)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
            room = 0.1 * abs(high) or 1.0
            return cls(low - room, high + room, log=False, flat=True)
        return cls(low, high, chosen, most=most)

    def height(self, value: float) -> float:
        """Returns where a value stands, from 0 at the bottom to 1 at the top."""
        if self.log:
            whole = math.log(self.high) - math.log(self.low)
            return (math.log(max(value, self.low)) - math.log(self.low)) / whole
        # Halved, so that the difference of two huge values is finite.
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)

    def value(self, height: float) -> float:
        """Returns the value at a height."""
        if self.log:
            low = math.log(self.low)
            return math.exp(low + height * (math.log(self.high) - low))
        return self.low * (1.0 - height) + self.high * height


def _without_peaks(highs: list[float], low: float, high: float) -> float:
    """Returns a top for a curve that a few peaks would flatten; what stands above it is marked."""
    if len(highs) < _FEW:
        return high
    usual = sorted(highs)[-1 - max(1, len(highs) // _FEW)]
    reach = _PEAK * (usual / 2 - low / 2)
    return max((one for one in highs if one / 2 - low / 2 <= reach), default=high)


class _Canvas:
    """A grid of dots, two by four in a character."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells = [[0] * width for _ in range(height)]
        self.bad: set[int] = set()
        self.marked: set[int] = set()
        self.peaks: set[int] = set()

    def column(self, x: int, one: float, other: float) -> None:
        """Draws from one height to another."""
        top = 4 * self.height - 1
        first, last = sorted((round(one * top), round(other * top)))
        for y in range(max(0, first), min(top, last) + 1):
            row = self.height - 1 - y // 4
            self.cells[row][x // 2] |= _DOTS[3 - y % 4][x % 2]

    def line(self, x0: int, y0: float, x1: int, y1: float) -> None:
        """Joins two places."""
        before = y0
        for x in range(x0 + 1, x1 + 1):
            now = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
            self.column(x, before, now)
            before = now

    def row(self, number: int, style: str, *, plain: bool) -> Text:
        """Returns one row of characters."""
        cells = [
            self._cell(x, bits, style, plain=plain) for x, bits in enumerate(self.cells[number])
        ]
        if number == 0:
            for x in self.peaks:
                cells[x] = ("^" if plain else "▲", "yellow")
        return _in_runs(cells)

    def _cell(self, x: int, bits: int, style: str, *, plain: bool) -> tuple[str, str]:
        if bits:
            return "*" if plain else chr(0x2800 + bits), style
        if x in self.bad:
            return ":" if plain else "░", "red"
        if x in self.marked:
            return ":" if plain else "┊", "red"
        return " ", ""


def _in_runs(cells: Iterable[tuple[str, str]]) -> Text:
    """Returns characters with their styles, neighbours of one style together: it is less to send.

    A space looks the same in any style.
    """
    text = Text()
    run, now = "", ""
    for char, style in cells:
        if style != now and char != " ":
            if run.strip():
                text.append(run, now)
                run = ""
            now = style
        run += char
    return text.append(run, now)


def draw(
    trace: PlotTrace, width: int, height: int, *, log: bool | None, style: str, plain: bool = False
) -> tuple[list[Text], Scale]:
    """Returns a curve with its axes, and its scale.

    Args:
        trace: The curve.
        width: Characters in a row.
        height: Rows, that of the axis included.
        log: Whether the scale is to be logarithmic; None to choose.
        style: How the curve is drawn.
        plain: Whether only ASCII can be shown.
    """
    canvas = _Canvas(max(4, width - _LABEL_WIDTH - 1), max(1, height - 1))
    buckets = trace.columns(2 * canvas.width)
    scale = Scale.of(buckets, log=log)
    _fill(canvas, buckets, scale)
    rows: list[Text] = []
    for number in range(canvas.height):
        rows.append(Text().append(_label(scale, number, canvas.height).rjust(_LABEL_WIDTH), "dim"))
        rows[-1].append("|" if plain else "┤" if rows[-1].plain.strip() else "│", "dim")
        rows[-1].append_text(canvas.row(number, style, plain=plain))
    rows.append(_axis(trace, canvas.width, canvas.marked, plain=plain))
    return rows, scale


def _fill(canvas: _Canvas, buckets: list[Bucket], scale: Scale) -> None:
    """Draws the curve, and marks where something is not finite."""
    reach = (2 * canvas.width - 1) / max(1, len(buckets) - 1)
    last: tuple[int, float, float] | None = None
    for place, bucket in enumerate(buckets):
        x = round(place * reach)
        if bucket.bad:
            canvas.marked.add(x // 2)
            last = None
        if bucket.empty:
            half = reach / 2
            canvas.bad.update(range(max(0, int(x - half)) // 2, min(x // 2, canvas.width - 1) + 1))
            continue
        if bucket.high > scale.high:
            canvas.peaks.add(x // 2)
        low, high = min(1.0, scale.height(bucket.low)), min(1.0, scale.height(bucket.high))
        canvas.column(x, low, high)
        if last is not None and not bucket.begins:
            canvas.line(last[0], *_ends(last[1:], x, (low, high)))
        last = None if bucket.bad else (x, low, high)
    # A curve that ends or begins within a character is not to look as if it went through.
    canvas.bad -= {x for row in canvas.cells for x, bits in enumerate(row) if bits}


def _ends(
    before: tuple[float, float], x: int, now: tuple[float, float]
) -> tuple[float, int, float]:
    """Returns where a line between two columns begins and ends: where they are nearest."""
    if now[0] > before[1]:
        return before[1], x, now[0]
    if now[1] < before[0]:
        return before[0], x, now[1]
    common = (max(before[0], now[0]) + min(before[1], now[1])) / 2
    return common, x, common


def _label(scale: Scale, number: int, height: int) -> str:
    if scale.flat:
        return brief(scale.value(0.5)) if number == height // 2 else ""
    shown = {0, height - 1} | ({height // 2} if height > 4 else set())
    if number not in shown:
        return ""
    at = 1.0 - number / max(1, height - 1)
    return brief(scale.value(at))


def _axis(trace: PlotTrace, width: int, marked: set[int], *, plain: bool) -> Text:
    text = Text().append(" " * _LABEL_WIDTH + ("+" if plain else "└"), "dim")
    first = "" if trace.first is None else f"{trace.first:,}".replace(",", " ")
    last = "" if trace.last is None else f"{trace.last:,}".replace(",", " ")
    line = ["-" if plain else "─"] * width
    if len(first) + len(last) + 4 < width:
        line[: len(first)] = first
        line[width - len(last) :] = last
    cross, dash = ("x", "-") if plain else (_CROSS, "─")
    # A step that is written there keeps its digits, in the colour of the mark.
    cells = (
        (cross if char == dash else char, BAD) if x in marked else (char, "dim")
        for x, char in enumerate(line)
    )
    return text.append_text(_in_runs(cells))


def brief(value: float) -> str:
    """Returns a number in at most eight characters."""
    size = abs(value)
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    if 1e4 <= size < 1e7:
        return f"{value:.0f}"
    if 1e-3 <= size < 1e4:
        return f"{value:.4g}"
    return min(
        f"{value:.1e}", f"{value:.0e}", key=lambda text: (len(text) > _LABEL_WIDTH, -len(text))
    )
