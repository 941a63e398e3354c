"""What rules about data have in common: whose labels are classes, and how places are named."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.data.columns import Label, LabelColumn, whole_number
from nanguard.check.data.dataset import DataFile, DataSet
from nanguard.check.rule import Reads, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.columns import ColumnNumbers, RowPlaces
    from nanguard.findings import Finding

FEW_CLASSES = 1000  # whole numbers with more values than this count something


class DataRule(Rule[DataSet]):
    """A rule that reads data sets."""

    reads: ClassVar[Reads] = "data"

    def at(
        self, file: DataFile, places: RowPlaces | None, message: str, *, where: str | None = None
    ) -> Finding:
        """Returns a finding about a file, at the first of some places."""
        line = places.line if places is not None and file.has_lines else None
        return self.finding(message, path=file.path, line=line, where=where)


def by_group(labels: LabelColumn) -> dict[str | None, list[Label]]:
    """Returns the values of labels for each data set that records name."""
    out: dict[str | None, list[Label]] = {}
    for label in labels.seen:
        out.setdefault(label.group, []).append(label)
    return out


def are_measured(source: DataSet, labels: LabelColumn) -> bool:
    """Returns whether labels are measurements: because the user says so, or mostly fractions."""
    if source.request.measured:
        return True
    return labels.total > 0 and labels.fractional * 2 > labels.total


def classes_of(source: DataSet, file: DataFile, group: str | None) -> int | None:
    """Returns how many classes labels of a file have; None if that is not known."""
    expected = source.request.expected
    if group is not None and group in expected.groups:
        return expected.groups[group]
    if file.roles.group is None and expected.groups:
        inside = [name for name in expected.groups if name.lower() in file.path.lower()]
        if len(expected.groups) == 1:
            inside = list(expected.groups)
        if len(inside) == 1:
            return expected.groups[inside[0]]
    return expected.classes


def look_like_classes(labels: LabelColumn, ignored: frozenset[int]) -> bool:
    """Returns whether labels are the numbers 0, 1, 2, ... of classes, leaving odd ones aside."""
    counts = labels.numbers(every=True)
    usual = sorted(value for value in counts if value >= 0 and value not in ignored)
    if len(usual) < 2 or labels.overflowed or len(usual) > FEW_CLASSES or usual[0] > 1:
        return False
    return 10 * len(usual) >= 9 * (usual[-1] + 1 - usual[0])  # they may be beyond any float


def features_of(file: DataFile) -> list[ColumnNumbers]:
    """Returns the columns of numbers that a record has one of each."""
    return [column for column in file.ledger.columns.values() if column.alone]


def usual_elsewhere(column: ColumnNumbers, columns: list[ColumnNumbers]) -> float | None:
    """Returns how large the numbers of the other columns usually are; None if there are none."""
    sizes = sorted(c.usual for c in columns if c is not column and c.usual > 0)
    return sizes[len(sizes) // 2] if sizes else None


def shown(value: float) -> str:
    """Returns a number as messages show it."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"


def records(count: int) -> str:
    """Returns a number of records in words."""
    return "1 record" if count == 1 else f"{count} records"


def values_told(labels: list[Label]) -> str:
    """Returns a few values in words: ``101, 102 and 7 more``."""
    values = list(dict.fromkeys(_told(label) for label in labels))
    more = len(values) - 4
    return ", ".join(values[:4]) + (f" and {more} more" if more > 0 else "")


def _told(label: Label) -> str:
    if label.kind == "text":
        return repr(label.value)
    whole = whole_number(label)
    return str(whole) if whole is not None and label.kind != "bool" else str(label.value)


def named(labels: LabelColumn, group: str | None) -> str:
    """Returns the column of labels, with the data set where there are several."""
    return labels.key if group is None else f"{labels.key} of {group}"


def each_group(
    source: DataSet,
) -> Iterator[tuple[DataFile, LabelColumn, str | None, list[Label], int | None]]:
    """Yields the labels of each file and data set that are classes, with how many these are."""
    for file, labels in source.labelled():
        if are_measured(source, labels):
            continue
        for group, values in by_group(labels).items():
            yield file, labels, group, values, classes_of(source, file, group)
