"""A plain picture of the curves, for slides and tickets."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, installing
from nanguard.view.report.html.markup import shown
from nanguard.view.report.verdict import verdict_of
from nanguard.view.runs.curves import restarts_of, thin
from nanguard.view.runs.run_model import EventKind, Panel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.runs.run_model import Curve, Run

_BUCKETS = 4000
_COLOURS = (
    "#1f5fa8",
    "#b85c00",
    "#1c7a55",
    "#7a4bb0",
    "#8c6d00",
    "#00798c",
    "#a0336e",
    "#59616c",
)
_BAD = "#b3261e"
# A larger ratio of the largest to the smallest value is unreadable on a plain scale.
_WIDE = 1000.0
_MARKED = {
    EventKind.SPIKE: "#b85c00",
    EventKind.LR_CUT: "#00798c",
    EventKind.ROLLBACK: "#1f5fa8",
    EventKind.RESTART: "#1f5fa8",
    EventKind.INCIDENT: _BAD,
    EventKind.STOP: _BAD,
}
_MOST_MARKS = 200


def picture(runs: Sequence[Run], title: str | None = None) -> bytes:
    """Returns the curves of runs as a PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"a picture needs {error.name}, which is not installed.",
            where="nanguard report --png",
            do=f"Install it: {installing('plot')}",
        ) from error
    panels = [panel for panel in Panel if any(run.of(panel) for run in runs)]
    figure = Figure(figsize=(10, 1.2 + 2.1 * max(1, len(panels))), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(title or _headline(runs)), fontsize=11, x=0.01, ha="left")
    axes = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
    if not panels:
        axes[0].text(0.5, 0.5, "no numbers were recorded", ha="center", va="center")
        axes[0].set_axis_off()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, runs)
    if panels:
        axes[-1].set_xlabel(runs[0].axis.value)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw_panel(axis: Any, panel: Panel, runs: Sequence[Run]) -> None:
    axis.set_title(panel.value, fontsize=9, loc="left")
    axis.grid(visible=True, color="#eceef0", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    low, high, count = float("inf"), 0.0, 0
    for place, run in enumerate(runs):
        for own, curve in enumerate(run.of(panel)):
            colour = _COLOURS[(place if len(runs) > 1 else own) % len(_COLOURS)]
            name = f"{run.name} {curve.name}" if len(runs) > 1 else curve.name
            small, large = _draw_curve(axis, curve, colour, _plain(name)[:60])
            low, high, count = min(low, small), max(high, large), count + 1
        for event in run.events[:_MOST_MARKS]:
            if event.kind in _MARKED and event.step is not None:
                axis.axvline(event.step, color=_MARKED[event.kind], lw=0.7, ls=":", alpha=0.7)
    if low > 0 and high / low > _WIDE:
        axis.set_yscale("log")
    if count > 1:
        axis.legend(fontsize=7, loc="upper right", framealpha=0.8)


def _draw_curve(axis: Any, curve: Curve, colour: str, name: str) -> tuple[float, float]:
    """Draws a curve; returns its smallest and largest value."""
    values = curve.values[: len(curve)]
    thinned = thin(values, most=_BUCKETS, restarts=restarts_of(curve.xs) or [])
    breaks = {*thinned.breaks, len(thinned.starts)}
    xs: list[float] = []
    ys: list[float] = []
    for at, start in enumerate(thinned.starts):
        if at in breaks and xs:
            xs.append(float("nan"))
            ys.append(float("nan"))
        low, high = thinned.lows[at], thinned.highs[at]
        xs += [curve.xs[start]] if low == high else [curve.xs[start]] * 2
        ys += [low] if low == high else [low, high]
    alone = len(thinned.starts) < 3  # a line through a single point is not seen
    axis.plot(xs, ys, color=colour, lw=1.0, label=name, marker="o" if alone else None, ms=3)
    for gap in thinned.gaps:
        first, last = curve.xs[gap.start], curve.xs[gap.end - 1]
        axis.axvspan(first, last, facecolor=_BAD, alpha=0.12, hatch="///", edgecolor=_BAD, lw=0.6)
    return min(thinned.lows, default=float("inf")), max(thinned.highs, default=0.0)


def _headline(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].name}: {verdict_of(runs[0]).headline}"
    return ", ".join(run.name for run in runs[:4])


def _plain(text: str) -> str:
    """Returns a text without marks that matplotlib would take for a formula."""
    return shown(text, 160).replace("\n", " ").replace("\u202f", " ").replace("$", r"\$")
