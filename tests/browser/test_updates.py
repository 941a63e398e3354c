"""A page that gets newer numbers stays as its reader has left it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.browser.views import LEFT, RIGHT, box_of, frame, plot, seen, written
from tests.view.runs.runs import write_record

pytestmark = pytest.mark.slow

DATA = "JSON.parse(document.getElementById('data').textContent)"
# The same numbers with a curve more, which comes first.
MORE = f"""(() => {{
  const data = {DATA};
  const [curves] = data.runs.map((run) => run.curves);
  curves.unshift({{ ...curves[0], name: 'new' }});
  return data;
}})()"""


def focused(view: Any) -> str:
    return view.evaluate("document.activeElement.ariaLabel || document.activeElement.title")


def test_zoom_stays_even_if_made_while_numbers_are_unpacked(visit, night):
    view = visit(night)
    zoom = "document.querySelector('[aria-label=\"Zoom in\"]').click()"
    view.evaluate(f"() => {{ const shown = window.nanguard.show({DATA}); {zoom}; return shown; }}")
    frame(view)
    assert seen(view) == "Step 29.75 to 89.25"


def test_zoom_to_what_is_gone_shows_all(visit, night):
    view = visit(night)
    view.get_by_role("button", name="Zoom in").click()
    later = """
      data.runs[0].events = [];
      for (const curve of data.runs[0].curves) {
        curve.first += 1000;
        curve.gaps = [];
      }
      return window.nanguard.show(data);"""
    view.evaluate(f"() => {{ const data = {DATA}; {later} }}")
    frame(view)
    assert seen(view) == "Step 1\u202f000 to 1\u202f119"


def test_drag_goes_on_and_the_newest_numbers_come_after_it(visit, night):
    view = visit(night)
    box = box_of(plot(view))
    wide = box["width"] - LEFT - RIGHT
    view.mouse.move(box["x"] + LEFT + wide * 0.25, box["y"] + 50)
    view.mouse.down()
    view.mouse.move(box["x"] + LEFT + wide * 0.4, box["y"] + 60, steps=2)
    view.evaluate(f"() => {{ window.nanguard.show({DATA}); window.nanguard.show({MORE}); }}")
    frame(view)
    assert view.get_by_role("button", name="new", exact=True).count() == 0
    view.mouse.move(box["x"] + LEFT + wide * 0.5, box["y"] + 60, steps=2)
    view.mouse.up()
    view.get_by_role("button", name="new", exact=True).wait_for()
    frame(view)
    limits = [float(plot(view).get_attribute(f"aria-value{end}")) for end in ("min", "max")]
    assert limits == pytest.approx([29.75, 59.5], abs=0.3)


def test_tables_hidden_curves_and_scales_stay(visit, night):
    view = visit(night)
    view.get_by_text("Loss terms as a table", exact=True).click()
    view.get_by_role("button", name="latent").click()
    scale = view.get_by_role("button", name="Logarithmic scale in all charts")
    scale.click()
    view.evaluate(f"window.nanguard.show({MORE})")
    frame(view)
    terms = view.locator(".chart").nth(1)
    assert terms.locator("tbody tr").count() == 16
    assert terms.locator(".behind").text_content().startswith("117 finite numbers in view")
    assert view.get_by_role("button", name="latent").get_attribute("aria-pressed") == "false"
    assert scale.get_attribute("aria-pressed") == "true"
    scale.click()
    frame(view)
    pressed = {b.get_attribute("aria-pressed") for b in view.locator(".log, #log-all").all()}
    assert pressed == {"false"}
    # All charts have it only while each of them has.
    scale.click()
    view.get_by_role("button", name="Loss: logarithmic scale").click()
    frame(view)
    assert scale.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("data", [DATA, MORE])
def test_focus_stays(visit, night, data):
    view = visit(night)
    plots, legend = '[aria-label="Gradient norm: position of the cursor"]', '[title$="hide latent"]'
    for place in ('[aria-label="Zoom in"]', legend, plots, ".marker.skip"):
        view.evaluate(f"window.nanguard.show({DATA})")
        frame(view)
        view.locator(place).first.focus()
        before = focused(view)
        view.evaluate(f"window.nanguard.show({data})")
        frame(view)
        assert before
        assert focused(view) == before


def test_buttons_that_build_the_charts_anew_keep_the_focus(visit, tmp_path):
    folders = [write_record(tmp_path / name) for name in ("first", "second")]
    view = visit(written(tmp_path / "report.html", *folders))
    for name in ("side", "by-time", "log-all"):
        view.locator(f"#{name}").focus()
        view.keyboard.press("Enter")
        frame(view)
        assert view.evaluate("document.activeElement.id") == name
        assert view.locator(f"#{name}").get_attribute("aria-pressed") == "true"


def test_table_counts_every_gap_in_view_once(visit, tmp_path):
    bad = {*range(25, 36), 50, *range(110, 120)}
    with (tmp_path / "train.jsonl").open("w") as file:
        for n in range(120):
            file.write(json.dumps({"step": n, "loss": math.nan if n in bad else 2.0}) + "\n")
    view = visit(written(tmp_path / "report.html", tmp_path / "train.jsonl"))
    view.get_by_text("Loss as a table", exact=True).click()

    def counted() -> int:
        frame(view)
        cells = view.locator(".chart tbody td:last-child").all_text_contents()
        return sum(map(int, cells))

    assert counted() == 22
    # The first gap begins to the left of what is seen, and the last one to the right of it.
    view.get_by_role("button", name="Zoom in").click()
    assert counted() == 12
    assert view.locator(".chart .behind").text_content().endswith("; 12 not finite")
