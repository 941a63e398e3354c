"""Tells training configurations from the many other files in the same languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.families import Facts, Family, family_of
from nanguard.check.config.keys import setting_for
from nanguard.check.config.names import normal, role, words

if TYPE_CHECKING:
    from nanguard.check.config.leaves import Leaf, Section

_CORE = frozenset(("lr", "optimizer", "other_lr"))
_SUPPORT = words(
    "max_steps max_epochs batch_size micro_batch_size global_batch_size weight_decay "
    "warmup_steps warmup_epochs warmup_ratio clip_norm clip_value scheduler fp16 bf16 "
    "precision mixed_precision amp betas accumulation eps save_steps save_epochs "
    "save_interval min_lr momentum beta1 beta2 param_dtype loss_scale"
)
# Keys at the root that say a file is something else, whatever else it holds.
_OTHER = words(
    "log_history architectures services apiversion api_version jobs weight_map added_tokens "
    "build_system dependencies devdependencies scripts repos nbformat cells tool "
    "image_processor_type feature_extractor_type tokenizer_class transformers_version "
    "best_model_checkpoint global_step openapi swagger mcpservers site_name"
)
_MEASURED = frozenset(
    ["loss", "val_loss", "train_loss", "eval_loss", "accuracy", "train_runtime", "val_acc"]
)
_ALWAYS = frozenset(("accelerate", "deepspeed", "axolotl"))


def facts_of(leaves: list[Leaf], sections: list[Section]) -> Facts:
    """Returns what a file's family is told by."""
    inner: dict[str, frozenset[str]] = {}
    keys: set[str] = set()
    top: frozenset[str] = frozenset()
    defaults = False
    for section in sections:
        own = frozenset(normal(entry.key) for entry in section.node.entries)
        keys |= own
        if not section.path:
            top = own
            listed = section.node.get("defaults")
            defaults = listed is not None and listed.kind == "sequence"
        elif len(section.path) == 1:
            inner[normal(section.path[0])] = own
    return Facts(top, frozenset(keys), inner, tuple(leaves), defaults)


def is_training(facts: Facts, family: Family | None = None) -> bool:
    """Returns whether a file configures a training run."""
    family = family or family_of(facts)
    if family.name in _ALWAYS:
        return True
    if facts.top & _OTHER:
        return False
    if family.name == "huggingface":
        return True
    if any(_measured(leaf) for leaf in facts.leaves):
        return False
    names = {
        setting_for(leaf.key, leaf.sections)
        for leaf in facts.leaves
        if role(leaf.sections) != "aside" and not leaf.node.entries
    }
    if names & _CORE and names & _SUPPORT:
        return True
    if len(names & _SUPPORT) >= 3 or "logits_masking" in names:
        return True
    return (family.name == "lightning" and bool(names & _SUPPORT)) or _counts_classes(facts)


def _counts_classes(facts: Facts) -> bool:
    places = {
        leaf.path for leaf in facts.leaves if setting_for(leaf.key, leaf.sections) == "num_labels"
    }
    return len(places) > 1 or ("nc" in facts.top and "names" in facts.keys)


def _measured(leaf: Leaf) -> bool:
    value = leaf.node.value
    return len(leaf.path) == 1 and leaf.key in _MEASURED and isinstance(value, float)
