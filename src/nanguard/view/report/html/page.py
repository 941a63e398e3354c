"""The page about runs: one file that needs nothing else and asks the network for nothing.

Its curves are compact bytes: buckets with their smallest and largest values.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import sys
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.view.report.html.incidents import incidents
from nanguard.view.report.html.markup import (
    Html,
    diff,
    el,
    incident_id,
    join,
    listing,
    step_words,
    theme_button,
)
from nanguard.view.report.verdict import verdict_of
from nanguard.view.report.words import entries, text, whole
from nanguard.view.runs.curves import restarts_of, thin
from nanguard.view.runs.run_model import Axis, EventKind, Panel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.view.runs.curves import Thinned
    from nanguard.view.runs.run_model import Curve, Run, RunEvent

# Findings of a run that are listed.
_MOST_FINDINGS = 300
_RANKS = {"error": 0, "warning": 1, "info": 2}
SCHEMA = "nanguard.page/1"
# Bytes of numbers in a page, before they are packed; packing saves a quarter, base64 costs a third.
BUDGET = 5_000_000
# Smaller ones are not packed, so that old browsers can read them, too.
_PACK_FROM = 100_000
MOST_CURVES = 40
# Buckets that a curve has at least, whatever the number of curves.
_FEWEST_BUCKETS = 1000
# Points at which the page knows the time; it interpolates between them.
_MOST_TIMES = 256
# Characters of a name or a text that the script gets.
_LONGEST_TEXT = 300
_ORDER = list(Panel)
# Joined in this order into one script.
_SCRIPTS = (
    "words.js",
    "numbers.js",
    "drawing.js",
    "chart.js",
    "strip.js",
    "toolbar.js",
    "page.js",
)


def findings(runs: Sequence[Run]) -> Html:
    """Returns the findings of every run."""
    parts = []
    for run in runs:
        own = sorted(run.findings, key=lambda f: _RANKS.get(str(f.get("severity")), 3))
        title = el("h3", run.name) if len(runs) > 1 else None
        if not own:
            said = "No rule found a fault." if run.logs else "No rule had a log to look at."
            parts.append(el("div", title, el("p", said, cls="none")))
            continue
        items = [_finding(finding) for finding in own[:_MOST_FINDINGS]]
        more = len(own) - _MOST_FINDINGS
        parts.append(
            el(
                "div",
                title,
                el("ul", items, cls="findings"),
                el("p", f"{more} more are not shown.", cls="none") if more > 0 else None,
            )
        )
    return el("div", parts)


def descriptions(runs: Sequence[Run]) -> Html | None:
    """Returns the configurations and environments of every run; None if none is known."""
    parts = []
    for run in runs:
        own = [
            el("details", el("summary", name), listing(content), open=len(content) < 1500)
            for name, content in run.configuration.items()
        ]
        if run.environment:
            rows = [el("div", el("dt", k), el("dd", v)) for k, v in run.environment.items()]
            own.append(el("dl", rows, cls="facts small"))
        if own:
            parts.append(el("div", el("h3", run.name) if len(runs) > 1 else None, own))
    return el("div", parts) if parts else None


def _finding(finding: Mapping[str, Any]) -> Html:
    severity = text(finding, "severity")
    path, line, step = finding.get("path"), whole(finding, "line"), whole(finding, "step")
    name = PurePath(path).name if isinstance(path, str) else ""
    place = f"{name}:{line}" if name and line is not None else name
    where = [place, text(finding, "where"), "" if step is None else f"step {step_words(step)}"]
    fixes = [_fix(fix) for fix in entries(finding, "fixes")[:4]]
    return el(
        "li",
        el(
            "p",
            el("span", severity, cls=f"severity {severity if severity in _RANKS else 'info'}"),
            " ",
            el("strong", text(finding, "name")),
            " ",
            el("span", text(finding, "code"), cls="code"),
            " ",
            el("span", " · ".join(part for part in where if part), cls="place"),
        ),
        el("p", text(finding, "message", 1000)),
        el("ul", fixes) if fixes else None,
    )


def _fix(fix: Mapping[str, Any]) -> Html:
    return el("li", "Fix: ", text(fix, "title", 400), diff(fix.get("diff")))


@dataclass(slots=True)
class NumberBlob:
    """Bytes of numbers, one column after the other.

    Attributes:
        data: The bytes so far.
    """

    data: bytearray = field(default_factory=bytearray)

    def add(self, values: array[Any]) -> list[Any]:
        """Adds a column; returns where it is: offset, number of values and type.

        The bytes of all values are stored plane by plane, which packs better: the first bytes of
        neighbours are mostly the same.
        """
        offset, raw, size = len(self.data), values, values.itemsize
        if sys.byteorder == "big":
            raw = array(values.typecode, values)
            raw.byteswap()
        plain = raw.tobytes()
        for plane in range(size):
            self.data += plain[plane::size]
        return [offset, len(values), values.typecode + str(size)]

    def packed(self) -> dict[str, str]:
        """Returns the bytes as a text, and how it is to be read."""
        if len(self.data) < _PACK_FROM:
            return {"packing": "none", "bytes": base64.b64encode(self.data).decode("ascii")}
        data = gzip.compress(bytes(self.data), 6, mtime=0)
        return {"packing": "gzip", "bytes": base64.b64encode(data).decode("ascii")}


def page_data(runs: Sequence[Run], budget: int = BUDGET) -> dict[str, Any]:
    """Returns the numbers and events of runs, as the script of the page reads them.

    Args:
        runs: The runs.
        budget: How many bytes of numbers there may be.
    """
    blob = NumberBlob()
    shown = [_shown(run) for run in runs]
    rooms = iter(_rooms([len(c) for curves in shown for c in curves], budget))
    described = [
        {
            "name": run.name[:_LONGEST_TEXT],
            "axis": run.axis.value,
            "left_out": len(run.curves) - len(curves),
            "curves": [_curve(curve, run, next(rooms), blob) for curve in curves],
            "events": [_event(event) for event in run.events],
            "clock": _clock(run),
            "timed": run.axis is Axis.STEP and run.clock.steady,
        }
        for run, curves in zip(runs, shown, strict=True)
    ]
    return {"schema": SCHEMA, "runs": described, "numbers": blob.packed()}


def _shown(run: Run) -> list[Curve]:
    """Returns the curves that are shown: those that tell most, if there are too many."""
    kept = [curve for curve in run.curves if len(curve)]
    kept.sort(key=lambda c: (c.rank not in (None, 0), _ORDER.index(c.panel)))
    kept = kept[:MOST_CURVES]
    return sorted(kept, key=lambda c: (_ORDER.index(c.panel), c.evaluation))


def _rooms(lengths: Sequence[int], budget: int) -> list[int]:
    """Returns how many buckets each curve gets; short ones are kept whole."""
    rooms = [0] * len(lengths)
    left, waiting = budget, len(lengths)
    for place in sorted(range(len(lengths)), key=lambda at: lengths[at]):
        share = left // waiting
        whole = 4 * lengths[place] <= share
        rooms[place] = lengths[place] if whole else max(_FEWEST_BUCKETS, share // 9)
        left -= min(share, 4 * lengths[place])
        waiting -= 1
    return rooms


def _curve(curve: Curve, run: Run, room: int, blob: NumberBlob) -> dict[str, Any]:
    restarts = restarts_of(curve.xs) or []
    values = curve.values[: len(curve)]
    focus = _focus(curve, run.events, restarts)
    thinned = thin(values, most=room, restarts=restarts, focus=focus)
    described: dict[str, Any] = {
        "name": curve.name[:_LONGEST_TEXT],
        "panel": curve.panel.value,
        "evaluation": curve.evaluation,
        "points": thinned.points,
        "largest": thinned.largest,
        "lows": blob.add(thinned.lows),
        "breaks": thinned.breaks,
        "gaps": _gaps(curve, thinned),
    }
    if not thinned.exact:
        described["highs"] = blob.add(thinned.highs)
        described["counts"] = blob.add(thinned.counts)
    return described | _places(curve, thinned, blob)


def _focus(curve: Curve, events: Sequence[RunEvent], restarts: Sequence[int]) -> list[int]:
    """Returns the points at which something happened; each time, where steps begin anew."""
    kinds = (EventKind.OVERFLOW, EventKind.NOTE, EventKind.LR_RESTORED)
    steps = [e.step for e in events if e.step is not None and e.kind not in kinds]
    stretches = list(pairwise((0, *restarts, len(curve))))
    return [
        bisect_left(curve.xs, step, start, end)
        for step in steps[:200]
        for start, end in stretches
        if curve.xs[start] <= step <= curve.xs[end - 1]
    ]


def _gaps(curve: Curve, thinned: Thinned) -> list[list[float]]:
    return [
        [curve.xs[gap.start], curve.xs[gap.end - 1], gap.nan, gap.inf, gap.neg_inf]
        for gap in thinned.gaps
    ]


def _places(curve: Curve, thinned: Thinned, blob: NumberBlob) -> dict[str, Any]:
    """Returns where buckets begin: as differences, which mostly are the same."""
    xs: array[Any] = array("d", (curve.xs[at] for at in thinned.starts))
    differences = [now - before for before, now in pairwise(xs)]
    if all(d.is_integer() and abs(d) < 2**31 for d in differences):
        steps = array("i", map(int, differences))
        return {"first": xs[0] if xs else 0, "steps": blob.add(steps)}
    return {"xs": blob.add(xs)}


def _event(event: RunEvent) -> list[Any]:
    return [
        event.kind.value,
        event.step,
        event.last,
        event.count,
        event.text[:_LONGEST_TEXT],
        event.incident,
    ]


def _clock(run: Run) -> list[list[float]]:
    count = len(run.clock.steps)
    places = [*range(0, count - 1, max(1, count // _MOST_TIMES)), count - 1] if count else []
    return [[run.clock.steps[at], run.clock.times[at]] for at in places]


def asset(name: str) -> str:
    """Returns what belongs to the page: ``page.js``, the whole script, or ``page.css``."""
    if name != "page.js":
        return _asset(name)
    return f'(() => {{\n"use strict";\n\n{"".join(map(_asset, _SCRIPTS))}}})();\n'


def page(runs: Sequence[Run], title: str | None = None, budget: int = BUDGET) -> str:
    """Returns the page about runs, whose findings are known, as one HTML text.

    Args:
        runs: The runs.
        title: What the page is called.
        budget: How many bytes of numbers it may hold, before they are packed.
    """
    script, style = asset("page.js"), asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", name="generator", content=f"nanguard {__version__}"),
        el("title", title or title_of(runs)),
        Html(f"<style>{style}</style>"),
    )
    data = el("script", Html(embedded(page_data(runs, budget))), type="application/json", id="data")
    body = el("body", body_of(runs, title), data, Html(f"<script>{script}</script>"))
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def title_of(runs: Sequence[Run]) -> str:
    """Returns what a page about runs is called."""
    names = ", ".join(run.name for run in runs[:3])
    return f"{names}{' and more' if len(runs) > 3 else ''} · nanguard report"


def body_of(runs: Sequence[Run], title: str | None = None) -> Html:
    """Returns everything that is seen of a page, without its numbers and its script."""
    parts = sections(runs)
    links = [el("a", name, href=f"#{key}") for key, (name, _) in parts.items()]
    many = len(runs) > 1
    points = f"{sum(run.points for run in runs):,}".replace(",", "\u202f")
    said = f"{len(runs)} runs, " if many and title else ""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return join(
        (
            el("a", "To the verdict", href="#verdict", cls="skip"),
            el(
                "header",
                el(
                    "div",
                    el("h1", title or (f"{len(runs)} runs" if many else runs[0].name)),
                    el("p", f"{said}{points} numbers", cls="under"),
                ),
                theme_button(),
                cls="top",
            ),
            el("nav", links, aria_label="Parts of this page"),
            el("main", [_section(key, *part) for key, part in parts.items()]),
            el("footer", f"Written by nanguard {__version__} on {made}. ", el("span", id="behind")),
        )
    )


def sections(runs: Sequence[Run]) -> dict[str, tuple[str, Html]]:
    """Returns the parts of a page by their anchors: a title and what is below it."""
    known: dict[str, tuple[str, Html | None]] = {
        "verdict": ("Verdict", verdicts(runs)),
        "curves": ("Curves", _curves(runs)),
        "timeline": ("Timeline", timeline(runs)),
        "incidents": ("Incidents", incidents(runs)),
        "findings": ("Findings", findings(runs)),
        "setting": ("Configuration and environment", descriptions(runs)),
    }
    return {key: (name, body) for key, (name, body) in known.items() if body is not None}


def embedded(data: Any) -> str:
    """Returns JSON that can stand inside of a script element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    folder = files("nanguard.view.report.html").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _section(key: str, name: str, body: Html) -> Html:
    return el("section", el("h2", name, id=key), body, aria_labelledby=key)


