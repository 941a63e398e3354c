"""CFG012: an eps that half precision cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.config.run_config import kind_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Finding

_ZERO_IN_FP16 = 2.0**-25  # rounds to 0; the smallest fp16 number is 2 ** -24
_IDLE = 5e-10  # far below what an unscaled fp16 gradient can be


class AdamEpsTooSmall(ConfigRule):
    """Adam's eps too small for fp16.

    Why it breaks a run: where weights and moments are fp16, an eps below 3e-8 is 0, and the first
    weight whose gradient is 0 gets 0 / 0. With fp32 weights an eps far below 1e-8 still turns the
    noise of an underflowing fp16 gradient into a step of full length.

    Use 1e-4 to 1e-6 where everything is fp16; leave 1e-8 where the weights are fp32. bf16 has the
    range of fp32 and is not concerned.
    """

    code = "CFG012"
    name = "adam-eps-too-small"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/pytorch/pytorch/issues/26218"
    examples = (
        Passes("adam: {lr: 3.0e-4, eps: 1.0e-10}\nepochs: 9\ndtype: bf16\n", "a.yaml"),
        Passes(
            "optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-8}\nepochs: 9\nfp16: true\n", "b.yaml"
        ),
        Fails(
            "optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-10}\nepochs: 9\nparam_dtype: float16\n",
            line=1,
            file="a.yaml",
            fixed="optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-4}\nepochs: 9\n"
            "param_dtype: float16\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where eps cannot do its work."""
        eps = stage.get("eps")
        if eps is None or eps.number is None or eps.number < 0:
            return
        if kind_of(stage.optimizer) not in ("adam", "lamb", "galore", "rmsprop"):
            return
        if stage.precision.half != "fp16" or "field" in stage.traits:
            return
        pure = stage.precision.pure
        if eps.number > (_ZERO_IN_FP16 if pure else _IDLE):
            return
        right = 1e-4 if pure else 1e-8
        why = "is 0 in fp16" if pure else "protects nothing where gradients are computed in fp16"
        yield self.at(
            eps,
            f"{eps.key} is {eps.written}, which {why}",
            change(
                f"use {name_of(right)}",
                set_to(eps, right),
                "Keep the weights in fp32 (mixed precision) to go back to 1e-8.",
            ),
        )
