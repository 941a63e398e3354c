"""What is known about an operation: its schema, what it wrote, and who called it.

Also whether whole numbers went over the end of their type, and how an operation is run without
being seen by the modes of the script.
"""

from __future__ import annotations

import contextlib
import operator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from nanguard.numerics import is_float
from nanguard.replay.tracer import tensor_values as values
from nanguard.replay.tracer.op_kinds import EXTREMES, KEEPING, UNFILLED
from nanguard.replay.tracer.sites import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

# In-place operations on more elements than this do not keep what they overwrite.
_SMALL = 1 << 20
# What makes a tensor out of numpy's memory, a list or a number says so with one of these.
_LIFTS = ("aten::lift_fresh", "aten::lift")
_CHECKPOINT: str = torch.utils.checkpoint.__file__
# BatchNorm, whose schema does not tell that it writes to its running statistics.
_UPDATING = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
_STATISTICS = frozenset({"running_mean", "running_var"})
_known: dict[int, Op] = {}


class Op:
    """What is known about an operation before it runs.

    Attributes:
        func: The operation; while it is held, nothing else has its id.
        name: Its name, such as ``aten.log``.
        names: What it calls its arguments, in their order.
        reads: Which of them may hold tensors: place, name, and whether they are written to.
        numbers: Which of them may be numbers: place and name.
        writes: Which of them it writes to.
        updates: Which of them it writes to without saying so.
        is_view: Whether its result lies in the memory of an argument, which it does not change.
        is_native: Whether it is torch's own.
        lifts: Whether it stands for a tensor that came from outside of torch.
        sets: Whether it gives a tensor the memory of something that was read.
        unfilled: Whether its result holds anything at all.
        extreme: Whether it matters which infinity its result is.
        keeps: Whether its result holds the values of its arguments, all of them, and no others.
    """

    __slots__ = (
        "extreme", "func", "is_native", "is_view", "keeps", "lifts", "name", "names", "numbers",
        "reads", "sets", "unfilled", "updates", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        arguments = [] if schema is None else schema.arguments
        name = "" if schema is None else schema.name
        self.func = func
        self.name: str = name.replace("::", ".").replace("._foreach_", ".")
        self.names: list[str] = [argument.name for argument in arguments]
        aliases = [(a.name, a.alias_info) for a in arguments if a.alias_info is not None]
        self.writes = frozenset(name for name, alias in aliases if alias.is_write)
        kinds = [(place, a.name, str(a.type)) for place, a in enumerate(arguments)]
        self.updates = _STATISTICS if self.name in _UPDATING else frozenset[str]()
        written = self.writes | self.updates
        self.reads = tuple((p, n, n in written) for p, n, kind in kinds if "Tensor" in kind)
        self.numbers = tuple((p, n) for p, n, kind in kinds if _is_number(kind))
        # Operations of a higher order run others, which are seen by themselves.
        self.is_view = schema is None or (bool(aliases) and not self.writes)
        self.is_native = name.startswith("aten::")
        self.lifts = name in _LIFTS
        self.sets = name == "aten::set_"
        self.unfilled = self.name in UNFILLED
        self.extreme = self.name in EXTREMES
        self.keeps = self.name in KEEPING

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Returns the arguments of a call by name."""
        return [*zip(self.names, args, strict=False), *kwargs.items()]

    def has_literal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether one of the numbers of a call is not finite."""
        given = len(args)
        for place, name in self.numbers:
            if values.is_nonfinite(args[place] if place < given else kwargs.get(name)):
                return True
        return False


def _is_number(kind: str) -> bool:
    return kind.removeprefix("Optional[").rstrip("]") in ("number", "float", "Scalar")


def op_of(func: Any) -> Op:
    """Returns what is known about an operation."""
    op = _known.get(id(func))
    if op is None:
        op = _known[id(func)] = Op(func)
    return op


def with_lengths_as_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns a CTC loss, or its derivative, as torch calls it where no mode is on.

    With a mode, torch does not make numbers of lengths that lie on the CPU, which its kernel for
    CUDA then refuses.
    """
    at = 3 if "backward" in str(func) else 2
    lengths = args[at : at + 2]
    if not all(isinstance(one, torch.Tensor) and one.is_cpu for one in lengths):
        return func, args
    known = func.overloadpacket.default
    return known, (*args[:at], *(one.tolist() for one in lengths), *args[at + 2 :])


def divided_on_one_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a numerator on a device with its denominator there, too.

    With a mode, torch divides a CTC loss by the lengths as they were given, on the CPU. A script
    cannot do such a thing: without a mode it is refused.
    """
    of, by, *others = args
    if not (isinstance(of, torch.Tensor) and isinstance(by, torch.Tensor)):
        return args
    apart = of.is_cuda and by.is_cpu and by.dim() > 0
    return (of, by.to(of.device), *others) if apart else args


def results_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tensor]:
    """Returns what an operation wrote, as far as it can be bad and can be looked at."""
    results = [out] if isinstance(out, torch.Tensor) else values.tensors_of(out)
    if op.writes or op.updates:
        # BatchNorm writes to its running statistics, which are not among its results.
        known = {id(tensor) for tensor in results}
        results = results + [
            tensor
            for place, name, written in op.reads
            if written
            for tensor in values.tensors_of(args[place] if place < len(args) else kwargs.get(name))
            if id(tensor) not in known
        ]
    return [tensor for tensor in results if is_float(tensor) and not values.is_hollow(tensor)]


