"""What rules about configurations have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.config.run import RunConfig
from nanguard.check.paths import in_tests
from nanguard.check.rule import Rule
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run import Stage
    from nanguard.check.config.settings import Setting
    from nanguard.findings import Edit, Finding


class ConfigRule(Rule[RunConfig]):
    """A rule that looks at each part of a run."""

    reads = "config"
    # Whether a finding weighs less where no code of the project mentions its key.
    as_read: ClassVar[bool] = True

    def check(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with a run; what several parts share is said once."""
        seen: set[tuple[str | None, int | None, int | None]] = set()
        for finding in self.look(source):
            place = (finding.path, finding.line, finding.column)
            if place not in seen and finding.path in source.owned:
                seen.add(place)
                yield _as_read(source, finding) if self.as_read else _in_tests(finding)

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with each part of a run."""
        for stage in source.stages:
            yield from self.judge(stage)

    @abstractmethod
    def judge(self, stage: Stage) -> Iterator[Finding]:
        """Yields what is wrong with one part of a run."""

    def at(
        self,
        setting: Setting,
        message: str,
        *fixes: Fix,
        severity: Severity | None = None,
    ) -> Finding:
        """Returns a finding at a setting.

        Args:
            setting: The setting.
            message: What was found, with the value.
            fixes: Ways to repair it, best first.
            severity: Where this one is worse or milder than the rule in general.
        """
        return self.finding(
            message,
            path=setting.path,
            line=setting.line,
            column=setting.column,
            where=setting.key,
            severity=severity,
            fixes=fixes,
        )


def _in_tests(finding: Finding) -> Finding:
    """Returns a finding; what a folder of tests sets up trains nothing that anybody waits for."""
    tested = in_tests(finding.path or "")
    return replace(finding, severity=Severity.INFO) if tested else finding


def _as_read(source: RunConfig, finding: Finding) -> Finding:
    """Returns a finding as it weighs in this project."""
    finding = _in_tests(finding)
    if finding.severity is Severity.INFO or not finding.where or finding.path in source.parsed:
        return finding
    if not source.usage.known or source.usage.mentions(finding.where):
        return finding
    message = f"{finding.message}; no code here reads it"
    return replace(finding, severity=Severity.INFO, message=message)


def change(title: str, edits: tuple[Edit, ...], *plan: str, keys: bool = False) -> Fix:
    """Returns a fix that changes the numbers a run computes.

    Args:
        title: What to do, in a line, with the reason.
        edits: The changes.
        plan: What to do once the repair has held, in order.
        keys: Whether a key is renamed or added, which is done only if asked for.
    """
    return Fix(title, safe=False, edits=edits, plan=plan, keys=keys)
