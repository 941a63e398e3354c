"""Families of configuration files: how each is recognised, its keys and its habits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from nanguard.check.config.keys import words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nanguard.check.config.document import Leaf


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What families are told apart by.

    Attributes:
        top: The keys at the root, in normal form.
        keys: Every key in the file, in normal form.
        sections: The keys of each section at the root, in normal form.
        leaves: The leaves.
        defaults: Whether the root has a list of defaults, as Hydra composes them.
    """

    top: frozenset[str]
    keys: frozenset[str]
    sections: Mapping[str, frozenset[str]]
    leaves: tuple[Leaf, ...]
    defaults: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of configuration files.

    Attributes:
        name: What it is called.
        order: Families are asked in this order whether a file is theirs.
        matches: Whether a file belongs to it.
        keys: What settings keys are that mean something else elsewhere, by section and key, both
            in normal form; an empty section is the root.
        known: Its own keys, among which a stranger that looks like one of them is a slip.
        closed: Whether its reader refuses or drops keys that are not its own.
        at_root: Whether a file hands its root to that reader; None if every file does.
        script: Those of its known keys that are a script's own, and not its reader's.
        turns_text_into_numbers: Whether its reader takes ``1e-5`` for a number.
        clips: The norm it clips to where nothing is set; 0 if its recipes do without; None if it
            leaves clipping to the user.
        optimizer: The optimizer it takes where none is set.
        partial: Whether a file of it describes only a part of a run.
        adds: How it writes settings that a fix adds.
    """

    name: str
    order: int
    matches: Callable[[FileFacts], bool]
    keys: Mapping[tuple[str, str], str | None] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    closed: bool = False
    at_root: Callable[[FileFacts], bool] | None = None
    script: frozenset[str] = frozenset()
    turns_text_into_numbers: bool = False
    clips: float | None = None
    optimizer: str | None = None
    partial: bool = False
    adds: Mapping[str, str] = field(default_factory=dict)


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
_HUGGINGFACE_SCRIPT = words(
    "model_name_or_path model_revision torch_dtype attn_implementation trust_remote_code "
    "task_name dataset_name dataset_config_name train_file validation_file max_seq_length "
    "max_length preprocessing_num_workers pad_to_max_length max_train_samples use_peft lora_r "
    "lora_alpha lora_dropout lora_target_modules load_in_4bit load_in_8bit packing "
    "num_generations max_completion_length max_prompt_length beta temperature reward_weights "
    "use_vllm cutoff_len template finetuning_type stage dataset plot_loss model cache_dir"
)
_HUGGINGFACE_OWN = words(
    "per_device_train_batch_size per_device_eval_batch_size num_train_epochs "
    "lr_scheduler_type model_name_or_path do_train do_eval save_strategy save_total_limit "
    "evaluation_strategy eval_strategy logging_steps logging_strategy warmup_ratio "
    "max_grad_norm adam_beta1 adam_beta2 adam_epsilon save_steps output_dir "
    "load_best_model_at_end gradient_accumulation_steps fp16_full_eval label_smoothing_factor "
    "ddp_timeout overwrite_output_dir logging_nan_inf_filter dataloader_num_workers report_to "
    "optim dataloader_drop_last metric_for_best_model learning_rate"
)
_TRAINING_SECTIONS = (
    "training_args",
    "training_arguments",
    "trainer_args",
    "train_args",
    "training",
)


def _is_huggingface(facts: FileFacts) -> bool:
    inner = (facts.sections.get(name, frozenset()) for name in _TRAINING_SECTIONS)
    return any(len(keys & _HUGGINGFACE_OWN) >= 3 for keys in (facts.top, *inner))


def _arguments_at_root(facts: FileFacts) -> bool:
    """Returns whether the root holds the arguments, and not a section of a file of one's own."""
    return len(facts.top & _HUGGINGFACE_OWN) >= 3


HUGGINGFACE = Family(
    name="huggingface",
    order=60,
    matches=_is_huggingface,
    known=TRAINING_ARGUMENTS | _HUGGINGFACE_SCRIPT,
    closed=True,
    at_root=_arguments_at_root,
    script=_HUGGINGFACE_SCRIPT,
    clips=1.0,
    optimizer="adamw",
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)


