"""DAT007: numbers that are larger than anything a model can be given, by far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import RowPlaces, is_aside
from nanguard.check.data.data_rule import DataRule, features_of, shown, usual_elsewhere
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.columns import ColumnNumbers
    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding

_MIN_ROWS = 10
_MAX_NAMED = 5
_APART = 1e6  # times what is usual
_LARGE_FRACTION = 1e6
_DEVIATIONS_APART = 8.0  # deviations, as logarithms, at which a tenth of both is enough
_LARGE_WHOLE = 1e12  # counts and sums of money have long tails
_HUGE_COLUMN = 1e8  # a whole column of this size, beside others of ordinary size
_SQUARES_OVERFLOW = 1e18  # in single precision
_TINY = 1e-30
# Moments in seconds, milliseconds and nanoseconds since 1970, and dates such as 20240131.
_MOMENTS = ((5e8, 5e9), (5e11, 5e12), (5e14, 5e15), (5e17, 5e18), (19e6, 21.1e6))


def _rows(odd: str) -> str:
    lines = [f"{at * 0.37 - 1:.3f},{at * at * 0.11:.3f},{at % 2}" for at in range(12)]
    return "a,b,label\n" + "\n".join([*lines, f"0.5,{odd},1"]) + "\n"


class ExtremeFeatureScale(DataRule):
    """A feature with numbers a million times as large as is usual for it, or for its neighbours.

    Judged by the largest number of a column against the geometric mean of the others. Times, dates,
    ids and long-tailed counts are not concerned.

    Why it breaks a run: squares of such numbers overflow in single precision, all of them in half
    precision; a mean over the column is that one number; a layer without normalisation answers with
    an activation and a gradient of the same size.

    Repair the record that is named, scale the column, or take its logarithm.
    """

    code = "DAT007"
    name = "extreme-feature-scale"
    severity = Severity.WARNING
    seen_in = "https://github.com/zhouhaoyi/Informer2020/issues/251"
    examples = (
        Passes(_rows("1500.0"), "example.csv"),
        Passes(_rows("1.7e9").replace("a,b,", "a,timestamp,"), "example.csv"),
        Fails(_rows("3.1e30"), file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            columns = features_of(file)
            every = list(file.ledger.columns.values())
            found = [(c, why) for c in every if (why := self._why(c, columns)) is not None]
            for column, why in found[:_MAX_NAMED]:
                place = RowPlaces(1, [column.largest] if column.largest is not None else [])
                at = f", {place.in_words()}" if column.largest is not None else ""
                yield self.at(file, place, f"{column.name}: {why}{at}", where=column.name)

    def _why(self, column: ColumnNumbers, columns: list[ColumnNumbers]) -> str | None:
        largest, usual = column.magnitude, column.usual
        if column.count < _MIN_ROWS or not usual:
            return None
        aside = is_aside(column.name.partition("[")[0])
        if aside and (column.whole or largest < _SQUARES_OVERFLOW):
            return None
        if _stands_out(column):
            return f"the largest value is {shown(largest)}, others are about {shown(usual)}"
        if column.whole or _is_moment(column):
            return None
        if largest >= _SQUARES_OVERFLOW:
            return f"values are as large as {shown(largest)}; their squares overflow"
        others = usual_elsewhere(column, columns)
        if others is None or not column.alone:
            return None
        if usual >= _HUGE_COLUMN and usual >= _APART * others:
            return f"values are about {shown(usual)}, those of other columns {shown(others)}"
        if largest < _TINY and others > _TINY / 1e-12:
            return f"no value is larger than {shown(largest)}; squares are 0 in single precision"
        return None


def _stands_out(column: ColumnNumbers) -> bool:
    """Returns whether the largest number is beyond what others of its column let expect."""
    largest, usual = column.magnitude, column.usual
    if column.whole:
        return largest >= _LARGE_WHOLE and largest >= _APART * usual
    if column.apart >= _DEVIATIONS_APART:
        return largest >= _LARGE_FRACTION / 10 and largest >= _APART / 10 * usual
    return largest >= _LARGE_FRACTION and largest >= _APART * usual and not _is_moment(column)


def _is_moment(column: ColumnNumbers) -> bool:
    return any(low <= column.low and column.high <= high for low, high in _MOMENTS)
