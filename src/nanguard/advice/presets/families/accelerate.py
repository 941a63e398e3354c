"""The file that ``accelerate launch --config_file`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.tree import Config, Line
from nanguard.advice.presets.writing import number

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Values


def config(values: Values) -> Config:
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
    return Config((*header, "", inside), _members(values))


def _members(values: Values) -> tuple[Line, ...]:
    mixed = "no" if values.precision == "fp32" else values.precision
    return (
        Line("compute_environment", "LOCAL_MACHINE", "One machine, no cluster manager."),
        Line("distributed_type", "MULTI_GPU", "One process for each GPU; NO for a single one."),
        Line(
            "mixed_precision",
            mixed,
            f"{notes.precision(values)} The trainer's own amp, bf16 or fp16 setting has to agree.",
        ),
        Line("num_machines", 1, "More machines need main_process_ip and main_process_port."),
        Line("num_processes", 2, "As many as there are GPUs. The whole batch grows with it."),
        Line("machine_rank", 0, "Which of several machines this one is."),
        Line("gpu_ids", "all", "Such as 0,1 to leave GPUs to others."),
        Line("main_training_function", "main", "Only TPUs read it."),
        Line("rdzv_backend", "static", "c10d where machines come and go."),
        Line("same_network", value=True, note="Whether all machines are in one network."),
        Line("use_cpu", value=False, note="true for a trial without GPUs."),
        Line(
            "debug",
            values.level == "safe",
            "Compares the shapes of what ranks exchange, and fails instead of hanging. false once "
            "a run has held; it costs a little at every exchange.",
        ),
    )
