"""``nanguard demo``: the whole story on embedded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.errors import MissingDependencyError

if TYPE_CHECKING:
    from nanguard.cli.commands.showing import DemoOptions


def run_the_demo(options: DemoOptions) -> int:
    """Runs the demo; returns 1 if it does not show what it claims.

    Raises:
        MissingDependencyError: Torch is missing.
    """
    try:
        from nanguard.demo import run_demo
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard demo", error) from error
    shown = run_demo(run_dir=options.run_dir, steps=options.steps, quiet=options.quiet)
    return 0 if shown else 1
