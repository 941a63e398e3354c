"""The files of a preset in each family of configurations, and the script that starts a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.advice import preset_writer as notes
from nanguard.advice.preset_writer import (
    Config,
    SettingGroup,
    SettingLine,
    comment,
    heading,
    notes_of,
    number,
    written,
)
from nanguard.advice.presets import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.advice.presets import Choice, Values


def accelerate_config(values: Values) -> Config:
    """Returns the settings of a launch on one machine with several GPUs."""
    start = "accelerate launch --config_file accelerate.yaml train.py"
    inside = (
        f"What this file cannot hold belongs into the training script: learning rate "
        f"{number(values.lr)}, accelerator.clip_grad_norm_(model.parameters(), {values.clip}), "
        f"warm-up over {notes.count(values, values.warmup)}, a checkpoint every "
        f"{notes.count(values, values.save)}. "
        f"Every rank has to take the same decision about a bad step: an `if not "
        f"isfinite(loss): continue` on one of them lets the others wait for ever."
    )
    header = notes.header(values, "Accelerate on one machine with several GPUs", start)
    return Config((*header, "", inside), _accelerate_members(values))


def _accelerate_members(values: Values) -> tuple[SettingLine, ...]:
    mixed = "no" if values.precision == "fp32" else values.precision
    return (
        SettingLine("compute_environment", "LOCAL_MACHINE", "One machine, no cluster manager."),
        SettingLine(
            "distributed_type", "MULTI_GPU", "One process for each GPU; NO for a single one."
        ),
        SettingLine(
            "mixed_precision",
            mixed,
            f"{notes.precision(values)} The trainer's own amp, bf16 or fp16 setting has to agree.",
        ),
        SettingLine("num_machines", 1, "More machines need main_process_ip and main_process_port."),
        SettingLine(
            "num_processes", 2, "As many as there are GPUs. The whole batch grows with it."
        ),
        SettingLine("machine_rank", 0, "Which of several machines this one is."),
        SettingLine("gpu_ids", "all", "Such as 0,1 to leave GPUs to others."),
        SettingLine("main_training_function", "main", "Only TPUs read it."),
        SettingLine("rdzv_backend", "static", "c10d where machines come and go."),
        SettingLine("same_network", value=True, note="Whether all machines are in one network."),
        SettingLine("use_cpu", value=False, note="true for a trial without GPUs."),
        SettingLine(
            "debug",
            values.level == "safe",
            "Compares the shapes of what ranks exchange, and fails instead of hanging. false once "
            "a run has held; it costs a little at every exchange.",
        ),
    )


def deepspeed_config(values: Values) -> Config:
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
            SettingLine("train_micro_batch_size_per_gpu", values.task.batch, notes.BATCH),
            SettingLine(
                "gradient_accumulation_steps", values.accumulation, notes.accumulation(values)
            ),
            SettingLine("gradient_clipping", values.clip, notes.clip(values)),
            _deepspeed_optimizer(values),
            _deepspeed_scheduler(values),
            *_deepspeed_precision(values),
            _deepspeed_zero(),
            SettingLine("steps_per_print", 10, notes.LOG),
        ),
    )


def _deepspeed_optimizer(values: Values) -> SettingGroup:
    params = (
        SettingLine("lr", values.lr, notes.rate(values)),
        SettingLine("betas", (0.9, values.task.beta2), notes.BETA2),
        SettingLine("eps", 1e-8, notes.eps(values)),
        SettingLine("weight_decay", values.task.weight_decay, notes.decay(values)),
    )
    return SettingGroup(
        "optimizer", (SettingLine("type", "AdamW", notes.OPTIMIZER), SettingGroup("params", params))
    )


def _deepspeed_scheduler(values: Values) -> SettingGroup:
    first = "The first steps take a tenth of the rate. Lower it if the very first steps break."
    params = (
        SettingLine("total_num_steps", values.steps(values.task.length), notes.length(values)),
        SettingLine("warmup_num_steps", values.steps(values.warmup), notes.warmup(values)),
        SettingLine("warmup_min_ratio", 0.1, first),
        SettingLine("cos_min_ratio", round(values.floor / values.lr, 4), notes.floor(values)),
    )
    return SettingGroup(
        "scheduler",
        (SettingLine("type", "WarmupCosineLR", notes.schedule()), SettingGroup("params", params)),
    )


def _deepspeed_precision(values: Values) -> tuple[SettingGroup, ...]:
    bf16 = SettingGroup(
        "bf16", (SettingLine("enabled", values.precision == "bf16", notes.precision(values)),)
    )
    half = SettingLine("enabled", values.precision == "fp16", "Never together with bf16.")
    if values.precision == "fp16":
        fp16 = SettingGroup(
            "fp16",
            (
                half,
                SettingLine(
                    "loss_scale", 0, "0 finds the scale while training. A number fixes it."
                ),
                SettingLine("initial_scale_power", values.scale_power, notes.scale(values)),
                SettingLine(
                    "loss_scale_window", 1000, "Good steps before the scale is raised again."
                ),
                SettingLine("hysteresis", 2, "Bad steps before the scale is lowered."),
                SettingLine(
                    "min_loss_scale", 1, "At 1 the scale is not what is wrong: look for NaN."
                ),
            ),
        )
    else:
        fp16 = SettingGroup("fp16", (half,))
    kept = SettingLine(
        "grad_accum_dtype", "fp32", "Many small gradients vanish when added in half."
    )
    return (
        bf16,
        fp16,
        *((SettingGroup("data_types", (kept,)),) if values.precision != "fp32" else ()),
    )


def _deepspeed_zero() -> SettingGroup:
    stage = SettingLine(
        "stage", 2, "Shares optimizer state and gradients. 3 only if weights do not fit."
    )
    return SettingGroup("zero_optimization", (stage,))


def hf_config(values: Values) -> Config:
    """Returns the arguments of a trainer."""
    return Config(
        notes.header(values, "TrainingArguments", "python train.py CONFIG"),
        (
            SettingLine("output_dir", "runs/stable", "Checkpoints and the log go here."),
            SettingLine("seed", 42, notes.SEED),
            *_hf_length(values),
            SettingLine("per_device_train_batch_size", values.task.batch, notes.BATCH),
            SettingLine(
                "gradient_accumulation_steps", values.accumulation, notes.accumulation(values)
            ),
            SettingLine("dataloader_drop_last", value=True, note=notes.DROP_LAST),
            *_hf_optimizer(values),
            *_hf_precision(values),
            *_hf_smoothing(values),
            *_hf_saving(values),
        ),
    )


def _hf_length(values: Values) -> tuple[SettingLine, ...]:
    key = "num_train_epochs" if values.by_epochs else "max_steps"
    return (SettingLine(key, values.task.length, notes.length(values)),)


def _hf_optimizer(values: Values) -> tuple[SettingLine | SettingGroup, ...]:
    task = values.task
    if values.by_epochs:
        warmup = SettingLine("warmup_ratio", values.warmup_ratio, notes.warmup(values))
    else:
        warmup = SettingLine("warmup_steps", values.warmup, notes.warmup(values))
    return (
        SettingLine("optim", "adamw_torch", notes.OPTIMIZER),
        SettingLine("learning_rate", values.lr, notes.rate(values)),
        SettingLine("lr_scheduler_type", "cosine_with_min_lr", notes.schedule()),
        SettingGroup(
            "lr_scheduler_kwargs", (SettingLine("min_lr", values.floor, notes.floor(values)),)
        ),
        warmup,
        SettingLine("weight_decay", task.weight_decay, notes.decay(values)),
        SettingLine("adam_beta2", task.beta2, notes.BETA2),
        SettingLine("adam_epsilon", 1e-8, notes.eps(values)),
        SettingLine("max_grad_norm", values.clip, notes.clip(values)),
    )


def _hf_precision(values: Values) -> tuple[SettingLine, ...]:
    other = "Only one of the two; the Accelerate or DeepSpeed file beside it has to agree."
    return (
        SettingLine("bf16", values.precision == "bf16", notes.precision(values)),
        SettingLine("fp16", values.precision == "fp16", other),
    )


def _hf_smoothing(values: Values) -> tuple[SettingLine, ...]:
    if values.task.smoothing is None:
        return ()
    return (SettingLine("label_smoothing_factor", values.task.smoothing, notes.SMOOTHING),)


def _hf_saving(values: Values) -> tuple[SettingLine, ...]:
    if values.by_epochs:
        # The trainer knows no "every second epoch", so all levels save after each of them.
        epoch = (
            "A checkpoint after every epoch: what a run that breaks loses at most. For long "
            "epochs: steps, with save_steps."
        )
        saves = [SettingLine("save_strategy", "epoch", epoch)]
    else:
        saves = [
            SettingLine("save_strategy", "steps", "Counted in steps, as epochs may be long."),
            SettingLine("save_steps", values.save, notes.save(values)),
        ]
    return (
        *saves,
        SettingLine("save_total_limit", 3, notes.KEEP),
        SettingLine("logging_steps", 10, notes.LOG),
        SettingLine(
            "logging_nan_inf_filter",
            value=False,
            note="On by default, it leaves NaN out of the mean, and the log looks healthy.",
        ),
    )


def launch_script(values: Values) -> str:
    """Returns a bash script that checks, then trains under the guard."""
    return "\n".join(_launch_lines(values)) + "\n"


def _launch_lines(values: Values) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    header = notes.header(values, "A stable launch on several GPUs", "", "./launch.sh")
    yield from heading(header)
    yield "#"
    yield from comment("Every value can be set from outside: LEARNING_RATE=1e-5 ./launch.sh")
    yield "set -euo pipefail"
    yield 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    for name, value, note in _launch_variables(values):
        yield ""
        yield from comment(note)
        yield f'{name}="${{{name}:-{value}}}"'
    yield ""
    yield from comment("Faults that can be seen before the run. Remove only what you have read.")
    yield 'nanguard check "$TRAIN" "$here/accelerate.yaml"'
    yield ""
    yield from comment(
        "The names of the options are those of most training scripts for Accelerate; change them "
        "to those of yours. What you add to the command is handed on."
    )
    yield 'exec nanguard run --on-bad "$ON_BAD" -- \\'
    yield '  accelerate launch --config_file "$here/accelerate.yaml" "$TRAIN" \\'
    for name, _, _ in _launch_variables(values):
        if name not in ("TRAIN", "ON_BAD"):
            yield f'  --{name.lower()} "${name}" \\'
    yield '  "$@"'


def _launch_variables(values: Values) -> Iterator[tuple[str, str, str]]:
    task = values.task
    length = "NUM_TRAIN_EPOCHS" if values.by_epochs else "MAX_TRAIN_STEPS"
    warmup = "WARMUP_EPOCHS" if values.by_epochs else "LR_WARMUP_STEPS"
    save = "SAVE_EVERY_EPOCHS" if values.by_epochs else "CHECKPOINTING_STEPS"
    again = "Detection is on: a step whose loss or gradient is not finite is not made, on any rank."
    yield "TRAIN", "train.py", "The training script."
    yield "ON_BAD", values.on_bad, f"{again} skip goes on, rollback goes back, stop ends the run."
    yield "LEARNING_RATE", number(values.lr), notes.rate(values)
    yield "LR_SCHEDULER", "cosine", notes.schedule()
    yield warmup, str(values.warmup), notes.warmup(values)
    yield "MAX_GRAD_NORM", str(values.clip), notes.clip(values)
    yield "ADAM_WEIGHT_DECAY", number(task.weight_decay), notes.decay(values)
    yield "ADAM_EPSILON", number(1e-8), notes.eps(values)
    if task.smoothing is not None:
        yield "LABEL_SMOOTHING", str(task.smoothing), notes.SMOOTHING
    yield length, str(task.length), notes.length(values)
    yield "TRAIN_BATCH_SIZE", str(task.batch), notes.BATCH
    yield "GRADIENT_ACCUMULATION_STEPS", str(values.accumulation), notes.accumulation(values)
    yield save, str(values.save), notes.save(values)
    yield "SEED", "42", notes.SEED


_LIGHTNING_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# How far below the highest rate the schedule begins.
_ONE_CYCLE_START = 10.0


def lightning_config(values: Values) -> Config:
    """Returns what goes beside the configuration of the model and the data."""
    start = "python main.py fit --config model.yaml --config stable.yaml"
    header = notes.header(values, "Lightning, beside the file of the model", start)
    return Config(
        header,
        (
            SettingLine("seed_everything", 42, notes.SEED),
            _lightning_trainer(values),
            _lightning_optimizer(values),
            _lightning_scheduler(values),
        ),
    )


def _lightning_epochs(values: Values, length: int) -> int:
    """Returns a length of the task in epochs."""
    return length if values.by_epochs else max(1, length // EPOCH)


def _lightning_trainer(values: Values) -> SettingGroup:
    return SettingGroup(
        "trainer",
        (
            SettingLine("accelerator", "auto", "gpu, to fail where there is none."),
            SettingLine("devices", "auto", "All of them. The whole batch grows with it."),
            SettingLine(
                "precision", _LIGHTNING_PRECISION[values.precision], notes.precision(values)
            ),
            SettingLine(
                "max_epochs", _lightning_epochs(values, values.task.length), notes.length(values)
            ),
            *_lightning_part_of_epoch(values),
            SettingLine("accumulate_grad_batches", values.accumulation, notes.accumulation(values)),
            SettingLine("gradient_clip_val", values.clip, notes.clip(values)),
            SettingLine(
                "gradient_clip_algorithm", "norm", "By norm keeps the direction; value does not."
            ),
            SettingLine("log_every_n_steps", 10, notes.LOG),
            SettingLine(
                "detect_anomaly",
                value=False,
                note="nanguard explains bad steps only. Anomaly mode slows every step down.",
            ),
            _lightning_checkpoints(values),
        ),
    )


def _lightning_part_of_epoch(values: Values) -> tuple[SettingLine, ...]:
    if values.by_epochs:
        return ()
    return (
        SettingLine(
            "limit_train_batches",
            EPOCH * values.accumulation,
            f"An epoch is {EPOCH} steps here, as the command line moves the schedule by epochs.",
        ),
    )


def _lightning_checkpoints(values: Values) -> SettingGroup:
    if values.by_epochs or values.save >= EPOCH:
        often = SettingLine(
            "every_n_epochs", _lightning_epochs(values, values.save), notes.save(values)
        )
    else:
        often = SettingLine("every_n_train_steps", values.save, notes.save(values))
    keep = SettingLine("save_top_k", -1, f"-1 keeps all. {notes.KEEP}")
    last = SettingLine("save_last", value=True, note="A name that is always there to resume from.")
    return SettingGroup(
        "callbacks",
        (
            SettingLine("class_path", "lightning.pytorch.callbacks.ModelCheckpoint", ""),
            SettingGroup("init_args", (often, keep, last)),
        ),
        listed=True,
    )


def _lightning_optimizer(values: Values) -> SettingGroup:
    arguments = (
        SettingLine("lr", values.lr, notes.rate(values)),
        SettingLine("betas", (0.9, values.task.beta2), notes.BETA2),
        SettingLine("eps", 1e-8, notes.eps(values)),
        SettingLine("weight_decay", values.task.weight_decay, notes.decay(values)),
    )
    path = SettingLine("class_path", "torch.optim.AdamW", notes.OPTIMIZER)
    return SettingGroup("optimizer", (path, SettingGroup("init_args", arguments)))


def _lightning_scheduler(values: Values) -> SettingGroup:
    start = "The first epoch takes a tenth of the rate. Raise it if the very first steps break."
    end = f"The last rate is the first, divided by this. {notes.floor(values)}"
    arguments = (
        SettingLine("max_lr", values.lr, "The same as the optimizer's lr."),
        SettingLine(
            "total_steps", _lightning_epochs(values, values.task.length), "The same as max_epochs."
        ),
        SettingLine("pct_start", values.warmup_ratio, notes.warmup(values)),
        SettingLine("anneal_strategy", "cos", "Up and down along a cosine: no jump anywhere."),
        SettingLine("div_factor", _ONE_CYCLE_START, start),
        SettingLine("final_div_factor", round(values.lr / _ONE_CYCLE_START / values.floor, 4), end),
        SettingLine(
            "cycle_momentum", value=False, note="Otherwise AdamW's first beta would move too."
        ),
    )
    path = SettingLine("class_path", "torch.optim.lr_scheduler.OneCycleLR", "Warm-up, then cosine.")
    return SettingGroup("lr_scheduler", (path, SettingGroup("init_args", arguments)))


_AMP_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def plain_config(values: Values) -> Config:
    """Returns the settings of a run."""
    return Config(
        notes.header(values, "Settings of a training run", "python train.py --config CONFIG"),
        (
            SettingLine("seed", 42, notes.SEED),
            _plain_optimizer(values),
            _plain_scheduler(values),
            _plain_training(values),
            _plain_amp(values),
            *_plain_task(values),
            SettingGroup("data", (SettingLine("drop_last", value=True, note=notes.DROP_LAST),)),
            _plain_checkpoint(values),
            SettingGroup("logging", (SettingLine("every_n_steps", 10, notes.LOG),)),
        ),
    )


def _plain_optimizer(values: Values) -> SettingGroup:
    task = values.task
    return SettingGroup(
        "optimizer",
        (
            SettingLine("name", "adamw", notes.OPTIMIZER),
            SettingLine("lr", values.lr, notes.rate(values)),
            SettingLine("weight_decay", task.weight_decay, notes.decay(values)),
            SettingLine("betas", (0.9, task.beta2), notes.BETA2),
            SettingLine("eps", 1e-8, notes.eps(values)),
        ),
    )


def _plain_scheduler(values: Values) -> SettingGroup:
    return SettingGroup(
        "scheduler",
        (
            SettingLine("name", "cosine", notes.schedule()),
            SettingLine(f"warmup_{values.task.unit}", values.warmup, notes.warmup(values)),
            SettingLine(
                "warmup_start_factor",
                0.1,
                "The first steps take a tenth of the rate. Lower it if the very first steps break.",
            ),
            SettingLine("min_lr", values.floor, notes.floor(values)),
        ),
    )


def _plain_training(values: Values) -> SettingGroup:
    key = "epochs" if values.by_epochs else "max_steps"
    return SettingGroup(
        "training",
        (
            SettingLine(key, values.task.length, notes.length(values)),
            SettingLine("batch_size", values.task.batch, notes.BATCH),
            SettingLine(
                "gradient_accumulation_steps", values.accumulation, notes.accumulation(values)
            ),
            SettingLine("max_grad_norm", values.clip, notes.clip(values)),
        ),
    )


def _plain_amp(values: Values) -> SettingGroup:
    half = values.precision != "fp32"
    members = [SettingLine("enabled", half, notes.precision(values))]
    if half:
        members.append(
            SettingLine(
                "dtype", _AMP_TYPES[values.precision], "The type that autocast computes in."
            )
        )
    if values.precision == "fp16":
        members += [
            SettingLine(
                "grad_scaler", value=True, note="Small gradients are 0 without it. Never off."
            ),
            SettingLine("init_scale", 2**values.scale_power, notes.scale(values)),
        ]
    return SettingGroup("amp", tuple(members))


def _plain_task(values: Values) -> tuple[SettingGroup, ...]:
    """Returns what only some tasks have."""
    loss: list[SettingLine] = []
    if values.task.smoothing is not None:
        loss.append(SettingLine("label_smoothing", values.task.smoothing, notes.SMOOTHING))
    if values.name == "diffusion":
        loss.append(
            SettingLine(
                "max_weight",
                100.0,
                "Loss weights over diffusion time grow without bound near its ends; bound them "
                "here. Lower it if single time steps still rule the loss.",
            )
        )
    sections = [SettingGroup("loss", tuple(loss))] if loss else []
    if values.name == "multidataset":
        off = SettingLine(
            "enable_logits_masking",
            value=False,
            note="A wrong label map masks the target's own class, and the loss is inf. Turn it on "
            "again as the last step of the plan, with -1e4 instead of -inf and label_smoothing at "
            "0: smoothing gives masked classes a share of the target.",
        )
        sections.append(SettingGroup("datasets", (off,)))
    return tuple(sections)


def _plain_checkpoint(values: Values) -> SettingGroup:
    key = "every_n_epochs" if values.by_epochs else "every_n_steps"
    return SettingGroup(
        "checkpoint",
        (
            SettingLine(key, values.save, notes.save(values)),
            SettingLine("keep", 3, notes.KEEP),
            SettingLine("resume", "last_good", notes.RESUME),
        ),
    )


_FILE_NAMES = {"accelerate": "accelerate", "deepspeed": "ds_config", "lightning": "stable"}


_CONFIGS: dict[str, Callable[[Values], Config]] = {
    "accelerate": accelerate_config,
    "deepspeed": deepspeed_config,
    "hf": hf_config,
    "lightning": lightning_config,
    "plain": plain_config,
}


@dataclass(frozen=True, slots=True)
class File:
    """One file of a preset.

    Attributes:
        name: What it is called where nobody says otherwise.
        content: What it holds.
        notes: The notes on its values, for files that cannot hold comments.
        executable: Whether it is a program.
    """

    name: str
    content: str
    notes: str = ""
    executable: bool = False


def files_of(choice: Choice) -> tuple[File, ...]:
    """Returns the files of a preset; one, but for the launch."""
    if choice.family == "launch":
        launch = File("launch.sh", launch_script(choice.values), executable=True)
        return launch, _file(choice, "accelerate")
    return (_file(choice, choice.family),)


def _file(choice: Choice, family: str) -> File:
    config = _CONFIGS[family](choice.values)
    name = f"{_FILE_NAMES.get(family, 'train')}.{choice.language}"
    said = notes_of(config) if choice.language == "json" else ""
    return File(name, written(config, choice.language), said)
