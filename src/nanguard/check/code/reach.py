"""Which statements still run after another one, and which leave."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.code.code import Code

Loop = ast.For | ast.AsyncFor | ast.While
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_BLOCKS = ("body", "orelse", "finalbody")


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Returns whether a block is always left before its end."""
    return any(isinstance(statement, _LEAVES) for statement in body)


def first(body: Sequence[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> ast.stmt | None:
    """Returns the first statement of a kind in a block or in the branches of it."""
    for statement in body:
        if isinstance(statement, kinds):
            return statement
        if isinstance(statement, (ast.If, ast.With, ast.Try)):
            for block in _BLOCKS:
                found = first(getattr(statement, block, ()), kinds)
                if found is not None:
                    return found
    return None


def within(line: int, body: Sequence[ast.stmt]) -> bool:
    """Returns whether a line lies in a block."""
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)


def inner_loop(code: Code, node: ast.AST) -> Loop | None:
    """Returns the innermost loop around a node, in the same function."""
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.For, ast.AsyncFor, ast.While)):
            return outer
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
    return None


def after(code: Code, node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements that run after a node in the same function, until it is left."""
    statement = code.statement_of(node)
    while statement is not None:
        parent = code.parents.get(statement)
        if parent is None:
            return
        leave: ast.stmt | None = None
        for later in _following(parent, statement):
            yield later
            if isinstance(later, _LEAVES):
                leave = later
                break
        if isinstance(leave, (ast.Return, ast.Raise)):
            return
        if leave is not None:
            loop = inner_loop(code, leave)
            if loop is None:
                return
            statement = loop
            continue
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module, ast.ClassDef)):
            return
        statement = parent if isinstance(parent, ast.stmt) else code.statement_of(parent)


def _following(parent: ast.AST, statement: ast.stmt) -> Sequence[ast.stmt]:
    for block in _BLOCKS:
        body = getattr(parent, block, None)
        if isinstance(body, list) and statement in body:
            return body[body.index(statement) + 1 :]
    return ()


def conditions_of(code: Code, node: ast.AST) -> set[tuple[str, bool]]:
    """Returns the conditions under which a node runs, each with whether it holds."""
    found: set[tuple[str, bool]] = set()
    inner = node
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(outer, ast.If) and inner is not outer.test:
            found.add(_plain(outer.test, holds=inner not in outer.orelse))
        inner = outer
    return found


def exclude(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Returns whether two nodes stand under conditions that never hold together."""
    mine = conditions_of(code, one)
    return any((text, not holds) in mine for text, holds in conditions_of(code, other))


def _plain(test: ast.expr, *, holds: bool) -> tuple[str, bool]:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None:
            holds = holds == isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
            test = test.left
    return ast.unparse(test), holds


def marks_of(code: Code, node: ast.AST) -> set[str]:
    """Returns the names that are set together with a node, and can say afterwards that it ran."""
    statement = code.statement_of(node)
    parent = code.parents.get(statement) if statement is not None else None
    found: set[str] = set()
    siblings = getattr(parent, "body", []) if isinstance(parent, ast.If) else []
    for other in (statement, *siblings):
        targets = getattr(other, "targets", None) or [getattr(other, "target", None)]
        if isinstance(other, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            found |= {n for target in targets if target is not None for n in names_in(target)}
    return found


def names_in(node: ast.AST) -> set[str]:
    """Returns the names and attributes an expression mentions."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def spans(statement: ast.stmt, lines: list[int]) -> bool:
    """Returns whether one of some lines lies in a statement."""
    return any(statement.lineno <= line <= (statement.end_lineno or 0) for line in lines)
