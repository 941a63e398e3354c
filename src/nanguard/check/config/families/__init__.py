"""Families of configuration files: one file each, with what is peculiar to it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from nanguard.check.config.families.family import Facts, Family


@cache
def families() -> tuple[Family, ...]:
    """Returns every family, the most peculiar first; found by walking this package."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        member = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if isinstance(member, Family):
            found.append(member)
    return tuple(sorted(found, key=lambda family: family.order))


def family_of(facts: Facts) -> Family:
    """Returns the family that a file belongs to, by what it holds."""
    return next(family for family in families() if family.matches(facts))


__all__ = ["Facts", "Family", "families", "family_of"]
