"""The terms of a loss, by the names a script has for them."""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING

import torch

from nanguard.tracer.sites import users_frame

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
        name = next((n for n, v in values.items() if v.data_ptr() == loss.data_ptr()), None)
        if name is not None:
            parts = _named_in(name, frame)
            return {n: float(values[n].detach()) for n in parts if n in values and n != name}
        frame = users_frame(frame.f_back)
    return {}


def _is_scalar(value: object) -> bool:
    return issubclass(type(value), torch.Tensor) and value.dim() == 0  # type: ignore[attr-defined]


def _named_in(name: str, frame: FrameType) -> list[str]:
    """Returns the names in the last assignment to a variable before a frame's line."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    first = frame.f_code.co_firstlineno
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        else:
            continue
        here = first <= node.lineno <= (frame.f_lineno or 0)
        if here and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            found = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
    return found
