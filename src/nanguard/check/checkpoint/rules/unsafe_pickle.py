"""The rule about pickles that need code to be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import file_of, pickle_of
from nanguard.check.checkpoint.torch_file import plain_data, runs_code
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.checkpoint.checkpoint import CheckpointFile

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