def kept(tensor: Tensor, *, closely: bool = False) -> Tensor:
    """Returns a copy of a tensor that is about to be overwritten, if it is not too large.

    Args:
        tensor: What is written to.
        closely: Whether somebody will look at it, wherever it lies.
    """
    small = (closely or not values.is_late(tensor)) and tensor.numel() <= _SMALL
    return tensor.clone() if small and not values.is_hollow(tensor) else tensor


def autocast_type() -> str | None:
    """Returns the type that autocast computes in; None if it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


# The code of functions that a program has put in the place of torch's own. To whoever calls them
# they are torch's.
# By identity: to compare code takes longer than the rest of a look.
_stand_ins: dict[int, CodeType] = {}


def find_stand_ins() -> None:
    """Looks which functions of torch are not torch's any more."""
    places = (torch, torch.Tensor, torch.nn.functional)
    functions = (f for place in places for f in list(vars(place).values()))
    codes = (f.__code__ for f in functions if isinstance(f, FunctionType))
    _stand_ins.update((id(code), code) for code in codes if is_users(code.co_filename))


def users_frame_of_op(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Returns the nearest frame of the user's, and whether the autograd engine runs below it.

    On a device the engine has a thread of its own for it, on whose stack it has no frame.
    """
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename) and id(code) not in _stand_ins:
            return frame, False
        if code.co_name == "_engine_run_backward":
            return None, True
        frame = frame.f_back
    return None, False


def is_recomputed(frame: FrameType | None, node: Any) -> bool:
    """Returns whether the user's code runs in backward only because its results were not kept.

    Args:
        frame: Where the user's code is.
        node: The node of the graph that is running.
    """
    if "Checkpoint" in node.name() and torch.is_grad_enabled():
        return True  # frameworks have functions of their own for it, which are called like torch's
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


# Larger tensors are not computed a second time.
_MOST_CHECKED = 1 << 18
_NARROW = (torch.int8, torch.int16, torch.int32)
# How far a result in float64 may be from the exact one, as a part of it.
_ROUNDING = 1e-6


def _product(named: dict[str, Any]) -> Tensor:
    found: Tensor = _wide(named["self"]) * _wide(named["other"])
    return found


def _sum_of(sign: Callable[[Any, Any], Any], named: dict[str, Any]) -> Tensor:
    alpha = named.get("alpha", 1)
    found: Tensor = sign(_wide(named["self"]), _wide(named["other"]) * alpha)
    return found


def _reduced(call: Callable[..., Tensor], named: dict[str, Any]) -> Tensor:
    rest = {name: named[name] for name in ("dim", "keepdim") if named.get(name) is not None}
    return call(_wide(named["self"]), **rest)


_EXACT: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "add": lambda named: _sum_of(operator.add, named),
    "sub": lambda named: _sum_of(operator.sub, named),
    "mul": _product,
    "sum": lambda named: _reduced(torch.sum, named),
    "prod": lambda named: _reduced(torch.prod, named),
    "cumsum": lambda named: _reduced(torch.cumsum, named),
    "cumprod": lambda named: _reduced(torch.cumprod, named),
    "pow": lambda named: _wide(named["self"]) ** _wide(named["exponent"]),
    "_to_copy": lambda named: _wide(named["self"]),
    "copy": lambda named: _wide(named["src"]),
}
# The operations that may go over the end of a type, and those that hand on what did.
MAY_WRAP = frozenset(f"aten.{name}{mark}" for name in _EXACT for mark in ("", "_"))


def has_wrapped(op: str, named: dict[str, Any], out: Tensor) -> bool:
    """Returns whether a result of whole numbers is not what its arguments come to.

    Args:
        op: The operation.
        named: What it was given, by name, as it was before.
        out: Its result.
    """
    if out.dtype == torch.bool or out.is_floating_point() or out.is_complex():
        return False
    if not 0 < out.numel() <= _MOST_CHECKED:
        return False
    exactly = _EXACT[op.removeprefix("aten.").rstrip("_")]
    try:
        exact = exactly(named)
        off = (exact - _wide(out)).abs() > 1 + _ROUNDING * exact.abs()
        return bool(off.any())
    except RuntimeError:  # what has no arithmetic has not wrapped around
        return False


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def may_have_wrapped(held: Tensor) -> bool:
    """Returns whether whole numbers of a narrow type look as if they had gone over its end.

    What counts upwards is nowhere negative, and hardly anything else comes to the lower half of the
    range below zero.
    """
    if held.dtype not in _NARROW or not held.is_cpu or not 0 < held.numel() <= _MOST_CHECKED:
        return False
    try:
        low, high = held.aminmax()
        return int(low) < torch.iinfo(held.dtype).min // 2 and int(high) > 0
    except RuntimeError:  # what has no arithmetic has not wrapped around
        return False


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def is_on(mode: TorchDispatchMode) -> bool:
    """Returns whether a mode sees the operations of this thread."""
    return any(other is mode for other in _get_current_dispatch_mode_stack())


def take_off(mode: TorchDispatchMode) -> None:
    """Ends a mode of this thread, and none of those that began later."""
    above = []
    while (other := _pop_mode()) is not mode:
        above.append(other)
    for other in reversed(above):
        _push_mode(other)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Returns a block whose operations no mode of the script's sees."""
    if _dispatch_modes():
        return _behind_modes()
    block: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return block


@contextlib.contextmanager
def _behind_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def run_op(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation; a function mode that did not see it being called does not see this."""
    func = op.func
    if op.name.startswith("aten._ctc_loss"):
        with unseen():
            func, args = with_lengths_as_numbers(func, args)
    elif op.name == "aten.div" and torch.cuda.is_initialized():
        with unseen():
            args = divided_on_one_device(args)
    if op.is_native and _function_modes():
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    return func(*args, **kwargs)
