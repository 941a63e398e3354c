"""The one module that decides whether numbers are finite.

Three habits hold here, because each of their opposites has broken a real tool: ``isfinite`` and
never ``isnan`` (which lets Inf through), ``where`` and never a product with zero (``0 * nan`` is
``nan``), and limits written as ``x <= limit`` (which NaN fails) and never ``x > limit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


def within(value: Tensor, limit: float) -> Tensor:
    """Returns, on the value's device, whether a 0-dim value is finite and at most the limit."""
    largest = torch.finfo(value.dtype).max
    return (value <= min(limit, largest)) & (value >= -largest)


def is_float(tensor: Tensor) -> bool:
    """Returns whether a tensor can hold a non-finite value at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds: itself, unless it is sharded."""
    to_local = getattr(tensor, "to_local", None)
    return cast("Tensor", to_local()) if to_local is not None else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor as all ranks together see it: itself, unless it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    return cast("Tensor", full()) if full is not None else tensor


def _dense(tensor: Tensor) -> Tensor:
    """Returns the stored values of a sparse tensor, or the tensor itself."""
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor.values()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether every value is finite. Reads from the device, so it waits for it."""
    return not any(bool(flag.any()) for flag in _flags(tensors))


def non_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a 0-dim bool on a device: whether any value is non-finite. Does not wait."""
    flags = [flag.to(device, non_blocking=True) for flag in _flags(tensors)]
    return torch.cat(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=device)


def _flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns, one vector per device and dtype, which tensors hold a non-finite value."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = _dense(local(tensor.detach()))
        if is_float(values) and values.numel():
            values = torch.view_as_real(values) if values.is_complex() else values
            groups.setdefault((values.device, values.dtype), []).append(values)
    with torch.no_grad():
        return [~torch.isfinite(torch.stack(_peaks(group))) for group in groups.values()]


def _peaks(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the largest magnitude of each tensor; NaN and Inf come through as they are.

    On a GPU this is one pass at the speed of memory in a handful of kernels. On a CPU a plain
    sum is several times faster than a maximum and only fails to be finite when a value is not,
    or when finite values overflow together, which the second look sorts out.
    """
    if tensors[0].device.type == "cpu":
        return [_cpu_peak(tensor) for tensor in tensors]
    if tensors[0].element_size() == 1:  # float8 types have almost no arithmetic
        return [tensor.to(torch.float32).abs().max() for tensor in tensors]
    return list(torch._foreach_norm(tensors, float("inf")))


def _cpu_peak(tensor: Tensor) -> Tensor:
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    total = tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else None)
    return total if torch.isfinite(total) else tensor.abs().max()


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients that exist."""
    return [p.grad for p in parameters if p.grad is not None]


@torch.no_grad()
def clip(parameters: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Returns the global gradient norm; scales the gradients down to ``max_norm`` if one is given.

    The norm and the scaling are those of ``torch.nn.utils.clip_grad_norm_``, bit for bit, with
    sparse gradients as an addition. On sharded gradients the norm is the one over all ranks.
    """
    grads = gradients(parameters)
    if not grads:
        return torch.zeros((), device=local(parameters[0]).device)
    if all(grad.layout == torch.strided for grad in grads):
        if max_norm is not None:
            return whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        return whole(_norm(grads))
    values = [_dense(grad) for grad in grads]
    norm = _norm(values)
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor)
    return norm


def _norm(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [norm for group in groups.values() for norm in torch._foreach_norm(group, 2.0)]
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), 2.0)


@torch.no_grad()
def clamp_gradients(parameters: Sequence[Tensor], max_value: float) -> None:
    """Bounds every gradient element. Call it after the norm: it would hide an Inf."""
    torch.nn.utils.clip_grad_value_(parameters, max_value)
