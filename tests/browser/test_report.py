"""The page in a real browser: it draws, zooms, answers to keys, and hides nothing."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from tests.browser.views import LEFT, RIGHT, box_of, frame, ink, plot, seen, written
from tests.view.report.html.hostile import write_hostile
from tests.view.runs.runs import write_record

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A long run that does not fit into a page point by point."""
    folder = tmp_path_factory.mktemp("long")
    with (folder / "train.jsonl").open("w") as file:
        for n in range(100_000):
            loss = 700.0 if n == 33_333 else math.nan if n == 70_000 else 2 + math.sin(n / 9000)
            file.write(f'{{"step":{n},"loss":{json.dumps(loss)},"lr":1e-4}}\n')
    return written(folder / "report.html", folder / "train.jsonl", budget=200_000)


def test_curves_are_drawn_and_gaps_are_marked(visit, night):
    view = visit(night)
    names = view.locator(".chart h3").all_text_contents()
    assert names == ["Loss", "Loss terms", "Gradient norm", "Learning rate", "Loss scale"]
    frame(view)
    for panel in ("Loss", "Gradient norm"):
        assert ink(view, panel, 0.2, "--c0") > 0
        # Steps 40 to 42 are a marked gap: no line, and the colour of what is bad.
        assert ink(view, panel, 41 / 119, "--bad") > 2
        assert ink(view, panel, 41 / 119, "--c0") == 0
    note = view.locator(".chart .behind").first.text_content()
    assert note == "119 finite numbers in view; 3 not finite"


def test_hover_tells_what_is_under_the_cursor_in_every_chart(visit, night):
    view = visit(night)
    box = box_of(plot(view))
    wide = box["width"] - LEFT - RIGHT
    view.mouse.move(box["x"] + LEFT + wide * 20 / 119, box["y"] + 60)
    frame(view)
    assert seen(view) == "Step 20 · 2023-11-14 22:13:40 UTC"
    values = view.locator(".legend output").all_text_contents()
    assert values[0] == "2.2296"
    assert values[2:] == ["2.2296", "0.25", "2.2296", "1e-4", "65536"]
    view.mouse.move(box["x"] + LEFT + wide * 41 / 119, box["y"] + 60)
    frame(view)
    assert view.locator(".legend output").first.text_content() == "nan (40 to 42)"


def test_drag_zooms_all_charts_and_double_click_shows_all(visit, night):
    view = visit(night)
    assert seen(view) == "Step 0 to 119"
    box = box_of(plot(view, "Gradient norm"))
    wide = box["width"] - LEFT - RIGHT
    view.mouse.move(box["x"] + LEFT + wide * 0.25, box["y"] + 50)
    view.mouse.down()
    view.mouse.move(box["x"] + LEFT + wide * 0.5, box["y"] + 60, steps=4)
    view.mouse.up()
    frame(view)
    limits = [float(plot(view).get_attribute(f"aria-value{end}")) for end in ("min", "max")]
    assert limits == pytest.approx([29.75, 59.5], abs=0.3)
    plot(view, "Gradient norm").dblclick()
    frame(view)
    assert float(plot(view).get_attribute("aria-valuemax")) == 119


def test_buttons_and_wheel_zoom(visit, night):
    view = visit(night)
    view.get_by_role("button", name="Zoom in").click()
    frame(view)
    assert seen(view) == "Step 29.75 to 89.25"
    view.get_by_role("button", name="To the right").click()
    frame(view)
    assert seen(view) == "Step 47.6 to 107.1"
    view.get_by_role("button", name="Show all steps").click()
    frame(view)
    assert seen(view) == "Step 0 to 119"
    # A wheel over a chart scrolls the page, until the chart was chosen.
    plot(view).hover()
    view.mouse.wheel(0, -200)
    frame(view)
    assert float(plot(view).get_attribute("aria-valuemax")) == 119
    plot(view).click()
    view.mouse.wheel(0, -200)
    frame(view)
    assert float(plot(view).get_attribute("aria-valuemax")) < 119


