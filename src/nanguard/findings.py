"""The one record every part of nanguard produces and every report shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad a finding is."""

    ERROR = "error"  # produces NaN or Inf, or hides one
    WARNING = "warning"  # often does
    INFO = "info"  # makes the cause hard to find

    @property
    def rank(self) -> int:
        """Orders severities: a higher rank is worse."""
        return ("info", "warning", "error").index(self.value)


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a text: what stands between two offsets, counted in characters, is replaced."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """One way to repair a finding.

    Attributes:
        title: What to do, in a line.
        safe: Whether the fix keeps what the program computes.
        edits: The same as changes of the finding's file; none if it has to be done by hand.
        plan: What to do once the repair has held, in order.
        keys: Whether it renames or adds a key of a configuration.
    """

    title: str
    safe: bool = False
    edits: tuple[Edit, ...] = ()
    plan: tuple[str, ...] = ()
    keys: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the fix as the report's JSON has it."""
        return {"title": self.title, "safe": self.safe}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: what it is, where it is, and what to do about it.

    Attributes:
        code: Stable code such as ``RUN001``.
        name: Kebab-case name of the fault.
        severity: How bad it is.
        message: What was found, with the value.
        path: The file it concerns, if any.
        line: 1-based line in that file.
        column: 1-based column in that line.
        where: The place in words: a parameter, a key, a tensor, a loss term.
        step: The step it concerns, counted from 0.
        rank: The rank it was seen on, where several train together.
        fixes: Ways to repair it.
    """

    code: str
    name: str
    severity: Severity
    message: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    where: str | None = None
    step: int | None = None
    rank: int | None = None
    fixes: tuple[Fix, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as the report's JSON has it."""
        out: dict[str, Any] = {
            "code": self.code,
            "name": self.name,
            "severity": self.severity.value,
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "where": self.where,
            "message": self.message,
            "fixes": [fix.to_json() for fix in self.fixes],
        }
        if self.step is not None:
            out["step"] = self.step
        if self.rank is not None:
            out["rank"] = self.rank
        return out


@dataclass(frozen=True, slots=True)
class Kind:
    """What findings of one kind have in common; calling it makes one."""

    code: str
    name: str
    severity: Severity

    def __call__(self, message: str, **place: Any) -> Finding:
        """Returns a finding of this kind.

        Args:
            message: What was found, with the value.
            place: Where, as in the fields of a finding.
        """
        return replace(Finding(self.code, self.name, self.severity, message), **place)


def number(value: float) -> float | str:
    """Returns a value that JSON can hold: non-finite numbers become their names."""
    if math.isfinite(value):
        return value
    return name_of(value)


def name_of(value: float) -> str:
    """Returns how a number is written in messages: ``nan``, ``inf``, ``-inf`` or short digits."""
    if value != value:  # NaN is the one value that differs from itself
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    try:
        return f"{value:.4g}"
    except OverflowError:  # a whole number beyond any float
        return "inf" if value > 0 else "-inf"
