"""Where a value comes from, through as many functions and files of the project as that takes.

Functions are read once, without knowing what they are called with, so a parameter is nothing but a
name there. Whether the log in a loss is that of a sigmoid is decided elsewhere: in the script that
calls the loss with what the model returned, in the model, in the function that put its layers
together. This is asked only where a rule has something to say if the answer is yes: the calls of
the function are looked up in the project, what they give it is followed back, and so on, up to
operations that make numbers.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.code.calls import LAYERS, last_layer
from nanguard.check.code.scopes import absolute
from nanguard.check.code.values import SHAPE, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function

# Which part of a value is meant: the places and keys that lead to it, outermost first.
Place = tuple[int | str, ...]
_Step = tuple[Value, Place, tuple[Value, ...]]
_MOST_VALUES = 160  # that are followed for one question
_MOST_FILES = 12  # in which calls of one function are looked for
# Methods of the same name in many classes, so that a name alone says nothing.
_GENERIC = frozenset(
    {"forward", "__call__", "__init__", "step", "update", "train", "run", "get", "main", "loss"}
)
# Methods that are called by the name of an object's class, or of what holds it.
_BY_CLASS = frozenset({"forward", "__call__", "__init__"})
# What hands on what it was given, or a part of it.
_PASSES = SHAPE | {"field", "element", "each", "enumerate", "zip", "local"}
_ACTIVATION = re.compile(r"(^|_)(act(iv(ation|e)?)?(_?fn)?|non_?lin(earity)?)\d*(_|$)")
_OUTPUTS = frozenset({"call", "result", "local"})


@dataclass(frozen=True, slots=True)
class Origins:
    """Where a value comes from.

    Attributes:
        makers: The operations that make it.
        network: Whether the output of a model is among what it comes from.
        detached: Whether it is cut off from its gradient on one of the ways.
    """

    makers: tuple[Value, ...]
    network: bool
    detached: bool = False

    def made_by(self, *operations: str) -> bool:
        """Returns whether one of these operations makes the value."""
        return any(maker.op in operations for maker in self.makers)

    @property
    def activated(self) -> bool:
        """Whether an activation makes it that is chosen where its module is made."""
        return any(map(_is_chosen_activation, self.makers))


def origins(code: Code, value: Value) -> Origins:
    """Returns where a value comes from, in this file or in others of the project.

    Args:
        code: The file.
        value: The value.
    """
    known: dict[int, tuple[Value, Origins]] = code.facts.setdefault(_Search, {})
    found = known.get(id(value))
    if found is None:
        search = _Search(code)
        makers = tuple(search.makers(value))
        found = known[id(value)] = (value, Origins(makers, search.network, search.detached))
    return found[1]


def calls_of(code: Code, function: Function) -> Iterator[tuple[Code, Value]]:
    """Yields the calls of a function in the project, each with the file it stands in.

    Args:
        code: The file that asks.
        function: The function.
    """
    yield from _Search(code).calls(function)


def argument_of(code: Code, call: Value, function: Function, parameter: Value) -> Value | None:
    """Returns what a call of a function gives one of its parameters.

    Args:
        code: The file of the call.
        call: The call.
        function: The function.
        parameter: The parameter, as the function knows it.
    """
    name = next((n for n, held in function.parameters.items() if held is parameter), "")
    return _given(code, call, function, name) if name else None


def calls_through(code: Code, function: Function) -> Iterator[Value]:
    """Yields the calls in a file of modules that were handed in and that have a function.

    Args:
        code: The file.
        function: The ``forward`` of a module.
    """
    owner = function.cls
    for call in code.of("call") if owner is not None else ():
        callee = call.inputs[0] if call.inputs else None
        if callee is None or callee.cls is not None or call.name != callee.name:
            continue
        if not isinstance(callee.node, ast.Attribute) and callee.core.op != "":
            continue
        for maker in origins(code, callee).makers:
            held = maker.cls.method(function.name) if maker.cls is not None else None
            if held is not None and _is_same(held, function):
                yield call
                break


@dataclass(slots=True)
class _Search:
    """One question, with what has been looked at for it."""

    code: Code
    network: bool = False
    detached: bool = False
    seen: set[tuple[int, Place]] = field(default_factory=set)

    def makers(self, value: Value) -> Iterator[Value]:
        """Yields what makes a value."""
        queue: list[_Step] = [(value, (), ())]
        while queue:
            value, place, within = queue.pop(0)
            key = (id(value), place)
            if key in self.seen:
                continue
            if len(self.seen) >= _MOST_VALUES:
                return
            self.seen.add(key)
            self.network = self.network or (value.op in _OUTPUTS and value.has("network"))
            self.detached = self.detached or value.op in ("detach", "data")
            if value.op == "result" and value.inputs:
                queue.append((value.inputs[0], place, (value, *within[:6])))
                continue
            following = self._before(value, place, within)
            if following is None:
                yield value
            else:
                queue += ((part, picked, within) for part, picked in following)

    def _before(
        self, value: Value, place: Place, within: tuple[Value, ...]
    ) -> list[tuple[Value, Place]] | None:
        """Returns what a value was before; None if it was made by an operation.

        Args:
            value: The value.
            place: The part of it that is meant.
            within: The calls whose results were followed, the last one first.
        """
        inside = _inside(value, place)
        if inside is not None:
            return inside
        if value.op in ("join", "appended"):
            return [(part, place) for part in value.inputs]
        if value.op == "setitem" and len(value.inputs) > 2:
            return _written(value, place)
        if value.op == "part":
            return [(value.inputs[0], (*_place_of(self._home(value), value.node), *place))]
        if value.op == "getitem" and len(value.inputs) == 1 and not _is_cut(value.inputs[0]):
            return [(value.inputs[0], (*_place_of(self._home(value), value.node), *place))]
        if value.op in _PASSES and value.inputs:
            return [(value.inputs[0], _picked(value, place))]
        if value.op == "call" and value.inputs and not _is_chosen_activation(value):
            return [(result, place) for result in self._called(value)] or None
        if value.op == "" and value.scope is not None:
            given = self.arguments(value.scope, value, within)
            return [(argument, place) for argument in given] or None
        return None

    def _home(self, value: Value) -> Code:
        scope = value.scope
        return scope.home if scope is not None and scope.home is not None else self.code

    def _called(self, call: Value) -> Iterator[Value]:
        """Yields what the calls of an object give, once it is known what that is."""
        callee = call.inputs[0]
        if callee.core.op == "new" and callee.cls is None and call.name == callee.name:
            return  # a layer of torch: the call itself is the operation
        for maker in [*self.makers(callee)]:
            yield from self._result(call, maker)

    def _result(self, call: Value, maker: Value) -> Iterator[Value]:
        cls: Class | None = maker.cls
        function = maker.function
        home = self._home(call)
        if cls is not None and function is None:
            name = call.name if cls.method(call.name) is not None else "forward"
            function = cls.method(name) or cls.method("__call__")
        if function is not None:
            self.network = self.network or (cls is not None and cls.is_module())
            yield home.result_of(function)
            return
        final = last_layer(maker) if maker.op == "new" else None
        name = final.path.rpartition(".")[2] if final is not None else ""
        if name in LAYERS:
            yield Value(op=LAYERS[name], inputs=call.inputs[1:], node=call.node, scope=call.scope)
        elif final is not None and final.path.startswith("torch.nn."):
            yield Value(op="layer", inputs=call.inputs[1:], node=call.node, path=final.path)

    def arguments(
        self, function: Function, parameter: Value, within: tuple[Value, ...] = ()
    ) -> list[Value]:
        """Returns what the calls of a function in the project give one of its parameters.

        Args:
            function: The function.
            parameter: The parameter.
            within: The calls whose results were followed; if one is of this function, it counts.
        """
        name = next((n for n, held in function.parameters.items() if held is parameter), "")
        if not name or name in ("self", "cls"):
            return []
        calls = [(self._home(call), call) for call in within]
        entered = [
            (c, call) for c, call in calls if any(m is call and f is function for m, f in c.calls)
        ]
        found = [
            given
            for code, call in entered[:1] or self.calls(function)
            if (given := _given(code, call, function, name)) is not None
        ]
        return found[:8]

    def calls(self, function: Function) -> Iterator[tuple[Code, Value]]:
        """Yields the calls of a function, in its own file and in others."""
        home = function.home
        if home is None:
            return
        for call, callee in home.calls:
            if callee is function or _stands_for(function, callee):
                yield home, call
        yield from _made_in(home, function)
        project = self.code.project
        if project is None:
            return
        owner = function.cls.name if function.cls is not None else ""
        named = owner if function.name in _BY_CLASS and owner else function.name
        if len(project.callers(named)) > _MOST_FILES:
            return
        files = project.users(named)[:_MOST_FILES]
        for path in files:
            if absolute(path) == absolute(home.text.path):
                continue
            other = project.outline(absolute(path))
            if other is not None:
                yield from _calls_in(other, function, named)


def _is_chosen_activation(maker: Value) -> bool:
    """Returns whether a value is what an activation gives that somebody else chose."""
    if maker.op != "call" or not maker.inputs or not _ACTIVATION.search(maker.name.lower()):
        return False
    return maker.inputs[0].core.op == ""


def _calls_in(code: Code, function: Function, named: str) -> Iterator[tuple[Code, Value]]:
    """Yields the calls of a function in another file."""
    code.read_mentions(named)
    for call, callee in code.calls:
        if _is_same(callee, function):
            yield code, call
    yield from _made_in(code, function)
    if function.cls is None:
        yield from _handed_on(code, function)
    if function.name in _GENERIC or function.cls is None:
        return
    for call in code.operations.get(function.name, ()):
        if isinstance(call.node, ast.Call) and call.inputs and call.inputs[0].cls is None:
            yield code, call


def _handed_on(code: Code, function: Function) -> Iterator[tuple[Code, Value]]:
    """Yields the calls of a function that another one was handed under its own name."""
    for call in code.operations.get("call", ()):
        callee = call.inputs[0] if call.inputs and call.name == function.name else None
        if callee is None or callee.op or callee.scope is None or callee.function is not None:
            continue
        found = (maker.function for maker in origins(code, callee).makers)
        if any(held is not None and _is_same(held, function) for held in found):
            yield code, call


def _stands_for(function: Function, called: Function) -> bool:
    """Returns whether a method is called by the name of the one that it overrides."""
    if function.cls is None or called.cls is None or called.name != function.name:
        return False
    return called.cls is not function.cls and called.cls in function.cls.line_of_descent()


def _made_in(code: Code, function: Function) -> Iterator[tuple[Code, Value]]:
    """Yields where a file makes objects, if the function is the constructor of their class."""
    if function.name != "__init__":
        return
    for made in code.operations.get("new", ()):
        constructor = made.cls.method("__init__") if made.cls is not None else None
        if constructor is not None and _is_same(constructor, function):
            yield code, made


def _is_same(one: Function, other: Function) -> bool:
    """Returns whether two readings of the project mean the same function."""
    if one is other:
        return True
    if one.name != other.name or one.home is None or other.home is None:
        return False
    lines = getattr(one.node, "lineno", 0), getattr(other.node, "lineno", 0)
    return lines[0] == lines[1] and absolute(one.home.text.path) == absolute(other.home.text.path)


def _given(code: Code, call: Value, function: Function, name: str) -> Value | None:
    """Returns what a call gives a parameter."""
    node = call.node
    if not isinstance(node, ast.Call) or isinstance(function.node, ast.Module):
        return None
    for keyword in node.keywords:
        if keyword.arg == name:
            return code.values.get(keyword.value)
    arguments = function.node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if name not in names:
        return None
    place = names.index(name)
    if any(isinstance(given, ast.Starred) for given in node.args[: place + 1]):
        return None
    return code.values.get(node.args[place]) if place < len(node.args) else None


def _inside(value: Value, place: Place) -> list[tuple[Value, Place]] | None:
    """Returns what a tuple, a list or a mapping holds; None if a value is none of them."""
    first = place[0] if place else None
    if value.items is not None and isinstance(first, int):
        inside = -len(value.items) <= first < len(value.items)
        return [(value.items[first], place[1:])] if inside else []
    if value.items and value.op == "" and not place:
        # Which of the things in a tuple is meant is not known; those in a list are alike.
        return [(item, ()) for item in value.items] if isinstance(value.node, ast.List) else []
    if isinstance(value.node, ast.Dict) and not value.op:
        if not isinstance(first, str):
            return [(part, place) for part in value.inputs]
        return [(held, place[1:]) for held in _held(value, value.node, first)]
    return None


def _written(value: Value, place: Place) -> list[tuple[Value, Place]] | None:
    """Returns what a mapping holds after one key of it was written; None for a tensor."""
    base, index, written = value.inputs[:3]
    if not isinstance(index.const, str):
        return None
    if place and place[0] == index.const:
        return [(written, place[1:])]
    return [(base, place)]


def _is_cut(value: Value) -> bool:
    """Returns whether a tensor was cut into several, which are alike."""
    for _ in range(6):
        if value.op in ("chunk", "split", "unbind", "tensor_split"):
            return True
        if value.op not in SHAPE or not value.inputs:
            return False
        value = value.inputs[0]
    return False


def _picked(value: Value, place: Place) -> Place:
    """Returns which part is meant of what an operation hands on."""
    if value.op not in ("getitem", "field") or len(value.inputs) < 2:
        return place
    index = value.inputs[1].const
    known = isinstance(index, (int, str)) and not isinstance(index, bool)
    return (index, *place) if known else place


def _held(value: Value, node: ast.Dict, key: str) -> Iterator[Value]:
    for name, held in zip(node.keys, value.inputs, strict=False):
        if isinstance(name, ast.Constant) and name.value == key:
            yield held


def _place_of(code: Code, node: ast.AST | None) -> Place:
    """Returns which of several names of an assignment a node is."""
    parent = code.parents.get(node) if node is not None else None
    if not isinstance(parent, (ast.Tuple, ast.List)):
        return ()
    place = parent.elts.index(node)  # type: ignore[arg-type]
    before = any(isinstance(element, ast.Starred) for element in parent.elts[:place])
    return () if before else (place,)
