"""Weights, their averages and the state of optimizers: not finite, or too large."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint, bad_scalars
from nanguard.check.checkpoint.checkpoint_rule import (
    INF,
    NAN,
    file_of,
    large_text,
    nonfinite_text,
    way_back,
)
from nanguard.check.checkpoint.tensor_roles import TensorRole
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Fix, Severity, name_of

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


class ExplodedWeight(Rule[Checkpoint]):
    """A weight is finite, but larger than any training leaves it: beyond a million.

    Why it breaks a run: the run diverged before the file was written. Activations and gradients are
    of the same size, and the next steps overflow.

    Go back to a checkpoint from before, with a lower learning rate or tighter clipping. Masks
    filled with a large number, counters, bounds and attributes of objects that are no modules, such
    as the running sums of a normaliser, are not reported.
    """

    code, name, severity = "CKP005", "exploded-weight", Severity.WARNING
    reads = "checkpoint"
    seen_in = "https://github.com/bigscience-workshop/petals/issues/283"
    examples = (
        Passes(
            "attn.masked_bias: -1e9; tokens_seen: 3e11",
            made=file_of({"attn.masked_bias": (-1e9, 0.0), "tokens_seen": (3e11,)}),
        ),
        Fails("head.bias: 9.4e18", made=file_of({"head.bias": (9.4e18, 0.1)})),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such weights."""
        for path, found in groupby(source.exploded(), key=lambda one: one[0].path):
            large = [tensor for _, tensor in found]
            yield self.finding(
                f"{large_text(large)}.",
                path=path,
                line=None,
                where=large[0].name,
                step=source.step,
                fixes=way_back(source),
            )
