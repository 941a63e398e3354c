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

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def within(value: Tensor, limit: float) -> Tensor:
    """Returns, on the value's device, whether a 0-dim value is finite and at most the limit."""
    # Adding nothing of a value to itself keeps it, unless it is not finite: 0 * inf is nan.
    return torch.add(value, value, alpha=0) <= limit


def is_float(tensor: Tensor) -> bool:
    """Returns whether a tensor can hold a non-finite value at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds: itself, unless it is sharded."""
    if type(tensor) in _PLAIN:
        return tensor
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
    return not any(bool(flags.any()) for flags in _flags(tensors))


def non_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a 0-dim bool on a device: whether any value is non-finite. Does not wait."""
    flags = [group.to(device, non_blocking=True) for group in _flags(tensors)]
    return torch.cat(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=device)


@torch.no_grad()
def _flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns, one vector per device and dtype, which tensors hold a non-finite value."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = _dense(local(tensor))
        if is_float(values) and values.numel():
            if values.is_complex():
                values = torch.view_as_real(values)
            if values.element_size() == 1:  # float8 types have almost no arithmetic
                values = values.to(torch.float32)
            groups.setdefault((values.device, values.dtype), []).append(values)
    return [
        _flags_on_cpu(g) if d.type == "cpu" else _flags_on_gpu(g) for (d, _), g in groups.items()
    ]


def _flags_on_gpu(tensors: list[Tensor]) -> Tensor:
    """Finds non-finite tensors in one pass at the speed of memory, in a handful of kernels."""
    return ~torch.isfinite(torch.stack(torch._foreach_norm(tensors, float("inf"))))


def _flags_on_cpu(tensors: list[Tensor]) -> Tensor:
    """Finds non-finite tensors with a sum, which a CPU takes many times faster than a maximum.

    A sum that is finite proves every value finite. One that is not may have overflowed, which a
    closer look sorts out.
    """
    if tensors[0].element_size() < 4:
        sums = [tensor.sum() for tensor in tensors]
    else:
        sums = list(torch._foreach_norm(tensors, 2.0))
    flags = ~torch.isfinite(torch.stack(sums))
    for index in flags.nonzero().flatten().tolist():
        flags[index] = not bool(torch.isfinite(tensors[index]).all())
    return flags


@torch.no_grad()
def grad_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the global gradient norm, that of ``torch.nn.utils.clip_grad_norm_`` bit for bit.

    On sharded gradients it is a sharded tensor itself; see ``whole``.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=local(parameters[0]).device)
    try:
        return _norm(grads)
    except NotImplementedError:
        return _norm([_dense(grad) for grad in grads])


def _norm(tensors: list[Tensor]) -> Tensor:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [norm for group in groups.values() for norm in torch._foreach_norm(group, 2.0)]
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.to(torch.float32) for norm in norms]
    device = tensors[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), 2.0)
    return total


@torch.no_grad()
def clip_by_norm(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales gradients down to a norm as ``torch.nn.utils.clip_grad_norm_`` does, bit for bit."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided:
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
        elif grad is not None:
            grad.mul_(factor)
    for (device, _), grads in groups.items():
        torch._foreach_mul_(grads, factor.to(device))


@torch.no_grad()
def clamp_gradients(parameters: Sequence[Tensor], max_value: float) -> None:
    """Bounds every gradient element. Call it after the norm: it would hide an Inf."""
    torch.nn.utils.clip_grad_value_(parameters, max_value)
