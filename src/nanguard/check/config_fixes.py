"""Which fixes of a configuration are made by default, and whether a copy is what was announced.

A default fix gives a key that is there another value, where it is known who reads it: a program
whose keys are known, or code of the project that mentions the key. A key that is renamed, added or
taken out needs ``--unsafe``: only whoever knows the program knows what it makes of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanguard.check.config.document import Document, read_document
from nanguard.errors import SourceError
from nanguard.source.edits import apply, fits
from nanguard.source.text import CONFIG_LIMIT, Text, decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.config.node import Node
    from nanguard.check.config_check import Configs
    from nanguard.findings import Finding, Fix

    Values = dict[str, str]

_MISSING = "(not there)"


class Announced:
    """The keys that the fixes of one file say they change.

    Attributes:
        path: The file.
        unsafe: Whether keys may be renamed, added and taken out.
        keys: The dotted keys of the fixes seen so far, by fix.
    """

    def __init__(self, path: str, *, unsafe: bool) -> None:
        self.path = path
        self.unsafe = unsafe
        self.keys: dict[Fix, frozenset[str]] = {}

    def allowed(self, found: Iterable[Finding], configs: Configs) -> list[Finding]:
        """Returns findings with those of their fixes that may be made.

        Args:
            found: What was found in the file.
            configs: The configurations it was found in.
        """
        text = configs.texts[self.path]
        before = values_of(configs.documents[self.path])
        parsed = any(self.path in run.parsed for run in configs.runs())
        return [
            replace(
                finding, fixes=tuple(self._fixes(finding, text, before, configs, parsed=parsed))
            )
            for finding in found
        ]

    def _fixes(
        self, finding: Finding, text: Text, before: Values, configs: Configs, *, parsed: bool
    ) -> Iterator[Fix]:
        for fix in finding.fixes:
            if not fix.edits or not fits(fix.edits, text.content):
                continue
            try:
                after = values_of(read_document(Text(text.path, apply(text.content, fix.edits))))
            except SourceError:
                continue
            keys = difference(before, after)
            seen = not configs.usage.known or parsed or all(map(configs.usage.reads, keys))
            if self.unsafe or (before.keys() == after.keys() and seen):
                self.keys[fix] = frozenset(keys)
                yield fix

    def check(self, original: bytes, copy: bytes, fixes: Iterable[Fix]) -> None:
        """Loads a file and its repaired copy the way programs do, and compares them.

        Raises:
            SourceError: The copy differs in more than the fixes said.
        """
        announced = frozenset().union(*(self.keys.get(fix, frozenset()) for fix in fixes))
        more = difference(loaded(self.path, original), loaded(self.path, copy)) - announced
        if more:
            listed = ", ".join(sorted(more)[:4])
            raise SourceError(
                f"the copy would differ in {listed} as well",
                where=self.path,
                do="Change the file by hand, and report this.",
            )

    def compare(self, original: Values | str, copy: Values | str, fixes: Iterable[Fix]) -> None:
        """Compares what the parser of a family made of a file and of its repaired copy.

        Parsers add defaults, and derive some values from others; what counts is what the file
        itself sets.

        Raises:
            SourceError: The parser refuses the copy, or more differs than the fixes said.
        """
        if isinstance(copy, str):
            raise SourceError(
                f"its parser refuses the copy: {copy}",
                where=self.path,
                do="Change the file by hand, and report this.",
            )
        announced = frozenset().union(*(self.keys.get(fix, frozenset()) for fix in fixes))
        last = {key.rpartition(".")[2] for key in announced}
        before = {} if isinstance(original, str) else original
        written = values_of(read_document(_text_of(self.path)))
        more = {
            key
            for key in difference(before, copy)
            if before and key in written and key.rpartition(".")[2] not in last
        }
        if more:
            raise SourceError(
                f"its parser reads {', '.join(sorted(more)[:4])} otherwise in the copy",
                where=self.path,
                do="Change the file by hand, and report this.",
            )


def difference(before: Values, after: Values) -> set[str]:
    """Returns the dotted keys in which two files differ."""
    return {
        key
        for key in before.keys() | after.keys()
        if before.get(key, _MISSING) != after.get(key, _MISSING)
    }


def _text_of(path: str) -> Text:
    return Text(path, decode(path, read_bytes(path, CONFIG_LIMIT), python=False).content)


def values_of(document: Document) -> Values:
    """Returns what a file sets, by dotted key."""
    found: Values = {}
    for number, root in enumerate(document.roots):
        found.update(_of_node(root, (f"{number}:",) if number else ()))
    return found


def loaded(path: str, data: bytes) -> Values:
    """Returns what a file sets as the usual parser of its language reads it.

    Where that is not installed or does not read the file, nanguard's own reader does.
    """
    text = data.decode("utf-8-sig", errors="replace")
    document = read_document(Text(path, text))
    try:
        roots = list(_roots(document.format, text))
    except Exception:  # noqa: BLE001 - a parser of somebody else's, on a file of somebody's
        return values_of(document)
    found: Values = {}
    for number, root in enumerate(roots):
        found.update(_of_value(root, (f"{number}:",) if number else ()))
    return found


def _roots(kind: str, text: str) -> Iterator[Any]:
    if kind == "json":
        yield json.loads(text)
    elif kind == "toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        yield tomllib.loads(text)
    else:
        import yaml

        yield from yaml.safe_load_all(text)


def _of_node(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if node.kind == "mapping":
        for entry in node.effective():
            yield from _of_node(entry.node, (*path, entry.key))
    elif node.kind == "sequence":
        for place, item in enumerate(node.items):
            yield from _of_node(item, (*path, str(place)))
    else:
        yield _dotted(path), node.raw.strip() or repr(node.value)


def _of_value(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _of_value(inner, (*path, str(key)))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _of_value(item, (*path, str(place)))
    else:
        yield _dotted(path), repr(value)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)
