"""The top of the page: the verdict about each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.view.report.html.markup import Html, el
from nanguard.view.report.verdict import verdict_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.runs.model import Run


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