def test_time_since_the_beginning_instead_of_steps(visit, tmp_path):
    folder = tmp_path / "slower"
    folder.mkdir()
    # The second half of the steps takes nine times as long as the first.
    times = [1.7e9 + (n if n < 60 else 60 + 9 * (n - 60)) for n in range(121)]
    with (folder / "train.jsonl").open("w") as file:
        for n, when in enumerate(times):
            loss = math.nan if n == 60 else 2 - n / 100
            line = {"step": n, "loss": loss, "timestamp": when}
            file.write(json.dumps(line) + "\n")
    view = visit(written(folder / "report.html", folder / "train.jsonl"))
    frame(view)
    assert ink(view, "Loss", 0.5, "--bad") > 2
    time = view.get_by_role("button", name="Time since the run began instead of steps")
    assert time.get_attribute("aria-pressed") == "false"
    time.click()
    frame(view)
    assert time.get_attribute("aria-pressed") == "true"
    assert seen(view) == "Time 0s to 10m 00s"
    assert ink(view, "Loss", 0.5, "--bad") == 0
    assert ink(view, "Loss", 0.1, "--bad") > 2
    box = box_of(plot(view))
    view.mouse.move(box["x"] + LEFT + (box["width"] - LEFT - RIGHT) * 0.1, box["y"] + 60)
    frame(view)
    assert seen(view) == "Time 1m 00s · 2023-11-14 22:14:20 UTC"
    time.click()
    frame(view)
    assert seen(view) == "Step 0 to 120"


def test_no_time_is_offered_where_none_is_known(visit, long):
    assert visit(long).locator("#by-time").count() == 0


def test_keyboard_moves_the_cursor_zooms_and_changes_the_scale(visit, night):
    view = visit(night)
    plot(view).focus()
    view.keyboard.press("Home")
    view.keyboard.press("ArrowRight")
    frame(view)
    assert plot(view).get_attribute("aria-valuetext").startswith("step 1: loss 3.0204")
    view.keyboard.press("+")
    frame(view)
    assert float(plot(view).get_attribute("aria-valuemax")) < 70
    view.keyboard.press("0")
    frame(view)
    assert float(plot(view).get_attribute("aria-valuemax")) == 119
    log = view.get_by_role("button", name="Loss: logarithmic scale")
    assert log.get_attribute("aria-pressed") == "false"
    view.keyboard.press("l")
    frame(view)
    assert log.get_attribute("aria-pressed") == "true"


def test_log_scale_of_all_charts(visit, night):
    view = visit(night)
    frame(view)
    before = plot(view).locator("canvas").evaluate("c => c.toDataURL()")
    view.get_by_role("button", name="Logarithmic scale in all charts").click()
    frame(view)
    assert plot(view).locator("canvas").evaluate("c => c.toDataURL()") != before
    pressed = [b.get_attribute("aria-pressed") for b in view.locator(".chart .log").all()]
    assert pressed == ["true"] * 5


def test_marker_leads_to_its_incident(visit, night):
    view = visit(night)
    frame(view)
    marker = view.locator(".marker.incident")
    assert marker.get_attribute("aria-label") == "step 40: log-or-sqrt-domain: log(0): 3 of 512"
    marker.focus()
    view.keyboard.press("Enter")
    assert view.evaluate("document.activeElement.id") == "incident-0-0"
    view.wait_for_timeout(600)
    assert 0 <= view.evaluate("document.activeElement.getBoundingClientRect().top") < 300
    skips = view.locator(".marker.skip")
    assert skips.count() == 2
    skips.first.click()
    frame(view)
    assert view.locator("#where").text_content().startswith("Step 40")


def test_table_stands_for_each_chart(visit, night):
    view = visit(night)
    view.get_by_text("Loss as a table", exact=True).click()
    frame(view)
    rows = view.locator(".chart").first.locator("tbody tr").all_text_contents()
    assert len(rows) > 15
    assert any("nan" not in row and row.endswith("3") for row in rows)


def test_legend_hides_a_curve(visit, night):
    view = visit(night)
    view.get_by_role("button", name="latent").click()
    frame(view)
    terms = view.locator(".chart").nth(1)
    assert terms.locator(".behind").text_content().startswith("117 finite numbers in view")


