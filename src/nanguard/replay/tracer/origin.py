"""Finds, in the record of a step, where the first bad value on the way to the fault came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.replay.tracer.modules import LOSS
from nanguard.replay.tracer.op_kinds import KEEPING, LAYERS, LOADED, UNFILLED, nothing_left
from nanguard.replay.tracer.sites import Site, site_of
from nanguard.replay.tracer.tensor_values import as_high

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.replay.tracer.op_records import Detail, Record
    from nanguard.replay.tracer.trace import Trace

_RANDOM = (
    "rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "cauchy", "dropout",
    "geometric", "poisson",
)  # fmt: skip
# What hands values on, from a file to where they are kept.
_HANDING_ON = (*KEEPING, "aten.copy_", "aten._foreach_copy_", "aten.detach", "aten.lift_fresh")
# How far back the making of a value is followed.
_DEPTH = 24
# The same for whole numbers, and what does not hand on the values of all its inputs.
_WRAPPED_DEPTH = 12
_LOOKS_UP = ("embedding", "index", "gather", "scatter", "remainder", "bitwise", "take")
_WIDTH = 400


@dataclass(slots=True)
class Ancestor:
    """An operation that a value came from.

    Attributes:
        op: Its name.
        distance: How many operations lie between.
        site: Where it was called.
        low: Its smallest value.
        high: Its largest value.
        name: A parameter's name.
    """

    op: str
    distance: int
    site: Site | None
    low: float
    high: float
    name: str | None = None


@dataclass(slots=True)
class Origin:
    """Where it began.

    Attributes:
        index: The operation's place in the order of execution.
        step: The step it belongs to.
        phase: ``init``, ``data``, ``forward``, ``backward`` or ``optimizer``.
        op: The operation; in backward the forward operation whose derivative failed.
        kernel: The operation that really ran.
        module: The dotted path, ``<root>``, ``loss``, ``input`` or ``optimizer``.
        site: The user's line.
        detail: The numbers.
        ancestors: What each input was made of, by the input's name.
        sources: What kinds of things each input depends on: ``parameter``, ``data``, ``random``.
        came_with_data: Inputs whose bad values were there before a model had a part in them.
        literals: Lines on which the user wrote an infinity that is among the inputs.
        parameter: The parameter's name, if it is one that was bad from the start.
        intended: Whether the bad value is an infinity that somebody meant.
        callers: Where the function around the line was called from, the nearest first.
        buffer: The buffer of a model that it was written to, if it was.
        loaded_from: The file that the bad value was loaded from, as state, if it was.
        hand_written: Whether it was made by a backward that the user wrote.
        wrapped: Where whole numbers went over the end of their type that it was made of, with what
            that gave.
        table: What the script calls the value, if it was made before the step and kept since.
        by_numpy: Whether the line computes it without torch, from numbers that are good.
    """

    index: int
    step: int
    phase: str
    op: str
    kernel: str
    module: str
    site: Site | None
    detail: Detail | None
    ancestors: dict[str, list[Ancestor]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    came_with_data: set[str] = field(default_factory=set)
    literals: list[Site] = field(default_factory=list)
    parameter: str | None = None
    intended: bool = False
    callers: list[Site] = field(default_factory=list)
    buffer: str | None = None
    loaded_from: str | None = None
    hand_written: bool = False
    wrapped: Ancestor | None = None
    table: str | None = None
    by_numpy: bool = False


def producers(sinks: Iterable[Record]) -> list[Record]:
    """Returns the operations that made the bad values which arrived, first ones first."""
    found, seen, todo = [], set(), list(sinks)
    meant: list[Record] = []
    while todo:
        record = todo.pop()
        if id(record) in seen:
            continue
        seen.add(id(record))
        unmeant = [writer for writer in record.bad_writers if not writer.intended]
        if unmeant:
            todo += unmeant
        elif record.bad_writers and record.intended:
            meant.append(record)
            todo += record.bad_writers
        elif record.intended:
            meant.append(record)
        else:
            found.append(_emptied(record) or record)
    if not found and meant:
        # Infinities that somebody meant got where nobody wanted them.
        found = [record for record in meant if _narrows(record)] or meant
    return sorted(found, key=lambda record: record.index)


def _emptied(record: Record) -> Record | None:
    """Returns the reduction that had only meant infinities left and gave a layer one of them."""
    if record.op not in LAYERS or record.phase == "backward":
        return None
    todo, seen = list(record.bad_writers), set()
    while todo:
        current = todo.pop()
        asked = current.detail.scalars.get("reduce") if current.detail else None
        if current.bad_writers and nothing_left(current.op, asked, current.low, current.high):
            return current
        if id(current) not in seen:
            seen.add(id(current))
            todo += current.bad_writers
    return None


def _narrows(record: Record) -> bool:
    """Returns whether an operation took infinities out of their places, as a reduction does."""
    if not record.bad_writers:
        return False
    if record.detail is not None:
        bad = [stats.count for stats in record.detail.inputs if stats.nonfinite]
        return bool(bad) and record.detail.output.count < min(bad)
    sizes = zip(record.sizes[1:], record.writers, strict=False)
    bad = [size for size, writer in sizes if writer.bad]
    return bool(bad) and record.sizes[0] < min(bad)


def suspects(trace: Trace, before: Record) -> list[Record]:
    """Returns operations of this step that made a bad value before the given one did."""
    return [
        record
        for record in trace.bad
        if record.step == trace.step
        and record.index < before.index
        and not record.bad_writers
        and not record.intended
        and not record.is_source
        and record.phase != "backward"
    ]


def origin_of(record: Record, trace: Trace, *, sink: str) -> Origin:
    """Describes where a bad value came from.

    Args:
        record: The operation.
        trace: The step.
        sink: Where the bad value was noticed: ``loss``, ``gradient`` or ``parameter``.
    """
    phase, module, parameter = _place(record, trace, sink)
    op = record.forward or record.op
    if record.op in UNFILLED:
        op = "aten.empty"
    elif record.op == LOADED and phase == "data":
        op = "input"
    origin = Origin(
        record.index,
        record.step,
        phase,
        op if phase == "backward" or record.phase != "backward" else record.op,
        record.op,
        module,
        None if record.place is None else site_of(record.place),
        record.detail,
        parameter=parameter,
        intended=record.intended,
        callers=[site_of(place) for place in record.callers],
        buffer=trace.written_buffer(record),
        loaded_from=record.name if record.op == LOADED and phase == "init" else None,
        hand_written=record.phase == "backward" and record.forward is None and bool(record.place),
        wrapped=_wrapped(record),
    )
    if record.detail is not None:
        for stats, writer in zip(record.detail.inputs, record.writers, strict=False):
            ancestors, sources, literals = _ancestry(writer)
            origin.ancestors.setdefault(stats.name, []).extend(ancestors)
            origin.sources.setdefault(stats.name, set()).update(sources)
            if stats.nonfinite and _came_with_data(writer, trace):
                origin.came_with_data.add(stats.name)
            origin.literals += [site for site in literals if site not in origin.literals]
    return origin


def _place(record: Record, trace: Trace, sink: str) -> tuple[str, str, str | None]:
    parameter, path = trace.parameter_name(record), trace.path_of(record)
    if record.op in UNFILLED:
        if parameter is not None:
            return "init", parameter.rpartition(".")[0] or "<root>", parameter
        return "forward", path or LOSS, None
    if record.op in ("parameter", "buffer"):
        name = record.name or ""
        return "init", name.rpartition(".")[0] or "<root>", name
    if record.op in ("input", LOADED):
        state = _state_name(record, trace) if record.op == LOADED else None
        return ("data", "input", None) if state is None else _place_of_state(state)
    if record.phase == "backward":
        return "backward", path or LOSS, None
    after = trace.last_backward and record.index >= trace.last_backward
    if record.phase == "optimizer" or (after and sink != "loss" and record.step == trace.step):
        return "optimizer", "optimizer", None
    if parameter is not None and record.step == 0 and trace.before_training(record):
        return "init", parameter.rpartition(".")[0] or "<root>", parameter
    early = path is None and record.step < trace.step and trace.before_training(record)
    if record.phase == "data" or early:
        return "data", "input", None
    if path is None and _feeds_model(record, trace):
        return "data", "input", None
    return "forward", path or LOSS, None


def _place_of_state(name: str) -> tuple[str, str, str | None]:
    """Returns where state belongs that was loaded: to a parameter, or else to the optimizer."""
    if not name:
        return "init", "optimizer", None
    return "init", name.rpartition(".")[0] or "<root>", name


def _feeds_model(record: Record, trace: Trace) -> bool:
    """Returns whether a bad value was already there when a model was given its input."""
    todo = [writer for writer, bad in trace.entered if bad and writer is not None]
    seen = set()
    while todo:
        current = todo.pop()
        if current is record:
            return True
        if id(current) not in seen:
            seen.add(id(current))
            todo += current.bad_writers
    return False


def _came_with_data(record: Record, trace: Trace) -> bool:
    """Returns whether bad values were written into data, and not by or behind a model."""
    todo, seen = [record], set()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        # A bare number is not where an infinity was written, but what was written there.
        before = [w for w in current.bad_writers if not (w.is_source and w.literal)]
        todo += before
        if before or "parameter" in _ancestry(current)[1]:
            continue
        given = current.inside is None and _feeds_model(current, trace)
        if current.op == "input" or current.phase == "data" or given:
            return True
    return False


def _ancestry(start: Record) -> tuple[list[Ancestor], set[str], list[Site]]:
    ancestors: list[Ancestor] = []
    sources: set[str] = set()
    literals: list[Site] = []
    seen, level = {id(start)}, [start]
    for distance in range(_DEPTH):
        following: list[Record] = []
        for record in level:
            site = None if record.place is None else site_of(record.place)
            low, high = (record.low, record.high) if record.exact else (math.nan, math.nan)
            ancestors.append(Ancestor(record.op, distance, site, low, high, record.name))
            if record.is_source:
                sources.add(record.op if record.op in ("parameter", "buffer") else "data")
            elif any(word in record.op for word in _RANDOM):
                sources.add("random")
            if record.literal and record.intended and site is not None:
                literals.append(site)
            for writer in record.writers:
                if id(writer) not in seen and len(seen) < _WIDTH:
                    seen.add(id(writer))
                    following.append(writer)
        level = following
        if not level:
            break
    return ancestors, sources, literals


def _wrapped(start: Record) -> Ancestor | None:
    """Returns the nearest whole numbers that went over the end of their type, and came in here.

    What is only looked up or compared with such numbers, as with a hash, does not hold them.
    """
    seen, level = {id(start)}, list(start.writers)
    for distance in range(_WRAPPED_DEPTH):
        following: list[Record] = []
        for record in level:
            if record.wrapped and not any(writer.wrapped for writer in record.writers):
                site = None if record.place is None else site_of(record.place)
                return Ancestor(record.op, distance, site, record.low, record.high)
            if id(record) not in seen and not any(word in record.op for word in _LOOKS_UP):
                seen.add(id(record))
                following += record.writers
        level = following
    return None


def bad_rows(detail: Detail | None, batch_size: int | None) -> list[int]:
    """Returns which samples of a batch the bad values belong to, if not to all of them."""
    if detail is None or not batch_size or batch_size < 2:
        return []
    for dim, length in enumerate(detail.output.shape):
        if length == batch_size or (dim == 0 and length % batch_size == 0 and length > 1):
            rows = {place // (length // batch_size) for place in detail.rows[dim]}
            return sorted(rows) if 0 < len(rows) < batch_size else []
    return []


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


def _state_name(record: Record, trace: Trace) -> str | None:
    """Returns what a loaded tensor went into; "" for an optimizer, None for data.

    Args:
        record: The tensor.
        trace: The step.
    """
    reached = {id(record)}
    for other in sorted(trace.bad, key=lambda bad: bad.index):
        if not any(id(writer) in reached for writer in other.bad_writers):
            continue
        name = trace.written_parameter(other) or trace.written_buffer(other)
        if name is not None:
            return name
        if other.phase == "optimizer":
            return ""
        if other.op in _HANDING_ON:
            reached.add(id(other))
    return trace.parameter_name(record)  # load_state_dict(assign=True) takes it as it is
