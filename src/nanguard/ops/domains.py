"""Functions with an edge: log, sqrt, norm, div, acos, pow, exp, std, Gumbel noise.

Each equals torch's own function away from its edge. At and beyond the edge it goes on with the
value at a small distance ``eps`` from it, and the gradient to that argument is zero. A NaN or an
Inf that comes in stays visible: it comes out as NaN or Inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn import functional

from nanguard.errors import UsageError
from nanguard.ops.bounds import at_least, between, check_float, floor_for, wide
from nanguard.ops.fused import LONGEST_ROW, again, apply, kernel, once, ready, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ONE_PASS = 16384  # the longest row that a kernel holds whole
# Rounded down from the logarithm of the largest number, or of its root where there is room.
_EXP_LIMITS = {torch.float16: 10.0, torch.bfloat16: 40.0, torch.float32: 40.0, torch.float64: 300.0}


def safe_log(x: Tensor, eps: float | None = None) -> Tensor:
    """Returns ``log(x)``, with every ``x`` below ``eps`` taken as ``eps``.

    Prevents ``log(0) = -inf`` (and NaN below 0) of probabilities that were rounded to 0. The usual
    ``log(x + 1e-8)`` changes every value, and in float16 it adds nothing: 1e-8 is 0 there.

    Args:
        x: Any floating-point tensor.
        eps: The floor. By default 1e-12, in float16 6.1e-05.
    """
    return at_least(x, floor_for(x, eps, "safe_log")).log()


def safe_sqrt(x: Tensor, eps: float | None = None) -> Tensor:
    """Returns ``sqrt(x)``, with every ``x`` below ``eps`` taken as ``eps``.

    Prevents the infinite derivative at 0, which turns into NaN with the next product, and the NaN
    of a variance that was rounded below 0.

    Args:
        x: Any floating-point tensor.
        eps: The floor. By default 1e-12, in float16 6.1e-05.
    """
    return at_least(x, floor_for(x, eps, "safe_sqrt")).sqrt()


def safe_norm(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    eps: float | None = None,
) -> Tensor:
    """Returns the 2-norm, at least ``eps``, so that one can divide by it.

    Prevents the NaN gradient of ``x.pow(2).sum().sqrt()`` at the zero vector (gradient penalties,
    contrastive losses), also in second derivatives, and float16 norms that overflow: those of
    half-precision input are computed and returned in float32.

    Args:
        x: Any floating-point tensor.
        dim: The dimensions to reduce; all of them by default.
        keepdim: Whether to keep them with size 1.
        eps: The smallest norm, below which the gradient is zero. 1e-6 by default.
    """
    eps = 1e-6 if eps is None else floor_for(x, eps, "safe_norm")
    check_float(x, "safe_norm")
    dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if ready(x) and (rows := Rows.of(x, dims, keepdim=keepdim)) is not None:
        return cast("Tensor", apply(_FusedNorm, x, rows, eps))
    norm = cast("Tensor", apply(_Norm, x, dims, eps))
    return norm if keepdim or not dims else norm.squeeze(dims)


class _Norm(torch.autograd.Function):
    """The second derivative of torch's own is NaN at zero, because it divides by the bare norm."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide(x.dtype))
        return functional.threshold(norm, eps, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, norm = ctx.saved_tensors
        return _norm_gradient(grad, x, norm, ctx.eps), None, None


class _FusedNorm(torch.autograd.Function):
    """The same for rows, in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, eps: float) -> Tensor:
        norm = _norm(x, rows.shape, eps)
        ctx.save_for_backward(x, norm)
        ctx.rows, ctx.eps = rows, eps
        return cast("Tensor", norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, norm = ctx.saved_tensors
        if not once(grad):
            kept = ctx.rows.kept
            return _norm_gradient(grad.reshape(kept), x, norm.view(kept), ctx.eps), None, None
        return _norm_slope(grad, x, norm, ctx.eps), None, None


def _norm_gradient(grad: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return (x * torch.where(norm <= eps, 0.0, grad / norm)).to(x.dtype)


_norm = kernel("norm(Tensor x, int[] shape, float eps) -> Tensor")
_norm_slope = kernel("norm_slope(Tensor grad, Tensor x, Tensor norm, float eps) -> Tensor")


class Rows(NamedTuple):
    """Rows of a tensor, each of which is reduced to one value.

    Attributes:
        shape: The shape of the result.
        kept: The same with dimensions of 1 where there were others.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, dims: Sequence[int], *, keepdim: bool) -> Rows | None:
        """Returns the rows that dimensions make up; None if they are no rows, or too long."""
        last = x.dim() - len(dims)
        rows = dims == (-1,) and last >= 0
        if not rows and not (dims and sorted(d % x.dim() for d in dims) == [*range(last, x.dim())]):
            return None
        shape = tuple(x.shape[:last])
        count = math.prod(shape)
        if x.numel() > LONGEST_ROW * count:
            return None
        kept = shape + (1,) * len(dims)
        return cls(kept if keepdim else shape, kept)


