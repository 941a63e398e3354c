"""DeepSpeed's JSON, with optimizer and schedule in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.choice import EPOCH
from nanguard.advice.presets.tree import Config, Line, Section

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Values


def config(values: Values) -> Config:
    """Returns the settings of an engine."""
    start = "deepspeed train.py --deepspeed_config ds_config.json"
    header = notes.header(values, "DeepSpeed", start)
    if values.by_epochs:
        header += ("", f"DeepSpeed counts steps: an epoch is taken to have {EPOCH} of them.")
    return Config(
        (
            *header,
            "",
            f"Checkpoints are the script's: engine.save_checkpoint. {notes.save(values)}",
        ),
        (
            Line("train_micro_batch_size_per_gpu", values.task.batch, notes.BATCH),
            Line("gradient_accumulation_steps", values.accumulation, notes.accumulation(values)),
            Line("gradient_clipping", values.clip, notes.clip(values)),
            _optimizer(values),
            _scheduler(values),
            *_precision(values),
            _zero(),
            Line("steps_per_print", 10, notes.LOG),
        ),
    )


def _optimizer(values: Values) -> Section:
    params = (
        Line("lr", values.lr, notes.rate(values)),
        Line("betas", (0.9, values.task.beta2), notes.BETA2),
        Line("eps", 1e-8, notes.eps(values)),
        Line("weight_decay", values.task.weight_decay, notes.decay(values)),
    )
    return Section("optimizer", (Line("type", "AdamW", notes.OPTIMIZER), Section("params", params)))


def _scheduler(values: Values) -> Section:
    first = "The first steps take a tenth of the rate. Lower it if the very first steps break."
    params = (
        Line("total_num_steps", values.steps(values.task.length), notes.length(values)),
        Line("warmup_num_steps", values.steps(values.warmup), notes.warmup(values)),
        Line("warmup_min_ratio", 0.1, first),
        Line("cos_min_ratio", round(values.floor / values.lr, 4), notes.floor(values)),
    )
    return Section(
        "scheduler", (Line("type", "WarmupCosineLR", notes.schedule()), Section("params", params))
    )


def _precision(values: Values) -> tuple[Section, ...]:
    bf16 = Section("bf16", (Line("enabled", values.precision == "bf16", notes.precision(values)),))
    half = Line("enabled", values.precision == "fp16", "Never together with bf16.")
    if values.precision == "fp16":
        fp16 = Section(
            "fp16",
            (
                half,
                Line("loss_scale", 0, "0 finds the scale while training. A number fixes it."),
                Line("initial_scale_power", values.scale_power, notes.scale(values)),
                Line("loss_scale_window", 1000, "Good steps before the scale is raised again."),
                Line("hysteresis", 2, "Bad steps before the scale is lowered."),
                Line("min_loss_scale", 1, "At 1 the scale is not what is wrong: look for NaN."),
            ),
        )
    else:
        fp16 = Section("fp16", (half,))
    kept = Line("grad_accum_dtype", "fp32", "Many small gradients vanish when added in half.")
    return (bf16, fp16, *((Section("data_types", (kept,)),) if values.precision != "fp32" else ()))


def _zero() -> Section:
    stage = Line("stage", 2, "Shares optimizer state and gradients. 3 only if weights do not fit.")
    return Section("zero_optimization", (stage,))
