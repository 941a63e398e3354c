"""``nanguard serve``: the pages about all runs below a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nanguard.cli.commands.after import ServeOptions

_SHORTEST = 8


def serve_folder(options: ServeOptions) -> None:
    """Serves what the command line asks for."""
    run_serve(
        options.path,
        host=options.host,
        port=options.port,
        token=options.token,
        names=options.allow_host,
        browser=options.open_browser,
    )


def run_serve(
    root: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    names: Sequence[str],
    browser: bool,
) -> None:
    """Serves runs until it is interrupted.

    Args:
        root: The folder.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        token: The token that visitors must present.
        names: Other names by which this machine may be asked.
        browser: Whether to open a browser.

    Raises:
        NanguardError: The folder cannot be read, or the address cannot be used.
    """
    if token is not None and len(token) < _SHORTEST:
        raise UsageError(
            f"the token has {len(token)} characters, which can be guessed.",
            where="--token",
            do=f"Give at least {_SHORTEST}, or leave it out: one is made up where it is needed.",
        )
    try:
        from nanguard.view.server.web_server import ServeSettings, serve
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard serve", error, extra="serve") from error
    serve(root, ServeSettings(host, port, token, tuple(names), browser))
