"""Who may ask: a check of the host and of the token, and the headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class Gate:
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
