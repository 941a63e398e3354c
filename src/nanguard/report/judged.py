"""Findings about a run: what the rules for logs say about the logs it was read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.engine.judging import in_order
from nanguard.engine.judging import judge as judge_source
from nanguard.engine.selection import Selection

if TYPE_CHECKING:
    from nanguard.sources.run.model import Run


def judge(run: Run, selection: Selection | None = None) -> None:
    """Adds what rules find in the logs of a run to its findings.

    Args:
        run: The run.
        selection: The rules; all of them without it.
    """
    rules = (selection or Selection()).rules("log")
    known = {(finding.get("code"), finding.get("message")) for finding in run.findings}
    for log in run.logs:
        found, failed = judge_source(rules, log, log.path)
        for finding in in_order(found):
            if (finding.code, finding.message) not in known:
                run.findings.append(finding.to_json())
        run.problems += [entry.reason for entry in failed]
