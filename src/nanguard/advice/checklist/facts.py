"""What a project shows: traces in its files, and what the rules found in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.findings import Finding

# What follows from one thing that is there and others that are not: the name, what has to be
# there, what must not be there, and what to say.
_DERIVED: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("one-rank", "step", ("several-ranks",), "one process trains, and has nobody to agree with"),
    (
        "unscaled",
        "step",
        ("scaler", "scaler-on", "fp16"),
        "no GradScaler is used, and gradients are not scaled",
    ),
    ("full-precision", "step", ("half",), "nothing is computed in half precision"),
    (
        "no-batchnorm",
        "model",
        ("batchnorm", "foreign-model"),
        "the models of the project have no BatchNorm",
    ),
    (
        "nan-filter",
        "hf-trainer",
        ("nan-filter-off",),
        "logging_nan_inf_filter is on by default and leaves NaN out of the logged loss",
    ),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """One thing that a file shows.

    Attributes:
        name: What it is a trace of.
        path: The file.
        line: The line, counted from 1; None for the whole file.
        words: What is there, in words.
    """

    name: str
    path: str
    line: int | None
    words: str


@dataclass(slots=True)
class Facts:
    """Everything that answers are made from.

    Attributes:
        traces: What files show, by name, in the order of files and lines.
        findings: What rules found, by rule.
        ran: The rules that looked.
    """

    traces: dict[str, list[Trace]] = field(default_factory=dict)
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()

    @classmethod
    def of(cls, traces: Iterable[Trace], findings: Iterable[Finding], ran: Iterable[str]) -> Facts:
        """Returns the facts, with what follows from them."""
        facts = cls(ran=frozenset(ran))
        for trace in traces:
            facts.traces.setdefault(trace.name, []).append(trace)
        for finding in findings:
            facts.findings.setdefault(finding.name, []).append(finding)
        for name, there, missing, words in _DERIVED:
            if there in facts.traces and not any(other in facts.traces for other in missing):
                first = facts.traces[there][0]
                facts.traces[name] = [Trace(name, first.path, first.line, words)]
        return facts

    def shown(self, names: tuple[str, ...]) -> list[Trace]:
        """Returns the traces of these names, the first name's first."""
        return [trace for name in names for trace in self.traces.get(name, ())]

    def found(self, rules: tuple[str, ...]) -> list[Finding]:
        """Returns what these rules found."""
        return [finding for rule in rules for finding in self.findings.get(rule, ())]
