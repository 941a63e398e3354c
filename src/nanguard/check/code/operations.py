"""Every operation that is known, and what it does to bounds and kinds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.code.values import INF, NO_KINDS, SHAPE, SMALL, Value, is_small

if TYPE_CHECKING:
    from collections.abc import Callable

Known = tuple[float, float, frozenset[str]]
# Kinds that stay with a value while it is moved about, and those that a sum keeps.
_LOST_KINDS = frozenset({"network"})
_PEAKS = frozenset({"amax", "max", "logsumexp", "scatter_reduce", "scatter_max", "segment_reduce"})


def _number(value: Value | None) -> float | None:
    return None if value is None else value.number()


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


def fixed(lo: float, hi: float, *kinds: str) -> Callable[..., Known]:
    """Returns the rule of an operation whose result does not depend on its input."""
    made = frozenset(kinds)

    def rule(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
        return lo, hi, made

    return rule


def same(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """What moves numbers about keeps them."""
    first = inputs[0]
    if first.items:
        return (
            min(item.lo for item in first.items),
            max(item.hi for item in first.items),
            frozenset().union(*(item.kinds for item in first.items)),
        )
    return first.lo, first.hi, first.kinds


def of_add(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``add``."""
    a, b = inputs[0], inputs[1]
    kinds = (a.kinds | b.kinds) & _kinds(
        "loss", "logits", "sumsq", "square", "norm", "count", "masksum", "labels", "mask", "hypot"
    )
    if a.has("var") and b.has("var"):
        kinds |= {"var"}
    if a.has("square", "sumsq") and b.has("square", "sumsq"):
        kinds |= {"hypot"}
    for value, other in ((a, b), (b, a)):
        if is_small(other) and not value.has("eps"):
            kinds |= {"padded"} | (value.kinds & _kinds("var", "std", "norm", "sum", "minmax"))
            if other.number() is None:
                return max(value.lo + SMALL, -INF), INF, kinds
    return _plus(a.lo, b.lo), _plus(a.hi, b.hi), kinds


