"""DAT003: a class label that is no whole number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import Label, LabelColumn, merged, whole_number
from nanguard.check.data.data_rule import (
    DataRule,
    are_measured,
    classes_of,
    look_like_classes,
    records,
    values_told,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

_TEXT_SHARE = 0.1  # texts among whole numbers are a slip up to this share
_FRACTION_SHARE = 0.02  # and fractions, which may be ratings, up to this one


class NonIntegerLabel(DataRule):
    """A fraction, a text or an infinity among labels that are class numbers.

    Columns of nothing but names, of ``3.0`` instead of ``3``, and of measurements are no fault.

    Why it breaks a run: a fraction is cut to the class below it in silence, or turns the whole
    batch of labels into floating point, which cross-entropy refuses or takes for probabilities. A
    text among numbers stops the loader hours into an epoch.

    Repair the records that are named; for measurements, say so (``problem_type: regression``).
    """

    code = "DAT003"
    name = "non-integer-label"
    severity = Severity.ERROR
    seen_in = "https://github.com/ahmedbesbes/character-based-cnn/issues/5"
    examples = (
        Passes('{"label": 0.5}\n{"label": 3.25}\n{"label": 2}\n{"label": 4.5}\n'),
        Passes('{"label": "cat"}\n{"label": "dog"}\n'),
        Passes('{"label": 1.0}\n{"label": 0.0}\n', beside={"classes.txt": "cat\ndog\n"}),
        Fails(
            '{"label": 0}\n{"label": 0.7}\n{"label": 1}\n',
            line=2,
            beside={"classes.txt": "cat\ndog\n"},
        ),
        Fails('{"label": 0}\n{"label": 1}\n{"label": 2}\n' * 5 + '{"label": "2"}\n', line=16),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        for file, labels in source.labelled():
            if labels.many or are_measured(source, labels):
                continue
            wrong = [label for label in labels.seen if whole_number(label) is None]
            groups = [labels.seen[label] for label in wrong]
            odd = [places for places in (labels.infinite, labels.odd) if places.count]
            texts = sum(labels.seen[label].count for label in wrong if label.kind == "text")
            if texts * 2 > labels.total:
                groups, wrong = [], []
            if not (groups or odd) or not self._certain(source, file, labels, wrong):
                continue
            places = merged([*groups, *odd])
            values = values_told(wrong) or ", ".join(place.value for place in places.first)
            yield self.finding(
                f"{labels.key} is {values}, not a class number: {records(places.count)}, "
                f"{places.in_words()}",
                path=file.path,
                line=places.line,
                where=labels.key,
                fixes=(Fix("repair these labels, or leave the records out"),),
            )

    def _certain(
        self, source: DataSet, file: DataFile, labels: LabelColumn, wrong: list[Label]
    ) -> bool:
        """Returns whether labels are class numbers, so that anything else is a fault."""
        groups = {label.group for label in labels.seen}
        if any((classes_of(source, file, group) or 0) >= 2 for group in groups):
            return True
        count = sum(labels.seen[label].count for label in wrong)
        share = _TEXT_SHARE if all(label.kind == "text" for label in wrong) else _FRACTION_SHARE
        return (
            count <= share * labels.total
            and labels.total >= 10
            and look_like_classes(labels, source.watch.ignored)
        )
