"""What a rule is, and every rule there is: those of this package and those of plugins."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Read = TypeVar("Read")
Reads = Literal["code", "config", "data", "checkpoint", "log"]


@dataclass(frozen=True, slots=True)
class Passes:
    """A text a rule is silent about, best one that looks like the fault and is not.

    Attributes:
        text: What the file holds.
        file: The name it has.
        made: Writes what no text can hold into a folder; the text then says what that is.
        beside: Other files in the same folder, by name.
    """

    text: str
    file: str = ""
    made: Callable[[Path], None] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fails:
    """A text a rule speaks about.

    Attributes:
        text: What the file holds.
        line: The line it speaks about, counted from 1; None for any.
        file: The name it has.
        fixed: What the file holds once the rule's fixes are applied; None if not compared.
        made: Writes what no text can hold into a folder; the text then says what that is.
        beside: Other files in the same folder, by name.
    """

    text: str
    line: int | None = None
    file: str = ""
    fixed: str | None = None
    made: Callable[[Path], None] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)


class Rule(ABC, Generic[Read]):
    """One fault, and how to see it before it breaks a run.

    The docstring is the rule's page: what it finds, then a paragraph that begins with *Why it
    breaks a run*, then what to write instead.

    Attributes:
        code: Stable code such as ``SRC012``; never used again for another rule.
        name: The fault in kebab-case; reads well after "allow".
        severity: How bad it is, unless a finding says otherwise.
        reads: The kind of source it looks at.
        seen_in: The address of a real incident.
        examples: Texts it is silent and not silent about.
        group: What it is about where that is not numbers; such a rule runs only if it, or its
            group, is asked for.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    reads: ClassVar[Reads]
    seen_in: ClassVar[str]
    examples: ClassVar[tuple[Passes | Fails, ...]]
    group: ClassVar[str] = ""

    @abstractmethod
    def check(self, source: Read) -> Iterator[Finding]:
        """Yields what is wrong with a source."""

    def finding(
        self,
        message: str,
        *,
        path: str,
        line: int | None,
        column: int | None = None,
        where: str | None = None,
        severity: Severity | None = None,
        fixes: tuple[Fix, ...] = (),
        **more: Any,
    ) -> Finding:
        """Returns a finding of this rule.

        Args:
            message: What was found, with the value.
            path: The file.
            line: The line, counted from 1.
            column: The column, counted from 1.
            where: The place in words.
            severity: Where this one is worse or milder than the rule in general.
            fixes: Ways to repair it, best first.
            more: Further fields of a finding.
        """
        return Finding(
            self.code,
            self.name,
            severity or self.severity,
            message,
            path=path,
            line=line,
            column=column,
            where=where,
            fixes=fixes,
            **more,
        )


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
