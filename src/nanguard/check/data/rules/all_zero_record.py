"""DAT012: records whose features are all zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule, features_of, records
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding

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
