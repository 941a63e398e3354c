"""Kinds of operations that are told apart by what infinities mean to them."""

from __future__ import annotations

import math

# Reductions that hand on an infinity when nothing else is left to choose from.
EXTREMES = (
    "aten.amax", "aten.amin", "aten.max", "aten.min",
    "aten.scatter_reduce", "aten.scatter_reduce_", "aten.index_reduce", "aten.index_reduce_",
)  # fmt: skip
# What multiplies its input by weights; no infinity is meant to get there.
LAYERS = (
    "aten.addmm", "aten.mm", "aten.addmv", "aten.mv", "aten.bmm", "aten.linear",
    "aten.convolution", "aten.native_layer_norm", "aten.native_batch_norm",
    "aten._native_batch_norm_legit", "aten.native_group_norm",
)  # fmt: skip


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
