"""``nanguard check``: from the words on the command line to the exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nanguard.engine.check import Check, Plan
from nanguard.engine.selection import Selection
from nanguard.errors import UsageError
from nanguard.findings import Severity

if TYPE_CHECKING:
    from nanguard.engine.outcome import Outcome


def run_check(paths: list[str], *, form: str, fail_on: str | None) -> int:
    """Checks what was named and prints what came of it; returns the exit code."""
    check = Check(Plan(Selection()))
    outcome = check.run(paths)
    if not check.existing:
        raise UsageError(
            f"there is no such file: {paths[0]}"
            if len(paths) == 1
            else "none of the paths exists.",
            where="nanguard check",
            do="Give files, folders, patterns in quotes, or - for standard input.",
        )
    from nanguard.report.findings_json import as_json

    sys.stdout.write(as_json(outcome))
    return exit_code(outcome, fail_on or "error")


def exit_code(outcome: Outcome, fail_on: str) -> int:
    """Returns 1 if any finding is as bad as ``fail_on`` or worse."""
    worst = outcome.worst()
    if fail_on == "none" or worst is None:
        return 0
    return int(worst.rank >= Severity(fail_on).rank)
