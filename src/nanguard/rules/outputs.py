"""Questions about what the modules of a file give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.sources.python.code import Code


def some_module_returns(code: Code, kind: str) -> bool:
    """Returns whether the forward of a module of the file gives back a value of a kind."""
    for cls in code.classes.values():
        forward = cls.methods.get("forward")
        if forward is None or not cls.is_module():
            continue
        for result in forward.returns:
            if any(part.has(kind) for part in (result, *(result.items or ()))):
                return True
    return False
