"""DAT001: a label that no output of the model stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import merged, whole_number
from nanguard.check.data.data_rule import DataRule, each_group, named, records, values_told
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding


class LabelOutOfRange(DataRule):
    """A label that is not below the number of classes.

    The number of classes comes from ``--classes``, ``--group``, from a configuration that points to
    the data, or from a list of names beside it. Where it is not known, this rule is silent.

    Why it breaks a run: cross-entropy reads the logit of the label. On CUDA a label beyond the last
    one is a device-side assert; with class masks, the masked logit makes the loss infinite; where
    labels are clamped, the wrong class is trained in silence.

    Count classes from 0, give the head one output for each, and repair the records that are named.
    """

    code = "DAT001"
    name = "label-out-of-range"
    severity = Severity.ERROR
    seen_in = "https://github.com/pytorch/pytorch/issues/15666"
    examples = (
        Passes('{"text": "a", "label": 7}\n{"text": "b", "label": 0}\n'),
        Passes(
            '{"text": "a", "label": 2}\n{"text": "b", "label": -100}\n',
            beside={"classes.txt": "cat\ndog\nowl\n"},
        ),
        Fails(
            '{"text": "a", "label": 2}\n{"text": "b", "label": 3}\n',
            line=2,
            beside={"classes.txt": "cat\ndog\nowl\n"},
        ),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file and data set."""
        ignored = source.watch.ignored
        for file, labels, group, values, classes in each_group(source):
            if classes is None or classes < 2:
                continue
            whole = {
                label: number for label in values if (number := whole_number(label)) is not None
            }
            beyond = sorted(
                (label for label, number in whole.items() if number >= classes),
                key=lambda label: whole[label],
            )
            beyond = [label for label in beyond if whole[label] not in ignored]
            if not beyond:
                continue
            places = merged([labels.seen[label] for label in beyond])
            message = (
                f"{named(labels, group)} is {values_told(beyond)}, but of {classes} classes "
                f"labels run from 0 to {classes - 1}; {records(places.count)}, {places.in_words()}"
            )
            fixes = (Fix(f"repair the labels, or give the model {whole[beyond[-1]] + 1} outputs"),)
            low = min(number for number in whole.values() if number not in ignored)
            if low == 1 and whole[beyond[-1]] == classes:
                message += f". The labels run from 1 to {classes}: they are counted from 1"
                fixes = (Fix("subtract 1 from every label"),)
            yield self.finding(
                message,
                path=file.path,
                line=places.line,
                where=named(labels, group),
                fixes=fixes,
            )
