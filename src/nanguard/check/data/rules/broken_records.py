"""Records that are not whole: without a label, unreadable, all zero, or not there at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule, features_of, records
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

_TABLES = ("CSV", "Parquet", "JSON lines")
_EMPTY_SHARE = 0.25  # a column that is empty more often than this is empty on purpose


class MissingLabel(DataRule):
    """A record whose label is empty, null, NaN or left out, where most others have one.

    Why it breaks a run: readers of tables turn an empty label into NaN and the whole column into
    floating point; the loss of that record is NaN, and its gradient reaches every weight.

    Leave these records out, or give them the label that the loss ignores. A file without any label,
    such as the hidden part of a benchmark, is not concerned.
    """

    code = "DAT004"
    name = "missing-label"
    severity = Severity.WARNING
    seen_in = "https://github.com/WeikaiTan/Toronto-3D/issues/1"
    examples = (
        Passes("a,b,label\n0.1,0.2,1\n0.3,,0\n0.4,0.5,1\n0.1,0.3,0\n", "example.csv"),
        Passes("a,b,label\n0.1,0.2,\n0.3,0.1,\n", "example.csv"),
        Fails(
            "a,b,label\n0.1,0.2,1\n0.3,0.1,\n0.4,0.5,1\n0.1,0.3,0\n0.2,0.3,0\n",
            line=3,
            file="example.csv",
        ),
        Fails('{"label": 1}\n{"label": 0}\n{"label": 1}\n{"label": null}\n{"label": 1}\n', line=4),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        named = source.request.expected.label_key is not None
        yield from self._column(source)
        for file, labels in source.labelled():
            missing = labels.missing
            if labels.many or not missing.count or not labels.total:
                continue
            if missing.count > (0.5 if named else _EMPTY_SHARE) * (labels.total + missing.count):
                continue
            yield self.finding(
                f"{labels.key} is missing: {records(missing.count)} of "
                f"{labels.total + missing.count}, {missing.in_words()}",
                path=file.path,
                line=missing.line,
                where=labels.key,
                fixes=(Fix("leave these records out"),),
            )

    def _column(self, source: DataSet) -> Iterator[Finding]:
        """Yields a finding where no file has the column that is said to hold labels."""
        key = source.request.expected.label_key
        tables = [file for file in source.files if file.format in _TABLES and file.ledger.records]
        if key is None or not tables or any(key in file.roles.names for file in source.files):
            return
        yield self.finding(
            f"no file has the column {key}; there are {', '.join(tables[0].roles.names[:12])}",
            path=tables[0].path,
            line=1 if tables[0].has_lines else None,
            where=key,
            fixes=(Fix("name the column that holds the labels"),),
        )


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


_CONFIG = (
    "data: {train_file: example.jsonl, val_file: val.jsonl}\n"
    "training: {lr: 1.0e-4, max_steps: 100, batch_size: 8}\n"
)


class EmptyDataset(DataRule):
    """A file with nothing in it, a table with nothing but a header, or a file that is missing.

    A file that a configuration names and that is not there is reported where other files that it
    names are there: then it was meant to be.

    Why it breaks a run: the mean over no batches is NaN, and so is a validation loss over an empty
    loader; divisions by ``len(loader)`` fail at the end of the first epoch.

    Write the file again, or correct the path.
    """

    code = "DAT010"
    name = "empty-dataset"
    severity = Severity.ERROR
    seen_in = "https://github.com/Project-MONAI/research-contributions/issues/181"
    examples = (
        Passes("a,b,label\n0.1,0.2,1\n", "example.csv"),
        Fails("a,b,label\n", file="example.csv"),
        Fails("\n"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        for file in source.files:
            tried = file.broken is None and file.error is None
            if tried and not file.ledger.records and not file.ledger.unreadable.count:
                yield self.finding(
                    "there is no record in it",
                    path=file.path,
                    line=None,
                    fixes=(Fix("write the file again"),),
                )
        for missing in source.request.missing:
            what = "which has nothing in it" if missing.empty else "which is not there"
            yield self.finding(
                f"{missing.key} names {missing.written}, {what}",
                path=missing.config,
                line=missing.line,
                where=missing.key,
                fixes=(Fix("correct the path; it counts from the folder of this file"),),
            )
        if not source.files and not source.request.missing:
            yield self.finding("there is no file with data in it", path=source.path, line=None)


_ZERO_SHARE = 0.05  # more of them are meant: padding, or sparse data
_ZEROS = 0.2


def _rows(odd: str) -> str:
    lines = [
        f"{at * 0.37 - 1:.3f},{at * 0.11 + 1:.3f},{at + 0.5},{3 - at * 0.2:.3f},{at % 2}"
        for at in range(30)
    ]
    return "a,b,c,d,label\n" + "\n".join([*lines, odd]) + "\n"


class AllZeroRecord(DataRule):
    """A record with nothing but zeros where others have hardly any.

    Sparse data, where zeros are usual, and data with many such records are not concerned.

    Why it breaks a run: normalising the record divides by its length or deviation, which is 0; a
    norm without eps gives NaN, and its gradient is NaN even where the value is not.

    Leave the record out: it is most often a file that could not be read, or a sensor that was off.
    """

    code = "DAT012"
    name = "all-zero-record"
    severity = Severity.INFO
    seen_in = "https://github.com/pytorch/pytorch/issues/2421"
    examples = (
        Passes(_rows("0.0,0.0,0.5,0.0,1"), "example.csv"),
        Fails(_rows("0.0,0.0,0.0,0.0,1"), line=32, file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        for file in source.files:
            zero = file.ledger.zero
            columns = features_of(file)
            zeros = sum(column.zeros for column in columns)
            sampled = sum(column.sampled for column in columns)
            if not zero.count or zero.count > _ZERO_SHARE * file.ledger.records:
                continue
            if zeros > _ZEROS * sampled:
                continue
            message = f"all features are zero: {records(zero.count)}, {zero.in_words()}"
            yield self.finding(
                message,
                path=file.path,
                line=zero.line,
                fixes=(Fix("leave these records out"),),
            )