def safe_div(numerator: Tensor | float, denominator: Tensor, eps: float | None = None) -> Tensor:
    """Returns ``numerator / denominator``; a denominator nearer to 0 than ``eps`` is ``eps``.

    Prevents division by zero. The sign of the denominator is kept (0 counts as positive), so that
    the usual ``a / (b + eps)``, which divides by zero at ``b = -eps``, is not needed. An infinite
    denominator gives NaN, not a quiet 0.

    Args:
        numerator: A tensor or a number.
        denominator: Any floating-point tensor.
        eps: The smallest denominator. By default 1e-6, in float16 7.8e-03, so that the derivative
            ``1 / eps**2`` is a number of the type.
    """
    eps = floor_for(denominator, eps, "safe_div", power=0.5)
    if (
        isinstance(numerator, torch.Tensor)
        and numerator.dtype == denominator.dtype
        and ready(numerator, denominator)
        and (rows_of(denominator, numerator) or math.inf) <= LONGEST_ROW
    ):
        return cast("Tensor", apply(_Div, numerator, denominator, eps))
    return _div(numerator, denominator, eps)


def _div(numerator: Tensor | float, denominator: Tensor, eps: float) -> Tensor:
    positive = denominator.detach() >= 0
    size = at_least(denominator.abs(), eps)
    return numerator / torch.where(positive, size, -size)


