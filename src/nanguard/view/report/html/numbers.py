"""The curves of a page as compact bytes: buckets with their smallest and largest values."""

from __future__ import annotations

import base64
import gzip
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nanguard.view.runs.curves import restarts_of, thin
from nanguard.view.runs.run_model import Axis, EventKind, Panel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.runs.curves import Thinned
    from nanguard.view.runs.run_model import Curve, Run, RunEvent

SCHEMA = "nanguard.page/1"
# Bytes of numbers in a page, before they are packed; packing saves a quarter, base64 costs a third.
BUDGET = 5_000_000
# Smaller ones are not packed, so that old browsers can read them, too.
_PACK_FROM = 100_000
MOST_CURVES = 40
_FEWEST_BUCKETS = 1000
_CLOCK = 256
_TEXT = 300
_ORDER = list(Panel)


@dataclass(slots=True)
class NumberBlob:
    """Bytes of numbers, one column after the other.

    Attributes:
        data: The bytes so far.
    """

    data: bytearray = field(default_factory=bytearray)

    def add(self, values: array[Any]) -> list[Any]:
        """Adds a column; returns where it is: offset, number of values and type.

        The bytes of all values are stored plane by plane, which packs better: the first bytes of
        neighbours are mostly the same.
        """
        offset, raw, size = len(self.data), values, values.itemsize
        if sys.byteorder == "big":
            raw = array(values.typecode, values)
            raw.byteswap()
        plain = raw.tobytes()
        for plane in range(size):
            self.data += plain[plane::size]
        return [offset, len(values), values.typecode + str(size)]

    def packed(self) -> dict[str, str]:
        """Returns the bytes as a text, and how it is to be read."""
        if len(self.data) < _PACK_FROM:
            return {"packing": "none", "bytes": base64.b64encode(self.data).decode("ascii")}
        data = gzip.compress(bytes(self.data), 6, mtime=0)
        return {"packing": "gzip", "bytes": base64.b64encode(data).decode("ascii")}


def page_data(runs: Sequence[Run], budget: int = BUDGET) -> dict[str, Any]:
    """Returns the numbers and events of runs, as the script of the page reads them.

    Args:
        runs: The runs.
        budget: How many bytes of numbers there may be.
    """
    blob = NumberBlob()
    shown = [_shown(run) for run in runs]
    rooms = iter(_rooms([len(c) for curves in shown for c in curves], budget))
    told = [
        {
            "name": run.name[:_TEXT],
            "axis": run.axis.value,
            "left_out": len(run.curves) - len(curves),
            "curves": [_curve(curve, run, next(rooms), blob) for curve in curves],
            "events": [_event(event) for event in run.events],
            "clock": _clock(run),
            "timed": run.axis is Axis.STEP and run.clock.steady,
        }
        for run, curves in zip(runs, shown, strict=True)
    ]
    return {"schema": SCHEMA, "runs": told, "numbers": blob.packed()}


def _shown(run: Run) -> list[Curve]:
    """Returns the curves that are shown: those that tell most, if there are too many."""
    kept = [curve for curve in run.curves if len(curve)]
    kept.sort(key=lambda c: (c.rank not in (None, 0), _ORDER.index(c.panel)))
    kept = kept[:MOST_CURVES]
    return sorted(kept, key=lambda c: (_ORDER.index(c.panel), c.evaluation))


def _rooms(lengths: Sequence[int], budget: int) -> list[int]:
    """Returns how many buckets each curve gets; short ones are kept whole."""
    rooms = [0] * len(lengths)
    left, waiting = budget, len(lengths)
    for place in sorted(range(len(lengths)), key=lambda at: lengths[at]):
        share = left // waiting
        whole = 4 * lengths[place] <= share
        rooms[place] = lengths[place] if whole else max(_FEWEST_BUCKETS, share // 9)
        left -= min(share, 4 * lengths[place])
        waiting -= 1
    return rooms


def _curve(curve: Curve, run: Run, room: int, blob: NumberBlob) -> dict[str, Any]:
    restarts = restarts_of(curve.xs) or []
    values = curve.values[: len(curve)]
    focus = _focus(curve, run.events, restarts)
    thinned = thin(values, most=room, restarts=restarts, focus=focus)
    told: dict[str, Any] = {
        "name": curve.name[:_TEXT],
        "panel": curve.panel.value,
        "evaluation": curve.evaluation,
        "points": thinned.points,
        "largest": thinned.largest,
        "lows": blob.add(thinned.lows),
        "breaks": thinned.breaks,
        "gaps": _gaps(curve, thinned),
    }
    if not thinned.exact:
        told["highs"] = blob.add(thinned.highs)
        told["counts"] = blob.add(thinned.counts)
    return told | _places(curve, thinned, blob)


def _focus(curve: Curve, events: Sequence[RunEvent], restarts: Sequence[int]) -> list[int]:
    """Returns the points at which something happened; each time, where steps begin anew."""
    kinds = (EventKind.OVERFLOW, EventKind.NOTE, EventKind.LR_RESTORED)
    steps = [e.step for e in events if e.step is not None and e.kind not in kinds]
    stretches = list(pairwise((0, *restarts, len(curve))))
    return [
        bisect_left(curve.xs, step, start, end)
        for step in steps[:200]
        for start, end in stretches
        if curve.xs[start] <= step <= curve.xs[end - 1]
    ]


def _gaps(curve: Curve, thinned: Thinned) -> list[list[float]]:
    return [
        [curve.xs[gap.start], curve.xs[gap.end - 1], gap.nan, gap.inf, gap.neg_inf]
        for gap in thinned.gaps
    ]


def _places(curve: Curve, thinned: Thinned, blob: NumberBlob) -> dict[str, Any]:
    """Returns where buckets begin: as differences, which mostly are the same."""
    xs: array[Any] = array("d", (curve.xs[at] for at in thinned.starts))
    differences = [now - before for before, now in pairwise(xs)]
    if all(d.is_integer() and abs(d) < 2**31 for d in differences):
        steps = array("i", map(int, differences))
        return {"first": xs[0] if xs else 0, "steps": blob.add(steps)}
    return {"xs": blob.add(xs)}


def _event(event: RunEvent) -> list[Any]:
    return [
        event.kind.value,
        event.step,
        event.last,
        event.count,
        event.text[:_TEXT],
        event.incident,
    ]


def _clock(run: Run) -> list[list[float]]:
    count = len(run.clock.steps)
    places = [*range(0, count - 1, max(1, count // _CLOCK)), count - 1] if count else []
    return [[run.clock.steps[at], run.clock.times[at]] for at in places]
