"""The report of ``nanguard check``, as it is asked for, to where it is asked for."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome
    from nanguard.cli.commands.before import CheckOptions


def print_report(asked: CheckOptions, told: str) -> None:
    """Writes a report to where it is wanted.

    Raises:
        UsageError: It cannot be written.
    """
    if asked.output is not None:
        from nanguard.source.text import write_atomically

        try:
            write_atomically(asked.output, told.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise UsageError(
                f"the report cannot be written: {error.strerror}.",
                where=str(asked.output),
                do="Choose another file for --output.",
            ) from error
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(told)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has read enough; what Python still wants to write goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rendered(asked: CheckOptions, outcome: Outcome) -> str:
    """Returns an outcome in the format that is asked for."""
    if asked.form == "json":
        from nanguard.view.report.findings_json import as_json

        return as_json(outcome)
    if asked.form == "sarif":
        from nanguard.cli.rulepages import sentences
        from nanguard.view.report.sarif import as_sarif

        return as_sarif(outcome, sentences())
    if asked.form == "github":
        from nanguard.view.report.github import as_github

        return as_github(outcome)
    from nanguard.view.report.findings_text import Page, brief, statistics

    if asked.statistics:
        return statistics(outcome)
    if asked.quiet or asked.form == "concise":
        return brief(outcome)
    terminal = asked.output is None and sys.stdout.isatty()
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    width = shutil.get_terminal_size((100, 25)).columns
    return Page(
        outcome,
        colour=terminal and not plain,
        width=width,
        verbose=asked.verbose,
        full=asked.form == "full",
    ).render()
