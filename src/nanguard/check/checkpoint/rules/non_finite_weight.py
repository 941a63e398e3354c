"""The rule about weights that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import INF, NAN, file_of, nonfinite_text, way_back
from nanguard.check.checkpoint.tensor_roles import TensorRole
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator


class NonFiniteWeight(Rule[Checkpoint]):
    """A parameter or buffer of a model holds NaN or Inf.

    Why it breaks a run: every forward pass through such a weight gives NaN, whatever the input, and
    no gradient step can repair it. A run that is resumed from the file is lost from its first step,
    and rotation soon deletes the older files that were good.

    Infinities that are meant are not reported: attention masks, bounds that nothing has reached
    yet, noise schedules. Resume from the last good checkpoint instead.
    """

    code, name, severity = "CKP001", "non-finite-weight", Severity.ERROR
    reads = "checkpoint"
    seen_in = "https://github.com/ultralytics/ultralytics/issues/23327"
    examples = (
        Passes(
            "causal_mask: -inf above the diagonal",
            made=file_of({"causal_mask": (0.0, -INF), "head.weight": (0.1,)}),
        ),
        Fails("head.weight: 0.1, nan", made=file_of({"head.weight": (0.1, NAN)})),
        Fails("norm.running_var: inf", made=file_of({"norm.running_var": (1.0, INF)})),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such weights."""
        for part in source.parts:
            bad = [tensor for tensor in part.poisoned if tensor.role is TensorRole.WEIGHT]
            if bad:
                yield self.finding(
                    f"{nonfinite_text(bad)}.",
                    path=part.path,
                    line=None,
                    where=bad[0].name,
                    step=source.step,
                    fixes=way_back(source),
                )
