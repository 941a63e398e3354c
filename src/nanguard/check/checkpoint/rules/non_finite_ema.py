"""The rule about averages of weights that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import NAN, file_of, nonfinite_text, way_back
from nanguard.check.checkpoint.tensor_roles import TensorRole
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator


class NonFiniteEma(Rule[Checkpoint]):
    """A running average of the weights holds NaN or Inf.

    Why it breaks a run: one bad step is enough, and the average keeps it for good, even where the
    weights themselves were repaired. Training looks healthy; evaluation and the published model,
    which use the average, are lost.

    Resume from the last good checkpoint, or begin the average again from the weights.
    """

    code, name, severity = "CKP003", "non-finite-ema", Severity.ERROR
    reads = "checkpoint"
    seen_in = "https://github.com/ultralytics/ultralytics/issues/23327"
    examples = (
        Passes(
            "ema_model.head.weight: 0.1; schema.weight: 0.2",
            made=file_of({"ema_model.head.weight": (0.1,), "schema.weight": (0.2,)}),
        ),
        Fails(
            "ema_model.head.weight: nan",
            made=file_of({"ema_model.head.weight": (NAN,), "model.head.weight": (0.1,)}),
        ),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such an average."""
        for part in source.parts:
            bad = [tensor for tensor in part.poisoned if tensor.role is TensorRole.EMA]
            if bad:
                again = Fix("Begin the average again from the weights, where these are finite.")
                yield self.finding(
                    f"{nonfinite_text(bad)}.",
                    path=part.path,
                    line=None,
                    where=bad[0].name,
                    step=source.step,
                    fixes=(*way_back(source), again),
                )
