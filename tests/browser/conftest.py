"""A real browser, Debian's, that may ask the network for nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.views import written
from tests.view.runs.runs import write_incident, write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, started once."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file in a new window, and fails if the page asks for anything or complains."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened(path: Path, *, width: int = 1200, dark: bool = False, **options: Any) -> Any:
        scheme = "dark" if dark else "light"
        view = {"width": width, "height": 900}
        context = chromium.new_context(viewport=view, color_scheme=scheme, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text))
        own = path.as_uri()
        page.on("request", lambda asked: asked.url == own or complaints.append(asked.url))
        page.goto(own)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def night(tmp_path_factory) -> Path:
    """A guarded run with an incident."""
    folder = write_record(tmp_path_factory.mktemp("runs") / "night")
    write_incident(folder / "incidents", 40)
    (folder / "config.yaml").write_text("training:\n  lr: 1e-4\n")
    return written(folder / "report.html", folder)
