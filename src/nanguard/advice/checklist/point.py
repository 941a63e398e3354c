"""One point of the checklist, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.advice.checklist.facts import Facts, Trace
    from nanguard.findings import Finding

_PLACES = 5


class Verdict(str, Enum):
    """The answer to a point."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer comes from.

    Attributes:
        path: The file.
        line: The line, counted from 1; None for the whole file.
        what: What is there.
    """

    path: str
    line: int | None
    what: str

    def to_json(self) -> dict[str, Any]:
        """Returns the place as the JSON has it."""
        return {"path": self.path, "line": self.line, "what": self.what}


@dataclass(frozen=True, slots=True)
class Answer:
    """A point, answered.

    Attributes:
        point: The point.
        verdict: The answer.
        places: Where it comes from, at most five.
        more: How many further places there are.
    """

    point: Point
    verdict: Verdict
    places: tuple[Place, ...] = ()
    more: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as the JSON has it."""
        return {
            "name": self.point.name,
            "section": self.point.section,
            "question": self.point.question,
            "answer": self.verdict.value,
            "places": [place.to_json() for place in self.places],
            "more": self.more,
            "advice": self.point.advice,
        }


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the checklist.

    It is answered in this order: a finding or a trace that speaks against it is a no; a trace
    that shows it is a yes; so is something its rules looked at and found nothing in; a trace of
    something that would need it, and has it nowhere, is a no. Without any of these nobody can
    tell.

    Attributes:
        name: What it is called.
        section: The part of the checklist it belongs to.
        question: The question.
        advice: What to do, in a line.
        faults: Rules whose findings answer no.
        denied: Traces that answer no.
        shown: Traces that answer yes.
        clean: Traces that answer yes where all the rules looked and found nothing.
        missing: Traces that answer no where nothing else answers.
        gap: What is missing there, in words.
        unsure: Traces of something that may be enough or not: nothing is called missing then.
    """

    name: str
    section: str
    question: str
    advice: str
    faults: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    gap: str = ""
    unsure: tuple[str, ...] = ()

    def answer(self, facts: Facts) -> Answer:
        """Returns the answer for a project."""
        against = [
            *(_of_finding(finding) for finding in facts.found(self.faults)),
            *(_of_trace(trace) for trace in facts.shown(self.denied)),
        ]
        if against:
            return self._answered(Verdict.NO, against)
        shown = [_of_trace(trace) for trace in facts.shown(self.shown)]
        if shown:
            return self._answered(Verdict.YES, shown)
        clean = facts.shown(self.clean)
        if clean and facts.ran.issuperset(self.faults):
            words = "the rules found nothing wrong with it"
            places = [Place(t.path, t.line, f"{t.words}: {words}") for t in clean]
            return self._answered(Verdict.YES, places)
        missing = [Place(t.path, t.line, self.gap or t.words) for t in facts.shown(self.missing)]
        if missing and not facts.shown(self.unsure):
            return self._answered(Verdict.NO, missing)
        return Answer(self, Verdict.UNKNOWN)

    def _answered(self, verdict: Verdict, places: list[Place]) -> Answer:
        own = list(dict.fromkeys(places))
        return Answer(self, verdict, tuple(own[:_PLACES]), max(0, len(own) - _PLACES))


def _of_finding(finding: Finding) -> Place:
    return Place(finding.path or "", finding.line, f"{finding.name}: {finding.message}")


def _of_trace(trace: Trace) -> Place:
    return Place(trace.path, trace.line, trace.words)
