"""Every incident on the page: what happened, where, why, what was tried, and what to do.

The way of the bad value is a picture: operation by operation, how large the numbers were.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.view.report import words
from nanguard.view.report.html.markup import (
    Html,
    diff,
    el,
    excerpt,
    incident_id,
    place_words,
    step_words,
)
from nanguard.view.report.words import (
    branch,
    entries,
    listed,
    literal,
    number,
    numbers,
    text,
    texts,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.incident import Incident
    from nanguard.view.runs.run_model import Run

# Operations that are drawn: the last ones before the bad value.
_MOST_OPERATIONS = 40
# Pixels of the picture: a row, the columns from left to right, and the space above.
_ROW = 26
_LEFT = 250
_BAR = 330
_RIGHT = 160
_TOP = 26
# Limits of types that people know, where they lie within the picture.
_LIMITS = ((65504.0, "fp16"), (3.4e38, "fp32"))
# Incidents of a run that are shown; more make the page slow to open.
_MOST_INCIDENTS = 60
_COLUMNS = ("shape", "dtype", "min", "max", "zeros", "nonfinite", "nan", "inf", "-inf")


def path_picture(incident: Incident, anchor: str) -> Html | None:
    """Returns the picture; None if the incident does not know the way.

    Args:
        incident: The incident.
        anchor: A name that no other picture on the page has.
    """
    rows = [row for row in entries(incident, "path") if text(row, "op")]
    if not rows:
        return None
    shown = rows[-_MOST_OPERATIONS:]
    low, high = _span(shown)
    height = _TOP + _ROW * len(shown) + 6
    width = _LEFT + _BAR + _RIGHT
    parts = _axis(low, high, height)
    parts += [_row(row, place, (low, high), anchor) for place, row in enumerate(shown)]
    hatch = el(
        "pattern",
        el("rect", width="6", height="6", cls="hatch-ground"),
        el("path", d="M0 6 L6 0", cls="hatch-line"),
        id=f"{anchor}-hatch",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
    )
    picture = el(
        "svg",
        el("defs", hatch),
        parts,
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        role="img",
        aria_label=_in_words(shown),
        cls="way",
    )
    cut = len(rows) - len(shown)
    return el(
        "figure",
        el("figcaption", _caption(shown), f" ({cut} earlier ones are not shown)" if cut else None),
        el("div", picture, cls="wide", tabindex="0", role="region", aria_label="Path"),
        _table(shown),
    )


def _span(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    sizes = [size for row in rows if (size := _size(row)) is not None and size > 0]
    low = min((math.log10(size) for size in sizes), default=-1.0)
    high = max((math.log10(size) for size in sizes), default=1.0)
    low = max(-46.0, math.floor(min(low, -1.0)))
    return low, min(310.0, max(math.ceil(high), low + 2, 1.0))


def _size(row: Mapping[str, Any]) -> float | None:
    """Returns the largest finite magnitude of a row."""
    found = [abs(v) for key in ("min", "max") if (v := _finite(row.get(key))) is not None]
    return max(found, default=None)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _bad(row: Mapping[str, Any]) -> bool:
    return bool(whole(row, "nonfinite")) or any(
        row.get(key) in ("nan", "inf", "-inf") for key in ("min", "max")
    )


def _x(size: float, low: float, high: float) -> float:
    return round(_LEFT + _BAR * (size - low) / (high - low), 1)


def _axis(low: float, high: float, height: int) -> list[Html]:
    step = max(1, round((high - low) / 5))
    ticks = [(at, f"1e{at}" if at else "1") for at in range(int(low), int(high) + 1, step)]
    parts = []
    for at, label in ticks:
        x = _x(at, low, high)
        parts.append(el("line", x1=x, x2=x, y1=_TOP - 4, y2=height, cls="grid"))
        parts.append(el("text", label, x=x, y=_TOP - 10, cls="tick", text_anchor="middle"))
    for limit, label in _LIMITS:
        if low < math.log10(limit) <= high:
            x = _x(math.log10(limit), low, high)
            parts.append(el("line", x1=x, x2=x, y1=_TOP - 4, y2=height, cls="limit"))
            parts.append(el("text", label, x=x + 3, y=height - 4, cls="tick limit"))
    return parts


def _row(row: Mapping[str, Any], place: int, span: tuple[float, float], anchor: str) -> Html:
    y, size, bad = _TOP + place * _ROW, _size(row), _bad(row)
    name = text(row, "op", 28).removeprefix("aten.")
    where = _row_place(row)
    parts: list[Html] = [
        el("text", name, x="0", y=y + 12, cls="op"),
        el("text", where, x="0", y=y + 22, cls="where"),
    ]
    if bad:
        parts.append(
            el(
                "rect",
                x=_LEFT,
                y=y + 4,
                width=_BAR,
                height=14,
                cls="bad",
                fill=f"url(#{anchor}-hatch)",
            )
        )
    elif size is not None:
        end = _x(math.log10(size), *span) if size > 0 else _LEFT
        width = max(2.0, round(end - _LEFT, 1))
        parts.append(el("rect", x=_LEFT, y=y + 4, width=width, height=14, cls="ok"))
    parts.append(el("text", _range(row), x=_LEFT + _BAR + 8, y=y + 15, cls="range"))
    return el("g", parts, cls="bad" if bad else None)


def _row_place(row: Mapping[str, Any]) -> str:
    file, line, module = row.get("file"), whole(row, "line"), text(row, "module", 40)
    name = PurePath(file).name[:30] if isinstance(file, str) and file else ""
    place = f"{name}:{line}" if name and line is not None else name
    return "  ".join(part for part in (place, module) if part)


def _range(row: Mapping[str, Any]) -> str:
    bad = whole(row, "nonfinite")
    if bad:
        return f"{bad} not finite"
    return f"{number(row.get('min'))} … {number(row.get('max'))}"


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    first = next((row for row in rows if _bad(row)), None)
    if first is None:
        return "How large the numbers were on the way to the loss."
    return (
        "How large the numbers were on the way to the loss; "
        f"{text(first, 'op', 60)} is the first that is not finite."
    )


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{text(row, 'op', 40)} {_range(row)}" for row in rows)[:900]


def _table(rows: Sequence[Mapping[str, Any]]) -> Html:
    names = ("Operation", "Place", "Smallest", "Largest", "Not finite")
    head = el("tr", *(el("th", name, scope="col") for name in names))
    body = [
        el(
            "tr",
            el("td", text(row, "op", 60)),
            el("td", _row_place(row)),
            el("td", number(row.get("min")), cls="number"),
            el("td", number(row.get("max")), cls="number"),
            el("td", str(whole(row, "nonfinite") or 0), cls="number"),
        )
        for row in rows
    ]
    table = el("table", el("thead", head), el("tbody", body))
    return el("details", el("summary", "The same as a table"), el("div", table, cls="wide"))


def incidents(runs: Sequence[Run]) -> Html | None:
    """Returns the incidents of every run; None if there are none."""
    parts = []
    for place, run in enumerate(runs):
        own = [_incident(i, place, n) for n, i in enumerate(run.incidents[:_MOST_INCIDENTS])]
        if own and len(runs) > 1:
            parts.append(el("h3", run.name, cls="of-run"))
        parts += own
        if len(run.incidents) > _MOST_INCIDENTS:
            parts.append(
                el("p", f"{len(run.incidents) - _MOST_INCIDENTS} more are not shown.", cls="none")
            )
    return el("div", parts) if parts else None


def _incident(incident: Incident, run: int, place: int) -> Html:
    anchor = incident_id(run, place)
    cause = branch(incident, "cause")
    step, rank = whole(incident, "step"), whole(incident, "rank")
    title = f"Step {step_words(step)}" + (f", rank {rank}" if rank else "")
    symptom = words.symptom(branch(incident, "symptom"))
    return el(
        "article",
        el("h3", title, ": ", text(cause, "code") or symptom, id=anchor, tabindex="-1"),
        el("p", f"{symptom[:1].upper()}{symptom[1:]}. ", words.action(incident)),
        el("p", el("strong", words.sentence(incident)), cls="sentence"),
        _why(incident, cause),
        _where(incident),
        path_picture(incident, anchor),
        _evidence(entries(incident, "evidence")),
        _circumstances(incident),
        _trials(entries(incident, "trials")),
        _fixes(entries(incident, "fixes")),
        el("p", words.replay(branch(incident, "replay")), cls="replay"),
        cls="incident",
        aria_labelledby=anchor,
    )


def _why(incident: Incident, cause: Mapping[str, Any]) -> Html | None:
    if not text(cause, "code"):
        return None
    others = [
        el("li", text(other, "code"), ": ", text(other, "summary", 400))
        for other in entries(incident, "other_causes")[:5]
    ]
    return el(
        "div",
        el("p", text(cause, "summary", 600), ". ", el("em", words.confidence(incident)), cls="why"),
        el("details", el("summary", "Other causes that were considered"), el("ul", others))
        if others
        else None,
    )


def _where(incident: Incident) -> Html | None:
    origin = branch(incident, "origin")
    if not origin:
        return el("p", words.no_origin(branch(incident, "replay")))
    rows = [
        ("Operation", words.op(origin)),
        ("Phase", words.phase(origin)),
        ("Module", words.module(origin)),
        ("Line", place_words(origin)),
    ]
    return el("div", el("h4", "Where it began"), _facts(rows), excerpt(origin), cls="where")


def _evidence(found: Sequence[Mapping[str, Any]]) -> Html | None:
    rows = [entry for entry in found[:12] if text(entry, "what")]
    columns = [name for name in _COLUMNS if any(_cell(entry, name) for entry in rows)]
    if not rows:
        return None
    names = ["What", *("not finite" if name == "nonfinite" else name for name in columns)]
    head = el("tr", *(el("th", name, scope="col") for name in names))
    body = [
        el(
            "tr",
            el("td", text(entry, "what", 300)),
            [el("td", _cell(entry, name), cls="number") for name in columns],
        )
        for entry in rows
    ]
    table = el("table", el("thead", head), el("tbody", body))
    return el(
        "div",
        el("h4", "Evidence"),
        el("div", table, cls="wide", tabindex="0", role="region", aria_label="Evidence"),
    )


def _cell(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if isinstance(value, list):
        return "x".join(numbers(entry, key)[:8]) or "scalar"
    return number(value) or text(entry, key, 40)


def _circumstances(incident: Incident) -> Html | None:
    size = whole(incident, "batch_size")
    of = "" if size is None else f" (of {size}, counted from 0)"
    samples = listed(numbers(incident, "samples"))
    symptom = branch(incident, "symptom")
    terms = [f"{text({'k': k}, 'k', 60)} {number(v)}" for k, v in branch(symptom, "terms").items()]
    rows = [
        ("Samples", f"{samples}{of}" if samples else ""),
        ("In the data set", listed(numbers(incident, "dataset_indices"))),
        ("Times met", number(whole(incident, "times"))),
        ("Drift", words.drift(incident)),
        ("Loss terms", listed(terms)),
        ("Losses before", listed(numbers(incident, "losses_before")[-8:])),
        ("Gradient norm", number(symptom.get("grad_norm"))),
        ("Optimizer", words.optimizer(branch(incident, "optimizer"))),
        ("Autocast", text(incident, "autocast")),
        ("Notes", listed(texts(incident, "notes"), 5)),
        ("Folder", literal(str(incident.folder or ""), 1000)),
    ]
    return _facts(rows)


def _trials(trials: Sequence[Mapping[str, Any]]) -> Html | None:
    if not trials:
        return None
    rows = []
    for trial in trials[:40]:
        verdict, _ = words.trial(trial.get("finite"))
        style = {"ok": "ok", "still bad": "bad"}.get(verdict, "open")
        rows.append(
            el(
                "tr",
                el("td", el("span", verdict, cls=f"trial {style}")),
                el("td", text(trial, "what", 400)),
                el("td", text(trial, "result", 400)),
            )
        )
    names = ("Step was", "With this changed", "Result")
    head = el("tr", *(el("th", name, scope="col") for name in names))
    table = el("table", el("thead", head), el("tbody", rows), cls="trials")
    return el(
        "div",
        el("h4", "What was tried"),
        el("div", table, cls="wide", tabindex="0", role="region", aria_label="What was tried"),
    )


def _fixes(fixes: Sequence[Mapping[str, Any]]) -> Html | None:
    known = [fix for fix in fixes if text(fix, "summary")]
    known.sort(key=lambda fix: fix.get("verified") is not True)
    if not known:
        return None
    items = []
    for fix in known[:8]:
        verdict, _ = words.fix(fix)
        sure = fix.get("verified") is True
        items.append(
            el(
                "li",
                el("p", el("strong", text(fix, "summary", 600))),
                el("p", verdict, cls="verified" if sure else "open"),
                diff(fix.get("diff")),
            )
        )
    return el("div", el("h4", "What to do"), el("ol", items, cls="fixes"))


def _facts(rows: Sequence[tuple[str, str]]) -> Html | None:
    kept = [el("div", el("dt", name), el("dd", said)) for name, said in rows if said]
    return el("dl", kept, cls="facts small") if kept else None
