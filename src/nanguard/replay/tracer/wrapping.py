"""Whole numbers that went over the end of their type, and came out as something else."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Larger tensors are not computed a second time.
_LARGEST = 1 << 18
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
OPS = frozenset(f"aten.{name}{mark}" for name in _EXACT for mark in ("", "_"))


def has_wrapped(op: str, named: dict[str, Any], out: Tensor) -> bool:
    """Returns whether a result of whole numbers is not what its arguments come to.

    Args:
        op: The operation.
        named: What it was given, by name, as it was before.
        out: Its result.
    """
    if out.dtype == torch.bool or out.is_floating_point() or out.is_complex():
        return False
    if not 0 < out.numel() <= _LARGEST:
        return False
    exactly = _EXACT[op.removeprefix("aten.").rstrip("_")]
    try:
        exact = exactly(named)
        off = (exact - _wide(out)).abs() > 1 + _ROUNDING * exact.abs()
        return bool(off.any())
    except (RuntimeError, NotImplementedError):  # what has no arithmetic has not wrapped around
        return False


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def may_have_wrapped(held: Tensor) -> bool:
    """Returns whether whole numbers of a narrow type look as if they had gone over its end.

    What counts upwards is nowhere negative, and hardly anything else comes to the lower half of the
    range below zero.
    """
    if held.dtype not in _NARROW or not held.is_cpu or not 0 < held.numel() <= _LARGEST:
        return False
    try:
        low, high = held.aminmax()
        return int(low) < torch.iinfo(held.dtype).min // 2 and int(high) > 0
    except (RuntimeError, NotImplementedError):
        return False  # as above
