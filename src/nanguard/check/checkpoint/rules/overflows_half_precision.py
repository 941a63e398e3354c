"""The rule about weights that fp16 cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import file_of, large_text
from nanguard.check.checkpoint.tensor_roles import TensorRole
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator


class OverflowsHalfPrecision(Rule[Checkpoint]):
    """A weight is finite, but larger than the largest number of fp16, 65504.

    Why it breaks a run: ``model.half()``, fp16 autocast and every conversion for inference turn it
    into Inf, without a word, and the first layer behind it gives NaN.

    Keep the layer in fp32 or bf16, or find out why it grew. Masks, counters, statistics that are
    kept in fp32 anyway and attributes of objects such as a normaliser are not reported. Beyond a
    million, `exploded-weight` speaks instead.
    """

    code, name, severity = "CKP004", "overflows-half-precision", Severity.WARNING
    reads = "checkpoint"
    seen_in = "https://github.com/mahmoodlab/UNI/issues/18"
    examples = (
        Passes(
            "head.weight: 65504; norm.running_var: 72000",
            made=file_of({"head.weight": (65504.0,), "norm.running_var": (72000.0,)}),
        ),
        Fails("head.weight: 72000", made=file_of({"head.weight": (0.1, 72000.0)})),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such weights."""
        for part in source.parts:
            large = [
                tensor
                for tensor in part.tensors
                if tensor.role in (TensorRole.WEIGHT, TensorRole.EMA)
                and tensor.numbers.beyond
                and not tensor.poisoned
                and not tensor.large_meant
                and not tensor.exploded
            ]
            if large:
                yield self.finding(
                    f"{large_text(large)}.",
                    path=part.path,
                    line=None,
                    where=large[0].name,
                    step=source.step,
                    fixes=(Fix("Keep these layers in fp32 or bf16, or find out why they grew."),),
                )
