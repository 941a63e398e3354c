"""The program ``nanguard``, to which each file beside this one adds its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from nanguard import __version__

app = typer.Typer(
    name="nanguard",
    help="Keeps a PyTorch run alive when its numbers go bad, and tells you why they did.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(f"nanguard {__version__}")
        raise typer.Exit


@app.callback()
def nanguard(
    version: Annotated[  # noqa: FBT002 - read by the callback
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Keeps a PyTorch run alive when its numbers go bad, and tells you why they did."""
