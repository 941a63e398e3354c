"""Findings of the rules, and what is known about a run beside its numbers."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.view.report.fields import entries, text, whole
from nanguard.view.report.html.markup import Html, diff, el, listing, step_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.view.runs.run_model import Run

_MOST = 300
_RANKS = {"error": 0, "warning": 1, "info": 2}


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
        items = [_finding(finding) for finding in own[:_MOST]]
        more = len(own) - _MOST
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
