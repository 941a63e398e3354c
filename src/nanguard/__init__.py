"""Keeps a PyTorch run alive when its numbers go bad, and tells you, with proof, why they did.

``import nanguard`` is light: what a name needs is imported when it is first used.
"""

from __future__ import annotations

import os
import sys

# ``python -m`` puts the current folder before everything else. A ``token.py`` or ``yaml.py`` in a
# folder that is to be checked would be imported, and run, by the first import that follows.
if (
    sys.argv[:1] == ["-m"]
    and {"nanguard", "-mnanguard"} & set(sys.orig_argv)
    and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    and sys.path[:1] == [os.getcwd()]  # noqa: PTH109 - pathlib is one of those imports
):
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, NanguardError, NonFiniteError

if TYPE_CHECKING:
    from nanguard import ops
    from nanguard.alerts import notify
    from nanguard.findings import Finding, Severity
    from nanguard.guard import Guard
    from nanguard.loader import check_loader
    from nanguard.settings import Settings

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
    "notify",
    "ops",
]

_LAZY = {
    "Finding": "nanguard.findings",
    "Guard": "nanguard.guard",
    "Settings": "nanguard.settings",
    "Severity": "nanguard.findings",
    "check_loader": "nanguard.loader",
    "notify": "nanguard.alerts",
}


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


def load_ipython_extension(shell: Any) -> None:
    """Adds ``%nanguard`` and ``%%nanguard`` to a notebook; called by ``%load_ext nanguard``."""
    import_module("nanguard.cli.magics").load(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
