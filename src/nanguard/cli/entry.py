"""Where the program begins and ends: a mistake is a message, never a traceback."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from nanguard.errors import NanguardError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

# What shells expect of a program that SIGINT has ended: 128 + 2.
INTERRUPTED = 130
_VERSION = ("-V", "--version")


def main() -> None:
    """Runs the command line."""
    _forget_own_programs()
    try:
        sys.exit(run(sys.argv[1:]))
    except NanguardError as error:
        _say(f"nanguard: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say("nanguard: interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        drop_output()
        sys.exit(0)
    except Exception as error:  # a fault of ours; whoever wants to see it whole can
        if os.environ.get("NANGUARD_DEBUG"):
            raise
        _say(
            f"nanguard: it failed: {type(error).__name__}: {error}\n"
            "  do:    Please report this; NANGUARD_DEBUG=1 shows where it happened."
        )
        sys.exit(2)


def run(words: list[str]) -> int:
    """Runs a command; returns the exit code.

    Args:
        words: What stands on the command line behind the program's name.

    Raises:
        NanguardError: It cannot be done.
    """
    from nanguard.cli.command_line import HELP, did_you_mean, mistake, read
    from nanguard.cli.commands import BY_NAME, COMMANDS

    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in HELP:
        from nanguard.cli.help_pages import program_help

        sys.stdout.write(program_help(COMMANDS))
        return 0
    if words[0] in _VERSION:
        from nanguard import __version__

        sys.stdout.write(f"nanguard {__version__}\n")
        return 0
    command = BY_NAME.get(words[0])
    if command is None:
        kind = "option" if words[0].startswith("-") else "command"
        known = [*BY_NAME, "--help", "--version"]
        do = did_you_mean(words[0], known, f"The commands are: {', '.join(BY_NAME)}.")
        raise mistake("", f"there is no {kind} {words[0]!r}.", do)
    options = read(command, words[1:])
    if options is None:
        from nanguard.cli.help_pages import command_help

        sys.stdout.write(command_help(command))
        return 0
    return command.run(options)


def write_output(path: Path, data: bytes, *, what: str, do: str) -> None:
    """Writes a file that the command line names, whole or not at all.

    Args:
        path: The file.
        data: What it is to hold.
        what: What the file is, for the message.
        do: What to do if it cannot be written.

    Raises:
        UsageError: It cannot be written.
    """
    from nanguard.source.text import write_atomically

    try:
        write_atomically(path, data)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{what} cannot be written: {reason}.", where=str(path), do=do) from error


def drop_output() -> None:
    """Sends what is still to be printed nowhere: the program that reads it has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _forget_own_programs() -> None:
    """Makes ``python`` mean the user's Python where a tool runner has put nanguard's before it.

    ``uvx`` puts the programs of nanguard's environment first on the PATH, so that the ``python`` of
    ``nanguard run -- python train.py`` would be one without torch. An environment that was
    activated, or that has torch, is what the user means.
    """
    folder, _, others = os.environ.get("PATH", "").partition(os.pathsep)
    own, _, _ = sys.executable.rpartition(os.sep)
    if (
        folder != own
        or os.environ.get("VIRTUAL_ENV") == sys.prefix
        or sys.prefix == sys.base_prefix
    ):
        return
    import importlib.util
    import shutil

    try:
        has_torch = importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        has_torch = False
    if not has_torch and shutil.which("python", path=others):
        os.environ["PATH"] = others


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
