"""Starts the server, says where it is, and ends it at once on a signal."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import secrets
import socket
import sys
import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanguard.errors import SourceError, UsageError
from nanguard.view.server.app import RunsSite
from nanguard.view.server.index import Index

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable
    from pathlib import Path
    from types import FrameType

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS_TO_ASK = 10.0
_NO_HOST = "this machine has no such address"
_REASONS = {
    errno.EADDRINUSE: ("it is in use", "Choose another with --port, or any free one: --port 0"),
    errno.EACCES: ("this user may not use it", "Choose a port from 1024 on: --port 6116"),
    errno.EADDRNOTAVAIL: (_NO_HOST, "Give an address of this machine with --host."),
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How runs are served.

    Attributes:
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: The token that visitors must present; generated where it is needed.
        names: Other names by which this machine may be asked.
        browser: Whether to open a browser.
    """

    host: str = "127.0.0.1"
    port: int = 6116
    token: str | None = None
    names: tuple[str, ...] = ()
    browser: bool = False


class _Patient(H11Protocol):
    """A connection that waits for the whole of a request, but not for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Takes in a part of a request; one that is whole is answered in its own time."""
        super().data_received(data)
        if self._is_answering() and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        super().on_response_complete()
        if self._deadline is None and not self._is_answering():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(_SECONDS_TO_ASK, self._give_up)

    def _give_up(self) -> None:
        if not self._is_answering() and not self.transport.is_closing():
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


class _Server(uvicorn.Server):
    """A server whose streams end before it waits for them."""

    site: RunsSite

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes note of a signal."""
        self.site.stopping.set()
        super().handle_exit(sig, frame)


def serve(root: Path, options: ServeSettings) -> None:
    """Serves the runs below a folder until it is interrupted.

    Raises:
        NanguardError: The folder cannot be read, or the address cannot be used.
    """
    _check_folder(root)
    token = options.token
    if token is None and not is_loopback(options.host):
        token = secrets.token_urlsafe(24)
    listening = _listen(options.host, options.port)
    index = Index(root)
    site = RunsSite(index)
    gate = HostGate(site.app, host=options.host, token=token, names=options.names)
    config = uvicorn.Config(
        gate,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
        proxy_headers=False,
        http=_Patient,
        h11_max_incomplete_event_size=MOST_HEADERS,
    )
    server = _Server(config)
    server.site = site
    port = listening.getsockname()[1]
    address = _address(options.host, port, token)
    # A token that was given is known to those who need it; terminals and logs keep what they show.
    shown = address if options.token is None else _address(options.host, port, None)
    yours = "" if options.token is None else " (add ?token= and the token you gave)"
    sys.stdout.write(f"{root}: {shown}{yours}\nCtrl-C ends it.\n")
    sys.stdout.flush()
    index.start()
    if options.browser:
        webbrowser.open(address)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        index.stop()
        listening.close()


def _check_folder(root: Path) -> None:
    if not root.exists():
        raise SourceError(
            "there is no such folder.", where=str(root), do="Give a folder with runs in it."
        )
    if not root.is_dir():
        raise SourceError(
            "this is a file.", where=str(root), do=f"Give its folder: nanguard serve {root.parent}"
        )
    try:
        next(root.iterdir(), None)
    except OSError as error:
        raise SourceError(
            f"the folder cannot be read ({error.strerror or error}).",
            where=str(root),
            do="Check that this user may read it.",
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise _unusable(host, port, error) from error
    return listening


def _unusable(host: str, port: int, error: OSError | OverflowError) -> UsageError:
    code = error.errno if isinstance(error, OSError) else None
    said, do = _REASONS.get(code or 0, (str(error), "Choose others with --host and --port."))
    if isinstance(error, socket.gaierror):
        said, do = _REASONS[errno.EADDRNOTAVAIL]
    return UsageError(
        f"nothing can listen at {host}:{port}: {said}.", where="nanguard serve", do=do
    )


def _address(host: str, port: int, token: str | None) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


COOKIE = "nanguard_token"
MOST_HEADERS = 16 << 10  # bytes; those of browsers have one or two thousand
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Returns whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostGate:
    """Lets through only what asks for this server by a name of its own, with the token.

    A page of a stranger that makes its own name point to this machine is turned away: the name
    in its requests is not ours.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, token: str | None = None, names: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._token = token
        self._local = is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if not self._local:
            self._names |= {socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._without_token(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            return PlainTextResponse("The headers are too long.\n", 431)
        host = _header(scope, b"host")
        if not self._is_ours(_name_of(host)):
            said = f"This server does not answer to the name {host[:100]!r}.\n"
            return PlainTextResponse(f"{said}Start it with --allow-host NAME.\n", 421)
        if self._token is not None and not self._has_token(scope):
            said = "A token is needed: open the address that nanguard serve printed.\n"
            return PlainTextResponse(said, 401)
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # An address cannot be made to point elsewhere, as a name can.
        return address.is_loopback or not self._local

    def _has_token(self, scope: Scope) -> bool:
        return any(map(self._is_token, (_asked(scope), _cookie(scope))))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), (self._token or "").encode())

    def _without_token(self, scope: Scope) -> ASGIApp | None:
        """Returns a way to the same page with the token in a cookie and not in the address."""
        is_page = "text/html" in _header(scope, b"accept")
        if self._token is None or not is_page or not self._is_token(_asked(scope)):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        # The path as it is below this server: a second slash would make it the name of another.
        path = "/" + scope["path"].lstrip("/\\")
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        answer.set_cookie(_cookie_name(scope), self._token, httponly=True, samesite="lax", path="/")
        return answer


def _header(scope: Scope, name: bytes) -> str:
    found = [value for key, value in scope["headers"] if key == name]
    return str(found[0].decode("latin-1")) if len(found) == 1 else ""


def _name_of(host: str) -> str:
    """Returns the name of a host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _asked(scope: Scope) -> str:
    query = parse_qsl(scope["query_string"].decode("latin-1"))
    return next((value for key, value in query if key == "token"), "")


def _cookie(scope: Scope) -> str:
    # Forgiving, because other servers on this machine may have set cookies of any shape.
    return cookie_parser(_header(scope, b"cookie")).get(_cookie_name(scope), "")


def _cookie_name(scope: Scope) -> str:
    # Browsers do not tell ports apart: two servers on one machine would share a name.
    server = scope.get("server") or ("", 0)
    return f"{COOKIE}_{server[1]}"
