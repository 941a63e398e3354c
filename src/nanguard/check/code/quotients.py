"""Questions about divisions that several rules ask."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# The largest number that is added to keep away from zero, and not for its own sake.
LARGEST_EPS = 1e-3


def is_eps(value: Value) -> bool:
    """Returns whether a value is a small number that is added for safety."""
    number = value.number()
    if number is not None:
        return 0 < number <= LARGEST_EPS
    return value.has("eps")


def has_eps_outside(code: Code, quotient: Value) -> bool:
    """Returns whether an eps is added to a quotient, where it protects nothing."""
    node = quotient.node
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
            other = parent.right if parent.left is node else parent.left
            value = code.values.get(other)
            return value is not None and is_eps(value)
        if not isinstance(parent, ast.BinOp):
            return False
        node = parent
    return False
