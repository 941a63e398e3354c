"""Lightning's command line: trainer, optimizer and schedule, without the model and the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.choice import EPOCH
from nanguard.advice.presets.tree import Config, Line, Section

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Values

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# How far below the highest rate the schedule begins.
_START = 10.0


def config(values: Values) -> Config:
    """Returns what goes beside the configuration of the model and the data."""
    start = "python main.py fit --config model.yaml --config stable.yaml"
    header = notes.header(values, "Lightning, beside the file of the model", start)
    return Config(
        header,
        (
            Line("seed_everything", 42, notes.SEED),
            _trainer(values),
            _optimizer(values),
            _scheduler(values),
        ),
    )


def _epochs(values: Values, length: int) -> int:
    """Returns a length of the task in epochs."""
    return length if values.by_epochs else max(1, length // EPOCH)


def _trainer(values: Values) -> Section:
    return Section(
        "trainer",
        (
            Line("accelerator", "auto", "gpu, to fail where there is none."),
            Line("devices", "auto", "All of them. The whole batch grows with it."),
            Line("precision", _PRECISION[values.precision], notes.precision(values)),
            Line("max_epochs", _epochs(values, values.task.length), notes.length(values)),
            *_part_of_epoch(values),
            Line("accumulate_grad_batches", values.accumulation, notes.accumulation(values)),
            Line("gradient_clip_val", values.clip, notes.clip(values)),
            Line("gradient_clip_algorithm", "norm", "By norm keeps the direction; value does not."),
            Line("log_every_n_steps", 10, notes.LOG),
            Line(
                "detect_anomaly",
                value=False,
                note="nanguard explains bad steps only. Anomaly mode slows every step down.",
            ),
            _checkpoints(values),
        ),
    )


def _part_of_epoch(values: Values) -> tuple[Line, ...]:
    if values.by_epochs:
        return ()
    return (
        Line(
            "limit_train_batches",
            EPOCH * values.accumulation,
            f"An epoch is {EPOCH} steps here, as the command line moves the schedule by epochs.",
        ),
    )


def _checkpoints(values: Values) -> Section:
    if values.by_epochs or values.save >= EPOCH:
        often = Line("every_n_epochs", _epochs(values, values.save), notes.save(values))
    else:
        often = Line("every_n_train_steps", values.save, notes.save(values))
    keep = Line("save_top_k", -1, f"-1 keeps all. {notes.KEEP}")
    last = Line("save_last", value=True, note="A name that is always there to resume from.")
    return Section(
        "callbacks",
        (
            Line("class_path", "lightning.pytorch.callbacks.ModelCheckpoint", ""),
            Section("init_args", (often, keep, last)),
        ),
        listed=True,
    )


def _optimizer(values: Values) -> Section:
    arguments = (
        Line("lr", values.lr, notes.rate(values)),
        Line("betas", (0.9, values.task.beta2), notes.BETA2),
        Line("eps", 1e-8, notes.eps(values)),
        Line("weight_decay", values.task.weight_decay, notes.decay(values)),
    )
    path = Line("class_path", "torch.optim.AdamW", notes.OPTIMIZER)
    return Section("optimizer", (path, Section("init_args", arguments)))


def _scheduler(values: Values) -> Section:
    start = "The first epoch takes a tenth of the rate. Raise it if the very first steps break."
    end = f"The last rate is the first, divided by this. {notes.floor(values)}"
    arguments = (
        Line("max_lr", values.lr, "The same as the optimizer's lr."),
        Line("total_steps", _epochs(values, values.task.length), "The same as max_epochs."),
        Line("pct_start", values.warmup_ratio, notes.warmup(values)),
        Line("anneal_strategy", "cos", "Up and down along a cosine: no jump anywhere."),
        Line("div_factor", _START, start),
        Line("final_div_factor", round(values.lr / _START / values.floor, 4), end),
        Line("cycle_momentum", value=False, note="Otherwise AdamW's first beta would move too."),
    )
    path = Line("class_path", "torch.optim.lr_scheduler.OneCycleLR", "Warm-up, then cosine.")
    return Section("lr_scheduler", (path, Section("init_args", arguments)))
