"""Points about the model and its loss."""

from __future__ import annotations

from nanguard.advice.checklist.point import Point

_SECTION = "model"

MODEL: tuple[Point, ...] = (
    Point(
        "masks-are-safe",
        _SECTION,
        "Do masks keep a softmax from rows that are masked as a whole?",
        "Test each row, not the whole tensor; mask logits with a finite value that fits the type.",
        faults=(
            "inf-masked-softmax",
            "whole-tensor-mask-check",
            "inf-masked-logits-loss",
            "mask-constant-overflows-half",
            "logits-masking-enabled",
        ),
        clean=("masking",),
    ),
    Point(
        "attention-scale",
        _SECTION,
        "Does attention scale by the size of one head?",
        "Divide by the square root of head_dim, or call F.scaled_dot_product_attention.",
        faults=("scale-from-wrong-dim",),
        clean=("attention",),
    ),
    Point(
        "norms-have-eps",
        _SECTION,
        "Does every norm, square root and deviation keep away from zero?",
        "Add the eps inside the root, and one that the half type can hold.",
        faults=(
            "normalise-without-eps",
            "eps-outside-rsqrt",
            "eps-too-small-for-half",
            "sqrt-at-zero",
            "std-of-few",
            "fractional-power-gradient",
        ),
        clean=("norm",),
    ),
    Point(
        "functions-are-bounded",
        _SECTION,
        "Are logarithms, exponentials and divisions kept within their range?",
        "Use log_softmax, logsigmoid and the losses with logits; clamp before, not after.",
        faults=(
            "unguarded-log",
            "log-of-softmax",
            "unbounded-exp",
            "division-by-unguarded-sum",
            "division-by-uniform-sample",
            "bce-after-sigmoid",
            "gumbel-log-log",
            "acos-at-boundary",
            "where-gradient-trap",
        ),
        clean=("risky-function",),
    ),
    Point(
        "loss-weights-bounded",
        _SECTION,
        "Are loss weights bounded, such as those over diffusion time?",
        "Clamp weights that grow towards the ends of time, for example to at most 100.",
        shown=("weights-bounded",),
    ),
    Point(
        "parameters-initialised",
        _SECTION,
        "Is every parameter filled before it is used?",
        "Fill what torch.empty made, with nn.init or zeros.",
        faults=("uninitialised-parameter",),
        clean=("init", "model"),
    ),
    Point(
        "batchnorm-has-batches",
        _SECTION,
        "Does BatchNorm see more than one sample on every rank?",
        "Drop the last batch, convert to SyncBatchNorm, or use GroupNorm or LayerNorm.",
        faults=("batchnorm-batch-too-small",),
        shown=("sync-batchnorm", "no-batchnorm", "drop-last"),
    ),
)
