"""The settings a tree holds, in order, each with the sections around it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from nanguard.check.config.names import normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.document import Document
    from nanguard.check.config.node import Entry, Node

MAX_LEAVES = 10_000
MAX_TIMES = 100  # that a value named in several places is looked at
MAX_NESTING = 40
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z0-9_.\[\]-]+)\s*\}")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An entry that holds a value, not a section.

    Attributes:
        path: The keys from the root, the entry's own last.
        sections: The keys around it in normal form.
        key: Its own key in normal form.
        entry: The entry.
        node: The value that counts.
        parent: The mapping it stands in.
        document: The file.
        home: The file the value that counts stands in.
    """

    path: tuple[str, ...]
    sections: tuple[str, ...]
    key: str
    entry: Entry
    node: Node
    parent: Node
    document: Document
    home: Document


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """A mapping, and the way to it.

    Attributes:
        path: The keys from the root.
        node: The mapping.
        document: The file.
    """

    path: tuple[str, ...]
    node: Node
    document: Document


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A document's root, with what was composed into it from other files.

    Attributes:
        root: The root.
        document: The file it stands in.
        attached: Other files' roots, each with the sections it goes below; what stands in several
            counts from the last.
        own_first: How many of them its own entries count over; those that follow count over it.
    """

    root: Node
    document: Document
    attached: tuple[tuple[tuple[str, ...], Tree], ...] = ()
    own_first: int = 0

    def documents(self) -> Iterator[Document]:
        """Yields the files it is made of, its own first."""
        yield self.document
        for _, tree in self.attached:
            yield from tree.documents()

    def read(self) -> tuple[list[Leaf], list[Section]]:
        """Returns the leaves and the sections of all files, those of its own first."""
        leaves: dict[tuple[str, ...], Leaf] = {}
        sections: list[Section] = []
        before, after = self.attached[: self.own_first], self.attached[self.own_first :]
        for below, tree in (*reversed(after), ((), self), *reversed(before)):
            for section in _walk(tree, below):
                sections.append(section)
                for leaf in _leaves(section):
                    leaves.setdefault(leaf.path, leaf)
            if len(leaves) > MAX_LEAVES:
                break
        followed = [_follow(leaf, self) for leaf in list(leaves.values())[:MAX_LEAVES]]
        return sorted(followed, key=lambda leaf: leaf.document is not self.document), sections


def _walk(tree: Tree, below: tuple[str, ...]) -> Iterator[Section]:
    """Yields sections; what contains itself, or is written once and named often, stays bounded."""
    count = 0
    times: dict[int, int] = {}
    stack = [_Step(tree.root, below, frozenset())]
    while stack and count < MAX_LEAVES:
        step = stack.pop()
        node = step.node
        times[id(node)] = times.get(id(node), 0) + 1
        if id(node) in step.inside or times[id(node)] > MAX_TIMES or len(step.path) > MAX_NESTING:
            continue
        count += 1 + len(node.entries) + len(node.items)
        inside = step.inside | {id(node)}
        if node.kind == "mapping":
            yield Section(step.path, node, tree.document)
            inner = [
                (entry.key, entry.node)
                for entry in node.effective()
                if entry.key != "defaults" or entry.node.kind == "mapping"  # a list names files
            ]
        else:
            inner = [(f"[{at}]", item) for at, item in enumerate(node.items)]
        stack += [
            _Step(member, (*step.path, name), inside)
            for name, member in reversed(inner)
            if _is_section(member)
        ]


class _Step(NamedTuple):
    """A place on the way through a tree, with the nodes it lies in."""

    node: Node
    path: tuple[str, ...]
    inside: frozenset[int]


def _leaves(section: Section) -> Iterator[Leaf]:
    names = tuple(normal(part) for part in section.path)
    file = section.document
    for entry in section.node.effective():
        if not _is_section(entry.node):
            path, key = (*section.path, entry.key), normal(entry.key)
            yield Leaf(path, names, key, entry, entry.node, section.node, file, file)


def _is_section(node: Node) -> bool:
    if node.kind == "mapping":
        return bool(node.entries)
    return node.kind == "sequence" and any(item.kind != "scalar" for item in node.items)


def _follow(leaf: Leaf, tree: Tree) -> Leaf:
    """Returns the leaf with the value it refers to, as ``${a.b}`` does, where that can be found."""
    node, home = leaf.node, leaf.home
    for _ in range(8):
        found = _REFERENCE.fullmatch(node.raw.strip("'\" ")) if node.kind == "scalar" else None
        target = _find(tree, found.group(1), leaf.path) if found else None
        if target is None or target[0] is node:
            break
        node, home = target
    return leaf if node is leaf.node else replace(leaf, node=node, home=home)


def _find(tree: Tree, dotted: str, path: tuple[str, ...]) -> tuple[Node, Document] | None:
    dots = len(dotted) - len(dotted.lstrip("."))
    names = [name for name in dotted.strip(".").split(".") if name]
    if dots:
        names = [*path[: max(len(path) - dots, 0)], *names]
    places = [(tree.root, names, tree.document)]
    for below, part in tree.attached:
        if tuple(names[: len(below)]) == below:
            places.append((part.root, names[len(below) :], part.document))
    for root, rest, document in places:
        node: Node | None = root
        for name in rest:
            node = node.get(name) if node is not None and node.kind == "mapping" else None
        if node is not None:
            return node, document
    return None
