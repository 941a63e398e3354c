"""The rule about checkpoints that are not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import HEALTHY, file_of, way_back
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _empty(folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"")


class TruncatedCheckpoint(Rule[Checkpoint]):
    """A checkpoint is not whole: cut off, damaged, or with a part that is missing.

    Why it breaks a run: the job was killed, or the disk was full, while the file was written. It
    has the right name and the newest date, so a restart picks it and fails, at a time when rotation
    has already deleted the one before.

    Write to a temporary name and rename, and keep the checkpoint before the newest.

    A pickle in which nothing is of torch, and which is not called a model, holds data as far as
    anything tells: it gets a remark. So does a pointer of Git LFS, which only has to be fetched.
    """

    code, name, severity = "CKP007", "truncated-checkpoint", Severity.ERROR
    reads = "checkpoint"
    seen_in = "https://github.com/open-mmlab/mmdetection/issues/4835"
    examples = (
        Passes("a whole file", made=file_of(HEALTHY)),
        Fails("a file without its last 4 bytes", made=file_of(HEALTHY, cut=4)),
        Fails("an empty file", made=_empty),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file that is not whole."""
        found: dict[str, list[str]] = {}
        for path, what in source.missing:
            found.setdefault(path, []).append(what)
        for part in source.parts:
            for what in part.damage:
                found.setdefault(part.path, []).append(what)
        data = {part.path for part in source.parts if part.is_data}
        aside = data | {part.path for part in source.parts if part.is_pointer}
        for path, reasons in found.items():
            more = f" ({len(reasons) - 1:,} more)" if len(reasons) > 1 else ""
            what = "pickle" if path in data else "checkpoint"
            yield self.finding(
                f"The {what} is not whole: {reasons[0]}{more}.",
                path=path,
                line=None,
                severity=Severity.INFO if path in aside else None,
                step=source.step,
                fixes=way_back(source),
            )
