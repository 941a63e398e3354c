"""DAT009: records that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule, records
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding


class UnreadableRecord(DataRule):
    """A line that is no JSON, a row with cells too few or too many, a text among numbers.

    Marks of an unfinished merge, a header in the middle of a table, and a line that was cut off
    when a disk was full are found by the same rule. It is an error where the whole file is damaged:
    a quote that is never closed, a list that breaks off, a column that cannot be decoded.

    Why it breaks a run: a loader stops hours into the epoch; or it passes over the line in silence,
    and the number of steps, the order of records and the labels beside them no longer fit.

    Repair or remove the lines that are named.
    """

    code = "DAT009"
    name = "unreadable-record"
    severity = Severity.WARNING
    seen_in = "https://github.com/thunlp/GEAR/issues/2"
    examples = (
        Passes('{"label": 1, "text": "<<<<<<< HEAD"}\n\n{"label": 0, "text": "{"}\n'),
        Passes('a,b,label\n0.1,"x, y",1\n0.3,"two\nlines",0\n', "example.csv"),
        Fails('{"label": 1}\n<<<<<<< HEAD\n{"label": 0}\n', line=2),
        Fails('{"label": 1, "text": "a"}\n{"label": 0, "te', line=2),
        Fails("a,b,label\n0.1,0.2,1\n0.3,0\n0.4,0.5,1\n", line=3, file="example.csv"),
        Passes('a,label\n"say ""no""",1\n"x",0\n', "example.csv"),
        Fails('a,label\n"x",1\n"y,0\nz,1\n', line=3, file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        for file in source.files:
            if file.broken is not None:
                yield self.finding(file.broken, path=file.path, line=None, severity=Severity.ERROR)
                continue
            bad = file.ledger.unreadable
            if not bad.count or (_is_another_layout(file) and not file.ledger.damaged):
                continue
            fixes: tuple[Fix, ...] = (Fix("repair or remove these lines"),)
            if file.ledger.conflict:
                fixes = (Fix("finish the merge: remove the marks, keep one side"), *fixes)
            yield self.finding(
                f"{records(bad.count)} cannot be read, {bad.in_words()}: {bad.first[0].value}",
                path=file.path,
                line=bad.line,
                severity=_severity(file),
                fixes=fixes,
            )


def _severity(file: DataFile) -> Severity | None:
    """Returns how bad it is, unless it is as bad as the rule says."""
    # Text between tabs is as a rule read without quoting: a quote in it is a letter, and whoever
    # takes it for one finds rows that are too long or too short.
    plain = file.path.lower().endswith(".tsv")
    if file.ledger.damaged and not plain:
        return Severity.ERROR
    # Tables of results have rows of several kinds, and nobody trains on them.
    table = file.format == "CSV" and not file.ledger.conflict
    return Severity.INFO if table else None


def _is_another_layout(file: DataFile) -> bool:
    """Returns whether most rows of a table disagree with its first: then that is no header."""
    bad = file.ledger.unreadable.count
    return file.format == "CSV" and not file.ledger.conflict and bad > file.ledger.records
