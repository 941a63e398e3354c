"""yacs: keys in capitals; its reader evaluates texts that look like Python literals."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family


def _matches(facts: Facts) -> bool:
    outer = {leaf.path[0] for leaf in facts.leaves}
    capitals = sum(name.isupper() for name in outer)
    return capitals >= 2 and capitals * 4 >= len(outer) * 3


FAMILY = Family(
    name="yacs",
    order=80,
    matches=_matches,
    turns_text_into_numbers=True,
    adds={"clip_norm": "clip_grad", "warmup_steps": "warmup_steps"},
)
