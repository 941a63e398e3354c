"""Looking at the values of tensors, on the host at once and on a device later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from nanguard.numerics import is_float, local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_norm = torch.linalg.vector_norm
# From this many tensors on, one call for all of them launches faster than a call for each.
_FEW = 3
# From this many on, only the largest of their numbers is read.
_MANY = 16
# Types that can be reduced as they are.
_SIMPLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in an argument of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def memory_of(tensor: Tensor) -> int:
    """Returns what tells the memory of a tensor, or this rank's part of it, from that of others."""
    if type(tensor) not in _PLAIN:
        if is_hollow(tensor):
            return id(tensor)
        tensor = local(tensor)
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:  # some kinds of tensors have no memory of their own
        return id(tensor)


def is_part(tensor: Tensor) -> bool:
    """Returns whether a tensor is only a part of the memory it lies in."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except RuntimeError:  # without memory of its own it is a part of none
        return False


def part_of(tensor: Tensor) -> tuple[int, int]:
    """Returns which part of its memory a tensor is: where it begins, and how many values it has."""
    try:
        return int(tensor.storage_offset()), tensor.numel()
    except RuntimeError:  # no memory of its own: known by identity
        return 0, 0


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor behind those that ``torch.func`` computes with."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_hollow(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape and no values, as on the meta device."""
    return tensor.is_meta or (type(tensor) not in _PLAIN and isinstance(tensor, FakeTensor))


def is_late(tensor: Tensor) -> bool:
    """Returns whether the values of a tensor are not at hand without waiting for a device."""
    return not tensor.is_cpu


def _plain(tensor: Tensor) -> Tensor:
    """Returns the values of any tensor in a form that can be reduced."""
    if (
        type(tensor) is torch.Tensor
        and tensor.dtype in _SIMPLE
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.numel()
    ):
        return tensor
    values = local(tensor)
    if values.requires_grad:
        values = values.detach()
    values = stored(values)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:
        values = values.float()
    return values if values.numel() else values.new_zeros(1)


def stored(tensor: Tensor) -> Tensor:
    """Returns the values that a sparse tensor stores; other tensors as they are."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def extremes_of(tensor: Tensor) -> tuple[float, float]:
    """Returns the smallest and the largest value; NaN counts as both."""
    low, high = torch.aminmax(_plain(tensor))
    return low.item(), high.item()


def late_extremes_of(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the smallest value of each tensor, then the largest of each, where they lie."""
    pairs = [torch.aminmax(_plain(tensor)) for tensor in tensors]
    return [*(low for low, _ in pairs), *(high for _, high in pairs)]


def largest_of(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of each tensor, where they lie; NaN is larger than all.

    One number for each is the least that tells a bad result from a good one, and the tensors of a
    list, as optimizers have them, take a few kernels together.

    Args:
        tensors: Tensors that are not empty.
    """
    if len(tensors) < _FEW:
        return [_norm(_plain(tensor), math.inf) for tensor in tensors]
    found: list[Any] = [None] * len(tensors)
    for group in _places(tensors):
        for place, norm in zip(group, _norms([tensors[place] for place in group]), strict=True):
            found[place] = norm
    return found


def largest_among(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of some tensors together, one for each kind of them."""
    if len(tensors) < _MANY:
        return largest_of(tensors)
    groups = [_norms([tensors[place] for place in group]) for group in _places(tensors)]
    return [torch.stack(norms).amax() for norms in groups]


def _places(tensors: list[Tensor]) -> Iterable[list[int]]:
    """Returns which tensors are of one device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return groups.values()


def _norms(group: list[Tensor]) -> list[Tensor]:
    given = [_plain(tensor) for tensor in group]
    if len(given) < _FEW:
        return [_norm(values, math.inf) for values in given]
    return list(torch._foreach_norm(given, math.inf))


def read_all(numbers: list[Tensor]) -> list[float]:
    """Returns numbers that lie on devices, after one transfer for each device and type."""
    found = [0.0] * len(numbers)
    for group in _places(numbers):
        read = torch.stack([numbers[place] for place in group]).tolist()
        for place, number in zip(group, read, strict=True):
            found[place] = number
    return found


def as_low(value: float) -> float:
    """Orders numbers so that NaN is the smallest."""
    return -math.inf if math.isnan(value) else value


def as_high(value: float) -> float:
    """Orders numbers so that NaN is the largest."""
    return math.inf if math.isnan(value) else value


def kinds_in(tensor: Tensor) -> frozenset[str]:
    """Returns which of ``nan``, ``inf`` and ``-inf`` a tensor holds."""
    values = stored(tensor)
    values = torch.view_as_real(values) if values.is_complex() else values
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
