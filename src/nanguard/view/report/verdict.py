"""The verdict about a run in words: what the rules for logs say, and where in the numbers it shows.

``nanguard check`` runs the same rules over files; ``watch``, ``serve`` and ``report`` come here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from nanguard.check.log.quantities import Quantity
from nanguard.check.log.rules.spikes import loss_spikes, norm_spikes
from nanguard.check.outcome import in_order
from nanguard.check.outcome import judge as judge_source
from nanguard.check.selection import Selection
from nanguard.findings import Severity, name_of
from nanguard.view.report import words
from nanguard.view.report.words import branch, entries, text, whole
from nanguard.view.runs.curves import gaps_of, restarts_of, thin
from nanguard.view.runs.run_model import EventKind, Panel, RunEvent
from nanguard.view.runs.run_model import in_order as events_in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.log.series import Log, MetricSeries, Note
    from nanguard.findings import Finding
    from nanguard.view.runs.run_model import Curve, Run

_SPIKES = {"loss-spike": loss_spikes, "grad-norm-spike": norm_spikes}
_BAD = {"non-finite-loss": Quantity.LOSS, "non-finite-grad-norm": Quantity.GRAD_NORM}
_SHOWN_AS_GAPS = frozenset((*_BAD, "hidden-nan"))
# Stretches of non-finite numbers of a curve that become places.
_MOST_GAPS = 200
# Good numbers after which bad ones are over; fewer in between are part of one fault.
CALM = 3
# Lines after which a warning in words is a new one.
_LINES_BETWEEN = 20
# Buckets in which the main curve is looked at for a sentence.
_ROUGH_BUCKETS = 4096
# Different causes that the verdict names.
_MOST_CAUSES = 2
GOOD, GUARDED, BAD, NOTHING = "good", "guarded", "bad", "nothing"
LABELS = {GOOD: "Healthy", GUARDED: "Guarded", BAD: "Went bad", NOTHING: "Nothing to judge"}
_DONE = {
    EventKind.SKIP: ("skipped one step", "skipped {} steps"),
    EventKind.LR_CUT: ("cut the learning rate once", "cut the learning rate {} times"),
    EventKind.ROLLBACK: ("rolled back once", "rolled back {} times"),
    EventKind.STOP: ("stopped the run", "stopped the run"),
}
_ACTIONS = {
    "skip": EventKind.SKIP,
    "cut-lr": EventKind.LR_CUT,
    "rollback": EventKind.ROLLBACK,
    "stop": EventKind.STOP,
}


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
    acted = acted_on(run.events)
    for log in run.logs:
        judged = judge_log(log, selection)
        new = [
            one
            for one in judged.findings
            if (one.code, one.message) not in known and not _is_kept_out(one, log, acted)
        ]
        run.findings += [one.to_json() for one in new]
        run.problems += judged.problems
        placed = {event.step for event in run.events}
        shown = chain(_events(judged, new), _gaps(run, new))
        run.events += [event for event in shown if event.step not in placed]
    run.events = events_in_order(run.events)


def acted_on(events: Iterable[RunEvent]) -> set[float | None]:
    """Returns the steps that the guard has kept out of the weights."""
    kinds = (*_DONE, EventKind.OVERFLOW)
    return {event.step for event in events if event.kind in kinds and event.step is not None}


def faults_in(log: Log, acted: set[float | None]) -> list[Finding]:
    """Returns what is wrong with a log, except for numbers that the guard kept out of the weights.

    Args:
        log: The log.
        acted: The steps that the guard has acted on.
    """
    return [one for one in judge_log(log).alarms if not _is_kept_out(one, log, acted)]


def _is_kept_out(finding: Finding, log: Log, acted: set[float | None]) -> bool:
    """Returns whether a finding is about numbers that the guard has kept out of the weights.

    The record says of each of these steps what was done, and an incident why: no rule has to.
    """
    if finding.name not in _BAD:
        return False
    own = (finding.where, finding.rank)
    series = (one for one in log.of(_BAD[finding.name]) if (one.name, one.rank) == own)
    bad: set[float | None] = {one[at].step for one in series for at in one.bad()}
    return (bad or {finding.step}) <= acted


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


@dataclass(slots=True)
class Verdict:
    """What there is to say about a run.

    Attributes:
        state: ``good``, ``guarded``, ``bad`` or ``nothing``.
        headline: A sentence.
        facts: Pairs of a heading and what there is to say, a line for each point.
        turn: The step at which it turned; None if it did not.
    """

    state: str
    headline: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    turn: float | None = None

    @property
    def label(self) -> str:
        """The state in a word or two."""
        return LABELS[self.state]


def verdict_of(run: Run) -> Verdict:
    """Returns the verdict about a run whose findings are known."""
    main = run.main()
    if main is None and not run.incidents and not run.findings and not run.events:
        return Verdict(
            NOTHING, "Nothing was recorded: there is no number in this run.", _unread(run)
        )
    turn = _turn(run)
    done = _done(run)
    ended = _end(main)
    state, headline = _headline(run, turn, done, ended=ended)
    verdict = Verdict(state, headline, turn=turn)
    first = _worst_finding(run, turn)
    facts = [
        ("When it turned", text(first, "message", 600) if first else ""),
        ("What moved first", "" if turn is None else _moved(run, turn)),
        ("Where and why", _why(run)),
        ("What the guard did", _guard(run, done)),
        ("How it ended", _ending(run, main)),
    ]
    verdict.facts = [(title, said) for title, said in facts if said] + _unread(run)
    return verdict


def _turn(run: Run) -> float | None:
    """Returns the first step of which something says that it was bad."""
    steps: list[float] = [
        finding["step"]
        for finding in run.findings
        if finding.get("severity") == "error" and _is_number(finding.get("step"))
    ]
    kinds = (EventKind.NON_FINITE, EventKind.INCIDENT, EventKind.STOP, *_DONE)
    steps += [e.step for e in run.events if e.kind in kinds and e.step is not None]
    return min(steps, default=None)


def _done(run: Run) -> dict[EventKind, int]:
    """Counts what the guard did; incidents tell it where there are no events."""
    counts = dict.fromkeys(_DONE, 0)
    for event in run.events:
        if event.kind in counts:
            counts[event.kind] += event.count
    if not any(counts.values()):
        for incident in run.incidents:
            kind = _ACTIONS.get(text(branch(incident, "action"), "taken"))
            if kind is not None:
                counts[kind] += 1
    return {kind: count for kind, count in counts.items() if count}


def _end(main: Curve | None) -> bool | None:
    """Returns whether a run ended with finite numbers; None if there are none."""
    if main is None or not len(main):
        return None
    return math.isfinite(main.values[len(main) - 1])


def _headline(
    run: Run, turn: float | None, done: dict[EventKind, int], *, ended: bool | None
) -> tuple[str, str]:
    at = "" if turn is None else f" at {run.axis.value if run.curves else 'step'} {_whole(turn)}"
    if EventKind.STOP in done:
        return BAD, f"The run went bad{at}, and the guard stopped it."
    if ended is False and turn is not None and (done or run.incidents):
        return BAD, f"The run went bad{at}; the guard acted, but the last loss is not finite."
    if turn is not None and (done or run.incidents):
        went_on = ", and the run went on" if ended else ""
        kept = f"the guard kept it out of the weights{went_on}"
        return GUARDED, f"A loss or gradient went bad{at}; {kept}."
    if ended is False:
        return BAD, f"The run went bad{at} and did not come back."
    if turn is not None:
        return BAD, f"The run went bad{at}{', and its numbers came back later' if ended else ''}."
    return _without_turn(run, ended=ended)


def _without_turn(run: Run, *, ended: bool | None) -> tuple[str, str]:
    severe = [f for f in run.findings if f.get("severity") in ("error", "warning")]
    if severe:
        what = "one thing" if len(severe) == 1 else f"{len(severe)} things"
        return GUARDED, f"The run stayed finite; there {_is(severe)} {what} to look at."
    if ended is None:
        return NOTHING, "There is no curve in this run to judge."
    if not run.logs:
        return NOTHING, "No rule had a log to look at."
    return GOOD, "Every number that was recorded is finite, and no rule found a fault."


def _is(of: list[Any]) -> str:
    return "is" if len(of) == 1 else "are"


def _worst_finding(run: Run, turn: float | None) -> dict[str, Any] | None:
    placed = [f for f in run.findings if turn is not None and f.get("step") == turn]
    errors = [f for f in placed if f.get("severity") == "error"]
    for finding in errors or placed:
        return finding
    event = next((e for e in run.events if e.step == turn and turn is not None), None)
    if event is None:
        return None
    said = event.text
    if event.incident is not None:
        said = words.symptom(branch(run.incidents[event.incident], "symptom"))
    return {"message": f"At step {_whole(turn)} {said}."}


def _moved(run: Run, turn: float) -> str:
    moves = moves_before(run, turn)
    if not moves:
        return ""
    parts = [
        f"{move.name} from {run.axis.value} {_whole(move.step)} on "
        f"({name_of(move.usual)} to {name_of(move.then)})"
        for move in moves[:3]
    ]
    return f"Before it turned, this left its usual range: {'; then '.join(parts)}."


def _why(run: Run) -> str:
    parts: list[str] = []
    seen: set[tuple[str, str, int | None]] = set()
    for incident in run.incidents:
        cause, origin = branch(incident, "cause"), branch(incident, "origin")
        code = text(cause, "code")
        key = (code, text(origin, "file"), whole(origin, "line"))
        if code in ("", "unknown") or key in seen or len(seen) >= _MOST_CAUSES:
            continue
        seen.add(key)
        parts.append(f"{words.sentence(incident)}.")
        verified = [f for f in entries(incident, "fixes") if f.get("verified") is True]
        if verified:
            parts[-1] += f" A fix was tried and held: {text(verified[0], 'summary', 300)}."
    return "\n".join(parts)


def _guard(run: Run, done: dict[EventKind, int]) -> str:
    if not done:
        return ""
    parts = [
        one if count == 1 else many.format(count)
        for kind, count in done.items()
        for one, many in [_DONE[kind]]
    ]
    said = f"It {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"It {parts[0]}"
    reason = next((e.reason for e in run.events if e.kind in done and e.reason), "")
    return f"{said}{f' (first: {reason})' if reason else ''}."


def _ending(run: Run, main: Curve | None) -> str:
    if main is None or not len(main):
        return ""
    last = len(main) - 1
    said = f"The last {main.name}, at {run.axis.value} {_whole(main.xs[last])}, is "
    said += name_of(main.values[last])
    rough = thin(main.values[: len(main)], most=_ROUGH_BUCKETS)
    bad = sum(gap.count for gap in rough.gaps)
    if bad:
        said += f"; {bad} of {len(main)} values are not finite"
    if not rough.starts:
        return said + "."
    first = main.values[rough.starts[0]]
    lowest = min(range(len(rough.lows)), key=rough.lows.__getitem__)
    at = main.values.index(rough.lows[lowest], rough.starts[lowest])
    said += f"; the first was {name_of(first)}, the lowest {name_of(main.values[at])}"
    return f"{said} at {run.axis.value} {_whole(main.xs[at])}."


def _unread(run: Run) -> list[tuple[str, str]]:
    return [("Note", f"{problem[:1].upper()}{problem[1:400]}.") for problem in run.problems[:6]]


def _whole(step: float | None) -> str:
    if step is None:
        return "unknown"
    return f"{step:,.0f}".replace(",", "\u202f") if float(step).is_integer() else f"{step:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Points before the turn that are looked at, and how many of them show what is usual.
_LOOKED_AT = 400
# The first values of a curve, at most and at least, that say what is usual.
_USUAL_VALUES = 100
_FEWEST = 12
# How far above what is usual: in deviations, and as a factor.
_DEVIATIONS = 8.0
_FACTOR = 1.5
_WATCHED = (Panel.GRAD_NORM, Panel.TERMS, Panel.LOSS, Panel.SCALE)


@dataclass(frozen=True, slots=True)
class Move:
    """A number that left its usual range and did not come back.

    Attributes:
        name: The curve.
        step: Where it left.
        usual: What was usual before.
        then: The last value before the turn.
    """

    name: str
    step: float
    usual: float
    then: float


def moves_before(run: Run, turn: float) -> list[Move]:
    """Returns what moved before a step, the first one first."""
    found = [
        move
        for panel in _WATCHED
        for curve in run.of(panel)
        if not curve.evaluation and (move := _move(curve, turn)) is not None
    ]
    return sorted(found, key=lambda move: move.step)


def _move(curve: Curve, turn: float) -> Move | None:
    if restarts_of(curve.xs) != []:
        return None
    end = bisect_left(curve.xs, turn)
    begin = max(0, end - _LOOKED_AT)
    values = [value for value in curve.values[begin:end] if math.isfinite(value)]
    # What is not finite in between would shift the places.
    if len(values) < max(_FEWEST, end - begin):
        return None
    usual = values[: max(_FEWEST // 2, min(_USUAL_VALUES, len(values) // 2))]
    middle = median(usual)
    spread = 1.4826 * median(abs(value - middle) for value in usual)
    if curve.panel is Panel.SCALE:
        away = [value < middle / 4 for value in values]
    else:
        limit = max(middle + _DEVIATIONS * spread, middle + (_FACTOR - 1) * abs(middle))
        away = [value > limit for value in values]
    if not away[-1]:
        return None
    left = len(away) - next((n for n, gone in enumerate(reversed(away)) if not gone), len(away))
    if left < len(usual):
        return None
    return Move(curve.name, curve.xs[begin + left], middle, values[-1])
