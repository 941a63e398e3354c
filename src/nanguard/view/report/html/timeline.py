"""What happened, step by step, as a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nanguard.view.report.html.markup import Html, el
from nanguard.view.report.html.places import incident_id, step_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.runs.model import Event, Run

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


def _row(event: Event, place: int, *, timed: bool) -> Html:
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
