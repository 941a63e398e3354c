"""Watches every operation: what it read, what it wrote, and whether that was finite."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanguard.numerics import is_float, local
from nanguard.tracer.modules import ModuleStack, tensors_in
from nanguard.tracer.records import Detail, Record, Stats, stats_of, where_bad
from nanguard.tracer.sites import is_users, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from torch import Tensor, nn

    from nanguard.tracer.sites import Place

_UNFILLED = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
}


class _Op:
    """What is known about an operation before it runs."""

    __slots__ = ("is_view", "name", "names", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.replace("::", ".").replace("._foreach_", ".")
        self.names = [argument.name for argument in schema.arguments]
        aliases = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
        self.writes = frozenset(name for name, alias in aliases if alias.is_write)
        self.is_view = bool(aliases) and not self.writes


class Trace(TorchDispatchMode):
    """A record of everything that happens while it is active.

    Values are told apart by the memory they lie in: whoever wrote there last is their writer, so
    nothing has to be kept alive. Operations with finite results are forgotten at the end of their
    step.

    Attributes:
        step: The step that is running.
        records: The operations of this step.
        bad: Every operation with a bad result, of all steps.
        last_backward: How many operations there were when the last backward ended.
        batch_size: The length of the first dimension of what the model was given.
        entered: What the models were given in this step, and by whom it was written.
    """

    def __init__(self, *, heal: Iterable[int] = (), look_at: int | None = None) -> None:
        super().__init__()
        self.step = 0
        self.records: list[Record] = []
        self.bad: list[Record] = []
        self.last_backward = 0
        self.batch_size: int | None = None
        self.entered: list[tuple[Record | None, bool]] = []
        self.in_data = 0
        self.in_optimizer = False
        self.models: list[nn.Module] = []
        self.batch: Any = None
        self.autocast: str | None = None
        self._first_call: int | None = None
        self._count = 0
        self._heal = frozenset(heal)
        self._look_at = look_at
        self._ops: dict[Any, _Op] = {}
        self._writers: dict[int, Record] = {}
        self._by_node: dict[int, Record] = {}
        self._parameters: dict[int, str] = {}
        self.modules = ModuleStack(self._enter_model)
        self._restores: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begins to watch, until the process ends or ``stop`` is called."""
        self.__enter__()
        self.modules.start()
        for name in ("from_numpy", "as_tensor", "tensor", "asarray", "frombuffer"):
            original = getattr(torch, name)
            self._restores.append((name, original))
            setattr(torch, name, self._watch_source(original))

    def stop(self) -> None:
        """Ends the watch."""
        for name, original in self._restores:
            setattr(torch, name, original)
        self._restores.clear()
        self.modules.stop()
        self.__exit__(None, None, None)

    def begin_step(self, step: int) -> None:
        """Forgets what was finite in the step before."""
        for record in self.records:
            record.writers = ()
        self._writers = {key: record for key, record in self._writers.items() if _lasts(record)}
        self.records = []
        self.entered = []
        self.batch = None
        self._by_node = {}
        self.last_backward = 0
        self.step = step

    def end_backward(self) -> None:
        """Notes that a backward has ended."""
        self.last_backward = self._count

    def know_parameters(self, named: dict[str, Tensor]) -> None:
        """Notes which memory belongs to parameters."""
        self._parameters = {_key(tensor): name for name, tensor in named.items()}

    def resolve(self) -> None:
        """Reads, in one go, what the device knows about the operations of this step."""
        late = [record for record in self.records if isinstance(record.low, list)]
        sources = {id(w): w for record in late for w in record.writers}
        late = sorted(
            [*late, *(w for w in sources.values() if isinstance(w.low, torch.Tensor))],
            key=lambda record: record.index,
        )
        lows, highs = _read([r.low for r in late]), _read([r.high for r in late])
        for record, low, high in zip(late, lows, highs, strict=True):
            record.low = min(low, key=_order)
            record.high = max(high, key=_order_high)
            if not record.bad:
                continue
            self.bad.append(record)
            record.bad_writers = tuple(w for w in record.writers if w.bad)
            nan = math.isnan(record.low) or math.isnan(record.high)
            if record.bad_writers:
                record.intended = not nan and all(w.intended for w in record.bad_writers)
            else:
                record.intended = record.literal and not nan

    def _know_model(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            key = _key(local(parameter))
            self._parameters.setdefault(key, name)
            writer = self._writers.get(key)
            # Who filled a parameter with good values is nobody's business any more.
            if writer is not None and not _lasts(writer):
                del self._writers[key]

    def parameter_name(self, record: Record) -> str | None:
        """Returns the parameter that lies where an operation wrote."""
        return next(
            (n for key, n in self._parameters.items() if self._writers.get(key) is record), None
        )

    def before_training(self, record: Record) -> bool:
        """Returns whether an operation ran before any model was called."""
        return self._first_call is None or record.index < self._first_call

    def table(self) -> list[dict[str, Any]]:
        """Returns every operation of this step as a row."""
        return [{**_row(record), "module": self.path_of(record)} for record in self.records]

    def path_of(self, record: Record) -> str | None:
        """Returns the dotted path of the module an operation ran in; None outside of any."""
        return None if record.inside is None else self.modules.names.path(record.inside)

    def writer(self, tensor: Tensor) -> Record | None:
        """Returns who wrote a tensor last."""
        return self._writers.get(_key(local(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _Op(func)
        kwargs = kwargs or {}
        if op.is_view:
            return func(*args, **kwargs)
        index = self._count
        self._count += 1
        # The node of this operation exists already, and nothing has run since.
        node = torch.autograd._get_sequence_nr() - 1
        # What is written in place is gone afterwards, and so is who wrote it before.
        inputs = [
            (name, tensor.clone() if name in op.writes and _small(tensor) else tensor, writer)
            for name, tensor, writer in self._inputs(op, args, kwargs)
        ]
        out = func(*args, **kwargs)
        if index in self._heal:
            out = _healed(out, in_place=bool(op.writes))
        results = self._results(op, args, kwargs, out)
        if results:
            self._note(self._new_record(index, op.name), op, node, results, inputs, args, kwargs)
        return out

    def _inputs(
        self, op: _Op, args: tuple[Any, ...], kwargs: Any
    ) -> list[tuple[str, Tensor, Record]]:
        named = [*zip(op.names, args, strict=False), *kwargs.items()]
        return [
            (name, tensor, self._source(tensor))
            for name, value in named
            if value is not None
            for tensor in _flat(value)
        ]

    def _results(self, op: _Op, args: tuple[Any, ...], kwargs: Any, out: Any) -> list[Tensor]:
        results = [tensor for tensor in _flat(out) if is_float(tensor)]
        if op.writes:
            # BatchNorm writes to its running statistics, which are not among its results.
            known = {id(tensor) for tensor in results}
            results += [
                tensor
                for name, value in [*zip(op.names, args, strict=False), *kwargs.items()]
                if name in op.writes
                for tensor in _flat(value)
                if is_float(tensor) and id(tensor) not in known
            ]
        return results

    def _note(
        self,
        record: Record,
        op: _Op,
        node: int,
        results: list[Tensor],
        inputs: list[tuple[str, Tensor, Record]],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        record.writers = tuple(writer for _, _, writer in inputs)
        if op.name in _UNFILLED:
            record.low = record.high = math.nan
        else:
            self._measure(record, op, results, inputs, args, kwargs)
        for tensor in results:
            key = _key(local(tensor))
            before = self._writers.get(key)
            if op.writes and before is not None and _lasts(before) and _is_part(tensor):
                # The rest of that memory is as bad as it was.
                self._carry(record, before)
            self._writers[key] = record
        self.records.append(record)
        if record.phase != "backward" or torch.is_grad_enabled():
            self._by_node.setdefault(node, record)

    def _carry(self, record: Record, before: Record) -> None:
        if record.bad:
            record.intended = record.intended and before.intended
            record.bad_writers += (before,)
            return
        record.low, record.high = before.low, before.high
        record.bad_writers = (before,)
        record.intended = before.intended

    def _measure(
        self,
        record: Record,
        op: _Op,
        results: list[Tensor],
        inputs: list[tuple[str, Tensor, Record]],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        extremes = [_extremes(tensor) for tensor in results if tensor.numel()]
        if not extremes:
            return
        if any(isinstance(low, torch.Tensor) for low, _ in extremes):
            record.low = [low for low, _ in extremes]
            record.high = [high for _, high in extremes]
            scalars = [*args, *kwargs.values()]
            record.literal = any(_is_nonfinite(value) for value in scalars)
            if record.index == self._look_at:
                record.detail = _detail(op, results, inputs, args, kwargs)
            return
        # Whichever is not finite must not get lost: a NaN fails every comparison.
        record.low = min((low for low, _ in extremes), key=_order)
        record.high = max((high for _, high in extremes), key=_order_high)
        if not record.bad:
            return
        self.bad.append(record)
        record.detail = _detail(op, results, inputs, args, kwargs)
        record.bad_writers = tuple(
            writer if writer.bad else self._changed(tensor)
            for stats, (_, tensor, writer) in zip(record.detail.inputs, inputs, strict=True)
            if stats.nonfinite
        )
        for stats, (_, _, writer) in zip(record.detail.inputs, inputs, strict=True):
            stats.record = writer.index
        kinds = record.detail.kinds
        if not record.bad_writers:
            record.literal = any(_is_nonfinite(v) for v in record.detail.scalars.values())
            record.intended = record.literal and "nan" not in kinds
        else:
            record.intended = "nan" not in kinds and all(w.intended for w in record.bad_writers)

    def _new_record(self, index: int, op: str) -> Record:
        running = torch._C._current_autograd_node()
        frame, in_engine = _users_frame(sys._getframe(2))
        if running is not None and in_engine:
            forward = self._by_node.get(running._sequence_nr())
            return Record(
                index,
                op,
                self.step,
                "backward",
                forward.place if forward else None,
                forward.inside if forward else None,
                (forward.forward or forward.op) if forward else _node_name(running),
            )
        phase = "data" if self.in_data else "optimizer" if self.in_optimizer else "forward"
        place = None if frame is None else place_of(frame)
        return Record(index, op, self.step, phase, place, self.modules.current(frame))

    def _source(self, tensor: Tensor) -> Record:
        """Returns who wrote a tensor; for one nobody saw being written, a record of its own."""
        held = local(tensor)
        key = _key(held)
        known = self._writers.get(key)
        if known is not None:
            return known
        kind = "parameter" if key in self._parameters else "input"
        record = Record(self._count, kind, self.step, "data", None, name=self._parameters.get(key))
        if is_float(held) and held.numel():
            record.low, record.high = _extremes(held)
            if not isinstance(record.low, torch.Tensor) and record.bad:
                frame, _ = _users_frame(sys._getframe(1))
                record.place = None if frame is None else place_of(frame)
                # A bare number that was written into a tensor comes as a tensor without a size.
                record.literal = held.dim() == 0
                nan = math.isnan(record.low) or math.isnan(record.high)
                record.intended = (record.literal or kind == "buffer") and not nan
                mask, bad = where_bad(held)
                record.detail = Detail(
                    [], {}, _kinds(held), stats_of(held, "value"), bad, int(mask.sum())
                )
        self._writers[key] = record
        return record

    def _changed(self, tensor: Tensor) -> Record:
        """Returns a record of a tensor that was finite when it was last written, as far as seen."""
        self._writers.pop(_key(local(tensor)), None)
        return self._source(tensor)

    def _watch_source(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes tensors out of other things, and tells us of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            data = args[0] if args else None
            if isinstance(data, torch.Tensor) or not isinstance(tensor, torch.Tensor):
                return tensor
            self._writers.pop(_key(tensor), None)
            if is_float(tensor) and tensor.numel():
                with _disable_current_modes():
                    record = self._source(tensor)
                record.index = self._count
                record.literal = isinstance(data, (int, float))
                record.intended = record.intended and record.literal
                frame, _ = _users_frame(sys._getframe(1))
                record.place = None if frame is None else place_of(frame)
                if not isinstance(record.low, torch.Tensor) and record.bad:
                    self.bad.append(record)
            return tensor

        return watched

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():
            self._look_at_call(module, args, kwargs)

    def _look_at_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._first_call is None:
            self._first_call = self._count
        if self.autocast is None:
            self.autocast = _autocast()
        if self.batch is None:
            self.batch = args
        if not any(module is known for known in self.models):
            if next(module.parameters(), None) is not None:
                self.models.append(module)
            self._know_model(module)
        for tensor in tensors_in((args, kwargs)):
            if tensor.dim() and self.batch_size is None and self.models:
                self.batch_size = tensor.shape[0]
            if is_float(tensor):
                writer = self.writer(tensor)
                low, high = _extremes(tensor) if tensor.numel() else (0.0, 0.0)
                bad = isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high))
                self.entered.append((writer, bad))


def _row(record: Record) -> dict[str, Any]:
    known = not isinstance(record.low, (list, torch.Tensor))
    return {
        "op": record.op,
        "phase": record.phase,
        "line": None if record.place is None else record.place[2],
        "min": record.low if known else None,
        "max": record.high if known else None,
        "nonfinite": record.detail.all_bad if record.detail else 0,
    }


def _autocast() -> str | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def _lasts(record: Record) -> bool:
    if isinstance(record.low, (list, torch.Tensor)):
        return False
    return record.bad or record.op in _UNFILLED


def _users_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Returns the nearest frame of the user's, and whether the autograd engine runs below it."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return frame, False
        if frame.f_code.co_name == "_engine_run_backward":
            return None, True
        frame = frame.f_back
    return None, False


def _node_name(node: Any) -> str:
    """Returns the forward operation a backward node seems to belong to."""
    name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "aten." + "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _key(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _is_part(tensor: Tensor) -> bool:
    """Returns whether a tensor is only a part of the memory it lies in."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False


def _small(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() <= 1 << 20


def _extremes(tensor: Tensor) -> tuple[Any, Any]:
    """Returns the smallest and the largest value; NaN counts as both."""
    values = local(tensor).detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:
        values = values.float()
    if values.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    if values.device.type != "cpu":
        return low, high
    return low.item(), high.item()


def _read(values: list[Any]) -> list[list[float]]:
    """Returns numbers that lie on a device, a list for each entry, after one transfer."""
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    groups: dict[Any, list[int]] = {}
    numbers: list[float] = [0.0] * len(flat)
    for place, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(place)
        else:
            numbers[place] = float(value)
    for places in groups.values():
        read = torch.stack([flat[place] for place in places]).tolist()
        for place, number in zip(places, read, strict=True):
            numbers[place] = number
    out, start = [], 0
    for value in values:
        length = len(value) if isinstance(value, list) else 1
        out.append(numbers[start : start + length])
        start += length
    return out


def _order(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _order_high(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _kinds(tensor: Tensor) -> frozenset[str]:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = {"nan": values != values, "inf": values == math.inf, "-inf": values == -math.inf}
    return frozenset(name for name, mask in found.items() if bool(mask.any()))


def _detail(
    op: _Op,
    results: list[Tensor],
    inputs: list[tuple[str, Tensor, Record]],
    args: tuple[Any, ...],
    kwargs: Any,
) -> Detail:
    worst = next(
        (t for t in results if t.numel() and _kinds(t)), results[0]
    )
    mask, bad = where_bad(worst)
    named = [*zip(op.names, args, strict=False), *kwargs.items()]
    scalars = {name: value for name, value in named if _is_plain(value)}
    stats: list[Stats] = []
    for name, tensor, _ in inputs:
        stats.append(stats_of(tensor, name, mask))
    return Detail(
        stats, scalars, frozenset().union(*(_kinds(t) for t in results)), stats_of(worst, "result"), bad, int(mask.sum())
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (bool, int, float)) for item in value)
    return isinstance(value, (bool, int, float, str, torch.dtype)) or value is None


def _healed(out: Any, *, in_place: bool) -> Any:
    """Returns results with every bad value replaced by a harmless one."""
    if isinstance(out, torch.Tensor):
        if not is_float(out):
            return out
        good = torch.nan_to_num(out, nan=0.0, posinf=1e4, neginf=-1e4)
        return out.copy_(good) if in_place else good
    if isinstance(out, (list, tuple)):
        healed = [_healed(item, in_place=in_place) for item in out]
        return type(out)(healed) if type(out) in (list, tuple) else tuple(healed)
    return out
