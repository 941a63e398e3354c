"""What a cause is: what speaks for it, what would prove it, and what would repair it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.diagnose.case import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.diagnose.repairs import Repair


@dataclass(slots=True)
class Suspicion:
    """A cause that the evidence speaks for.

    Attributes:
        strength: How much it does, from 0 to 1, before anything was tried.
        summary: What happened, in a sentence with the value.
        evidence: The numbers behind it.
    """

    strength: float
    summary: str
    evidence: list[dict[str, Any]] = field(default_factory=list)


class Cause(ABC):
    """A reason for a step to go bad. One class, one file.

    Attributes:
        code: Its name in incidents; a contract.
        meaning: What it stands for, in a line.
        why: Why it happens and what to do, for ``nanguard explain``.
        lower_rate_helps: Whether a lower learning rate may keep it from happening again.
        lies_in_samples: Whether it comes again with the same samples, whatever the weights are.
    """

    code: str
    meaning: str
    why: str
    lower_rate_helps: bool = True
    lies_in_samples: bool = False

    @abstractmethod
    def suspect(self, case: Case) -> Suspicion | None:
        """Returns what speaks for this cause; None if nothing does."""

    def trials(self, case: Case) -> list[Trial]:
        """Tries what would keep the step finite if this is the cause, and only then."""
        return []

    def concluded(self, case: Case, suspicion: Suspicion) -> str:
        """Returns what happened, in a sentence, now that things have been tried."""
        return suspicion.summary

    def repairs(self, case: Case) -> list[Repair]:
        """Returns what the user can do about it."""
        return []


def all_causes() -> list[Cause]:
    """Returns one of each cause there is, in the order of their codes."""
    from nanguard.diagnose import causes

    found: list[Cause] = []
    for module in pkgutil.iter_modules(causes.__path__):
        loaded = importlib.import_module(f"{causes.__name__}.{module.name}")
        found += [
            member()
            for member in vars(loaded).values()
            if isinstance(member, type)
            and issubclass(member, Cause)
            and member.__module__ == loaded.__name__
        ]
    return sorted(found, key=lambda cause: cause.code)
