"""What is remembered about one operation of a traced step, and which node of autograd's is its."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nanguard.numerics import is_float
from nanguard.replay.tracer import tensor_values as values
from nanguard.replay.tracer.op_kinds import LOADED, UNFILLED

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import Tensor, nn

    from nanguard.replay.tracer.sites import Place

_next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
# How many places along a dimension are remembered.
_SHOWN = 4096


@dataclass(slots=True)
class Stats:
    """A tensor in numbers.

    Attributes:
        name: What the operation calls it.
        shape: Its shape.
        dtype: Its type, without ``torch.``.
        low: Its smallest finite value; NaN if it has none.
        high: Its largest finite value; NaN if it has none.
        zeros: How many elements are zero.
        negatives: How many are below zero.
        nans: How many are NaN.
        infs: How many are +Inf.
        neg_infs: How many are -Inf.
        whole: Whether all finite values are whole numbers.
        at_fault: Some of its values where the result is bad.
        record: The index of the operation that wrote it; -1 if nobody knows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float = math.nan
    high: float = math.nan
    zeros: int = 0
    negatives: int = 0
    nans: int = 0
    infs: int = 0
    neg_infs: int = 0
    whole: bool = False
    at_fault: list[float] = field(default_factory=list)
    record: int = -1

    @property
    def nonfinite(self) -> int:
        """How many elements are not finite."""
        return self.nans + self.infs + self.neg_infs

    @property
    def count(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def is_half(self) -> bool:
        """Whether it is of a 16-bit type."""
        return self.dtype in ("float16", "bfloat16")

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers that a reader wants to see."""
        out: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if not math.isnan(self.low):
            out |= {"min": self.low, "max": self.high}
        out |= {"zeros": self.zeros, "nonfinite": self.nonfinite}
        if self.nonfinite:
            out |= {"nan": self.nans, "inf": self.infs, "-inf": self.neg_infs}
        return out


def stats_of(tensor: Tensor, name: str, fault: Tensor | None = None) -> Stats:
    """Looks at a tensor closely.

    Args:
        tensor: Any tensor.
        name: What the operation calls it.
        fault: Where the result is bad; used if the shapes agree.
    """
    stats = Stats(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    held = values.stored(tensor.detach())
    if held.is_complex():
        held = torch.view_as_real(held)
    if held.numel() == 0:
        return stats
    # float64 holds every value of the other types, and arithmetic on it is always there.
    held = held.to("cpu", torch.float64)
    if is_float(tensor):
        finite = held.isfinite()
        stats.nans = int((held != held).sum())
        stats.infs = int((held == math.inf).sum())
        stats.neg_infs = int((held == -math.inf).sum())
        good = held[finite]
    else:
        good = held.reshape(-1)
    if good.numel():
        low, high = good.aminmax()
        stats.low, stats.high = float(low), float(high)
        stats.zeros = int((good == 0).sum())
        stats.negatives = int((good < 0).sum())
        stats.whole = bool((good == good.round()).all())
    if fault is not None:
        stats.at_fault = _values_at(held, fault)
    return stats


def _values_at(values: Tensor, fault: Tensor) -> list[float]:
    try:
        return list(values.expand(fault.shape)[fault.cpu()][:8].tolist())
    except RuntimeError:  # another shape: the operation does not work element by element
        return []


@dataclass(slots=True)
class Detail:
    """A closer look at an operation whose result is bad.

    Attributes:
        inputs: Its tensors.
        scalars: Its other arguments, by name.
        kinds: Which of ``nan``, ``inf`` and ``-inf`` its result holds.
        output: Its result.
        rows: Where the result is bad: for each dimension, which places along it.
        all_bad: How many elements are.
    """

    inputs: list[Stats]
    scalars: dict[str, Any]
    kinds: frozenset[str]
    output: Stats
    rows: list[list[int]]
    all_bad: int


def where_bad(tensor: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Returns which elements are not finite: as a mask, and as places along each dimension."""
    held = values.stored(tensor.detach())
    mask = ~torch.isfinite(torch.view_as_real(held).sum(-1) if held.is_complex() else held)
    rows = []
    for dim, length in enumerate(mask.shape):
        along = mask.movedim(dim, 0).reshape(length, -1).any(1) if mask.numel() else mask[:0]
        rows.append(along.nonzero().flatten()[:_SHOWN].tolist())
    return mask, rows


def detail_of(
    named: list[tuple[str, Any]], results: list[Tensor], inputs: list[tuple[str, Tensor, Record]]
) -> Detail:
    """Looks closely at an operation.

    Args:
        named: Its arguments by name.
        results: What it wrote.
        inputs: The tensors it read, with who wrote them.
    """
    worst = next((tensor for tensor in results if values.kinds_in(tensor)), results[0])
    mask, rows = where_bad(worst)
    stats = []
    for name, tensor, writer in inputs:
        stats.append(stats_of(tensor, name, mask))
        stats[-1].record = writer.index
    return Detail(
        stats,
        {name: value for name, value in named if _is_plain(value)},
        frozenset[str]().union(*(values.kinds_in(tensor) for tensor in results)),
        stats_of(worst, "result"),
        rows,
        int(mask.sum()),
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (bool, int, float)) for item in value)
    return isinstance(value, (bool, int, float, str)) or value is None


