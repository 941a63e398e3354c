"""DAT004: records without a label, among records that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule, records
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataSet
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
