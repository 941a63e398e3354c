"""The page as a whole: one file that needs nothing else and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.view.report.html.findings_section import descriptions, findings
from nanguard.view.report.html.incidents import incidents
from nanguard.view.report.html.markup import Html, el, incident_id, join, step_words, theme_button
from nanguard.view.report.html.numbers import BUDGET, page_data
from nanguard.view.report.verdict import verdict_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.runs.run_model import Run, RunEvent


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


_MOST = 1000
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
    rows = [_row(event, place, timed=timed) for event in run.events[:_MOST]]
    more = len(run.events) - _MOST
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
