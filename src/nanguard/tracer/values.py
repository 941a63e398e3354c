"""Looking at the values of tensors, on the host at once and on a device later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from nanguard.numerics import is_float, local

if TYPE_CHECKING:
    from torch import Tensor


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in an argument of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def memory_of(tensor: Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def is_part(tensor: Tensor) -> bool:
    """Returns whether a tensor is only a part of the memory it lies in."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False


def extremes_of(tensor: Tensor) -> tuple[Any, Any]:
    """Returns the smallest and the largest value; NaN counts as both."""
    values = local(tensor).detach()
    if values.layout is not torch.strided:
        values = (
            values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
        )
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


def read_all(values: list[Any]) -> list[list[float]]:
    """Returns numbers that lie on a device, a list for each entry, after one transfer."""
    single = [v for value in values for v in (value if isinstance(value, list) else [value])]
    groups: dict[Any, list[int]] = {}
    numbers: list[float] = [0.0] * len(single)
    for place, value in enumerate(single):
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(place)
        else:
            numbers[place] = float(value)
    for places in groups.values():
        read = torch.stack([single[place] for place in places]).tolist()
        for place, number in zip(places, read, strict=True):
            numbers[place] = number
    out, start = [], 0
    for value in values:
        length = len(value) if isinstance(value, list) else 1
        out.append(numbers[start : start + length])
        start += length
    return out


def as_low(value: float) -> float:
    """Orders numbers so that NaN is the smallest."""
    return -math.inf if math.isnan(value) else value


def as_high(value: float) -> float:
    """Orders numbers so that NaN is the largest."""
    return math.inf if math.isnan(value) else value


def kinds_in(tensor: Tensor) -> frozenset[str]:
    """Returns which of ``nan``, ``inf`` and ``-inf`` a tensor holds."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = {"nan": values != values, "inf": values == math.inf, "-inf": values == -math.inf}
    return frozenset(name for name, mask in found.items() if bool(mask.any()))


def heal(out: Any, *, in_place: bool) -> Any:
    """Returns results with every bad value replaced by a harmless one.

    Args:
        out: What an operation returned.
        in_place: Whether the operation wrote into memory that others hold, too.
    """
    if isinstance(out, torch.Tensor):
        if not is_float(out):
            return out
        good = torch.nan_to_num(out, nan=0.0, posinf=1e4, neginf=-1e4)
        return out.copy_(good) if in_place else good
    if isinstance(out, (list, tuple)):
        good_ones = [heal(item, in_place=in_place) for item in out]
        return good_ones if isinstance(out, list) else tuple(good_ones)
    return out


def is_nonfinite(value: Any) -> bool:
    """Returns whether a plain number is not finite."""
    return isinstance(value, float) and not math.isfinite(value)
