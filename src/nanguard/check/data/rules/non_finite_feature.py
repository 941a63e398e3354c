"""DAT005: NaN or Inf among the numbers a model is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule, are_measured
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

_MAX_NAMED = 5


def _poisoned(folder: Path) -> None:
    import numpy as np

    rows = np.ones((8, 2), dtype="float32")
    rows[3, 1] = np.inf
    np.savez(folder / "train.npz", X=rows, y=np.arange(8) % 2)


class NonFiniteFeature(DataRule):
    """A feature that is NaN, Inf or -Inf.

    Every number is looked at, in text as in arrays. Empty cells are no numbers and not reported;
    masks, where -Inf is meant, are left out.

    Why it breaks a run: one such number makes the loss of its batch NaN, and the gradient of that
    loss every weight. It comes once in an epoch, so the run dies late and the batch is gone.

    Repair the records that are named, or leave them out when loading: ``isfinite(x).all()``.
    """

    code = "DAT005"
    name = "non-finite-feature"
    severity = Severity.ERROR
    seen_in = "https://github.com/prs-eth/Marigold/issues/111"
    examples = (
        Passes("name,b,label\nnan,0.2,1\ninfo,0.1,0\n", "example.csv"),
        Fails("a,b,label\n0.1,0.2,1\n0.3,inf,0\n", line=3, file="example.csv"),
        Fails('{"x": [0.5, 1.5], "label": 1}\n{"x": [NaN, 0.5], "label": 0}\n', line=2),
        Fails("an array X with one Inf", made=_poisoned),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            bad = [column for column in file.ledger.columns.values() if column.bad.count]
            for column in bad[:_MAX_NAMED]:
                kinds = sorted({place.value for place in column.bad.first})
                more = len(bad) - _MAX_NAMED
                rest = f"; {more} more columns" if more > 0 and column is bad[0] else ""
                yield self.finding(
                    f"{column.name} is {', '.join(kinds)}: {column.bad.count} of {column.count} "
                    f"values, {column.bad.in_words()}{rest}",
                    path=file.path,
                    line=column.bad.line,
                    where=column.name,
                    fixes=(Fix("leave these records out, or repair them"),),
                )
            yield from self._targets(source, file)

    def _targets(self, source: DataSet, file: DataFile) -> Iterator[Finding]:
        """Yields a finding about measurements to be learned that are infinite."""
        labels = file.ledger.labels
        if labels is not None and labels.infinite.count and are_measured(source, labels):
            yield self.finding(
                f"{labels.key} is infinite: {labels.infinite.count} of {labels.total} values, "
                f"{labels.infinite.in_words()}",
                path=file.path,
                line=labels.infinite.line,
                where=labels.key,
            )
