"""The rule that names the checkpoint to resume from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import HEALTHY, NAN, run_of
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.checkpoint import CheckpointRun


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