_ACCELERATE_KNOWN = words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes "
    "machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend "
    "same_network main_training_function enable_cpu_affinity deepspeed_config fsdp_config "
    "parallelism_config megatron_lm_config mpirun_config tpu_name tpu_zone tpu_use_cluster "
    "tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config iam_role_name image_uri "
    "profile region base_job_name pytorch_version transformers_version py_version "
    "sagemaker_inputs_file sagemaker_metrics_file additional_args downcast_bf16 "
    "dynamo_backend ipex_config gradient_accumulation_steps ipex xpu fp8_config "
    "use_mps_device deepspeed_hostfile ec2_instance_type"
)


def _is_accelerate(facts: FileFacts) -> bool:
    if "compute_environment" in facts.top:
        return True
    return "distributed_type" in facts.top and len(facts.top & _ACCELERATE_KNOWN) >= 3


ACCELERATE = Family(
    name="accelerate",
    order=10,
    matches=_is_accelerate,
    known=_ACCELERATE_KNOWN,
    closed=True,
    partial=True,
    adds={"clip_norm": "gradient_clipping"},
)


_AXOLOTL_OWN = words(
    "sequence_len micro_batch_size adapter datasets sample_packing dataset_prepared_path "
    "val_set_size load_in_4bit load_in_8bit pad_to_sequence_len train_on_inputs rl"
)
_AXOLOTL_KNOWN = TRAINING_ARGUMENTS | words(
    "base_model base_model_config model_type tokenizer_type trust_remote_code adapter "
    "datasets sequence_len sample_packing eval_sample_packing pad_to_sequence_len "
    "micro_batch_size eval_batch_size num_epochs optimizer lr_scheduler train_on_inputs "
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear "
    "lora_modules_to_save val_set_size dataset_prepared_path evals_per_epoch saves_per_epoch "
    "early_stopping_patience special_tokens flash_attention xformers_attention load_in_8bit "
    "load_in_4bit strict wandb_project wandb_entity wandb_watch wandb_name wandb_run_id "
    "wandb_log_model chat_template rl test_datasets loss_watchdog_threshold "
    "loss_watchdog_patience unfrozen_parameters cosine_min_lr_ratio float16 bfloat16 "
    "batch_size"
)


def _is_axolotl(facts: FileFacts) -> bool:
    return "base_model" in facts.top and len(facts.top & _AXOLOTL_OWN) >= 2


AXOLOTL = Family(
    name="axolotl",
    order=40,
    matches=_is_axolotl,
    keys={("", "float16"): None, ("", "bfloat16"): None},  # how weights are loaded
    known=_AXOLOTL_KNOWN,
    turns_text_into_numbers=True,
    clips=1.0,
    optimizer="adamw",
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)


_DEEPSPEED_KNOWN = words(
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
_DEEPSPEED_OWN = frozenset(("zero_optimization", "train_micro_batch_size_per_gpu"))


def _is_deepspeed(facts: FileFacts) -> bool:
    if facts.top & _DEEPSPEED_OWN:
        return True
    halves = [facts.sections.get(name, frozenset()) for name in ("fp16", "bf16")]
    return any("enabled" in half for half in halves) and len(facts.top & _DEEPSPEED_KNOWN) >= 2


DEEPSPEED = Family(
    name="deepspeed",
    order=20,
    matches=_is_deepspeed,
    keys={
        ("", "train_batch_size"): "global_batch_size",
        ("scheduler.params", "warmup_min_lr"): "warmup_start_lr",
    },
    known=_DEEPSPEED_KNOWN,
    closed=True,
    partial=True,
    adds={"clip_norm": "gradient_clipping"},
)


def _is_fairseq(facts: FileFacts) -> bool:
    named = any(leaf.entry.key == "_name" for leaf in facts.leaves)
    return named and bool(facts.top & {"optimization", "task", "criterion"})


FAIRSEQ = Family(
    name="fairseq",
    order=65,
    matches=_is_fairseq,
    turns_text_into_numbers=True,
    clips=0.0,
    adds={"warmup_steps": "warmup_updates"},
)


def composes(facts: FileFacts) -> bool:
    """Returns whether OmegaConf reads a file, which takes ``1e-5`` for a number."""
    if facts.defaults or "_target_" in facts.keys or "hydra" in facts.top:
        return True
    if facts.leaves and facts.leaves[0].document.text.content.startswith("# @package"):
        return True
    return any(
        leaf.entry.key == "_name"
        or (leaf.entry.node.kind == "scalar" and "${" in leaf.entry.node.raw)
        for leaf in facts.leaves
    )


HYDRA = Family(
    name="hydra",
    order=70,
    matches=composes,
    turns_text_into_numbers=True,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)


TRAINER_ARGUMENTS = words(
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
_LIGHTNING_OWN = words(
    "accelerator gradient_clip_val gradient_clip_algorithm accumulate_grad_batches "
    "limit_train_batches num_sanity_val_steps check_val_every_n_epoch val_check_interval "
    "enable_checkpointing sync_batchnorm log_every_n_steps"
)


def _is_lightning(facts: FileFacts) -> bool:
    trainer = facts.sections.get("trainer", frozenset())
    if "class_path" in facts.keys and "init_args" in facts.keys:
        return True
    return bool(trainer & _LIGHTNING_OWN) and len(trainer & TRAINER_ARGUMENTS) >= 2


LIGHTNING = Family(
    name="lightning",
    order=50,
    matches=_is_lightning,
    known=TRAINER_ARGUMENTS,
    closed=True,
    turns_text_into_numbers=True,
    adds={"clip_norm": "gradient_clip_val"},
)


_OPENNMT_OWN = words(
    "accum_count decoder_type encoder_type src_vocab tgt_vocab valid_steps share_vocab "
    "word_vec_size rnn_size transformer_ff save_checkpoint_steps src_subword_model decay_method"
)


def _is_opennmt(facts: FileFacts) -> bool:
    return len(facts.top & _OPENNMT_OWN) >= 3


OPENNMT = Family(
    name="opennmt",
    order=55,
    matches=_is_opennmt,
    keys={("", "model_dtype"): "precision", ("", "accum_steps"): None},
    turns_text_into_numbers=True,
    clips=0.0,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)


def _is_plain(_: FileFacts) -> bool:
    return True


PLAIN = Family(
    name="plain",
    order=1000,
    matches=_is_plain,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)


_TORCHTUNE_KNOWN = words(
    "output_dir model tokenizer checkpointer dataset seed shuffle batch_size epochs optimizer "
    "loss lr_scheduler max_steps_per_epoch gradient_accumulation_steps clip_grad_norm device "
    "compile optimizer_in_bwd resume_from_checkpoint enable_activation_checkpointing dtype "
    "metric_logger log_every_n_steps log_peak_memory_stats profiler log_level "
    "enable_activation_offloading custom_sharded_layers fsdp_cpu_offload num_warmup_steps"
)


def _is_torchtune(facts: FileFacts) -> bool:
    return "_component_" in facts.keys


TORCHTUNE = Family(
    name="torchtune",
    order=30,
    matches=_is_torchtune,
    keys={("", "dtype"): "param_dtype", ("", "loss"): "loss"},
    known=_TORCHTUNE_KNOWN,
    turns_text_into_numbers=True,
    optimizer="adamw",
    adds={"clip_norm": "clip_grad_norm", "warmup_steps": "num_warmup_steps"},
)


def _is_yacs(facts: FileFacts) -> bool:
    outer = {leaf.path[0] for leaf in facts.leaves}
    capitals = sum(name.isupper() for name in outer)
    return capitals >= 2 and capitals * 4 >= len(outer) * 3


YACS = Family(
    name="yacs",
    order=80,
    matches=_is_yacs,
    turns_text_into_numbers=True,
    adds={"clip_norm": "clip_grad", "warmup_steps": "warmup_steps"},
)


@cache
def families() -> tuple[Family, ...]:
    """Returns every family of this module, the most peculiar first."""
    found = [member for member in globals().values() if isinstance(member, Family)]
    return tuple(sorted(found, key=lambda family: family.order))


def family_of(facts: FileFacts) -> Family:
    """Returns the family that a file belongs to, by what it holds."""
    return next(family for family in families() if family.matches(facts))
