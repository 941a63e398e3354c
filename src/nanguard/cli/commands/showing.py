"""The whole story on an embedded run."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from nanguard.cli.commands.app import app
from nanguard.errors import MissingDependencyError


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
    """Train through faults, prove that none left a trace, and explain one.

    Needs no data and no GPU. A poisoned batch, a NaN gradient and a loss spike strike a run; the
    guard keeps them from the weights; at the end the weights are compared, bit by bit, with those
    of a run that never saw the faults. Then a script with a fault in it is run as it is, and the
    incident is explained. The exit code is 1 if the weights differ or no fix could be verified.
    """
    try:
        from nanguard.demo import run_demo
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard demo", error) from error
    identical = run_demo(run_dir=run_dir, steps=steps, quiet=quiet)
    raise typer.Exit(0 if identical else 1)
