"""axolotl's YAML; its schema turns text into numbers, and its trainer is that of transformers."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.families.huggingface import TRAINING_ARGUMENTS
from nanguard.check.config.names import words

_OWN = words(
    "sequence_len micro_batch_size adapter datasets sample_packing dataset_prepared_path "
    "val_set_size load_in_4bit load_in_8bit pad_to_sequence_len train_on_inputs rl"
)
_KNOWN = TRAINING_ARGUMENTS | words(
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


def _matches(facts: Facts) -> bool:
    return "base_model" in facts.top and len(facts.top & _OWN) >= 2


FAMILY = Family(
    name="axolotl",
    order=40,
    matches=_matches,
    keys={("", "float16"): None, ("", "bfloat16"): None},  # how weights are loaded
    known=_KNOWN,
    turns_text_into_numbers=True,
    clips=1.0,
    optimizer="adamw",
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)
