"""The program about itself: a demonstration, what it can do here, and help for the shell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanguard.cli.command_line import argument, flag, option

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Train through faults, prove that none left a trace, and explain one.

    Needs no data and no GPU. A poisoned batch, a NaN gradient and a loss spike strike a run; the
    guard keeps them from the weights; at the end the weights are compared, bit by bit, with those
    of a run that never saw the faults. Then a script with a fault in it is run as it is, and the
    incident is explained. The exit code is 1 if the weights differ or no fix could be verified.
    """

    run_dir: Path | None = option(
        "--run-dir",
        metavar="DIR",
        kind=Path,
        completes="folders",
        help="Folder for the run record; .nanguard/demo/TIME by default.",
    )
    steps: int = option(
        "--steps", metavar="N", kind=int, least=120, default=240, help="Steps to train."
    )
    quiet: bool = flag("--quiet", "-q", help="Print the verdict only.")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Say what nanguard can do here, and how to get what is missing.

    Versions and devices, what `nanguard run` can do with the Python that trains, where it can
    write, and which extras are installed. The exit code is 1 if something keeps `run` from working.
    """

    python: str | None = option(
        "--python",
        metavar="PYTHON",
        completes="files",
        help="The Python that trains; this one if it has torch, else the one on the PATH.",
    )
    form: str = option(
        "--format",
        metavar="FORMAT",
        default="text",
        choices=("text", "json"),
        help="Output format.",
    )


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Print a script that completes commands, options and rules in a shell.

    For bash, put `eval "$(nanguard completion bash)"` into `~/.bashrc`; for zsh, the same with zsh
    into `~/.zshrc`; fish reads it from `~/.config/fish/completions/nanguard.fish`.
    """

    shell: str = argument("SHELL", "The shell.", choices=SHELLS)
