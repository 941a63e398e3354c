"""Kinds of operations, by what infinities mean to them. Causes read it, so it knows no torch."""

from __future__ import annotations

import math

# Reductions that hand on an infinity when nothing else is left to choose from.
EXTREMES = (
    "aten.amax", "aten.amin", "aten.max", "aten.min",
    "aten.scatter_reduce", "aten.scatter_reduce_", "aten.index_reduce", "aten.index_reduce_",
)  # fmt: skip
# What multiplies its input by weights; no infinity is meant to get there.
LAYERS = (
    "aten.addmm", "aten.mm", "aten.addmv", "aten.mv", "aten.bmm", "aten.baddbmm", "aten.linear",
    "aten._addmm_activation", "aten._scaled_mm", "aten._grouped_mm",
    "aten.convolution", "aten.cudnn_convolution", "aten.cudnn_convolution_transpose",
    "aten.cudnn_convolution_relu", "aten.cudnn_convolution_add_relu", "aten.miopen_convolution",
    "aten.native_layer_norm", "aten._fused_rms_norm", "aten.native_group_norm",
    "aten.native_batch_norm", "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_no_training", "aten._batch_norm_with_update",
    "aten._batch_norm_no_update", "aten.cudnn_batch_norm", "aten.miopen_batch_norm",
    "aten._cudnn_rnn", "aten.miopen_rnn", "aten.mkldnn_rnn_layer",
    "aten._thnn_fused_lstm_cell", "aten._thnn_fused_gru_cell",
)  # fmt: skip
# Memory that nobody has written to yet.
UNFILLED = (
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.empty_permuted",
    "aten.new_empty", "aten.new_empty_strided",
)  # fmt: skip
# What stands for a tensor that came out of a file.
LOADED = "torch.load"
# What hands on all values of its inputs and adds none. Casts do so if the new type is wider.
KEEPING = ("aten.clone", "aten._unsafe_view", "aten.cat", "aten.stack", "aten._to_copy")


def nothing_left(op: str, reduce: object, low: float, high: float) -> bool:
    """Returns whether results of a reduction are what it gives when there is nothing to reduce.

    Args:
        op: The reduction.
        reduce: What an operation that knows several was asked for; None if that is not known.
        low: The smallest result.
        high: The largest.
    """
    if op not in EXTREMES:
        return False
    several = op.rstrip("_").endswith("_reduce")
    asked = op if not several else "max, min" if reduce is None else str(reduce)
    return ("max" in asked and low == -math.inf) or ("min" in asked and high == math.inf)