def test_dark_and_light(visit, night):
    view = visit(night, dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert view.evaluate(ground) == "rgb(20, 23, 27)"
    button = view.get_by_role("button", name="Dark colours")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert view.evaluate(ground) == "rgb(251, 251, 250)"
    frame(view)
    assert ink(view, "Loss", 0.2, "--c0") > 0


def test_long_run_keeps_extremes_and_shows_detail(visit, long):
    assert long.stat().st_size < 400_000
    view = visit(long)
    frame(view)
    # One bad point and one spike among 100 000 are seen in the whole picture.
    assert ink(view, "Loss", 70_000 / 99_999, "--bad") > 2
    assert ink(view, "Loss", 33_333 / 99_999, "--c0") > 40
    assert "kept as ranges of up to" in view.locator(".behind").first.text_content()
    assert "200\u202f000 numbers stand behind the curves" in view.locator("#behind").text_content()
    # Beside what happened, zooming shows every point.
    view.locator(".marker.non-finite").first.click()
    plot(view).focus()
    for _ in range(12):
        view.keyboard.press("+")
    frame(view)
    low, high = (float(plot(view).get_attribute(f"aria-value{end}")) for end in ("min", "max"))
    assert low < 70_000 < high
    assert high - low < 100
    note = view.locator(".behind").first.text_content()
    assert "ranges" not in note
    assert note.endswith("1 not finite")


def test_log_scale_shows_ranges_that_reach_down_to_zero(visit, tmp_path):
    with (tmp_path / "train.jsonl").open("w") as file:
        for n in range(30_000):
            some = 2.0 if n // 120 % 2 else 200.0
            loss = 7e5 if n == 10_000 else 0.0 if n % 3 else some
            file.write(f'{{"step":{n},"loss":{loss}}}\n')
    view = visit(written(tmp_path / "report.html", tmp_path / "train.jsonl", budget=20_000))
    view.get_by_role("button", name="Logarithmic scale in all charts").click()
    frame(view)
    low, spike = (ink(view, "Loss", x, "--c0") for x in (0.2, 10_000 / 29_999))
    assert 0 < low < spike - 100
    note = view.locator(".behind").first.text_content()
    assert note.endswith("; values of 0 and below have no place on this scale")
    # So it is where each range has room, and where all of them reach down to 0.
    plot(view).focus()
    for _ in range(8):
        view.keyboard.press("+")
    frame(view)
    assert "kept as ranges" in view.locator(".behind").first.text_content()
    assert ink(view, "Loss", 0.35, "--c0") > 0
    assert ink(view, "Loss", 0.75, "--c0") > 0


def test_hostile_strings_do_nothing(visit, tmp_path):
    view = visit(written(tmp_path / "report.html", write_hostile(tmp_path)))
    frame(view)
    assert view.evaluate("window.owned") is None
    assert "<script>window.owned=1</script>" in view.locator("main").text_content()
    for what in (".marker", "summary", ".legend button"):
        view.evaluate(f"document.querySelectorAll('{what}').forEach((one) => one.click())")
    frame(view)
    assert view.evaluate("window.owned") is None
    assert view.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_runs_over_each_other_and_side_by_side(visit, tmp_path):
    (tmp_path / "second").mkdir()
    other = tmp_path / "second" / "train.jsonl"
    lines = [{"step": n, "loss": 9e4 if n == 7 else 2.5, "grad_norm": 0.5} for n in range(120)]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = write_record(tmp_path / "first")
    view = visit(written(tmp_path / "report.html", folder, tmp_path / "second"))
    frame(view)
    assert view.locator(".chart").count() == 5
    names = view.locator(".chart").nth(2).locator(".name").all_text_contents()
    assert names == ["first · grad_norm", "second · grad_norm"]
    view.get_by_role("button", name="Runs side by side").click()
    frame(view)
    assert view.locator(".column").count() == 2
    assert view.locator(".chart").count() == 10
    boxes = [box.bounding_box() for box in view.locator(".column").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    # Those of one panel are beside each other, with the same scale.
    for panel in ("Loss", "Gradient norm"):
        tops = {chart.bounding_box()["y"] for chart in plot(view, panel).all()}
        assert len(tops) == 1
    logs = view.get_by_role("button", name="Loss: logarithmic scale").all()
    assert [log.get_attribute("aria-pressed") for log in logs] == ["true", "true"]
    plot(view).nth(0).focus()
    view.keyboard.press("+")
    frame(view)
    limits = {chart.get_attribute("aria-valuemax") for chart in view.locator(".plot").all()}
    assert len(limits) == 1


@pytest.mark.parametrize("content", ["", '{"step": 1, "loss": NaN}\n', '{"step": 3, "loss": 2}\n'])
def test_poor_runs(visit, tmp_path, content):
    (tmp_path / "train.jsonl").write_text(content)
    view = visit(written(tmp_path / "report.html", tmp_path / "train.jsonl"))
    frame(view)
    assert view.locator(".chart").count() == (1 if content else 0)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 360])
def test_accessible_and_within_the_window(visit, night, width, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    view = visit(night, width=width, dark=dark)
    frame(view)
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(view).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []
