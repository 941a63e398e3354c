"""DAT002: a negative label that nobody declared as one to ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import merged, whole_number
from nanguard.check.data.data_rule import (
    DataRule,
    each_group,
    look_like_classes,
    named,
    records,
    values_told,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.columns import Label, LabelColumn
    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding


class NegativeLabel(DataRule):
    """A class label below zero.

    -100, which cross-entropy ignores, and values that a configuration declares (``ignore_index``)
    are no fault. Where the number of classes is not known, only a single negative value among
    labels that otherwise count 0, 1, 2, 3 is reported: -1 and 1, or -1, 0 and 1, are classes of
    their own to some losses.

    Why it breaks a run: a negative index is a device-side assert on CUDA, or it reads the logit of
    another class. Data sets use -1 for "no agreement" and for the hidden labels of a test part.

    Leave these records out, or declare the value as the one the loss ignores.
    """

    code = "DAT002"
    name = "negative-label"
    severity = Severity.ERROR
    seen_in = "https://github.com/huggingface/datasets/issues/296"
    examples = (
        Passes('{"label": -1}\n{"label": 1}\n{"label": 0}\n' * 4),
        Passes(
            '{"label": -1}\n{"label": 1}\n{"label": 0}\n{"label": 2}\n',
            beside={
                "config.yaml": "train_file: example.jsonl\nnum_classes: 3\nignore_index: -1\n"
                "lr: 1.0e-4\nepochs: 3\nbatch_size: 8\n"
            },
        ),
        Fails(
            '{"label": 0}\n{"label": 1}\n{"label": -1}\n{"label": 2}\n{"label": 3}\n' * 3, line=3
        ),
        Fails(
            '{"label": 0}\n{"label": -2}\n{"label": 1}\n',
            line=2,
            beside={"classes.txt": "cat\ndog\n"},
        ),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file and data set."""
        ignored = source.watch.ignored
        for file, labels, group, values, classes in each_group(source):
            below = [
                label
                for label in values
                if (number := whole_number(label)) is not None
                and number < 0
                and number not in ignored
            ]
            known = classes is not None and classes >= 2
            if not below or not (known or _certain(labels, below, ignored)):
                continue
            places = merged([labels.seen[label] for label in below])
            yield self.finding(
                f"{named(labels, group)} is {values_told(below)}: {records(places.count)}, "
                f"{places.in_words()}; no class has a negative number",
                path=file.path,
                line=places.line,
                where=named(labels, group),
                fixes=(
                    Fix("leave these records out"),
                    Fix(f"declare the value: ignore_index: {int(below[0].value)}"),
                ),
            )


def _certain(labels: LabelColumn, below: list[Label], ignored: frozenset[int]) -> bool:
    """Returns whether a negative value is no class although their number is not known."""
    counts = labels.numbers(every=True)
    usual = [value for value in counts if value >= 0]
    rare = sum(labels.seen[label].count for label in below) * 2 < labels.total
    return len(below) == 1 and len(usual) > 2 and rare and look_like_classes(labels, ignored)
