"""The documentation in a real browser, opened from its folder: it can be searched and read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The documentation, built once."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def read(chromium: Any, site: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page from the folder; fails if a script does, or if it asks the network."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened(name: str, *, width: int = 1280, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        view = {"width": width, "height": 900}
        context = chromium.new_context(viewport=view, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = site.as_uri()
        page.on("request", lambda r: r.url.startswith(own) or complaints.append(r.url))
        page.goto((site / name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("name", ["index.html", "rules/index.html"])
def test_it_can_be_searched_without_a_server(read, name):
    page = read(name)
    page.keyboard.press("/")
    page.keyboard.type("baseline")
    page.locator(".md-search-result__link[href*='check.html']").first.click()
    page.wait_for_url("**/check.html*")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["index.html", "cost.html", "rules/clip-before-unscale.html"])
def test_every_page_can_be_read_by_all(read, name, width, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = read(name, width=width, dark=dark)
    page.wait_for_selector(".md-code__nav[aria-label], article:not(:has(pre))", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []
