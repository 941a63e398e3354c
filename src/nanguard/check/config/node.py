"""The one tree that YAML, JSON and TOML are read into: values with their places in the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from nanguard.errors import SourceError

Kind = Literal["mapping", "sequence", "scalar"]
Style = Literal["plain", "quoted", "block"]

MAX_SIZE = 2_000_000
MAX_DEPTH = 100
MAX_NODES = 200_000


@dataclass(slots=True, eq=False)
class Node:
    """A value and where it stands.

    A value that is written once and named in several places is one node in several entries, so a
    text that multiplies itself by its own names stays as small as it was written.

    Attributes:
        kind: What it is.
        start: The offset of its first character.
        end: The offset behind its last character.
        line: The line it begins in, counted from 1.
        value: What a scalar means to the program that reads the file.
        raw: A scalar as it is written, quotes included.
        style: How a scalar is written.
        tag: The tag a value was given, where it says something.
        flow: Whether a collection is written with brackets.
        entries: The entries of a mapping, in the order of the file; merged ones come last.
        items: The members of a sequence.
        merged: Whether other mappings take their entries from this one.
    """

    kind: Kind
    start: int
    end: int
    line: int
    value: Any = None
    raw: str = ""
    style: Style = "plain"
    tag: str | None = None
    flow: bool = False
    entries: list[Entry] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    merged: bool = False
    _index: dict[str, Node] = field(default_factory=dict, repr=False)
    _indexed: int = field(default=0, repr=False)

    def get(self, key: str) -> Node | None:
        """Returns the value of a key: the last one written, as readers of files do."""
        if self._indexed != len(self.entries):
            self._index = {entry.key: entry.node for entry in self.effective()}
            self._indexed = len(self.entries)
        return self._index.get(key)

    def effective(self) -> list[Entry]:
        """Returns the entries that count: the last of each key, merged ones only where none is."""
        last: dict[str, Entry] = {}
        for entry in self.entries:
            if not entry.merged or entry.key not in last:
                last[entry.key] = entry
        return list(last.values())


@dataclass(slots=True, eq=False)
class Entry:
    """A key of a mapping with its value.

    Attributes:
        key: The key.
        node: Its value.
        start: The offset of the key's first character.
        end: The offset behind the key's last character.
        line: The line of the key, counted from 1.
        merged: Whether it came from another mapping through a merge key.
        repeats: Whether the same key stands in the same mapping further up.
    """

    key: str
    node: Node
    start: int
    end: int
    line: int
    merged: bool = False
    repeats: bool = False


class Budget:
    """Counts what a file makes, and refuses one that makes too much.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.nodes = 0

    def node(self, line: int, depth: int, count: int = 1) -> None:
        """Counts nodes at a depth.

        Raises:
            SourceError: There are too many of them, or they are nested too deep.
        """
        self.nodes += count
        if self.nodes > MAX_NODES:
            raise SourceError(
                f"the file holds more than {MAX_NODES} values",
                where=f"{self.path}:{line}",
                do="Leave it out: it is not a training configuration.",
            )
        if depth > MAX_DEPTH:
            raise SourceError(
                f"values are nested more than {MAX_DEPTH} levels deep",
                where=f"{self.path}:{line}",
                do="Leave it out: it is not a training configuration.",
            )


def add_entry(mapping: Node, entry: Entry, seen: set[str]) -> None:
    """Adds an entry, and notes whether its key was there before.

    Args:
        mapping: Where it belongs.
        entry: The entry.
        seen: The keys of the mapping so far.
    """
    entry.repeats = entry.key in seen
    seen.add(entry.key)
    mapping.entries.append(entry)
