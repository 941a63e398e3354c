"""Reads TOML with its places; whether it is TOML at all is for the standard reader to say."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from nanguard.check.config.node import KeyedNode, Node, TreeBudget
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from nanguard.source.text import Text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BLANK = re.compile(r"[ \t]*")
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_LINE_END = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\r?\n|$)")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL
)
_WORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:[^\s,\]}#]+|[^\s,\]}#=\[{]+")
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][-+]?[0-9_]+)?|inf|nan)")


def read_toml(text: Text) -> list[Node]:
    """Returns the root table of a TOML text.

    Raises:
        SourceError: The text is not TOML, or it is too large or too deep.
    """
    reader = _TomlReader(text)
    root = reader.root()
    if not reader.repeated:  # which the standard reader refuses, and a rule wants to show
        must_be_toml(text)
    return [root]


def must_be_toml(text: Text) -> None:
    """Asks the standard reader.

    Raises:
        SourceError: It refuses the text.
    """
    if text.bom:  # of which nothing is left in what is handed over
        raise _broken(text, 1, "it begins with a byte order mark; save it as UTF-8 without one")
    try:
        tomllib.loads(text.content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found.group(1)) if found else 1
        raise _broken(text, line, str(error).split(" (at")[0]) from error


def _broken(text: Text, line: int, problem: str) -> SourceError:
    return SourceError(
        f"this is not TOML: {problem}",
        where=f"{text.path}:{line}",
        do="Correct the line, or leave the file out.",
    )


class _TomlReader:
    """Goes through the text once and notes where keys and values stand."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.content = text.content
        self.at = 0
        self.repeated = False
        self.known: dict[tuple[int, str], Node] = {}
        self.budget = TreeBudget(text.path)
        self.top = Node("mapping", 0, len(self.content), 1)

    def root(self) -> Node:
        """Returns the table of the whole text."""
        table = self.top
        self._skip(_SPACE)
        while self.at < len(self.content):
            if self.content.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table, 1)
            self._end_of_line()
            self._skip(_SPACE)
        return self.top

    def _header(self) -> Node:
        start = self.at
        many = self.content.startswith("[[", self.at)
        self.at += 2 if many else 1
        names = self._names()
        closing = "]]" if many else "]"
        if not self.content.startswith(closing, self.at):
            raise self._error(f"{closing!r} is missing")
        self.at += len(closing)
        table = self.top
        for name in names[:-1]:
            table = self._table(table, name)
        if not many:
            return self._table(table, names[-1])
        into = self.known.get((id(table), names[-1].key))
        if into is None:
            into = Node("sequence", start, self.at, self._line(start))
            self._add(table, names[-1], into)
        item = Node("mapping", start, self.at, self._line(start))
        into.items.append(item)
        return item

    def _table(self, table: Node, name: KeyedNode) -> Node:
        found = self.known.get((id(table), name.key))
        if found is None:
            found = Node("mapping", name.start, name.end, name.line)
            self._add(table, name, found)
        if found.kind == "sequence" and found.items:
            found = found.items[-1]
        if found.kind != "mapping":
            raise self._error(f"{name.key!r} is a value and cannot hold keys")
        return found

    def _add(self, table: Node, name: KeyedNode, node: Node) -> None:
        name.repeats = (id(table), name.key) in self.known
        self.known[id(table), name.key] = node
        self.repeated = self.repeated or name.repeats
        name.node = node
        table.entries.append(name)

    def _pair(self, table: Node, depth: int) -> None:
        names = self._names()
        if not self.content.startswith("=", self.at):
            raise self._error("'=' is missing behind a key")
        self.at += 1
        self._skip(_BLANK)
        for name in names[:-1]:
            table = self._table(table, name)
        self._add(table, names[-1], self._value(depth))

    def _names(self) -> list[KeyedNode]:
        names: list[KeyedNode] = []
        while True:
            self._skip(_BLANK)
            start = self.at
            found = _BARE.match(self.content, start) or _STRING.match(self.content, start)
            if found is None:
                raise self._error("a key is missing")
            self.at = found.end()
            word = found.group()
            line = self._line(start)
            self.budget.node(line, len(names) + 1)
            key = str(self._scalar(word)) if word[0] in "\"'" else word
            names.append(KeyedNode(key, self.top, start, self.at, line))
            self._skip(_BLANK)
            if not self.content.startswith(".", self.at):
                return names
            self.at += 1

    def _value(self, depth: int) -> Node:
        start, line = self.at, self._line(self.at)
        self.budget.node(line, depth)
        first = self.content[start : start + 1]
        if first == "[":
            return self._array(depth)
        if first == "{":
            return self._inline(depth)
        quoted = first in ("'", '"')
        found = (_STRING if quoted else _WORD).match(self.content, start)
        if found is None:
            raise self._error("a value is missing, or it has no end")
        self.at = found.end()
        node = Node("scalar", start, self.at, line, raw=found.group())
        node.style = "quoted" if quoted else "plain"
        node.value = self._scalar(found.group())
        return node

    def _array(self, depth: int) -> Node:
        node = Node("sequence", self.at, self.at, self._line(self.at), flow=True)
        self.at += 1
        self._skip(_SPACE)
        while not self.content.startswith("]", self.at):
            node.items.append(self._value(depth + 1))
            self._skip(_SPACE)
            if self.content.startswith(",", self.at):
                self.at += 1
                self._skip(_SPACE)
            elif not self.content.startswith("]", self.at):
                raise self._error("a comma or ']' is missing")
        self.at += 1
        node.end = self.at
        return node

    def _inline(self, depth: int) -> Node:
        node = Node("mapping", self.at, self.at, self._line(self.at), flow=True)
        self.at += 1
        self._skip(_SPACE)
        while not self.content.startswith("}", self.at):
            self._pair(node, depth + 1)
            self._skip(_SPACE)
            if self.content.startswith(",", self.at):
                self.at += 1
                self._skip(_SPACE)
            elif not self.content.startswith("}", self.at):
                raise self._error("a comma or '}' is missing")
        self.at += 1
        node.end = self.at
        return node

    def _scalar(self, word: str) -> Any:
        if word in ("true", "false"):
            return word == "true"
        if word[0] == "'" and not word.startswith("'''"):
            return word[1:-1]
        if word[0] == '"' and not word.startswith('"""') and "\\" not in word:
            return word[1:-1]
        try:
            if _WHOLE_NUMBER.fullmatch(word):
                return int(word)
            if _FLOAT.fullmatch(word):
                return float(word)
            value = tomllib.loads(f"value = {word}\n")["value"]
        except (ValueError, RecursionError) as error:
            raise self._error(f"{word[:40]!r} is no value") from error
        return value if isinstance(value, (str, int, float)) else word

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.content, self.at)
        if found:
            self.at = found.end()

    def _end_of_line(self) -> None:
        found = _LINE_END.match(self.content, self.at)
        if found is None:
            raise self._error("there is something behind the end of a value")
        self.at = found.end()

    def _line(self, offset: int) -> int:
        return self.text.position(offset)[0]

    def _error(self, problem: str) -> SourceError:
        return _broken(self.text, self._line(min(self.at, len(self.content))), problem)
