"""Nested settings under the usual names, for a training script that reads its own file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.tree import Config, Line, Section

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Values

_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def config(values: Values) -> Config:
    """Returns the settings of a run."""
    return Config(
        notes.header(values, "Settings of a training run", "python train.py --config CONFIG"),
        (
            Line("seed", 42, notes.SEED),
            _optimizer(values),
            _scheduler(values),
            _training(values),
            _amp(values),
            *_task(values),
            Section("data", (Line("drop_last", value=True, note=notes.DROP_LAST),)),
            _checkpoint(values),
            Section("logging", (Line("every_n_steps", 10, notes.LOG),)),
        ),
    )


def _optimizer(values: Values) -> Section:
    task = values.task
    return Section(
        "optimizer",
        (
            Line("name", "adamw", notes.OPTIMIZER),
            Line("lr", values.lr, notes.rate(values)),
            Line("weight_decay", task.weight_decay, notes.decay(values)),
            Line("betas", (0.9, task.beta2), notes.BETA2),
            Line("eps", 1e-8, notes.eps(values)),
        ),
    )


def _scheduler(values: Values) -> Section:
    return Section(
        "scheduler",
        (
            Line("name", "cosine", notes.schedule()),
            Line(f"warmup_{values.task.unit}", values.warmup, notes.warmup(values)),
            Line(
                "warmup_start_factor",
                0.1,
                "The first steps take a tenth of the rate. Lower it if the very first steps break.",
            ),
            Line("min_lr", values.floor, notes.floor(values)),
        ),
    )


def _training(values: Values) -> Section:
    key = "epochs" if values.by_epochs else "max_steps"
    return Section(
        "training",
        (
            Line(key, values.task.length, notes.length(values)),
            Line("batch_size", values.task.batch, notes.BATCH),
            Line("gradient_accumulation_steps", values.accumulation, notes.accumulation(values)),
            Line("max_grad_norm", values.clip, notes.clip(values)),
        ),
    )


def _amp(values: Values) -> Section:
    half = values.precision != "fp32"
    members = [Line("enabled", half, notes.precision(values))]
    if half:
        members.append(
            Line("dtype", _TYPES[values.precision], "The type that autocast computes in.")
        )
    if values.precision == "fp16":
        members += [
            Line("grad_scaler", value=True, note="Small gradients are 0 without it. Never off."),
            Line("init_scale", 2**values.scale_power, notes.scale(values)),
        ]
    return Section("amp", tuple(members))


def _task(values: Values) -> tuple[Section, ...]:
    """Returns what only some tasks have."""
    loss: list[Line] = []
    if values.task.smoothing is not None:
        loss.append(Line("label_smoothing", values.task.smoothing, notes.SMOOTHING))
    if values.name == "diffusion":
        loss.append(
            Line(
                "max_weight",
                100.0,
                "Loss weights over diffusion time grow without bound near its ends; bound them "
                "here. Lower it if single time steps still rule the loss.",
            )
        )
    sections = [Section("loss", tuple(loss))] if loss else []
    if values.name == "multidataset":
        off = Line(
            "enable_logits_masking",
            value=False,
            note="A wrong label map masks the target's own class, and the loss is inf. Turn it on "
            "again as the last step of the plan, with -1e4 instead of -inf and label_smoothing at "
            "0: smoothing gives masked classes a share of the target.",
        )
        sections.append(Section("datasets", (off,)))
    return tuple(sections)


def _checkpoint(values: Values) -> Section:
    key = "every_n_epochs" if values.by_epochs else "every_n_steps"
    return Section(
        "checkpoint",
        (
            Line(key, values.save, notes.save(values)),
            Line("keep", 3, notes.KEEP),
            Line("resume", "last_good", notes.RESUME),
        ),
    )
