"""The verdict about a run in words: when it turned, what moved first, and how it ended."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of
from nanguard.view.report import words
from nanguard.view.report.fields import branch, entries, text, whole
from nanguard.view.runs.curves import restarts_of, thin
from nanguard.view.runs.run_model import EventKind, Panel

if TYPE_CHECKING:
    from nanguard.view.runs.run_model import Curve, Run

_ROUGH = 4096
_CAUSES = 2
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
    told = [
        f"{move.name} from {run.axis.value} {_whole(move.step)} on "
        f"({name_of(move.usual)} to {name_of(move.then)})"
        for move in moves[:3]
    ]
    return f"Before it turned, this left its usual range: {'; then '.join(told)}."


def _why(run: Run) -> str:
    told: list[str] = []
    seen: set[tuple[str, object, object]] = set()
    for incident in run.incidents:
        cause, origin = branch(incident, "cause"), branch(incident, "origin")
        code = text(cause, "code")
        key = (code, origin.get("file"), whole(origin, "line"))
        if code in ("", "unknown") or key in seen or len(seen) >= _CAUSES:
            continue
        seen.add(key)
        told.append(f"{words.sentence(incident)}.")
        verified = [f for f in entries(incident, "fixes") if f.get("verified") is True]
        if verified:
            told[-1] += f" A fix was tried and held: {text(verified[0], 'summary', 300)}."
    return "\n".join(told)


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
    rough = thin(main.values[: len(main)], most=_ROUGH)
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
_USUAL = 100
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
    usual = values[: max(_FEWEST // 2, min(_USUAL, len(values) // 2))]
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
