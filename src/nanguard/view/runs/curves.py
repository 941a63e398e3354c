"""Fewer points that tell the same: every extreme and every non-finite point is still there.

A curve becomes buckets of neighbouring points, each with its smallest and largest value, and gaps:
the stretches in which it is not finite. No bucket reaches over a gap, or over a place where the
steps begin anew. Where something happened, a bucket holds a single point.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import gt
from typing import TYPE_CHECKING

from nanguard.check.log.series import SeriesColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Gaps beyond this are shown together with their neighbours.
MOST_GAPS = 4000
# Points on each side of something that happened that are kept one by one, if much happened fewer.
AROUND = 256
_LEAST_AROUND = 8
# More places than this at which steps fall back are disorder, and no restarts.
MOST_RESTARTS = 64
_POINTS_AT_ONCE = 4096


@dataclass(slots=True)
class Gap:
    """A stretch of points that are not finite.

    Attributes:
        start: The index of its first point.
        end: The index after its last point.
        nan: How many are NaN.
        inf: How many are +Inf.
        neg_inf: How many are -Inf.
    """

    start: int
    end: int
    nan: int = 0
    inf: int = 0
    neg_inf: int = 0

    @property
    def count(self) -> int:
        """How many points are not finite."""
        return self.nan + self.inf + self.neg_inf

    @property
    def mixed(self) -> bool:
        """Whether finite points lie in between, because there were too many gaps."""
        return self.count < self.end - self.start


@dataclass(slots=True)
class Thinned:
    """A curve in buckets.

    Attributes:
        points: How many points stand behind it.
        starts: The index of the first point of each bucket.
        counts: How many finite points each bucket stands for.
        lows: The smallest value of each bucket.
        highs: The largest value of each bucket.
        breaks: Buckets that are not joined to the one before them.
        gaps: Where the curve is not finite.
    """

    points: int
    starts: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    lows: array[float] = field(default_factory=lambda: array("f"))
    highs: array[float] = field(default_factory=lambda: array("f"))
    breaks: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def largest(self) -> int:
        """How many points the largest bucket stands for."""
        return max(self.counts, default=0)

    @property
    def exact(self) -> bool:
        """Whether every finite point is there by itself."""
        return self.largest <= 1


def thin(
    values: array[float],
    *,
    most: int,
    restarts: Sequence[int] = (),
    focus: Iterable[int] = (),
) -> Thinned:
    """Returns a curve in buckets.

    Args:
        values: The numbers.
        most: How many buckets there may be, besides those that gaps, restarts and focus need.
        restarts: Indices at which the steps begin anew.
        focus: Indices around which every point is kept.
    """
    out = Thinned(len(values), lows=array(values.typecode), highs=array(values.typecode))
    out.gaps = gaps_of(values)
    size = max(1, math.ceil(len(values) / max(1, most)))
    kept = [] if size == 1 else _windows(focus, out.gaps, len(values), most)
    joined = False
    for start, end, gap in _stretches(len(values), out.gaps, restarts):
        if gap is None:
            joined = joined and start not in restarts
            for first, last, width in _cut(start, end, size, kept):
                _add(out, values, range(first, last, width), last, joined=joined)
                joined = True
            continue
        joined = False
        if gap.mixed:
            width = max(size, (end - start) // 1000, 1)
            for first in range(start, end, width):
                _add_finite(out, values, first, min(end, first + width))
    return out


def gaps_of(values: array[float], most: int = MOST_GAPS) -> list[Gap]:
    """Returns every stretch of non-finite points, each of one kind if there are not too many."""
    gaps: list[Gap] = []
    for start in range(0, len(values), _POINTS_AT_ONCE):
        chunk = values[start : start + _POINTS_AT_ONCE]
        # One sum tells for most of them that there is nothing to look for.
        if not math.isfinite(sum(chunk)):
            _note_bad(gaps, chunk, start)
    return merged(gaps, most)


def merged(gaps: list[Gap], most: int) -> list[Gap]:
    """Returns no more gaps than the limit: those that lie close together become one."""
    if len(gaps) <= most:
        return gaps
    between = [now.start - before.end for before, now in pairwise(gaps)]
    near = sorted(between)[len(gaps) - most - 1]
    out = [gaps[0]]
    for gap, distance in zip(gaps[1:], between, strict=True):
        if distance > near:
            out.append(gap)
            continue
        last = out[-1]
        out[-1] = Gap(
            last.start,
            gap.end,
            last.nan + gap.nan,
            last.inf + gap.inf,
            last.neg_inf + gap.neg_inf,
        )
    return out


def restarts_of(xs: Sequence[float] | SeriesColumn) -> list[int] | None:
    """Returns where steps fall back, as a second run in the same log does; None if all over."""
    falls = xs.falls() if isinstance(xs, SeriesColumn) else _falls(xs)
    found = list(islice(falls, MOST_RESTARTS + 1))
    return found if len(found) <= MOST_RESTARTS else None


def _falls(xs: Sequence[float]) -> Iterator[int]:
    return (at for at, fell in enumerate(map(gt, xs, islice(xs, 1, None)), 1) if fell)


def _note_bad(gaps: list[Gap], chunk: array[float], start: int) -> None:
    for index, value in enumerate(chunk, start):
        if math.isfinite(value):
            continue
        last = gaps[-1] if gaps else None
        nan, inf = int(value != value), int(value == math.inf)
        low = 1 - nan - inf
        if (
            last is not None
            and last.end == index
            and ((nan and last.nan) or (inf and last.inf) or (low and last.neg_inf))
        ):
            last.end += 1
            last.nan += nan
            last.inf += inf
            last.neg_inf += low
        else:
            gaps.append(Gap(index, index + 1, nan, inf, low))


def _windows(
    focus: Iterable[int], gaps: list[Gap], length: int, most: int
) -> list[tuple[int, int]]:
    """Returns stretches in which every point is kept; together they are not too long."""
    places = sorted({*focus, *(g.start for g in gaps[:64]), *(g.end for g in gaps[:64])})
    around = min(AROUND, max(_LEAST_AROUND, most // (2 * len(places) or 1)))
    windows: list[tuple[int, int]] = []
    for place in places[: max(1, most // (2 * around))]:
        start, end = max(0, place - around), min(length, place + around + 1)
        if windows and start <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(end, windows[-1][1]))
        else:
            windows.append((start, end))
    return windows


def _stretches(
    length: int, gaps: list[Gap], restarts: Sequence[int]
) -> Iterator[tuple[int, int, Gap | None]]:
    """Yields the stretches between gaps and restarts, and the gaps."""
    at = 0
    for gap in [*gaps, None]:
        end = length if gap is None else gap.start
        low, high = bisect_right(restarts, at), bisect_left(restarts, end)
        edges = [at, *restarts[low:high], end]
        for start, stop in pairwise(edges):
            if start < stop:
                yield start, stop, None
        if gap is not None:
            yield gap.start, gap.end, gap
            at = gap.end


def _cut(
    start: int, end: int, size: int, windows: list[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yields stretches with the size of their buckets."""
    at = start
    for first, last in windows[max(0, bisect_left(windows, (start, -1)) - 1) :]:
        if last <= at:
            continue
        if first >= end:
            break
        if first > at:
            yield at, first, size
        at = max(at, first)
        yield at, min(end, last), 1
        at = min(end, last)
    if at < end:
        yield at, end, size


def _add(out: Thinned, values: array[float], firsts: range, end: int, *, joined: bool) -> None:
    """Adds buckets of finite points."""
    if not joined:
        out.breaks.append(len(out.starts))
    out.starts.extend(firsts)
    if firsts.step == 1:
        part = values[firsts.start : end]
        out.lows.extend(part)
        out.highs.extend(part)
        out.counts.extend(array("i", [1]) * len(part))
        return
    for first in firsts:
        part = values[first : min(end, first + firsts.step)]
        out.lows.append(min(part))
        out.highs.append(max(part))
        out.counts.append(len(part))


def _add_finite(out: Thinned, values: array[float], start: int, end: int) -> None:
    """Adds the finite points between non-finite ones as a bucket that is joined to nothing."""
    finite = [value for value in values[start:end] if math.isfinite(value)]
    if finite:
        out.breaks.append(len(out.starts))
        out.starts.append(start)
        out.counts.append(len(finite))
        out.lows.append(min(finite))
        out.highs.append(max(finite))
