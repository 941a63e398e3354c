"""Safe building blocks: equal to the plain form, finite at its edge, and honest about bad input.

Each op says which failure it prevents. None of them hides a NaN or an Inf that comes from
elsewhere, and none waits for the device unless it says so.
"""

from __future__ import annotations

from nanguard.errors import MissingDependencyError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("nanguard.ops", error) from error

from nanguard.ops.attention import AttentionMask, attention, masked_softmax
from nanguard.ops.bounds import hard_cap, soft_cap
from nanguard.ops.codec import TokenCodec
from nanguard.ops.diffusion import (
    add_noise,
    bounded_weight,
    cosine_schedule,
    early_time_weight,
    late_time_weight,
    linear_schedule,
)
from nanguard.ops.domains import (
    bounded_exp,
    gumbel_noise,
    safe_acos,
    safe_div,
    safe_log,
    safe_norm,
    safe_pow,
    safe_sqrt,
    safe_std,
)
from nanguard.ops.labels import Counter, checked_cross_entropy, mask_logits
from nanguard.ops.masked import masked_cross_entropy, masked_mean, masked_mse
from nanguard.ops.norms import AdaLNZero, RMSNorm, modulate, rms_norm
from nanguard.ops.schedules import WarmupCosine, warmup_cosine

__all__ = [
    "AdaLNZero",
    "AttentionMask",
    "Counter",
    "RMSNorm",
    "TokenCodec",
    "WarmupCosine",
    "add_noise",
    "attention",
    "bounded_exp",
    "bounded_weight",
    "checked_cross_entropy",
    "cosine_schedule",
    "early_time_weight",
    "gumbel_noise",
    "hard_cap",
    "late_time_weight",
    "linear_schedule",
    "mask_logits",
    "masked_cross_entropy",
    "masked_mean",
    "masked_mse",
    "masked_softmax",
    "modulate",
    "rms_norm",
    "safe_acos",
    "safe_div",
    "safe_log",
    "safe_norm",
    "safe_pow",
    "safe_sqrt",
    "safe_std",
    "soft_cap",
    "warmup_cosine",
]
