"""Where a file makes recurrent layers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.layers import RECURRENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code


def first_recurrent(code: Code) -> ast.AST | None:
    """Returns the first place where a recurrent layer is made, if there is one."""
    layers = (value.node for value in code.of("new") if _is_layer(value.path))
    made: list[ast.AST] = [node for node in layers if node is not None]
    derived = (cls for cls in code.classes.values() if any(map(_is_layer, cls.bases)))
    made += [cls.node for cls in derived]
    made = made or [*_chosen(code)]
    return min(made, key=lambda node: getattr(node, "lineno", 0)) if made else None


def _is_layer(path: str) -> bool:
    return path.startswith("torch.nn.") and path.rpartition(".")[2] in RECURRENT


def _chosen(code: Code) -> Iterator[ast.AST]:
    """Calls of a recurrent layer that is looked up: in a table, by name, by a condition."""
    for value in code.of("call"):
        func = value.node.func if isinstance(value.node, ast.Call) else None
        if not isinstance(func, (ast.Subscript, ast.Call, ast.IfExp, ast.Name)):
            continue
        callee = value.inputs[0] if value.inputs else None
        for made in callee.upstream(8) if callee is not None else ():
            nodes = ast.walk(made.node) if isinstance(made.node, (ast.Dict, ast.IfExp)) else ()
            if any(_is_recurrent(code, node) for node in nodes):
                yield value.node  # type: ignore[misc]
                break
        if isinstance(func, ast.Call) and getattr(func.func, "id", "") == "getattr" and func.args:
            is_nn = code.names.path(func.args[0]) == "torch.nn"
            if is_nn and any(f'"{name}"' in code.text.content for name in RECURRENT):
                yield value.node  # type: ignore[misc]


def _is_recurrent(code: Code, node: ast.AST) -> bool:
    if not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    return _is_layer(code.names.path(node))
