"""Every rule there is: those of this package, found by walking it, and those of others."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from nanguard.rules.rule import Reads, Rule

KINDS: tuple[Reads, ...] = ("code", "config")
GROUP = "nanguard.rules"


@cache
def rules_for(reads: Reads) -> tuple[Rule[Any], ...]:
    """Returns the rules that read one kind of source, in the order of their codes.

    Only the modules of that kind are imported.
    """
    package = importlib.import_module(f"nanguard.rules.{reads}")
    found: list[Rule[Any]] = []
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        found += [
            member()
            for member in vars(loaded).values()
            if isinstance(member, type)
            and issubclass(member, Rule)
            and member.__module__ == loaded.__name__
            and "code" in vars(member)
        ]
    return tuple(sorted(found, key=lambda rule: rule.code))
