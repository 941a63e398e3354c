"""The guard: a bad step never reaches the weights."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.guard.guard import Guard

__all__ = ["Guard"]


def __getattr__(name: str) -> Any:
    # The policy and the spike windows beside it work without torch, so torch waits.
    if name == "Guard":
        return import_module("nanguard.guard.guard").Guard
    raise AttributeError(f"module 'nanguard.guard' has no attribute {name!r}")