def _curves(runs: Sequence[Run]) -> Html:
    if not any(run.points for run in runs):
        return el("p", "There is no curve to draw: no numbers were recorded.", cls="none")
    return el(
        "div",
        el("noscript", el("p", "The curves need JavaScript; everything else does not.")),
        el("div", id="charts"),
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def verdicts(runs: Sequence[Run]) -> Html:
    """Returns the verdicts."""
    return el("div", [_card(run, place) for place, run in enumerate(runs)], cls="verdicts")


def _lines(said: str) -> list[Html]:
    return [el("p", line) for line in said.split("\n")]


def _card(run: Run, place: int) -> Html:
    verdict = verdict_of(run)
    facts = [el("div", el("dt", title), el("dd", _lines(said))) for title, said in verdict.facts]
    return el(
        "article",
        el(
            "header",
            el("span", verdict.label, cls=f"badge {verdict.state}"),
            el("h3", run.name, id=f"run-{place}"),
        ),
        el("p", verdict.headline, cls="headline"),
        el("dl", facts, cls="facts") if facts else None,
        el("p", run.path, cls="path"),
        cls=f"verdict {verdict.state}",
        aria_labelledby=f"run-{place}",
    )


# Events that are listed, and how many of them before the fold.
_MOST_EVENTS = 1000
_OPEN = 40
NAMES = {
    "non-finite": "non-finite",
    "spike": "spike",
    "skip": "step skipped",
    "lr-cut": "learning rate cut",
    "lr-restored": "learning rate restored",
    "rollback": "rollback",
    "restart": "restart",
    "stop": "stopped",
    "overflow": "scaler overflow",
    "incident": "incident",
    "note": "note",
}


def timeline(runs: Sequence[Run]) -> Html:
    """Returns the events of every run."""
    parts = [_of_run(run, place, named=len(runs) > 1) for place, run in enumerate(runs)]
    return el("div", parts)


def _of_run(run: Run, place: int, *, named: bool) -> Html:
    title = el("h3", run.name) if named else None
    if not run.events:
        return el("div", title, el("p", "Nothing is recorded as having happened.", cls="none"))
    timed = any(event.time is not None for event in run.events)
    rows = [_row(event, place, timed=timed) for event in run.events[:_MOST_EVENTS]]
    more = len(run.events) - _MOST_EVENTS
    rest = rows[_OPEN:]
    return el(
        "div",
        title,
        _table(rows[:_OPEN], timed=timed),
        el("details", el("summary", f"{len(run.events) - _OPEN} more"), _table(rest, timed=timed))
        if rest
        else None,
        el("p", f"{more} more are in the charts only.", cls="none") if more > 0 else None,
    )


def _table(rows: Sequence[Html], *, timed: bool) -> Html:
    names = ["Step", "What", "Words", *(["Time (UTC)"] if timed else [])]
    head = el("tr", *(el("th", name, scope="col") for name in names))
    body = el("table", el("thead", head), el("tbody", rows), cls="events")
    return el("div", body, cls="wide", tabindex="0", role="region", aria_label="Events")


def _row(event: RunEvent, place: int, *, timed: bool) -> Html:
    step = step_words(event.step)
    if event.last != event.step:
        step += f" to {step_words(event.last)}"
    words = event.text if event.count == 1 else f"{event.count} times, first: {event.text}"
    said = [words, el("span", f" — {event.reason}", cls="reason") if event.reason else None]
    name = NAMES[event.kind.value]
    kind = el("span", name, cls=f"kind {event.kind.value}")
    if event.incident is not None:
        kind = el("a", name, href=f"#{incident_id(place, event.incident)}", cls="kind incident")
    when = "" if event.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time))
    cells = [el("td", step, cls="number"), el("td", kind), el("td", said)]
    return el("tr", cells, el("td", when) if timed else None)
