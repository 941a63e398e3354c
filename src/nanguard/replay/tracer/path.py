"""The way of a bad value in numbers: the last healthy operations, the origin, and what followed.

Each row says which operation it was, where, and how large its results were, so that one can see
where the range explodes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanguard.replay.tracer.sites import site_of
from nanguard.replay.tracer.values import as_high

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.replay.tracer.records import Record
    from nanguard.replay.tracer.trace import Trace

# Healthy operations before the origin, and operations after it at either end of what follows.
_BEFORE = 10
_AFTER = 12


def path_of(origin: Record, sinks: Iterable[Record], trace: Trace) -> list[dict[str, Any]]:
    """Returns the operations that a bad value came from and went through, in their order.

    Args:
        origin: The operation that made it.
        sinks: Where it was noticed.
        trace: The step.
    """
    onward = _onward(origin, sinks)
    if len(onward) > 2 * _AFTER:
        onward = [*onward[:_AFTER], *onward[-_AFTER:]]
    return [_row(record, trace) for record in (*_backward(origin), origin, *onward)]


def _backward(origin: Record) -> list[Record]:
    """Returns the operations before the origin, each the input with the largest values."""
    out: list[Record] = []
    seen, record = {id(origin)}, origin
    while len(out) < _BEFORE:
        known = [writer for writer in record.writers if id(writer) not in seen]
        # A tensor that was there before ends the way; operations go on with it.
        known = [writer for writer in known if not writer.is_source] or known
        if not known:
            break
        record = max(known, key=_size)
        seen.add(id(record))
        out.append(record)
    return out[::-1]


def _onward(origin: Record, sinks: Iterable[Record]) -> list[Record]:
    """Returns the shortest way from the origin to where the bad value was noticed."""
    level = [(sink, None) for sink in sinks]
    came: dict[int, tuple[Record, Record | None]] = {}
    while level:
        following: list[tuple[Record, Any]] = []
        for record, after in level:
            if id(record) in came:
                continue
            came[id(record)] = (record, after)
            following += [(writer, record) for writer in record.bad_writers]
        if id(origin) in came:
            break
        level = following
    out, at = [], came.get(id(origin), (origin, None))[1]
    while at is not None:
        out.append(at)
        at = came[id(at)][1]
    return out


def _size(record: Record) -> float:
    if record.detail is not None:
        low, high = record.detail.output.low, record.detail.output.high
        return -1.0 if math.isnan(low) else max(abs(low), abs(high))
    return max(abs(as_high(record.low)), abs(as_high(record.high)))


def _extremes(record: Record) -> tuple[float | None, float | None]:
    """Returns the smallest and largest finite value; the recorded ones if nobody looked closer.

    On a device a closer look is needed to know more than how far from 0 they are.
    """
    if record.detail is not None:
        low, high = record.detail.output.low, record.detail.output.high
        return (None, None) if math.isnan(low) else (low, high)
    return (float(record.low), float(record.high)) if record.exact else (None, None)


def _row(record: Record, trace: Trace) -> dict[str, Any]:
    low, high = _extremes(record)
    site = None if record.place is None else site_of(record.place)
    return {
        "op": record.op if not record.is_source else record.name or record.op,
        "phase": record.phase,
        "module": trace.path_of(record),
        "file": None if site is None else site.file,
        "line": None if site is None else site.line,
        "min": low,
        "max": high,
        "nonfinite": record.detail.all_bad if record.detail else int(record.bad),
    }
