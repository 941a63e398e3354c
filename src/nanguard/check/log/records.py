"""Records with names: the objects of JSON lines and of other structured logs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from nanguard.check.log.grammar import VALUE, Line, Value, number_of
from nanguard.check.log.names import METRICS, Role, metric_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEEPEST = 4
_MOST = 2000


def loads(text: str) -> Any:
    """Returns what a JSON text holds; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def line_of(record: dict[str, Any]) -> Line:
    """Returns what a record says."""
    line = Line()
    batch: Value | None = None
    for count, (name, number) in enumerate(_numbers(record, "", 0)):
        if count > _MOST:
            break
        metric = metric_of(name)
        if metric is None:
            continue
        value = Value(metric, number, 0, 0)
        if metric.role in METRICS:
            line.values.append(value)
        elif not math.isfinite(number):
            continue
        elif metric.role is Role.STEP:
            line.step = _better(line.step, value)
        elif metric.role is Role.EPOCH:
            line.epoch = line.epoch or value
        elif metric.role is Role.RANK:
            line.rank = int(number)
        else:
            batch = batch or value
    line.step = line.step or batch
    return line


def _better(known: Value | None, new: Value) -> Value:
    """Returns the one of two steps that counts the run's steps by its name."""
    if known is None or (
        new.metric.key in ("step", "global_step") and "step" not in known.metric.key
    ):
        return new
    return known


def _numbers(value: Any, name: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else str(key), depth + 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            yield name, float(value)
        except OverflowError:
            return
    elif isinstance(value, str) and len(value) < 40 and VALUE.fullmatch(value.strip()):
        yield name, number_of(value.strip())
