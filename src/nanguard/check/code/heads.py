"""Questions about how a module splits its width into heads."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function

_HEADS = re.compile(r"(n|num|nb)?_?(attention_|attn_)?heads?$|n?h$|nheads?$|heads_count$")


def split_widths(code: Code, scope: Function | None) -> set[str]:
    """Returns the names of sizes that heads split, in the class or function of a place."""
    if scope is None:
        return set()
    family = scope.cls.line_of_descent() if scope.cls else []
    functions = [f for f in code.functions if f.cls in family] if family else [scope]
    widths: set[str] = set()
    for function in functions:
        for node in ast.walk(function.node):
            splits = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div))
            if splits and _HEADS.fullmatch(terminal(node.right).lower()):  # type: ignore[attr-defined]
                widths.add(terminal(node.left))  # type: ignore[attr-defined]
    if any(_views_heads(cls) for cls in family):
        for cls in family:
            widths |= _linear_widths(cls)
    return widths - {""}


def terminal(node: ast.expr) -> str:
    """Returns the last name of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _views_heads(cls: Class) -> bool:
    """Returns whether a class reshapes something to (..., heads, size of a head)."""
    return any(isinstance(node, ast.Call) and _splits_heads(node) for node in ast.walk(cls.node))


def _splits_heads(call: ast.Call) -> bool:
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if called == "rearrange":
        return any(_HEADS.fullmatch(terminal(given.value).lower()) for given in call.keywords)
    sizes = list(call.args)
    if called == "unflatten" and len(sizes) == 2 and isinstance(sizes[1], (ast.Tuple, ast.List)):
        sizes = sizes[1].elts
    elif called not in ("view", "reshape"):
        return False
    if len(sizes) < 2 or terminal(sizes[-1]).lower() in ("w", "width", "wp", "ww"):
        return False
    return _HEADS.fullmatch(terminal(sizes[-2]).lower()) is not None


def _linear_widths(cls: Class) -> set[str]:
    """Returns the names of the widths of a class's square projections."""
    found: set[str] = set()
    for node in ast.walk(cls.node):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Linear" and node.args:
            found.add(terminal(node.args[0]))
    return found
