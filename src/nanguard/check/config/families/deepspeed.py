"""DeepSpeed's JSON, which settles precision, clipping and batch size for the trainer beside it."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

_KNOWN = words(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer "
    "scheduler fp16 bf16 amp gradient_clipping zero_optimization "
    "zero_allow_untested_optimizer steps_per_print wall_clock_breakdown prescale_gradients "
    "gradient_predivide_factor communication_data_type sparse_gradients dump_state "
    "activation_checkpointing aio flops_profiler tensorboard wandb csv_monitor comms_logger "
    "data_efficiency curriculum_learning data_types compression_training elasticity "
    "autotuning progressive_layer_drop eigenvalue checkpoint memory_breakdown "
    "dataloader_drop_last communication_data_type zero_force_ds_cpu_optimizer "
    "sparse_attention pipeline hybrid_engine nebula seq_parallel_communication_data_type "
    "disable_allgather fp32_allreduce gradient_accumulation_dtype monitor_config bfloat16 "
    "torch_autocast tensor_parallel load_universal_checkpoint "
    "use_data_before_expert_parallelism"
)
_OWN = frozenset(("zero_optimization", "train_micro_batch_size_per_gpu"))


def _matches(facts: Facts) -> bool:
    if facts.top & _OWN:
        return True
    halves = [facts.sections.get(name, frozenset()) for name in ("fp16", "bf16")]
    return any("enabled" in half for half in halves) and len(facts.top & _KNOWN) >= 2


FAMILY = Family(
    name="deepspeed",
    order=20,
    matches=_matches,
    keys={
        ("", "train_batch_size"): "global_batch_size",
        ("scheduler.params", "warmup_min_lr"): "warmup_start_lr",
    },
    known=_KNOWN,
    closed=True,
    partial=True,
    adds={"clip_norm": "gradient_clipping"},
)
