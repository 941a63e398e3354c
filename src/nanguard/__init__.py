"""Keeps a PyTorch run alive when its numbers go bad, and tells you, with proof, why they did.

``import nanguard`` is light: torch is imported only when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, NanguardError, NonFiniteError
from nanguard.findings import Finding, Severity
from nanguard.settings import Settings

if TYPE_CHECKING:
    from nanguard import ops
    from nanguard.guard import Guard
    from nanguard.loader import check_loader

__version__ = "0.1.0"

__all__ = [
    "Finding",
    "Guard",
    "NanguardError",
    "NonFiniteError",
    "Settings",
    "Severity",
    "__version__",
    "check_loader",
    "ops",
]

_LAZY = {"Guard": "nanguard.guard", "check_loader": "nanguard.loader"}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("nanguard.ops")
    if name not in _LAZY:
        raise AttributeError(f"module 'nanguard' has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        raise MissingDependencyError.of(f"nanguard.{name}", error) from error


def __dir__() -> list[str]:
    return sorted(__all__)
