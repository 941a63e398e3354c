"""Every rule there is: those of this package, found by walking it, and those of others."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.rule import Reads, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS: tuple[Reads, ...] = ("code", "config", "data", "checkpoint", "log")
GROUP = "nanguard.rules"

# What could not be loaded: whose, and why.
_broken: dict[str, str] = {}


@cache
def rules_for(reads: Reads) -> tuple[Rule[Any], ...]:
    """Returns the rules that read one kind of source, in the order of their codes.

    Only the modules of that kind are imported, and those of plugins.
    """
    found: dict[str, Rule[Any]] = {}
    for rule in _own(reads):
        found[rule.name] = rule
    for origin, rule in plugins():
        if rule.reads != reads:
            continue
        if rule.name in found or rule.code in {known.code for known in found.values()}:
            _broken[origin] = f"there is a rule {rule.name} ({rule.code}) already"
            continue
        found[rule.name] = rule
    return tuple(sorted(found.values(), key=lambda rule: rule.code))


def all_rules() -> tuple[Rule[Any], ...]:
    """Returns every rule."""
    return tuple(rule for reads in KINDS for rule in rules_for(reads))


def broken() -> dict[str, str]:
    """Returns the plugins and rule files that could not be loaded, and why."""
    return dict(_broken)


@cache
def plugins() -> tuple[tuple[str, Rule[Any]], ...]:
    """Returns the rules of other packages, each with the entry point it comes from."""
    if not _any_plugin():
        return ()
    from importlib.metadata import entry_points

    found: list[tuple[str, Rule[Any]]] = []
    for point in entry_points(group=GROUP):
        origin = f"plugin {point.name} ({point.value})"
        try:
            found += [(origin, rule) for rule in _rules_in(point.load())]
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is reported
            _broken[origin] = _said(error)
    return tuple(found)


def _own(reads: Reads) -> Iterator[Rule[Any]]:
    package = importlib.import_module(f"nanguard.check.{reads}.rules")
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}"
        try:
            loaded = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - one file less, and the report says so
            _broken[name] = _said(error)
            continue
        for member in vars(loaded).values():
            if _is_rule(member) and member.__module__ == name:
                yield member()


def _is_rule(member: object) -> bool:
    return isinstance(member, type) and issubclass(member, Rule) and "code" in vars(member)


def _rules_in(loaded: object) -> list[Rule[Any]]:
    """Returns the rules an entry point stands for: a rule, a class, or several of them."""
    members = list(loaded) if isinstance(loaded, (list, tuple, set, frozenset)) else [loaded]
    rules: list[Rule[Any]] = []
    for member in members:
        rule = member() if isinstance(member, type) else member
        if not isinstance(rule, Rule):
            raise TypeError(f"{type(rule).__name__} is no nanguard.check.rule.Rule")
        if rule.reads not in KINDS:
            raise TypeError(f"{rule.name} reads {rule.reads!r}, not one of {', '.join(KINDS)}")
        rules.append(rule)
    return rules


def _any_plugin() -> bool:
    """Returns whether any installed package may bring rules.

    ``importlib.metadata`` takes longer to import than a small file takes to check.
    """
    header = f"[{GROUP}]".encode()
    for place in dict.fromkeys(sys.path):
        folder = Path(place or ".")
        if folder.is_file():  # an archive, which is not worth looking into for a guess
            return True
        try:
            if any(header in file.read_bytes() for file in folder.glob("*-info/entry_points.txt")):
                return True
        except OSError:
            continue
    return False


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
