"""DAT006: a column that has the same number in every record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.data.columns import is_aside
from nanguard.check.data.data_rule import DataRule, features_of, shown
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.columns import ColumnNumbers
    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

_MIN_ROWS = 10
_MAX_NAMED = 5
_SPARSE = 0.1
_WIDE = 32


def _rows(dead: str) -> str:
    lines = [f"{at * 0.37 - 1:.3f},{at * at * 0.11:.3f},{dead},{at % 2}" for at in range(12)]
    return "a,b,c,label\n" + "\n".join(lines) + "\n"


class ConstantFeature(DataRule):
    """A feature that never changes, such as a dead sensor.

    Columns that describe records (a fold, a width, a year) are no features. Images and sparse
    counts, where some pixels or words never occur, are not concerned.

    Why it breaks a run: its standard deviation is 0, and dividing by it (``(x - mean) / std``,
    batch normalisation without eps, correlation) gives NaN for every record at once.

    Leave the column out, or add an eps to the deviation it is divided by.
    """

    code = "DAT006"
    name = "constant-feature"
    severity = Severity.INFO
    seen_in = "https://github.com/fastai/fastai/issues/889"
    examples = (
        Passes(_rows("0.5").replace("0.5,1\n", "0.7,1\n", 1), "example.csv"),
        Passes(_rows("2024").replace("a,b,c,", "a,b,year,"), "example.csv"),
        Fails(_rows("0.25"), file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            columns = features_of(file)
            varying = [column for column in columns if not column.constant and column.count]
            found = [c for c in columns if self._dead(c, varying, file)]
            if _mostly_zero(varying) and len(columns) >= _WIDE:
                found = [column for column in found if column.low != 0]
            if len(found) * 2 > len(columns):  # then columns are something else than features
                continue
            for column in found[:_MAX_NAMED]:
                more = len(found) - _MAX_NAMED
                rest = f"; so are {more} more columns" if more > 0 and column is found[0] else ""
                yield self.finding(
                    f"{column.name} is {shown(column.low)} in all {column.count} records{rest}",
                    path=file.path,
                    line=None,
                    where=column.name,
                    fixes=(Fix("leave the column out"),),
                )

    def _dead(self, column: ColumnNumbers, varying: list[ColumnNumbers], file: DataFile) -> bool:
        base = column.name.partition("[")[0]
        listed = "[" in column.name
        if not column.constant or column.count < _MIN_ROWS or is_aside(base):
            return False
        if listed and base in file.ledger.columns:  # other records were read one by one
            return False
        if column.whole and not any(_stem(c.name) == _stem(column.name) for c in varying):
            return False
        if listed and all(c.whole or _pixels(c) for c in varying):
            return False
        return sum(not c.whole for c in varying) >= (1 if listed else 2)


def _stem(name: str) -> str:
    """Returns what columns of one kind have in common: ``s`` of ``s3``, ``arm`` of ``arm_x``."""
    return re.sub(r"\d+", "", name.split("_")[0]) if len(name) > 1 else ""


def _pixels(column: ColumnNumbers) -> bool:
    """Returns whether a column may be one pixel of images."""
    return column.low >= 0 and column.high in (255.0, 16.0)


def _mostly_zero(columns: list[ColumnNumbers]) -> bool:
    """Returns whether zero is what the features of most records are."""
    shares = sorted(c.zeros / c.sampled for c in columns if c.sampled)
    return bool(shares) and shares[len(shares) // 2] >= _SPARSE
