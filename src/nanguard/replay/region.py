"""The piece of a script that makes one step, found in its source and compiled as a function.

A step's *region* is the innermost code that holds both its forward and its backward pass: the body
of a loop, or a function. A *piece* of it begins at some statement and goes to the region's end.
What a piece reads before it writes are its live-in names: given these, it can be called again.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import linecache
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from nanguard.replay.live_names import Names, names_in, own_nodes, unpacked_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nanguard.replay.handed_on import HandedTo

    Owner = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
    Path = list[tuple[str, int | None]]

_FUTURES: int = reduce(
    lambda bits, name: bits | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)
_WAITING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Assert, ast.Delete, ast.Pass)
# Names that a compiled piece has for itself.
AGAIN, _ONCE, _SEEN, _OUTER, _RESUME = "__again", "__once", "__seen", "__outer", "__resume"


class NoRegionError(Exception):
    """A step's code cannot be called again; the message says why."""


@dataclass(slots=True)
class RegionSource:
    """The text of a file as it runs, and its syntax tree."""

    text: str
    tree: ast.Module
    codes: dict[tuple[str, int], list[CodeType]] = field(default_factory=dict)


_sources: dict[str, RegionSource] = {}


def source_of(code: CodeType, module: dict[str, Any]) -> RegionSource:
    """Returns the source that a code object was compiled from.

    Args:
        code: The code.
        module: The globals of the module it belongs to.

    Raises:
        NoRegionError: There is none, or it is not the one that runs: people edit files.
    """
    name = code.co_filename
    known = _sources.get(name)
    if known is None:
        text = "".join(linecache.getlines(name, module))
        if not text:
            raise NoRegionError(f"the source of {name} cannot be read")
        known = _sources[name] = _parsed(text, code)
    key = (code.co_name, code.co_firstlineno)
    if not any(other.co_code == code.co_code for other in known.codes.get(key, [])):
        raise NoRegionError(f"{name} has changed since the run began")
    return known


