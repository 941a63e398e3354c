"""DAT010: data without a record, or a file that is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding

_CONFIG = (
    "data: {train_file: example.jsonl, val_file: val.jsonl}\n"
    "training: {lr: 1.0e-4, max_steps: 100, batch_size: 8}\n"
)


class EmptyDataset(DataRule):
    """A file with nothing in it, a table with nothing but a header, or a file that is missing.

    A file that a configuration names and that is not there is reported where other files that it
    names are there: then it was meant to be.

    Why it breaks a run: the mean over no batches is NaN, and so is a validation loss over an empty
    loader; divisions by ``len(loader)`` fail at the end of the first epoch.

    Write the file again, or correct the path.
    """

    code = "DAT010"
    name = "empty-dataset"
    severity = Severity.ERROR
    seen_in = "https://github.com/Project-MONAI/research-contributions/issues/181"
    examples = (
        Passes("a,b,label\n0.1,0.2,1\n", "example.csv"),
        Fails("a,b,label\n", file="example.csv"),
        Fails("\n"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each file."""
        for file in source.files:
            tried = file.broken is None and file.error is None
            if tried and not file.ledger.records and not file.ledger.unreadable.count:
                yield self.finding(
                    "there is no record in it",
                    path=file.path,
                    line=None,
                    fixes=(Fix("write the file again"),),
                )
        for missing in source.request.missing:
            what = "which has nothing in it" if missing.empty else "which is not there"
            yield self.finding(
                f"{missing.key} names {missing.written}, {what}",
                path=missing.config,
                line=missing.line,
                where=missing.key,
                fixes=(Fix("correct the path; it counts from the folder of this file"),),
            )
        if not source.files and not source.request.missing:
            yield self.finding("there is no file with data in it", path=source.path, line=None)
