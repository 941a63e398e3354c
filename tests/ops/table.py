"""Every op of one tensor, beside its plain form: what the contract tests go through."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from nanguard import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SHAPE = (3, 4)
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Op:
    """An op as a function of one tensor of ``SHAPE``.

    Attributes:
        name: What the test is called.
        safe: The op.
        plain: What it has to equal away from the edge.
        inside: Values between these are away from the edge, for every type.
        edge: Finite values at and beyond the edge.
        bad: Values that have to stay visible.
        second: Whether second derivatives are checked too.
    """

    name: str
    safe: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]
    inside: tuple[float, float]
    edge: tuple[float, ...]
    bad: tuple[float, ...] = (NAN, INF, -INF)
    second: bool = True

    def __str__(self) -> str:
        return self.name


def fixed(*shape: int, seed: int = 0) -> Tensor:
    """Returns the same normal values for every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The first value of each row is kept, the last row keeps nothing.
MASK = torch.tensor([[True, True, False, True], [True, False, False, True], [False] * 4])
ROWS = torch.tensor([True, True, False])
TARGET = torch.tensor([0, 2, 1])
ALLOWED = torch.tensor([[True, True, False, True], [True, False, True, True], [False, True] * 2])
STEP = torch.tensor([0, 1, 1])
ALPHAS = torch.tensor([1.0, 0.5])
KEYS = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])


FIXED, SHIFT, KEY, VALUE = fixed(3, 4), fixed(3, 4, seed=1), fixed(3, 4, seed=2), fixed(3, 2)
SIZES = torch.tensor([[0.5], [1.5], [2.5]])


def plain_mean(x: Tensor) -> Tensor:
    return x[MASK].sum() / MASK.sum()


def plain_softmax(x: Tensor) -> Tensor:
    return torch.where(MASK, x.masked_fill(~MASK, -1e4).softmax(-1), 0.0)


def plain_attention(x: Tensor, cap: float = INF) -> Tensor:
    scores = (x @ KEY.to(x).T / 2).clamp(-cap, cap)
    weights = scores.masked_fill(~KEYS, -1e4).softmax(-1)
    return torch.where(KEYS.any(-1, keepdim=True), weights @ VALUE.to(x), 0.0)


def safe_attention(x: Tensor, **options: float) -> Tensor:
    key, value = KEY.to(x), VALUE.to(x)
    return ops.attention(x, key, value, KEYS, **options)  # type: ignore[arg-type]


def plain_entropy(x: Tensor) -> Tensor:
    return functional.cross_entropy(x[:2], TARGET[:2])


def plain_allowed(x: Tensor) -> Tensor:
    return functional.cross_entropy(x.masked_fill(~ALLOWED, -1e4), TARGET)


FAR = (0.0, 1e-3, -1.0, 50.0, -50.0)