def _parsed(text: str, code: CodeType) -> RegionSource:
    try:
        tree = ast.parse(text)
        flags = code.co_flags & _FUTURES
        compiled = compile(text, code.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoRegionError(f"the source of {code.co_filename} cannot be compiled") from error
    source = RegionSource(text, tree)
    todo = [compiled]
    while todo:
        one = todo.pop()
        source.codes.setdefault((one.co_name, one.co_firstlineno), []).append(one)
        todo += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return source


class Region:
    """The code of one step.

    Attributes:
        code: The code object that it is a part of.
        kind: ``loop`` if it is the body of one, else ``function``.
        first: Its first line.
        last: Its last line.
        lines: The lines that it was found from.
        header: The line that is passed before each turn of the loop; None if there is none.
        moves: Whether it changes tensors in place that it was given.
        changes_losses: Whether it changes its losses in place after their backward pass.
        unpacked: The names that the loop takes its items apart into, for each tuple of them.
        receiver: Who the step goes on with; None if it goes on in this code.
    """

    def __init__(
        self,
        code: CodeType,
        module: dict[str, Any],
        lines: Sequence[int],
        receiver: HandedTo | None = None,
    ) -> None:
        """Finds the region around some lines.

        Args:
            code: The code of the innermost frame that holds all of the step.
            module: Its globals.
            lines: The lines that the region has to hold: those of forward and backward.
            receiver: Where the code is a generator, and the step goes on with the value that it
                hands on: who gets it. Then the lines are those of forward and of the ``yield``.
        """
        self.code = code
        self.receiver = receiver
        self.source = source_of(code, module)
        owner = owner_of(self.source.tree, code)
        loop = _innermost_loop(owner, lines)
        if loop is None and isinstance(owner, ast.Module):
            raise NoRegionError("the step is not in a loop or a function, but in the whole file")
        self.kind = "function" if loop is None else "loop"
        self.header = None if loop is None or _is_endless(loop) else loop.lineno
        self.moves = False
        self.changes_losses = False
        holder: Any = owner if loop is None else loop
        body = _without_docstring(holder.body) if loop is None else holder.body
        self._skipped = len(holder.body) - len(body)
        if not body:
            raise NoRegionError(f"{code.co_name} has no body")
        self.first, self.last = line_range(body)
        self._path = _path_to(self.source.tree, holder)
        self._owner_path = _path_to(self.source.tree, owner)
        self._targets = loop.target if isinstance(loop, (ast.For, ast.AsyncFor)) else None
        self.unpacked = [] if self._targets is None else list(unpacked_names(self._targets))
        # What a module's loops write is not the same when a step is replayed: globals go on.
        self._changing = _written_in_loops(owner) if isinstance(owner, ast.Module) else set()
        self.lines = tuple(lines)
        self._pieces: dict[tuple[int, ...], Piece] = {}
        self._at: dict[int, Piece] = {}
        self._whole: Piece | None = None

    def holds(self, line: int) -> bool:
        """Returns whether a line is one of the region's."""
        return self.first <= line <= self.last

    def whole(self) -> Piece:
        """Returns the whole region as a piece, or what follows where it last waited for others."""
        if self._whole is None:
            body = self._body(self.source.tree)
            step = _statement_at(body, min(self.lines)) or 0
            waiting = [place for place in range(step) if _waits(body[place])]
            self._whole = self._piece((waiting[-1] + 1 if waiting else 0,))
        return self._whole

    def after(self, line: int) -> Piece | None:
        """Returns the piece that begins after the statement on a line; None if nothing does."""
        body = self._body(self.source.tree)
        index = _statement_at(body, line)
        if index is None or index + 1 >= len(body):
            return None
        return self._piece((index + 1,))

    def at(self, line: int) -> Piece:
        """Returns the piece that begins with the innermost statement on a line.

        What surrounds the statement (``with``, ``if``, ``try``) stays; what stands before it goes.
        """
        known = self._at.get(line)
        if known is not None:
            return known
        places: list[int] = []
        body: list[ast.stmt] = self._body(self.source.tree)
        while True:
            index = _statement_at(body, line)
            if index is None:
                break
            places.append(index)
            inner = _inner_body(body[index], line)
            if inner is None:
                break
            branch, body = inner
            places.append(branch)
        if not places:
            raise NoRegionError(f"line {line} is not in the region")
        piece = self._at[line] = self._piece(tuple(places))
        return piece

    def changed(self, piece: Piece, text: str) -> Piece:
        """Returns a piece as it is in another text of the file.

        Raises:
            NoRegionError: It cannot be found there.
        """
        try:
            tree = ast.parse(text)
            body = self._body(tree)
        except (SyntaxError, ValueError, LookupError, AttributeError) as error:
            raise NoRegionError("the step is not to be found in the changed source") from error
        before = self._body(self.source.tree)
        place = piece.place
        if len(body) != len(before):
            same = sum(1 for one, other in zip(before, body, strict=False) if _same(one, other))
            if same < place[0]:
                raise NoRegionError("the change lies before the step that is replayed")
        return self._build(tree, place)

    def _piece(self, place: tuple[int, ...]) -> Piece:
        known = self._pieces.get(place)
        if known is None:
            known = self._pieces[place] = self._build(self.source.tree, place)
        return known

    def _body(self, tree: ast.Module) -> list[ast.stmt]:
        node: Any = _follow(tree, self._path)
        return cast("list[ast.stmt]", node.body[self._skipped :])

    def _build(self, tree: ast.Module, place: tuple[int, ...]) -> Piece:
        body = _cut(copy.deepcopy(self._body(tree)), place)
        if any(isinstance(n, (ast.Yield, ast.YieldFrom, ast.Await)) for n in own_nodes(body)):
            # What gives control away after the backward pass is not needed.
            last = _statement_at(body, max(self.lines))
            body = body if last is None else body[: last + 1]
        owner = cast("Owner", _follow(tree, self._owner_path))
        chain = _chain(tree, self._owner_path)
        cls = next((n.name for n in reversed(chain[:-1]) if isinstance(n, ast.ClassDef)), None)
        targets = [] if self._targets is None else names_in(self._targets)
        changing = self._changing | set(targets)
        hands_on = self.receiver is not None
        return Piece(self.code, self.kind, place, body, owner, cls, changing, hands_on=hands_on)


class Piece:
    """A region from one of its statements on, which can be called.

    Attributes:
        place: Which statement it begins with.
        first: The line it begins on.
        last: The line it ends on.
        begins_once: Whether its first line is passed only when it begins, and at no other time.
        live: What it reads before it writes, as far as these are variables of the code.
        reads: Every name it reads.
        stores: Every name it writes.
    """

    def __init__(
        self,
        code: CodeType,
        kind: str,
        place: tuple[int, ...],
        body: list[ast.stmt],
        owner: Owner,
        cls: str | None,
        changing: set[str],
        *,
        hands_on: bool,
    ) -> None:
        self.code = code
        self.place = place
        self.first, self.last = line_range(body)
        self.begins_once = type(body[0]) in _SIMPLE and body[0].lineno == body[0].end_lineno
        refuse_what_waits(body, code, hands_on=hands_on)
        names = Names()
        names.read(body)
        self.reads, self.stores = names.loads, tuple(names.stores)
        in_module = isinstance(owner, ast.Module)
        variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        kept = names.stores | (names.fills | changing if in_module else variables)
        live = [n for n in names.live if n in kept]
        live += [n for n in names.declared if n not in live]
        # Zero-argument super() takes the first argument of the function it stands in.
        first = code.co_varnames[:1] if code.co_argcount else ()
        self.live = [*first, *(n for n in live if n not in first and n != "__class__")]
        self._wants_class = "__class__" in code.co_freevars
        self._body, self._kind, self._cls = body, kind, cls
        self._every = itemgetter(*self.stores) if len(self.stores) > 1 else None

    def ids_in(self, local: Mapping[str, Any]) -> list[int]:
        """Returns the identities of what the names in ``stores`` stand for; 0 for nothing."""
        try:
            # From the second step on all of them are there.
            if self._every is not None:
                return list(map(id, self._every(local)))
        except KeyError:
            pass
        return [id(local[name]) if name in local else 0 for name in self.stores]

    def call(
        self,
        module: dict[str, Any],
        names: dict[str, Any],
        cls: Any,
        seen: Callable[[dict[str, Any]], None],
        resume: Callable[[Any], None] | None = None,
    ) -> Any:
        """Runs the piece.

        Args:
            module: The globals of its module.
            names: The values of its live-in names; those that are missing are not bound.
            cls: The class that ``super()`` means there; None where there is none.
            seen: Called with all local names when it ends, however it ends.
            resume: Called with what a generator hands on; None where the code is none.
        """
        missing = [name for name in self.live if name not in names]
        function = self._compiled(module, cls, missing)
        values = {name: names.get(name) for name in self.live}
        return function(**values, **{_SEEN: seen, _RESUME: resume})

    def _compiled(
        self, module: dict[str, Any], cls: Any, missing: Sequence[str]
    ) -> Callable[..., Any]:
        body: list[ast.stmt] = [_Own(self._cls).visit(copy.deepcopy(s)) for s in self._body]
        if self._kind == "loop":
            body = [_for_once(body)]
        tell = ast.Expr(_call(_SEEN, [_call("locals", [])]))
        watched = ast.Try(body=body, handlers=[], orelse=[], finalbody=[tell])
        unbound = [ast.Delete([ast.Name(name, ast.Del())]) for name in missing]
        again = _function(AGAIN, [*self.live, _SEEN, _RESUME], [*unbound, watched])
        extra = ["__class__"] if self._wants_class else []
        outer = _function(_OUTER, extra, [again, ast.Return(ast.Name(AGAIN, ast.Load()))])
        tree = ast.fix_missing_locations(ast.Module([outer], []))
        flags = self.code.co_flags & _FUTURES
        try:
            compiled = compile(tree, self.code.co_filename, "exec", flags=flags, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise NoRegionError(f"the step's code cannot be compiled by itself: {error}") from error
        made: dict[str, Any] = {}
        exec(compiled, module, made)  # noqa: S102 - the user's own program
        function: Callable[..., Any] = made[_OUTER](*([cls] if extra else []))
        return function


class _Own(ast.NodeTransformer):
    """Makes a piece of a function a function of its own."""

    def __init__(self, cls: str | None) -> None:
        self._cls = None if cls is None else cls.lstrip("_")
        self._depth = 0

    def _mangled(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__") and "." not in name
        return f"_{self._cls}{name}" if private and self._cls else name

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._mangled(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._mangled(node.id)
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        self._depth += 1
        try:
            return self.generic_visit(node)
        finally:
            self._depth -= 1

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        if self._depth:
            return self.generic_visit(node)
        value = ast.Constant(None) if node.value is None else self.visit(node.value)
        return ast.copy_location(_call(_RESUME, [value]), node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        # What they name are variables of the replay, and thrown away with it.
        return node if self._depth else ast.copy_location(ast.Pass(), node)

    visit_Nonlocal = visit_Global


def _waits(statement: ast.stmt) -> bool:
    """Returns whether a statement gives control away, and goes on later."""
    return any(isinstance(node, _WAITING) for node in own_nodes([statement]))


def refuse_what_waits(body: Sequence[ast.stmt], code: CodeType, *, hands_on: bool = False) -> None:
    """Refuses code that gives control away in its middle, and so cannot simply be called.

    Args:
        body: The code.
        code: What it is a part of.
        hands_on: Whether it is known who gets what it yields.
    """
    for node in own_nodes(body):
        if isinstance(node, ast.YieldFrom) or (isinstance(node, ast.Yield) and not hands_on):
            raise NoRegionError(f"{code.co_name} is a generator that yields within the step")
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            raise NoRegionError(f"{code.co_name} is a coroutine that waits within the step")


def line_range(body: Sequence[ast.stmt]) -> tuple[int, int]:
    """Returns the first and the last line of some statements."""
    return body[0].lineno, max(s.end_lineno or s.lineno for s in body)


def owner_of(tree: ast.Module, code: CodeType) -> Owner:
    """Returns the function, or the module, in a syntax tree that a code object was compiled from.

    Raises:
        NoRegionError: It has no body of statements.
    """
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise NoRegionError(f"{code.co_name} is not a function with a body of statements")


def _innermost_loop(
    owner: Owner, lines: Sequence[int]
) -> ast.For | ast.AsyncFor | ast.While | None:
    found: ast.For | ast.AsyncFor | ast.While | None = None
    for node in own_nodes(owner.body):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            first, last = line_range(node.body)
            if all(first <= line <= last for line in lines):
                found = node  # outer loops come first
    return found


def _written_in_loops(owner: Owner) -> set[str]:
    """Returns the names that are written in the loops of some code."""
    loops = [n for n in own_nodes(owner.body) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]
    names = Names()
    names.read(loops)
    return names.stores


def _is_endless(loop: ast.stmt) -> bool:
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented else body


def _statement_at(body: Sequence[ast.stmt], line: int) -> int | None:
    for index, statement in enumerate(body):
        first = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]
        )
        if first <= line <= (statement.end_lineno or statement.lineno):
            return index
    return None


# Statements whose parts run once, in order, so that a piece can begin in their middle.
_BRANCHES = {ast.With: ("body",), ast.If: ("body", "orelse"), ast.Try: ("body",)}


def _inner_body(statement: ast.stmt, line: int) -> tuple[int, list[ast.stmt]] | None:
    """Returns the body inside of a statement that a line is in, and which of them it is."""
    for branch, name in enumerate(_BRANCHES.get(type(statement), ())):
        body: list[ast.stmt] = getattr(statement, name)
        if body and _statement_at(body, line) is not None:
            return branch, body
    return None


def _cut(body: list[ast.stmt], place: tuple[int, ...]) -> list[ast.stmt]:
    """Returns a body from one of its statements on; ``if`` becomes the branch that was taken."""
    index, *rest = place
    if index >= len(body):
        raise NoRegionError("the step is not to be found in the changed source")
    body = body[index:]
    if rest:
        branch, *inner = rest
        statement = body[0]
        name = _BRANCHES[type(statement)][branch]
        kept = _cut(getattr(statement, name), tuple(inner)) if inner else getattr(statement, name)
        if isinstance(statement, ast.If):
            body[:1] = kept
        else:
            setattr(statement, name, kept)
    return body


def _path_to(tree: ast.AST, target: ast.AST) -> Path:
    """Returns the way from a tree's root to one of its nodes."""
    if tree is target:
        return []
    for name, value in ast.iter_fields(tree):
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, ast.AST) and _may_hold(child, target):
                with contextlib.suppress(LookupError):
                    way = _path_to(child, target)
                    return [(name, index if isinstance(value, list) else None), *way]
    raise LookupError


def _may_hold(node: ast.AST, target: Any) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return isinstance(node, (ast.ExceptHandler, ast.match_case))
    # The lines of a decorated function begin below its decorators.
    return bool(first <= target.lineno and target.end_lineno <= last)


def _chain(tree: ast.AST, path: Path) -> list[ast.AST]:
    nodes = [tree]
    for name, index in path:
        value = getattr(nodes[-1], name)
        nodes.append(value if index is None else value[index])
    return nodes


def _follow(tree: ast.AST, path: Path) -> ast.AST:
    return _chain(tree, path)[-1]


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.dump(one) == ast.dump(other)


def _call(name: str, args: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), args, [])


def _for_once(body: list[ast.stmt]) -> ast.For:
    """Returns a loop around a body, so that ``continue`` and ``break`` in it have a meaning."""
    return ast.For(
        target=ast.Name(_ONCE, ast.Store()),
        iter=ast.Tuple([ast.Constant(0)], ast.Load()),
        body=body,
        orelse=[],
    )


def _function(name: str, arguments: Sequence[str], body: Sequence[ast.stmt]) -> ast.FunctionDef:
    made: dict[str, Any] = {"name": name, "body": list(body), "decorator_list": []}
    made["args"] = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(argument) for argument in arguments],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )
    if "type_params" in ast.FunctionDef._fields:
        made["type_params"] = []
    return ast.FunctionDef(**made)
