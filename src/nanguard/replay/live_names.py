"""Which names a piece of code reads, and which it writes, in the order in which it does."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
# Methods that change a list or a mapping in place.
_FILLING = {
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


class Names:
    """Which names a piece of code reads before it has surely written them.

    Attributes:
        live: Those, in the order in which they are read.
        loads: Every name that is read.
        stores: Every name that is written.
        fills: Every name of a container that is changed in place.
        declared: What nested functions declare as ``nonlocal``.
    """

    def __init__(self) -> None:
        self.live: list[str] = []
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self.fills: set[str] = set()
        self.declared: list[str] = []
        self._sure: set[str] = set()

    def read(self, body: Iterable[ast.AST]) -> None:
        """Goes through statements in the order in which they run."""
        for node in body:
            self._visit(node)

    def _load(self, name: str) -> None:
        self.loads.add(name)
        if name not in self._sure and name not in self.live:
            self.live.append(name)

    def _store(self, name: str) -> None:
        self.stores.add(name)
        self._sure.add(name)

    def _visit(self, node: ast.AST) -> None:
        visit = getattr(self, f"_visit_{type(node).__name__}", None)
        if visit is not None:
            visit(node)
            return
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._load(node.id)
        elif isinstance(node.ctx, ast.Store):
            self._store(node.id)
        else:
            self._load(node.id)
            self.stores.add(node.id)

    def _visit_Assign(self, node: ast.Assign) -> None:
        self.read([node.value, *node.targets])

    def _visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.read([node.value, node.target])

    def _visit_Call(self, node: ast.Call) -> None:
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in _FILLING:
            self.fills.update(names_in(method.value) if _is_load(method.value) else [])
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._load(node.target.id)
        self.read([node.value, node.target])

    def _visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.read([node.value, node.target])

    def _maybe(self, *bodies: Iterable[ast.AST]) -> None:
        """Reads code of which one branch, or none, runs: only what all write is surely there."""
        before = set(self._sure)
        after = []
        for body in bodies:
            self._sure = set(before)
            self.read(body)
            after.append(self._sure)
        self._sure = before | set.intersection(*after)

    def _visit_If(self, node: ast.If) -> None:
        self._visit(node.test)
        self._maybe(node.body, node.orelse)

    def _visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit(node.test)
        self._maybe([node.body], [node.orelse])

    def _visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._visit(node.values[0])
        self._maybe(node.values[1:], [])

    def _visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit(node.iter)
        self._maybe([node.target, *node.body], [])
        self._maybe(node.orelse, [])

    _visit_AsyncFor = _visit_For

    def _visit_While(self, node: ast.While) -> None:
        self._visit(node.test)
        self._maybe(node.body, [])
        self._maybe(node.orelse, [])

    def _visit_Try(self, node: Any) -> None:
        before = set(self._sure)
        self.read(node.body)
        done = set(self._sure)
        for handler in node.handlers:
            self._sure = set(before)
            self._visit(handler)
        self._sure = done if not node.handlers else before
        self._maybe(node.orelse, [])
        self.read(node.finalbody)

    _visit_TryStar = _visit_Try

    def _visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self._visit(node.type)
        if node.name is not None:
            self._store(node.name)
        self.read(node.body)

    def _visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._visit(item.context_expr)
            if item.optional_vars is not None:
                self._visit(item.optional_vars)
        self.read(node.body)

    _visit_AsyncWith = _visit_With

    def _visit_Match(self, node: ast.Match) -> None:
        self._visit(node.subject)
        self._maybe(*([case] for case in node.cases), [])

    def _visit_match_case(self, node: ast.match_case) -> None:
        for inner in ast.walk(node.pattern):
            name = getattr(inner, "name", None) or getattr(inner, "rest", None)
            if isinstance(name, str):
                self._store(name)
            if isinstance(inner, ast.expr):
                self._visit(inner)
        if node.guard is not None:
            self._visit(node.guard)
        self.read(node.body)

    def _visit_comprehension_of(self, node: Any) -> None:
        own = {n for g in node.generators for n in names_in(g.target)}
        self._visit(node.generators[0].iter)
        inner: Any
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                self.stores.add(inner.target.id)
            elif _is_load(inner) and inner.id not in own:
                self._load(inner.id)

    _visit_ListComp = _visit_SetComp = _visit_comprehension_of
    _visit_GeneratorExp = _visit_DictComp = _visit_comprehension_of

    def _visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node.args, [node.body])

    def _visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.read(node.decorator_list)
        self._visit_function(node.args, node.body)
        self._store(node.name)

    _visit_AsyncFunctionDef = _visit_FunctionDef

    def _visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.read([*node.decorator_list, *node.bases, *(k.value for k in node.keywords)])
        for name in _loads_in(node.body):
            self._load(name)
        self._store(node.name)

    def _visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._store(alias.asname or alias.name.partition(".")[0])

    _visit_ImportFrom = _visit_Import

    def _visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.stores.update(node.names)
        for name in node.names:
            self._load(name)

    _visit_Nonlocal = _visit_Global

    def _visit_function(self, args: ast.arguments, body: Iterable[ast.AST]) -> None:
        """Reads what a function defined here needs from around it, whenever it is called."""
        self.read([*args.defaults, *(d for d in args.kw_defaults if d is not None)])
        given = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        own = {a.arg for a in [*given, *(v for v in (args.vararg, args.kwarg) if v)]}
        body = list(body)
        nonlocals = {
            name
            for statement in body
            for n in ast.walk(statement)
            if isinstance(n, ast.Nonlocal)
            for name in n.names
        }
        own |= {
            n.id
            for statement in body
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } - nonlocals
        self.declared += [name for name in sorted(nonlocals) if name not in self.declared]
        self.stores |= nonlocals
        for name in [*_loads_in(body), *sorted(nonlocals)]:
            if name not in own:
                self._load(name)


def own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes of some code, without those of the functions it defines."""
    for node in body:
        yield node
        if not isinstance(node, _SCOPES):
            yield from own_nodes(ast.iter_child_nodes(node))


def unpacked_names(target: ast.AST) -> Iterator[list[str]]:
    """Yields the names of each tuple of a loop's target, if it is made of names only."""
    for node in ast.walk(target):
        if isinstance(node, (ast.Tuple, ast.List)):
            names = [item.id for item in node.elts if isinstance(item, ast.Name)]
            if len(names) == len(node.elts):
                yield names


def names_in(target: ast.AST) -> list[str]:
    """Returns the names in a target, or in any other code."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _loads_in(body: Iterable[ast.AST]) -> list[str]:
    nodes: Iterator[Any] = (node for statement in body for node in ast.walk(statement))
    return [node.id for node in nodes if _is_load(node)]