OPS = (
    Op("safe_log", ops.safe_log, torch.log, (0.01, 100), (0.0, -0.0, 1e-9, -1e-9, -7.0, -6e4)),
    Op("safe_sqrt", ops.safe_sqrt, torch.sqrt, (0.01, 100), (0.0, -0.0, 1e-9, -1e-9, -6e4)),
    Op("pow 0.3", lambda x: ops.safe_pow(x, 0.3), lambda x: x**0.3, (0.01, 9), (0.0, -1e-9, -6e4)),
    Op("pow -2", lambda x: ops.safe_pow(x, -2), lambda x: x**-2, (0.2, 9), (0.0, 1e-9, -6e4)),
    Op(
        "pow of a tensor",
        lambda x: ops.safe_pow(x, torch.full_like(x, -1.0)),
        lambda x: 1 / x,
        (0.1, 9),
        (0.0, 1e-9, -6e4),
    ),
    Op("safe_acos", ops.safe_acos, torch.acos, (-0.9, 0.9), (1.0, -1.0, 1.001, -2.0, 6e4)),
    Op("bounded_exp", ops.bounded_exp, torch.exp, (-5, 5), (10.5, 89.0, 800.0, 6e4, -6e4)),
    Op(
        "hard_cap", lambda x: ops.hard_cap(x, 3.0), lambda x: x, (-2.9, 2.9), (3.0, -3.0, 6e4, -6e4)
    ),
    Op(
        "soft_cap",
        lambda x: ops.soft_cap(x, 3.0),
        lambda x: 3 * torch.tanh(x / 3),
        (-6, 6),
        (0.0, 6e4, -6e4),
    ),
    Op(
        "safe_div, denominator",
        lambda x: ops.safe_div(FIXED.to(x), x),
        lambda x: FIXED.to(x) / x,
        (0.2, 50),
        (0.0, -0.0, 1e-7, -1e-7, 5e-3, 6e4),
    ),
    Op(
        "safe_div, numerator",
        lambda x: ops.safe_div(x, SIZES.to(x)),
        lambda x: x / SIZES.to(x),
        (-9, 9),
        (0.0, 1e3),
    ),
    Op(
        "safe_norm",
        lambda x: ops.safe_norm(x, -1),
        lambda x: x.norm(dim=-1),
        (0.1, 9),
        (0.0, -0.0, 1e-12, 6e4),
    ),
    Op("safe_norm, all", ops.safe_norm, torch.norm, (0.1, 9), (0.0, 6e4)),
    Op(
        "safe_std",
        lambda x: ops.safe_std(x * torch.arange(1, 5, dtype=x.dtype), -1),
        lambda x: (x * torch.arange(1, 5, dtype=x.dtype)).std(-1),
        (1, 1.3),
        (0.0, 1e-12, 1e4),
    ),
    Op("rms_norm", ops.rms_norm, lambda x: functional.rms_norm(x, (4,), None, 1e-6), (0.1, 9), FAR),
    Op(
        "modulate",
        lambda x: ops.modulate(FIXED.to(x), SHIFT.to(x), x, max_scale=4.0),
        lambda x: FIXED.to(x) * (1 + x) + SHIFT.to(x),
        (-3.9, 3.9),
        (4.0, -4.0, 6e4),
    ),
    Op(
        "masked_softmax",
        lambda x: ops.masked_softmax(x, MASK),
        plain_softmax,
        (-9, 9),
        FAR,
        (NAN, INF),
    ),
    Op(
        "masked_softmax, capped",
        lambda x: ops.masked_softmax(x, MASK, max_score=9.5),
        plain_softmax,
        (-9, 9),
        (*FAR, 6e4, -6e4),
    ),
    Op(
        "masked_softmax, soft",
        lambda x: ops.masked_softmax(x, MASK, max_score=5.0, cap_kind="soft"),
        lambda x: plain_softmax(5 * torch.tanh(x / 5)),
        (-9, 9),
        (*FAR, 6e4, -6e4),
    ),
    Op("attention", safe_attention, plain_attention, (-3, 3), FAR, second=False),
    Op(
        "attention, capped",
        lambda x: safe_attention(x, max_score=1.0),
        lambda x: plain_attention(x, cap=1.0),
        (-0.4, 0.4),
        (*FAR, 6e4),
        second=False,
    ),
    Op("masked_mean", lambda x: ops.masked_mean(x, MASK), plain_mean, (-9, 9), (*FAR, 6e4)),
    Op(
        "masked_mean, rows",
        lambda x: ops.masked_mean(x, MASK, -1),
        lambda x: torch.where(MASK, x, 0.0).sum(-1) / torch.tensor([3, 2, 1]),
        (-9, 9),
        (*FAR, 6e4),
    ),
    Op(
        "masked_mse",
        lambda x: ops.masked_mse(x, FIXED.to(x), MASK),
        lambda x: (x - FIXED.to(x))[MASK].square().mean(),
        (-9, 9),
        (*FAR, 6e4),
    ),
    Op(
        "masked_cross_entropy",
        lambda x: ops.masked_cross_entropy(x, TARGET, ROWS),
        plain_entropy,
        (-9, 9),
        (*FAR, 6e4),
        (NAN, INF),
    ),
    Op(
        "checked_cross_entropy, smoothed",
        lambda x: ops.checked_cross_entropy(x, TARGET, on_bad="nan", label_smoothing=0.1),
        lambda x: functional.cross_entropy(x, TARGET, label_smoothing=0.1),
        (-9, 9),
        (*FAR, 6e4),
        (NAN, INF, -INF),
    ),
    Op(
        "checked_cross_entropy, allowed",
        lambda x: ops.checked_cross_entropy(x, TARGET, on_bad="nan", allowed=ALLOWED),
        plain_allowed,
        (-9, 9),
        (*FAR, 6e4),
        (NAN, INF),
    ),
    Op(
        "mask_logits",
        lambda x: ops.mask_logits(x, ALLOWED, TARGET, on_bad="nan").softmax(-1),
        lambda x: x.masked_fill(~ALLOWED, -1e4).softmax(-1),
        (-9, 9),
        (*FAR, 6e3),
        (NAN, INF),
    ),
    Op(
        "add_noise",
        lambda x: ops.add_noise(x, FIXED.to(x), STEP, ALPHAS),
        lambda x: (
            ALPHAS[STEP].sqrt()[:, None].to(x.dtype) * x
            + (1 - ALPHAS[STEP]).sqrt()[:, None].to(x.dtype) * FIXED.to(x)
        ),
        (-9, 9),
        (*FAR, 6e4),
    ),
    Op(
        "early_time_weight",
        ops.early_time_weight,
        lambda t: (t + 1) / t.sqrt(),
        (0.1, 1),
        (0.0, -1.0),
    ),
    Op(
        "late_time_weight",
        ops.late_time_weight,
        lambda t: (2 - t).sqrt() / (1 - t + 1e-6).sqrt(),
        (0.0, 0.9),
        (1.0, 1.5, 2.0, 6e4),
    ),
    Op("bounded_weight", ops.bounded_weight, lambda w: w, (0, 99), (100.0, 6e4)),
)
