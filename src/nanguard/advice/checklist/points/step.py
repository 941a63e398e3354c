"""Points about one step: the loss, its gradients, and what happens when they are bad."""

from __future__ import annotations

from nanguard.advice.checklist.point import Point

_SECTION = "step"
_LOOPS = ("step", "hf-trainer", "lightning-trainer")
_NOWHERE = "steps are made here, and nothing in the project"

STEP: tuple[Point, ...] = (
    Point(
        "guarded",
        _SECTION,
        "Does the run train under nanguard?",
        "Start it with `nanguard run -- COMMAND`, or put a Guard around the loop.",
        shown=("guard",),
        missing=_LOOPS,
        gap=f"{_NOWHERE} starts them with nanguard run or a Guard",
    ),
    Point(
        "loss-checked",
        _SECTION,
        "Is the loss known to be finite before backward?",
        "Check `torch.isfinite(loss)`; isnan alone lets Inf through.",
        faults=("nan-check-misses-inf", "nan-loss-replaced"),
        shown=("loss-check", "guard"),
        missing=_LOOPS,
        gap=f"{_NOWHERE} checks the loss",
    ),
    Point(
        "gradients-clipped",
        _SECTION,
        "Are gradients clipped?",
        "Clip to a norm of 1.0, or 0.5 where it spikes: clip_grad_norm_ before every step.",
        faults=(
            "missing-gradient-clipping",
            "clip-disabled-by-huge-norm",
            "clip-norm-too-large",
            "conflicting-clipping",
            "unclipped-recurrent-training",
            "nothing-clips-gradients",
        ),
        denied=("clip-off",),
        shown=("clip", "hf-trainer"),
        missing=("step", "lightning-trainer"),
        gap=f"{_NOWHERE} clips gradients",
    ),
    Point(
        "clip-after-unscale",
        _SECTION,
        "Are gradients unscaled before they are clipped?",
        "Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
        faults=("clip-before-unscale",),
        shown=("accelerator-clip", "unscaled", "hf-trainer", "lightning-trainer"),
        clean=("unscale",),
    ),
    Point(
        "gradient-norm-watched",
        _SECTION,
        "Is the norm of the gradient looked at, step by step?",
        "Keep what clip_grad_norm_ returns: log it, and check that it is finite.",
        shown=("gradient-check", "norm-used", "hf-trainer", "guard"),
        missing=("norm-unused", "step", "lightning-trainer"),
        gap="the norm of the gradient is not kept, here or anywhere",
    ),
    Point(
        "bad-step-left-out",
        _SECTION,
        "Is a bad step left out as a whole?",
        "Do not call optimizer.step() at all; zeroed gradients still move Adam and decay weights.",
        faults=("step-after-zeroed-grads", "nan-loss-replaced"),
        shown=("guard", "skip", "scaler-on"),
        unsure=("scaler",),
        missing=_LOOPS,
        gap=f"{_NOWHERE} leaves a bad step out",
    ),
    Point(
        "ranks-agree",
        _SECTION,
        "Do all ranks take the same decision about a bad step?",
        "All-reduce a flag before the decision; a rank that skips alone lets the others wait.",
        faults=("rank-divergent-skip",),
        shown=("agreed", "guard", "one-rank"),
    ),
    Point(
        "nothing-hidden",
        _SECTION,
        "Do NaN and Inf stay visible in losses and logs?",
        "Remove nan_to_num, clamps and filters from the path of the loss; count what is skipped.",
        faults=(
            "nan-to-num-hides-cause",
            "nan-loss-replaced",
            "loss-clamped",
            "nan-filter-hides-loss",
            "step-after-zeroed-grads",
        ),
        denied=("nan-filter",),
        shown=("nan-filter-off",),
        clean=("step",),
    ),
    Point(
        "loss-terms-reported",
        _SECTION,
        "Are the terms of the loss reported one by one?",
        "Log each term by its name, or hand them to guard.loss(text=..., latent=...).",
        shown=("loss-terms",),
    ),
)
