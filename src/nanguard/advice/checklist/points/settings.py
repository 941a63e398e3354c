"""Points about the settings of a run."""

from __future__ import annotations

from nanguard.advice.checklist.point import Point

_SECTION = "settings"

SETTINGS: tuple[Point, ...] = (
    Point(
        "learning-rate-in-range",
        _SECTION,
        "Is the learning rate in the range that such a run bears?",
        "Begin at 5e-5, diffusion at 1e-5; NaN in the first epochs: 1e-5 or 5e-6.",
        faults=(
            "learning-rate-too-high",
            "scientific-notation-is-string",
            "value-out-of-range",
            "min-lr-above-lr",
        ),
        clean=("rate-set",),
        shown=("rate-low",),
    ),
    Point(
        "warm-up",
        _SECTION,
        "Does the learning rate rise slowly?",
        "Warm up over 1000 to 2000 steps, or 5 epochs from a tenth of the rate.",
        faults=("no-warmup", "warmup-longer-than-training"),
        shown=("warmup",),
        missing=("step", "hf-trainer"),
        gap="steps are made here, and nothing in the project warms up",
    ),
    Point(
        "precision-aligned",
        _SECTION,
        "Do all settings agree on the precision, and is fp16 scaled?",
        "One of fp32, bf16 and fp16 in every file; a GradScaler for fp16.",
        faults=(
            "conflicting-precision",
            "fp16-without-loss-scaling",
            "half-precision-optimizer-state",
            "adam-eps-too-small",
        ),
        shown=("full-precision",),
        clean=("precision-set", "half"),
    ),
    Point(
        "keys-are-right",
        _SECTION,
        "Is every key of the configuration one that its reader knows, and there once?",
        "Correct the spelling, and keep one of two keys of the same name.",
        faults=("misspelled-key", "duplicate-key"),
        clean=("configuration",),
    ),
    Point(
        "anomaly-mode-off",
        _SECTION,
        "Is anomaly mode off in the usual run?",
        "Turn it on for a search only, behind an option.",
        faults=("anomaly-mode-left-on",),
        clean=("step", "hf-trainer", "lightning-trainer"),
    ),
)
