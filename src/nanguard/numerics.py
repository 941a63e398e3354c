"""The one module that decides whether numbers are finite.

Three habits hold here, because each of their opposites has broken a real tool: ``isfinite`` and
never ``isnan`` (which lets Inf through), ``where`` and never a product with zero (``0 * nan`` is
``nan``), and limits written as ``x <= limit`` (which NaN fails) and never ``x > limit``.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Values of a gradient that is put together with others, and how many such gradients are worth it.
_SMALL, _FEW = 4096, 4
_PLAIN_TYPES = set(_PLAIN)
# Below, squares of single precision are so small that they lose digits.
_LEAST_SQUARES = 1e-30
# As torch has it: what a script reads goes through a function of ours.
_as_number = torch._C.TensorBase.item
_numel = torch._C.TensorBase.numel
_flatten = torch._C._nn.flatten_dense_tensors


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
    every = [tensor for tensor in tensors if is_float(tensor)]
    if len(every) >= _FEW:
        # The quickest proof there is, for many small tensors on a CPU. A norm that is not finite
        # proves nothing: squares may overflow.
        with torch.no_grad():
            norm = norm_at_hand(every)
        if norm is not None and math.isfinite(norm):
            return True
    return not any(bool(flags.any()) for flags in _flags(every))


def holds_nan(tensor: Tensor) -> bool:
    """Returns whether a tensor holds NaN; no for one that is sparse."""
    values = local(tensor.detach())
    return values.layout is torch.strided and bool((values != values).any())


def holds_plus_inf(tensor: Tensor) -> bool:
    """Returns whether a tensor holds +Inf, as after an overflow; masks are filled with -Inf."""
    values = local(tensor.detach())
    return values.layout is torch.strided and bool((values == math.inf).any())


def kind_in(tensor: Tensor) -> str:
    """Returns what is wrong with a tensor that is not finite."""
    values = local(tensor.detach())
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    return "nan" if bool((values != values).any()) else "inf"


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
        if is_float(values) and values.numel() and not values.is_meta:
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


def norm_at_hand(gradients: list[Tensor]) -> float | None:
    """Returns the norm of gradients on a CPU; None for other kinds of gradients.

    Small ones are put together first: to look at one costs more than to copy it.
    """
    if not gradients[0].is_cpu or not set(map(type, gradients)) <= _PLAIN_TYPES:
        return None
    small = gradients
    if max(map(_numel, gradients)) > _SMALL:
        small = [grad for grad in gradients if grad.numel() <= _SMALL]
    if len(small) < _FEW:
        return None
    try:
        flat = _flatten(small)
    except RuntimeError:  # sparse ones, or on several devices
        return None
    norm = _norm_of(flat)
    if norm is None or small is gradients:
        return norm
    large = [grad for grad in gradients if grad.numel() > _SMALL]
    if any(grad.dtype is not flat.dtype or grad.layout is not torch.strided for grad in large):
        return None
    others = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(large, 2.0)))
    return math.hypot(norm, _as_number(others))


def _norm_of(flat: Tensor) -> float | None:
    """Returns the norm of a vector, quickly where its squares neither overflow nor vanish."""
    size = flat.element_size()
    if size == 1 or flat.is_complex():  # float8 types have almost no arithmetic
        return None
    if size >= 4:
        squares = _as_number(flat.dot(flat))
        if _LEAST_SQUARES < squares < math.inf:
            return math.sqrt(squares)
    return _as_number(torch.linalg.vector_norm(flat))


class Gradients:
    """The gradients of some parameters as they are now: their norm, and clipping.

    Norm and clipping are those of ``torch.nn.utils``, bit for bit. What they do with gradients on
    several devices or of several types depends on how these are grouped, so torch groups them.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        grads = [grad for p in parameters if (grad := p.grad) is not None]
        self._sparse = [grad for grad in grads if grad.layout is not torch.strided]
        if self._sparse:
            grads = [grad for grad in grads if grad.layout is torch.strided]
        self._groups = _grouped(grads)

    @torch.no_grad()
    def norm(self, out: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """Returns the global norm; on sharded gradients a sharded tensor, see ``whole``.

        Args:
            out: Where to put it, if it is of that type and on that device.
            wide: Whether to compute it in float64, for gradients that are scaled up.
        """
        groups = self._groups
        if self._sparse:
            grads = [grad for p in self._parameters if (grad := p.grad) is not None]
            groups = _grouped([_dense(grad) for grad in grads])
        options = {"dtype": torch.float64} if wide else {}
        norms = [norm for group in groups for norm in torch._foreach_norm(group, 2.0, **options)]
        if not norms:
            device = local(self._parameters[0]).device
            return torch.zeros((), dtype=torch.float32, device=device)
        if len(groups) > 1:
            widest = reduce(torch.promote_types, {norm.dtype for norm in norms})
            norms = [norm.to(norms[0].device, widest) for norm in norms]
        stacked = torch.stack(norms)
        if out is not None and _takes(out, stacked):
            return cast("Tensor", torch.linalg.vector_norm(stacked, 2.0, out=out))
        return cast("Tensor", torch.linalg.vector_norm(stacked, 2.0))

    @torch.no_grad()
    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scales the gradients down to a norm."""
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grads in self._groups:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        for grad in self._sparse:
            grad.mul_(factor)

    @torch.no_grad()
    def clamp(self, max_value: float) -> None:
        """Bounds every element. To be done after the norm was judged: it would hide an Inf."""
        torch.nn.utils.clip_grad_value_(self._parameters, max_value)


def _grouped(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Returns tensors by device and type, as torch's own clipping groups them."""
    if not tensors:
        return []
    groups = _group_tensors_by_device_and_dtype([cast("list[Tensor | None]", tensors)])
    return [cast("list[Tensor]", group) for (group,), _ in groups.values()]


def _takes(out: Tensor, norms: Tensor) -> bool:
    return type(norms) is torch.Tensor and norms.dtype == out.dtype and norms.device == out.device


def is_in_graph(value: Any) -> bool:
    """Returns whether a value was computed, and can be gone back from."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def without_graph(value: Any) -> Any:
    """Returns a value whose tensors, if it is a list of them, do not lead back any further."""
    if is_in_graph(value):
        return value.detach()
    if type(value) is list:
        return [without_graph(part) for part in value]
    return value
