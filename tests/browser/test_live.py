"""Pages of nanguard serve in a real browser: they follow what is written."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.view.report.html.hostile import write_hostile
from tests.view.runs.runs import write_incident, write_record

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Some runs."""
    root = tmp_path_factory.mktemp("runs")
    night = write_record(root / "night")
    write_incident(night / "incidents", 40)
    write_record(root / "growing", 50, bad=range(0))
    write_record(root / "slow", 30, bad=range(0))
    write_record(root / "lost", bad=range(100, 120))
    write_hostile(root)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Any]:
    """A server over them."""
    from tests.view.server.conftest import Served

    one = Served(root)
    yield one
    one.end()


@pytest.fixture
def look(chromium: Any, server: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of the server, and fails if it complains or asks anybody else."""
    contexts, complaints = [], []

    def opened(path: str = "/", *, width: int = 1200, dark: bool = False) -> Any:
        view = {"width": width, "height": 900}
        context = chromium.new_context(viewport=view, color_scheme="dark" if dark else "light")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text))
        own = server.url
        page.on("request", lambda r: r.url.startswith(own) or complaints.append(r.url))
        page.goto(server.url + path)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def row(page: Any, name: str) -> Any:
    return page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True))


def said(page: Any, place: str, text: str) -> None:
    """Waits until a text is there; a page that forbids eval cannot be asked with a script."""
    page.locator(place, has_text=text).wait_for()


def append(folder: Path, step: int, loss: float) -> None:
    record = {"step": step, "update": step, "loss": loss, "terms": {"text": loss, "latent": 0.25}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def test_run_page_follows_the_file(look, root):
    folder = root / "growing"
    overview = look()
    row(overview, "growing").get_by_role("link").first.click()
    page = overview
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.wait_for_selector("#live[data-state=running]")
    page.get_by_role("button", name="Zoom in").click()
    said(page, "#where", "Step 12.25 to 36.75")
    plot = page.locator('.plot[aria-label^="Loss:"]')
    plot.focus()
    append(folder, 50, 0.125)
    said(page, "main", "step 50, is 0.125")
    said(page, ".top .under", "305 numbers")
    # Zoom and focus stay where they are.
    assert page.locator("#where").text_content() == "Step 12.25 to 36.75"
    assert page.evaluate("document.activeElement.classList.contains('plot')")
    # The file is written anew, and then goes on.
    (folder / "metrics.jsonl").write_text("")
    append(folder, 0, 7.5)
    said(page, "main", "step 0, is 7.5")
    append(folder, 1, 6.5)
    said(page, "main", "step 1, is 6.5")
    # An incident comes up, and with it a part of the page.
    write_incident(folder / "incidents", 1)
    page.wait_for_selector("#incident-0-0")
    assert "Incidents" in page.locator("nav").text_content()
    # All of it is deleted.
    shutil.rmtree(folder)
    page.wait_for_selector("#live[data-state=lost]")
    assert page.locator("#live").text_content().startswith("The files are gone")
    assert page.locator(".chart").count() > 0


def test_what_is_announced_while_numbers_come_is_asked_for(look, root):
    page = look()
    row(page, "slow").get_by_role("link").first.click()
    page.wait_for_selector("#live[data-state=running]")
    held = []

    def hold(route: Any) -> None:
        answer = route.fetch()
        if not held:
            held.append(route)
            append(root / "slow", 31, 0.25)
            # The line is announced while the answer without it is still under way.
            time.sleep(1.5)
        route.fulfill(response=answer)

    page.route("**/data", hold)
    append(root / "slow", 30, 0.5)
    said(page, "main", "step 31, is 0.25")
    assert held


def test_overview_follows_and_filters(look, root):
    page = look()
    lost, night = row(page, "lost"), row(page, "night")
    lost.locator(".badge", has_text="Bad").first.wait_for()
    assert lost.locator("td.number.bad").text_content() == "nan"
    page.get_by_role("button", name="Bad").click()
    assert [night.is_visible(), lost.is_visible()] == [False, True]
    page.get_by_role("button", name="All").click()
    page.get_by_role("searchbox").fill("nig")
    assert [night.is_visible(), lost.is_visible()] == [True, False]
    page.get_by_role("searchbox").fill("zzz")
    assert page.locator("#nothing").is_visible()
    page.get_by_role("searchbox").fill("")
    append(root / "night", 120, 0.0625)
    said(page, "#runs", "0.0625")
    write_record(root / "later", 30, bad=range(0))
    said(page, "#runs", "later")
    night.get_by_role("link", name="1 incident").click()
    page.wait_for_selector("#incident-0-0")
    assert page.url.endswith("#incident-0-0")


def test_colours_are_kept_from_page_to_page(look):
    page = look()
    page.get_by_role("button", name="Dark colours").click()
    row(page, "lost").get_by_role("link").first.click()
    page.wait_for_selector("#live[data-state]")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(20, 23, 27)"


def test_hostile_run_does_nothing(look):
    page = look()
    page.get_by_role("link", name="<b onmouseover").first.click()
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.wait_for_selector("#live[data-state=running]")
    assert page.evaluate("window.owned") is None
    assert page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_overview_is_accessible_and_within_the_window(look, width, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = look(width=width, dark=dark)
    page.wait_for_selector("tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []
