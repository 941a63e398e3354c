"""fairseq: sections such as ``optimization``, and parts named by ``_name``; read by Hydra."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family


def _matches(facts: Facts) -> bool:
    named = any(leaf.entry.key == "_name" for leaf in facts.leaves)
    return named and bool(facts.top & {"optimization", "task", "criterion"})


FAMILY = Family(
    name="fairseq",
    order=65,
    matches=_matches,
    turns_text_into_numbers=True,
    clips=0.0,
    adds={"warmup_steps": "warmup_updates"},
)