@dataclass(slots=True)
class Record:
    """One operation.

    Attributes:
        index: Its place in the order of execution.
        op: Its name, such as ``aten.log``; ``parameter``, ``buffer`` or ``input`` for a tensor
            that was there before.
        step: The step it belongs to.
        phase: ``data``, ``forward`` or ``backward``; what comes after the last backward belongs
            to the optimizer.
        place: The user's code it was called from; in backward, that of the forward operation.
        inside: The module it ran in; None outside of any.
        name: The name of a parameter; the file that a tensor was loaded from.
        forward: In backward, the forward operation whose derivative this is part of.
        writers: The operations that wrote its inputs.
        bad_writers: Those among them whose values are not finite here.
        low: The smallest value of its results.
        high: The largest.
        exact: Whether they are; if not, they are only how far from 0 any of the results is.
        late: What a device knows about them and nobody has read yet: the largest values of its
            results, after the smallest ones if it is exact.
        sizes: On a device, how many elements its result has, and each of its inputs.
        copies: Whether its results are known when those of its writers are.
        rest: Who wrote before it to the memory of which it wrote to a part.
        literal: Whether a bad value was written by the user as such, like ``float("-inf")``.
        intended: Whether its bad values are infinities that somebody meant.
        detail: A closer look, where the result is bad.
        callers: Where the function around its place was called from, where the result is bad.
        memory: Where its first result lies.
        wrapped: Whether its whole numbers are not what they stand for: they went over the end of
            their type, here or in what it read.
    """

    index: int
    op: str
    step: int
    phase: str
    place: Place | None
    inside: nn.Module | None = None
    forward: str | None = None
    name: str | None = None
    writers: tuple[Record, ...] = ()
    bad_writers: tuple[Record, ...] = ()
    low: float = 0.0
    high: float = 0.0
    exact: bool = True
    late: list[Tensor] | None = None
    sizes: tuple[int, ...] = ()
    copies: bool = False
    rest: Record | None = None
    literal: bool = False
    intended: bool = False
    detail: Detail | None = None
    callers: tuple[Place, ...] = ()
    memory: int | None = None
    wrapped: bool = False

    @property
    def bad(self) -> bool:
        """Whether its result is not finite."""
        return not (math.isfinite(self.low) and math.isfinite(self.high))

    def to_row(self) -> dict[str, Any]:
        """Returns the operation as a row of a table."""
        known = self.exact and self.late is None and not self.copies
        return {
            "op": self.op,
            "phase": self.phase,
            "line": None if self.place is None else self.place[2],
            "min": self.low if known else None,
            "max": self.high if known else None,
            "nonfinite": self.detail.all_bad if self.detail else 0,
        }

    @property
    def is_source(self) -> bool:
        """Whether this is a tensor that was there before, and no operation."""
        return "." not in self.op or self.op == LOADED


