"""The judge of logs: what the rules say about one, and where in its numbers that shows.

``nanguard check`` runs the same rules over files; ``watch``, ``serve`` and ``report`` come here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from nanguard.check.log.quantities import Quantity
from nanguard.check.log.rules.grad_norm_spike import norm_spikes
from nanguard.check.log.rules.loss_spike import loss_spikes
from nanguard.check.outcome import in_order
from nanguard.check.outcome import judge as judge_source
from nanguard.check.selection import Selection
from nanguard.findings import Severity, name_of
from nanguard.view.runs.curves import gaps_of
from nanguard.view.runs.run_model import EventKind, RunEvent
from nanguard.view.runs.run_model import in_order as events_in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.log.series import Log, MetricSeries, Note
    from nanguard.findings import Finding
    from nanguard.view.runs.run_model import Run

_SPIKES = {"loss-spike": loss_spikes, "grad-norm-spike": norm_spikes}
_BAD = {"non-finite-loss": Quantity.LOSS, "non-finite-grad-norm": Quantity.GRAD_NORM}
_SHOWN_AS_GAPS = frozenset((*_BAD, "hidden-nan"))
_MOST_GAPS = 200
# Good numbers after which bad ones are over; fewer in between are part of one fault.
CALM = 3
# Lines after which a warning in words is a new one.
_LINES_BETWEEN = 20


@dataclass(frozen=True, slots=True)
class MarkedPlace:
    """A place of a log at which a finding shows.

    Attributes:
        finding: The finding.
        text: What is there, in words.
        index: Where in its series, or on which line, that begins; 0 where a fault has one place.
        step: The step of that, if the log has steps.
        value: The number there, if it is about one.
        last: The last step, where a fault goes on for several.
        count: How many numbers or lines it is about.
        over: Whether the numbers after it are good again.
        in_words: Whether a line says so, and no number.
    """

    finding: Finding
    text: str
    index: int = 0
    step: int | None = None
    value: float | None = None
    last: int | None = None
    count: int = 1
    over: bool = True
    in_words: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rules say about a log.

    Attributes:
        findings: The findings, by line.
        problems: Rules that failed on it, in words.
    """

    log: Log
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def alarms(self) -> list[Finding]:
        """The findings that are more than a remark."""
        return [one for one in self.findings if one.severity is not Severity.INFO]

    def places(self) -> Iterator[MarkedPlace]:
        """Yields every place at which a finding shows: each spike, each stretch of NaN."""
        for finding in self.findings:
            if finding.name in _SPIKES:
                yield from _spikes(self.log, finding)
            elif finding.name in _BAD:
                yield from _bad(self.log, finding)
            else:
                yield MarkedPlace(finding, finding.message, step=finding.step)


def judge_log(log: Log, selection: Selection | None = None) -> Judgement:
    """Returns what rules say about a log.

    Args:
        log: The log.
        selection: The rules; all of them without it.
    """
    rules = (selection or Selection()).rules("log")
    found, failed = judge_source(rules, log, log.path)
    return Judgement(log, in_order(found), [entry.reason for entry in failed])


def _spikes(log: Log, finding: Finding) -> Iterator[MarkedPlace]:
    for series, spikes in _SPIKES[finding.name](log):
        if (series.name, series.rank) != (finding.where, finding.rank):
            continue
        for spike in spikes:
            said = f"{series.name} jumped to {name_of(spike.point.value)}; up to "
            said += f"{name_of(spike.limit)} would be usual"
            point = spike.point
            yield MarkedPlace(finding, said, point.index, point.step, point.value)


def _bad(log: Log, finding: Finding) -> Iterator[MarkedPlace]:
    """Yields the stretches of numbers that are not finite, or of lines that speak of them."""
    role = _BAD[finding.name]
    own = [one for one in log.of(role) if (one.name, one.rank) == (finding.where, finding.rank)]
    series = next((one for one in own if one.bad()), None)
    if series is not None:
        yield from _stretches(series, finding)
        return
    notes = [note for note in log.notes if note.role is role]
    for stretch in _close_together(notes):
        first, last = stretch[0], stretch[-1]
        yield MarkedPlace(
            finding,
            f"the log says: {first.said}",
            first.line or 0,
            first.step,
            last=last.step,
            count=len(stretch),
            in_words=True,
        )


def _stretches(series: MetricSeries, finding: Finding) -> Iterator[MarkedPlace]:
    bad = series.bad()
    start = 0
    for at in range(1, len(bad) + 1):
        if at < len(bad) and bad[at] - bad[at - 1] <= CALM:
            continue
        first, last = series[bad[start]], series[bad[at - 1]]
        yield MarkedPlace(
            finding,
            f"{series.name} is {name_of(first.value)}",
            first.index,
            first.step,
            first.value,
            last.step,
            at - start,
            len(series) - 1 - last.index >= CALM,
        )
        start = at


def _close_together(notes: Iterable[Note]) -> list[list[Note]]:
    out: list[list[Note]] = []
    for note in notes:
        if out and (note.line or 0) - (out[-1][-1].line or 0) <= _LINES_BETWEEN:
            out[-1].append(note)
        else:
            out.append([note])
    return out


def judge(run: Run, selection: Selection | None = None) -> None:
    """Adds what rules find in the logs of a run to its findings, and to what happened in it.

    Args:
        run: The run.
        selection: The rules; all of them without it.
    """
    known = {(finding.get("code"), finding.get("message")) for finding in run.findings}
    for log in run.logs:
        judged = judge_log(log, selection)
        new = [one for one in judged.findings if (one.code, one.message) not in known]
        run.findings += [one.to_json() for one in new]
        run.problems += judged.problems
        placed = {event.step for event in run.events}
        shown = chain(_events(judged, new), _gaps(run, new))
        run.events += [event for event in shown if event.step not in placed]
    run.events = events_in_order(run.events)


def _events(judged: Judgement, findings: list[Finding]) -> Iterator[RunEvent]:
    """Yields what is marked in the curves, except what shows as a gap."""
    for place in judged.places():
        finding = place.finding
        if finding not in findings or finding.name in _SHOWN_AS_GAPS or place.step is None:
            continue
        if finding.name in _SPIKES:
            yield RunEvent(EventKind.SPIKE, place.step, place.text, severity="warning")
        else:
            said, severity = f"{finding.name}: {finding.message}", finding.severity.value
            yield RunEvent(EventKind.NOTE, place.step, said, severity=severity)


def _gaps(run: Run, findings: list[Finding]) -> Iterator[RunEvent]:
    """Yields the stretches in which curves are not finite, where a rule calls that a fault."""
    if not any(finding.name in _SHOWN_AS_GAPS for finding in findings):
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
