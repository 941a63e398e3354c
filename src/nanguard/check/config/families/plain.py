"""Nested settings under any of the usual names, read by a program of the user's."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family


def _matches(_: Facts) -> bool:
    return True


FAMILY = Family(
    name="plain",
    order=1000,
    matches=_matches,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)
