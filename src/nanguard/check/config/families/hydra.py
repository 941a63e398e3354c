"""Hydra and OmegaConf: defaults lists, ``_target_``, and references in ``${...}``."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family


def composes(facts: Facts) -> bool:
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


FAMILY = Family(
    name="hydra",
    order=70,
    matches=composes,
    turns_text_into_numbers=True,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)
