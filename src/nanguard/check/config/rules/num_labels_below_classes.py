"""CFG014: a head with fewer outputs than there are classes."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.keys import role
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import RunConfig, Setting, TrainingStage
    from nanguard.findings import Finding

_CLASS = re.compile(r"[0-9]{1,9}")  # the number of a class, as a key


class NumLabelsBelowClasses(ConfigRule):
    """A classifier with fewer outputs than a data set it is trained on has classes.

    Why it breaks a run: the first label beyond the last output reads memory that is not its own
    (a device-side assert on CUDA), or, where a mask or a clamp hides it, gives an infinite loss or
    trains the wrong class.

    Give the head as many outputs as the largest label needs. One output with a sigmoid, for two
    classes, is not concerned.
    """

    code = "CFG014"
    name = "num-labels-below-classes"
    severity = Severity.ERROR
    needs_reader = True
    seen_in = "https://github.com/tensorpack/tensorpack/issues/1296"
    examples = (
        Passes("model: {num_labels: 1}\ndata: {num_classes: 2}\nlr: 1.0e-4\nepochs: 3\n", "a.yaml"),
        Passes(
            "model: {num_labels: 91}\ndata: {num_classes: 80}\nlr: 1.0e-4\nepochs: 3\n", "b.yaml"
        ),
        Fails(
            "model: {num_labels: 100}\ndata: {num_classes: 101}\nlr: 1.0e-4\nepochs: 3\n",
            line=1,
            file="a.yaml",
            fixed="model: {num_labels: 101}\ndata: {num_classes: 101}\nlr: 1.0e-4\nepochs: 3\n",
        ),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with each part, and where a list of names is longer."""
        yield from super().look(source)
        for stage in source.stages:
            yield from self._named(stage, source)

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for a head that is too small for a data set."""
        counts = [s for s in stage.all("num_labels") if role(s.sections) == "data" and s.number]
        heads = [s for s in stage.all("num_labels") if role(s.sections) != "data"]
        for head in heads:
            own = [s for s in counts if s.sections[-1:] == head.sections[-1:]]
            if len(heads) == 1 or own or head is _head(stage):
                yield from self._largest(head, own or counts)

    def _largest(self, head: Setting, counts: list[Setting]) -> Iterator[Finding]:
        if counts:
            largest = max(counts, key=lambda s: s.number or 0.0)
            said = f"{largest.key} = {largest.written}"
            number = largest.number or 0.0
            if math.isfinite(number):
                yield from self._compare(head, int(number), said)

    def _named(self, stage: TrainingStage, source: RunConfig) -> Iterator[Finding]:
        head = _head(stage)
        for setting in stage.all("label_names"):
            if head is not None and isinstance(setting.value, list) and len(setting.value) > 1:
                count = len(setting.value)
                yield from self._compare(head, count, f"{setting.key} names {count} classes")
        mapped = [
            leaf for leaf in source.leaves if leaf.sections[-1:] in (("names",), ("id2label",))
        ]
        if (
            head is not None
            and len(mapped) > 1
            and all(_CLASS.fullmatch(leaf.key) for leaf in mapped)
        ):
            top = 1 + max(int(leaf.key) for leaf in mapped)
            yield from self._compare(
                head, top, f"{'.'.join(mapped[0].path[:-1])} names {top} classes"
            )

    def _compare(self, head: Setting, count: int, said: str) -> Iterator[Finding]:
        if head.number is not None and 1 < head.number < count:
            yield self.at(
                head,
                f"{head.key} is {head.written}, but {said}: labels from {head.written} on have no "
                "output",
                change(
                    f"give the model {count} outputs",
                    set_to(head, count),
                    "Scan the labels of every data set: the largest has to be below this number.",
                    "A checkpoint with the old head cannot be loaded into the new one.",
                ),
            )


def _head(stage: TrainingStage) -> Setting | None:
    """Returns the number of the model's outputs; None if there are several heads that differ."""
    found = [s for s in stage.all("num_labels") if role(s.sections) != "data"]
    if len({s.number for s in found}) > 1:
        return None
    return min(found, key=lambda s: role(s.sections) != "model", default=None)