class _Div(torch.autograd.Function):
    """One kernel each way, where torch's own operations take a dozen."""

    @staticmethod
    def forward(ctx: Any, numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
        out = _safe_div(numerator, denominator, eps)
        ctx.save_for_backward(numerator, denominator, out)
        ctx.eps = eps
        return cast("Tensor", out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        numerator, denominator, out = ctx.saved_tensors
        if not once(grad):
            return again(_div, (numerator, denominator, ctx.eps), grad, ctx.needs_input_grad)
        return *_safe_div_slope(grad, denominator, out, ctx.eps), None


_safe_div = kernel("safe_div(Tensor above, Tensor below, float eps) -> Tensor")
_safe_div_slope = kernel(
    "safe_div_slope(Tensor grad, Tensor below, Tensor out, float eps) -> (Tensor, Tensor)"
)


def safe_acos(x: Tensor, eps: float | None = None) -> Tensor:
    """Returns ``acos(x)``, with ``x`` bounded to [-1 + eps, 1 - eps].

    Prevents the NaN of a cosine that was rounded to 1.0000001, and the infinite derivative at 1,
    where two directions agree. ``clamp(-1, 1)`` only cures the first.

    Args:
        x: Any floating-point tensor.
        eps: The distance from ±1. By default the rounding step of the type at 1.
    """
    check_float(x, "safe_acos")
    default = torch.finfo(x.dtype).eps
    eps = default if eps is None else eps
    if not default <= eps < 1:
        raise UsageError(
            f"eps is {eps}, and 1 - eps is no number between 0 and 1 in {x.dtype}",
            where="nanguard.ops.safe_acos",
            do=f"Leave eps out, or use at least {default:.3g}.",
        )
    return between(x, eps - 1, 1 - eps).acos()


def safe_pow(base: Tensor, exponent: Tensor | float, eps: float | None = None) -> Tensor:
    """Returns ``base ** exponent``, with every base below ``eps`` taken as ``eps``.

    Prevents the NaN of a negative base with a fractional exponent, the Inf of 0 with a negative
    one, and the infinite derivative at 0 of every exponent below 1. A power that is too large for
    the type stays Inf.

    Args:
        base: Any floating-point tensor, meant to be positive.
        exponent: A number, or a tensor, meant to be at least -1.
        eps: The floor. By default 1e-12 (float16: 6.1e-05), and larger for an exponent below 0, so
            that the derivative at the floor is at most about 1e12 (16384).
    """
    steepest = exponent if isinstance(exponent, (int, float)) else -1.0
    eps = floor_for(base, eps, "safe_pow", power=1 / (1 - min(steepest, 0.0)))
    return at_least(base, eps).pow(exponent)


def bounded_exp(x: Tensor, limit: float | None = None) -> Tensor:
    """Returns ``exp(x)``, with every ``x`` above ``limit`` taken as ``limit``.

    Prevents the overflow of a log-variance or log-weight that grew, and the ``inf - inf`` or
    ``0 * inf`` that follows. Not only Inf but also -Inf comes out as NaN: for masked scores there
    is ``masked_softmax``.

    Args:
        x: Any floating-point tensor.
        limit: The largest exponent. By default 40, so that the square of the result is a number
            too; 10 in float16, 300 in float64.
    """
    check_float(x, "bounded_exp")
    largest = math.log(torch.finfo(x.dtype).max)
    limit = _EXP_LIMITS[x.dtype] if limit is None else limit
    if not -largest <= limit <= largest:
        raise UsageError(
            f"the limit is {limit}, and its exponential is no number in {x.dtype}",
            where="nanguard.ops.bounded_exp",
            do=f"Leave it out ({_EXP_LIMITS[x.dtype]:g} here), or use at most {largest:.4g}.",
        )
    return between(x, -math.inf, limit).exp()


def safe_std(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: int = 1,
    keepdim: bool = False,
    eps: float | None = None,
) -> Tensor:
    """Returns the standard deviation, at least ``eps``, and defined for a single value.

    Prevents the NaN of ``x.std()`` of one value (the last batch of an epoch, a rank with one
    sample): there the divisor ``n - correction`` is taken as 1. The gradient is zero where the
    deviation is below ``eps``.

    Args:
        x: Any floating-point tensor.
        dim: The dimensions to reduce; all of them by default.
        correction: What is taken off the number of values in the divisor.
        keepdim: Whether to keep the reduced dimensions with size 1.
        eps: The smallest deviation. By default 1e-6, in float16 7.8e-03.
    """
    eps = floor_for(x, eps, "safe_std", power=0.5)
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    count = math.prod([x.shape[d] for d in dims])
    if count == 0:
        raise UsageError(
            f"there are no values in a tensor of shape {tuple(x.shape)}",
            where="nanguard.ops.safe_std",
            do="Leave empty batches out before this call.",
        )
    correction = min(correction, count - 1)
    if count <= ONE_PASS and ready(x) and (rows := Rows.of(x, dims, keepdim=keepdim)) is not None:
        return cast("Tensor", apply(_Std, x, rows, eps, count - correction))
    std = torch.std(x, dim=tuple(dims), correction=correction, keepdim=keepdim)
    return functional.threshold(std, eps, eps)


class _Std(torch.autograd.Function):
    """One kernel each way; torch's own derivative looks for the mean once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, eps: float, divisor: int) -> Tensor:
        std, means = _row_std(x, rows.shape, eps, divisor)
        ctx.save_for_backward(x, std, means)
        ctx.settings = rows, eps, divisor
        return cast("Tensor", std)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, std, means = ctx.saved_tensors
        rows, eps, divisor = ctx.settings
        if once(grad):
            return _row_std_slope(grad, x, std, means, eps, divisor), None, None, None

        def plain(x: Tensor) -> Tensor:
            flat = x.reshape(means.numel(), -1)
            std = torch.std(flat, dim=1, correction=flat.shape[1] - divisor)
            return functional.threshold(std.view(rows.shape), eps, eps)

        return *again(plain, (x,), grad, ctx.needs_input_grad[:1]), None, None, None


_row_std = kernel("std(Tensor x, int[] shape, float eps, int divisor) -> (Tensor, Tensor)")
_row_std_slope = kernel(
    "std_slope(Tensor grad, Tensor x, Tensor std, Tensor means, float eps, int divisor) -> Tensor"
)


def gumbel_noise(like: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Returns Gumbel noise of the shape, type and device of a tensor, always finite.

    Prevents the Inf of ``-log(-log(rand))``, which is not rare in half precision: there ``rand`` is
    exactly 0 or 1 once in a few hundred draws. The noise is drawn in float32 or wider.

    Args:
        like: A floating-point tensor, the logits; its values are not looked at.
        generator: Where the randomness comes from.
    """
    check_float(like, "gumbel_noise")
    noise = torch.empty_like(like, dtype=wide(like.dtype), requires_grad=False)
    if noise.is_cuda:
        # Exponential noise is the logarithm of uniform noise, and never 0 there, as on a CPU.
        noise.exponential_(generator=generator)
    else:
        kind = torch.finfo(noise.dtype)
        noise.uniform_(kind.tiny, 1 - kind.eps / 2, generator=generator).log_().neg_()
    return noise.log_().neg_().to(like.dtype)
