"""Points about data and labels."""

from __future__ import annotations

from nanguard.advice.checklist.point import Point

_SECTION = "data"

DATA: tuple[Point, ...] = (
    Point(
        "inputs-checked",
        _SECTION,
        "Are inputs looked at for NaN and Inf before they reach the model?",
        "Scan the data once, and refuse a batch with `torch.isfinite(x).all()` false.",
        shown=("input-check",),
    ),
    Point(
        "labels-in-range",
        _SECTION,
        "Is every label known to be within the number of classes?",
        "Raise where `labels.min() < 0` or `labels.max() >= num_classes`; never clamp a label.",
        faults=("labels-clamped", "num-labels-below-classes"),
        shown=("label-check",),
    ),
    Point(
        "small-trial",
        _SECTION,
        "Can the run be tried on a small part of the data first?",
        "Give the script an option for 1 % of the data, or for one data set out of several.",
        shown=("small-trial",),
    ),
)
