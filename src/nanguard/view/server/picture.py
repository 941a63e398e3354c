"""The small curve of a run in the overview."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.findings import name_of
from nanguard.view.report.html.markup import Html, el, join

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.view.server.spark import Spark

_WIDE, _HIGH = 180, 36
_EDGE = 2.0
_THIN = 1.0
# From this ratio on a curve is drawn on a logarithmic scale.
_FAR = 1000.0


def few(number: int) -> str:
    """Returns a number as it is shown: 12 345."""
    return f"{number:,}".replace(",", "\u202f")


def picture(spark: Spark, name: str) -> Html:
    """Returns a curve as a band from the smallest to the largest value of each bucket.

    Buckets in which something is not finite are marked, and the line is not joined over them.
    """
    finite = [at for at, low in enumerate(spark.lows) if low <= spark.highs[at]]
    low = min((spark.lows[at] for at in finite), default=0.0)
    high = max((spark.highs[at] for at in finite), default=1.0)
    said = f"{name}: {_short(low)} to {_short(high)}" if finite else f"{name}: nothing finite"
    if spark.bad:
        said += f", {few(spark.bad)} not finite"
    step = _WIDE / max(1, len(spark.lows))
    place = _scale(low, high)
    holes = "".join(
        f"M{(at + 0.5) * step:.1f} 0V{_HIGH}" for at, hole in enumerate(spark.holes) if hole
    )
    band = "".join(
        f"M{(at + 0.5) * step:.1f} {place(spark.highs[at]):.1f}V{place(spark.lows[at]):.1f}"
        for at in finite
        # A band that is narrower than the line would not be seen.
        if place(spark.lows[at]) - place(spark.highs[at]) > _THIN
    )
    parts = (
        el("title", said),
        _path(holes, "holes", max(2.0, step)),
        _path(band, "band", step + 0.2),
        _path(_line(spark, finite, place, step), "line", 1.4),
    )
    return Html(
        f'<svg class="spark" role="img" viewBox="0 0 {_WIDE} {_HIGH}"'
        f' preserveAspectRatio="none">{join(parts)}</svg>'
    )


def _path(way: str, cls: str, width: float) -> Html:
    # Made of our own numbers only: an element's attributes would be cut where they are long.
    return Html(f'<path class="{cls}" d="{way}" stroke-width="{width:.1f}"/>' if way else "")


def _line(spark: Spark, finite: Sequence[int], place: Callable[[float], float], step: float) -> str:
    out, before = [], -2
    for at in finite:
        joined = at == before + 1 and not spark.holes[at] and not spark.holes[before]
        y = (place(spark.lows[at]) + place(spark.highs[at])) / 2
        out.append(f"{'L' if joined else 'M'}{(at + 0.5) * step:.1f} {y:.1f}")
        if not joined:
            out.append("h0.1")
        before = at
    return "".join(out)


def _scale(low: float, high: float) -> Callable[[float], float]:
    log = low > 0 and high / low > _FAR

    def turned(value: float) -> float:
        return math.log(value) if log else value

    bottom = turned(low)
    # Halves, as the difference of two large numbers may be too large for a float.
    wide = turned(high) / 2 - bottom / 2 or 1.0

    def place(value: float) -> float:
        share = (turned(value) / 2 - bottom / 2) / wide if high > low else 0.5
        return _HIGH - _EDGE - share * (_HIGH - 2 * _EDGE)

    return place


def _short(value: float) -> str:
    return name_of(float(f"{value:.4g}"))