def of_sub(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``sub``."""
    a, b = inputs[0], inputs[1]
    if b.op == "detach" and b.core is a.core:
        return 0.0, 0.0, NO_KINDS
    kinds = {"difference"} | (a.kinds & _kinds("logits", "loss"))
    if a.core.op in ("amax", "max") and b.core.op in ("amin", "min"):
        kinds.add("minmax")
    if a.has("sumsq") and b.has("sumsq", "square"):
        kinds.add("var")
    if a.has("logscale") and b.has("logscale"):
        kinds.add("logscale")
    if (a.has("logprob") and b.number() is None) or (b.has("logprob") and a.number() is None):
        kinds.add("logratio")
    peak = b.core.inputs[0].core if b.core.op in ("part", "index") and b.core.inputs else b.core
    if peak.op in _PEAKS or b.has("maximum"):
        return -INF, 0.0, frozenset(kinds | {"shifted"})
    return _plus(a.lo, -b.hi), _plus(a.hi, -b.lo), frozenset(kinds)


def _plus(a: float, b: float) -> float:
    total = a + b
    return total if total == total else -INF


def of_mul(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``mul``."""
    a, b = inputs[0], inputs[1]
    if a.node is not None and b.node is not None and _same_text(a, b):
        return 0.0, INF, _kinds("square")
    products = [_times(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    kinds = NO_KINDS
    for value, other in ((a, b), (b, a)):
        if other.number() is not None or other.has("eps", "size"):
            kinds |= value.kinds & _kinds("chosen", "padded", "bounded-below")
            kinds |= value.kinds & _kinds(
                "logscale",
                "loss",
                "logits",
                "sumsq",
                "norm",
                "std",
                "var",
                "square",
                "logratio",
                "logprob",
                "mask",
                "labels",
                "shifted",
                "masksum",
                "count",
                "network",
                "minmax",
            )
        if other.lo >= 0 or other.has("weights", "mask"):
            kinds |= value.kinds & _kinds("sumsq", "square", "var")
        if other.has("mask"):
            kinds |= value.kinds & _kinds("loss", "logprob", "mask", "count")
            kinds |= {"masked"}
    if a.has("loss") or b.has("loss"):
        kinds |= {"loss"}
    kinds |= (a.kinds | b.kinds) & _kinds("shifted")
    return min(products), max(products), kinds


def _same_text(a: Value, b: Value) -> bool:
    return bool(a.name) and a.name == b.name and a.op == b.op


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def of_div(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``div``."""
    a, b = inputs[0], inputs[1]
    number = b.number()
    if number or b.has("size"):
        scale = 1.0 / number if number else 1.0
        lo, hi = sorted((_times(a.lo, scale), _times(a.hi, scale)))
        return lo, hi, a.kinds - _LOST_KINDS
    if a.number() == 1 and written_sigmoid(b) is not None:
        return 0.0, 1.0, _kinds("ratio", "sigmoid", "probability")
    kinds = {"ratio"} | (a.kinds & _kinds("loss", "logits", "logratio", "logscale", "padded"))
    if b.has("difference"):
        kinds.discard("padded")
    if b.core.op in ("norm", "vector_norm") and b.core.inputs and b.core.inputs[0].name == a.name:
        return -1.0, 1.0, frozenset(kinds | {"unit"})
    if a.lo > -INF and a.hi < INF:
        kinds.add("bounded-above")
    if a.lo >= 0 and b.lo >= 0:
        lo = a.lo / b.hi if b.hi < INF and b.hi > 0 else 0.0
        if a.lo > 0 and (b.lo > 0 or b.has("sum", "masksum", "count")):
            lo = max(lo, SMALL)
        return lo, a.hi / b.lo if b.lo > 0 else INF, frozenset(kinds)
    return -INF, INF, frozenset(kinds)


def written_sigmoid(divisor: Value) -> Value | None:
    """Returns the exponential of a sigmoid that is written out, ``1 / (1 + exp(x))``."""
    core = divisor.core
    if core.op != "add" or len(core.inputs) < 2:
        return None
    for one, power in (core.inputs[:2], core.inputs[1::-1]):
        if one.number() == 1 and power.core.op == "exp":
            return power.core
    return None


def of_pow(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``pow``."""
    base = inputs[0]
    exponent = _number(inputs[1] if len(inputs) > 1 else keywords.get("exponent"))
    padded = base.kinds & _kinds("padded")
    if exponent is None:
        return (0.0, INF, padded) if base.lo >= 0 else (-INF, INF, padded)
    if exponent > 0 and exponent % 2 == 0:
        lo = _power(base.lo, exponent) if base.lo > 0 else 0.0
        kinds = {"square"} | (base.kinds & _kinds("loss"))
        if base.has("norm"):
            kinds |= {"sumsq"}
        return lo, INF, frozenset(kinds)
    if base.lo >= 0:
        if exponent > 0:
            return _power(base.lo, exponent), INF, padded
        return (0.0 if base.hi == INF else SMALL), INF, padded
    return -INF, INF, padded


def _power(base: float, exponent: float) -> float:
    """Returns a positive power; the base, which is less, where that is too large for a float."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return base


def of_square(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``square``."""
    low = inputs[0].lo
    return low * low if 0 < low < 1e100 else 0.0, INF, _kinds("square")


def of_mse_loss(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``mse_loss``; no two numbers of unit vectors are further apart than 2."""
    units = len(inputs) > 1 and all(value.has("unit") for value in inputs[:2])
    return 0.0, 4.0 if units else INF, _kinds("loss", "sumsq")


def of_clamp(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``clamp``."""
    value = inputs[0]
    low = keywords.get("min") or (inputs[1] if len(inputs) > 1 else None)
    high = keywords.get("max") or (inputs[2] if len(inputs) > 2 else None)
    return _limit(value, low, high)


def _limit(value: Value, low: Value | None, high: Value | None) -> Known:
    lo, hi, kinds = value.lo, value.hi, value.kinds
    if low is not None and low.const is not False:
        number = low.number()
        if number is not None:
            lo = max(lo, number)
        elif low.has("eps") or low.path:
            lo = max(lo, SMALL)
        elif not (low.const is None and low.name == "None"):
            lo = max(lo, low.lo)
            kinds = kinds | {"bounded-below"}
    if high is not None:
        number = high.number()
        hi = min(hi, number if number is not None else max(high.hi, 0.0))
        if number is None:
            kinds = kinds | {"bounded-above"}
    return lo, hi, kinds


def of_clamp_min(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``clamp_min``."""
    return _limit(inputs[0], keywords.get("min") or (inputs[1] if len(inputs) > 1 else None), None)


def of_clamp_max(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``clamp_max``."""
    return _limit(inputs[0], None, keywords.get("max") or (inputs[1] if len(inputs) > 1 else None))


def of_max(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``max(x)``, ``max(x, dim)`` and ``max(a, b)``."""
    if len(inputs) > 1 and not isinstance(inputs[1].const, int):
        return of_maximum(inputs, keywords)
    value = inputs[0]
    return value.lo, value.hi, (value.kinds - {"sumsq"}) | {"maximum"}


def of_maximum(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``maximum(a, b)``."""
    a, b = inputs[0], inputs[-1]
    kinds = a.kinds | b.kinds
    if b.has("eps") or a.has("eps"):
        return max(a.lo, b.lo, SMALL), INF, kinds
    return max(a.lo, b.lo), max(a.hi, b.hi), kinds


def of_min(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``min(x)``, ``min(x, dim)`` and ``min(a, b)``."""
    if len(inputs) > 1 and not isinstance(inputs[1].const, int):
        return of_minimum(inputs, keywords)
    value = inputs[0]
    return value.lo, value.hi, value.kinds


def of_minimum(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``minimum(a, b)``."""
    a, b = inputs[0], inputs[-1]
    return min(a.lo, b.lo), min(a.hi, b.hi), a.kinds | b.kinds


def of_exp(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``exp``."""
    value = inputs[0]
    lo = math.exp(value.lo) if -700 < value.lo < 700 else 0.0
    hi = math.exp(value.hi) if value.hi < 700 else INF
    kinds = {"exp"}
    if value.has("logprob"):
        kinds.add("probability")
        hi = 1.0
    return lo, hi, frozenset(kinds)


def of_sum(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``sum``."""
    value = inputs[0]
    kinds = {"sum"} | (value.kinds & _kinds("loss", "weights", "count", "padded", "logprob"))
    if value.has("square", "sumsq"):
        kinds.add("sumsq")
    if value.has("mask", "masked", "labels", "masksum"):
        kinds.add("masksum")
    if value.has("weights"):
        kinds.add("weightsum")
    lo = value.lo if value.lo > 0 else 0.0 if value.lo == 0 else -INF
    return lo, INF, frozenset(kinds)


def of_total(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """Python's own ``sum``, of numbers as well as of tensors."""
    lo, hi, kinds = of_sum(inputs, keywords)
    return lo, hi, kinds - {"sumsq", "masksum", "weightsum"}


def of_mean(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``mean``."""
    value = inputs[0]
    kinds = {"mean"} | (value.kinds & _kinds("loss", "padded", "norm", "std"))
    if value.has("square", "sumsq"):
        kinds.add("sumsq")
    if value.has("mask"):
        kinds.add("masksum")
    return value.lo, value.hi, frozenset(kinds)


def of_sqrt(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``sqrt``."""
    value = inputs[0]
    lo = math.sqrt(value.lo) if 0 < value.lo < INF else 0.0
    kinds = set(value.kinds & _kinds("padded"))
    if value.has("sumsq"):
        kinds.add("norm")
    if value.has("var"):
        kinds.add("std")
    return lo, INF, frozenset(kinds)


def of_rsqrt(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``rsqrt``."""
    return SMALL, INF, _kinds("rsqrt")


def of_abs(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``abs``."""
    value = inputs[0]
    lo = value.lo if value.lo > 0 else -value.hi if value.hi < 0 else 0.0
    kinds = value.kinds & _kinds("loss", "network", "difference", "logits", "mask", "labels", "eps")
    return lo, max(abs(value.lo), abs(value.hi)), kinds


def of_whole(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``long`` and its like: a mask stays one, and what lies below 1 becomes 0."""
    value = inputs[0]
    lo = math.trunc(value.lo) if value.lo > -INF else -INF
    return lo, value.hi, value.kinds & _kinds("mask", "labels", "masksum", "count", "size", "bool")


def of_neg(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``neg``."""
    value = inputs[0]
    return -value.hi, -value.lo, value.kinds - {"shifted"}


def of_where(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``where``."""
    if len(inputs) < 3:
        return 0.0, INF, NO_KINDS
    a, b = inputs[1], inputs[2]
    kinds = (a.kinds | b.kinds) - {"padded"}
    if inputs[0].inputs:
        kinds |= {"chosen"}
    return min(a.lo, b.lo), max(a.hi, b.hi), kinds


def of_masked_fill(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``masked_fill``."""
    value = inputs[0]
    fill = keywords.get("value") or (inputs[2] if len(inputs) > 2 else None)
    number = _number(fill)
    kinds = value.kinds
    if number is None:
        return -INF, INF, kinds
    return min(value.lo, number), max(value.hi, number), kinds


def of_tanh(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``tanh``."""
    return -1.0, 1.0, inputs[0].kinds & _kinds("network")


# Between these a sigmoid in float32 is neither 0 nor 1.
_SIGMOID_BEGINS, _SIGMOID_ENDS = -80.0, 16.0


def of_sigmoid(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``sigmoid``, whose ends are not reached where its input is bounded."""
    value = inputs[0]
    lo = 1 / (1 + math.exp(-value.lo)) if _SIGMOID_BEGINS < value.lo < INF else 0.0
    hi = 1 / (1 + math.exp(-value.hi)) if _SIGMOID_BEGINS < value.hi < _SIGMOID_ENDS else 1.0
    return lo, hi, _kinds("sigmoid", "probability")


def of_log(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``log``."""
    value = inputs[0]
    lo = math.log(value.lo) if 0 < value.lo < INF else -INF
    hi = math.log(value.hi) if 0 < value.hi < INF else INF
    return lo, hi, _kinds("log")


def of_log1p(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``log1p``; of an exponential it is a softplus that is written out."""
    value = inputs[0]
    if value.core.op == "exp":
        return 0.0, INF, _kinds("softplus")
    lo = math.log1p(value.lo) if -1 < value.lo < INF else -INF
    return lo, math.log1p(value.hi) if -1 < value.hi < INF else INF, _kinds("log")


def of_softplus(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``softplus``."""
    return 0.0, INF, _kinds("softplus")


def of_relu(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``relu``."""
    value = inputs[0]
    return max(value.lo, 0.0), max(value.hi, 0.0), value.kinds & _kinds("network", "loss")


def of_uniform(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """``x.uniform_(low, high)``."""
    low = keywords.get("from") or (inputs[1] if len(inputs) > 1 else None)
    high = keywords.get("to") or (inputs[2] if len(inputs) > 2 else None)
    lo = 0.0 if low is None else SMALL if low.number() is None and low.has("eps") else low.lo
    return lo, 1.0 if high is None else high.hi, _kinds("uniform")


def of_matmul(inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """Products of rows and columns; those of unit vectors are cosines."""
    tensors = [value for value in inputs if value.const is None]
    if len(tensors) > 1 and all(value.has("unit") for value in tensors):
        return -1.0, 1.0, _kinds("cosine")
    if len(tensors) > 1 and all(value.has("square", "sumsq") for value in tensors[:2]):
        return 0.0, INF, _kinds("sumsq")
    return -INF, INF, NO_KINDS


_EFFECTS: dict[str, Callable[..., Known]] = {
    "add": of_add,
    "sub": of_sub,
    "mul": of_mul,
    "div": of_div,
    "pow": of_pow,
    "neg": of_neg,
    "long": of_whole,
    "int": of_whole,
    "cosh": fixed(1.0, INF),
    "acosh": fixed(0.0, INF),
    "matmul": of_matmul,
    "einsum": of_matmul,
    "linear": of_matmul,
    "conv1d": of_matmul,
    "conv2d": of_matmul,
    "conv3d": of_matmul,
    "abs": of_abs,
    "square": of_square,
    "clamp": of_clamp,
    "clip": of_clamp,
    "clamp_min": of_clamp_min,
    "clamp_max": of_clamp_max,
    "hardtanh": fixed(-1.0, 1.0),
    "maximum": of_maximum,
    "max": of_max,
    "amax": of_max,
    "cummax": of_max,
    "minimum": of_minimum,
    "min": of_min,
    "amin": of_min,
    "fmax": of_maximum,
    "fmin": of_minimum,
    "exp": of_exp,
    "expm1": fixed(-1.0, INF, "exp"),
    "exp2": fixed(0.0, INF, "exp"),
    "sum": of_sum,
    "nansum": of_sum,
    "mean": of_mean,
    "median": of_mean,
    "nanmean": of_mean,
    "cumsum": of_sum,
    "total": of_total,
    "adaptive_avg_pool2d": of_mean,
    "avg_pool2d": of_mean,
    "adaptive_avg_pool1d": of_mean,
    "avg_pool1d": of_mean,
    "cumprod": of_mean,
    "logsumexp": fixed(-INF, INF, "maximum"),
    "sqrt": of_sqrt,
    "rsqrt": of_rsqrt,
    "log": of_log,
    "log2": of_log,
    "log10": of_log,
    "log1p": of_log1p,
    "softmax": fixed(0.0, 1.0, "softmax", "probability"),
    "gumbel_softmax": fixed(0.0, 1.0, "softmax", "probability"),
    "sigmoid": of_sigmoid,
    "expit": fixed(0.0, 1.0, "sigmoid"),
    "hardsigmoid": fixed(0.0, 1.0),
    "log_softmax": fixed(-INF, 0.0, "logprob"),
    "logsigmoid": fixed(-INF, 0.0, "logprob"),
    "log_prob": fixed(-INF, INF, "logprob"),
    "tanh": of_tanh,
    "softsign": of_tanh,
    "erf": of_tanh,
    "sin": fixed(-1.0, 1.0),
    "cos": fixed(-1.0, 1.0),
    "cosine_similarity": fixed(-1.0, 1.0, "cosine"),
    "normalize": fixed(-1.0, 1.0, "unit"),
    "softplus": of_softplus,
    "relu": of_relu,
    "elu": fixed(-1.0, INF),
    "relu6": fixed(0.0, 6.0),
    "gelu": fixed(-1.0, INF),
    "silu": fixed(-1.0, INF),
    "norm": fixed(0.0, INF, "norm"),
    "vector_norm": fixed(0.0, INF, "norm"),
    "matrix_norm": fixed(0.0, INF, "norm"),
    "cdist": fixed(0.0, INF, "norm", "distance"),
    "dist": fixed(0.0, INF, "norm"),
    "pairwise_distance": fixed(0.0, INF, "norm", "padded"),
    "std": fixed(0.0, INF, "std"),
    "var": fixed(0.0, INF, "var"),
    "rand": fixed(0.0, 1.0, "uniform"),
    "rand_like": fixed(0.0, 1.0, "uniform"),
    "uniform": of_uniform,
    "zeros": fixed(0.0, 0.0),
    "zeros_like": fixed(0.0, 0.0),
    "ones": fixed(1.0, 1.0),
    "ones_like": fixed(1.0, 1.0),
    "arange": fixed(0.0, INF),
    "empty": fixed(-INF, INF, "uninitialised"),
    "empty_like": fixed(-INF, INF, "uninitialised"),
    "new_empty": fixed(-INF, INF, "uninitialised"),
    "size": fixed(0.0, INF, "size"),
    "numel": fixed(0.0, INF, "size"),
    "len": fixed(0.0, INF, "size"),
    "shape": fixed(0.0, INF, "size"),
    "dim": fixed(1.0, INF, "size"),
    "get_world_size": fixed(1.0, INF, "size"),
    "count_nonzero": fixed(0.0, INF, "masksum", "count"),
    "one_hot": fixed(0.0, 1.0, "mask"),
    "any": fixed(0.0, 1.0, "bool"),
    "all": fixed(0.0, 1.0, "bool"),
    "where": of_where,
    "masked_fill": of_masked_fill,
    "histc": fixed(0.0, INF, "count"),
    "bincount": fixed(0.0, INF, "count"),
    "exponential": fixed(0.0, INF),
    "clip_grad_norm": fixed(0.0, INF, "gradnorm"),
}
for _loss in [
    "cross_entropy",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "ctc_loss",
    "triplet_margin_loss",
    "gaussian_nll_loss",
    "cosine_embedding_loss",
    "poisson_nll_loss",
    "margin_ranking_loss",
]:
    _EFFECTS[_loss] = fixed(-INF, INF, "loss")
_EFFECTS["mse_loss"] = of_mse_loss
_COMPARISONS = "compare not invert and or isnan isinf isfinite ne eq gt lt ge le bool"
_EFFECTS.update(dict.fromkeys(_COMPARISONS.split(), fixed(0.0, 1.0, "mask", "bool")))


def known(op: str, inputs: tuple[Value, ...], keywords: dict[str, Value]) -> Known:
    """Returns the bounds and kinds of what an operation makes."""
    rule = _EFFECTS.get(op)
    if rule is not None:
        try:
            return rule(inputs, keywords)
        except IndexError:
            # A method of the same name on something else, with fewer arguments.
            return -INF, INF, NO_KINDS
    if op in SHAPE and inputs:
        return same(inputs, keywords)
    return -INF, INF, NO_KINDS
