"""The one tree that YAML, JSON and TOML are read into, and changes of the text it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nanguard.check.config.run_config import NUMBERS
from nanguard.errors import SourceError
from nanguard.findings import Edit

if TYPE_CHECKING:
    from nanguard.check.config.run_config import Misspelling, Repeated, Setting

Kind = Literal["mapping", "sequence", "scalar"]
Style = Literal["plain", "quoted", "block"]

MAX_CHARACTERS = 2_000_000
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
    entries: list[KeyedNode] = field(default_factory=list)
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

    def effective(self) -> list[KeyedNode]:
        """Returns the entries that count: the last of each key, merged ones only where none is."""
        last: dict[str, KeyedNode] = {}
        for entry in self.entries:
            if not entry.merged or entry.key not in last:
                last[entry.key] = entry
        return list(last.values())


@dataclass(slots=True, eq=False)
class KeyedNode:
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


class TreeBudget:
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


def add_entry(mapping: Node, entry: KeyedNode, seen: set[str]) -> None:
    """Adds an entry, and notes whether its key was there before.

    Args:
        mapping: Where it belongs.
        entry: The entry.
        seen: The keys of the mapping so far.
    """
    entry.repeats = entry.key in seen
    seen.add(entry.key)
    mapping.entries.append(entry)


_WORD_LIKE = re.compile(r"(?i)(?:y|n|yes|no|on|off|true|false|null|none|~|[-+.\d].*)")


def number_text(value: float) -> str:
    """Returns a number as every reader takes it for one, YAML 1.1 included."""
    if isinstance(value, int) and abs(value) >= 1 << 53:
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value)) if abs(value) >= 10 else f"{value:.1f}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    mantissa = mantissa.rstrip("0")
    return f"{mantissa}{'0' if mantissa.endswith('.') else ''}e{int(exponent):+d}"


def set_to(setting: Setting, value: Any) -> tuple[Edit, ...]:
    """Returns the change that gives a setting another value; none if it stands in another file.

    Args:
        setting: The setting.
        value: A boolean, a number, a text, or None.
    """
    node = setting.node
    if node.kind == "sequence" and len(node.items) == 1:
        node = node.items[0]
    if setting.home is not setting.document or node.kind != "scalar" or node.style == "block":
        return ()
    return (replace_node(node, value, setting.document.format),)


def set_member(setting: Setting, at: int, value: float) -> tuple[Edit, ...]:
    """Returns the change of one number of a list, or of a text such as ``(0.9, 0.95)``."""
    node = setting.node
    if setting.home is not setting.document:
        return ()
    if node.kind == "sequence":
        return (replace_node(node.items[at], value, setting.document.format),)
    found = list(NUMBERS.finditer(node.raw))
    if at >= len(found):
        return ()
    begin, end = found[at].span()
    return (Edit(node.start + begin, node.start + end, number_text(value)),)


def replace_node(node: Node, value: Any, kind: str) -> Edit:
    """Returns the change that gives a scalar another value."""
    text = _written(value, node, kind)
    return Edit(node.start, node.end, f" {text}" if node.start == node.end else text)


def _written(value: Any, node: Node, kind: str) -> str:
    if isinstance(value, bool):
        word = "true" if value else "false"
        return word.title() if kind == "yaml" and node.raw in ("True", "False") else word
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number_text(value)
    if value is None:
        return "null"
    quote = node.raw[:1] if node.raw[:1] in ("'", '"') else ""
    if kind != "yaml":
        quote = quote or '"'
    elif not quote and _WORD_LIKE.fullmatch(value):
        quote = "'"
    return f"{quote}{value}{quote}"


def add_after(sibling: Setting, key: str, value: Any) -> tuple[Edit, ...]:
    """Returns the change that adds a key behind another, written as that one is.

    Args:
        sibling: The setting it goes behind.
        key: The key in lower case with underscores.
        value: Its value.
    """
    entry, document = sibling.entry, sibling.document
    content, node = document.text.content, entry.node
    own = node.kind == "scalar" and node.style != "block" and node.start >= entry.end
    if entry.merged or not own or "\n" in content[entry.start : node.end]:
        return ()
    name = styled(key, sibling.entry.key)
    blank = _blank(node)
    if sibling.parent.flow or document.format == "json":
        return (_add_in_brackets(sibling, name, _written(value, blank, document.format)),)
    begin = content.rfind("\n", 0, entry.start) + 1
    indent = re.sub(r"[^\s]", " ", content[begin : entry.start])
    equals = " = " if document.format == "toml" else ": "
    end = content.find("\n", node.end)
    at = len(content) if end < 0 else end
    if at > 0 and content[at - 1] == "\r":
        at -= 1
    line_end = "\r\n" if content[at : at + 2] == "\r\n" else "\n"
    line = f"{line_end}{indent}{name}{equals}{_written(value, blank, document.format)}"
    return (Edit(at, at, line),)


def _add_in_brackets(sibling: Setting, name: str, value: str) -> Edit:
    entry, document = sibling.entry, sibling.document
    content, at = document.text.content, sibling.entry.node.end
    begin = content.rfind("\n", 0, entry.start) + 1
    alone = not content[begin : entry.start].strip()
    gap = "\n" + content[begin : entry.start] if alone else " "
    if document.format == "json":
        return Edit(at, at, f',{gap}"{name}": {value}')
    equals = " = " if document.format == "toml" else ": "
    return Edit(at, at, f",{gap}{name}{equals}{value}")


def _blank(node: Node) -> Node:
    return Node("scalar", node.start, node.end, node.line)


def styled(key: str, like: str) -> str:
    """Returns a key written the way another is: upper case, dashes."""
    if like.isupper():
        key = key.upper()
    return key.replace("_", "-") if "-" in like and "_" not in like else key


def rename(found: Misspelling) -> tuple[Edit, ...]:
    """Returns the change that spells a key right."""
    entry = found.entry
    raw = found.document.text.content[entry.start : entry.end]
    quote = raw[:1] if raw[:1] in ("'", '"') else ""
    return (Edit(entry.start, entry.end, f"{quote}{styled(found.right, entry.key)}{quote}"),)


def take_out(found: Repeated) -> tuple[Edit, ...]:
    """Returns the change that takes the earlier of two entries out; in YAML as a comment."""
    entry, document = found.first, found.document
    content = document.text.content
    begin = content.rfind("\n", 0, entry.start) + 1
    alone = not content[begin : entry.start].strip()
    if document.format == "json" or found.parent.flow:
        return _take_member(entry, content, begin if alone else entry.start)
    end = _end_of(entry, found.parent, content)
    if not alone or end is None:
        return ()
    lines = content[begin:end].split("\n")
    dotted = "\n".join(_commented(line) for line in lines)
    return (Edit(begin, end, dotted),)


def _commented(line: str) -> str:
    indent = len(line) - len(line.lstrip())
    return f"{line[:indent]}# {line[indent:]}" if line.strip() else line


def _end_of(entry: KeyedNode, parent: Node, content: str) -> int | None:
    """Returns the end of the last line of an entry: where the next entry's lines begin."""
    after = [other.start for other in parent.entries if other.start > entry.start]
    if entry.node.kind == "scalar" and entry.node.style != "block":
        end = content.find("\n", entry.node.end)
        return len(content) if end < 0 else end
    if not after:
        return None
    return content.rfind("\n", 0, min(after))


def _take_member(entry: KeyedNode, content: str, begin: int) -> tuple[Edit, ...]:
    comma = re.compile(r"\s*,[ \t]*(?:\r?\n)?").match(content, entry.node.end)
    if comma is None:
        return ()
    end = comma.end()
    if begin == entry.start:
        end = comma.start() + comma.group().index(",") + 1
        end += len(content[end:]) - len(content[end:].lstrip(" "))
    return (Edit(begin, end, ""),)
