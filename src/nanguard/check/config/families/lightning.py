"""Lightning's command line: a ``trainer`` section, and classes named by ``class_path``."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

TRAINER = words(
    "accelerator strategy devices num_nodes precision logger callbacks fast_dev_run "
    "max_epochs min_epochs max_steps min_steps max_time limit_train_batches limit_val_batches "
    "limit_test_batches limit_predict_batches overfit_batches val_check_interval "
    "check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing "
    "enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val "
    "gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler "
    "profiler detect_anomaly barebones plugins sync_batchnorm "
    "reload_dataloaders_every_n_epochs default_root_dir gpus auto_lr_find "
    "auto_scale_batch_size amp_level amp_backend track_grad_norm weights_summary "
    "resume_from_checkpoint distributed_backend progress_bar_refresh_rate replace_sampler_ddp "
    "tpu_cores num_processes"
)
_OWN = words(
    "accelerator gradient_clip_val gradient_clip_algorithm accumulate_grad_batches "
    "limit_train_batches num_sanity_val_steps check_val_every_n_epoch val_check_interval "
    "enable_checkpointing sync_batchnorm log_every_n_steps"
)


def _matches(facts: Facts) -> bool:
    trainer = facts.sections.get("trainer", frozenset())
    if "class_path" in facts.keys and "init_args" in facts.keys:
        return True
    return bool(trainer & _OWN) and len(trainer & TRAINER) >= 2


FAMILY = Family(
    name="lightning",
    order=50,
    matches=_matches,
    known=TRAINER,
    closed=True,
    turns_text_into_numbers=True,
    adds={"clip_norm": "gradient_clip_val"},
)
