"""What each tensor of a checkpoint is for, and which bad-looking numbers are meant."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import PurePath

    from nanguard.check.checkpoint.tensor_scan import TensorNumbers

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class TensorRole(str, Enum):
    """What a tensor is for."""

    WEIGHT = "weight"
    OPTIMIZER = "optimizer state"
    EMA = "EMA"
    SCALER = "loss scaler"
    RECORD = "record"


_OPTIMIZER = frozenset(
    [
        "optimizer",
        "optimizers",
        "optimiser",
        "optimisers",
        "optim",
        "optims",
        "opt",
        "opts",
        "adam",
        "adamw",
        "sgd",
        "rmsprop",
    ]
)
_FLAT = frozenset({"optimizer", "optimizers", "optim"})
_FLAT_RECORDS = frozenset({"lr_scheduler", "scheduler", "rng", "rng_state", "dataloader"})
_SCALER = frozenset({"scaler", "scalers", "amp"})
_EMA = frozenset({"ema", "emas", "shadow", "swa", "averaged", "polyak"})
_AROUND_WEIGHTS = frozenset(
    [
        "rng",
        "random",
        "scheduler",
        "schedulers",
        "sched",
        "callback",
        "callbacks",
        "loops",
        "hparams",
        "hyper",
        "args",
        "config",
        "cfg",
        "sampler",
        "dataloader",
        "loader",
    ]
)
_RECORD = frozenset(
    [
        "metric",
        "metrics",
        "history",
        "loss",
        "losses",
        "best",
        "log",
        "logs",
        "logged",
        "results",
        "grad",
        "grads",
        "gradients",
        "monitor",
        "early",
        "score",
        "scores",
        "accuracy",
    ]
)
_MODEL = frozenset(
    [
        "model",
        "models",
        "module",
        "net",
        "network",
        "weight",
        "weights",
        "param",
        "params",
        "parameters",
        "generator",
        "discriminator",
        "encoder",
        "decoder",
    ]
)
# What optimizers call the tensors they keep for each parameter.
_MOMENTS = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_sqs",
        "max_exp_avg_sq",
        "exp_inf",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "exp_avg_diff",
        "neg_grad_or_diff",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
    ]
)


@lru_cache(maxsize=4096)
def words(key: str) -> frozenset[str]:
    """Returns the words a key is made of."""
    return frozenset(word.lower() for word in _WORD.findall(key[:300]))


def role_of(
    keys: tuple[str, ...], *, dimensions: int, optimizer: bool, file: TensorRole | None
) -> TensorRole:
    """Returns what a tensor is for.

    Args:
        keys: Where it is in the tree.
        dimensions: How many dimensions it has.
        optimizer: Whether it is in something built like the state of an optimizer.
        file: What the file is for, if its name says so.
    """
    if optimizer:
        return TensorRole.OPTIMIZER
    leaf = keys[-1].split(".") if keys else [""]
    above = [_container(words(key)) for key in keys[:-1]] + [_flat(part) for part in leaf[:-1][:2]]
    first = next((role for role in above if role is not None), None)
    if first in (None, TensorRole.WEIGHT, TensorRole.RECORD):
        # An average may be kept within a model, or by a callback.
        average = TensorRole.EMA in above or any(words(part) & _EMA for part in leaf[:-1])
        first = TensorRole.EMA if average else first
    if first is None and leaf[-1] in _MOMENTS:
        return TensorRole.OPTIMIZER
    if first is None and dimensions == 0 and len(leaf) == 1:
        first = TensorRole.RECORD if words(leaf[0]) & (_RECORD | _AROUND_WEIGHTS) else None
    return first or file or TensorRole.WEIGHT


def role_of_file(path: PurePath) -> TensorRole | None:
    """Returns what a whole file is for; None if its name does not say so."""
    named = words(path.name.split(".")[0])
    if named & _OPTIMIZER and not named & _MODEL:
        return TensorRole.OPTIMIZER
    if named & {"scaler"}:
        return TensorRole.SCALER
    if named & {"scheduler", "rng", "random", "sampler"} or path.name == "training_args.bin":
        return TensorRole.RECORD
    if named & {"ema"} or words(path.parent.name) & {"ema"}:
        return TensorRole.EMA
    return None


def _flat(part: str) -> TensorRole | None:
    """Returns what the first parts of a dotted name say; modules of a model may be called much."""
    if part in _FLAT or part.startswith("optimizer_state"):
        return TensorRole.OPTIMIZER
    return TensorRole.RECORD if part in _FLAT_RECORDS else None


def _container(named: frozenset[str]) -> TensorRole | None:
    if named & _AROUND_WEIGHTS:
        return TensorRole.RECORD
    if named & _OPTIMIZER and (named & _FLAT or not named & _MODEL):
        return TensorRole.OPTIMIZER
    if named & _SCALER:
        return TensorRole.SCALER
    if named & _EMA:
        return TensorRole.EMA
    if named & _MODEL:
        return TensorRole.WEIGHT
    return TensorRole.RECORD if named & _RECORD else None


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


def infinities_meant(name: str, shape: tuple[int, ...], numbers: TensorNumbers) -> bool:
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


def large_values_meant(name: str, shape: tuple[int, ...], numbers: TensorNumbers) -> bool:
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


def _filled(shape: tuple[int, ...], numbers: TensorNumbers) -> bool:
    """Returns whether a tensor is one large value on one small one, as masks are."""
    return (
        len(shape) >= 2
        and numbers.beyond > 1
        and numbers.outer[0] == numbers.outer[1]
        and numbers.inner[0] == numbers.inner[1]
    )
