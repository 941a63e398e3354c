"""Key names: how they are written, and what part of a run a section is about."""

from __future__ import annotations

import re
from functools import lru_cache

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
_PARTS = (
    ("optim", "optimizer"),
    ("sched", "scheduler"),
    ("warmup", "scheduler"),
    ("clip", "clip"),
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
    return next((role for part, role in _PARTS if part in section), None)


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
