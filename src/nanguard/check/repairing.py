"""Applying fixes until nothing is left to apply, and never one that does not help."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.outcome import Change
from nanguard.errors import SourceError
from nanguard.source.edits import apply, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.findings import Finding, Fix

ROUNDS = 10


@dataclass(slots=True)
class Repairing:
    """The repair of one text.

    Attributes:
        look: Returns what is found in a text; raises ``SourceError`` if it cannot be read.
        choose: Returns the fix to apply for a finding; None for none.
        changes: What has been changed.
    """

    look: Callable[[str], list[Finding]]
    choose: Callable[[Finding], Fix | None]
    changes: list[Change] = field(default_factory=list)
    _stubborn: set[str] = field(default_factory=set)
    _failed: set[tuple[str, str]] = field(default_factory=set)

    def run(self, content: str) -> str:
        """Returns the repaired text; the same one if there is nothing to repair.

        Raises:
            SourceError: The text itself cannot be read.
        """
        found = self.look(content)
        seen = {content}
        for _ in range(ROUNDS):
            step = self._step(content, found)
            if step is None:
                break
            repaired, after, changes = step
            if repaired in seen:
                break
            seen.add(repaired)
            self.changes += changes
            content, found = repaired, after
        return content

    def _step(
        self, content: str, found: list[Finding]
    ) -> tuple[str, list[Finding], list[Change]] | None:
        """Returns one round of fixes that all help; None if there are none."""
        while True:
            wanted = self._wanted(content, found)
            if not wanted:
                return None
            repaired = apply(content, [e for change in wanted for e in change.fix.edits])
            try:
                after = self.look(repaired)
                useless = _useless(wanted, found, after)
            except SourceError:
                useless = {change.finding.name for change in wanted}
            if not useless:
                return repaired, after, wanted
            suspects = [change for change in wanted if change.finding.name in useless]
            worst = {_place(c, content) for c in suspects if not self._helps(content, found, c)}
            self._failed |= worst
            if not worst:
                self._stubborn |= useless

    def _wanted(self, content: str, found: list[Finding]) -> list[Change]:
        """Returns changes that can be made at once."""
        chosen = [
            Change(finding, fix)
            for finding in found
            if finding.name not in self._stubborn and (fix := self.choose(finding)) is not None
        ]
        chosen = [change for change in chosen if _place(change, content) not in self._failed]
        fixes = together([change.fix for change in chosen], content)
        kept: list[Change] = []
        for change in chosen:
            if change.fix in fixes:
                fixes.remove(change.fix)
                kept.append(change)
        return kept

    def _helps(self, content: str, found: list[Finding], change: Change) -> bool:
        """Returns whether a fix alone leaves the text readable and its rule with less to say."""
        try:
            after = self.look(apply(content, change.fix.edits))
        except SourceError:
            return False
        return not _useless([change], found, after)


def _place(change: Change, content: str) -> tuple[str, str]:
    """Returns which fix this is, in a way that holds when other lines are changed."""
    first = min(edit.start for edit in change.fix.edits)
    last = max(edit.end for edit in change.fix.edits)
    start, end = content.rfind("\n", 0, first) + 1, content.find("\n", last)
    return change.finding.name, content[start : end if end >= 0 else None]


def _useless(wanted: list[Change], before: list[Finding], after: list[Finding]) -> set[str]:
    """Returns the rules whose findings are not fewer by as many as were to be repaired."""
    tried = Counter(change.finding.name for change in wanted)
    old = Counter(finding.name for finding in before)
    new = Counter(finding.name for finding in after)
    return {name for name, count in tried.items() if new[name] > old[name] - count}
