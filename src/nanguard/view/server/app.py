"""What is answered to which address."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from nanguard import __version__
from nanguard.view.report.html import asset, body_of, embedded, page_data, sections
from nanguard.view.report.html.markup import Html, el, join
from nanguard.view.report.verdict import judge
from nanguard.view.runs.run_follower import LiveRun
from nanguard.view.server.index import mark_of
from nanguard.view.server.overview import problems, row, status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from nanguard.view.runs import Run
    from nanguard.view.server.index import Index, ServedRun


T = TypeVar("T")

# Seconds between two looks for a page that is open.
_LOOK = 0.5
# Seconds after which something is sent in any case, so that a lost connection is noticed.
_HEARTBEAT_SECONDS = 10.0
# Pages that may be open at once; each keeps a connection.
MOST_STREAMS = 200
_GONE = (
    "There is no such run below this folder, or not any more. If it is written again, it appears "
    "in the list of all runs."
)


class RunsSite:
    """The pages about the runs of an index, and the streams that keep them up to date.

    Attributes:
        app: The application, still open to everybody.
        stopping: Set when the streams are to end.
    """

    def __init__(self, index: Index) -> None:
        self.stopping = asyncio.Event()
        self._index = index
        self._desk = Desk(index)
        self._streams = 0
        self.app = Starlette(
            routes=[
                Route("/", self._overview),
                Route("/events", self._overview_events),
                Route("/run/{key}", self._run),
                Route("/run/{key}/data", self._run_data),
                Route("/run/{key}/events", self._run_events),
                Route("/assets/{name}", self._asset),
            ],
            exception_handlers={404: _not_found, 500: _failed},
        )

    async def _overview(self, request: Request) -> Response:
        return HTMLResponse(await beside(lambda: overview_page(self._index)))

    async def _run(self, request: Request) -> Response:
        key = request.path_params["key"]
        entry = await self._entry(key)
        if entry is None:
            return HTMLResponse(said_page("No such run", _GONE), 404)
        held = await beside(lambda: self._desk.read(entry))
        return HTMLResponse(await beside(lambda: run_page(key, held)))

    async def _run_data(self, request: Request) -> Response:
        entry = await self._entry(request.path_params["key"])
        if entry is None:
            return _json({"gone": _GONE}, 404)
        held = await beside(lambda: self._desk.read(entry))
        return _json({**held.payload, **_state(entry)})

    async def _entry(self, key: str) -> ServedRun | None:
        """Returns a run; right after the start, the folder is still being searched."""
        until = time.monotonic() + 5.0
        while not self._index.searched and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return self._index.look(key)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        text = asset_of(name)
        if text is None:
            return PlainTextResponse("There is no such file.\n", 404)
        return PlainTextResponse(text, media_type=TYPES[name.rpartition(".")[2]])

    async def _overview_events(self, request: Request) -> Response:
        return self._stream(self._changes(_whole(request.query_params.get("after"))))

    async def _run_events(self, request: Request) -> Response:
        key, seen = request.path_params["key"], request.query_params.get("after", "")
        return self._stream(self._ticks(key, seen))

    def _stream(self, messages: AsyncIterator[str]) -> Response:
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.\n", 503)
        return StreamingResponse(self._counted(messages), media_type="text/event-stream")

    async def _counted(self, messages: AsyncIterator[str]) -> AsyncIterator[str]:
        self._streams += 1
        try:
            yield "retry: 1000\n\n"
            async for message in messages:
                yield message
        finally:
            self._streams -= 1

    async def _changes(self, seen: int) -> AsyncIterator[str]:
        """Yields the rows that have changed."""
        sent = time.monotonic()
        known: set[str] | None = None
        while not self.stopping.is_set():
            index = self._index
            if index.version != seen or known is None:
                after, seen, entries = seen, index.version, index.newest_first()
                new = [entry for entry in entries if entry.version > after]
                rows = await beside(partial(_rows, new, index))
                now = {entry.key for entry in entries}
                message: dict[str, Any] = {"version": seen, "rows": rows, "status": status(index)}
                message |= {"keys": sorted(now), "problems": problems(index)}
                known = now
                yield _message("rows", message)
                sent = time.monotonic()
            elif time.monotonic() - sent > _HEARTBEAT_SECONDS:
                yield ": still here\n\n"
                sent = time.monotonic()
            await self._pause(2 * _LOOK)

    async def _ticks(self, key: str, seen: str) -> AsyncIterator[str]:
        """Yields a message whenever a run has changed."""
        sent, said = time.monotonic(), ""
        while not self.stopping.is_set():
            entry = await self._entry(key)
            version = "gone" if entry is None else self._desk.version(entry)
            state = "" if entry is None else entry.summary.state
            if (version, state) != (seen, said):
                seen, said = version, state
                message = (
                    {"gone": _GONE} if entry is None else {"version": version, **_state(entry)}
                )
                yield _message("change", message)
                sent = time.monotonic()
            elif time.monotonic() - sent > _HEARTBEAT_SECONDS:
                yield ": still here\n\n"
                sent = time.monotonic()
            # A run that takes long to read is not read all the time.
            await self._pause(max(_LOOK, self._desk.cost(key)))

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except asyncio.TimeoutError:
            return


async def beside(work: Callable[[], T]) -> T:
    """Returns what a function returns, which runs in a thread that nobody waits for at the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            failed = error
        try:
            loop.call_soon_threadsafe(finish, result, failed)
        except RuntimeError:  # the server has ended meanwhile
            return

    threading.Thread(target=run, daemon=True).start()
    return await done


