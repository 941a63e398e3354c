"""Help for tests: faults on purpose in a run, and the examples of a rule.

``inject`` needs torch, which is imported when it is first asked for; ``check_rule`` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.testing.rules import check_rule

if TYPE_CHECKING:
    from nanguard.testing.faults import Fault, Injection, Target, inject

__all__ = ["Fault", "Injection", "Target", "check_rule", "inject"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nanguard.testing' has no attribute {name!r}")
    from nanguard.errors import MissingDependencyError

    try:
        from nanguard.testing import faults
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        raise MissingDependencyError.of(f"nanguard.testing.{name}", error) from error
    return getattr(faults, name)
