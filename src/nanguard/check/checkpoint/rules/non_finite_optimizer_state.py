"""The rule about the state of optimizers and loss scalers that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint, bad_scalars
from nanguard.check.checkpoint.checkpoint_rule import NAN, file_of, nonfinite_text, way_back
from nanguard.check.checkpoint.tensor_roles import TensorRole
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_STATE = (TensorRole.OPTIMIZER, TensorRole.SCALER)


class NonFiniteOptimizerState(Rule[Checkpoint]):
    """A moment of an optimizer, or the scale of a loss scaler, is NaN or Inf.

    Why it breaks a run: the weights may still be finite, so that the file looks good, but the first
    step after resuming adds the moment to them. An average never forgets a NaN.

    Resume from the last good checkpoint, or load the weights and start the optimizer afresh.
    """

    code, name, severity = "CKP002", "non-finite-optimizer-state", Severity.ERROR
    reads = "checkpoint"
    seen_in = "https://github.com/ultralytics/ultralytics/issues/24615"
    examples = (
        Passes(
            "optimizer.state.0.exp_avg: 0.1",
            made=file_of({"optimizer.state.0.exp_avg": (0.1,)}),
        ),
        Fails(
            "optimizer.state.0.exp_avg: 0.1, nan",
            made=file_of({"optimizer.state.0.exp_avg": (0.1, NAN), "head.weight": (0.1,)}),
        ),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such a state."""
        for part in source.parts:
            bad = [tensor for tensor in part.poisoned if tensor.role in _STATE]
            scalars = bad_scalars(part)
            if bad:
                where, said = bad[0].name, nonfinite_text(bad)
            elif scalars:
                where, value = scalars[0]
                said = f"{where} is {name_of(value)}"
            else:
                continue
            afresh = Fix("Load the weights alone and start the optimizer afresh.")
            fixes = way_back(source)
            yield self.finding(
                f"{said}.",
                path=part.path,
                line=None,
                where=where,
                step=source.step,
                fixes=(*fixes, afresh),
            )
