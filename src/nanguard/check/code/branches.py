"""Branches that a training step does not take: going by the flag that is asked."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.code.code import Code

# Flags of a model that is used, and of one that is trained.
_USE = re.compile(
    r"reverse|gen|generate|generation|infer|inference|inferring|sampl(e|ing)|is_sampling|eval"
    r"|evaluate|is_eval|do_eval|evaluation|is_test|test|testing|validation|is_inference|do_sample"
)
_TRAINING = re.compile(r"(is_)?train(ing)?|is_train|do_train|training_mode|train_mode")


def is_branch_of_use(code: Code, node: ast.AST | None) -> bool:
    """Returns whether a place lies in a branch for sampling or evaluation, as ``if reverse:``."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
            taken = node in parent.body if isinstance(parent, ast.If) else node is parent.body
            if _is_asked_to_use(parent.test, holds=taken):
                return True
        node = parent
    return False


def _is_asked_to_use(test: ast.expr, *, holds: bool) -> bool:
    """Returns whether a condition that holds, or does not, says that nobody trains."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_asked_to_use(test.operand, holds=not holds)
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And)
        return every is holds and any(_is_asked_to_use(part, holds=holds) for part in test.values)
    name = getattr(test, "attr", getattr(test, "id", "")).lower()
    flag = _USE if holds else _TRAINING
    return bool(name) and flag.fullmatch(name) is not None
