"""Reports to look at, and what is seen of them in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.view.report.html import page
from nanguard.view.report.verdict import judge
from nanguard.view.runs import open_runs

if TYPE_CHECKING:
    from pathlib import Path

LEFT, RIGHT = 62, 10


def written(target: Path, *paths: Path, **options: Any) -> Path:
    """Writes the report about some paths, and returns it."""
    runs = open_runs(paths)
    for run in runs:
        judge(run)
    target.write_text(page(runs, **options), encoding="utf-8")
    return target


def plot(view: Any, panel: str = "Loss") -> Any:
    """Returns the plot of a panel."""
    return view.locator(f'.plot[aria-label^="{panel}:"]')


def box_of(chart: Any) -> dict[str, float]:
    """Returns where a chart is in the window, once it is."""
    chart.scroll_into_view_if_needed()
    return chart.bounding_box()


def seen(view: Any) -> str:
    """Returns what is said about the part that is seen."""
    return view.locator("#where").text_content()


def frame(view: Any) -> None:
    """Waits until what was asked for is drawn."""
    view.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


def ink(view: Any, panel: str, x: float, colour: str) -> int:
    """Counts pixels of a colour in a column of a chart, given as a part of its width."""
    script = """([canvas, x, name, left, right]) => {
      const ratio = canvas.width / canvas.clientWidth;
      const at = Math.round((left + (canvas.clientWidth - left - right) * x) * ratio);
      const copy = document.createElement('canvas');
      [copy.width, copy.height] = [3, canvas.height];
      const probe = copy.getContext('2d', { willReadFrequently: true });
      probe.drawImage(canvas, 1 - at, 0);
      const data = probe.getImageData(0, 0, 3, canvas.height).data;
      probe.clearRect(0, 0, 3, canvas.height);
      probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
      probe.fillRect(0, 0, 1, 1);
      const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
      let count = 0;
      for (let i = 0; i < data.length; i += 4) {
        const far = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
        if (data[i + 3] > 100 && far < 60) count++;
      }
      return count;
    }"""
    canvas = plot(view, panel).locator("canvas").element_handle()
    return view.evaluate(script, [canvas, x, colour, LEFT, RIGHT])
