"""Watches every operation: what it read, what it wrote, and whether that was finite."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _push_mode,
)

from nanguard.numerics import is_float, local
from nanguard.replay.tracer import tensor_values as values
from nanguard.replay.tracer.modules import ModuleStack, tensors_in
from nanguard.replay.tracer.op_kinds import LOADED
from nanguard.replay.tracer.op_records import (
    Nodes,
    Record,
    carry,
    copy_of_writers,
    detail_of,
    forward_name,
    hand_on,
    lasts,
    look_closely,
    read_late,
)
from nanguard.replay.tracer.ops import (
    MAY_WRAP,
    autocast_type,
    find_stand_ins,
    has_wrapped,
    is_on,
    is_recomputed,
    kept,
    may_have_wrapped,
    op_of,
    results_of,
    run_op,
    take_off,
    unseen,
    users_frame_of_op,
)
from nanguard.replay.tracer.sites import callers_of, file_being_loaded, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from nanguard.replay.tracer.ops import Op

    Inputs = list[tuple[str, Tensor, Record]]
    # What lies on a device and was not there before, with what is to be known about it.
    Unread = list[tuple[Record, Tensor]]

_running_node: Callable[[], Any] = torch._C._current_autograd_node


class Trace(TorchDispatchMode):
    """A record of everything that happens while it is active.

    Values are told apart by the memory they lie in: whoever wrote there last is their writer, so
    nothing has to be kept alive. Operations with finite results are forgotten at the end of their
    step. On a CPU every result is looked at when it is there. On a device, all of them are read
    together, by ``resolve``, and only how far from 0 they are, unless it is to be exact.

    It may run in several threads at once: on a device, backward has a thread of its own.

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
        exact: Whether smallest and largest values are looked at on a device, too.
    """

    supports_higher_order_operators = True

    def __init__(
        self, *, heal: Iterable[int] = (), look_at: int | None = None, exact: bool = False
    ) -> None:
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
        self._unread: Unread = []
        self.entered: list[tuple[Record | None, bool]] = []
        self.autocast: str | None = None
        self.in_data = 0
        self.in_optimizer = False
        self.modules = ModuleStack(self._enter_model)
        self.unmeasured = 0
        self.exact = exact or look_at is not None
        self._models: list[nn.Module] = []
        self._count = 0
        self._lock = threading.Lock()
        self._first_call: int | None = None
        self._heal = frozenset(heal)
        self._look_at = look_at
        self._writers: dict[int, Record] = {}
        self._nodes = Nodes()
        self._parameters: dict[int, str] = {}
        self._buffers: dict[int, str] = {}
        # What came in, part by part: samples lie in one memory, and not all of them are bad.
        self._parts: dict[tuple[int, int, int], Record] = {}
        # How large parameters were when a model was first called in this step.
        self._measured: dict[int, Tensor] | None = None
        self._active = False
        # The modes that were on before.
        self._below: list[TorchDispatchMode] = []

    def start(self) -> None:
        """Begins to watch, until the process ends or ``stop`` is called."""
        self.modules.start()
        self._below = _get_current_dispatch_mode_stack()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._active = True

    def stop(self) -> None:
        """Ends the watch, also where a mode that began later has not ended.

        Another thread that runs a model has the mode, too, and is let through from now on.
        """
        if not self._active:
            return
        self._active = False
        self.modules.stop()
        if is_on(self):
            take_off(self)
            _push_mode(self)
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not torch._C._len_torch_dispatch_stack():
                # Modes that ended in another order than they began leave torch's note of them set.
                _python_dispatch._is_in_torch_dispatch_mode = False
            return
        # A mode that began before has ended since, and has taken this one off instead of itself.
        left = [mode for mode in self._below if is_on(mode)]
        if left:
            take_off(left[-1])

    def begin_step(self, step: int) -> None:
        """Forgets what was finite in the step before."""
        find_stand_ins()
        self.resolve()
        for record in self.records:
            record.writers, record.rest = (), None
        self._writers = {key: record for key, record in self._writers.items() if lasts(record)}
        self.records, self.entered, self.batch, self.given = [], [], None, set()
        self.arguments, self._unread, self._measured = (), [], None
        self._parts = {}
        self._nodes.forget()
        self.last_backward = 0
        self.step = step

    def end_backward(self) -> None:
        """Notes that a backward has ended."""
        self.last_backward = self._count

    def know_parameters(self, named: dict[str, Tensor]) -> None:
        """Notes which memory belongs to parameters."""
        self._parameters = {values.memory_of(t): name for name, t in named.items()}
        for key, name in self._parameters.items():
            source = self._writers.get(key)
            # What torch.func trains is known as such only when its gradients are there.
            if source is not None and source.op == "input" and source.name is None:
                source.op, source.name = "parameter", name

    def resolve(self) -> None:
        """Reads, in one go, what a device knows about the operations of this step."""
        late = [record for record in self.records if record.late is not None or record.copies]
        with unseen():
            read_late([*(source for source, _ in self._unread), *late])
            for source, held in self._unread:
                if source.bad and source.detail is None:
                    if source.name is None:
                        source.op = "input"  # data may be asked for its gradient, too
                    look_closely(source, held)
        self._unread = []
        # What is copied was written before.
        for record in sorted(late, key=lambda record: record.index):
            if record.copies:
                copy_of_writers(record)
            if record.bad:
                record.bad_writers = tuple(writer for writer in record.writers if writer.bad)
                self._judge(record)
            if record.rest is not None and lasts(record.rest):
                carry(record, record.rest)

    def parameter_name(self, record: Record) -> str | None:
        """Returns the parameter that lies where an operation wrote."""
        return next(
            (n for key, n in self._parameters.items() if self._writers.get(key) is record), None
        )

    def written_parameter(self, record: Record) -> str | None:
        """Returns the parameter that an operation wrote to, whoever has done so since."""
        return None if record.memory is None else self._parameters.get(record.memory)

    def written_buffer(self, record: Record) -> str | None:
        """Returns the buffer of a model that an operation wrote to."""
        return None if record.memory is None else self._buffers.get(record.memory)

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
        return self._writers.get(values.memory_of(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = op_of(func)
        if not self._active:
            return func(*args, **kwargs)
        if op.is_view:
            if op.name and self._nodes.is_new():
                self._new_record(self._count, op.name)
            out = run_op(op, args, kwargs)
            if op.lifts:
                self._lift(out)
            return out
        with self._lock:
            index = self._count
            self._count = index + 1
        record = self._new_record(index, op.name)
        # What is written in place is gone afterwards, and so is who wrote it before.
        with unseen():
            inputs = self._inputs(op, args, kwargs, record)
        out = run_op(op, args, kwargs)
        if op.sets and self._load(out):
            return out
        with unseen():
            if index in self._heal:
                out = values.heal(out, in_place=bool(op.writes))
            results = results_of(op, args, kwargs, out)
            if not results and op.name in MAY_WRAP:
                self._note_whole_numbers(record, op, args, kwargs, out, inputs)
            if results:
                try:
                    self._note(record, op, results, inputs, args, kwargs)
                except RuntimeError:  # a kind without arithmetic: counted
                    self.unmeasured += 1
        return out

    def _inputs(
        self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record
    ) -> Inputs:
        """Returns what an operation reads, and who wrote that."""
        found: Inputs = []
        unread: Unread = []
        given, closely = len(args), record.index == self._look_at
        for place, name, written in op.reads:
            value = args[place] if place < given else kwargs.get(name)
            if value is None:
                continue
            for tensor in (value,) if isinstance(value, torch.Tensor) else values.tensors_of(value):
                writer = self._source(tensor, record, unread)
                if written:
                    tensor = kept(tensor, closely=closely)
                found.append((name, tensor, writer))
        if unread:
            self._measure_sources(unread)
        return found

    def _note(
        self,
        record: Record,
        op: Op,
        results: list[Tensor],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        record.writers = tuple([writer for _, _, writer in inputs])
        if op.unfilled:
            record.low = record.high = math.nan
        else:
            self._measure(record, op, results, inputs, args, kwargs)
        record.memory = values.memory_of(results[0])
        for tensor in results:
            key = values.memory_of(tensor)
            if op.writes:
                self._overwrite(record, tensor, self._writers.get(key))
            self._writers[key] = record
        self.records.append(record)

    def _note_whole_numbers(
        self,
        record: Record,
        op: Op,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: Inputs,
    ) -> None:
        """Notes whole numbers that have wrapped around, and what is made of them; no others."""
        if not isinstance(out, torch.Tensor) or values.is_late(out) or values.is_hollow(out):
            return
        read = {name: tensor for name, tensor, _ in inputs}
        record.wrapped = any(writer.wrapped for _, _, writer in inputs) or has_wrapped(
            op.name, {**dict(op.named(args, kwargs)), **read}, out
        )
        if record.wrapped:
            record.writers = tuple(writer for _, _, writer in inputs)
            self._writers[values.memory_of(out)] = record
            self.records.append(record)

    def _overwrite(self, record: Record, tensor: Tensor, before: Record | None) -> None:
        """Notes who wrote to the rest of some memory, if an operation wrote to a part of it."""
        if before is None or before is record or not values.is_part(tensor):
            return
        if values.is_late(tensor):
            record.rest = before
        elif lasts(before):
            carry(record, before)

    def _measure(
        self,
        record: Record,
        op: Op,
        results: list[Tensor],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        full = [tensor for tensor in results if tensor.numel()]
        if not full:
            return
        if any(map(values.is_late, full)):
            record.literal = op.has_literal(args, kwargs)
            record.sizes = (full[0].numel(), *[tensor.numel() for _, tensor, _ in inputs])
            if op.keeps and not self.exact and hand_on(full, inputs):
                record.copies = True
            elif self.exact or op.extreme:
                record.late = values.late_extremes_of(full)
            else:
                record.late, record.exact = values.largest_among(full), False
            if record.index == self._look_at:
                record.detail = detail_of(op.named(args, kwargs), results, inputs)
            return
        pairs = [values.extremes_of(tensor) for tensor in full]
        record.low = min((low for low, _ in pairs), key=values.as_low)
        record.high = max((high for _, high in pairs), key=values.as_high)
        if not record.bad:
            return
        record.literal = op.has_literal(args, kwargs)
        record.detail = detail_of(op.named(args, kwargs), results, inputs)
        record.bad_writers = tuple(
            writer if writer.bad else self._changed(tensor, record)
            for stats, (_, tensor, writer) in zip(record.detail.inputs, inputs, strict=True)
            if stats.nonfinite
        )
        if not record.bad_writers:
            record.callers = callers_of(sys._getframe(1))
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
        """Returns a record that knows where its operation was called from."""
        running = _running_node()
        frame, in_engine = users_frame_of_op(sys._getframe(1).f_back)
        if frame is None and (in_engine or running is not None):
            record = self._derivative(index, op, running)
        elif running is not None and not is_recomputed(frame, running):
            # A hook, or a backward that the user wrote. Some optimizers work in hooks.
            forward = self._nodes.operation_of(running)
            phase = "optimizer" if self.in_optimizer else "backward"
            inside = None if forward is None else forward.inside
            record = Record(index, op, self.step, phase, place_of(frame), inside)  # type: ignore[arg-type]
        else:
            phase = "data" if self.in_data else "optimizer" if self.in_optimizer else "forward"
            place = None if frame is None else place_of(frame)
            record = Record(index, op, self.step, phase, place, self.modules.current(frame))
        self._nodes.add(record, running=running is not None)
        return record

    def _derivative(self, index: int, op: str, running: Any) -> Record:
        """Returns a record of an operation of the autograd engine's."""
        if running is None:
            return Record(index, op, self.step, "backward", None)
        forward = self._nodes.operation_of(running)
        if forward is None:
            return Record(index, op, self.step, "backward", None, None, forward_name(running))
        name = forward.forward or forward.op
        return Record(index, op, self.step, "backward", forward.place, forward.inside, name)

    def _source(self, tensor: Tensor, record: Record, unread: Unread) -> Record:
        """Returns who wrote a tensor; for one nobody saw being written, a record of its own.

        Args:
            tensor: What is read.
            record: The operation that reads it.
            unread: Where it is noted that a device has to look at it.
        """
        key = values.memory_of(tensor)
        known = self._writers.get(key)
        if known is not None and (known.op != "input" or not values.is_late(tensor)):
            return known
        held = local(tensor)
        part = (key, *values.part_of(held))
        if known is not None and part in self._parts:
            return self._parts[part]
        name = self._parameters.get(key)
        # What a script trains without a model or an optimizer is known by its being a leaf.
        leaf = tensor.is_leaf and tensor.requires_grad
        kind = "parameter" if name is not None or leaf else "input"
        if kind == "input" and key in self._buffers:
            kind, name = "buffer", self._buffers[key]
        source = Record(record.index, kind, self.step, "data", None, name=name)
        self._writers.setdefault(key, source)
        self._parts[part] = source
        if not is_float(held) or not held.numel() or values.is_hollow(held):
            source.wrapped = not values.is_hollow(held) and may_have_wrapped(held)
            return source
        if values.is_late(held):
            source.place = record.place
            source.callers = callers_of(sys._getframe(1)) if kind == "input" else ()
            measured = None if self._measured is None else self._measured.get(key)
            if measured is None:
                unread.append((source, held))
            else:
                source.late, source.exact = [measured], False
                self._unread.append((source, held))
            return source
        try:
            source.low, source.high = values.extremes_of(held)
        except RuntimeError:  # a kind without arithmetic: counted
            self.unmeasured += 1
            return source
        if source.bad:
            if name is None:
                source.op = "input"  # data may be asked for its gradient, too
            source.place, source.callers = record.place, callers_of(sys._getframe(1))
            look_closely(source, held)
        return source

    def _load(self, tensor: Tensor) -> bool:
        """Notes a tensor that is read from a file; returns whether it is."""
        file = file_being_loaded(sys._getframe(1))
        if file is None:
            return False
        with unseen():
            record = self._new_record(self._count, LOADED)
            record.name, record.inside = file, None
            self._writers[values.memory_of(tensor)] = record
            if is_float(tensor) and tensor.numel() and not values.is_late(tensor):
                record.low, record.high = values.extremes_of(tensor)
                if record.bad:
                    look_closely(record, tensor)
                    # A number that was stored was not written as such by the script.
                    record.literal = record.intended = False
                    self.bad.append(record)
        return True

    def _measure_sources(self, unread: Unread) -> None:
        """Lets a device look at what was there before."""
        held = [tensor for _, tensor in unread]
        try:
            if self.exact:
                numbers = [values.late_extremes_of([tensor]) for tensor in held]
            else:
                numbers = [[number] for number in values.largest_of(held)]
        except RuntimeError:  # a kind without arithmetic: counted
            self.unmeasured += 1
            return
        for (source, _), late in zip(unread, numbers, strict=True):
            source.late, source.exact = late, self.exact
        self._unread += unread

    def _changed(self, tensor: Tensor, record: Record) -> Record:
        """Returns a record of a tensor that was finite when it was last written, as far as seen."""
        self._writers.pop(values.memory_of(tensor), None)
        return self._source(tensor, record, [])

    def _lift(self, tensor: Tensor) -> None:
        """Notes a tensor that was made out of something else, without an operation."""
        with unseen():
            self._writers.pop(values.memory_of(tensor), None)
            if is_float(tensor):
                unread: Unread = []
                self._source(tensor, self._new_record(self._count, "lift"), unread)
                self._measure_sources(unread)

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        """Looks at what a model is given."""
        if not is_on(self):
            # Modes belong to a thread, and scripts may train in another than the first.
            _push_mode(self)
        if self._first_call is None:
            self._first_call = self._count
        if self.autocast is None:
            self.autocast = autocast_type()
        if self.batch is None:
            self.batch = args
        self.arguments = self.arguments or args
        with unseen():
            if not any(module is known for known in self._models):
                self._know_model(module)
            if self._measured is None:
                self._measure_parameters()
            for tensor in tensors_in(args):
                self._give(tensor)

    def _give(self, tensor: Tensor) -> None:
        """Looks at a tensor that a model is given."""
        tensor = values.unwrapped(tensor)
        self.given.add(values.memory_of(tensor))
        if tensor.dim() and self.batch_size is None and self._models:
            self.batch_size = tensor.shape[0]
        if is_float(tensor) and not values.is_hollow(tensor):
            bad = values.is_late(tensor)
            if not bad:
                low, high = values.extremes_of(tensor)
                bad = values.is_nonfinite(low) or values.is_nonfinite(high)
            self.entered.append((self.writer(tensor), bad))

    def _know_model(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers():
            self._buffers.setdefault(values.memory_of(values.unwrapped(buffer)), name)
        for name, parameter in module.named_parameters():
            if not any(module is known for known in self._models):
                self._models.append(module)
            key = values.memory_of(values.unwrapped(parameter))
            self._parameters.setdefault(key, name)
            writer = self._writers.get(key)
            # Who filled a parameter with good values is nobody's business any more.
            if writer is not None and not lasts(writer):
                del self._writers[key]

    def _measure_parameters(self) -> None:
        """Lets a device look at all parameters at once, before an operation reads the first."""
        self._measured = {}
        if self.exact:
            return
        found = {}
        for parameter in (p for model in self._models for p in model.parameters()):
            held = local(parameter)
            if values.is_late(held) and is_float(held) and held.numel():
                key = values.memory_of(held)
                # Parameters that lie beside each other in one memory are looked at one by one.
                if key not in self._writers and not values.is_part(held):
                    found[key] = held
        found = {key: held for key, held in found.items() if not values.is_hollow(held)}
        # What cannot be looked at together is looked at one by one, as operations read it.
        with contextlib.suppress(RuntimeError):
            numbers = values.largest_of(list(found.values()))
            self._measured = dict(zip(found, numbers, strict=True))
