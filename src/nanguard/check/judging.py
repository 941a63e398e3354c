"""Rules on a source: what they find, and what is said about a rule that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.check.outcome import NotChecked, Seen
from nanguard.source.edits import diff_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nanguard.check.rule import Rule
    from nanguard.findings import Finding, Fix
    from nanguard.source.text import Text


def judge(
    rules: Sequence[Rule[Any]], source: Any, path: str
) -> tuple[list[Finding], list[NotChecked]]:
    """Returns what rules find in a source, and which rules failed on it.

    Args:
        rules: The rules.
        source: What they read.
        path: The file to name if one fails.
    """
    findings: list[Finding] = []
    failed: list[NotChecked] = []
    for rule in rules:
        try:
            findings += list(rule.check(source))
        except Exception as error:  # noqa: BLE001 - one rule that fails must not end the check
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            failed.append(NotChecked(path, f"rule {rule.name} failed on {path}: {said}"))
    return findings, failed


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings by line, each of them once."""
    seen: set[tuple[Any, ...]] = set()
    out = []
    for finding in sorted(findings, key=_place):
        key = (finding.path, finding.name, finding.line, finding.column, finding.message)
        if key not in seen:
            seen.add(key)
            out.append(finding)
    return out


def seen_in(text: Text, finding: Finding, diff: Callable[[Fix], str] | None = None) -> Seen:
    """Returns a finding with the line it is about and the diffs of its fixes.

    Args:
        text: The text that was checked.
        finding: What was found in it.
        diff: How to get the diff of a fix; that of the text itself without it.
    """
    diffs = tuple(
        (diff(fix) if diff else diff_of(text.path, text, fix.edits)) if fix.edits else ""
        for fix in finding.fixes
    )
    return Seen(finding, text.line(finding.line) if finding.line else "", diffs)


def _place(finding: Finding) -> tuple[str, int, int, str]:
    return finding.path or "", finding.line or 0, finding.column or 0, finding.code
