"""Labels of classes: out of range, negative, no whole numbers, or of another count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import Label, LabelColumn, merged, whole_number
from nanguard.check.data.data_rule import (
    DataRule,
    are_measured,
    classes_of,
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

    from nanguard.check.data.dataset import DataFile, DataSet
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


_DENSE = 0.9
_PER_CLASS = 4  # records for each class that is used, on average


class ClassCountMismatch(DataRule):
    """A number of classes that the labels contradict.

    Reported where the labels fill 0 to n without gaps, each class often enough that no further one
    is to be expected, and more classes than that are declared; where names are more classes than
    are declared; and where a list of names has another length than the number that is declared.
    All files of a run count together.

    Why it breaks a run: outputs that no label ever stands for are driven to minus infinity, a mask
    over the wrong number of classes hides real ones, and a label map that is one off trains every
    class as its neighbour.

    Set the number of classes to what the data has, or find the records that are missing.
    """

    code = "DAT011"
    name = "class-count-mismatch"
    severity = Severity.WARNING
    seen_in = "https://github.com/NRCan/geo-deep-learning/issues/57"
    examples = (
        Passes('{"label": 0}\n{"label": 1}\n' * 3, beside={"classes.txt": "cat\ndog\nowl\n"}),
        Passes('{"label": 0}\n{"label": 1}\n' * 9, beside={"classes.txt": "cat\ndog\n"}),
        Fails('{"label": 0}\n{"label": 1}\n' * 40, beside={"classes.txt": "a\nb\nc\nd\ne\n"}),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each data set that records name."""
        counts: dict[str | None, dict[int | str, int]] = {}
        files: dict[str | None, tuple[DataFile, int]] = {}
        wrong: set[str | None] = set()
        ignored = source.watch.ignored
        for file, labels, group, values, classes in each_group(source):
            if classes is None or classes < 2 or labels.overflowed or labels.many:
                continue
            files.setdefault(group, (file, classes))
            mine = counts.setdefault(group, {})
            for label in values:
                number = whole_number(label)
                key: int | str = str(label.value) if number is None else number
                if number is not None and (number < 0 or number >= classes):
                    if number not in ignored:
                        wrong.add(group)
                    continue
                mine[key] = mine.get(key, 0) + labels.seen[label].count
        for group, mine in counts.items():
            file, classes = files[group]
            message = None if group in wrong else _contradiction(mine, classes)
            if message is not None:
                name = f"{group}: " if group is not None else ""
                yield self.finding(
                    f"{name}{message}",
                    path=file.path,
                    line=None,
                    where=group,
                    fixes=(Fix("set the number of classes to what the data has"),),
                )
        yield from self._names(source)

    def _names(self, source: DataSet) -> Iterator[Finding]:
        request = source.request
        if request.named is None or not source.files or request.expected.groups:
            return
        classes = classes_of(source, source.files[0], None)
        if classes is not None and classes >= 2 and classes != request.named:
            yield self.finding(
                f"{request.names} names {request.named} classes, and there are to be {classes}",
                path=source.path,
                line=None,
                fixes=(Fix("make the list of names and the number of classes agree"),),
            )


def _contradiction(counts: dict[int | str, int], classes: int) -> str | None:
    """Returns how labels contradict a number of classes; None if they do not."""
    names = [value for value in counts if isinstance(value, str)]
    total = sum(counts.values())
    if names:
        if len(names) == len(counts) and len(names) > classes:
            return f"labels have {len(names)} names, and there are to be {classes} classes"
        return None
    used = sorted(value for value in counts if isinstance(value, int))
    if not used or used[-1] + 1 >= classes or len(used) < _DENSE * (used[-1] + 1):
        return None
    if total < _PER_CLASS * len(used) or not _complete(list(counts.values()), classes, len(used)):
        return None
    return (
        f"there are to be {classes} classes, but {total} labels use only {len(used)} of them, "
        f"0 to {used[-1]}"
    )


def _complete(counts: list[int], classes: int, used: int) -> bool:
    """Returns whether classes that were not seen are absent rather than rare.

    Where rare classes are still to come, some were seen once (Chao's estimate); and were all
    classes alike, so many labels would not have missed the others.
    """
    once, twice = counts.count(1), counts.count(2)
    unseen = once * (once - 1) / (2 * (twice + 1))
    by_chance = (used / classes) ** sum(counts)
    return unseen < 0.5 * (classes - used) and by_chance < 1e-6
