"""Where the program begins and ends: a mistake is a message, never a traceback."""

from __future__ import annotations

import os
import sys

from nanguard.errors import NanguardError

INTERRUPTED = 130


def main() -> None:
    """Runs the command line."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except NanguardError as error:
        _say(f"nanguard: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say("nanguard: interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:  # a fault of ours; whoever wants to see it whole can
        if os.environ.get("NANGUARD_DEBUG"):
            raise
        _say(
            f"nanguard: it failed: {type(error).__name__}: {error}\n"
            "  do:    Please report this; NANGUARD_DEBUG=1 shows where it happened."
        )
        sys.exit(2)


def _run(words: list[str]) -> int:
    """Runs a command; the one that is called most is read without the help of typer.

    Typer takes longer to import, and to build its commands, than a small file takes to check. It
    answers everything that is not plainly a check.
    """
    if words[:1] == ["check"]:
        from nanguard.cli.checkwords import asked_by

        asked = asked_by(words[1:])
        if asked is not None:
            from nanguard.cli.checking import run_check

            return run_check(asked)
    from nanguard.cli.commands import app

    app()
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
