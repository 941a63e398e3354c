"""Watches every operation: what it read, what it wrote, and whether that was finite."""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanguard.numerics import is_float, local
from nanguard.tracer import values
from nanguard.tracer.modules import ModuleStack, tensors_in
from nanguard.tracer.ops import (
    Op,
    autocast_type,
    forward_name,
    kept,
    results_of,
    users_frame_of_op,
)
from nanguard.tracer.records import Detail, Record, detail_of, stats_of, where_bad
from nanguard.tracer.sites import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    Inputs = list[tuple[str, Tensor, Record]]

UNFILLED = (
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
)
# Functions that make tensors of other things, without an operation that could be seen.
_SOURCES = ("from_numpy", "as_tensor", "tensor", "asarray", "frombuffer")

_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Trace(TorchDispatchMode):
    """A record of everything that happens while it is active.

    Values are told apart by the memory they lie in: whoever wrote there last is their writer, so
    nothing has to be kept alive. Operations with finite results are forgotten at the end of their
    step. On a CPU every result is looked at when it is there. On a device, all of them are read
    together, by ``resolve``.

    Attributes:
        step: The step that is running.
        records: The operations of this step.
        bad: Every operation with a bad result, of all steps.
        last_backward: How many operations there were when the last backward ended.
        batch_size: The length of the first dimension of what the model was given.
        batch: What the script was given by its loader, or else what the model was given.
        given: Where in memory that lies which the model was given in this step.
        arguments: What the first model was given in this step.
        entered: Who wrote what the models were given in this step, and whether it was bad; on a
            device, whether it may have been.
        autocast: The type that autocast computes in, if it was on.
        in_data: Whether a loader is at work.
        in_optimizer: Whether an optimizer is.
        unmeasured: How many operations had results that could not be looked at.
    """

    supports_higher_order_operators = True

    def __init__(self, *, heal: Iterable[int] = (), look_at: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        self.records: list[Record] = []
        self.bad: list[Record] = []
        self.last_backward = 0
        self.batch_size: int | None = None
        self.batch: Any = None
        self.given: set[Any] = set()
        self.arguments: Any = ()
        # What lay on a device before anyone saw it written, until it is known whether it is bad.
        self._unread: list[tuple[Record, Tensor]] = []
        self.entered: list[tuple[Record | None, bool]] = []
        self.autocast: str | None = None
        self.in_data = 0
        self.in_optimizer = False
        self.modules = ModuleStack(self._enter_model)
        self.unmeasured = 0
        self._models: list[nn.Module] = []
        self._count = 0
        self._first_call: int | None = None
        self._heal = frozenset(heal)
        self._look_at = look_at
        self._ops: dict[Any, Op] = {}
        self._writers: dict[int, Record] = {}
        self._by_node: dict[int, Record] = {}
        self._parameters: dict[int, str] = {}
        self._restores: list[tuple[str, Any]] = []
        self._threads: set[int] = set()

    def start(self) -> None:
        """Begins to watch, until the process ends or ``stop`` is called."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._threads = {threading.get_ident()}
        self.modules.start()
        for name in _SOURCES:
            original = getattr(torch, name)
            self._restores.append((name, original))
            setattr(torch, name, self._watch_source(original))

    def stop(self) -> None:
        """Ends the watch."""
        for name, original in self._restores:
            setattr(torch, name, original)
        self._restores.clear()
        self.modules.stop()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def begin_step(self, step: int) -> None:
        """Forgets what was finite in the step before."""
        for record in self.records:
            record.writers = ()
        self._writers = {key: record for key, record in self._writers.items() if _lasts(record)}
        self.records, self.entered, self.batch, self.given = [], [], None, set()
        self.arguments, self._unread = (), []
        self._by_node = {}
        self.last_backward = 0
        self.step = step

    def end_backward(self) -> None:
        """Notes that a backward has ended."""
        self.last_backward = self._count

    def know_parameters(self, named: dict[str, Tensor]) -> None:
        """Notes which memory belongs to parameters."""
        self._parameters = {values.memory_of(local(t)): name for name, t in named.items()}

    def resolve(self) -> None:
        """Reads, in one go, what a device knows about the operations of this step."""
        late = [record for record in self.records if isinstance(record.low, list)]
        sources = {id(w): w for record in late for w in record.writers}
        late += [w for w in sources.values() if isinstance(w.low, torch.Tensor)]
        late.sort(key=lambda record: record.index)
        lows = values.read_all([record.low for record in late])
        highs = values.read_all([record.high for record in late])
        for record, low, high in zip(late, lows, highs, strict=True):
            record.low, record.high = min(low, key=values.as_low), max(high, key=values.as_high)
        for record, held in self._unread:
            if record.bad:
                _look_closely(record, held)
        for record in late:
            if record.bad:
                record.bad_writers = tuple(writer for writer in record.writers if writer.bad)
                self._judge(record)

    def parameter_name(self, record: Record) -> str | None:
        """Returns the parameter that lies where an operation wrote."""
        return next(
            (n for key, n in self._parameters.items() if self._writers.get(key) is record), None
        )

    def before_training(self, record: Record) -> bool:
        """Returns whether an operation ran before any model was called."""
        return self._first_call is None or record.index < self._first_call

    def path_of(self, record: Record) -> str | None:
        """Returns the dotted path of the module an operation ran in; None outside of any."""
        return None if record.inside is None else self.modules.names.path(record.inside)

    def table(self) -> list[dict[str, Any]]:
        """Returns every operation of this step as a row."""
        return [{**record.to_row(), "module": self.path_of(record)} for record in self.records]

    def writer(self, tensor: Tensor) -> Record | None:
        """Returns who wrote a tensor last."""
        return self._writers.get(values.memory_of(local(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = self._ops.get(func)
        if op is None and hasattr(func, "_schema"):
            op = self._ops[func] = Op(func)
        if op is None or op.is_view:
            return func(*args, **kwargs)
        index, self._count = self._count, self._count + 1
        # The node of this operation exists already, and nothing has run since.
        node = _sequence_number() - 1
        named = op.named(args, kwargs)
        # What is written in place is gone afterwards, and so is who wrote it before.
        inputs = [
            (name, kept(t) if name in op.writes else t, self._source(t))
            for name, value in named
            if value is not None
            for t in values.tensors_of(value)
        ]
        out = func(*args, **kwargs)
        if index in self._heal:
            out = values.heal(out, in_place=bool(op.writes))
        results = results_of(op, named, out)
        if results:
            record = self._new_record(index, op.name)
            try:
                self._note(record, op, node, results, inputs, named)
            except (RuntimeError, NotImplementedError):
                # A kind of tensor that cannot be looked at; the script can go on with it.
                self.unmeasured += 1
        return out

    def _note(
        self,
        record: Record,
        op: Op,
        node: int,
        results: list[Tensor],
        inputs: Inputs,
        named: list[tuple[str, Any]],
    ) -> None:
        record.writers = tuple(writer for _, _, writer in inputs)
        if op.name in UNFILLED:
            record.low = record.high = math.nan
        else:
            self._measure(record, results, inputs, named)
        for tensor in results:
            key = values.memory_of(local(tensor))
            before = self._writers.get(key)
            if op.writes and before is not None and _lasts(before) and values.is_part(tensor):
                _carry(record, before)
            self._writers[key] = record
        self.records.append(record)
        if record.phase != "backward" or torch.is_grad_enabled():
            self._by_node.setdefault(node, record)

    def _measure(
        self,
        record: Record,
        results: list[Tensor],
        inputs: Inputs,
        named: list[tuple[str, Any]],
    ) -> None:
        pairs = [values.extremes_of(tensor) for tensor in results if tensor.numel()]
        if not pairs:
            return
        record.literal = any(values.is_nonfinite(value) for _, value in named)
        lows, highs = [low for low, _ in pairs], [high for _, high in pairs]
        if any(isinstance(low, torch.Tensor) for low in lows):
            record.low, record.high = lows, highs
            if record.index == self._look_at:
                record.detail = detail_of(named, results, inputs)
            return
        record.low, record.high = min(lows, key=values.as_low), max(highs, key=values.as_high)
        if not record.bad:
            return
        record.detail = detail_of(named, results, inputs)
        record.bad_writers = tuple(
            writer if writer.bad else self._changed(tensor)
            for stats, (_, tensor, writer) in zip(record.detail.inputs, inputs, strict=True)
            if stats.nonfinite
        )
        self._judge(record)

    def _judge(self, record: Record) -> None:
        """Notes a bad result, and whether somebody meant it."""
        self.bad.append(record)
        nan = math.isnan(record.low) or math.isnan(record.high)
        if record.bad_writers:
            record.intended = not nan and all(writer.intended for writer in record.bad_writers)
        else:
            record.intended = record.literal and not nan

    def _new_record(self, index: int, op: str) -> Record:
        running: Any = torch._C._current_autograd_node()
        frame, in_engine = users_frame_of_op(sys._getframe(2))
        if running is not None and in_engine:
            forward = self._by_node.get(running._sequence_nr())
            if forward is None:
                return Record(index, op, self.step, "backward", None, None, forward_name(running))
            return Record(
                index,
                op,
                self.step,
                "backward",
                forward.place,
                forward.inside,
                forward.forward or forward.op,
            )
        phase = "data" if self.in_data else "optimizer" if self.in_optimizer else "forward"
        place = None if frame is None else place_of(frame)
        return Record(index, op, self.step, phase, place, self.modules.current(frame))

    def _source(self, tensor: Tensor) -> Record:
        """Returns who wrote a tensor; for one nobody saw being written, a record of its own."""
        held = local(tensor)
        key = values.memory_of(held)
        known = self._writers.get(key)
        if known is not None:
            return known
        name = self._parameters.get(key)
        kind = "input" if name is None else "parameter"
        record = Record(self._count, kind, self.step, "data", None, name=name)
        if is_float(held) and held.numel():
            record.low, record.high = values.extremes_of(held)
            late = isinstance(record.low, torch.Tensor)
            if record.bad or late:
                frame, _ = users_frame_of_op(sys._getframe(1))
                record.place = None if frame is None else place_of(frame)
            if record.bad:
                _look_closely(record, held)
            elif late and kind == "input":
                self._unread.append((record, held))
        self._writers[key] = record
        return record

    def _changed(self, tensor: Tensor) -> Record:
        """Returns a record of a tensor that was finite when it was last written, as far as seen."""
        self._writers.pop(values.memory_of(local(tensor)), None)
        return self._source(tensor)

    def _watch_source(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes tensors out of other things, and tells us of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            data = args[0] if args else None
            if isinstance(data, torch.Tensor) or not isinstance(tensor, torch.Tensor):
                return tensor
            self._writers.pop(values.memory_of(tensor), None)
            if is_float(tensor) and tensor.numel():
                with _disable_current_modes():
                    record = self._source(tensor)
                record.literal = isinstance(data, (int, float))
                record.intended = record.intended and record.literal
                frame, _ = users_frame_of_op(sys._getframe(1))
                record.place = None if frame is None else place_of(frame)
                if record.bad:
                    self.bad.append(record)
            return tensor

        return watched

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        """Looks at what a model is given."""
        if threading.get_ident() not in self._threads:
            # Modes belong to a thread, and scripts may train in another than the first.
            self._threads.add(threading.get_ident())
            self.__enter__()  # type: ignore[no-untyped-call]
        if self._first_call is None:
            self._first_call = self._count
        if self.autocast is None:
            self.autocast = autocast_type()
        if self.batch is None:
            self.batch = args
        self.arguments = self.arguments or args
        if not any(module is known for known in self._models):
            self._know_model(module)
        with _disable_current_modes():
            for tensor in tensors_in(args):
                self.given.add(values.memory_of(local(tensor)))
                if tensor.dim() and self.batch_size is None and self._models:
                    self.batch_size = tensor.shape[0]
                if is_float(tensor):
                    low, high = values.extremes_of(tensor)
                    late = isinstance(low, torch.Tensor)
                    bad = late or values.is_nonfinite(low) or values.is_nonfinite(high)
                    self.entered.append((self.writer(tensor), bad))

    def _know_model(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if not any(module is known for known in self._models):
                self._models.append(module)
            key = values.memory_of(local(parameter))
            self._parameters.setdefault(key, name)
            writer = self._writers.get(key)
            # Who filled a parameter with good values is nobody's business any more.
            if writer is not None and not _lasts(writer):
                del self._writers[key]


def _look_closely(record: Record, held: Tensor) -> None:
    """Describes a tensor that was bad before anyone saw it written."""
    # A bare number that was written into a tensor comes as a tensor without a size.
    record.literal = held.dim() == 0
    kinds = values.kinds_in(held)
    record.intended = record.literal and "nan" not in kinds
    mask, rows = where_bad(held)
    record.detail = Detail([], {}, kinds, stats_of(held, "value"), rows, int(mask.sum()))


def _carry(record: Record, before: Record) -> None:
    """Notes that an operation wrote to a part of some memory, the rest of which is bad."""
    if not isinstance(record.low, (int, float)):
        return
    record.intended = before.intended and (record.intended or not record.bad)
    record.bad_writers += (before,)
    if not record.bad:
        record.low, record.high = before.low, before.high


def _lasts(record: Record) -> bool:
    """Returns whether an operation matters beyond its step."""
    return record.bad or record.op in UNFILLED
