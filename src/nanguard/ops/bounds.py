"""Floors and caps that keep a bad input visible.

``clamp`` turns an infinite input into an ordinary number, and nobody learns of it. Here finite
values are bounded and everything else comes out as NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from nanguard.errors import UsageError
from nanguard.ops.fused import apply, kernel, once, ready, traced

if TYPE_CHECKING:
    from torch import Tensor

CapKind = Literal["hard", "soft"]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def hard_cap(x: Tensor, limit: float) -> Tensor:
    """Bounds values to [-limit, limit]; the gradient is zero at and beyond the bound.

    Prevents scores, scales and weights from growing until ``exp`` or a product overflows. Unlike
    ``x.clamp(-limit, limit)`` it does not turn Inf into ``limit``: a non-finite input is NaN.

    Args:
        x: Any floating-point tensor.
        limit: The bound, positive.
    """
    check_limit(limit, "hard_cap")
    return between(x, -limit, limit)


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """Bounds values smoothly: ``limit * tanh(x / limit)``, which never loses its gradient at once.

    Prevents the same as ``hard_cap``. It is close to ``x`` only while ``|x|`` is well below the
    limit (0.3 % off at a tenth of it). A non-finite input is NaN.

    Args:
        x: Any floating-point tensor.
        limit: The bound, positive.
    """
    check_limit(limit, "soft_cap")
    check_float(x, "soft_cap")
    form = _FusedSoftCap if ready(x) else _SoftCap
    return cast("Tensor", apply(form, x, limit))


def cap(x: Tensor, limit: float, kind: CapKind) -> Tensor:
    """Bounds values in one of the two ways."""
    if kind not in ("hard", "soft"):
        raise UsageError(
            f"cap_kind is {kind!r}", where="nanguard.ops", do="Use cap_kind='hard' or 'soft'."
        )
    return hard_cap(x, limit) if kind == "hard" else soft_cap(x, limit)


class _SoftCap(torch.autograd.Function):
    """The derivative needs neither of the two scalings, so it costs less than torch's own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, limit: float) -> Tensor:
        return with_bad((x / limit).tanh_().mul_(limit), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.limit = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, output / ctx.limit), None


class _FusedSoftCap(torch.autograd.Function):
    """The same in one kernel each way.

    Here and in the other functions that use kernels of ours, ``forward`` takes the context: torch
    looks at the signature for each call of one that does not, which takes longer than the kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        out = _soft_cap(x, limit)
        ctx.save_for_backward(out)
        ctx.limit = limit
        return cast("Tensor", out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        if not once(grad):
            return torch.ops.aten.tanh_backward(grad, output / ctx.limit), None
        return _soft_cap_slope(grad, output, ctx.limit), None


_soft_cap = kernel("soft_cap(Tensor x, float limit) -> Tensor")
_soft_cap_slope = kernel("soft_cap_slope(Tensor grad, Tensor out, float limit) -> Tensor")


def between(x: Tensor, low: float, high: float) -> Tensor:
    """Returns finite values bounded to a range, and NaN for all others.

    ``hardtanh`` is ``clamp`` with a derivative in one kernel instead of four.
    """
    check_float(x, "nanguard.ops")
    return with_bad(torch._C._nn.hardtanh(x, low, high), x)


def at_least(x: Tensor, low: float) -> Tensor:
    """Returns finite values that are at least a floor, and NaN for -Inf, Inf and NaN."""
    return with_bad(torch.threshold(x, low, low), x)


def with_bad(bounded: Tensor, x: Tensor) -> Tensor:
    """Returns bounded values, in place where that can be, with NaN where the input was not finite.

    Adding nothing of the input does so in one kernel, of which autograd need not know, as the
    gradient is passed on as it is. A compiler that fuses kernels takes it for nothing at all, and
    there a choice costs nothing.
    """
    if torch.compiler.is_compiling():
        return torch.where(torch.isfinite(x), bounded, math.nan)
    if traced() or torch._C._are_functorch_transforms_active():
        return bounded.add_(x.detach(), alpha=0)
    bounded.detach().add_(x.detach(), alpha=0)
    return bounded


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the input where the mask is True, and 0 elsewhere, whatever the input is there.

    On a CPU ``where`` is not vectorised. The derivative of a threshold is the same choice, and it
    is: at a fifth to half of the time.
    """
    if x.device.type != "cpu":
        return torch.where(mask, x, 0.0)
    chosen = torch.ops.aten.threshold_backward(x, mask.to(x.dtype).expand_as(x), 0.0)
    return cast("Tensor", chosen)


def any_kept(mask: Tensor, dim: int) -> Tensor:
    """Returns whether a boolean mask keeps anything along a dimension, which stays with size 1.

    On a CPU ``any`` along a dimension takes forty times as long as a maximum of bytes.
    """
    if mask.device.type != "cpu" or mask.shape[dim] == 0:
        return mask.any(dim, keepdim=True)
    return mask.view(torch.uint8).amax(dim, keepdim=True).view(torch.bool)


def floor_for(x: Tensor, eps: float | None, name: str, power: float = 1.0) -> float:
    """Returns the floor of an op, after looking whether it is one in the input's type.

    Args:
        x: The input.
        eps: What the caller asked for.
        name: The op.
        power: The default is this power of 1e-12, or of the smallest normal number where that is
            larger. The steeper the function, the smaller the power, so that its derivative at the
            floor is a number of the type.
    """
    check_float(x, name)
    tiny = torch.finfo(x.dtype).tiny
    default: float = (tiny if tiny > 1e-12 else 1e-12) ** power
    if eps is None:
        return default
    if not tiny <= eps < math.inf:
        raise UsageError(
            f"eps is {eps}, which is no positive normal number in {x.dtype}",
            where=f"nanguard.ops.{name}",
            do=f"Leave eps out ({default:.3g} for this type), or use at least {tiny:.3g}.",
        )
    return eps


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which half-precision values are summed and squared."""
    return _WIDE.get(dtype, dtype)


def check_float(x: Tensor, name: str) -> None:
    """Refuses whole numbers and complex ones."""
    if not x.is_floating_point():
        where = name if name.startswith("nanguard") else f"nanguard.ops.{name}"
        raise UsageError(
            f"the input is {x.dtype}",
            where=where,
            do="Give it a floating-point tensor, for instance x.float().",
        )


def check_limit(limit: float, name: str) -> None:
    """Refuses a bound that bounds nothing."""
    if not 0 < limit < math.inf:
        raise UsageError(
            f"the limit is {limit}",
            where=f"nanguard.ops.{name}",
            do="Use a positive, finite number, for instance 10.0.",
        )