def read_late(records: list[Record]) -> None:
    """Reads what a device knows about some operations."""
    waiting = [(record, record.late) for record in records if record.late is not None]
    numbers = values.read_all([number for _, late in waiting for number in late])
    start = 0
    for record, late in waiting:
        read = numbers[start : start + len(late)]
        start += len(late)
        record.late = None
        if record.exact:
            record.low = min(read[: len(read) // 2], key=values.as_low)
            record.high = max(read[len(read) // 2 :], key=values.as_high)
        else:
            record.high = read[0] if len(read) == 1 else max(read, key=values.as_high)
            record.low = -record.high


def copy_of_writers(record: Record) -> None:
    """Completes the record of an operation that handed on what its writers had written."""
    record.copies = False
    record.low = min((writer.low for writer in record.writers), key=values.as_low)
    record.high = max((writer.high for writer in record.writers), key=values.as_high)
    record.exact = all(writer.exact for writer in record.writers)


def hand_on(results: list[Tensor], inputs: list[tuple[str, Tensor, Record]]) -> bool:
    """Returns whether the inputs' writers tell what the results are, without looking at them."""
    return all(
        is_float(tensor)
        and tensor.numel() > 0
        and not values.is_part(tensor)
        and writer.op not in UNFILLED
        and all(_is_as_wide(result, tensor) for result in results)
        for _, tensor, writer in inputs
    )


def _is_as_wide(result: Tensor, tensor: Tensor) -> bool:
    return result.dtype == tensor.dtype or result.element_size() > tensor.element_size()


def look_closely(record: Record, held: Tensor) -> None:
    """Describes a tensor that was bad before anyone saw it written."""
    # A bare number that was written into a tensor comes as a tensor without a size.
    record.literal = held.dim() == 0
    kinds = values.kinds_in(held)
    record.intended = record.literal and "nan" not in kinds
    mask, rows = where_bad(held)
    record.detail = Detail([], {}, kinds, stats_of(held, "value"), rows, int(mask.sum()))


def carry(record: Record, before: Record) -> None:
    """Notes that an operation wrote to a part of some memory, the rest of which is bad."""
    record.intended = before.intended and (record.intended or not record.bad)
    record.bad_writers += (before,)
    if not record.bad:
        record.low, record.high = before.low, before.high


def lasts(record: Record) -> bool:
    """Returns whether an operation matters beyond its step."""
    return record.bad or record.wrapped or record.op in UNFILLED


class Nodes:
    """The operations of a step by the numbers of their nodes, of which each thread has its own."""

    def __init__(self) -> None:
        self._made_for: dict[int, list[tuple[int, Record]]] = {}
        # The number that each thread gives to its next node.
        self._numbers: dict[int, int] = {}

    def forget(self) -> None:
        """Forgets the operations of a step that is over."""
        self._made_for = {}

    def is_new(self) -> bool:
        """Returns whether a node was made since the last operation of this thread."""
        return _next_number() != self._numbers.get(threading.get_ident())

    def add(self, record: Record, *, running: bool) -> None:
        """Notes an operation that is about to run.

        Args:
            record: The operation.
            running: Whether a node runs right now.
        """
        thread, number = threading.get_ident(), _next_number()
        known = self._numbers.get(thread)
        if number == known:
            return
        self._numbers[thread] = number
        if not running or known is not None:
            # The node of this operation exists already, and nothing has run since.
            self._made_for.setdefault(number - 1, []).append((thread, record))

    def operation_of(self, node: Any) -> Record | None:
        """Returns the operation that a node was made for."""
        found = self._made_for.get(node._sequence_nr())
        if found is None:
            return None
        return found[0][1] if len(found) == 1 else _likeliest(node, found)


def _likeliest(node: Any, found: list[tuple[int, Record]]) -> Record:
    """Returns one of several operations whose nodes have the same number in their threads."""
    fits = [_derivative_of(node, record.op) for _, record in found]
    found = [pair for pair, fit in zip(found, fits, strict=True) if fit == max(fits)]
    # What a thread computes again, it differentiates itself, with an engine that it calls. What
    # was first computed came before; its thread may have ended, and another have its name.
    thread, here = threading.get_ident(), _runs_engine(sys._getframe(1))
    likely = [pair for pair in found if (pair[0] == thread) is here] or found
    return likely[-1 if here else 0][1]


def _runs_engine(frame: FrameType | None) -> bool:
    """Returns whether the autograd engine was called by Python code of this thread."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None


def forward_name(node: Any) -> str:
    """Returns the forward operation a backward node seems to belong to."""
    name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "aten." + "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _derivative_of(node: Any, op: str) -> int:
    """Returns how well the name of a backward node fits to an operation: 0 is not at all."""
    node_name = forward_name(node).removeprefix("aten.").replace("_", "")
    name = op.removeprefix("aten.").replace("_", "")
    return 2 if name == node_name else int(name.startswith(node_name))
