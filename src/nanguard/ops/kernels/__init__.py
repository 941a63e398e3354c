"""Kernels of our own, in Triton: what torch does in many passes over a tensor, done in one.

Each function is one pass. Sums are in float32, divisions and roots are rounded as torch rounds
them. Whether a kernel can be used at all is for ``ops/fused.py`` to say; here tensors are on one
device, contiguous unless a stride is taken, and not empty.
"""

from __future__ import annotations

from nanguard.ops.kernels.pointwise import (
    add_noise,
    add_noise_slope,
    chosen,
    open_rows,
    safe_div,
    safe_div_slope,
    soft_cap,
    soft_cap_slope,
    time_weight,
    zero_rows,
)
from nanguard.ops.kernels.rows import (
    label_loss,
    label_loss_slope,
    mask_logits,
    masked_mean,
    masked_mean_slope,
    mean_loss,
    modulate,
    modulate_slope,
    norm,
    norm_slope,
    std,
    std_slope,
)

__all__ = [
    "add_noise",
    "add_noise_slope",
    "chosen",
    "label_loss",
    "label_loss_slope",
    "mask_logits",
    "masked_mean",
    "masked_mean_slope",
    "mean_loss",
    "modulate",
    "modulate_slope",
    "norm",
    "norm_slope",
    "open_rows",
    "safe_div",
    "safe_div_slope",
    "soft_cap",
    "soft_cap_slope",
    "std",
    "std_slope",
    "time_weight",
    "zero_rows",
]
