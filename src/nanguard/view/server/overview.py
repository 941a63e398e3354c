"""The page of all runs: a row for each, with a small curve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard import __version__
from nanguard.findings import name_of
from nanguard.view.report.html.markup import Html, el, join, step_words, theme_button

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.view.server.digest import RunSummary, Spark
    from nanguard.view.server.index import Index, ServedRun

_WORDS = {"bad": "Bad", "running": "Running", "ended": "Ended", "reading": "Being read"}
_STYLES = {"bad": "bad", "running": "live", "ended": "", "reading": ""}
_NONE = "\N{EN DASH}"
_COLUMNS = ("Run", "Loss", "State", "Last step", "Last loss", "Alarms", "Changed")


def overview(index: Index) -> Html:
    """Returns what is seen of the page of all runs."""
    entries = index.newest_first()
    head = el("tr", *(el("th", name, scope="col") for name in _COLUMNS))
    body = el("tbody", [row(entry, index) for entry in entries], id="runs")
    return join(
        (
            el("a", "To the runs", href="#runs", cls="skip"),
            el(
                "header",
                el(
                    "div",
                    el("h1", index.folder.root.name or str(index.folder.root)),
                    el("p", str(index.folder.root), cls="under mono"),
                ),
                theme_button(),
                cls="top",
            ),
            el(
                "main",
                _tools(),
                el("p", status(index), id="status", role="status", cls="none"),
                el("table", el("thead", head), body, cls="runs", hidden=not entries),
                el("p", _nothing(index), id="nothing", cls="nothing", hidden=bool(entries)),
                el("ul", [el("li", said) for said in problems(index)], id="problems", cls="none"),
            ),
            el("footer", f"nanguard {__version__}. Read-only: nothing here changes a run."),
        )
    )


def row(entry: ServedRun, index: Index) -> Html:
    """Returns the row of a run; it is made once for each version."""
    version = entry.version
    if entry.html[0] != version:
        entry.html = (version, _row(entry, index))
    return Html(entry.html[1])


def _row(entry: ServedRun, index: Index) -> Html:
    summary, found = entry.summary, entry.found
    place = found.path.relative_to(index.folder.root)
    where = f"/run/{entry.key}"
    name = el("a", found.name, href=where)
    said = el("p", str(place), cls="place") if str(place) not in (".", found.name) else None
    problem = el("p", summary.problem, cls="problem") if summary.problem else None
    main = summary.main
    step = _NONE if main is None else step_words(main.step) if main.step is not None else _NONE
    bad = main is not None and not math.isfinite(main.spark.last)
    loss = _NONE if main is None else name_of(float(f"{main.spark.last:.5g}"))
    return el(
        "tr",
        el("th", name, said, problem, scope="row"),
        el("td", picture(main.spark, main.name) if main else el("span", "no curve", cls="none")),
        el("td", _badges(summary)),
        el("td", step, cls="number", data_label="step"),
        el(
            "td",
            loss,
            cls="number bad" if bad else "number",
            data_label=main.name if main else "loss",
        ),
        el("td", _alarms(summary, where)),
        el("td", el("time", data_time=f"{summary.changed:.0f}"), cls="when"),
        id=f"run-{entry.key}",
        data_state=summary.state,
        data_live="yes" if summary.running else None,
        data_find=f"{found.name} {place}".lower(),
    )


def status(index: Index) -> str:
    """Returns how many runs there are, and whether they were read."""
    if not index.searched:
        return "The folder is being searched."
    entries = index.entries.values()
    count = len(entries)
    waiting = sum(not entry.summary.whole for entry in entries)
    running = sum(entry.summary.state == "running" for entry in entries)
    bad = sum(entry.summary.state == "bad" for entry in entries)
    said = f"{count} run{'' if count == 1 else 's'}: {running} running, {bad} bad"
    return f"{said}; {waiting} still to be read." if waiting else f"{said}."


def problems(index: Index) -> list[str]:
    """Returns what could not be looked at."""
    said = index.folder.problems[:10]
    if index.folder.left_out:
        said.append(f"There are more than {len(index.entries)} runs; the others are not shown.")
    return said


def _nothing(index: Index) -> str:
    if not index.folder.root.is_dir():
        return "The folder is gone. When it is there again, its runs appear here."
    if not index.searched:
        return "The folder is being searched."
    return (
        "There is no run here yet. Logs, run folders of the guard, incidents and reports of "
        "nanguard check appear as soon as they are written."
    )


def _tools() -> Html:
    chips = [
        el("button", word, type="button", data_show=state, aria_pressed=str(not state).lower())
        for state, word in (("", "All"), ("running", "Running"), ("bad", "Bad"))
    ]
    label = "Filter by name"
    box = el("input", type="search", id="filter", placeholder=label, aria_label=label)
    return el("div", box, el("div", chips, role="group", aria_label="State"), cls="tools")


def _badges(summary: RunSummary) -> list[Html]:
    state = summary.state
    badges = [el("span", _WORDS[state], cls=f"badge {_STYLES[state]}".rstrip())]
    if state == "bad" and summary.running:
        badges.append(el("span", "Running", cls="badge live"))
    return badges


def _alarms(summary: RunSummary, where: str) -> list[Html] | Html:
    parts = []
    bad = summary.main.spark.bad if summary.main else 0
    if summary.incidents:
        anchor = f"{where}#{'incident-0-0' if summary.incidents == 1 else 'incidents'}"
        parts.append(el("a", _count(summary.incidents, "incident"), href=anchor))
    if summary.stopped:
        parts.append(el("a", "stopped", href=f"{where}#timeline"))
    if summary.errors:
        parts.append(el("a", _count(summary.errors, "event"), href=f"{where}#timeline"))
    if summary.findings:
        parts.append(el("a", _count(summary.findings, "finding"), href=f"{where}#findings"))
    if bad:
        parts.append(el("a", f"{few(bad)} not finite", href=f"{where}#curves"))
    if not parts:
        return el("span", "no alarm", cls="none")
    return el("ul", [el("li", part) for part in parts], cls="alarms")


def _count(number: int, word: str) -> str:
    return f"{few(number)} {word}{'' if number == 1 else 's'}"


_WIDE, _HIGH = 180, 36
_EDGE = 2.0
_THIN = 1.0
# From this ratio on a curve is drawn on a logarithmic scale.
_FAR = 1000.0


def few(number: int) -> str:
    """Returns a number as it is shown: 12 345."""
    return f"{number:,}".replace(",", "\u202f")


def picture(spark: Spark, name: str) -> Html:
    """Returns a curve as a band from the smallest to the largest value of each bucket.

    Buckets in which something is not finite are marked, and the line is not joined over them.
    """
    finite = [at for at, low in enumerate(spark.lows) if low <= spark.highs[at]]
    low = min((spark.lows[at] for at in finite), default=0.0)
    high = max((spark.highs[at] for at in finite), default=1.0)
    said = f"{name}: {_short(low)} to {_short(high)}" if finite else f"{name}: nothing finite"
    if spark.bad:
        said += f", {few(spark.bad)} not finite"
    step = _WIDE / max(1, len(spark.lows))
    place = _scale(low, high)
    holes = "".join(
        f"M{(at + 0.5) * step:.1f} 0V{_HIGH}" for at, hole in enumerate(spark.holes) if hole
    )
    band = "".join(
        f"M{(at + 0.5) * step:.1f} {place(spark.highs[at]):.1f}V{place(spark.lows[at]):.1f}"
        for at in finite
        # A band that is narrower than the line would not be seen.
        if place(spark.lows[at]) - place(spark.highs[at]) > _THIN
    )
    parts = (
        el("title", said),
        _path(holes, "holes", max(2.0, step)),
        _path(band, "band", step + 0.2),
        _path(_line(spark, finite, place, step), "line", 1.4),
    )
    return Html(
        f'<svg class="spark" role="img" viewBox="0 0 {_WIDE} {_HIGH}"'
        f' preserveAspectRatio="none">{join(parts)}</svg>'
    )


def _path(way: str, cls: str, width: float) -> Html:
    # Made of our own numbers only: an element's attributes would be cut where they are long.
    return Html(f'<path class="{cls}" d="{way}" stroke-width="{width:.1f}"/>' if way else "")


def _line(spark: Spark, finite: Sequence[int], place: Callable[[float], float], step: float) -> str:
    out, before = [], -2
    for at in finite:
        joined = at == before + 1 and not spark.holes[at] and not spark.holes[before]
        y = (place(spark.lows[at]) + place(spark.highs[at])) / 2
        out.append(f"{'L' if joined else 'M'}{(at + 0.5) * step:.1f} {y:.1f}")
        if not joined:
            out.append("h0.1")
        before = at
    return "".join(out)


def _scale(low: float, high: float) -> Callable[[float], float]:
    log = low > 0 and high / low > _FAR

    def turned(value: float) -> float:
        return math.log(value) if log else value

    bottom = turned(low)
    # Halves, as the difference of two large numbers may be too large for a float.
    wide = turned(high) / 2 - bottom / 2 or 1.0

    def place(value: float) -> float:
        share = (turned(value) / 2 - bottom / 2) / wide if high > low else 0.5
        return _HIGH - _EDGE - share * (_HIGH - 2 * _EDGE)

    return place


def _short(value: float) -> str:
    return name_of(float(f"{value:.4g}"))
