"""Reads JSON with its places, its repeated keys, and the comments people put into it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.config.node import KeyedNode, Node, Style, TreeBudget, add_entry
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from nanguard.source.text import Text

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r"[-+\w.]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NAMES: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


def read_json(text: Text) -> list[Node]:
    """Returns the root of a JSON text.

    Raises:
        SourceError: The text is not JSON, or it is too large or too deep.
    """
    return [_JsonReader(text).root()]


@dataclass(slots=True)
class _Open:
    """A collection that is being read."""

    node: Node
    seen: set[str] = field(default_factory=set)


class _JsonReader:
    """Goes through the text once; nesting is kept in a list and costs no stack."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.content = text.content
        self.at = 0
        self.budget = TreeBudget(text.path)
        self.open: list[_Open] = []
        self.key: KeyedNode | None = None

    def root(self) -> Node:
        """Returns the value of the whole text."""
        self._space()
        done = self._begin()
        while self.open:
            done = self._member()
        self._space()
        if self.at < len(self.content):
            raise self._broken("there is something behind the end of the value")
        return done

    def _member(self) -> Node:
        """Reads the next member of the innermost collection, or its end."""
        into = self.open[-1].node
        closing = "}" if into.kind == "mapping" else "]"
        self._space()
        if self._peek() == closing:
            self.at += 1
            into.end = self.at
            self.open.pop()
            self._separator()
            return into
        if into.kind == "mapping":
            self._key()
        node = self._begin()
        if node.kind == "scalar":
            self._separator()
        return node

    def _separator(self) -> None:
        if not self.open:
            return
        self._space()
        closing = "}" if self.open[-1].node.kind == "mapping" else "]"
        if self._peek() == ",":
            self.at += 1
        elif self._peek() != closing:
            raise self._broken(f"a comma or {closing!r} is missing")

    def _key(self) -> None:
        start = self.at
        name = self._string()
        line = self.text.position(start)[0]
        end = self.at
        self._space()
        if self._peek() != ":":
            raise self._broken("a colon is missing behind a key")
        self.at += 1
        self._space()
        self.key = KeyedNode(name, Node("scalar", end, end, line), start, end, line)

    def _begin(self) -> Node:
        """Reads a scalar, or the beginning of a collection."""
        start, line = self.at, self.text.position(self.at)[0]
        self.budget.node(line, len(self.open) + 1)
        first = self._peek()
        if first in ("{", "["):
            node = Node("mapping" if first == "{" else "sequence", start, start, line, flow=True)
            self.at += 1
            self._place(node)
            self.open.append(_Open(node))
            return node
        style: Style = "quoted" if first == '"' else "plain"
        value = self._string() if first == '"' else self._word()
        node = Node("scalar", start, self.at, line, value=value, style=style)
        node.raw = self.content[start : self.at]
        self._place(node)
        return node

    def _place(self, node: Node) -> None:
        if not self.open:
            return
        into = self.open[-1]
        if into.node.kind == "sequence":
            into.node.items.append(node)
        elif self.key is not None:
            self.key.node = node
            add_entry(into.node, self.key, into.seen)
            self.key = None

    def _string(self) -> str:
        found = _STRING.match(self.content, self.at)
        if found is None:
            raise self._broken("a text in double quotes is missing, or has no end")
        self.at = found.end()
        try:
            return str(json.loads(found.group()))
        except ValueError as error:
            raise self._broken("a text holds an unknown escape") from error

    def _word(self) -> Any:
        found = _WORD.match(self.content, self.at)
        word = found.group() if found else ""
        if word not in _NAMES and not _NUMBER.fullmatch(word):
            raise self._broken("a value is missing, or it is no JSON value")
        self.at += len(word)
        if word in _NAMES:
            return _NAMES[word]
        try:
            return float(word) if _NUMBER.fullmatch(word).lastindex else int(word)  # type: ignore[union-attr]
        except ValueError as error:
            problem = f"a number has {len(word)} digits, more than readers in Python take"
            raise self._broken(problem) from error

    def _space(self) -> None:
        found = _SPACE.match(self.content, self.at)
        if found:
            self.at = found.end()

    def _peek(self) -> str:
        return self.content[self.at : self.at + 1]

    def _broken(self, problem: str) -> SourceError:
        line = self.text.position(min(self.at, len(self.content)))[0]
        return SourceError(
            f"this is not JSON: {problem}",
            where=f"{self.text.path}:{line}",
            do="Correct the line, or leave the file out.",
        )
