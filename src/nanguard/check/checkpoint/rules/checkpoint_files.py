"""Files of checkpoints: not whole, in need of code, and the one to go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import (
    HEALTHY,
    NAN,
    file_of,
    pickle_of,
    run_of,
    way_back,
)
from nanguard.check.checkpoint.torch_file import plain_data, runs_code
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.checkpoint.checkpoint import CheckpointFile, CheckpointRun

NAMED = 5
_PUBLISH = Fix("Save the tensors alone: torch.save(model.state_dict(), ...) or safetensors.")


class UnsafePickle(Rule[Checkpoint]):
    """A checkpoint needs more to be loaded than ``torch.load(..., weights_only=True)`` allows.

    The file is never loaded to find out; only the names it asks for are read.

    Why it breaks a run: a pickle can call any function while it is loaded, with the rights of
    whoever loads it. Also where nobody means harm, the file breaks as soon as the class it asks for
    is renamed, and ``torch.load`` refuses it by default.

    Publish tensors alone: a ``state_dict`` of plain tensors, or safetensors.
    """

    code, name, severity = "CKP006", "unsafe-pickle", Severity.WARNING
    reads = "checkpoint"
    seen_in = "https://github.com/pytorch/pytorch/issues/52596"
    examples = (
        Passes("head.weight: 0.1", made=file_of({"head.weight": (0.1,)})),
        Passes("an OrderedDict, which torch allows", made=pickle_of("collections.OrderedDict")),
        Fails("calls os.system", made=pickle_of("os.system")),
        Fails("an object of models.Net", made=pickle_of("models.Net")),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file that needs code."""
        for part in source.parts:
            if part.needs:
                yield self._told(part, source)

    def _told(self, part: CheckpointFile, source: Checkpoint) -> Finding:
        code = [name for name in part.needs if runs_code(name)]
        names = ", ".join(part.needs[:NAMED]) + (", ..." if len(part.needs) > NAMED else "")
        if code:
            said = f"Loading it calls {code[0]}, which can do anything; do not load it"
            severity, fix = Severity.ERROR, Fix("Delete the file, or load it in a sandbox only.")
        elif all(map(plain_data, part.needs)):
            said = (
                f"It holds more than tensors, which torch refuses with weights_only=True: {names}"
            )
            severity, fix = Severity.INFO, _PUBLISH
        else:
            said = f"Loading it needs code, which torch refuses with weights_only=True: {names}"
            # A pickle that is no checkpoint is loaded by whoever wrote it.
            severity, fix = Severity.INFO if part.is_data else self.severity, _PUBLISH
        return self.finding(
            f"{said}. It was not loaded.",
            path=part.path,
            line=None,
            where=(code or part.needs)[0],
            severity=severity,
            step=source.step,
            fixes=(fix,),
        )


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


class LastGoodCheckpoint(Rule[Checkpoint]):
    """Some checkpoints of a run are bad; this is the newest that is not.

    Why it breaks a run: resuming from the newest file brings the bad numbers back. Rotation keeps
    the newest files, which are the bad ones, and deletes this one next.

    Copy it to where nothing deletes it, and resume from it.
    """

    code, name, severity = "CKP008", "last-good-checkpoint", Severity.INFO
    reads = "checkpoint"
    seen_in = "https://github.com/kyutai-labs/pocket-tts/pull/262"
    examples = (
        Passes("100 good, 200 good", made=run_of(HEALTHY, HEALTHY)),
        Fails("100 good, 200 nan", made=run_of(HEALTHY, {"head.weight": (NAN,)})),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for the checkpoint that is the last good one of a run with bad ones."""
        run = source.run
        if run is None or not run.bad or run.last_good is not source:
            return
        yield self.finding(
            _told(run, source),
            path=source.path,
            line=None,
            where=source.name,
            step=source.step,
            fixes=(Fix(_resume(source)), Fix("Copy it to where rotation does not delete it.")),
        )


def _told(run: CheckpointRun, good: Checkpoint) -> str:
    total, bad = len(run.checkpoints), len(run.bad)
    said = f"{_named(good)} is the last good checkpoint: {bad} of {total} are bad"
    first = run.first_bad
    if first is not None:
        said += f", from {_named(first)} on"
    unread = sum(not one.scanned for one in run.checkpoints)
    if unread:
        said += f"; the numbers of {unread} were not read"
    return f"{said}."


def _named(one: Checkpoint) -> str:
    return one.name if one.step is None else f"{one.name} (step {one.step})"


def _resume(good: Checkpoint) -> str:
    """Returns how to resume, in the words of what wrote the checkpoint."""
    if good.name.startswith("checkpoint-"):
        return f"Resume from it: trainer.train(resume_from_checkpoint={good.path!r})"
    if good.name.startswith("global_step"):
        return f"Resume from it: engine.load_checkpoint(..., tag={good.name!r})"
    if good.name.endswith(".ckpt"):
        return f"Resume from it: trainer.fit(..., ckpt_path={good.path!r})"
    return f"Resume from it: {good.path}"
