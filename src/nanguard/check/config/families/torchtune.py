"""torchtune recipes, read by OmegaConf; components are named by ``_component_``."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

_KNOWN = words(
    "output_dir model tokenizer checkpointer dataset seed shuffle batch_size epochs optimizer "
    "loss lr_scheduler max_steps_per_epoch gradient_accumulation_steps clip_grad_norm device "
    "compile optimizer_in_bwd resume_from_checkpoint enable_activation_checkpointing dtype "
    "metric_logger log_every_n_steps log_peak_memory_stats profiler log_level "
    "enable_activation_offloading custom_sharded_layers fsdp_cpu_offload num_warmup_steps"
)


def _matches(facts: Facts) -> bool:
    return "_component_" in facts.keys


FAMILY = Family(
    name="torchtune",
    order=30,
    matches=_matches,
    keys={("", "dtype"): "param_dtype", ("", "loss"): "loss"},
    known=_KNOWN,
    turns_text_into_numbers=True,
    optimizer="adamw",
    adds={"clip_norm": "clip_grad_norm", "warmup_steps": "num_warmup_steps"},
)
