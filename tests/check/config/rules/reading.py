"""What the tests of configuration rules have in common: texts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.document import read_document
from nanguard.check.config.run_config import read_project
from nanguard.check.rule import rules_for
from nanguard.source.text import Text

if TYPE_CHECKING:
    from nanguard.findings import Finding


def findings(**files: str) -> list[Finding]:
    """Returns what the rules find in files given together; `__` in a name is a dot or a slash."""
    documents = [read_document(Text(_path(name), text)) for name, text in files.items()]
    return [
        finding
        for run in read_project(documents)
        for rule in rules_for("config")
        for finding in rule.check(run)
    ]


def names(**files: str) -> set[str]:
    """Returns the names of what is found."""
    return {finding.name for finding in findings(**files)}


def repaired(name: str, text: str, rounds: int = 5) -> str:
    """Returns a text with the fixes applied until nothing changes."""
    for _ in range(rounds):
        edits = set()
        for finding in findings(**{name: text}):
            for edit in finding.fixes[0].edits if finding.fixes else ():
                if all(edit.end <= e.start or edit.start >= e.end or edit == e for e in edits):
                    edits.add(edit)
        if not edits:
            break
        for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _path(name: str) -> str:
    *folders, stem, ending = name.split("__")
    return "/".join([*folders, f"{stem}.{ending}"])
