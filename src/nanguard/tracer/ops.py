"""What is known about an operation: its schema, what it wrote, and who called it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nanguard.numerics import is_float
from nanguard.tracer import values
from nanguard.tracer.sites import is_users

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor

# In-place operations on more elements than this do not keep what they overwrite.
_SMALL = 1 << 20


class Op:
    """What is known about an operation before it runs."""

    __slots__ = ("is_view", "name", "names", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.replace("::", ".").replace("._foreach_", ".")
        self.names: list[str] = [argument.name for argument in schema.arguments]
        aliases = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
        self.writes = frozenset(name for name, alias in aliases if alias.is_write)
        self.is_view = bool(aliases) and not self.writes

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Returns the arguments of a call by name."""
        return [*zip(self.names, args, strict=False), *kwargs.items()]


def results_of(op: Op, named: list[tuple[str, Any]], out: Any) -> list[Tensor]:
    """Returns what an operation wrote, as far as it can be bad."""
    results = [tensor for tensor in values.tensors_of(out) if is_float(tensor)]
    if op.writes:
        # BatchNorm writes to its running statistics, which are not among its results.
        known = {id(tensor) for tensor in results}
        results += [
            tensor
            for name, value in named
            if name in op.writes
            for tensor in values.tensors_of(value)
            if is_float(tensor) and id(tensor) not in known
        ]
    return results


def kept(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor that is about to be overwritten, if it is not too large."""
    small = tensor.device.type == "cpu" and tensor.numel() <= _SMALL
    return tensor.clone() if small else tensor


def autocast_type() -> str | None:
    """Returns the type that autocast computes in; None if it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def users_frame_of_op(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Returns the nearest frame of the user's, and whether the autograd engine runs below it."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame, False
        if frame.f_code.co_name == "_engine_run_backward":
            return None, True
        frame = frame.f_back
    return None, False


def forward_name(node: Any) -> str:
    """Returns the forward operation a backward node seems to belong to."""
    name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "aten." + "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
