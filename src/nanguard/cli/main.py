"""``nanguard``: the commands and how they end.

Exit codes: 0 for a clean end, 1 for findings, 2 when nanguard could not do its work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanguard import __version__
from nanguard.errors import MissingDependencyError, NanguardError

app = typer.Typer(
    name="nanguard",
    help="Keeps a PyTorch run alive when its numbers go bad, and tells you why they did.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
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


@app.command(
    epilog="Examples:\n\n- `nanguard demo`\n\n- `nanguard demo --run-dir runs/demo --steps 600`"
)
def demo(
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the run record; .nanguard/demo/TIME by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=120, help="Steps to train.")] = 240,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,  # noqa: FBT002
) -> None:
    """Train a small transformer through three faults and prove that none left a trace.

    Needs no data and no GPU. A poisoned batch, a NaN gradient and a loss spike strike a run; the
    guard keeps them from the weights; at the end the weights are compared, bit by bit, with those
    of a run that never saw the faults. The exit code is 1 if they differ.
    """
    try:
        from nanguard.demo import run_demo
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard demo", error) from error
    identical = run_demo(run_dir=run_dir, steps=steps, quiet=quiet)
    raise typer.Exit(0 if identical else 1)


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Examples:\n\n- `nanguard run -- python train.py --lr 1e-3`\n\n"
    "- `nanguard run --on-bad stop -- torchrun --nproc-per-node 4 train.py`",
)
def run(
    command: Annotated[list[str], typer.Argument(help="The command, after two dashes.")],
    incidents: Annotated[
        Path | None, typer.Option(help="Folder for incidents; .nanguard/incidents/TIME by default.")
    ] = None,
    on_bad: Annotated[
        str, typer.Option(help="What to do about a bad step: skip, rollback or stop.")
    ] = "skip",
    max_bad: Annotated[
        int | None, typer.Option(min=0, help="Stop after so many bad steps.")
    ] = None,
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Protect only.")] = False,  # noqa: FBT002
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False,  # noqa: FBT002
) -> None:
    """Run a training command, unmodified, under the guard."""
    from nanguard.launch.command import run_command

    code = run_command(
        command,
        incidents=incidents or Path(".nanguard/incidents"),
        on_bad=on_bad,
        max_bad=max_bad,
        trace=not no_trace,
        quiet=quiet,
    )
    raise typer.Exit(code)


def main() -> None:
    """Runs the command line; a mistake is a message, not a traceback."""
    try:
        app()
    except NanguardError as error:
        typer.echo(f"nanguard: {error}", err=True)
        sys.exit(2)
