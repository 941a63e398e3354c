"""Points about what is kept: checkpoints, logs, tests, versions."""

from __future__ import annotations

from nanguard.advice.checklist.point import Point

_SECTION = "keeping"

KEEPING: tuple[Point, ...] = (
    Point(
        "checkpoints-regular",
        _SECTION,
        "Are checkpoints written regularly?",
        "Write one every 1000 steps, and keep the last that was finite.",
        faults=("checkpoint-interval-too-long",),
        denied=("save-off",),
        shown=("save", "hf-trainer", "lightning-trainer"),
        missing=("step",),
        gap="steps are made here, and nothing in the project writes a checkpoint",
    ),
    Point(
        "resume-is-safe",
        _SECTION,
        "Can the run go on from a good checkpoint, loaded without running code from it?",
        "Load with `weights_only=True` or safetensors, and check that everything is finite.",
        faults=("unsafe-checkpoint-load",),
        shown=("safe-load",),
        missing=("save",),
        gap="checkpoints are written here, and nothing in the project loads one",
    ),
    Point(
        "metrics-kept",
        _SECTION,
        "Are loss and metrics written down while the run goes on?",
        "Write them to TensorBoard, W&B, or a CSV or JSONL file, every few steps.",
        shown=("metrics", "hf-trainer"),
    ),
    Point(
        "numerics-tested",
        _SECTION,
        "Do tests look at whether losses and layers stay finite?",
        "Test layers with zeros, large values and full masks, and assert isfinite.",
        shown=("finite-test",),
        missing=("test",),
        gap="there are tests of training code, and none looks at isfinite",
    ),
    Point(
        "changes-kept",
        _SECTION,
        "Is every version of the configuration kept?",
        "Put it under version control; `nanguard check --fix` keeps what it changes.",
        shown=("history",),
    ),
)
