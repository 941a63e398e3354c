"""Whole pages: the overview, a run, and what is said when there is none."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from nanguard import __version__
from nanguard.view.report.html import asset, body_of, embedded
from nanguard.view.report.html.markup import Html, el, join

if TYPE_CHECKING:
    from nanguard.view.server.desk import Open
    from nanguard.view.server.index import Index

_OWN = ("colours.js", "overview.js", "live.js", "serve.css")
TYPES = {"js": "text/javascript", "css": "text/css"}


@lru_cache
def asset_of(name: str) -> str | None:
    """Returns a script or a style by its name; None if there is none of that name."""
    if name in ("page.js", "page.css"):
        return asset(name)
    if name in _OWN:
        folder = files("nanguard.view.server").joinpath("assets")
        return folder.joinpath(name).read_text(encoding="utf-8")
    return None


def overview_page(index: Index) -> str:
    """Returns the page of all runs."""
    from nanguard.view.server.overview import overview

    name = index.folder.root.name
    version = el("meta", name="version", content=str(index.version))
    return _page(f"{name} · nanguard", overview(index), ("page.js", "overview.js"), version)


def run_page(key: str, held: Open) -> str:
    """Returns the page of a run, which goes on to show it as it grows."""
    run = held.run
    assert run is not None  # noqa: S101 - it was read before
    data = el("script", Html(embedded(held.payload["page"])), type="application/json", id="data")
    bar = el(
        "div",
        el("a", "All runs", href="/", cls="back"),
        el("span", "", id="live", role="status"),
        cls="bar",
    )
    head = join(
        (
            el("meta", name="run", content=key),
            el("meta", name="version", content=held.version),
        )
    )
    body = join((bar, body_of([run], run.name), data))
    return _page(f"{run.name} · nanguard", body, ("page.js", "live.js"), head)


def said_page(title: str, said: str) -> str:
    """Returns a page that only says something."""
    body = el(
        "main",
        el("h1", title),
        el("p", said, cls="nothing"),
        el("p", el("a", "All runs", href="/")),
        cls="said",
    )
    return _page(f"{title} · nanguard", body, (), None)


def _page(title: str, body: Html, scripts: tuple[str, ...], extra: Html | None) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="generator", content=f"nanguard {__version__}"),
        extra,
        el("title", title),
        [
            el("link", rel="stylesheet", href=f"/assets/{name}")
            for name in ("page.css", "serve.css")
        ],
        # Before anything is drawn, so that no light page flashes up.
        el("script", src="/assets/colours.js"),
        [el("script", src=f"/assets/{name}", defer=True) for name in scripts],
    )
    return f'<!doctype html>\n<html lang="en">{head}{el("body", body)}</html>\n'
