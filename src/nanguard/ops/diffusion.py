"""Noise schedules, adding noise, and loss weights that stay bounded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from nanguard.errors import UsageError
from nanguard.ops.bounds import at_least, check_float, hard_cap, wide
from nanguard.ops.fused import MOST_GROUPS, again, apply, kernel, once, ready

if TYPE_CHECKING:
    from torch import Tensor


def linear_schedule(
    steps: int = 1000,
    *,
    low: float = 0.001,
    high: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns how much of the signal's power is left at each step, falling in a straight line.

    Prevents a last step with no signal at all, at which every ``1 / sqrt(alpha)`` is Inf.

    Args:
        steps: How many steps there are, at least 2.
        low: The share at the last step, above 0.
        high: The share at the first step, at most 1.
        device: Where the table is to be.
    """
    _check_schedule(steps, low, high)
    return torch.linspace(high, low, steps, dtype=torch.float64).to(device, torch.float32)


def cosine_schedule(
    steps: int = 1000,
    *,
    low: float = 0.001,
    offset: float = 0.008,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns how much of the signal's power is left at each step, falling like a squared cosine.

    Prevents what the bare cosine does at its end, where it is 0 (or -4e-8, from rounding):
    ``1 / sqrt(alpha)`` is Inf and a root of it NaN.

    Args:
        steps: How many steps there are, at least 2.
        low: The smallest share, above 0.
        offset: Where in the cosine to begin, so that the first steps are not all alike.
        device: Where the table is to be.
    """
    _check_schedule(steps, low, 1.0)
    if not 0 <= offset < math.inf:
        raise UsageError(
            f"offset is {offset}", where="nanguard.ops.cosine_schedule", do="Use 0.008, or 0."
        )
    time = torch.linspace(0, 1, steps, dtype=torch.float64)
    wave = torch.cos((time + offset) / (1 + offset) * (math.pi / 2)).square()
    return (wave / wave[0]).clamp(low, 1.0).to(device, torch.float32)


def add_noise(x: Tensor, noise: Tensor, step: Tensor, alphas: Tensor) -> Tensor:
    """Returns ``sqrt(alpha) * x + sqrt(1 - alpha) * noise``, with each sample's own alpha.

    Prevents a step out of range from going unseen: ``alphas[step]`` takes step -1 as the last one.
    Here such a sample is NaN, without waiting for the device. So is one whose alpha is not in
    [0, 1]. NaN and Inf in the sample or in the noise come through.

    Args:
        x: The samples, of shape (batch, ...).
        noise: Of the same shape.
        step: Whole numbers, of shape (batch,).
        alphas: The schedule, of shape (steps,).
    """
    check_float(x, "add_noise")
    if x.shape != noise.shape or step.shape != x.shape[:1] or step.is_floating_point():
        raise UsageError(
            f"x is {tuple(x.shape)}, noise {tuple(noise.shape)}, step {tuple(step.shape)} "
            f"of {step.dtype}",
            where="nanguard.ops.add_noise",
            do="Give noise the shape of x, and one whole number for each sample as the step.",
        )
    table = alphas.is_floating_point() and alphas.dim() == 1 and not alphas.requires_grad
    few = noise.dtype == x.dtype and step.numel() <= MOST_GROUPS
    if table and few and ready(x, noise, step, alphas):
        return cast("Tensor", apply(_AddNoise, x, noise, step, alphas))
    return _with_noise(x, noise, step, alphas)


def _with_noise(x: Tensor, noise: Tensor, step: Tensor, alphas: Tensor) -> Tensor:
    alpha = _at(alphas, step).view(-1, *(1 for _ in x.shape[1:]))
    signal, rest = _root(alpha).to(x.dtype), _root(1 - alpha).to(x.dtype)
    return torch.addcmul(x * signal, noise.to(x.dtype), rest)


class _AddNoise(torch.autograd.Function):
    """One kernel each way, which looks each sample's alpha up itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, step: Tensor, alphas: Tensor) -> Tensor:
        # The derivative needs neither of the first two; the second one is linear.
        ctx.save_for_backward(step, alphas)
        return cast("Tensor", _noisy(x, noise, step, alphas))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, alphas = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if once(grad):
            slopes = (
                _noisy_slope(grad, step, alphas, to_noise) if want else None
                for to_noise, want in zip((False, True), wanted, strict=True)
            )
            return *slopes, None, None
        nothing = torch.zeros_like(grad).requires_grad_()
        inputs = (nothing, torch.zeros_like(grad).requires_grad_(), step, alphas)
        return again(_with_noise, inputs, grad, (*wanted, False, False))


_noisy = kernel("add_noise(Tensor x, Tensor noise, Tensor step, Tensor alphas) -> Tensor")
_noisy_slope = kernel(
    "add_noise_slope(Tensor grad, Tensor step, Tensor alphas, bool to_noise) -> Tensor"
)


def early_time_weight(t: Tensor, maximum: float = 100.0) -> Tensor:
    """Returns the loss weight ``(t + 1) / sqrt(t)`` for a diffusion time in (0, 1], bounded.

    Prevents the weight that is infinite at ``t = 0``, and so large before it that one sample is the
    whole gradient. Times at which the weight would exceed the maximum are moved to where it is the
    maximum.

    Args:
        t: Diffusion time; at or below 0 the weight is the maximum.
        maximum: The largest weight, above 2, which is the smallest value of this function.
    """
    if not 2 < maximum < 1e6:
        raise _bad_maximum(maximum, "early_time_weight", "above 2")
    # Where (t + 1)^2 = maximum^2 * t, in the form of the root that does not cancel.
    middle = maximum * maximum - 2
    first = 2 / (middle + math.sqrt(middle * middle - 4))
    check_float(t, "early_time_weight")
    if _constant(t):
        return cast("Tensor", _time_weight(t, first, 0.0, True))  # noqa: FBT003
    time = at_least(t.to(wide(t.dtype)), first)
    return (time + 1).div(time.sqrt()).to(t.dtype)


def late_time_weight(t: Tensor, maximum: float = 100.0, eps: float = 1e-6) -> Tensor:
    """Returns the loss weight ``sqrt(2 - t) / sqrt(1 - t + eps)`` for a diffusion time, bounded.

    Prevents the weight that grows to ``1 / sqrt(eps)`` at ``t = 1`` and is NaN beyond.

    Args:
        t: Diffusion time; at or above 1 the weight is the maximum.
        maximum: The largest weight, above 1.5.
        eps: What the formula adds below the root.
    """
    if not 1.5 < maximum < 1e6:
        raise _bad_maximum(maximum, "late_time_weight", "above 1.5")
    if not 0 <= eps < 1:
        raise UsageError(
            f"eps is {eps}", where="nanguard.ops.late_time_weight", do="Use a number like 1e-6."
        )
    # Where the square of the weight, (rest + 1) / (rest + eps), is that of the maximum.
    power = maximum * maximum
    least = max((1 - power * eps) / (power - 1), 0.0)
    check_float(t, "late_time_weight")
    if _constant(t):
        return cast("Tensor", _time_weight(t, least, eps, False))  # noqa: FBT003
    rest = at_least(1 - t.to(wide(t.dtype)), least)
    return (rest + 1).div(rest + eps).sqrt().to(t.dtype)


def bounded_weight(weight: Tensor, maximum: float = 100.0) -> Tensor:
    """Returns any loss weight, bounded to [-maximum, maximum].

    Prevents one sample with a huge weight from being the whole gradient. A weight that is infinite
    already comes out as NaN: bound what it is made from, as the two functions above do.

    Args:
        weight: Any floating-point tensor.
        maximum: The largest weight.
    """
    return hard_cap(weight, maximum)


def _at(alphas: Tensor, step: Tensor) -> Tensor:
    """Returns the table's values, NaN where there is none."""
    inside = (step >= 0) & (step < alphas.shape[0])
    return alphas[step.where(inside, 0)].masked_fill(~inside, math.nan)


def _root(share: Tensor) -> Tensor:
    """Returns the root; at 0 it is 0 with no gradient, below 0 it is NaN."""
    none = share == 0
    return share.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)


def _constant(t: Tensor) -> bool:
    """Returns whether times can go to a kernel that has no derivative."""
    return not (t.requires_grad and torch.is_grad_enabled()) and ready(t)


_time_weight = kernel("time_weight(Tensor t, float edge, float eps, bool early) -> Tensor")


def _check_schedule(steps: int, low: float, high: float) -> None:
    if steps < 2 or not 0 < low < high <= 1:
        raise UsageError(
            f"a schedule of {steps} steps from {high} to {low}",
            where="nanguard.ops, noise schedules",
            do="Use at least 2 steps and 0 < low < high <= 1, for instance low=0.001, high=1.0.",
        )


def _bad_maximum(maximum: float, name: str, range_: str) -> UsageError:
    return UsageError(
        f"the maximum is {maximum}",
        where=f"nanguard.ops.{name}",
        do=f"Use a number {range_}, for instance 100.",
    )
