"""Every operation that is known, and what it does to bounds and kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.code import bounds
from nanguard.check.code.values import INF, NO_KINDS, SHAPE, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.check.code.bounds import Known

_EFFECTS: dict[str, Callable[..., Known]] = {
    "add": bounds.of_add,
    "sub": bounds.of_sub,
    "mul": bounds.of_mul,
    "div": bounds.of_div,
    "pow": bounds.of_pow,
    "neg": bounds.of_neg,
    "matmul": bounds.of_matmul,
    "einsum": bounds.of_matmul,
    "linear": bounds.of_matmul,
    "abs": bounds.of_abs,
    "square": bounds.of_square,
    "clamp": bounds.of_clamp,
    "clip": bounds.of_clamp,
    "clamp_min": bounds.of_clamp_min,
    "clamp_max": bounds.of_clamp_max,
    "hardtanh": bounds.fixed(-1.0, 1.0),
    "maximum": bounds.of_maximum,
    "max": bounds.of_max,
    "amax": bounds.of_max,
    "cummax": bounds.of_max,
    "minimum": bounds.of_minimum,
    "min": bounds.of_min,
    "amin": bounds.of_min,
    "fmax": bounds.of_maximum,
    "fmin": bounds.of_minimum,
    "exp": bounds.of_exp,
    "expm1": bounds.fixed(-1.0, INF, "exp"),
    "exp2": bounds.fixed(0.0, INF, "exp"),
    "sum": bounds.of_sum,
    "nansum": bounds.of_sum,
    "mean": bounds.of_mean,
    "median": bounds.of_mean,
    "nanmean": bounds.of_mean,
    "cumsum": bounds.of_sum,
    "total": bounds.of_total,
    "adaptive_avg_pool2d": bounds.of_mean,
    "avg_pool2d": bounds.of_mean,
    "adaptive_avg_pool1d": bounds.of_mean,
    "avg_pool1d": bounds.of_mean,
    "cumprod": bounds.of_mean,
    "logsumexp": bounds.fixed(-INF, INF, "maximum"),
    "sqrt": bounds.of_sqrt,
    "rsqrt": bounds.of_rsqrt,
    "log": bounds.of_log,
    "log2": bounds.of_log,
    "log10": bounds.of_log,
    "softmax": bounds.fixed(0.0, 1.0, "softmax", "probability"),
    "gumbel_softmax": bounds.fixed(0.0, 1.0, "softmax", "probability"),
    "sigmoid": bounds.fixed(0.0, 1.0, "sigmoid", "probability"),
    "expit": bounds.fixed(0.0, 1.0, "sigmoid"),
    "hardsigmoid": bounds.fixed(0.0, 1.0),
    "log_softmax": bounds.fixed(-INF, 0.0, "logprob"),
    "logsigmoid": bounds.fixed(-INF, 0.0, "logprob"),
    "log_prob": bounds.fixed(-INF, INF, "logprob"),
    "tanh": bounds.of_tanh,
    "softsign": bounds.of_tanh,
    "erf": bounds.of_tanh,
    "sin": bounds.fixed(-1.0, 1.0),
    "cos": bounds.fixed(-1.0, 1.0),
    "cosine_similarity": bounds.fixed(-1.0, 1.0, "cosine"),
    "normalize": bounds.fixed(-1.0, 1.0, "unit"),
    "softplus": bounds.of_softplus,
    "relu": bounds.of_relu,
    "elu": bounds.fixed(-1.0, INF),
    "relu6": bounds.fixed(0.0, 6.0),
    "gelu": bounds.fixed(-1.0, INF),
    "silu": bounds.fixed(-1.0, INF),
    "norm": bounds.fixed(0.0, INF, "norm"),
    "vector_norm": bounds.fixed(0.0, INF, "norm"),
    "matrix_norm": bounds.fixed(0.0, INF, "norm"),
    "cdist": bounds.fixed(0.0, INF, "norm", "distance"),
    "dist": bounds.fixed(0.0, INF, "norm"),
    "pairwise_distance": bounds.fixed(0.0, INF, "norm", "padded"),
    "std": bounds.fixed(0.0, INF, "std"),
    "var": bounds.fixed(0.0, INF, "var"),
    "rand": bounds.fixed(0.0, 1.0, "uniform"),
    "rand_like": bounds.fixed(0.0, 1.0, "uniform"),
    "uniform": bounds.of_uniform,
    "zeros": bounds.fixed(0.0, 0.0),
    "zeros_like": bounds.fixed(0.0, 0.0),
    "ones": bounds.fixed(1.0, 1.0),
    "ones_like": bounds.fixed(1.0, 1.0),
    "arange": bounds.fixed(0.0, INF),
    "empty": bounds.fixed(-INF, INF, "uninitialised"),
    "empty_like": bounds.fixed(-INF, INF, "uninitialised"),
    "new_empty": bounds.fixed(-INF, INF, "uninitialised"),
    "size": bounds.fixed(0.0, INF, "size"),
    "numel": bounds.fixed(0.0, INF, "size"),
    "len": bounds.fixed(0.0, INF, "size"),
    "shape": bounds.fixed(0.0, INF, "size"),
    "dim": bounds.fixed(1.0, INF, "size"),
    "get_world_size": bounds.fixed(1.0, INF, "size"),
    "count_nonzero": bounds.fixed(0.0, INF, "masksum", "count"),
    "compare": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "not": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "invert": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "and": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "or": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "isnan": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "isinf": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "isfinite": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "ne": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "eq": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "gt": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "lt": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "ge": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "le": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "bool": bounds.fixed(0.0, 1.0, "mask", "bool"),
    "one_hot": bounds.fixed(0.0, 1.0, "mask"),
    "any": bounds.fixed(0.0, 1.0, "bool"),
    "all": bounds.fixed(0.0, 1.0, "bool"),
    "where": bounds.of_where,
    "masked_fill": bounds.of_masked_fill,
    "histc": bounds.fixed(0.0, INF, "count"),
    "bincount": bounds.fixed(0.0, INF, "count"),
    "exponential": bounds.fixed(0.0, INF),
    "clip_grad_norm": bounds.fixed(0.0, INF, "gradnorm"),
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
    _EFFECTS[_loss] = bounds.fixed(-INF, INF, "loss")
_EFFECTS["mse_loss"] = bounds.of_mse_loss


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
        return bounds.same(inputs, keywords)
    return -INF, INF, NO_KINDS
