"""``nanguard check --checklist``: the points of the checklist, answered for a project."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from nanguard.advice.checklist import fill_in
from nanguard.advice.checklist_points import PointVerdict
from nanguard.errors import UsageError
from nanguard.view.report.checklist_text import as_json, as_text

if TYPE_CHECKING:
    from nanguard.check.engine import Check
    from nanguard.cli.commands.before import CheckOptions


def refuse_what_a_checklist_has_not(asked: CheckOptions) -> None:
    """Stops where something is asked for that a checklist cannot give.

    Raises:
        UsageError: It is.
    """
    if asked.form not in ("text", "json"):
        raise UsageError(
            f"a checklist has no format {asked.form!r}.",
            where="nanguard check --checklist",
            do="Give --format text or --format json.",
        )
    if asked.fix or asked.diff or asked.write_baseline is not None:
        raise UsageError(
            "a checklist repairs nothing and writes no baseline.",
            where="nanguard check --checklist",
            do="Run nanguard check once with --checklist and once without.",
        )


def answered(asked: CheckOptions, check: Check, fail_on: str) -> tuple[str, int]:
    """Returns the checklist as it is printed, and the exit code: 1 if any answer is no.

    Args:
        asked: What the command line says.
        check: A check that has run.
        fail_on: From which severity on a check fails; none for never.
    """
    checklist = fill_in(check, asked.paths)
    failed = fail_on != "none" and checklist.count(PointVerdict.NO) > 0
    if asked.form == "json":
        return as_json(checklist), int(failed)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    colour = asked.output is None and sys.stdout.isatty() and not plain
    width = shutil.get_terminal_size((100, 25)).columns
    return as_text(checklist, colour=colour, width=width), int(failed)