def _rows(entries: list[ServedRun], index: Index) -> list[tuple[str, str]]:
    return [(entry.key, row(entry, index)) for entry in entries]


def _state(entry: ServedRun) -> dict[str, Any]:
    summary = entry.summary
    return {
        "state": summary.state,
        "running": summary.running,
        "changed": summary.changed,
        "name": entry.found.name,
    }


def _json(data: Any, status: int = 200) -> Response:
    # In ASCII: a name that is no Unicode could not be sent otherwise.
    return Response(_dumped(data), status, media_type="application/json")


def _message(event: str, data: Any) -> str:
    return f"event: {event}\ndata: {_dumped(data)}\n\n"


def _dumped(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 18 else 0


async def _not_found(request: Request, error: Exception) -> Response:
    return HTMLResponse(said_page("Nothing here", "There is no page at this address."), 404)


async def _failed(request: Request, error: Exception) -> Response:
    sys.stderr.write(f"nanguard: {request.url.path}: {type(error).__name__}: {error}\n")
    said = f"This page could not be made ({type(error).__name__}). Please report this."
    return HTMLResponse(said_page("It failed", said), 500)


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


# Runs that are kept whole in memory because somebody looks at them.
MOST_OPEN = 8
# Numbers that are kept in memory: with their steps, about 8 bytes each.
_MOST_POINTS = 20_000_000
# Bytes of numbers in a page, which is sent again with every change.
_BUDGET = 600_000


@dataclass(slots=True)
class Open:
    """An open run.

    Attributes:
        live: What reads it.
        version: Names the state in which it was read last.
        run: The run, with findings.
        payload: What its page shows.
        spent: Seconds that it takes to read it again.
        lock: Held while it is read.
    """

    live: LiveRun
    version: str = ""
    run: Run | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Desk:
    """Opens runs, and lets go of those that nobody has looked at for the longest time."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, entry: ServedRun) -> Open:
        """Returns a run as it is now, with what its page shows."""
        held = self._held(entry)
        with held.lock:
            version = version_of(entry)
            if held.version != version or held.run is None or held.live.read_so_far is not None:
                began, first = time.monotonic(), held.run is None
                held.live.found = self._index.folder.confined(entry.found)
                run = held.live.read()
                judge(run)
                held.payload = {
                    "version": version,
                    "page": page_data([run], _BUDGET),
                    "sections": {key: list(part) for key, part in sections([run]).items()},
                    "points": run.points,
                }
                held.run, held.version = run, version
                held.spent = 0.0 if first else time.monotonic() - began
        self._let_go()
        return held

    def version(self, entry: ServedRun) -> str:
        """Returns a word that differs once a run has changed, or once more of it was read."""
        held = self._open.get(entry.key)
        read = None if held is None else held.live.read_so_far
        return version_of(entry) if read is None else f"{version_of(entry)}-{read}"

    def cost(self, key: str) -> float:
        """Returns how many seconds it takes to read a run again; 0 if that is not known."""
        held = self._open.get(key)
        return 0.0 if held is None else held.spent

    def _held(self, entry: ServedRun) -> Open:
        with self._lock:
            held = self._open.get(entry.key)
            if held is None:
                held = self._open[entry.key] = Open(LiveRun(entry.found))
            self._open.move_to_end(entry.key)
            return held

    def _let_go(self) -> None:
        with self._lock:
            points = sum(held.run.points for held in self._open.values() if held.run)
            while len(self._open) > MOST_OPEN or (points > _MOST_POINTS and len(self._open) > 1):
                _, old = self._open.popitem(last=False)
                points -= old.run.points if old.run else 0


def version_of(entry: ServedRun) -> str:
    """Returns a word that differs once a run has changed."""
    # A last line without an end is read some time later.
    state = (mark_of(entry.found), entry.digest.waiting, str(entry.found.configs))
    return hashlib.sha256(repr(state).encode("utf-8", "replace")).hexdigest()[:16]
