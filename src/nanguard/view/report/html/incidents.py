"""Every incident: what happened, where, why, what was tried, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.view.report import words
from nanguard.view.report.fields import (
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
from nanguard.view.report.html.markup import (
    Html,
    diff,
    el,
    excerpt,
    incident_id,
    place_words,
    step_words,
)
from nanguard.view.report.html.path_picture import path_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.incident import Incident
    from nanguard.view.runs.run_model import Run

_MOST = 60
_COLUMNS = ("shape", "dtype", "min", "max", "zeros", "nonfinite", "nan", "inf", "-inf")


def incidents(runs: Sequence[Run]) -> Html | None:
    """Returns the incidents of every run; None if there are none."""
    parts = []
    for place, run in enumerate(runs):
        own = [_incident(i, place, n) for n, i in enumerate(run.incidents[:_MOST])]
        if own and len(runs) > 1:
            parts.append(el("h3", run.name, cls="of-run"))
        parts += own
        if len(run.incidents) > _MOST:
            parts.append(el("p", f"{len(run.incidents) - _MOST} more are not shown.", cls="none"))
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
        told, _ = words.fix(fix)
        sure = fix.get("verified") is True
        items.append(
            el(
                "li",
                el("p", el("strong", text(fix, "summary", 600))),
                el("p", told, cls="verified" if sure else "open"),
                diff(fix.get("diff")),
            )
        )
    return el("div", el("h4", "What to do"), el("ol", items, cls="fixes"))


def _facts(rows: Sequence[tuple[str, str]]) -> Html | None:
    kept = [el("div", el("dt", name), el("dd", said)) for name, said in rows if said]
    return el("dl", kept, cls="facts small") if kept else None
