"""Questions about what the modules of a file give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


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


def is_module_output(value: Value, use: Value) -> bool:
    """Returns whether a value was made in the forward of another module than where it is used."""
    scope, here = value.scope, use.scope
    if scope is None or scope is here or scope.name != "forward" or scope.cls is None:
        return False
    return here is None or here.cls is not scope.cls
