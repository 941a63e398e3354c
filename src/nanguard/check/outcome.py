"""What came of a check: findings with their source lines, and everything that was not checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from nanguard.masking import hidden
from nanguard.source.edits import diff_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nanguard.check.rule import Rule
    from nanguard.findings import Finding, Fix, Severity
    from nanguard.source.text import Text


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding, and what a report shows beside it, without keys and passwords.

    Attributes:
        finding: The finding.
        text: The line of source it is about; empty if there is none.
        diffs: For every fix, its unified diff; empty for a fix that has none.
    """

    finding: Finding
    text: str = ""
    diffs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Hides secrets here, where every report, the baseline and the cache begin."""
        message = hidden(self.finding.message)
        if message != self.finding.message:
            object.__setattr__(self, "finding", replace(self.finding, message=message))
        object.__setattr__(self, "text", hidden(self.text))
        object.__setattr__(self, "diffs", tuple(map(hidden, self.diffs)))

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as the report's JSON has it, with the diffs of its fixes."""
        out = self.finding.to_json()
        for fix, entry, diff in zip(self.finding.fixes, out["fixes"], self.diffs, strict=False):
            if diff:
                entry["diff"] = diff
            if fix.plan:
                entry["plan"] = list(fix.plan)
        return out


class Omission(str, Enum):
    """What it means that something was not checked.

    UNREADABLE is missing, damaged, or too much for its reader: if it was named, the check could
    not do its work. UNKNOWN is of a kind that has no rules. UNRELATED was read, and there is
    nothing in it to check.
    """

    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    UNRELATED = "unrelated"


@dataclass(frozen=True, slots=True)
class NotChecked:
    """Something that was not looked at, and why: never to be taken for clean.

    Attributes:
        path: The file or folder.
        reason: Why.
        omission: What that means for the check.
        expected: Whether no rule reads such files anyway.
        rule: The name of the rule that failed on it; empty if it was not a rule.
    """

    path: str
    reason: str
    omission: Omission = Omission.UNREADABLE
    expected: bool = False
    rule: str = ""

    def to_json(self) -> dict[str, str]:
        """Returns the entry as the report's JSON has it."""
        return {"path": self.path, "reason": self.reason}


@dataclass(slots=True)
class FileOutcome:
    """What came of one file.

    Attributes:
        path: The file.
        seen: What was found in it.
        checked: Whether it was looked at.
        not_checked: What was left out, and why.
        suppressed: How many findings a comment in the file allows.
        needs: The other files that were looked into for it.
    """

    path: str
    seen: list[Seen] = field(default_factory=list)
    checked: bool = True
    not_checked: list[NotChecked] = field(default_factory=list)
    suppressed: int = 0
    needs: tuple[str, ...] = ()

    @classmethod
    def left_out(
        cls,
        path: str,
        reason: str,
        omission: Omission = Omission.UNREADABLE,
        *,
        expected: bool = False,
    ) -> FileOutcome:
        """Returns the outcome of a file that was not looked at."""
        entry = NotChecked(path, reason, omission, expected=expected)
        return cls(path, checked=False, not_checked=[entry])


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One change that a repair made.

    Attributes:
        finding: What it repairs.
        fix: How.
    """

    finding: Finding
    fix: Fix

    def to_json(self) -> dict[str, Any]:
        """Returns the change as the report's JSON has it."""
        return {
            "code": self.finding.code,
            "name": self.finding.name,
            "line": self.finding.line,
            "message": self.finding.message,
            "title": self.fix.title,
            "plan": list(self.fix.plan),
        }


@dataclass(frozen=True, slots=True)
class FileRepair:
    """A file that was repaired, in place or as a copy.

    Attributes:
        path: The file.
        target: Where the repaired text is, or would be.
        changes: What was changed.
        diff: The same as a unified diff.
        written: Whether the target was written.
        loaded_with: The library whose parser has loaded it, and found what was announced.
        unverified: Why the parser that will read it has not; empty if it has, or there is none.
    """

    path: str
    target: str
    changes: tuple[ConfigChange, ...]
    diff: str
    written: bool
    loaded_with: str = ""
    unverified: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the repair as the report's JSON has it."""
        return {
            "path": self.path,
            "target": self.target,
            "written": self.written,
            "changes": [change.to_json() for change in self.changes],
            "diff": hidden(self.diff),
            "loaded_with": self.loaded_with or None,
            "unverified": self.unverified or None,
        }


@dataclass(slots=True)
class Outcome:
    """What came of a whole check.

    Attributes:
        seen: Every finding, by file and line.
        checked: The files that were looked at.
        not_checked: What was not, and why.
        alignment: The settings that have to agree between files, one row each.
        repairs: What ``--fix`` did.
        stale: Baseline entries that nothing corresponds to any more, in words.
        suppressed: How many findings comments allow.
        known: How many findings the baseline allows.
        seconds: How long it took.
    """

    seen: list[Seen] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    alignment: list[dict[str, Any]] = field(default_factory=list)
    repairs: list[FileRepair] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    suppressed: int = 0
    known: int = 0
    seconds: float = 0.0

    def add(self, file: FileOutcome) -> None:
        """Takes in what came of one file."""
        self.seen += file.seen
        self.not_checked += file.not_checked
        self.suppressed += file.suppressed
        if file.checked:
            self.checked.append(file.path)

    def worst(self) -> Severity | None:
        """Returns the severity of the worst finding; None if there is none."""
        return max((s.finding.severity for s in self.seen), key=lambda s: s.rank, default=None)


def failure(error: BaseException) -> str:
    """Returns what is said about a file on which nanguard itself failed."""
    said = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
    return f"nanguard failed on it: {said}"


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
            reason = f"rule {rule.name} failed on {path}: {said}"
            failed.append(NotChecked(path, reason, rule=rule.name))
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
