"""The page on paper."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "dark"), [(1200, True), (390, False)])
def test_paper_has_light_colours_its_own_width_and_nothing_to_click(visit, night, width, dark):
    view = visit(night, width=width, dark=dark)
    view.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    canvas = view.locator(".plot canvas").first
    assert canvas.evaluate("c => [c.width, c.height]") == [2 * 678, 2 * 180]
    view.emulate_media(media="print")
    view.set_viewport_size({"width": 718, "height": 1000})
    for gone in ("nav", ".toolbar", ".hint", "#theme", ".chart .log", ".chart details"):
        assert not view.locator(gone).first.is_visible()
    # What was skipped is no link for skipping.
    assert view.locator(".marker.skip").first.is_visible()
    assert view.locator(".kind.skip").first.is_visible()
    assert view.get_by_text("exp-overflow").first.is_visible()
    text = "getComputedStyle(document.documentElement).getPropertyValue('--text')"
    assert view.evaluate(text) == "#1d2127"
    # The picture is as wide as it was drawn, and fits on the page.
    assert canvas.evaluate("c => [c.clientWidth, c.clientHeight]") == [678, 180]
    assert view.evaluate("document.documentElement.scrollWidth") <= 718
    view.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert not view.get_by_text("exp-overflow").first.is_visible()


def test_pdf(visit, night):
    assert len(visit(night).pdf()) > 20_000
