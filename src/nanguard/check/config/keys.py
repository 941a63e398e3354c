"""The usual names of the settings of a run, however written, and keys that are almost one."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.config.families import Family

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BREAKS = re.compile(r"[-\s./]+")


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


# Sections that only wrap the settings of the section around them.
TRANSPARENT = words(
    "params init_args args kwargs config cfg conf options opts settings hparams param "
    "parameters hyperparameters hyper_parameters hyperparams dict_kwargs arguments default"
)

ROLES: dict[str, frozenset[str]] = {
    role: words(names)
    for role, names in {
        "optimizer": "optimizer optim optimiser opt optimizers optimisers optimization "
        "optimisation adam adamw sgd adafactor lion muon rmsprop lamb lars radam nadam adagrad",
        "scheduler": "scheduler sched lr_scheduler schedule lr_schedule learning_rate_scheduler "
        "lr_schedulers schedulers lr_config learning_rate_schedule warmup lr",
        "clip": "clip clipping grad_clip gradient_clip gradient_clipping clip_grad grad_clipping "
        "clip_gradient gradient_clip_config clip_grad_norm clip_gradients",
        "fp16": "fp16 float16 half",
        "bf16": "bf16 bfloat16",
        "amp": "amp autocast automatic_mixed_precision amp_config",
        "precision": "mixed_precision precision mixed_precision_policy",
        "scaler": "scaler grad_scaler gradscaler loss_scaler loss_scale loss_scaling",
        "norm": "norm_cfg norm_layer norm normalization normalisation norm_config",
        "logits_masking": "logits_masking logit_masking logits_mask logit_mask",
        "model": "model network net backbone architecture arch encoder decoder head classifier "
        "module lit_model transformer unet",
        "data": "data dataset datasets dataloader datamodule data_module loader train_dataloader "
        "train_loader dataset_configs train_dataset train_data data_config",
        "loss": "loss criterion losses objective loss_fn loss_function",
        "checkpoint": "checkpoint checkpoints ckpt checkpointing checkpointer save saving "
        "model_checkpoint snapshot",
        "trainer": "train training trainer run runner experiment exp fit solver training_args "
        "training_arguments trainer_args learning common engine loop train_loop train_config "
        "hyp hydra_run "
        "regularization regularisation",
        "aside": "eval evaluation inference generation generate sampling sample sampler vllm "
        "rollout quantization quantization_config bnb_config bnb tokenizer logger loggers "
        "logging wandb test val valid validation predict export serving benchmark sweep hydra "
        "launcher flops_profiler tensorboard aio autotuning profiler profile search_space teacher "
        "ref reference generation_config metrics metric early_stopping visualizer val_dataloader "
        "test_dataloader val_loader test_loader eval_dataset val_dataset test_dataset demo deploy "
        "generation_kwargs eval_config log_history postprocessor postprocessing reranker retrieval",
    }.items()
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
# What a section without a name of its own may take from those around it.
_INHERITED = frozenset(("optimizer", "scheduler", "model", "data", "loss", "aside"))
# Quantities with a schedule of their own, which is none of the learning rate's.
_SCHEDULED = words(
    "weight weights loss losses noise beta betas kl temperature temp ema sigma alpha lambda gamma "
    "epsilon dropout mask masking curriculum wd decay sampling reward entropy exploration guidance "
    "coef coefficient penalty tau prob probability timestep timesteps diffusion sparsity pruning "
    "teacher forcing batch resolution task job momentum"
)
_RATE_WORDS = words("lr lrs learning rate optim optimizer optimiser opt optimizers")
_PARTS = (
    ("optim", "optimizer"),
    ("sched", "scheduler"),
    ("warmup", "scheduler"),
    # CLIP is a model as well.
    ("grad_clip", "clip"),
    ("gradclip", "clip"),
    ("clip_grad", "clip"),
    ("clipping", "clip"),
    ("checkpoint", "checkpoint"),
    ("dataset", "data"),
    ("dataloader", "data"),
    ("eval", "aside"),
    ("inference", "aside"),
)


@lru_cache(maxsize=8192)
def normal(key: str) -> str:
    """Returns a key in lower case with underscores, however it was written."""
    if key.startswith("_") and (key.endswith("_") or key == "_name"):
        return key.lower()  # such as _target_, which is no word of its own
    spaced = _CAMEL.sub("_", key) if not key.isupper() else key
    return _BREAKS.sub("_", spaced).strip("_").lower()


@lru_cache(maxsize=4096)
def role_of(section: str) -> str | None:
    """Returns what a section is about, by its name in normal form; None if the name is its own."""
    found = _ROLE_OF.get(section)
    if found or not section or section.startswith("["):
        return found
    found = next((role for part, role in _PARTS if part in section), None)
    parts = frozenset(section.split("_"))
    if found == "scheduler" and parts & _SCHEDULED and not parts & _RATE_WORDS:
        return "aside"
    return found


def role(sections: tuple[str, ...]) -> str | None:
    """Returns what the innermost section is about; wrappers take what is around them."""
    own = True
    for section in reversed(sections):
        if section in TRANSPARENT or section.startswith("["):
            continue
        found = role_of(section)
        if found and (own or found in _INHERITED):
            return found
        own = False
    return None


# What a setting is called here, and the names files have for it.
USUAL: dict[str, str] = {
    "optimizer": "optimizer optim optimiser opt optimizer_name optim_name opt_name optimizer_type "
    "optim_type optimizer_class optimizer_cls opt_type",
    "lr": "lr learning_rate base_lr max_lr peak_lr init_lr initial_lr lr_max lr_peak learningrate "
    "base_learning_rate max_learning_rate peak_learning_rate initial_learning_rate lr0 "
    "init_learning_rate warmup_max_lr lr_rate default_lr blr",
    "min_lr": "min_lr lr_min eta_min end_lr final_lr lr_end lr_final minimum_lr min_learning_rate "
    "minimum_learning_rate final_learning_rate end_learning_rate cosine_min_lr lr_floor "
    "min_lr_value cycle_min_lr stop_lr",
    "min_lr_ratio": "min_lr_ratio min_lr_rate final_lr_ratio lr_min_ratio lrf end_lr_ratio "
    "min_lr_factor final_lr_scale cosine_min_lr_ratio",
    "warmup_start_lr": "warmup_lr warmup_init_lr warmup_start_lr warmup_min_lr start_lr "
    "warmup_learning_rate lr_warmup_init warmup_bias_lr",
    "scheduler": "lr_scheduler_type scheduler lr_scheduler sched scheduler_type schedule "
    "lr_schedule lr_policy lr_decay_style scheduler_name lr_scheduler_name schedule_type "
    "learning_rate_scheduler",
    "warmup_steps": "warmup_steps num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters "
    "warmup_num_steps warmup_updates warmup_step warmup_iterations warm_up_steps warmup_iter "
    "n_warmup_steps linear_warmup_steps warmup_batches total_warmup_steps num_warmup_iters "
    "warmup_train_steps warmup_period",
    "warmup_epochs": "warmup_epochs warmup_epoch num_warmup_epochs lr_warmup_epochs n_warmup_epochs"
    " warm_up_epochs linear_warmup_epochs",
    "warmup_ratio": "warmup_ratio warmup_proportion warmup_fraction warmup_frac pct_start "
    "lr_warmup_fraction lr_warmup_ratio warmup_pct warmup_percent warmup_steps_ratio "
    "warmup_portion",
    "warmup": "warmup warm_up lr_warmup use_warmup t_warmup",
    "max_steps": "max_steps total_steps train_steps num_train_steps max_train_steps max_iters "
    "num_iterations train_iters max_updates max_update num_training_steps total_iters max_iter "
    "training_steps train_num_steps max_iterations total_num_steps n_iters total_training_steps "
    "total_iterations max_training_steps num_iters train_iterations niters total_updates "
    "max_train_iters max_num_iters num_updates max_num_steps",
    "max_epochs": "epochs num_epochs max_epochs num_train_epochs n_epochs max_epoch total_epochs "
    "train_epochs nepochs num_epoch total_epoch n_epoch max_num_epochs training_epochs "
    "max_train_epochs",
    "steps_per_epoch": "steps_per_epoch iters_per_epoch limit_train_batches batches_per_epoch "
    "num_batches_per_epoch",
    "updates_per_epoch": "max_steps_per_epoch updates_per_epoch max_updates_per_epoch",
    "fp16": "fp16 use_fp16 float16 half use_half enable_fp16 half_precision fp16_enabled",
    "bf16": "bf16 use_bf16 bfloat16 enable_bf16 bf16_enabled",
    "precision": "precision train_precision precision_mode compute_precision",
    "mixed_precision": "mixed_precision use_mixed_precision enable_mixed_precision",
    "amp": "amp use_amp enable_amp amp_enabled autocast use_autocast native_amp",
    "amp_dtype": "amp_dtype autocast_dtype mixed_precision_dtype mixed_precision_param "
    "mixed_precision_type amp_type compute_dtype",
    "amp_level": "opt_level amp_level amp_opt_level fp16_opt_level",
    "dtype": "dtype data_type train_data_type",
    "param_dtype": "param_dtype train_dtype torch_dtype model_dtype params_dtype parameter_dtype "
    "weights_dtype training_dtype model_precision pure_fp16 params_type",
    "loss_scale": "loss_scale static_loss_scale fp16_loss_scale amp_loss_scale",
    "dynamic_loss_scale": "dynamic_loss_scale dynamic_loss_scaling use_dynamic_loss_scale "
    "dynamic_loss_scaling_enabled",
    "initial_scale": "initial_loss_scale initial_scale_power init_scale initial_scale "
    "fp16_init_scale loss_scale_window initial_loss_scale_power fp16_scale_window growth_interval",
    "grad_scaler": "use_grad_scaler grad_scaler gradscaler use_scaler use_gradscaler scaler "
    "loss_scaler loss_scaling use_loss_scaling enable_grad_scaler use_loss_scaler amp_scaler",
    "clip_norm": "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad "
    "clip_grad_norm clip_norm grad_clip_norm grad_norm_clip gradient_clip gradient_clip_norm "
    "clip_gradient gradclip grad_clip_val clip_gradients clip_grad_max_norm max_gradient_norm "
    "clip_max_norm grad_max_norm max_norm_grad gradient_max_norm grad_norm_clipping "
    "gradient_clip_threshold grad_clipping gradient_norm_clip grad_clip_thresh "
    "grad_norm_max gradient_clipping_norm clip_gradient_norm grad_clip_max_norm clipnorm "
    "max_gradnorm grad_norm_limit gradient_clipping_threshold gradient_norm_clipping",
    "clip_value": "clip_grad_value grad_clip_value gradient_clip_value clip_gradient_value "
    "clipvalue grad_value_clip gradient_value_clip",
    "clip_algorithm": "gradient_clip_algorithm clip_mode clip_type clip_algorithm grad_clip_type",
    "micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu "
    "micro_batch_size per_gpu_batch_size per_gpu_train_batch_size batch_size_per_gpu "
    "samples_per_gpu device_batch_size local_batch_size batch_size_per_device micro_bs "
    "per_device_batch_size device_train_microbatch_size ims_per_gpu batch_size_per_rank "
    "batch_per_gpu batch_size_per_card train_batch_size_per_gpu imgs_per_gpu microbatch_size "
    "micro_batch batch_per_device per_gpu_batch per_rank_batch_size",
    "batch_size": "batch_size batch bs train_batch batchsize train_bs batch_sz mini_batch_size",
    "global_batch_size": "global_batch_size ims_per_batch total_batch_size effective_batch_size "
    "global_train_batch_size",
    "accumulation": "gradient_accumulation_steps accum_grad accumulate_grad_batches grad_accum "
    "gradient_accumulate_every accum_iter update_freq accumulation_steps grad_accum_steps "
    "accum_steps gradient_accumulation accumulate_grad_steps grad_accumulation_steps accum_freq "
    "grad_accumulation iters_to_accumulate accumulate_steps",
    "processes": "num_processes num_gpus n_gpus world_size n_gpu gpus nproc_per_node gpu_num "
    "reference_world_size",
    "devices": "devices",
    "weight_decay": "weight_decay wd l2_reg weightdecay adam_weight_decay",
    "momentum": "momentum sgd_momentum",
    "betas": "betas adam_betas adamw_betas optimizer_betas",
    "beta1": "beta1 adam_beta1 beta_1 adam_b1 b1",
    "beta2": "beta2 adam_beta2 beta_2 adam_b2 b2",
    "eps": "adam_epsilon adam_eps opt_eps optimizer_eps optim_eps adamw_eps adamw_epsilon "
    "optimizer_epsilon epsilon_adam",
    "label_smoothing": "label_smoothing label_smoothing_factor smoothing label_smooth lsm_weight",
    "ema_decay": "ema_decay ema_rate ema_momentum model_ema_decay",
    "num_labels": "num_labels num_classes n_classes nclass n_cls num_class n_labels nb_classes "
    "class_num number_of_classes nclasses num_cls nc classes_num",
    "label_names": "label_names class_names id2label labels_list class_list label2id names "
    "label_list classnames label_map labels class_labels",
    "batchnorm": "use_batchnorm batchnorm batch_norm use_batch_norm use_bn bn with_bn "
    "use_batch_normalization batch_normalization batchnorm_enabled",
    "norm": "norm norm_layer norm_type normalization normalisation norm_cfg normalization_layer "
    "norm_name",
    "sync_batchnorm": "sync_batchnorm sync_bn syncbn use_sync_bn use_syncbn convert_sync_batchnorm "
    "convert_to_sync_bn sync_batch_norm",
    "frozen_batchnorm": "freeze_bn frozen_bn norm_eval freeze_batchnorm bn_frozen freeze_norm "
    "bn_eval freeze_batch_norm frozen_batchnorm",
    "logits_masking": "enable_logits_masking logits_masking mask_logits use_logits_mask "
    "logit_masking use_logits_masking enable_logit_masking masked_logits logits_mask logit_mask "
    "use_logit_mask use_logit_masking apply_logits_mask class_logits_masking mask_class_logits "
    "dataset_logits_masking apply_logit_mask logits_mask_enabled enable_logits_mask",
    "logits_mask_value": "logits_mask_value mask_value logit_mask_value mask_fill_value "
    "masking_value masked_value logits_mask_fill logits_masking_value",
    "save_steps": "save_steps checkpointing_steps save_interval_updates save_every_steps "
    "save_every_n_steps every_n_train_steps ckpt_every_steps checkpoint_steps save_step_interval "
    "save_n_steps checkpoint_every_n_steps save_interval_steps ckpt_steps save_every_n_train_steps "
    "checkpoint_interval_steps save_iters save_every_iters checkpoint_every_steps "
    "ckpt_interval_steps",
    "save_epochs": "save_every_epochs save_every_n_epochs every_n_epochs save_epochs "
    "save_epoch_interval checkpoint_every_epochs save_freq_epochs save_interval_epochs "
    "save_epoch_freq ckpt_every_epochs checkpoint_epochs checkpoint_every_n_epochs",
    "save_interval": "save_interval save_every ckpt_every checkpoint_every checkpoint_interval "
    "save_freq checkpoint_freq save_and_sample_every ckpt_interval ckpt_freq snapshot_every "
    "save_frequency checkpoint_frequency save_period save_ckpt_every save_model_every "
    "snapshot_interval save_ckpt_freq ckpt_save_interval save_checkpoint_every",
    "save_strategy": "save_strategy",
    "checkpointing": "enable_checkpointing save_checkpoints save_checkpoint save_ckpt "
    "enable_checkpoint",
    "nan_filter": "logging_nan_inf_filter nan_inf_filter filter_nan filter_nan_loss nan_filter "
    "filter_nan_inf logging_nan_filter",
    "loss": "loss_type loss_name criterion_name loss_fn loss_function",
    "model": "model_name_or_path model_name base_model pretrained_model_name_or_path arch "
    "architecture model_type model_id pretrained_model backbone network_name model_path "
    "net_type encoder_name model_name_or_dir",
    "pretrained": "pretrained use_pretrained from_pretrained finetune fine_tune "
    "init_from_pretrained "
    "load_pretrained finetuning is_finetune pretrained_path finetune_from",
    "deepspeed": "deepspeed deepspeed_config deepspeed_config_file ds_config",
    "data_paths": "train_jsonl_list val_jsonl_list train_file validation_file train_data "
    "train_path "
    "data_path train_jsonl val_jsonl data_dir train_files dataset_path",
    "temperature": "temperature tau",
    "gamma": "gamma",
}
_NAMED = {name: setting for setting, names in USUAL.items() for name in names.split()}

# Short names that mean something only inside a section of one kind.
INSIDE: dict[tuple[str, str], str] = {
    **{
        ("optimizer", name): "optimizer"
        for name in ["name", "type", "class", "cls", "algo", "kind", "algorithm"]
    },
    **{("optimizer", name): "optimizer" for name in ("_target_", "class_path", "_component_")},
    ("optimizer", "_name"): "optimizer",
    ("scheduler", "_name"): "scheduler",
    **{("optimizer", name): "eps" for name in ("eps", "epsilon")},
    ("optimizer", "clip"): "clip_norm",
    ("optimizer", "max_norm"): "clip_norm",
    ("optimizer", "decay"): "weight_decay",
    **{
        ("scheduler", name): "scheduler"
        for name in ["name", "type", "class", "cls", "policy", "kind"]
    },
    **{("scheduler", name): "scheduler" for name in ("_target_", "class_path", "_component_")},
    ("scheduler", "epochs"): "max_epochs",
    ("scheduler", "floor"): "min_lr",
    ("scheduler", "peak"): "lr",
    ("scheduler", "min"): "min_lr",
    ("scheduler", "max"): "lr",
    ("scheduler", "base"): "lr",
    ("scheduler", "final"): "min_lr",
    **{
        ("clip", name): "clip_norm"
        for name in ["max_norm", "norm", "max", "threshold", "value", "clip_norm"]
    },
    **{("clip", name): "clip_switch" for name in ("enabled", "enable", "use")},
    **{("clip", name): "clip_algorithm" for name in ("type", "mode", "algorithm")},
    ("trainer", "clip"): "clip_norm",
    ("trainer", "max_norm"): "clip_norm",
    ("trainer", "steps"): "max_steps",
    ("trainer", "iters"): "max_steps",
    ("trainer", "iterations"): "max_steps",
    ("trainer", "num_steps"): "max_steps",
    ("trainer", "epoch"): "max_epochs",
    **{(role, "enabled"): role for role in ("fp16", "bf16", "amp")},
    **{(role, "enable"): role for role in ("fp16", "bf16", "amp")},
    **{(role, "use"): role for role in ("fp16", "bf16", "amp")},
    ("precision", "enabled"): "amp",
    ("precision", "enable"): "amp",
    **{("amp", name): "amp_dtype" for name in ("dtype", "type", "precision")},
    **{("precision", name): "amp_dtype" for name in ("dtype", "type", "param_dtype", "mode")},
    ("model", "dtype"): "param_dtype",
    ("model", "precision"): "param_dtype",
    ("scaler", "enabled"): "grad_scaler",
    ("scaler", "enable"): "grad_scaler",
    ("scaler", "init_scale"): "initial_scale",
    **{("model", name): "model" for name in ("name", "type", "kind", "class_path", "_target_")},
    **{("model", name): "model" for name in ("_component_", "cell", "pretrained_model_name")},
    **{
        ("checkpoint", name): "save_interval" for name in ["interval", "every", "frequency", "freq"]
    },
    **{("checkpoint", name): "save_steps" for name in ["every_n_steps", "steps", "every_steps"]},
    ("checkpoint", "enabled"): "checkpointing",
    ("checkpoint", "enable"): "checkpointing",
    ("checkpoint", "epochs"): "save_epochs",
    **{("loss", name): "loss" for name in ("type", "name", "kind")},
    **{("norm", name): "norm" for name in ("type", "name", "kind")},
    **{("logits_masking", name): "logits_masking" for name in ("enabled", "enable", "use")},
    **{("logits_masking", name): "logits_mask_value" for name in ("value", "mask_value", "fill")},
    ("data", "classes"): "num_labels",
    ("model", "classes"): "num_labels",
}
_WARMUP = {
    **dict.fromkeys(
        ["steps", "iters", "num_steps", "updates", "iterations", "total_iters"], "warmup_steps"
    ),
    "epochs": "warmup_epochs",
    **dict.fromkeys(("ratio", "fraction", "proportion"), "warmup_ratio"),
    "start_factor": "warmup_start_factor",
    "enabled": "warmup",
}
_PREFIXES = (
    "train_",
    "training_",
    "trainer_",
    "optim_",
    "optimizer_",
    "opt_",
    "run_",
    "scheduler_",
)
_DROPOUT = re.compile(
    r"(?:^|_)(?:dropout|droppath|drop_path|layerdrop|pdrop|(?<!lr_)(?<!rate_)(?<!step_)(?<!last_)drop)"
    r"(?:$|_(?:rate|prob|p|ratio|probability)$)"
    r"|^drop_rate$|_drop_rate$|(?:^|_)drop_prob$"
)
_RATE = re.compile(r"(?:^|_)(?:lr|learning_rate)(?:_[a-z0-9]+)?$")
_NO_RATE = re.compile(
    r"sched|decay|warm|min|type|policy|ratio|mul|scale|factor|step|gamma|config|kwargs|range|find"
    r"|monitor|log|end|final|auto|iters|epoch|update|power|plateau|patience|style|group|reduce|layer"
    r"|beta|schedule|name|args|cycle|drop|max_|momentum|eta|loss|period|curve"
)


# Names that say nothing of a learning rate themselves.
_BARE = words("floor peak min max base final")
_SHAPE = re.compile(r"cos|linear|poly|exp|plateau|cycl|constant|const|step|warm|restart")


def _schedules_rate(sections: tuple[str, ...]) -> bool:
    """Returns whether a section is the schedule of a learning rate, by its name and place."""
    named = [part for part in sections if part not in TRANSPARENT and not part.startswith("[")]
    if any(_RATE_WORDS.intersection(part.split("_")) for part in named[-2:]):
        return True
    if len(named) > 1 and role_of(named[-1]) is None and _SHAPE.search(named[-1]):
        named.pop()
    around = {role_of(part) for part in named[:-1]}
    return named[-1] in ROLES["scheduler"] and around.isdisjoint(("loss", "data", "model"))


def setting_for(key: str, sections: tuple[str, ...]) -> str | None:
    """Returns which setting a key is, by its name and the section it stands in.

    Args:
        key: The key in normal form.
        sections: The sections around it, outermost first, in normal form.
    """
    where = role(sections)
    if sections and "warm" in sections[-1] and key in _WARMUP:
        return _WARMUP[key]
    inside = INSIDE.get((where or "", key))
    if inside and where == "scheduler" and key in _BARE and not _schedules_rate(sections):
        return None
    if inside:
        return inside
    if where == "aside":
        return None
    found = _NAMED.get(key) or _short(key, where)
    if found:
        return found
    for prefix in _PREFIXES:
        if key.startswith(prefix) and key[len(prefix) :] in _NAMED:
            return _NAMED[key[len(prefix) :]]
    if _DROPOUT.search(key):
        return "dropout"
    if _RATE.search(key) and not _NO_RATE.search(key):
        return "other_lr"
    return None


def _short(key: str, where: str | None) -> str | None:
    """Returns the setting of a short name that is a setting only where no section claims it."""
    if where is None and key in ("clip", "steps", "iterations"):
        return {"clip": "clip_norm"}.get(key, "max_steps")
    return None


# Words of other meanings, or other spellings, that are one letter away from a word of a setting.
_WORDS = words(
    "patch match latch hatch catch step steps stem stems delay decays trail brain grain "
    "trains trainer macro micros model models modal mode modes weights height weighted mixer "
    "fixed mixes rates ratios rated gate date scales scaled scaler stale scalar norms form "
    "forms normed clips clipped flip chip slip crop grads graph grid grade masks masked mask "
    "losses lost less cross label labels class classes save saved wave size sizes sized epoch "
    "epochs optimiser optimisers optimisation optimization optimizers schedulers scheduled "
    "schedule schedules smooth smoothed moment momenta devices batches batched logits logit "
    "dropped dropouts warm warmups warmed precise precisions accumulate accumulated gradients "
    "gradual learned learner value valued values clipping dtypes types typed names named "
    "counts count point points private interval intervals frequencies regularisation "
    "regularization normalisation normalization restart restarts initial final minimal "
    "maximal limit limits latent latents parameter parameters process processes processed "
    "update updates updated iteration iterations data date rank ranks world word words words_ "
    "total totals stops start starts state states stage stages steep"
)
_MIN_WORD = 5


def intended(key: str, family: Family, *, root: bool, closed: bool = True) -> str | None:
    """Returns the known key that a key is a misspelling of; None if it is fine or unknown.

    Args:
        key: The key in normal form.
        family: The family of the file.
        root: Whether it stands where the family's own keys stand.
        closed: Whether the family's reader reads the file there, and no program of the user's.
    """
    if len(key) < _MIN_WORD or key in _usual() or key in family.known:
        return None
    if root and family.known:
        found = _near_key(key, family, closed=closed and family.closed)
        if found:
            return found
    return _near_words(key)


@lru_cache(maxsize=2048)
def _near_words(key: str) -> str | None:
    """Returns the usual key that differs in one word, which is no word itself."""
    parts = key.split("_")
    for at, word in enumerate(parts):
        if word in _words() or word in _WORDS or not word.isalpha() or len(word) < 4:
            continue
        for right in _words():
            if _slip(word, right):
                whole = "_".join([*parts[:at], right, *parts[at + 1 :]])
                if whole in _usual() or whole in _sections():
                    return whole
    return None


def _slip(word: str, right: str) -> bool:
    if len(right) < 4 or word == right or _british(word) == _british(right):
        return False
    if word + "s" == right or right + "s" == word or word + "d" == right:
        return False
    if _swapped(word, right):
        return True
    return len(right) >= _MIN_WORD + 1 and distance(word, right, 1) <= 1


def _near_key(key: str, family: Family, *, closed: bool) -> str | None:
    """Returns the family's key that differs in one word, in its ending, or in underscores."""
    squeezed, parts = key.replace("_", ""), key.split("_")
    for right in sorted(family.known):
        if len(right) < 6 or abs(len(right) - len(key)) > 2 or _british(key) == _british(right):
            continue
        shut = closed and right not in family.script
        if shut and (right in (key + "s", key + "es") or key == right + "s"):
            return right
        if shut and right.replace("_", "") == squeezed:
            return right
        if _one_word_off(parts, right.split("_"), least=3 if closed else 4):
            return right
    return None


def _one_word_off(parts: list[str], right: list[str], least: int) -> bool:
    if len(parts) != len(right):
        return False
    off = [(one, other) for one, other in zip(parts, right, strict=True) if one != other]
    if len(off) != 1:
        return False
    word, wanted = off[0]
    if word in _WORDS or word in _words() or not word.isalpha() or not wanted.isalpha():
        return False
    if word + "s" == wanted or wanted + "s" == word or len(wanted) < least:
        return False
    if _swapped(word, wanted):
        return True
    if len(wanted) <= 4:  # a letter typed twice, and nothing shorter than a word
        return len(parts) > 1 and len(word) == len(wanted) + 1 and distance(word, wanted, 1) == 1
    limit = 2 if len(wanted) >= 9 else 1
    return distance(word, wanted, limit) <= limit


def _swapped(word: str, right: str) -> bool:
    if len(word) != len(right):
        return False
    off = [at for at in range(len(word)) if word[at] != right[at]]
    if len(off) != 2 or off[1] != off[0] + 1:
        return False
    return word[off[0]] == right[off[1]] and word[off[1]] == right[off[0]]


def _british(word: str) -> str:
    return word.replace("ise", "ize").replace("isa", "iza").replace("our", "or")


def distance(one: str, other: str, limit: int) -> int:
    """Returns how many letters have to change, or more than the limit where it is passed."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        row = [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (letter != wanted)))
        if min(row) > limit:
            return limit + 1
        before = row
    return before[-1]


@cache
def _usual() -> frozenset[str]:
    return frozenset(name for names in USUAL.values() for name in names.split())


@cache
def _sections() -> frozenset[str]:
    return frozenset(name for names in ROLES.values() for name in names)


@cache
def _words() -> frozenset[str]:
    return frozenset(word for name in _usual() | _sections() for word in name.split("_") if word)
