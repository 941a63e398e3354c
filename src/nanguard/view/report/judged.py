"""Findings about a run: what the rules for logs say, and where in the curves it shows."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanguard.check.log.log_rule import is_game, main_losses, main_norms
from nanguard.check.log.loss_judge import spikes_of
from nanguard.check.outcome import in_order
from nanguard.check.outcome import judge as judge_source
from nanguard.check.selection import Selection
from nanguard.findings import name_of
from nanguard.view.runs.curves import gaps_of
from nanguard.view.runs.run_model import EventKind, RunEvent
from nanguard.view.runs.run_model import in_order as events_in_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log
    from nanguard.view.runs.run_model import Run

_SPIKES = frozenset(("loss-spike", "grad-norm-spike"))
_NON_FINITE = frozenset(("non-finite-loss", "non-finite-grad-norm", "hidden-nan"))
_MOST_GAPS = 200


def judge(run: Run, selection: Selection | None = None) -> None:
    """Adds what rules find in the logs of a run to its findings, and to what happened in it.

    Args:
        run: The run.
        selection: The rules; all of them without it.
    """
    rules = (selection or Selection()).rules("log")
    known = {(finding.get("code"), finding.get("message")) for finding in run.findings}
    for log in run.logs:
        found, failed = judge_source(rules, log, log.path)
        new = [f.to_json() for f in in_order(found) if (f.code, f.message) not in known]
        run.findings += new
        run.problems += [entry.reason for entry in failed]
        placed = {event.step for event in run.events}
        shown = chain(_spikes(log, new), _non_finite(run, new), _others(new))
        run.events += [event for event in shown if event.step not in placed]
    run.events = events_in_order(run.events)


def _spikes(log: Log, findings: list[dict[str, Any]]) -> Iterator[RunEvent]:
    """Yields every spike of the series in which a rule found one."""
    named = {finding["where"] for finding in findings if finding["name"] in _SPIKES}
    watched = [(one, False, is_game(log)) for one in main_losses(log)]
    watched += [(one, True, False) for one in main_norms(log)]
    for series, positive, bold in watched:
        if series.name not in named:
            continue
        for spike in spikes_of(series, positive=positive, bold=bold):
            if spike.point.step is not None:
                said = f"{series.name} jumped to {name_of(spike.point.value)}; up to "
                said += f"{name_of(spike.limit)} would be usual"
                yield RunEvent(EventKind.SPIKE, spike.point.step, said, severity="warning")


def _non_finite(run: Run, findings: list[dict[str, Any]]) -> Iterator[RunEvent]:
    """Yields the stretches in which curves are not finite, where a rule calls that a fault."""
    if not any(finding["name"] in _NON_FINITE for finding in findings):
        return
    seen: set[tuple[float, float]] = set()
    for curve in run.curves:
        if curve.evaluation:
            continue
        for gap in gaps_of(curve.values, _MOST_GAPS):
            first, last = curve.xs[gap.start], curve.xs[gap.end - 1]
            if (first, last) in seen:
                continue
            seen.add((first, last))
            said = f"{curve.name} is {name_of(_kind(curve.values[gap.start]))}"
            yield RunEvent(EventKind.NON_FINITE, first, said, last, gap.count, "error")


def _kind(value: float) -> float:
    """Returns a value that is not finite; NaN for one that is."""
    return math.nan if math.isfinite(value) else value


def _others(findings: list[dict[str, Any]]) -> Iterator[RunEvent]:
    for finding in findings:
        if finding["name"] not in _SPIKES | _NON_FINITE and "step" in finding:
            said = f"{finding['name']}: {finding['message']}"
            yield RunEvent(EventKind.NOTE, finding["step"], said, severity=finding["severity"])
