"""Hugging Face ``TrainingArguments``, as ``HfArgumentParser`` reads them from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.tree import Config, Line, Section

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Values


def config(values: Values) -> Config:
    """Returns the arguments of a trainer."""
    return Config(
        notes.header(values, "TrainingArguments", "python train.py CONFIG"),
        (
            Line("output_dir", "runs/stable", "Checkpoints and the log go here."),
            Line("seed", 42, notes.SEED),
            *_length(values),
            Line("per_device_train_batch_size", values.task.batch, notes.BATCH),
            Line("gradient_accumulation_steps", values.accumulation, notes.accumulation(values)),
            Line("dataloader_drop_last", value=True, note=notes.DROP_LAST),
            *_optimizer(values),
            *_precision(values),
            *_smoothing(values),
            *_keeping(values),
        ),
    )


def _length(values: Values) -> tuple[Line, ...]:
    key = "num_train_epochs" if values.by_epochs else "max_steps"
    return (Line(key, values.task.length, notes.length(values)),)


def _optimizer(values: Values) -> tuple[Line | Section, ...]:
    task = values.task
    if values.by_epochs:
        warmup = Line("warmup_ratio", values.warmup_ratio, notes.warmup(values))
    else:
        warmup = Line("warmup_steps", values.warmup, notes.warmup(values))
    return (
        Line("optim", "adamw_torch", notes.OPTIMIZER),
        Line("learning_rate", values.lr, notes.rate(values)),
        Line("lr_scheduler_type", "cosine_with_min_lr", notes.schedule()),
        Section("lr_scheduler_kwargs", (Line("min_lr", values.floor, notes.floor(values)),)),
        warmup,
        Line("weight_decay", task.weight_decay, notes.decay(values)),
        Line("adam_beta2", task.beta2, notes.BETA2),
        Line("adam_epsilon", 1e-8, notes.eps(values)),
        Line("max_grad_norm", values.clip, notes.clip(values)),
    )


def _precision(values: Values) -> tuple[Line, ...]:
    other = "Only one of the two; the Accelerate or DeepSpeed file beside it has to agree."
    return (
        Line("bf16", values.precision == "bf16", notes.precision(values)),
        Line("fp16", values.precision == "fp16", other),
    )


def _smoothing(values: Values) -> tuple[Line, ...]:
    if values.task.smoothing is None:
        return ()
    return (Line("label_smoothing_factor", values.task.smoothing, notes.SMOOTHING),)


def _keeping(values: Values) -> tuple[Line, ...]:
    if values.by_epochs:
        # The trainer knows no "every second epoch", so all levels save after each of them.
        epoch = (
            "A checkpoint after every epoch: what a run that breaks loses at most. For long "
            "epochs: steps, with save_steps."
        )
        saves = [Line("save_strategy", "epoch", epoch)]
    else:
        saves = [
            Line("save_strategy", "steps", "Counted in steps, as epochs may be long."),
            Line("save_steps", values.save, notes.save(values)),
        ]
    return (
        *saves,
        Line("save_total_limit", 3, notes.KEEP),
        Line("logging_steps", 10, notes.LOG),
        Line(
            "logging_nan_inf_filter",
            value=False,
            note="On by default, it leaves NaN out of the mean, and the log looks healthy.",
        ),
    )
