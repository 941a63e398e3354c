"""Starts the server, says where it is, and ends it at once when asked to."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanguard.errors import SourceError, UsageError
from nanguard.view.server.app import Site
from nanguard.view.server.gate import MOST_HEADERS, Gate, is_loopback
from nanguard.view.server.index import Index

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path
    from types import FrameType

_SECONDS_TO_ASK = 10.0
_NO_HOST = "this machine has no such address"
_REASONS = {
    errno.EADDRINUSE: ("it is in use", "Choose another with --port, or any free one: --port 0"),
    errno.EACCES: ("this user may not use it", "Choose a port from 1024 on: --port 6116"),
    errno.EADDRNOTAVAIL: (_NO_HOST, "Give an address of this machine with --host."),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How runs are served.

    Attributes:
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: What has to be known to look at anything; made up where it is needed.
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

    site: Site

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes note of a signal."""
        self.site.stopping.set()
        super().handle_exit(sig, frame)


def serve(root: Path, options: Options) -> None:
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
    site = Site(index)
    gate = Gate(site.app, host=options.host, token=token, names=options.names)
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
