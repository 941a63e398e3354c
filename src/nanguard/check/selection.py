"""Which rules look at which file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.check.catalogue import all_rules, rules_for
from nanguard.errors import SettingsError

if TYPE_CHECKING:
    from nanguard.check.rule import Reads, Rule

ALL = "ALL"
CODES = ("SRC", "CFG", "DAT", "CKP", "LOG")
UNUSED_IGNORE = ("CHK001", "unused-ignore")
_CODE = re.compile(r"[A-Za-z]{3}\d{0,3}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The rules of a check, named as users name them.

    Attributes:
        select: Names, codes or beginnings of codes of the rules to run; none for all.
        ignore: The same, of rules to leave out.
        per_file: Pairs of a pattern and what is left out of the files it matches.
        root: The folder the patterns are relative to.
        extend: Names, codes or groups of rules to run besides.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()
    root: str = "."
    extend: tuple[str, ...] = ()

    def wants(self, code: str, name: str, group: str = "") -> bool:
        """Returns whether a rule runs at all; it is named by itself, or by its group."""

        def named(words: tuple[str, ...]) -> bool:
            return any(stands_for(word, code, name) or word == group != "" for word in words)

        return not named(self.ignore) and (
            not self.select or named(self.select) or named(self.extend)
        )

    def rules(self, reads: Reads) -> tuple[Rule[Any], ...]:
        """Returns the rules of one kind that run."""
        return tuple(r for r in rules_for(reads) if self.wants(r.code, r.name, r.group))

    def ignored_in(self, path: str) -> tuple[str, ...]:
        """Returns what is left out of one file."""
        if not self.per_file:
            return ()
        return tuple(
            word
            for pattern, words in self.per_file
            if _matches(_relative(path, self.root), pattern)
            for word in words
        )

    def applies(self, code: str, name: str, path: str) -> bool:
        """Returns whether a rule that runs also runs on a file."""
        return not any(stands_for(word, code, name) for word in self.ignored_in(path))

    def checked_words(self) -> Selection:
        """Returns the selection itself, once every word in it is known to name a rule.

        Raises:
            SettingsError: A word names no rule.
        """
        words = {
            *self.select,
            *self.extend,
            *self.ignore,
            *(w for _, words in self.per_file for w in words),
        }
        if not words:
            return self
        known = [(rule.code, rule.name) for rule in all_rules()] + [UNUSED_IGNORE]
        groups = {rule.group for rule in all_rules()} - {""}
        for word in sorted(words):
            named = any(stands_for(word, code, name) for code, name in known)
            if not named and word not in groups:
                raise _unknown(word, [name for _, name in known])
        return self


def stands_for(word: str, code: str, name: str) -> bool:
    """Returns whether a word names a rule: by name, by code, or by the beginning of its code."""
    if word in (name, ALL):
        return True
    return _CODE.fullmatch(word) is not None and code.startswith(word.upper())


def _unknown(word: str, names: list[str]) -> SettingsError:
    import difflib

    near = difflib.get_close_matches(word, names, n=3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return SettingsError(
        f"there is no rule {word!r}.",
        where="the rules to select or ignore",
        do=f"{hint}Give a rule's name, its code, or the beginning of codes: {', '.join(CODES)}.",
    )


@lru_cache(maxsize=4096)
def _relative(path: str, root: str) -> str:
    import os.path

    full = os.path.abspath(path)  # noqa: PTH100 - a link is matched by its own name
    base = os.path.abspath(root)  # noqa: PTH100
    inside = full.startswith(base.rstrip(os.sep) + os.sep)
    return (os.path.relpath(full, base) if inside else full).replace(os.sep, "/")


def _matches(path: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        pattern += "**"
    if "/" not in pattern:
        return fnmatch(PurePath(path).name, pattern)
    return fnmatch(path, pattern) or fnmatch(path, pattern.replace("**/", ""))
