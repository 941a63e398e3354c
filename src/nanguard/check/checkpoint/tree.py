"""The tensors in what a pickle says, each with its place in the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nanguard.check.checkpoint.inert import Call, DamagedError, Global, Persistent, Span, Table
from nanguard.check.checkpoint.rebuilding import Rebuilt, rebuild

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.rebuilding import Sources
    from nanguard.check.checkpoint.stored import StoredTensor

MAX_DEPTH = 100
MAX_KEY = 300
# Parts of a pickled module that are no part of a parameter's name.
_SILENT = frozenset({"_modules", "_parameters", "_buffers", "_local_tensor", "_local_tensors"})
_PAIRS = frozenset({"collections.OrderedDict", "builtins.dict", "collections.defaultdict"})


class Place(NamedTuple):
    """A place in a tree.

    Attributes:
        parent: The place above it; None for the root.
        key: What it is called there; empty where the name says nothing.
        depth: How far it is from the root.
        optimizer: Whether it is in something built like the state of an optimizer.
    """

    parent: Place | None
    key: str
    depth: int
    optimizer: bool

    def below(self, key: object) -> Place:
        """Returns the place of a child."""
        return Place(self, _text(key), self.depth + 1, self.optimizer)

    def keys(self) -> tuple[str, ...]:
        """Returns the keys from the root on."""
        found: list[str] = []
        at: Place | None = self
        while at is not None:
            if at.key:
                found.append(at.key)
            at = at.parent
        return tuple(reversed(found))


@dataclass(slots=True)
class Tree:
    """What was found in a tree.

    Attributes:
        tensors: The tensors, in the order of the file, and whether each is in an optimizer's state.
        scalars: Plain numbers that are not finite.
        counters: Whole numbers at the root, such as the step.
        unread: How many tensors could not be followed.
        damage: What is wrong with tensors.
    """

    tensors: list[tuple[StoredTensor, bool]] = field(default_factory=list)
    scalars: list[tuple[tuple[str, ...], float, bool]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    unread: int = 0
    damage: list[str] = field(default_factory=list)


def walk(value: object, sources: Sources) -> Tree:
    """Returns the tensors in a value.

    Shared parts are visited once, so that a small file cannot stand for an endless tree.

    Args:
        value: What a pickle holds.
        sources: Finds the bytes of a storage.
    """
    return _Walk(sources).run(value)


class _Walk:
    """The state of one walk."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.tree = Tree()
        self.seen: set[int] = set()
        self.todo: list[tuple[object, Place]] = []

    def run(self, value: object) -> Tree:
        """Visits everything, in the order of the file."""
        self.todo.append((value, Place(None, "", 0, optimizer=False)))
        while self.todo:
            self.visit(*self.todo.pop())
        return self.tree

    def visit(self, value: object, place: Place) -> None:
        """Notes a value and puts its children in line."""
        if isinstance(value, (bool, str, bytes, Global, Span, Persistent)) or value is None:
            return
        if isinstance(value, (int, float)):
            self.number(value, place)
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if place.depth >= MAX_DEPTH:
            self.tree.unread += 1
            return
        self.todo.extend(reversed(list(self.children(value, place))))

    def number(self, value: float, place: Place) -> None:
        """Notes a plain number."""
        if isinstance(value, int):
            if place.depth == 1 and abs(value) < 1 << 63:
                self.tree.counters[place.key] = value
        elif not math.isfinite(value):
            self.tree.scalars.append((place.keys(), value, place.optimizer))

    def children(self, value: object, place: Place) -> Iterator[tuple[object, Place]]:
        """Yields what is in a value, with its place."""
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield item, place.below(index)
        elif isinstance(value, Table):
            yield from self.pairs(value.pairs, place)
        elif isinstance(value, Call):
            yield from self.call(value, place)

    def call(self, call: Call, place: Place) -> Iterator[tuple[object, Place]]:
        """Yields what is in something that would be made by a call."""
        try:
            rebuilt = rebuild(call, self.sources)
        except DamagedError as error:
            self.tree.damage.append(f"{'.'.join(place.keys())}: {error}")
            return
        if rebuilt is None:
            yield from self.parts(call, place)
        elif isinstance(rebuilt, Rebuilt):
            if rebuilt.storage is None:
                self.tree.unread += 1
            else:
                self.tree.tensors.append((rebuilt.tensor(place.keys()), place.optimizer))
            yield from ((item, place) for item in rebuilt.inside)
        else:
            yield rebuilt, place

    def parts(self, call: Call, place: Place) -> Iterator[tuple[object, Place]]:
        """Yields the arguments, the state and the items of a call."""
        args = call.args if isinstance(call.args, tuple) else (call.args,)
        if call.full in _PAIRS and len(args) == 1 and isinstance(args[0], list):
            yield from self.pairs([tuple(i) for i in args[0] if _pair(i)], place)
        else:
            yield from ((item, place) for item in args)
        yield from self.pairs(call.pairs or [], place)
        yield from ((item, place.below(index)) for index, item in enumerate(call.items or []))
        if call.full not in _PAIRS:  # the state of a dictionary is about it, not in it
            yield call.state, place

    def pairs(
        self, pairs: list[tuple[object, object]], place: Place
    ) -> Iterator[tuple[object, Place]]:
        """Yields the values of a dictionary."""
        names = {key for key, _ in pairs if isinstance(key, str)}
        if {"state", "param_groups"} <= names:
            place = place._replace(optimizer=True)
        for key, value in pairs:
            if key in _SILENT if isinstance(key, str) else False:
                yield value, place.below("")
            else:
                yield value, place.below(key)


def _pair(item: object) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2


def _text(key: object) -> str:
    if isinstance(key, bytes):
        key = key.decode("utf-8", "replace")
    if isinstance(key, (str, int, float)):
        return str(key)[:MAX_KEY] if isinstance(key, str) else f"{key:.20g}"
    return key.name if isinstance(key, Global) else "?"
