"""Numbers that look bad and are meant: masks, bounds, noise schedules, counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.roles import words

if TYPE_CHECKING:
    from nanguard.check.checkpoint.numbers import Numbers

_MASK = frozenset(
    [
        "mask",
        "masks",
        "masked",
        "masking",
        "causal",
        "tril",
        "triu",
        "alibi",
        "padding",
        "pad",
        "suppress",
    ]
)
_BOUND = frozenset(
    [
        "min",
        "max",
        "minimum",
        "maximum",
        "lower",
        "upper",
        "low",
        "high",
        "bound",
        "bounds",
        "limit",
        "limits",
        "clamp",
        "clip",
        "threshold",
        "best",
        "inf",
        "infinity",
        "sentinel",
    ]
)
_SCHEDULE = frozenset(
    [
        "cumprod",
        "alphas",
        "betas",
        "sigmas",
        "snr",
        "logsnr",
        "posterior",
        "schedule",
        "timesteps",
        "lvlb",
        "recip",
        "recipm1",
        "transitions",
    ]
)
_COUNTER = frozenset(
    [
        "num",
        "count",
        "counts",
        "counter",
        "counters",
        "n",
        "steps",
        "step",
        "updates",
        "size",
        "sizes",
        "total",
        "seen",
        "iteration",
        "epoch",
        "frequency",
        "freq",
        "freqs",
        "frequencies",
        "position",
        "positions",
        "ids",
        "index",
        "indices",
        "range",
        "time",
        "tokens",
        "cluster",
        "usage",
        "histogram",
        "hist",
        "offset",
        "offsets",
        "stride",
        "strides",
        "anchors",
        "grid",
    ]
)
_LOG = frozenset({"prob", "probs", "prior", "likelihood"})
_STATISTIC = frozenset({"running", "mean", "var", "variance", "std", "rms", "sum", "moment"})
# What makes a parameter of something that is otherwise called like a mask or a bound.
_LEARNED = frozenset({"weight", "kernel", "token", "embed", "embedding", "proj", "rank", "gamma"})
MAX_STATISTIC = 1e12


def infinities_meant(name: str, shape: tuple[int, ...], numbers: Numbers) -> bool:
    """Returns whether the infinities of a tensor are there on purpose.

    NaN never is. Infinity is in masks, in bounds that nothing has reached, in noise schedules
    that end at no signal, in logarithms of probabilities that are 0.

    Args:
        name: What the tensor is called.
        shape: Its shape.
        numbers: Its numbers.
    """
    leaf = words(name.rsplit(".", 1)[-1])
    if numbers.nan or not numbers.nonfinite or leaf & _LEARNED:
        return False
    if leaf & (_MASK | _BOUND | _SCHEDULE) or ("log" in leaf and leaf & _LOG):
        return True
    # A mask by what it holds: minus infinity on one single value.
    blank = numbers.low == numbers.high
    return len(shape) >= 2 and not numbers.above and numbers.below > 1 and blank


def large_values_meant(name: str, shape: tuple[int, ...], numbers: Numbers) -> bool:
    """Returns whether large values of a tensor are there on purpose.

    Args:
        name: What the tensor is called.
        shape: Its shape.
        numbers: Its numbers.
    """
    leaf = words(name.rsplit(".", 1)[-1])
    if leaf & _LEARNED:
        return False
    if leaf & (_MASK | _BOUND | _SCHEDULE | _COUNTER) or not shape or _filled(shape, numbers):
        return True
    return bool(leaf & _STATISTIC) and numbers.largest <= MAX_STATISTIC


def _filled(shape: tuple[int, ...], numbers: Numbers) -> bool:
    """Returns whether a tensor is one large value on one small one, as masks are."""
    return (
        len(shape) >= 2
        and numbers.beyond > 1
        and numbers.outer[0] == numbers.outer[1]
        and numbers.inner[0] == numbers.inner[1]
    )
