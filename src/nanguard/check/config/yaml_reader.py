"""Reads YAML as PyYAML's safe loader understands it, and keeps the places."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.config.node import KeyedNode, Node, Style, TreeBudget, add_entry
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from nanguard.source.text import Text

_PROPERTIES = re.compile(r"(?:[&!][^\s,\[\]{}]*[ \t\r\n]+)+")
_PREFIX = "tag:yaml.org,2002:"
_CONSTRUCTED = frozenset(_PREFIX + name for name in ("null", "bool", "int", "float", "timestamp"))
# What collections can be made into, and what of them is no key.
_MAPPINGS = frozenset(_PREFIX + name for name in ("map", "set"))
_SEQUENCES = frozenset(_PREFIX + name for name in ("seq", "omap", "pairs"))
_COLLECTIONS, _PAIRS = _MAPPINGS | _SEQUENCES, _SEQUENCES - {_PREFIX + "seq"}
_OF_PYTHON = _PREFIX + "python/"
_MERGE, _VALUE, _BINARY = _PREFIX + "merge", _PREFIX + "value", _PREFIX + "binary"
_SCALARS = _CONSTRUCTED | {_PREFIX + "str", _BINARY}
_STYLES: dict[str | None, Style] = {"'": "quoted", '"': "quoted", "|": "block", ">": "block"}


def read_yaml(text: Text) -> list[Node]:
    """Returns the root of each document in a YAML text.

    Only events are taken from PyYAML, never objects: nothing is constructed from a tag, a name for
    a value stands for the one node it names, and nesting costs no stack.

    Raises:
        SourceError: The text is not YAML, or it is too large or too deep.
    """
    import yaml  # costs more than all the rest, and only YAML files need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(text, TreeBudget(text.path))
    try:
        for event in yaml.parse(text.content, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise _broken(text, line, str(problem)) from error
    except UnicodeError as error:
        raise _broken(text, 1, "characters that no text may hold") from error
    return builder.roots


def _broken(text: Text, line: int, problem: str) -> SourceError:
    return SourceError(
        f"this is not YAML: {problem}",
        where=f"{text.path}:{line}",
        do="Correct the line, or leave the file out.",
    )


@dataclass(slots=True)
class _Open:
    """A collection that is being read."""

    node: Node
    key: Node | None = None
    seen: set[str] = field(default_factory=set)
    merges: list[Node] = field(default_factory=list)

    @property
    def wants_key(self) -> bool:
        """Whether the next value is a key."""
        return self.node.kind == "mapping" and self.key is None


def _is_standard(tag: str | None) -> bool:
    """Returns whether a tag is one of YAML itself, of which every loader knows the same ones."""
    return tag is not None and tag.startswith(_PREFIX) and not tag.startswith(_OF_PYTHON)


class _Builder:
    """Makes nodes of events."""

    def __init__(self, text: Text, budget: TreeBudget) -> None:
        import yaml

        self.text = text
        self.budget = budget
        self.roots: list[Node] = []
        self.anchors: dict[str, Node] = {}
        self.open: list[_Open] = []
        self.resolve: Any = yaml.resolver.Resolver().resolve
        self.constructor = yaml.constructor.SafeConstructor()
        self.scalar_node = yaml.ScalarNode

    def take(self, event: Any) -> None:
        """Takes the next event."""
        kind = type(event).__name__
        if kind == "ScalarEvent":
            self._place(self._named(event, self._scalar(event)))
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self._begin(event, mapping=kind == "MappingStartEvent")
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._finish(event)
        elif kind == "AliasEvent":
            self._alias(event)
        elif kind == "DocumentStartEvent":
            self.anchors.clear()

    def _begin(self, event: Any, *, mapping: bool) -> None:
        start = event.start_mark.index
        line = event.start_mark.line + 1
        self.budget.node(line, len(self.open) + 1)
        node = Node("mapping" if mapping else "sequence", start, start, line)
        node.flow = bool(event.flow_style)
        node.tag = event.tag
        if _is_standard(event.tag) and event.tag not in (_MAPPINGS if mapping else _SEQUENCES):
            raise self._refused(event, f"a {node.kind} is no {event.tag.removeprefix(_PREFIX)}")
        self.open.append(_Open(self._named(event, node)))

    def _finish(self, event: Any) -> None:
        done = self.open.pop()
        if done.node.tag in _PAIRS and any(
            item.kind != "mapping" or len(item.entries) != 1 for item in done.node.items
        ):
            raise self._refused(event, "a list of pairs holds something else")
        done.node.end = event.end_mark.index
        for source in done.merges:
            self._merge(done, source)
        self._place(done.node)

    def _named(self, event: Any, node: Node) -> Node:
        if event.anchor is not None:
            if event.anchor in self.anchors:
                raise self._refused(event, f"{event.anchor!r} names two values")
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: Any) -> None:
        line = event.start_mark.line + 1
        node = self.anchors.get(event.anchor)
        if node is None:
            raise self._refused(event, f"nothing is named {event.anchor!r}")
        self.budget.node(line, len(self.open) + 1)
        if node.kind == "scalar" and node.style == "plain" and node.value in ("<<", "="):
            raise self._refused(event, f"{node.value} is no value")
        self._place(node, event)

    def _scalar(self, event: Any) -> Node:
        start, end = event.start_mark.index, event.end_mark.index
        if event.tag is not None or event.anchor is not None:
            found = _PROPERTIES.match(self.text.content, start, end)
            start = found.end() if found else end
        self.budget.node(event.start_mark.line + 1, len(self.open) + 1)
        node = Node("scalar", start, end, event.start_mark.line + 1)
        node.raw = self.text.content[start:end]
        node.style = _STYLES.get(event.style, "plain")
        node.tag = event.tag
        node.value = self._value(event)
        return node

    def _value(self, event: Any) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self.resolve(self.scalar_node, event.value, event.implicit)
        if _is_standard(tag) and tag not in _SCALARS:
            into = self.open[-1] if self.open else None
            if tag not in (_MERGE, _VALUE) or into is None or not into.wants_key:
                raise self._refused(event, f"{event.value[:40]!r} is no {tag[len(_PREFIX) :]}")
            if tag == _MERGE and event.value != "<<":
                raise self._refused(event, f"{event.value[:40]!r} is to merge what it is not")
        if tag == _BINARY:
            try:
                base64.decodebytes(event.value.encode("ascii"))
            except ValueError as error:
                raise self._refused(event, "what should be base64 is not") from error
        if tag not in _CONSTRUCTED:
            return event.value
        build = self.constructor.yaml_constructors[tag]
        try:
            return build(self.constructor, self.scalar_node(tag, event.value))
        except (ValueError, KeyError, IndexError, OverflowError, AttributeError) as error:
            what = f"{event.value[:40]!r} cannot be read as {tag.removeprefix(_PREFIX)}"
            raise self._refused(event, what) from error

    def _refused(self, event: Any, problem: str) -> SourceError:
        return _broken(self.text, event.start_mark.line + 1, problem)

    def _place(self, node: Node, alias: Any = None) -> None:
        if not self.open:
            self.roots.append(node)
            return
        into = self.open[-1]
        if into.node.kind == "sequence":
            into.node.items.append(node)
        elif into.key is None:
            named = alias is not None and node.kind == "scalar"
            into.key = _at(node, alias) if named else node
        else:
            self._entry(into, into.key, node)
            into.key = None

    def _entry(self, into: _Open, key: Node, node: Node) -> None:
        if key.kind == "scalar" and key.style == "plain" and key.value == "<<":
            into.merges += node.items if node.kind == "sequence" else [node]
            if any(source.kind != "mapping" for source in into.merges):
                raise _broken(self.text, key.line, "what is merged with << is no mapping")
            return
        name = "null" if key.value is None else str(key.value)
        if key.kind != "scalar":
            if key.tag is None or key.tag in _COLLECTIONS:
                raise _broken(self.text, key.line, f"a {key.kind} stands where a key has to be")
            name = f"({key.kind})"
        elif isinstance(key.value, bool):
            name = key.raw  # `no:` and `on:` are keys people mean as words
        entry = KeyedNode(name, node, key.start, key.end, key.line)
        add_entry(into.node, entry, into.seen)

    def _merge(self, into: _Open, source: Node) -> None:
        if source.kind != "mapping" or source is into.node:
            return
        source.merged = True
        self.budget.node(into.node.line, len(self.open), len(source.entries))
        for entry in source.effective():
            if entry.key not in into.seen:
                into.seen.add(entry.key)
                taken = KeyedNode(
                    entry.key, entry.node, entry.start, entry.end, entry.line, merged=True
                )
                into.node.entries.append(taken)


def _at(node: Node, alias: Any) -> Node:
    """Returns a key that is given by name, at the place of the name."""
    start, end = alias.start_mark.index, alias.end_mark.index
    return Node("scalar", start, end, alias.start_mark.line + 1, value=node.value, raw=node.raw)
