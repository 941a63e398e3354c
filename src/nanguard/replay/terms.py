"""The terms of a loss, by the names a script has for them."""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING

import torch

from nanguard.replay.tracer.sites import users_frame

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor


def terms_of(loss: Tensor, frame: FrameType | None) -> dict[str, float]:
    """Returns what a loss was added up from: the scalars named where it was last assigned.

    Args:
        loss: The loss.
        frame: The frame that calls backward, or one below it.
    """
    frame = users_frame(frame)
    while frame is not None:
        values = {n: v for n, v in frame.f_locals.items() if _is_scalar(v)}
        tree = _tree_of(frame)
        name = next((n for n, v in values.items() if v.data_ptr() == loss.data_ptr()), None)
        if name is None and tree is not None:
            # (loss / 4).backward(): what goes in has no name, but what it is made of has one.
            name = next((n for n in _called_with(tree, frame) if n in values), None)
        if name is not None and tree is not None:
            parts = _parts_of(name, tree, frame)
            return {n: float(values[n].detach()) for n in parts if n in values}
        frame = users_frame(frame.f_back)
    return {}


def _is_scalar(value: object) -> bool:
    return issubclass(type(value), torch.Tensor) and value.dim() == 0  # type: ignore[attr-defined]


def _tree_of(frame: FrameType) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _called_with(tree: ast.Module, frame: FrameType) -> list[str]:
    """Returns the names in what backward is called on, or with, on a frame's line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        last = node.end_lineno or node.lineno
        if node.func.attr == "backward" and node.lineno <= (frame.f_lineno or 0) <= last:
            return [name for part in (node.func.value, *node.args) for name in _names_in(part)]
    return []


def _parts_of(name: str, tree: ast.Module, frame: FrameType) -> list[str]:
    """Returns the names in the last assignment to a variable before a frame's line.

    One that builds on the variable (``loss = loss / 4``, ``loss += decay``) adds to those before.
    """
    first, last = frame.f_code.co_firstlineno, frame.f_lineno or 0
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AugAssign)) and first <= node.lineno <= last
    ]
    found: list[str] = []
    for node in sorted(made, key=lambda node: node.lineno):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            names = _names_in(node.value)
            builds_on = isinstance(node, ast.AugAssign) or name in names
            found = [*(found if builds_on else []), *(n for n in names if n != name)]
    return found


def _names_in(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
