"""Hugging Face ``TrainingArguments`` in a file, with a script's own keys beside them."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

TRAINING_ARGUMENTS = words(
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args "
    "weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules "
    "gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 "
    "bf16_full_eval fp16_full_eval tf32 gradient_checkpointing gradient_checkpointing_kwargs "
    "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
    "neftune_noise_alpha auto_find_batch_size logging_strategy logging_steps "
    "logging_first_step log_on_each_node logging_nan_inf_filter log_level disable_tqdm "
    "report_to run_name eval_strategy evaluation_strategy eval_steps eval_delay "
    "per_device_eval_batch_size prediction_loss_only eval_on_start eval_accumulation_steps "
    "include_for_metrics save_only_model save_strategy save_steps save_on_each_node "
    "save_total_limit save_safetensors push_to_hub hub_token hub_private_repo hub_model_id "
    "hub_strategy load_best_model_at_end metric_for_best_model greater_is_better "
    "ignore_data_skip full_determinism seed data_seed use_cpu no_cuda accelerator_config "
    "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor remove_unused_columns "
    "label_names length_column_name group_by_length ddp_find_unused_parameters "
    "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp_timeout fsdp fsdp_config "
    "deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint "
    "local_rank overwrite_output_dir logging_dir half_precision_backend fp16_opt_level "
    "fp16_backend use_mps_device jit_mode_eval torchdynamo ray_scope past_index tpu_num_cores "
    "include_inputs_for_metrics average_tokens_across_devices use_cpu_initialization"
)
_SCRIPT = words(
    "model_name_or_path model_revision torch_dtype attn_implementation trust_remote_code "
    "task_name dataset_name dataset_config_name train_file validation_file max_seq_length "
    "max_length preprocessing_num_workers pad_to_max_length max_train_samples use_peft lora_r "
    "lora_alpha lora_dropout lora_target_modules load_in_4bit load_in_8bit packing "
    "num_generations max_completion_length max_prompt_length beta temperature reward_weights "
    "use_vllm cutoff_len template finetuning_type stage dataset plot_loss model cache_dir"
)
_OWN = words(
    "per_device_train_batch_size per_device_eval_batch_size num_train_epochs "
    "lr_scheduler_type model_name_or_path do_train do_eval save_strategy save_total_limit "
    "evaluation_strategy eval_strategy logging_steps logging_strategy warmup_ratio "
    "max_grad_norm adam_beta1 adam_beta2 adam_epsilon save_steps output_dir "
    "load_best_model_at_end gradient_accumulation_steps fp16_full_eval label_smoothing_factor "
    "ddp_timeout overwrite_output_dir logging_nan_inf_filter dataloader_num_workers report_to "
    "optim dataloader_drop_last metric_for_best_model learning_rate"
)
_WRAPPERS = ("training_args", "training_arguments", "trainer_args", "train_args", "training")


def _matches(facts: Facts) -> bool:
    inner = (facts.sections.get(name, frozenset()) for name in _WRAPPERS)
    return any(len(keys & _OWN) >= 3 for keys in (facts.top, *inner))


def _parsed(facts: Facts) -> bool:
    """Returns whether the root holds the arguments, and not a section of a file of one's own."""
    return len(facts.top & _OWN) >= 3


FAMILY = Family(
    name="huggingface",
    order=60,
    matches=_matches,
    known=TRAINING_ARGUMENTS | _SCRIPT,
    closed=True,
    at_root=_parsed,
    script=_SCRIPT,
    clips=1.0,
    optimizer="adamw",
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)
