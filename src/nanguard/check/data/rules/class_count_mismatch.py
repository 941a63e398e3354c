"""DAT011: labels that use fewer classes than there are said to be, or lists that disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.columns import whole_number
from nanguard.check.data.data_rule import DataRule, classes_of, each_group
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

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
